"""What bench/product.py asks: five workloads, each a stream of steps.

A step is one request as a client would send it. A workload is a generator: it yields a step and is
sent the text that the server under test answered, so that a chat can go on with it.
"""

import itertools
import random
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from common.files import read_jsonl
from kvweave.text.prompt import SYSTEM
from product_parts.knowledge import Conversation, Record, squad_questions

Message = dict[str, str]
Hits = Sequence[Mapping[str, Any]]  # of POST /v1/kb/NAME/search
Search = Callable[[str, str], Hits]  # knowledge base, question
MAX_TOKENS = 12
WARM_UP = "What is this about?"  # asked of every knowledge base before anything is measured
SYSTEM_CHARS = 3000  # of the handbook in the chat's system prompt: about 700 tokens
HANDBOOK = "You help people who run a cluster. Be brief. What you must know:\n\n"
SAID = (
    "Hello, I am new here. What is a node?",
    "Who registers it?",
    "And if its name changes?",
    "How do I see its status?",
    "What does Ready mean?",
    "How do I take one out of service for a while?",
    "Do its pods move by themselves?",
    "What if it never comes back?",
    "Can I do the same by script?",
    "Thanks. Say it all again in one sentence.",
)


@dataclass(frozen=True, slots=True)
class Step:
    """One request. `group` names what it is measured with."""

    group: str
    messages: Sequence[Message]
    documents: Sequence[Mapping[str, str]] | None = None
    kb: str | None = None
    conversation_id: str | None = None

    def body(self) -> dict[str, Any]:
        """As a client sends it that has set nothing."""
        made: dict[str, Any] = {
            "messages": list(self.messages),
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
        }
        for name in ("documents", "kb", "conversation_id"):
            if getattr(self, name) is not None:
                made[name] = getattr(self, name)
        return made


Steps = Generator[Step, str, None]


@dataclass(frozen=True, slots=True)
class Workload:
    """A stream of steps, and what it is compared with."""

    name: str
    num_steps: int
    steps: Callable[[Search], Steps]
    kb: str | None = None
    arms: tuple[str, ...] = field(default=("default", "full"))


class Size(NamedTuple):
    """How much of everything."""

    document_sets: int
    paragraphs: int  # of a document
    chat_turns: int
    conversations: int
    conversation_turns: int
    skewed: int  # requests
    novel: int
    kb_chars: int  # of each knowledge base, about 4 to a token


FULL = Size(3, 2, 10, 3, 4, 36, 16, 100_000)
QUICK = Size(1, 1, 4, 2, 2, 8, 5, 20_000)


def same_documents(data: Path, size: Size) -> Workload:
    """Five documents, two questions about them, and each question by itself."""

    def steps(_: Search) -> Steps:
        paragraphs = list(read_jsonl(data / "squad_v1.1_dev" / "paragraphs.jsonl.gz"))
        titles = list(dict.fromkeys(p["title"] for p in paragraphs))
        # from the end: the knowledge base is made of those at the front
        for title in reversed(titles[-size.document_sets :]):
            article = [p for p in paragraphs if p["title"] == title]
            part = article[: 5 * size.paragraphs]
            records = [{"id": p["pid"], "title": title, "text": p["text"]} for p in part]
            asked = [qs[0] for qs in squad_questions(data, records).values()][:2]
            documents = [
                {"title": f"{title} {at + 1}", "text": "\n\n".join(r["text"] for r in run)}
                for at, run in enumerate(_runs(records, size.paragraphs))
            ]
            for group, question in zip(("first", "second"), asked, strict=True):
                yield Step(group, _user(question), documents=documents)
                yield Step("alone", [_system(SYSTEM), *_user(question)])

    return Workload("same_documents", size.document_sets * 4, steps)


