"""What fusing costs on the documents of one knowledge base, question by question.

A server asks its documents about themselves in idle time (`app/auto/self_calibration.py`): where
no table speaks for its model, whether anything may be fused; else whether fewer rows are enough
here than for the worst of all kinds of questions. This is what it has found so far: it says which
settings the next question tries, what the gate may make of the answers, and when enough were asked.

    noise      of a half type whose weights have tables in float32: 24 questions, everything
               recomputed. Where that is surely full prefill but for NOISE_SHARE of the bound, those
               tables count. A table says what fused KV costs against full prefill of the same
               decoder; rounding changes both alike, and what it adds to the difference is this
    screen     a few questions try every candidate at one ratio; the best is measured, the screening
               itself counts for nothing else. Left out where a strategy is let through already
    measure    looks after 24, 48, 100 and 200 questions; each gives a table for the gate

Few questions open the gate only for what is clearly within the bound (`Table.widen_intervals`);
beside tables that came with the model 100 are needed. It ends early where no cell, or none that is
cheaper, can come within the bound any more.
"""

import json
import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from kvweave.calibrate.bootstrap import Bootstrap
from kvweave.calibrate.gate import (
    CLOSE_CALLS,
    ENOUGH_QUESTIONS,
    MADE_ALONE,
    MADE_BESIDE,
    MAX_FLIPS,
    Cell,
    Table,
    choose,
    widen,
)
from kvweave.calibrate.measure import NOISE_SHARE, CaseOutcomes, Outcome, Setting
from kvweave.calibrate.tabulate import TableOrigin, tabulate
from kvweave.calibrate.trials import TrialScore
from kvweave.corpus.disk_files import atomic_file
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.strategy import ModelFacts

log = logging.getLogger(__name__)

FORMAT = 1
CANDIDATES = ("weave", "weave-deep", "weave-through")
SCREEN_RATIO = 0.3
SCREEN_QUESTIONS = 8
RATIOS = (0.15, 0.25, 0.35, 0.5)
LOOKS = (24, 48, ENOUGH_QUESTIONS, 200)  # questions after which there is a new table
NOISE_QUESTIONS = LOOKS[0]  # that everything is recomputed for as well
SURE = 0.01  # a share is surely above a bound if as many would be seen less often than this
DATA = "made from the documents"


class SettingName(NamedTuple):
    """A strategy at a ratio, by name."""

    strategy: str
    ratio: float


class AnsweredQuestion(NamedTuple):
    """What came of one question."""

    num_tokens: int  # of its prompt
    num_chunks: int
    num_chunk_tokens: int
    noise: float | None  # mean KL with everything recomputed; None: not measured
    outcomes: dict[SettingName, Outcome]


class EvidenceState(NamedTuple):
    """How far the questions are, for people."""

    # measuring: nothing was found yet, open: the gate lets something through by what was found, or
    # by what it had before
    state: Literal["measuring", "open", "shut"]
    asked: int  # questions, with those of the screening
    most: int  # that are asked, unless it ends early
    strategy: str | None  # that the gate lets through so far, at its least ratio; None: none
    ratio: float | None
    why: str  # it is shut, or why no less than before is enough


@dataclass(frozen=True, slots=True)
class EvidenceSubject:
    """What is measured. Evidence of one subject is worth nothing for another."""

    revision: str  # of the decoder: weights, settings and precision
    dtype: str
    encoding: str  # for people
    context: str  # see contexts.variant_name
    preamble: str  # digest
    num_layers: int
    codec: str  # that chunk KV is stored in


