"""What lies between one attention and the next: a layer finished, the next one's projections.

    hidden states ─► first ─► attention of layer 0 ─► next ─► attention of layer 1 ─► next ─► …

None of it touches the memory of a request, so it can be recorded and played for any (see
recorded_layers.py). Plain steps are the decoder's own calls, one by one.

Shapes: R rows, E hidden dim, Hq query heads, D head dim.
"""

from typing import Protocol

from torch import Tensor

from kvweave.fuse.protocol import FusionDecoder, Projected
from kvweave.fuse.recordings import recordings_of


class LayerSteps(Protocol):
    """Some rows on their way through the layers. One pass at a time, on its thread."""

    @property
    def hidden(self) -> Tensor:
        """[R, E] of the rows where they are. Valid until the next step."""
        ...

    @property
    def attention_out(self) -> Tensor | None:
        """[R, Hq, D] where attention may write its output; elsewhere it is copied from there."""
        ...

    def first(self) -> Projected:
        """Return the projections of layer 0. All projections here are valid until the next step."""
        ...

    def next(self, layer: int, attended: Tensor) -> Projected:
        """Finish `layer` with its attention output [R, Hq, D] and return the projections of the one
        above."""
        ...


class PlainSteps:
    """The decoder's own calls."""

    attention_out: Tensor | None = None

    def __init__(self, decoder: FusionDecoder, h: Tensor) -> None:
        """Overwrites h [R, E]."""
        self._decoder = decoder
        self.hidden = h

    def first(self) -> Projected:
        return self._decoder.qkv(0, self.hidden)

    def next(self, layer: int, attended: Tensor) -> Projected:
        self.hidden = self._decoder.finish(layer, self.hidden, attended)
        return self._decoder.qkv(layer + 1, self.hidden)


def steps_of(decoder: FusionDecoder, h: Tensor) -> LayerSteps:
    """Steps for rows with hidden states h [R, E]: recorded where that serves.

    Takes the steps of another pass over the same decoder away: those may not be used any more.
    """
    if decoder.can_record:
        recorded = recordings_of(decoder).layers.begin(decoder, h)
        if recorded is not None:
            return recorded
    return PlainSteps(decoder, h)
