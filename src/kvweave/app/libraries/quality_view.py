"""What is known of the quality of reuse with one model: ratio curves, what the gate lets through,
what the audit found, and how far one answer is from full prefill."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvweave.app.answer.answer_stream import WatchedTokens
from kvweave.app.audit.audit_log import AuditedCell, GateMove
from kvweave.app.auto.growing_gate import EvidencedGate
from kvweave.app.hosts import LocalModel
from kvweave.calibrate.gate import ORDER_CELL, OWN, USUAL_CHUNKS, Table
from kvweave.calibrate.trials import judge
from kvweave.errors import ConfigError
from kvweave.fuse.encode.contexts import digest_ids
from kvweave.plan.plan import PromptShape, Verdict
from kvweave.reasons import Reason

USUAL = PromptShape(0, USUAL_CHUNKS)  # a prompt of a few chunks, without a history
WATCHED = 16  # tokens of an answer at most: each is a float per word of the vocabulary


class QualityPoint(NamedTuple):
    """What recomputing some share of the stored tokens costs."""

    ratio: float
    kl: float  # nats per token, mean
    kl_high: float  # upper end of its 95 % interval, wider where few questions were asked
    flips: float  # share of first tokens that change
    work: float  # of full prefill's


class QualityCurve(NamedTuple):
    """One strategy, by one kind of questions at one number of chunks."""

    strategy: str
    kind: str
    num_questions: int
    points: tuple[QualityPoint, ...]  # by ratio


class GateLine(NamedTuple):
    """What the gate says of one strategy."""

    strategy: str
    ratio: float | None  # the least that it lets through; None: none
    why: str  # it does not, or takes another ratio than was calibrated


@dataclass(frozen=True, slots=True)
class QualityView:
    """What the Quality page shows of one model."""

    bound: float
    doubt: str | None  # why nothing was measured that can be used, and the way out; None: it was
    curves: tuple[QualityCurve, ...]
    gate: tuple[GateLine, ...]
    audited: tuple[AuditedCell, ...]
    moves: tuple[GateMove, ...]


def quality_of(weave: LocalModel, *, over_library: bool) -> QualityView:
    """Look up a model with the chunk KV of the open knowledge base (`over_library`), or in any
    encoding context. Any thread."""
    found, bound = weave.auditor.log, weave.bound
    audited, moves = tuple(found.list_cells()), tuple(found.moves())
    try:
        tables, made = _tables(weave, over_library)
        is_random = weave.runtime.decoder.weights.is_random
        missing = Reason.PERMITTED if is_random else Reason.NO_PROFILE
        doubt: str | None = None if tables or made else missing
    except ConfigError as error:  # a damaged profile
        tables, made, doubt = (), (), str(error)
    gate: tuple[GateLine, ...] = ()
    every = (*tables, *made)
    if over_library and every:
        preamble = digest_ids(weave.library.encoder.preamble_ids)
        calibrated = EvidencedGate(tables, made, preamble)
        measured = sorted({cell.strategy for table in every for cell in table.cells})
        gate = tuple(
            _line(calibrated.min_ratio(strategy, bound, USUAL), strategy, bound, moves)
            for strategy in measured
            if strategy != ORDER_CELL
        )
    kinds = list(dict.fromkeys(table.kind for table in every))
    by_subject = sorted(every, key=lambda table: (kinds.index(table.kind), table.mean_chunks))
    curves = tuple(curve for table in by_subject for curve in _curves(table))
    return QualityView(bound, doubt, curves, gate, audited, moves)


def _tables(weave: LocalModel, over_library: bool) -> tuple[tuple[Table, ...], tuple[Table, ...]]:
    """Tables of the model, and those that were made from the documents."""
    profile, revision = weave.profile, weave.runtime.decoder.calibrated_as.revision
    made = weave.library.kv.worth.evidence.tables() if over_library else ()
    if profile is None:
        return (), made
    if not over_library:
        return tuple(table for table in profile.calibration if table.revision == revision), ()
    encoder = weave.library.encoder
    preamble = digest_ids(encoder.preamble_ids)
    found = profile.tables_for(weave.runtime.decoder, encoder.encoding_context, preamble)
    return found.that_count(is_precise=weave.library.kv.worth.evidence.is_rounding_small), made


def _line(verdict: Verdict, strategy: str, bound: float, moves: Sequence[GateMove]) -> GateLine:
    """What calibration says, and where the audit has moved that. (The audited gate itself moves
    when it is asked: here it is only looked at.)"""
    if verdict.ratio is None:
        return GateLine(strategy, None, str(verdict.reason))
    moved = [m for m in moves if m[:3] == (strategy, bound, verdict.ratio)]
    if not moved or moved[-1].ratio == verdict.ratio:
        return GateLine(strategy, verdict.ratio, "")
    return GateLine(strategy, moved[-1].ratio, f"{Reason.AUDITED} at {verdict.ratio:g}")


def _subject(table: Table) -> str:
    """What a table speaks of, for people."""
    return table.kind if table.kind == OWN else f"{table.kind}, {round(table.mean_chunks)} chunks"


def _curves(table: Table) -> Sequence[QualityCurve]:
    points: dict[str, list[QualityPoint]] = {}
    for cell in table.widen_intervals() or table.cells:
        point = QualityPoint(cell.ratio, cell.kl, cell.kl_high, cell.flips, cell.work)
        points.setdefault(cell.strategy, []).append(point)
    return [
        QualityCurve(strategy, _subject(table), table.num_questions, tuple(sorted(found)))
        for strategy, found in sorted(points.items())
        if strategy != ORDER_CELL
    ]


class MeasuredQuality(NamedTuple):
    """One way against full prefill."""

    kl: float  # nats per token, mean over the positions
    same_first: bool  # both would begin with the same token
    positions: int  # that were compared


def is_comparable(full: WatchedTokens, way: WatchedTokens) -> bool:
    """Whether a way was watched over full prefill's tokens: it gave the same ones, or had to."""
    return len(full.token_ids) > 0 and way.token_ids == full.token_ids


def measure_quality(full: WatchedTokens, way: WatchedTokens) -> MeasuredQuality:
    """Measure a way that `is_comparable`."""
    assert is_comparable(full, way), "both are watched over the same tokens"
    exact, other = torch.stack(full.distributions), torch.stack(way.distributions)
    score = judge(exact, other, full.token_ids)
    return MeasuredQuality(score.kl_mean, not score.first_flips, len(full.token_ids))
