"""What is recorded of a decoder's work for fused prompts, kept as long as the decoder is.

CUDA graphs hold device memory, and the buffers that they read are shared from pass to pass. So
there is one set per decoder: the steps between attentions (recorded_layers.py) and the question's
probe (recorded_probe.py). Off a GPU nothing is ever recorded in it.
"""

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch

from kvweave.fuse.protocol import FusionDecoder
from kvweave.fuse.recorded_layers import LayerRecordings
from kvweave.fuse.recorded_probe import ProbeRecordings
from kvweave.kernels.recording import Refusals


@dataclass(frozen=True, slots=True, eq=False)
class Recordings:
    """Used by the thread that owns the device; its refusals are read by any."""

    layers: LayerRecordings = field(default_factory=LayerRecordings)
    probes: ProbeRecordings = field(default_factory=ProbeRecordings)

    def record_ahead(self, decoder: FusionDecoder) -> bool:
        """Record one thing more that a request has needed before, in idle time: else the next one
        that needs it waits for it. Takes some milliseconds. False: there is none."""
        with torch.inference_mode():
            return self.probes.record_ahead(decoder) or self.layers.record_ahead(decoder)

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
