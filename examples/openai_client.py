"""Talk to `kvweave serve` with the official client: a reply, a stream, and our own documents.

kvweave serve                          # in another terminal
pip install openai
python examples/openai_client.py       # [--base-url http://127.0.0.1:8321/v1]
"""

import argparse

from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--base-url", default="http://127.0.0.1:8321/v1")
parser.add_argument("--max-tokens", type=int, default=48)
args = parser.parse_args()

client = OpenAI(base_url=args.base_url, api_key="none")
model = client.models.list().data[0].id
print(f"serving {model}\n")

reply = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is the chemical symbol for water?"}],
    temperature=0,
    max_tokens=args.max_tokens,
)
print("reply:", reply.choices[0].message.content)

print("stream: ", end="")
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Name three colours."}],
    temperature=0.7,
    seed=1,
    max_tokens=args.max_tokens,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    elif chunk.usage:
        print(f"\n({chunk.usage.completion_tokens} tokens)")

# `documents` is kvweave's own field: the passages stand in front of the question.
reply = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "How wide is the zorb?"}],
    temperature=0,
    max_tokens=args.max_tokens,
    extra_body={
        "documents": [
            {"title": "zorbs", "text": "A zorb is a small disc. It is 14 cm wide."},
            "Nodes are drained before they are restarted.",
        ]
    },
)
print("from documents:", reply.choices[0].message.content)
