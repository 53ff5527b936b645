"""LangChain over `kvweave serve`: a reply, a stream, and an answer from given documents.

kvweave serve                          # in another terminal
pip install langchain-openai
python examples/langchain_chat.py      # [--base-url http://127.0.0.1:8321/v1] [--model NAME]
"""

import argparse

from langchain_openai import ChatOpenAI

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--base-url", default="http://127.0.0.1:8321/v1")
parser.add_argument("--model", default="qwen2.5-coder-0.5b")
parser.add_argument("--max-tokens", type=int, default=48)
args = parser.parse_args()

llm = ChatOpenAI(
    base_url=args.base_url,
    api_key="none",
    model=args.model,
    temperature=0,
    max_tokens=args.max_tokens,
)

reply = llm.invoke("What is the capital of France?")
print("reply:", reply.content)
print("tokens:", reply.usage_metadata["input_tokens"], "+", reply.usage_metadata["output_tokens"])

print("stream: ", end="")
for chunk in llm.stream("Name three colours."):
    print(chunk.content, end="", flush=True)
print()

# kvweave's own fields go into extra_body: documents here, or "kb": "NAME" to retrieve.
zorbs = llm.bind(extra_body={"documents": [{"title": "zorbs", "text": "A zorb is 14 cm wide."}]})
print("from documents:", zorbs.invoke("How wide is a zorb?").content)
