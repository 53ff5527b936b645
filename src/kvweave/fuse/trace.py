"""What a fused prefill leaves for those who look closer: when each layer was there and computed,
how many rows ran through it, and what every stored token scored.

References only. Scores stay where they were computed, and nothing waits for them: who reads them
copies them. On a GPU the host runs ahead of the device, so that a clock read here would tell
nothing and waiting for the device would cost time: no times of layers are kept there.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class ScoredHits(NamedTuple):
    """Scores that rows were chosen by."""

    positions: Tensor  # [n] on the host, ascending
    scores: Tensor  # [n] wherever they were computed


class LayerTimes(NamedTuple):
    """One layer of a pass, by time.perf_counter."""

    started_s: float  # the pass got there
    laid_s: float  # its stored KV was in place
    ended_s: float  # its rows were computed


@dataclass(frozen=True, slots=True, eq=False)
class PassTrace:
    """One fused prefill."""

    started_s: float  # choosing rows began; by time.perf_counter, as the others
    chosen_s: float  # it was over
    ended_s: float  # rows were computed; of a prepared prompt: its layers were laid
    rows_per_layer: tuple[int, ...]
    layers: tuple[LayerTimes, ...]  # none on a GPU, nor where rows are computed in slices
    scored: tuple[ScoredHits, ...]  # the last word on a token is the last one; none: no scores
    scored_layers: tuple[int, ...]  # whose stored keys or values were looked at
