"""Questions whose answers are scored: with gold answers, five chunks, and a prompt that asks for
short ones.

    2wiki, hotpot, musique    what the answer needs, and others, as they stand in the file
    nq                        the passage that has the answer, and drawn ones
    squad                     the same, and the nearest by BM25
    clapnq                    the passage that has the answer, and drawn ones
    mtrag                     what was retrieved for a later turn, behind what was said (MTRAG-UN)

Nothing was tuned on what is scored: `weave` was tuned on the first 80 records of the multi-hop
sets, packaged tables were made from HotpotQA's next 600, NQ's first 250, SQuAD's first 400 and the
first 800 questions of its articles, and the prompts below were chosen among three on `tuning`
records (Qwen2.5-Coder-0.5B in full, 11 of them: too few to tell them apart by F1). Answers to the
last two sets are sentences, to all others a few words.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from common.files import read_jsonl
from kvweave.calibrate.answer_scores import normalise
from kvweave.calibrate.case import Case
from kvweave.calibrate.questions import PastTurn, QuestionRecord, make_case
from kvweave.text.tokenizer import Tokenizer
from quality.kinds import NUM_CHUNKS, pieces_of

MOST_TOKENS = 4000  # of a prompt

# The examples are tuning records, their passages cut short.
WORDS = """You answer questions from the passages you are given. Answer with the name, date, \
number or few words that were asked for, and with nothing else: no sentence, no explanation.

Example 1
Piccoli fuochi
Piccoli fuochi is a 1985 Italian drama film directed by Peter Del Monte.
Peter Del Monte
Peter Del Monte (born 29 July 1943) is an Italian film director and screenwriter.
Question: What is the date of birth of the director of film Piccoli Fuochi?
Answer: 29 July 1943

Example 2
Basset Bleu de Gascogne
The Basset Bleu de Gascogne is a long-backed, short legged breed of dog of the hound type, native \
to France.
Bulldog
The Bulldog is a medium-sized breed of dog of English origin.
Question: Which dog is native to France, the Basset Bleu de Gascogne or the Bulldog?
Answer: Basset Bleu de Gascogne"""

SENTENCES = """You answer questions from the passages you are given. Answer in one or two \
sentences that say what the passages say, and add nothing of your own.

Example 1
Moon phases
The lunar phase is the shape of the sunlit portion of the Moon as seen by an observer on Earth. \
Phases change as the Moon orbits the Earth.
Question: what makes the different shapes of the moon
Answer: The different shapes are the sunlit portion of the Moon as an observer on Earth sees it, \
which changes as the Moon orbits the Earth.

Example 2
Sweet Frog
Derek Cha founded Sweet Frog on Christian principles. The "FROG" part of the name is an acronym \
for "Fully Rely on God".
Question: where did the name sweet frog come from
Answer: Derek Cha founded it on Christian principles, and FROG is an acronym for "Fully Rely on \
God"."""


class Style(NamedTuple):
    """How a set is asked."""

    system: str
    max_tokens: int  # of an answer
    is_line: bool  # an answer ends with its line
    needs_all: bool = False  # every known answer is wanted, not one of them


WORDS_STYLE = Style(WORDS, 24, True)
SENTENCES_STYLE = Style(SENTENCES, 64, False)


Reader = Callable[[Path, Tokenizer], Iterator[QuestionRecord]]


class AskedSet(NamedTuple):
    """Where the questions of a set come from."""

    read: Reader
    style: Style
    scored: range  # numbers of records
    tuning: range


class Asked(NamedTuple):
    """The questions of a set as prompts."""

    style: Style
    cases: list[Case]  # with their known answers


def make_asked(
    data: Path, tokenizer: Tokenizer, name: str, count: int, *, tuning: bool = False
) -> Asked:
    """The first `count` questions of a set that are scored, or of those to tune prompts on."""
    chosen = SETS[name]
    numbers = chosen.tuning if tuning else chosen.scored
    cases: list[Case] = []
    for record in islice(chosen.read(data, tokenizer), numbers.start, numbers.stop):
        case = make_case(tokenizer, record, chosen.style.system)
        if case.num_tokens <= MOST_TOKENS:
            cases.append(case)
        if len(cases) == count:
            break
    return Asked(chosen.style, cases)


def _hops(name: str) -> Reader:
    """A file of multi-hop records: what is needed and the first of the others, as they stand."""

    def read(data: Path, tokenizer: Tokenizer) -> Iterator[QuestionRecord]:
        for raw in _answered(read_jsonl(data / name)):
            every = raw["passages"]
            needed = [i for i, p in enumerate(every) if p["is_supporting"]]
            others = [i for i, p in enumerate(every) if not p["is_supporting"]]
            taken = sorted(needed + others[: max(0, NUM_CHUNKS - len(needed))])
            yield _record(tokenizer, raw, [every[i] for i in taken])

    return read


def _squad(data: Path, tokenizer: Tokenizer) -> Iterator[QuestionRecord]:
    """The gold passage and the first BM25 negatives, in the file's order. Questions that the
    tables' document sets asked are left out."""
    used = _first_ids(data / "squad_v1.1_dev/questions.jsonl.gz", 800)
    for raw in _answered(read_jsonl(data / "squad_v1.1_dev/squad_bm25_10passages.jsonl.gz")):
        gold = [p for p in raw["passages"] if p["is_supporting"]]
        others = [p for p in raw["passages"] if not p["is_supporting"]]
        if raw["id"] in used or len(gold) != 1 or len(others) < NUM_CHUNKS - 1:
            continue
        taken = [*gold, *others[: NUM_CHUNKS - 1]]
        yield _record(tokenizer, raw, [p for p in raw["passages"] if p in taken])


