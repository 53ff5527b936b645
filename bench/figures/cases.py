"""The questions that the bench of figures asks.

`qa` are held-out questions of the multi-hop sets and of NQ with five chunks each, one of each set
in turn (quality/asked.py). `marked` are SQuAD questions whose answers are marked, with 2,000 tokens
of other passages; those that packaged profiles found their layers on are left out.
`needles` are tasks like RULER's (quality/needles.py).
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from kvweave.calibrate.case import Case
from kvweave.calibrate.questions import Passage, add_distractors, make_case, read_records
from kvweave.text.tokenizer import Tokenizer
from quality import asked, needles
from quality.asked import MOST_TOKENS, Style

PROFILED = 100  # records of SQuAD that packaged profiles looked at
MARKED_TOKENS = 2000  # as `kvweave calibrate layers` takes
TASKS = ("queries-2k", "values-2k", "hops-2k")


class Posed(NamedTuple):
    """One question as a prompt."""

    set_name: str
    number: int
    style: Style
    case: Case
    passages: tuple[Passage, ...] = ()  # one for each chunk, where neighbours are looked for


def read_qa(data: Path, tokenizer: Tokenizer, sets: Sequence[str], count: int) -> list[Posed]:
    """`count` questions, one of each set in turn."""
    named = [
        list(islice(_read_set(data, tokenizer, name), -(-count // len(sets)))) for name in sets
    ]
    return [posed for same in zip(*named, strict=False) for posed in same][:count]


def _read_set(data: Path, tokenizer: Tokenizer, name: str) -> Iterator[Posed]:
    chosen = asked.SETS[name]
    records = chosen.read(data, tokenizer)
    scored = islice(enumerate(records), chosen.scored.start, chosen.scored.stop)
    for number, record in scored:
        case = make_case(tokenizer, record, chosen.style.system)
        if case.num_tokens <= MOST_TOKENS and len(case.chunks) > 1:
            yield Posed(name, number, chosen.style, case, record.passages)


def read_marked(data: Path, tokenizer: Tokenizer, sets: Sequence[str], count: int) -> list[Posed]:
    """`count` questions with marked answers in contexts of 2,000 tokens."""
    records = read_records(data / "squad_v1.1_dev/squad_bm25_10passages.jsonl.gz")
    marked = [r for r in records if any(p.answer_spans for p in r.passages)]
    marked = marked[4 * PROFILED : 4 * PROFILED + 4 * count]  # distractors of a profile were of 4x
    padded = add_distractors(marked, tokenizer, MARKED_TOKENS)[:count]
    style = Style("", 24, True)
    return [Posed("squad", i, style, make_case(tokenizer, each)) for i, each in enumerate(padded)]


def read_needles(data: Path, tokenizer: Tokenizer, sets: Sequence[str], count: int) -> list[Posed]:
    """`count` cases, one of each task in turn."""
    each = -(-count // len(TASKS))
    named = []
    for name in TASKS:
        made = needles.make_asked(data, tokenizer, name, each)
        named.append([Posed(name, i, made.style, case) for i, case in enumerate(made.cases)])
    return [posed for same in zip(*named, strict=True) for posed in same][:count]
