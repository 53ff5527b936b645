"""Questions to measure on: read from files, laid out as prompts.

Two kinds of files, both UTF-8, gzip if the name ends so:

    multi-passage records   JSON lines {"question", "answers", "passages": [{"title", "text",
                            "answer_spans": [[start, end)]}], "history"?: [[question, answer]]},
                            spans in characters of the text
    questions               JSON lines {"question", "answers"?}, or plain lines

A passage is a chunk and is tokenised by itself, so spans are found per passage.
"""

import gzip
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvweave.calibrate.answer_scores import normalise
from kvweave.calibrate.case import Case
from kvweave.errors import CorpusError, error_words
from kvweave.fuse.encode.extras import REPEAT
from kvweave.text.prompt import (
    SYSTEM,
    Document,
    PastMessage,
    chunk_text,
    lay_out,
    split_template,
)
from kvweave.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Passage:
    """A text to answer from, with the places [start, end) in it that spell an answer."""

    text: str
    title: str = ""
    answer_spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PastTurn:
    """A question that was asked before in the same conversation, with what was answered."""

    question: str
    answer: str
    passages: tuple[Passage, ...] = ()  # that stood in front of it


@dataclass(frozen=True, slots=True)
class QuestionRecord:
    """A question, its known answers if any, its passages if it brings them, and what was said
    before it."""

    question: str
    answers: tuple[str, ...] = ()
    passages: tuple[Passage, ...] = ()
    history: tuple[PastTurn, ...] = ()


def read_records(path: Path) -> Iterator[QuestionRecord]:
    """Multi-passage records. Raises CorpusError that names the line."""
    for number, line in _lines(path):
        record = _parse(path, number, line)
        try:
            passages = tuple(_passage(each) for each in record["passages"])
            answers = tuple(a for a in record.get("answers", ()) if a.strip())
            history = tuple(_turn(each) for each in record.get("history") or ())
            yield QuestionRecord(str(record["question"]), answers, passages, history)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorpusError(
                f"{path.name} line {number} is no multi-passage record ({_reason(error)}); it "
                "needs question, answers and passages with title and text"
            ) from error


def read_questions(path: Path) -> Iterator[QuestionRecord]:
    """Questions alone: plain lines, or JSON lines if the name says so."""
    as_json = path.name.removesuffix(".gz").endswith((".jsonl", ".json"))
    for number, line in _lines(path):
        if not as_json:
            yield QuestionRecord(line.strip())
            continue
        record = _parse(path, number, line)
        question, answers = record.get("question"), record.get("answers", [])
        if not isinstance(question, str) or not question.strip() or not isinstance(answers, list):
            raise CorpusError(
                f"{path.name} line {number} has no 'question'; see docs/calibration.md"
            )
        yield QuestionRecord(question, tuple(str(a) for a in answers if str(a).strip()))


def add_distractors(
    records: Sequence[QuestionRecord], tokenizer: Tokenizer, min_tokens: int, seed: int = 0
) -> list[QuestionRecord]:
    """Bring every context to `min_tokens` with passages of other records, in a drawn order.

    A passage that spells one of the answers is no distractor. The same seed gives the same
    prompts. Records stay short where there is nothing left to add.
    """
    pool = list({p.text: replace(p, answer_spans=()) for r in records for p in r.passages}.values())
    lengths = {p.text: len(tokenizer.encode_text(_chunk_text(p))) for p in pool}
    made = []
    for number, record in enumerate(records):
        rng = random.Random(f"{seed}:{number}:{record.question}")  # noqa: S311 a sample, no secret
        passages = list(record.passages)
        missing = min_tokens - sum(lengths[p.text] for p in passages)
        extras = rng.sample(pool, len(pool)) if missing > 0 else []
        for extra in (each for each in extras if _is_distractor(each, record)):
            if missing <= 0:
                break
            passages.append(extra)
            missing -= lengths[extra.text]
        rng.shuffle(passages)
        made.append(replace(record, passages=tuple(passages)))
    return made


def _is_distractor(passage: Passage, record: QuestionRecord) -> bool:
    """Whether a passage is none of the record's own and spells none of its answers."""
    if any(passage.text == own.text for own in record.passages):
        return False
    words, golds = normalise(passage.text), map(normalise, record.answers)
    return not any(gold and gold in words for gold in golds)


