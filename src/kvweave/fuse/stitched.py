"""Stitched KV: chunk KV turned to its place, layer by layer, before anything is recomputed.

A layer is laid once, when it is first asked for: by the pass in order, before that by a selector
that scores at the last layer. Bytes that were loaded for scoring are therefore never fetched twice.
Where the layers lie is the business of `PromptLayers`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvweave.fuse.pass_tables import PassTables
from kvweave.fuse.prompt_layers import OwnLayers, PromptLayers
from kvweave.fuse.protocol import FusionDecoder, KVBuffer, Prefix
from kvweave.fuse.request import FuseRequest, State
from kvweave.fuse.sources import ChunkSource
from kvweave.kv.format.codec import LayerKV


class Stitched:
    """The KV of one request before anything is recomputed. Owned by the request's thread.

    Holds what every step of fusion works on: the `decoder`, the `request` and its `layers`. Layers
    that were laid may be overwritten by the pass, row by row; `lay` never writes them again.
    """

    def __init__(
        self,
        decoder: FusionDecoder,
        request: FuseRequest,
        preamble: Prefix,
        layers: PromptLayers,
    ) -> None:
        assert len(preamble.token_ids) == request.preamble_len, "the preamble is the request's"
        self.decoder = decoder
        self.request = request
        self.layers = layers
        self.kv = layers.kv  # the buffer that layers are laid into
        self._preamble = preamble
        self.tables: PassTables | None = None  # None: not made ahead
        self.placed = positions_of(request.runs(State.EXACT, State.REUSED))  # [N]

    def make_tables(self) -> None:
        """Make what a pass needs whichever rows it computes, and lay its first layer if nothing is
        to be waited for: to be called while a device is busy with their choice. Without a device
        there is nothing to gain."""
        if self.tables is not None or self.decoder.device.type == "cpu":
            return
        self.tables = PassTables(self.decoder, self.request)
        if self.layers.is_here:
            self.layers.lay(0)

    def keys(self, layer: int) -> Tensor:
        """[T, Hk, D] of the whole prompt; garbage where nothing is placed or computed yet."""
        self.layers.lay(layer)
        return self.kv.keys(layer)

    def values(self, layer: int) -> Tensor:
        """[T, Hk, D], as `keys`."""
        self.layers.lay(layer)
        return self.kv.values(layer)

    @property
    def front(self) -> Sequence[LayerKV]:
        """The preamble's keys (turned) and values, layer by layer; nothing if it is empty."""
        return self._preamble.layers

    def preamble(self, layer: int) -> LayerKV | None:
        """The preamble's keys (turned) and values; None if it is empty."""
        return self._preamble.layers[layer] if self._preamble.layers else None


def stitch(
    decoder: FusionDecoder,
    request: FuseRequest,
    preamble: Prefix,
    source: ChunkSource,
    kv: KVBuffer,
) -> Stitched:
    """Stitch the chunks of `source` into a buffer of the request's own."""
    layers = OwnLayers(decoder, request, preamble, source, kv)
    return Stitched(decoder, request, preamble, layers)


def positions_of(runs: Sequence[range]) -> Tensor:
    """The positions of some runs, one behind the other, int64 on the host."""
    if not runs:
        return torch.empty(0, dtype=torch.int64)
    return torch.cat([torch.arange(run.start, run.stop) for run in runs])
