"""Tasks like RULER's, written anew: what is wanted lies in several chunks of other text.

    keys      one number, hidden beside three others that have other names
    values    four numbers of one name
    queries   one number each of four names
    hops      five variables, each set to the one before it: every hop goes to another chunk

Each at some length, "keys-4k" for example. The other text is Python's enhancement proposals; a
sentence is put between two of a chunk, one in a chunk at most. An answer's score is the share of
what was wanted that stands in it. After NVIDIA's RULER (hsieh et al. 2024) as `RULER_NOTES.md`
beside the data describes it; figures are not comparable with its own: another haystack, chunks, a
chat prompt with examples.
"""

import random
import re
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from common.files import read_jsonl
from kvweave.calibrate.questions import Passage, QuestionRecord, make_case
from kvweave.text.tokenizer import Tokenizer
from quality.asked import Asked, Style

LENGTHS = {"2k": 2000, "4k": 4000, "8k": 8000}
CHUNK_TOKENS = range(120, 241)  # of the other text
NUM_NEEDLES = 4
NUM_VARIABLES = 5
SYSTEM = """You find what is hidden in the passages you are given. Answer with the numbers or \
names that were asked for, all of them, separated by commas, and with nothing else.

Example 1
One of the special magic numbers for calm-river is: 4810273.
Question: What are all the special magic numbers for calm-river?
Answer: 4810273

Example 2
VAR QWE = 31415.
VAR RTZ = VAR QWE.
Question: Find all variables that are assigned the value 31415.
Answer: QWE, RTZ"""
STYLE = Style(SYSTEM, 64, True, needs_all=True)


class Hidden(NamedTuple):
    """What is put into the chunks, in order, and what is asked."""

    sentences: Sequence[str]
    question: str
    answers: tuple[str, ...]


Words = tuple[list[str], list[str]]  # adjectives, nouns


def make_asked(data: Path, tokenizer: Tokenizer, name: str, count: int) -> Asked:
    """The first `count` questions of a task at a length, "keys-4k" for example."""
    length = name.partition("-")[2]
    lists = ("adjectivelist", "nounlist")
    words = tuple(
        sorted({raw["word"] for raw in read_jsonl(data / f"ruler_wordlists/{each}.jsonl.gz")})
        for each in lists
    )
    hay = _other_text(data, tokenizer)
    cases = []
    for number in range(count):
        rng = random.Random(f"{name}:{number}")
        hidden = TASKS[name](rng, (words[0], words[1]))
        record = _hide(rng, hidden, hay, LENGTHS[length])
        cases.append(make_case(tokenizer, record, SYSTEM))
    return Asked(STYLE, cases)


def _other_text(data: Path, tokenizer: Tokenizer) -> list[tuple[Passage, int]]:
    """Chunks to hide something in, with their lengths in tokens."""
    found = []
    for i, raw in enumerate(read_jsonl(data / "kb_python_peps/chunks.jsonl.gz")):
        if i % 12 or not 500 < len(raw["text"]) < 900:  # a sample: tokenising all takes a minute
            continue
        num_tokens = len(tokenizer.encode_text(raw["text"]))
        if num_tokens in CHUNK_TOKENS and len(_places(raw["text"])) > 2:
            found.append((Passage(raw["text"]), num_tokens))
    return found


def _hide(
    rng: random.Random, hidden: Hidden, hay: Sequence[tuple[Passage, int]], num_tokens: int
) -> QuestionRecord:
    """Chunks of about `num_tokens` together with the sentences in them, in their order."""
    chunks: list[str] = []
    for passage, length in rng.sample(hay, len(hay)):
        num_tokens -= length
        if num_tokens < 0:
            break
        chunks.append(passage.text)
    # the first chunk's KV is exact in any case: nothing is hidden there
    places = sorted(rng.sample(range(1, len(chunks)), len(hidden.sentences)))
    for place, sentence in zip(places, hidden.sentences, strict=True):
        text = chunks[place]
        at = rng.choice(_places(text))
        chunks[place] = f"{text[:at]} {sentence}{text[at:]}"
    passages = tuple(Passage(text) for text in chunks)
    return QuestionRecord(hidden.question, hidden.answers, passages)


def _places(text: str) -> list[int]:
    """Where a sentence ends and another begins."""
    return [found.start() + 1 for found in re.finditer(r"[a-z]\.\s+(?=[A-Z])", text)]


def _number(rng: random.Random) -> str:
    return str(rng.randint(1_000_000, 9_999_999))


def _needle(key: str, value: str) -> str:
    return f"One of the special magic numbers for {key} is: {value}."


def _draw_keys(rng: random.Random, words: Words) -> list[str]:
    adjectives, nouns = (rng.sample(each, NUM_NEEDLES) for each in words)
    return [f"{one}-{other}" for one, other in zip(adjectives, nouns, strict=True)]


def _ask(keys: Sequence[str]) -> str:
    named = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"
    return f"What are all the special magic numbers for {named}?"


def _keys(rng: random.Random, words: Words) -> Hidden:
    keys, values = _draw_keys(rng, words), [_number(rng) for _ in range(NUM_NEEDLES)]
    wanted = rng.randrange(NUM_NEEDLES)
    needles = list(map(_needle, keys, values))
    return Hidden(needles, _ask([keys[wanted]]), (values[wanted],))


def _values(rng: random.Random, words: Words) -> Hidden:
    key, *_ = _draw_keys(rng, words)
    values = tuple(_number(rng) for _ in range(NUM_NEEDLES))
    return Hidden([_needle(key, value) for value in values], _ask([key]), values)


def _queries(rng: random.Random, words: Words) -> Hidden:
    keys, values = _draw_keys(rng, words), [_number(rng) for _ in range(NUM_NEEDLES)]
    return Hidden(list(map(_needle, keys, values)), _ask(keys), tuple(values))


def _hops(rng: random.Random, words: Words) -> Hidden:
    value = str(rng.randint(10_000, 99_998))
    names: list[str] = []
    while len(names) < NUM_VARIABLES:
        name = "".join(rng.choices(string.ascii_uppercase, k=5))
        names += [name] * (name not in names)
    lines = [f"VAR {names[0]} = {value}."]
    lines += [f"VAR {name} = VAR {names[i]}." for i, name in enumerate(names[1:])]
    return Hidden(lines, f"Find all variables that are assigned the value {value}.", tuple(names))


_MAKERS: dict[str, Callable[[random.Random, Words], Hidden]] = {
    "keys": _keys,
    "values": _values,
    "queries": _queries,
    "hops": _hops,
}
TASKS = {f"{task}-{length}": make for task, make in _MAKERS.items() for length in LENGTHS}
