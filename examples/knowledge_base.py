"""Upload documents to `kvweave serve`, search them, and ask; see what was not computed again.

kvweave serve --kb-root ./kbs          # in another terminal
pip install openai
python examples/knowledge_base.py      # [--base-url http://127.0.0.1:8321/v1]
"""

import argparse

from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--base-url", default="http://127.0.0.1:8321/v1")
parser.add_argument("--api-key", default="none")
parser.add_argument("--max-tokens", type=int, default=48)
args = parser.parse_args()

NOTES = {
    "Drain a node": "To drain a node, cordon it first, then evict its pods with kubectl drain.",
    "Quotas": "A resource quota limits the pods and volumes that a namespace may hold.",
    "Zorbs": "A zorb is a small round tool. It is 14 cm wide and weighs 300 grams.",
}

client = OpenAI(base_url=args.base_url, api_key=args.api_key)
for title, text in NOTES.items():
    # the reply could come before the chunk KV; here the answer below is to reuse it
    report = client.post(
        "/kb/notes/documents?wait_for_kv=true", cast_to=object, body={"title": title, "text": text}
    )
    print(f"{title}: {report['new_chunks']} new chunks")

query = {"query": "How wide is a zorb?", "k": 2}
for hit in client.post("/kb/notes/search", cast_to=object, body=query)["data"]:
    print(f"found: {hit['title']} ({hit['score']:.2f})")

reply = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "How wide is a zorb?"}],
    temperature=0,
    max_tokens=args.max_tokens,
    extra_body={"kb": "notes", "k": 2, "reuse": "reuse", "explain": True},
)
print("answer:", reply.choices[0].message.content)
told = reply.explain
print("tokens by source:", told["tokens"])
print(f"first token after {told['timeline_ms']['first_token']:.0f} ms")