def make_case(tokenizer: Tokenizer, record: QuestionRecord, system: str = SYSTEM) -> Case:
    """The prompt of a record over its own passages, with the positions that spell an answer."""
    encoded = [encode_passage(tokenizer, passage) for passage in record.passages]
    case = case_of_chunks(tokenizer, record, [ids for ids, _ in encoded], system)
    gold, start = [], len(case.front)
    for ids, marked in encoded:
        gold += [start + i for i in marked]
        start += len(ids)
    return replace(case, gold=tuple(gold))


def case_of_chunks(
    tokenizer: Tokenizer,
    record: QuestionRecord,
    chunks: Sequence[tuple[int, ...]],
    system: str = SYSTEM,
) -> Case:
    """The prompt of a question over chunks that have their token ids already."""
    prompt = lay_out(tokenizer, record.question, chunks, system, _past(tokenizer, record.history))
    return Case(
        prompt.preamble,
        prompt.chunks,
        prompt.question,
        prompt.asked,
        answers=record.answers,
        history=tuple(i for part in prompt.history for i in part),
    )


def _past(tokenizer: Tokenizer, turns: Sequence[PastTurn]) -> list[PastMessage]:
    """Earlier turns as the prompt of a conversation has them."""
    past = []
    for turn in turns:
        chunks = tuple(encode_passage(tokenizer, passage)[0] for passage in turn.passages)
        past += [PastMessage("user", turn.question, chunks), PastMessage("assistant", turn.answer)]
    return past


def encode_passage(tokenizer: Tokenizer, passage: Passage) -> tuple[tuple[int, ...], list[int]]:
    """Token ids of a passage as it stands in a prompt, and which of them touch an answer span."""
    text = _chunk_text(passage)
    ids, offsets = tokenizer.encode_text_with_offsets(text)
    stripped = len(passage.text) - len(passage.text.lstrip())
    shift = text.index(passage.text.strip(), len(_title_line(passage))) - stripped
    spans = [(start + shift, end + shift) for start, end in passage.answer_spans]
    marked = [
        i
        for i, (first, last) in enumerate(offsets)
        if any(first < end and start < last for start, end in spans)
    ]
    return tuple(ids), marked


def repeat_ids(tokenizer: Tokenizer, system: str = SYSTEM) -> tuple[int, ...]:
    """What asks a model to repeat a chunk, up to where the repetition starts."""
    return (*tokenizer.encode_text(REPEAT), *template_closing(tokenizer, system))


def template_closing(tokenizer: Tokenizer, system: str = SYSTEM) -> Sequence[int]:
    """What the chat template puts behind the user's words."""
    return split_template(tokenizer, system)[1]


def _chunk_text(passage: Passage) -> str:
    return chunk_text(Document(passage.text, passage.title))


def _title_line(passage: Passage) -> str:
    title = passage.title.strip()
    return f"{title}\n" if title else ""


def _turn(found: Any) -> PastTurn:
    """A pair of what was asked and answered, or an object that may name passages too."""
    if isinstance(found, dict):
        passages = tuple(_passage(each) for each in found.get("passages") or ())
        return PastTurn(str(found["question"]), str(found["answer"]), passages)
    question, answer = found
    return PastTurn(str(question), str(answer))


def _passage(found: dict[str, Any]) -> Passage:
    text = str(found["text"])
    # a span whose place in the text was guessed is worse than none
    known = found.get("answer_spans") or [] if found.get("unambiguous", True) else []
    spans = tuple((int(start), int(end)) for start, end in known)
    if not text.strip():
        raise ValueError("a passage is empty")
    if any(not 0 <= start < end <= len(text) for start, end in spans):
        raise ValueError("an answer span lies outside its passage")
    return Passage(text, str(found.get("title") or ""), spans)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or _reason(error)
        raise CorpusError(f"cannot read {path}: {reason}") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise CorpusError(f"{path.name} line {number} is no JSON: {_reason(error)}") from error
    if not isinstance(record, dict):
        raise CorpusError(f"{path.name} line {number} is no JSON object")
    return record


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return f"no {error}"
    return error_words(error)
