"""A selector of your own: it recomputes the last rows that may be chosen.

pip install ./examples/selector        # beside kvweave
kvweave ask "How wide is a zorb?" --kb kb --reuse last-rows --ratio 0.3 --explain
kvweave calibrate --questions mine.txt --kb kb --strategies last-rows,weave
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvweave.fuse.needs import Needs
from kvweave.fuse.selector import Scene
from kvweave.fuse.strategy import ModelFacts


@dataclass(frozen=True, slots=True)
class LastRows:
    in_flight: ClassVar[Literal[False]] = False  # it chooses before the pass, not inside it

    def needs(self, num_layers: int) -> Needs:
        return Needs()  # nothing is loaded or probed before it chooses

    def select(self, scene: Scene, counts: Sequence[int]) -> list[Tensor]:
        return [scene.hits[-count:] for count in counts]


def make_selector(facts: ModelFacts) -> LastRows:
    return LastRows()
