"""What each strategy costs in quality and in work, and the choice that follows from it.

A table holds one cell per strategy and ratio, measured against full prefill (see measure.py) on
questions of one kind. The gate is `choose`: the cheapest cell whose mean KL is surely below a bound
and that hardly ever changes a first token; of several kinds the worst decides (`worst_cells`). Pure
data: no tensors, no model.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvweave.config import QualitySettings

BOUND = QualitySettings().bound  # nats per token
MAX_FLIPS = 0.02  # share of questions whose first token may change
# An answer whose first token leads by less than this many nats is a close call: it is thrown away
# and computed exactly, before anything was handed out. Nearly all flips are such calls, because a
# first token that fusion overturns was never far ahead (docs/calibration.md has the figures). A
# cell takes the least of these that keeps its flips within MAX_FLIPS.
CLOSE_CALLS = (0.2, 0.25, 0.3)
ENOUGH_QUESTIONS = 100  # with fewer, intervals are too narrow for what they claim
FEWEST_QUESTIONS = 20  # with fewer there is no interval worth its name
ELSEWHERE = 0.5  # of the bound for what was measured behind another system prompt, or no history
# of the bound for questions made from documents: what people asked the same documents cost 1.4 and
# 2.6 times as much (bench/own_evidence.py). Where tables let something through already, less is at
# stake than where nothing would be fused without them
MADE_BESIDE, MADE_ALONE = 0.25, 0.5
# Up to here the length of a prompt was measured not to matter (its correlation with KL is below 0.2
# in all of eleven sets); beyond, only lengths that were measured pass.
LENGTH_MATTERS = 4096  # tokens
LONGER = 1.5  # times the longest prompt of a table: a longer one is for a table of more chunks too
USUAL_CHUNKS = 5  # that a question finds, unless it is told otherwise (`library.k`)
ORDER_CELL = "order"  # what full prefill of the chunks in another order costs: no way to fuse
OWN = "own"  # the kind of questions that a user brought


@dataclass(frozen=True, slots=True)
class Cell:
    """One strategy at one ratio. KL is KL(full prefill ‖ strategy) in nats per answer token."""

    strategy: str
    ratio: float  # share of the hits that was recomputed
    work: float  # rows through layers, probe included, as a share of full prefill's
    kl: float  # mean over questions
    kl_low: float  # its 95 % interval
    kl_high: float
    kl_p95: float  # of the questions' means
    kl_max: float  # the worst token of all
    flips: float  # share of questions whose first token changes
    top1: float  # share of tokens where both choose the same
    nll_gap: float  # on full prefill's own greedy answer, nats per token
    recovered: float | None = None  # share of plain reuse's KL that is gone
    gold_nll_gap: float | None = None  # on the known answer; None where none is known
    f1: float | None = None
    em: float | None = None
    close: float = 0.0  # share of questions whose first token was a close call: exact in the end
    close_call: float | None = None  # nats; None: the table's


@dataclass(frozen=True, slots=True)
class Table:
    """Cells measured together: one model, one encoding context, one set of questions.

    Figures are those of the answers that are served: close calls, computed exactly, differ in
    nothing, and their second prefill is in `work`.
    """

    encoding: str  # "filler:4", for people
    context: str  # the same with a digest of the filler's tokens, see contexts.variant_name
    preamble: str  # digest of the tokens that stood in front of all chunks
    revision: str  # of the decoder: weights, settings and precision
    dtype: str  # the same for people
    data: str  # name of the questions' file
    data_hash: str
    date: str  # ISO
    num_questions: int
    num_with_answers: int  # questions that f1, em and gold_nll_gap come from
    num_chunk_tokens: int  # in all prompts together
    mean_prompt_tokens: float
    noise: float  # highest mean KL of a question when everything is recomputed
    full_f1: float | None  # of full prefill
    full_em: float | None
    cells: tuple[Cell, ...]
    kind: str = OWN  # of the questions
    mean_chunks: float = 0.0
    most_prompt_tokens: int = 0  # of the longest prompt; 0: not known
    has_history: bool = False  # whether something was said before the questions
    # nats; first tokens that led by less were computed exactly, where a cell says nothing else
    close_call: float = 0.0

    @property
    def num_chunks(self) -> int:
        """Chunks that its prompts had at least, on average."""
        return int(self.mean_chunks)

    @property
    def longest_covered(self) -> float:
        """Tokens of a prompt that it speaks for; without end if it does not know its own."""
        return LONGER * self.most_prompt_tokens or math.inf

    def covers(self, num_chunks: int, num_tokens: int = 0) -> bool:
        """Whether its prompts had as many chunks as that, and were about as long."""
        has_chunks = self.num_chunks >= num_chunks or not self.mean_chunks  # 0: not known
        return has_chunks and self.longest_covered >= num_tokens

    @property
    def words(self) -> str:
        """What was asked, for people."""
        if self.kind == OWN:
            return f"{self.num_questions} questions of your own ({self.data})"
        return f"{self.num_questions} {self.kind} questions, {round(self.mean_chunks)} chunks"

    @property
    def subject(self) -> tuple[str, int]:
        """What it speaks of: a kind of questions at some number of chunks. What a user asked is one
        subject, whatever it brought."""
        return self.kind, 0 if self.kind == OWN else self.num_chunks

    def widen_intervals(self) -> tuple[Cell, ...]:
        """Return its cells with intervals that allow for few questions: below ENOUGH_QUESTIONS the
        upper half is wider by sqrt(ENOUGH_QUESTIONS / n), because a resample of a few questions has
        never seen the rare bad one. Below FEWEST_QUESTIONS there are none."""
        if self.num_questions < FEWEST_QUESTIONS:
            return ()
        if self.num_questions >= ENOUGH_QUESTIONS:
            return self.cells
        count = self.num_questions
        return tuple(replace(c, kl_high=widen(c.kl, c.kl_high, count)) for c in self.cells)


def widen(mean: float, high: float, num_questions: int) -> float:
    """Return the upper end of an interval that allows for few questions."""
    return mean + math.sqrt(max(1.0, ENOUGH_QUESTIONS / num_questions)) * (high - mean)


def deciding_tables(
    tables: Sequence[Table], num_chunks: int = 0, num_tokens: int = 0
) -> tuple[Table, ...]:
    """Return the tables that have a say on prompts of so many chunks and tokens: the user's own
    alone where they asked enough and had such prompts, else all of them."""
    enough = [
        t
        for t in tables
        if t.kind == OWN
        and t.num_questions >= ENOUGH_QUESTIONS
        and t.covers(num_chunks, num_tokens)
    ]
    return tuple(enough or tables)


def speaking_beside(
    made: Iterable[Table], tables: Sequence[Table], num_chunks: int = 0, num_tokens: int = 0
) -> tuple[Table, ...]:
    """Return those of `made`, from a knowledge base's own documents, that prove something by
    themselves on prompts of so many chunks and tokens, where `tables` were measured of the model:
    where there are none, all of them. Beside tables they are held to MADE_BESIDE of the bound."""
    return tuple(
        t
        for t in made
        if not tables or (t.num_questions >= ENOUGH_QUESTIONS and t.covers(num_chunks, num_tokens))
    )


def tables_for_size(
    tables: Iterable[Table], num_chunks: int, num_tokens: int = 0
) -> tuple[Table, ...]:
    """Return the tables that speak for prompts of so many chunks and tokens.

    Of each kind these are the smallest that covers them, or else the largest, and all that are
    smaller still. More chunks mostly cost more, but few questions do not prove it: what failed with
    fewer has its say with more.
    """
    by_kind: dict[str, list[Table]] = {}
    for table in sorted(tables, key=lambda table: table.mean_chunks):
        by_kind.setdefault(table.kind, []).append(table)
    speaking: list[Table] = []
    for found in by_kind.values():
        for table in found:
            speaking.append(table)
            if table.covers(num_chunks, num_tokens):
                break
    return tuple(speaking)


def worst_cells(tables: Iterable[Table]) -> list[Cell]:
    """Return per strategy and ratio that every table has the worst figures of any of them."""
    every = list(tables)
    if len(every) == 1:
        return list(every[0].widen_intervals())
    found: list[dict[tuple[str, float], Cell]] = [
        {(cell.strategy, cell.ratio): cell for cell in table.widen_intervals()} for table in every
    ]
    if not found:
        return []
    common = [key for key in found[0] if all(key in cells for cells in found)]
    return [_worst([cells[key] for cells in found]) for key in common]


def _worst(cells: Sequence[Cell]) -> Cell:
    by_kl = max(cells, key=lambda cell: cell.kl_high)
    return replace(
        by_kl, flips=max(cell.flips for cell in cells), work=max(cell.work for cell in cells)
    )


def choose(cells: Sequence[Cell], bound: float = BOUND) -> Cell | None:
    """The cell with the least work within `bound`; None: compute exactly.

    Within means: the upper end of the 95 % interval of mean KL is at most `bound`, and at most
    MAX_FLIPS of the first tokens change. A cell that works as much as full prefill is no shortcut.
    Among equals the one with the lower KL wins.
    """
    allowed = [
        cell
        for cell in cells
        if is_within(cell, bound) and cell.work < 1.0 and cell.strategy != ORDER_CELL
    ]
    return min(allowed, key=_rank, default=None)


def cheapest(choices: Mapping[str, Cell | None]) -> str | None:
    """The encoding whose choice costs the least work, by name; None if all of them are exact.

    As in `choose`, among equals the lower KL wins.
    """
    chosen = {name: cell for name, cell in choices.items() if cell is not None}
    return min(chosen, key=lambda name: _rank(chosen[name]), default=None)


def is_within(cell: Cell, bound: float) -> bool:
    return cell.kl_high <= bound and cell.flips <= MAX_FLIPS


def _rank(cell: Cell) -> tuple[float, float]:
    return cell.work, cell.kl