class OwnEvidence:
    """The answers so far, kept in a file. Any thread; one adds."""

    def __init__(
        self,
        subject: EvidenceSubject,
        bound: float,
        path: Path | None = None,
        allowed: Cell | None = None,
        *,
        is_beside: bool = False,
        is_lent: bool = False,
    ) -> None:
        """`bound` in nats per token is what it is measured for. `path`: where answers are kept;
        those of another subject that lie there are replaced. None: nowhere. `allowed`: what is let
        through without it; then only less of that strategy is tried. `is_beside`: tables of the
        model speak as well, so that its own are held to what `gate.speaking_beside` says. Of both
        nothing holds where those tables are lent (`is_lent`), until rounding was measured."""
        self.subject = subject
        self.bound = bound
        self._allowed = allowed
        self._is_beside = is_beside
        self._is_lent = is_lent
        # Whether tables of the same weights in float32 count: they need not, or the first stage has
        # shown that rounding surely costs no more than NOISE_SHARE of the bound.
        self.is_rounding_small = not is_lent
        self.is_asked = False  # whether somebody adds to it; who does says so
        self._path = path
        self._lock = threading.Lock()  # guards the rest
        self._noisy: list[AnsweredQuestion] = []  # of the first stage
        self._screened: list[AnsweredQuestion] = []
        self._answered: list[AnsweredQuestion] = []
        self._by_look: dict[int, Table] = {}
        if path is not None:
            self._read(path)

    # ---- what is known

    @property
    def look(self) -> int:
        """Questions of the last look, 0 before the first. A new look is a new table, or lent ones
        that count."""
        with self._lock:
            return self._look() + (NOISE_QUESTIONS if self.is_rounding_small else 0)

    @property
    def allowed(self) -> Cell | None:
        """What is let through without it."""
        return self._allowed if self.is_rounding_small else None

    @property
    def num_answered(self) -> int:
        """Questions that were answered, with those of the screening."""
        with self._lock:
            return len(self._noisy) + len(self._screened) + len(self._answered)

    def tables(self) -> tuple[Table, ...]:
        """The table of the last look; none before the first, nor where rounding alone makes too
        much of the bound: what was measured then is the rounding. Where something is let through
        already, there is one as soon as less was found to be enough."""
        table = self._table()
        if table is None or not self._is_precise():
            return ()
        if self.allowed is None:
            return (table,)
        proven = self._find_proven(table)
        if proven is None:
            return ()
        # fewer rows may pass as well and cost more, by more close calls
        return (replace(table, cells=tuple(c for c in table.cells if c.ratio >= proven.ratio)),)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be asked."""
        if self._is_in_noise:
            return False
        state = self.state()
        return not self._settings() or (state.state != "measuring" and not self._may_narrow())

    def state(self) -> EvidenceState:
        """How far it is, and what the gate would make of it."""
        table, asked, allowed = self._table(), self.num_answered, self.allowed
        most = NOISE_QUESTIONS * self._is_lent + self._num_screening + LOOKS[-1]
        cell = None if table is None else self._find_proven(table)
        if cell is not None:
            return EvidenceState("open", asked, most, cell.strategy, cell.ratio, "")
        name, ratio = (None, None) if allowed is None else (allowed.strategy, allowed.ratio)
        why = self._why_hopeless(table)
        if why is None and table is not None and table.num_questions >= LOOKS[-1]:
            why = f"it is not surely within {self._held_to:g} nats per token"
        if why is None:
            return EvidenceState("measuring", asked, most, name, ratio, "")
        return EvidenceState("open" if allowed else "shut", asked, most, name, ratio, why)

    def next_settings(self) -> tuple[tuple[SettingName, ...], bool]:
        """What the next question tries, and whether everything is recomputed for it as well."""
        with self._lock:
            if self._is_in_noise:
                return (), True
            if len(self._screened) < self._num_screening:
                return tuple(SettingName(name, SCREEN_RATIO) for name in CANDIDATES), False
            # what is let through already was calibrated in this precision
            is_new = self.allowed is None and not self._is_lent
            checks_noise = is_new and len(self._answered) < NOISE_QUESTIONS
            return self._settings(), checks_noise

    def add(self, answered: AnsweredQuestion) -> None:
        """Take in the answers to one question, with the settings that `next_settings` named."""
        with self._lock:
            stage = self._answered
            if self._is_in_noise:
                stage = self._noisy
            elif len(self._screened) < self._num_screening:
                stage = self._screened
            stage.append(answered)
            self._judge_rounding()
            self._write()

    # ---- the judgement

    def _judge_rounding(self) -> None:
        if self._is_lent and len(self._noisy) == NOISE_QUESTIONS:
            noises = np.array([each.noise for each in self._noisy])
            found = Bootstrap(len(noises)).mean(noises)
            high = widen(found.mean, found.high, len(noises))
            self.is_rounding_small = bool(high <= NOISE_SHARE * self.bound)  # a NaN is not

    def _look(self) -> int:
        return max((look for look in LOOKS if look <= len(self._answered)), default=0)

    @property
    def _is_in_noise(self) -> bool:
        return self._is_lent and len(self._noisy) < NOISE_QUESTIONS

    @property
    def _held_to(self) -> float:
        is_beside = self._is_beside and self.is_rounding_small
        return (MADE_BESIDE if is_beside else MADE_ALONE) * self.bound

    @property
    def _num_screening(self) -> int:
        return SCREEN_QUESTIONS if self.allowed is None else 0

    def _settings(self) -> tuple[SettingName, ...]:
        """What is measured. Where something is let through, what is less than that; nothing where
        that strategy is none of those that chunk KV alone is enough for."""
        if self.allowed is None:
            return tuple(SettingName(self._choose_candidate(), ratio) for ratio in RATIOS)
        name, most = self.allowed.strategy, self.allowed.ratio
        ratios = RATIOS if name in CANDIDATES else ()
        return tuple(SettingName(name, ratio) for ratio in ratios if ratio < most)

    def _choose_candidate(self) -> str:
        """The candidate that cost least in the screening, with close calls computed again."""

        def cost(name: str) -> float:
            outcomes = [each.outcomes[SettingName(name, SCREEN_RATIO)] for each in self._screened]
            return sum(o.judged.kl_mean for o in outcomes if o.judged.margin >= CLOSE_CALLS[0])

        return min(CANDIDATES, key=cost)

    def _table(self) -> Table | None:
        with self._lock:
            look = self._look()
            if look and look not in self._by_look:
                self._by_look[look] = self._tabulate(self._answered[:look])
            return self._by_look.get(look)

    def _tabulate(self, answered: Sequence[AnsweredQuestion]) -> Table:
        subject, names = self.subject, self._settings()
        facts = ModelFacts(subject.num_layers)
        settings = [Setting(open_strategy(name, facts), ratio) for name, ratio in names]
        cases = [
            CaseOutcomes(
                each.num_tokens,
                each.num_chunks,
                None,
                {subject.encoding: [each.outcomes[setting] for setting in names]},
                {subject.encoding: each.noise or 0.0},
            )
            for each in answered
        ]
        origin = TableOrigin(
            subject.revision,
            subject.dtype,
            DATA,
            "",
            subject.context,
            subject.preamble,
            sum(each.num_chunk_tokens for each in answered),
        )
        return tabulate(cases, settings, subject.encoding, origin)

    def _mean_noise(self) -> float:
        """Mean KL with everything recomputed: what rounding alone makes."""
        with self._lock:
            every = (*self._noisy, *self._answered)
            noises = [each.noise for each in every if each.noise is not None]
        return sum(noises) / max(1, len(noises))

    def _is_precise(self) -> bool:
        return self._mean_noise() <= NOISE_SHARE * self.bound  # a NaN is not

    def _find_proven(self, table: Table) -> Cell | None:
        """What a table lets through; None: nothing, or nothing cheaper than what is let through
        without it."""
        if not self._is_precise():
            return None
        cell = choose(table.widen_intervals(), self._held_to)
        if self.allowed is None or cell is None:
            return cell
        is_enough = table.num_questions >= ENOUGH_QUESTIONS
        return cell if is_enough and cell.work < self.allowed.work else None

    def _may_narrow(self) -> bool:
        """Whether more questions would still say more, where something was found: few found it, or
        fewer rows may turn out to be enough."""
        table = self._table()
        cell = None if table is None else self._find_proven(table)
        if table is None or cell is None or table.num_questions >= LOOKS[-1]:
            return False
        less = [each for each in table.cells if each.ratio < cell.ratio]
        return table.num_questions < ENOUGH_QUESTIONS or not all(
            _is_hopeless(each, table.num_questions, self._held_to) for each in less
        )

    def _why_hopeless(self, table: Table | None) -> str | None:
        """Why no cell can come within the bound with more questions; None: one can."""
        if (table is not None or not self._is_in_noise) and not self._is_precise():
            return f"rounding alone costs {self._mean_noise():.2g} nats per token"
        if table is None or not all(
            _is_hopeless(cell, table.num_questions, self._held_to) for cell in table.cells
        ):
            return None
        best = min(table.cells, key=lambda cell: cell.kl)
        if best.work >= 1.0:
            return f"{best.close:.0%} of first tokens are too close to call"
        return f"recomputing {best.ratio:.0%} still costs {best.kl:.2g} nats per token"

    # ---- the file

    def _read(self, path: Path) -> None:
        try:
            found = json.loads(path.read_text("utf-8"))
            if found["format"] != FORMAT or found["subject"] != _subject_line(self.subject):
                return
            # lent tables may have come with another version: then there was no such stage
            self._noisy = [_parse(each) for each in found.get("noise", ())]
            self._judge_rounding()
            self._screened = [_parse(each) for each in found["screened"]]
            self._answered = [_parse(each) for each in found["answered"]]
            settings = set(self._settings())
            if not all(settings <= each.outcomes.keys() for each in self._answered):
                raise ValueError("other settings were tried")
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s cannot be read, and is measured again: %s", path.name, error)
            self._noisy, self._screened, self._answered = [], [], []
            self.is_rounding_small = not self._is_lent

    def _write(self) -> None:
        """Lock is held. What cannot be written is measured again after a restart."""
        if self._path is None:
            return
        document = {
            "format": FORMAT,
            "subject": _subject_line(self.subject),
            "noise": [_dump(each) for each in self._noisy],
            "screened": [_dump(each) for each in self._screened],
            "answered": [_dump(each) for each in self._answered],
        }
        try:
            with atomic_file(self._path) as file:
                file.write(json.dumps(document).encode())
        except OSError as error:
            log.warning("what fusing costs here cannot be kept: %s", error.strerror)


def _is_hopeless(cell: Cell, num_questions: int, bound: float) -> bool:
    """Whether a cell is surely outside: by KL, by first tokens, or because it is no shortcut."""
    num_flips = round(cell.flips * num_questions)
    return (
        cell.kl_low > bound
        or cell.work >= 1.0
        or _chance_of(num_flips, num_questions, MAX_FLIPS) < SURE
    )


def _chance_of(at_least: int, of: int, share: float) -> float:
    """How likely so many or more are of a kind, where each is with probability `share`."""
    fewer = (math.comb(of, n) * share**n * (1 - share) ** (of - n) for n in range(at_least))
    return 1.0 - sum(fewer)


def _subject_line(subject: EvidenceSubject) -> str:
    return "|".join(map(str, astuple(subject)))


def _dump(answered: AnsweredQuestion) -> list[Any]:
    outcomes = [
        [*name, *(None if v == math.inf else v for v in o.judged), o.nll_gap, o.work]
        for name, o in answered.outcomes.items()
    ]
    return [*answered[:4], outcomes]


def _parse(found: list[Any]) -> AnsweredQuestion:
    outcomes = {}
    tokens, chunks, chunk_tokens, noise, rows = found
    for strategy, ratio, *values, nll_gap, work in rows:
        judged = TrialScore._make(math.inf if value is None else value for value in values)
        outcomes[SettingName(strategy, ratio)] = Outcome(judged, nll_gap, work, None)
    return AnsweredQuestion(tokens, chunks, chunk_tokens, noise, outcomes)
