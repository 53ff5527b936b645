"""An agent over `kvweave serve`: the model searches a knowledge base by a tool until it can answer.

kvweave serve                          # in another terminal; its default model knows tools
pip install openai
python examples/agent_loop.py "How wide is a zorb?"      # [--base-url http://127.0.0.1:8321/v1]

Each turn repeats the prompt of the turn before it. That part is exact KV and is not computed again:
see the cached tokens.
"""

import argparse
import json
from typing import Any

from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("question", nargs="?", default="How wide is a zorb?")
parser.add_argument("--base-url", default="http://127.0.0.1:8321/v1")
parser.add_argument("--max-tokens", type=int, default=64)
parser.add_argument("--turns", type=int, default=4)
args = parser.parse_args()

SEARCH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search_notes",
        "description": "Find passages of the notes that have to do with a query.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
        },
    },
}

client = OpenAI(base_url=args.base_url, api_key="none")
note = {"title": "Zorbs", "text": "A zorb is a small round tool. It is 14 cm wide."}
client.post("/kb/agent-notes/documents", cast_to=object, body=note)


def search_notes(query: str) -> str:
    body = {"query": query, "k": 2}
    hits = client.post("/kb/agent-notes/search", cast_to=object, body=body)["data"]
    return "\n\n".join(hit["text"] for hit in hits)


messages: list[Any] = [{"role": "user", "content": args.question}]
for turn in range(1, args.turns + 1):
    reply = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=messages,
        tools=[SEARCH],
        temperature=0,
        max_tokens=args.max_tokens,
    )
    said = reply.choices[0].message
    cached = reply.usage.prompt_tokens_details.cached_tokens
    print(f"turn {turn}: {reply.usage.prompt_tokens} tokens, {cached} of them cached")
    if not said.tool_calls:
        print("answer:", said.content)
        break
    messages.append(said)
    for call in said.tool_calls:
        query = json.loads(call.function.arguments).get("query", "")
        print(f"searches for {query!r}")
        found = search_notes(query)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
