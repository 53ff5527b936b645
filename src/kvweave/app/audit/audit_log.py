"""What audits found, by strategy and ratio, and what the gate made of it; kept with the knowledge
base.

    <knowledge base>/audit.json
    {"version": 1, "audits": [{"model", "encoding", "cells": […], "gate": […]}, …]}

KL of an answer is the mean of KL(full ‖ fused) over its first tokens: not negative, else anything.
One entry for each model and kind of chunk KV that was audited here: figures of one say nothing of
another. The newest answers count, WINDOW of each strategy and ratio.
"""

import json
import logging
import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvweave.app.library.library import Library
from kvweave.app.library.runtime import ModelRuntime
from kvweave.calibrate.gate import MAX_FLIPS
from kvweave.corpus.disk_files import atomic_file
from kvweave.metrics import Metrics

log = logging.getLogger(__name__)
FILE = "audit.json"
VERSION = 1
WINDOW = 500  # answers of one strategy and ratio that are remembered
ENOUGH = 8  # with fewer, nothing is found
MOST_MOVES = 64  # that are remembered, of strategies and bounds
SURE = math.log(20.0)  # evidence: 1 in 20 at most, if there were nothing to be found
STAKES = np.array([0.05, 0.1, 0.2, 0.4, 0.8])  # none is best for all: all are held
ROUNDING = 1e-6  # nats: a bound below is none that arithmetic could hold
TIMES = (2.0, 4.0, 8.0, 16.0)  # a share of flips that is so many times too large


class AuditSubject(NamedTuple):
    """What is audited: what a model computes from one kind of chunk KV."""

    model: str  # revision of the decoder
    encoding: str  # encoding context and codec of the chunk KV


class AuditFigures(NamedTuple):
    """Figures of the answers of one strategy at one ratio that are remembered."""

    answers: int = 0  # audited
    kl: float = 0.0  # mean over them, nats per token
    kl_low: float = 0.0  # its 95 % interval, as if there were no other look at it
    kl_high: float = math.inf
    flips: int = 0  # answers whose first token would have been another

    @classmethod
    def from_answers(cls, kl: Sequence[float], flips: Sequence[bool]) -> "AuditFigures":
        count = len(kl)
        if not count:
            return cls()
        values = np.asarray(kl)
        mean = float(values.mean())
        if count == 1:
            return cls(1, mean, flips=sum(flips))
        half = _t95(count - 1) * float(values.std(ddof=1)) / math.sqrt(count)
        return cls(count, mean, max(0.0, mean - half), mean + half, sum(flips))

    @property
    def flip_share(self) -> float:
        return self.flips / self.answers if self.answers else 0.0

    def document(self) -> dict[str, Any]:
        """Plain JSON; null is not known."""
        is_known = self.answers > 0
        high = round(self.kl_high, 6) if math.isfinite(self.kl_high) else None
        return {
            "answers": self.answers,
            "kl": round(self.kl, 6) if is_known else None,
            "kl_low": round(self.kl_low, 6) if high is not None else None,
            "kl_high": high,
            "flips": self.flips,
        }


class AuditNote(NamedTuple):
    """What the audit has to do with one answer."""

    is_chosen: bool  # it is to be computed exactly, when nothing else is to do
    figures: AuditFigures  # of its strategy and ratio, when it was asked for

    def document(self) -> dict[str, Any]:
        return {"chosen": self.is_chosen, **self.figures.document()}


class GateMove(NamedTuple):
    """Where the audit has moved a strategy, under one bound."""

    strategy: str
    bound: float
    calibrated: float  # the ratio that calibration allows
    ratio: float | None  # the one that is taken; None: the strategy is refused
    moves: int = 0  # how often it moved so far
    date: str = ""  # of the last one, ISO


class AuditedCell(NamedTuple):
    """What was found of one strategy at one ratio."""

    strategy: str
    ratio: float
    total: int  # audits ever, of which the newest are in the figures
    figures: AuditFigures


@dataclass(slots=True)
class _AuditCell:
    """One strategy at one ratio."""

    kl: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    flips: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    total: int = 0  # audits ever
    reopened: int = 0  # times it was tried again after it was found over the bound
    figures: AuditFigures = field(default_factory=AuditFigures)
    over: dict[float, bool] = field(default_factory=dict)  # by bound, until the next audit

    def update_figures(self) -> None:
        self.figures = AuditFigures.from_answers(self.kl, self.flips)
        self.over.clear()

    def is_over(self, bound: float) -> bool:
        if bound not in self.over:
            figures = self.figures
            self.over[bound] = figures.answers >= ENOUGH and (
                evidence_above(self.kl, bound) >= SURE
                or evidence_of_flips(figures.flips, figures.answers, MAX_FLIPS) >= SURE
            )
        return self.over[bound]