def chat(data: Path, size: Size) -> Workload:
    """A chat behind a long system prompt; what the server says stands in the next turn."""

    def steps(_: Search) -> Steps:
        docs = read_jsonl(data / "kb_kubernetes_docs" / "docs.jsonl.gz")
        page = next(doc["text"] for doc in docs if doc["title"] == "Nodes")
        messages = [_system(HANDBOOK + page[:SYSTEM_CHARS])]
        for said in SAID[: size.chat_turns]:
            messages += _user(said)
            answer = yield Step("chat", list(messages))
            messages.append({"role": "assistant", "content": answer})

    return Workload("chat", size.chat_turns, steps)


NUM_NAMED = 3  # turns of a conversation that has a name


def conversations(talks: Sequence[Conversation], kb: str) -> Workload:
    """MTRAG conversations side by side, turn by turn, each turn with its own retrieval. Earlier
    answers are those of the data set: its later questions are about them."""

    num_named = min(NUM_NAMED, len(talks[0].turns))

    def steps(_: Search) -> Steps:
        for turn in range(len(talks[0].turns)):
            for talk in talks:
                past = [_turn_messages(said) for said in talk.turns[:turn]]
                messages = [*itertools.chain(*past), *_user(talk.turns[turn][0])]
                yield Step("conversation", messages, kb=kb)
        for turn in range(num_named):  # and one by name: what its history holds is not sent again
            past = [_turn_messages(said) for said in talks[0].turns[:turn]]
            messages = [*itertools.chain(*past), *_user(talks[0].turns[turn][0])]
            yield Step("named", messages, kb=kb, conversation_id=talks[0].name)

    arms = ("default", "full", "prefix")
    num_steps = sum(len(talk.turns) for talk in talks) + num_named
    return Workload("conversations", num_steps, steps, kb, arms)


def skewed_stream(data: Path, passages: Sequence[Record], kb: str, count: int) -> Workload:
    """Questions whose passages are asked about with Zipf's frequencies."""

    def steps(_: Search) -> Steps:
        rng = random.Random(19)
        by_passage = squad_questions(data, passages)
        ranked = sorted(by_passage)
        rng.shuffle(ranked)
        weights = [1 / rank for rank in range(1, len(ranked) + 1)]
        for passage in rng.choices(ranked, weights, k=count):
            question = rng.choice(by_passage[passage])
            yield Step("skewed", _user(question), kb=kb)

    return Workload("skewed_stream", count, steps, kb)


def novel_orders(data: Path, passages: Sequence[Record], kb: str, count: int) -> Workload:
    """Questions whose chunks were all or mostly seen before, and never behind each other so."""

    def steps(search: Search) -> Steps:
        by_passage = squad_questions(data, passages)
        asked = [question for questions in by_passage.values() for question in questions[:2]]
        found = {question: tuple(hit["id"] for hit in search(kb, question)) for question in asked}
        warmed = {hit["id"] for hit in search(kb, WARM_UP)[:1]}
        for question in never_repeated(found, count, warmed):
            yield Step("novel", _user(question), kb=kb)

    return Workload("novel_orders", count, steps, kb)


def never_repeated(
    found: Mapping[str, Sequence[str]], count: int, begun: Iterable[str] = ()
) -> list[str]:
    """Questions in an order such that no list of chunks begins as an earlier one does, each with as
    many chunks of earlier lists as can be had; `begun` has first chunks of lists before all these.
    Fewer than `count` if there are no more."""
    chosen: list[str] = []
    firsts = set(begun)
    seen: set[str] = set()
    while len(chosen) < count:
        left = [q for q, ids in found.items() if ids and ids[0] not in firsts]
        if not left:
            break
        best = max(left, key=lambda question: len(seen & set(found[question])))
        chosen.append(best)
        firsts.add(found[best][0])
        seen |= set(found[best])
    return chosen


def _runs(records: Sequence[Record], length: int) -> list[Sequence[Record]]:
    return [records[start : start + length] for start in range(0, len(records), length)]


def _user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _turn_messages(said: tuple[str, str]) -> list[Message]:
    user, answer = said
    return [*_user(user), {"role": "assistant", "content": answer}]
