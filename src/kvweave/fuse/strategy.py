"""A strategy: a selector, its default ratio and what else belongs to it."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvweave.errors import RequestError
from kvweave.fuse.needs import Needs
from kvweave.fuse.request import budget, check_ratio
from kvweave.fuse.selector import AnySelector
from kvweave.fuse.taper import Taper


@dataclass(frozen=True, slots=True)
class Strategy:
    """How to prefill a prompt whose chunks are stored: which rows are recomputed, and how."""

    name: str
    selector: AnySelector | None  # None: nothing is recomputed
    ratio: float  # the default
    drift: float = 0.0  # the rest of each chunk moves by that part of the mean change (drift.py)
    taper: Taper | None = None  # most rows leave before the last layers
    reuses: str = "all"  # "all" stored chunks, only the "exact" ones, or "none"
    per_chunk: int = 0  # rows of each chunk that are recomputed; 0: the ratio says how many of all

    @property
    def can_be_sliced(self) -> bool:
        """Whether its rows are known before the pass, so that they may be computed a few at a
        time."""
        return self.selector is None or not self.selector.in_flight

    @property
    def takes_ratio(self) -> bool:
        """Whether a ratio says how many rows are recomputed."""
        return self.selector is not None and not self.per_chunk

    def recomputes(self, ratio: float) -> bool:
        """Whether some rows of stored chunks are recomputed at this ratio."""
        return bool(self.per_chunk or (self.selector is not None and ratio))

    def num_rows(self, lengths: Sequence[int], ratio: float) -> int:
        """Rows that are recomputed of stored chunks of these lengths."""
        if self.per_chunk:
            return sum(min(self.per_chunk, length) for length in lengths)
        return 0 if self.selector is None else budget(sum(lengths), ratio)

    def depth(self, num_layers: int) -> float:
        """Layers that a recomputed row runs through on average, as a share of all."""
        return 1.0 if self.taper is None else self.taper.depth(num_layers)

    def needs(self, num_layers: int) -> Needs:
        return Needs() if self.selector is None else self.selector.needs(num_layers)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What strategies must know of a model."""

    num_layers: int
    # best first, from `kvweave calibrate layers`; (): nobody looked for them
    critical_layers: tuple[int, ...] = ()


REUSE = Strategy("reuse", None, 0.0)


def chosen_ratio(strategy: Strategy, ratio: float | None) -> float:
    """The ratio to use: the one given, or the strategy's own. Raises RequestError."""
    if ratio is None:
        return strategy.ratio
    if not strategy.takes_ratio and ratio != strategy.ratio:
        raise RequestError(f"reuse {strategy.name!r} takes no ratio; leave it out")
    check_ratio(ratio)
    return ratio