class AuditLog:
    """Running figures of one subject. Any thread. `save` it after a change: nothing else writes.

    Without a path all of it is in memory. A file that cannot be read is left behind with a warning;
    one that cannot be written costs a warning once, and the figures go on in memory. Two processes
    that write one file do not add up: the last one's figures stay.
    """

    def __init__(
        self, subject: AuditSubject, metrics: Metrics | None = None, path: Path | None = None
    ) -> None:
        self.subject = subject
        self.metrics = metrics or Metrics()  # by strategy and ratio; gate moves
        self._path = path
        self._lock = threading.RLock()
        self._cells: dict[tuple[str, float], _AuditCell] = {}
        self._moves: dict[tuple[str, float, float], GateMove] = {}
        self._version = 0
        self._saved = 0
        self._saving = threading.Lock()
        self._may_warn = True
        entry = next((e for e in self._entries() if _subject_of(e) == subject), None)
        if entry is not None:
            self._take(entry)

    @property
    def version(self) -> int:
        """Another one whenever figures have changed."""
        return self._version

    def add(self, strategy: str, ratio: float, kl: float, *, flipped: bool) -> None:
        """An answer was audited."""
        with self._changing(strategy, ratio) as cell:
            cell.kl.append(float(f"{kl:.6g}"))
            cell.flips.append(flipped)
            cell.total += 1
        at, metrics = f"{ratio:g}", self.metrics
        metrics.count("audit_answers_total", strategy=strategy, ratio=at)
        metrics.count("audit_flips_total", int(flipped), strategy=strategy, ratio=at)

    def reopen(self, strategy: str, ratio: float) -> None:
        """Forget what was found of a strategy at a ratio: it is tried again."""
        with self._changing(strategy, ratio) as cell:
            cell.kl.clear()
            cell.flips.clear()
            cell.reopened += 1

    def figures(self, strategy: str, ratio: float) -> AuditFigures:
        return self._peek(strategy, ratio).figures

    def total(self, strategy: str, ratio: float) -> int:
        """Audits ever, of which the newest are remembered."""
        return self._peek(strategy, ratio).total

    def times_reopened(self, strategy: str, ratio: float) -> int:
        return self._peek(strategy, ratio).reopened

    def _peek(self, strategy: str, ratio: float) -> _AuditCell:
        with self._lock:
            return self._cells.get((strategy, ratio)) or _AuditCell()

    def list_cells(self) -> list[AuditedCell]:
        """Every strategy and ratio that was audited."""
        with self._lock:
            return [
                AuditedCell(strategy, ratio, cell.total, cell.figures)
                for (strategy, ratio), cell in sorted(self._cells.items())
            ]

    def moves(self) -> list[GateMove]:
        """Where the gate was moved to."""
        with self._lock:
            return list(self._moves.values())

    def is_over(self, strategy: str, ratio: float, bound: float) -> bool:
        """Whether it surely costs more than the bound, or flips more than calibration allows."""
        with self._lock:
            cell = self._cells.get((strategy, ratio))
            return cell is not None and cell.is_over(bound)

    def is_open_question(self, strategy: str, ratio: float, bound: float) -> bool:
        """Whether there are few audits, or they look bad and that is not sure."""
        figures = self.figures(strategy, ratio)
        looks_bad = figures.kl > bound or figures.flip_share > MAX_FLIPS
        if figures.answers < ENOUGH:
            return True
        return looks_bad and not self.is_over(strategy, ratio, bound)

    def move(self, strategy: str, bound: float, calibrated: float, ratio: float | None) -> bool:
        """The gate takes this ratio from now on. False: it did so before."""
        key = (strategy, bound, calibrated)
        with self._lock:
            before = self._moves.get(key)
            if ratio == (calibrated if before is None else before.ratio):
                return False
            now = datetime.now(UTC).isoformat(timespec="seconds")
            moves = 1 if before is None else before.moves + 1
            self._moves.pop(key, None)
            self._moves[key] = GateMove(strategy, bound, calibrated, ratio, moves, now)
            while len(self._moves) > MOST_MOVES:
                del self._moves[next(iter(self._moves))]
            self._version += 1
        self.metrics.count("audit_gate_moves_total", strategy=strategy)
        return True

    def save(self) -> None:
        """Write what has changed since the last time."""
        with self._saving:
            with self._lock:
                version, entry = self._version, self._entry()
            if self._path is None or version == self._saved:
                return
            others = [e for e in self._entries() if _subject_of(e) != self.subject]
            text = json.dumps({"version": VERSION, "audits": [*others, entry]})
            try:
                with atomic_file(self._path) as file:
                    file.write(text.encode())
            except OSError as error:
                self._warn("cannot write %s: %s; audits are kept in memory", error)
                return
            self._saved = version

    @contextmanager
    def _changing(self, strategy: str, ratio: float) -> Iterator[_AuditCell]:
        with self._lock:
            cell = self._cells.setdefault((strategy, ratio), _AuditCell())
            yield cell
            cell.update_figures()
            self._version += 1
            self._show(strategy, ratio, cell.figures)

    def _show(self, strategy: str, ratio: float, figures: AuditFigures) -> None:
        labels = {"strategy": strategy, "ratio": f"{ratio:g}"}
        self.metrics.gauge("audit_window_answers", figures.answers, **labels)
        self.metrics.gauge("audit_kl_nats", figures.kl, **labels)
        self.metrics.gauge("audit_kl_low_nats", figures.kl_low, **labels)
        self.metrics.gauge("audit_kl_high_nats", figures.kl_high, **labels)
        self.metrics.gauge("audit_flip_share", figures.flip_share, **labels)

    def _entry(self) -> dict[str, Any]:
        """The lock is held."""
        cells = [
            {
                "strategy": strategy,
                "ratio": ratio,
                "total": cell.total,
                "reopened": cell.reopened,
                "kl": list(cell.kl),
                "flips": [int(flip) for flip in cell.flips],
            }
            for (strategy, ratio), cell in self._cells.items()
        ]
        gate = [move._asdict() for move in self._moves.values()]
        return {**self.subject._asdict(), "cells": cells, "gate": gate}

    def _entries(self) -> list[dict[str, Any]]:
        try:
            return [] if self._path is None else read_entries(self._path)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            self._warn("%s cannot be read, audits start anew: %s", error)
            return []

    def _take(self, entry: dict[str, Any]) -> None:
        for each in entry["cells"]:
            cell = _AuditCell(total=each["total"], reopened=each["reopened"])
            cell.kl.extend(each["kl"])
            cell.flips.extend(bool(flip) for flip in each["flips"])
            cell.update_figures()
            self._cells[each["strategy"], each["ratio"]] = cell
            self._show(each["strategy"], each["ratio"], cell.figures)
        for each in entry["gate"]:
            move = GateMove(**each)
            self._moves[move.strategy, move.bound, move.calibrated] = move

    def _warn(self, words: str, error: Exception) -> None:
        if self._may_warn:
            self._may_warn = False
            log.warning(words, self._path, error)


