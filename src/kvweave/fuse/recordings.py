"""What is recorded of a decoder's work for fused prompts, kept as long as the decoder is.

CUDA graphs hold device memory, and the buffers that they read are shared from pass to pass. So
there is one set per decoder: the steps between attentions (recorded_layers.py) and the question's
probe (recorded_probe.py). Off a GPU nothing is ever recorded in it.
"""

from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from kvweave.errors import ConfigError
from kvweave.fuse.protocol import FusionDecoder, Projected
from kvweave.fuse.recorded_layers import LayerRecordings
from kvweave.fuse.recorded_probe import ProbeRecordings
from kvweave.kernels.recording import Refusals


@dataclass(frozen=True, slots=True, eq=False)
class Recordings:
    """Used by the thread that owns the device; its refusals are read by any."""

    layers: LayerRecordings = field(default_factory=LayerRecordings)
    probes: ProbeRecordings = field(default_factory=ProbeRecordings)
    players: WeakSet[object] = field(default_factory=WeakSet)  # at most one

    def lend(self, player: object) -> None:
        """Let `player` alone use them until it discards itself from `players`: passes of two would
        overwrite each other's buffers. Raises ConfigError while another has them."""
        if self.players:
            raise ConfigError("an engine computes with this decoder already; load another for this")
        self.players.add(player)

    def record_ahead(self, decoder: FusionDecoder) -> bool:
        """Record one thing more that a request has needed before, in idle time: else the next one
        that needs it waits for it. Takes some milliseconds. False: there is none."""
        with torch.inference_mode():
            return self.probes.record_ahead(decoder) or self.layers.record_ahead(decoder)

    def record_near(self, decoder: FusionDecoder) -> bool:
        """Record one thing more that no request has needed yet, but one like the last ones will.
        False: there is none."""
        with torch.inference_mode():
            return self.layers.record_near(decoder)

    @property
    def refusals(self) -> tuple[Refusals, ...]:
        return self.layers.refusals, self.probes.refusals


_recordings: WeakKeyDictionary[FusionDecoder, Recordings] = WeakKeyDictionary()


def recordings_of(decoder: FusionDecoder) -> Recordings:
    """The recordings of this decoder."""
    found = _recordings.get(decoder)
    if found is None:
        found = _recordings[decoder] = Recordings()
    return found


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