def _first_ids(path: Path, count: int) -> set[str]:
    return {raw["id"] for raw, _ in zip(read_jsonl(path), range(count), strict=False)}


def _drawn(name: str) -> Reader:
    """A file of records with one gold passage each: others beside it, in a drawn order."""

    def read(data: Path, tokenizer: Tokenizer) -> Iterator[QuestionRecord]:
        raws = list(read_jsonl(data / name))
        pool = [raw["passages"][0] for raw in raws]
        for raw in _answered(raws):
            gold = raw["passages"][0]
            rng = random.Random(raw["id"])
            golds = [words for answer in raw["answers"] if (words := normalise(answer))]
            others: dict[str, dict[str, Any]] = {}
            for other in rng.sample(pool, 200):
                if len(others) == NUM_CHUNKS - 1:
                    break
                words = normalise(other["text"])
                if other["text"] != gold["text"] and not any(g in words for g in golds):
                    others[other["text"]] = other
            record = _record(tokenizer, raw, [gold, *others.values()])
            pieces = list(record.passages)
            rng.shuffle(pieces)
            yield replace(record, passages=tuple(pieces))

    return read


def _turns(data: Path, tokenizer: Tokenizer) -> Iterator[QuestionRecord]:
    """MTRAG-UN's answerable turns that have some before them; their history is words alone."""
    texts = {(p["domain"], p["doc_id"]): p for p in read_jsonl(data / "mtrag/passages.jsonl.gz")}
    for raw in _answered(read_jsonl(data / "mtrag/mtrag_un_reference_tasks.jsonl.gz")):
        *before, last = raw["history"]
        found = [texts[raw["domain"], doc] for doc in raw["contexts"]]
        if not before or not found or "ANSWERABLE" not in raw["answerability"]:
            continue
        said = tuple(
            PastTurn(asked["text"], answer["text"])
            for asked, answer in zip(before[::2], before[1::2], strict=False)
        )
        asked_now = {**raw, "question": last["text"]}
        yield replace(_record(tokenizer, asked_now, found), history=said)


def _answered(raws: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Those with an answer to score by, each question once."""
    seen: set[str] = set()
    for raw in raws:
        asked = normalise(raw["question"]) if "question" in raw else raw["task_id"]
        if asked not in seen and any(normalise(answer) for answer in raw["answers"]):
            seen.add(asked)
            yield raw


def _record(
    tokenizer: Tokenizer, raw: dict[str, Any], passages: Sequence[dict[str, Any]]
) -> QuestionRecord:
    """A question over passages that are cut as ingest cuts them, five chunks at most."""
    named = [(p["title"], p["text"]) for p in passages]
    answers = tuple(a for a in raw["answers"] if normalise(a))
    return QuestionRecord(raw["question"], answers, pieces_of(tokenizer, named)[:NUM_CHUNKS])


_2WIKI, _HOTPOT, _MUSIQUE, _NQ, _CLAPNQ = (
    "2wikimultihopqa/2wiki.jsonl.gz",
    "hotpotqa/hotpotqa_distractor.jsonl.gz",
    "musique/musique_ans.jsonl.gz",
    "nq_oracle/nq_open_oracle.jsonl.gz",
    "clapnq_dev/clapnq_dev.jsonl.gz",
)
SETS = {
    "2wiki": AskedSet(_hops(_2WIKI), WORDS_STYLE, range(80, 500), range(80)),
    "hotpot": AskedSet(_hops(_HOTPOT), WORDS_STYLE, range(700, 869), range(80)),
    "musique": AskedSet(_hops(_MUSIQUE), WORDS_STYLE, range(80, 176), range(80)),
    "nq": AskedSet(_drawn(_NQ), WORDS_STYLE, range(400, 1858), range(300, 400)),
    "squad": AskedSet(_squad, WORDS_STYLE, range(500, 1000), range(400, 500)),
    "clapnq": AskedSet(_drawn(_CLAPNQ), SENTENCES_STYLE, range(20, 150), range(20)),
    "mtrag": AskedSet(_turns, SENTENCES_STYLE, range(120), range(120, 166)),
}
