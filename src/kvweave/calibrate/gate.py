"""What each strategy costs in quality and in work, and the choice that follows from it.

A table holds one cell per strategy and ratio, measured against full prefill (see measure.py). The
gate is `choose`: the cheapest cell whose mean KL is surely below a bound and that hardly ever
changes a first token. Pure data: no tensors, no model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BOUND = 0.02  # nats per token
MAX_FLIPS = 0.02  # share of questions whose first token may change
ENOUGH_QUESTIONS = 100  # with fewer, intervals are too narrow for what they claim


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


@dataclass(frozen=True, slots=True)
class Table:
    """Cells measured together: one model, one encoding context, one set of questions."""

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


def choose(cells: Sequence[Cell], bound: float = BOUND) -> Cell | None:
    """The cell with the least work within `bound`; None: compute exactly.

    Within means: the upper end of the 95 % interval of mean KL is at most `bound`, and at most
    MAX_FLIPS of the first tokens change. A cell that works as much as full prefill is no shortcut.
    Among equals the one with the lower KL wins.
    """
    allowed = [cell for cell in cells if is_within(cell, bound) and cell.work < 1.0]
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