def read_entries(path: Path) -> list[dict[str, Any]]:
    """What a file says, one entry for each subject; none if it is not there. Raises OSError, or
    ValueError and its like if it is damaged."""
    try:
        told = json.loads(path.read_bytes())
    except FileNotFoundError:
        return []
    if told["version"] != VERSION:
        raise ValueError(f"version {told['version']} of another kvweave")
    entries: list[dict[str, Any]] = told["audits"]
    for entry in entries:
        _check(entry)
    return entries


def _check(entry: dict[str, Any]) -> None:
    """Raises ValueError, TypeError or KeyError unless an entry is whole."""
    _subject_of(entry)
    for each in entry["cells"]:
        AuditFigures.from_answers(
            [float(kl) for kl in each["kl"]], [bool(f) for f in each["flips"]]
        )
        if not isinstance(each["strategy"], str) or len(each["kl"]) != len(each["flips"]):
            raise ValueError(f"no cell: {each}")
        float(each["ratio"]), int(each["total"]), int(each["reopened"])
    for each in entry["gate"]:
        GateMove(**each)


def _subject_of(entry: dict[str, Any]) -> AuditSubject:
    return AuditSubject(entry["model"], entry["encoding"])


def open_log(runtime: ModelRuntime, library: Library | None, metrics: Metrics) -> AuditLog:
    """The log of a model: with its knowledge base, in memory where there is none."""
    revision = runtime.decoder.revision
    if library is None:
        return AuditLog(AuditSubject(revision, "documents"), metrics)
    encoder = library.encoder
    encoding = f"{encoder.encoding_context} {encoder.context.codec}"
    return AuditLog(AuditSubject(revision, encoding), metrics, library.kb.folder / FILE)


def evidence_above(kl: Sequence[float], bound: float) -> float:
    """The logarithm of the evidence that the mean is above `bound`, which may be looked at after
    every answer.

    A gambler who stakes a share of what they have on each answer's KL being above the bound gains
    nothing on average while the mean is not: e = Π (1 + stake · (kl / bound − 1)) reaches 20 with a
    chance of 1 in 20 at most, ever, however KL is distributed (Ville's inequality).
    """
    odds = np.asarray(kl, dtype=np.float64) / max(bound, ROUNDING) - 1.0
    wealth = np.log1p(STAKES[:, None] * odds[None, :]).sum(axis=1)  # [stakes]
    return float(np.logaddexp.reduce(wealth)) - math.log(len(STAKES))


def evidence_of_flips(flips: int, answers: int, most: float) -> float:
    """The logarithm of the evidence that a larger share than `most` of the answers flips, which may
    be looked at after every answer."""
    shares = [min(times * most, 0.95) for times in TIMES]
    ratios = [
        flips * math.log(share / most) + (answers - flips) * math.log((1 - share) / (1 - most))
        for share in shares
    ]
    return float(np.logaddexp.reduce(ratios)) - math.log(len(ratios))


def _t95(freedom: int) -> float:
    """Student's t at 97.5 %, a little small below three degrees of freedom."""
    return 1.96 + 2.37 / freedom + 2.82 / freedom**2
