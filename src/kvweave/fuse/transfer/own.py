"""A prompt in a buffer of its own: its chunks are copied there from the store."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvweave.fuse.needs import Needs
from kvweave.fuse.prompt_layers import OwnLayers
from kvweave.fuse.protocol import FusionDecoder, KVBuffer, Prefix
from kvweave.fuse.request import FuseRequest
from kvweave.fuse.sources import LayerTransfer
from kvweave.fuse.transfer.pipeline import open_source
from kvweave.kv.format.keys import ChunkKey


class OwnRoom:
    """The `PromptRoom` of a prompt that shares nothing."""

    def __init__(self, kv: KVBuffer) -> None:
        self._kv = kv

    @contextmanager
    def open(
        self,
        decoder: FusionDecoder,
        request: FuseRequest,
        front: Prefix,
        transfer: LayerTransfer,
        needs: Needs,
    ) -> Iterator[OwnLayers]:
        with open_source(decoder, request.placed, transfer, needs) as source:
            yield OwnLayers(decoder, request, front, source, self._kv)

    def note_pass_ordered(self) -> None:
        """Do nothing: rows look at the prompt's own buffer anyway."""

    def note_pass_finished(self, load_s: float, rounded: set[ChunkKey]) -> None:
        """Do nothing: no chunk was brought for others."""
