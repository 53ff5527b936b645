"""Rows that stop short of the last layers.

A row is recomputed for what the question takes from it, and a question has taken most of that by
the layers it searches in. Behind them every row less is time saved. A few go on, the ones looked at
most: what they tell about the rest of their chunks (drift.py) counts up to the end.

    layers 0 … layer          all chosen rows
    behind the keys of layer  a share of them, missing chunks, the question
"""

from typing import NamedTuple

from torch import Tensor


class Taper(NamedTuple):
    """Where most of the chosen rows stop."""

    layer: int  # the last one whose keys and values all of them write
    share: float  # of them that go on

    def applies(self, num_layers: int) -> bool:
        """Whether any row stops early: behind the last keys only the last row matters anyway."""
        return self.layer < num_layers - 1

    def staying(self, num_chosen: int) -> int:
        """How many of `num_chosen` rows go on: one at least."""
        return min(num_chosen, max(1, round(self.share * num_chosen)))

    def depth(self, num_layers: int) -> float:
        """Layers that a chosen row runs through on average, as a share of all."""
        if not self.applies(num_layers):
            return 1.0
        return (self.layer + self.share * (num_layers - self.layer)) / num_layers


class TaperedRows(NamedTuple):
    """A taper for one request."""

    layer: int
    stay: Tensor  # [C] chosen hits that go on: positions on the host, ascending
    rows: Tensor  # [R] these and every row that was not chosen: missing chunks, the question
