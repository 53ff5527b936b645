"""Questions over several passages, as prompts, for the quality benches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common.files import read_jsonl
from kvweave.calibrate.answer_scores import normalise
from kvweave.text.prompt import Document, Prompt, build_prompt
from kvweave.text.tokenizer import Tokenizer

# MuSiQue has 176 records here; CacheBlend's own sample of it fills up to more.
SETS = {
    "2wiki": ("2wikimultihopqa/2wiki.jsonl.gz",),
    "hotpot": ("hotpotqa/hotpotqa_distractor.jsonl.gz",),
    "musique": ("musique/musique_ans.jsonl.gz", "cacheblend_musique_s/musique_s.jsonl.gz"),
    "squad": ("squad_v1.1_dev/squad_bm25_10passages.jsonl.gz",),
}


class Question(NamedTuple):
    set_name: str
    number: int
    prompt: Prompt
    answers: tuple[str, ...]
    passages: tuple[tuple[str, str], ...]  # (title, text)


def read_questions(
    data: Path, tokenizer: Tokenizer, set_name: str, count: int, first: int = 0
) -> list[Question]:
    """Questions [first, first + count) of a set, in the order of its files."""
    found: list[Question] = []
    for number, record in enumerate(_records(data, set_name)):
        if number < first:
            continue
        if len(found) == count:
            break
        passages = tuple((p["title"], p["text"]) for p in record["passages"])
        documents = [Document(text, title) for title, text in passages]
        prompt = build_prompt(tokenizer, record["question"], documents)
        found.append(Question(set_name, number, prompt, tuple(record["answers"]), passages))
    return found


def _records(data: Path, set_name: str) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    for name in SETS[set_name]:
        for record in read_jsonl(data / name):
            asked = normalise(record["question"])
            if asked not in seen and any(a.strip() for a in record["answers"]):
                seen.add(asked)
                yield record
