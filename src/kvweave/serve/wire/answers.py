"""Answers that are kept: which there are, and all that is known of one."""

from typing import Literal

from kvweave.app.answer.answer_details import AnswerDetails
from kvweave.app.answer.kept_answers import KeptAnswer
from kvweave.serve.wire.base import Outgoing
from kvweave.serve.wire.explain import Explain, explain_of
from kvweave.serve.wire.sources import SourceOut, sources_out


class AnswerSummary(Outgoing):
    """A kept answer as a list shows it."""

    id: str  # of its chat completion
    created: float  # seconds since 1970
    kb: str | None
    question: str
    strategy: str
    ratio: float
    ttft_ms: float
    full_ms: float | None  # what a full prefill would have taken, about
    prompt_tokens: int
    completion_tokens: int


class AnswerList(Outgoing):
    object: Literal["list"] = "list"
    answers: list[AnswerSummary]  # newest first


class PartOut(Outgoing):
    """A run of the prompt's tokens, [start, end)."""

    name: Literal["preamble", "history", "chunk", "question"]
    start: int
    end: int
    chunk: str | None  # id


class TokensOut(Outgoing):
    """The prompt, token by token."""

    texts: list[str]
    states: str  # a letter each: e exact, r reused, n recomputed, c computed
    scores: list[float | None]  # null: it was not up for recomputation
    parts: list[PartOut]


class LayerOut(Outgoing):
    """One layer of a fused pass; times in milliseconds since the request arrived, null where they
    are not measured (on a GPU, and beside other requests)."""

    layer: int
    loaded_ms: float | None
    started_ms: float | None
    ended_ms: float | None
    rows: int
    left_rows: int  # that went no further


class SelectionOut(Outgoing):
    selector: str
    ratio: float
    layers: list[int]  # whose stored keys or values were looked at


class EntryOut(Outgoing):
    """Something that took time, in milliseconds since the request arrived."""

    name: str
    lane: str
    start_ms: float
    end_ms: float
    detail: str


class AnswerOut(Outgoing):
    """All that is known of one answer."""

    id: str
    object: Literal["answer"] = "answer"
    created: float
    model: str
    kb: str | None
    question: str
    answer: str
    ttft_ms: float
    total_ms: float
    prompt_tokens: int
    completion_tokens: int
    sources: list[SourceOut]
    explain: Explain
    tokens: TokensOut
    layers: list[LayerOut]
    selection: SelectionOut | None
    timeline: list[EntryOut]


def summary_out(kept: KeptAnswer) -> AnswerSummary:
    answer, record = kept.answer, kept.answer.explain
    return AnswerSummary(
        id=kept.id,
        created=round(kept.created, 3),
        kb=kept.kb,
        question=kept.question,
        strategy="full" if record is None else record.strategy,
        ratio=0.0 if record is None else record.ratio,
        ttft_ms=round(answer.ttft_ms, 3),
        full_ms=None if answer.full_ms is None else round(answer.full_ms, 3),
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
    )


def answer_out(kept: KeptAnswer, details: AnswerDetails, model: str) -> AnswerOut:
    answer, chosen = kept.answer, details.selection
    return AnswerOut(
        id=kept.id,
        created=round(kept.created, 3),
        model=model,
        kb=kept.kb,
        question=kept.question,
        answer=answer.text,
        ttft_ms=round(answer.ttft_ms, 3),
        total_ms=round(answer.total_ms, 3),
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        sources=sources_out(answer.sources),
        explain=explain_of(answer, kept.queue_s),
        tokens=TokensOut(
            texts=details.texts,
            states=details.states,
            scores=details.scores,
            parts=[PartOut.model_validate(part._asdict()) for part in details.parts],
        ),
        layers=[LayerOut.model_validate(layer._asdict()) for layer in details.layers],
        selection=None
        if chosen is None
        else SelectionOut(selector=chosen.selector, ratio=chosen.ratio, layers=list(chosen.layers)),
        timeline=[EntryOut.model_validate(entry._asdict()) for entry in details.timeline],
    )
