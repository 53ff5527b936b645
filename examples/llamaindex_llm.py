"""LlamaIndex over `kvweave serve`: a completion, a chat, a stream, and given documents.

kvweave serve                          # in another terminal
pip install llama-index-llms-openai-like
python examples/llamaindex_llm.py      # [--base-url http://127.0.0.1:8321/v1] [--model NAME]
"""

import argparse

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--base-url", default="http://127.0.0.1:8321/v1")
parser.add_argument("--model", default="qwen2.5-coder-0.5b")
parser.add_argument("--max-tokens", type=int, default=48)
args = parser.parse_args()

llm = OpenAILike(
    model=args.model,
    api_base=args.base_url,
    api_key="none",
    is_chat_model=True,
    context_window=8192,
    temperature=0,
    max_tokens=args.max_tokens,
)

print("complete:", llm.complete("What is the capital of France?").text)

question = ChatMessage(role="user", content="Name three colours.")
print("chat:", llm.chat([question]).message.content)

print("stream: ", end="")
for chunk in llm.stream_chat([question]):
    print(chunk.delta, end="", flush=True)
print()

# kvweave's own fields go into extra_body: documents here, or "kb": "NAME" to retrieve.
asked = ChatMessage(role="user", content="How wide is a zorb?")
zorbs = {"documents": [{"title": "zorbs", "text": "A zorb is 14 cm wide."}]}
print("from documents:", llm.chat([asked], extra_body=zorbs).message.content)
