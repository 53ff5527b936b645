"""The layers of one prompt's KV while it is computed: how chunk KV gets there, and what is kept.

A pass works on dense layers. Where they lie differs: in pages of the prompt's own, into which chunk
KV is copied, or in scratch memory over chunks that lie once for all prompts (shared_chunks.py).
Whoever stitches, scores, recomputes or drifts asks a `PromptLayers` and does not know which it is.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from time import perf_counter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvweave.fuse.drift import Shift
from kvweave.fuse.needs import Needs
from kvweave.fuse.protocol import FusionDecoder, KVBuffer, Prefix
from kvweave.fuse.request import FuseRequest, State
from kvweave.fuse.sources import ChunkSource, LayerTransfer
from kvweave.kernels.host import on_device
from kvweave.kernels.rope import Angles, per_head, rotate
from kvweave.kv.format.codec import LayerKV
from kvweave.kv.format.keys import ChunkKey


class PromptLayers(Protocol):
    """Chunk KV is laid into `kv` layer by layer; the pass writes what it computes over it there.

    For the thread that runs the pass. Layers that are laid are not laid again.
    """

    @property
    def kv(self) -> KVBuffer: ...

    @property
    def is_here(self) -> bool:
        """Whether laying a layer waits for nothing, and is worth ordering ahead."""
        ...

    @property
    def keeps_shifts(self) -> bool:
        """Whether `keep_shifts` has to hear what drift added to the chunks."""
        ...

    @property
    def load_s(self) -> float:
        """Seconds spent waiting for chunk KV so far and, on a CPU, decoding it."""
        ...

    def begin(self) -> None:
        """Let layers come ahead, if the source waits to be told."""
        ...

    def lay(self, layer: int) -> None:
        """Bring a layer into `kv` unless it is there. Blocks for its bytes; raises ChunkLost."""
        ...

    def lay_front(self) -> None:
        """Bring the exact front of every layer, if that can be done before a layer is laid."""
        ...

    def lay_for(self, rows: Tensor) -> None:
        """Bring all that rows at these positions [R] will look at when they run in slices, in
        ordinary forward passes."""
        ...

    def begin_rows(self, rows: Tensor) -> Tensor:
        """Begin the pass over the rows at these positions [R], on the host. Returns them on the
        device."""
        ...

    def keep(self, layer: int) -> None:
        """Note that the pass has written all it computes of a layer. Its memory may be another's
        next."""
        ...

    def keep_shifts(self, shifts: Sequence[Shift]) -> None:
        """Keep what the pass moved chunks by, so that rows behind it see them moved."""
        ...

    def unturned_kv(self, layer: int) -> LayerKV:
        """Return chunk KV as stored, keys before RoPE, [N, Hk, D] in prompt order."""
        ...

    def extras(self, name: str) -> Mapping[ChunkKey, Tensor]:
        """The extra `name` of the placed chunks that have it: see `ChunkSource.extras`."""
        ...


class PromptAttempt(NamedTuple):
    """One attempt at a prompt: it is made again without the chunks that were lost in it."""

    decoder: FusionDecoder
    request: FuseRequest
    front: Prefix  # the exact KV before its chunks
    transfer: LayerTransfer  # brings what is not there yet,
    needs: Needs  # in the order that a selector wants it


class PromptRoom(Protocol):
    """Where the KV of one prompt lies before, during and after its pass. For the pass's thread."""

    def open(self, attempt: PromptAttempt) -> AbstractContextManager[PromptLayers]:
        """Open the layers of the prompt for one attempt."""
        ...

    def note_pass_ordered(self) -> None:
        """Note that all writes of the pass are ordered: rows that come behind it may look at the
        prompt."""
        ...

    def note_pass_finished(self, load_s: float, rounded: set[ChunkKey]) -> None:
        """Note that the pass is through. Bringing its chunks took `load_s`; a codec had `rounded`
        some."""
        ...


class OwnLayers:
    """Layers in the prompt's own buffer: chunk KV is copied there, turned to its place."""

    keeps_shifts = False
    is_here = False

    def __init__(
        self,
        decoder: FusionDecoder,
        request: FuseRequest,
        front: Prefix,
        source: ChunkSource,
        kv: KVBuffer,
    ) -> None:
        self._decoder = decoder
        self._front = front
        self._source = source
        self._placer = source.placer
        self.kv = kv
        self._laid: set[int] = set()
        self._is_front_laid = False
        self._waited_s = 0.0
        runs = request.runs(State.EXACT, State.REUSED)
        self._runs = [(run.start, run.stop) for run in runs]  # of the placed chunks
        kv.reserve(len(request.prompt_ids))

    @property
    def load_s(self) -> float:
        return self._waited_s + (0.0 if self._placer is None else self._placer.stalled_s())

    def begin(self) -> None:
        if self._placer is not None:
            self._placer.begin()

    def lay(self, layer: int) -> None:
        if layer in self._laid:
            return
        self.lay_front()
        keys, values = self.kv.keys(layer), self.kv.values(layer)
        if self._runs and self._placer is not None:
            self._placer.lay(layer, keys, values)
        elif self._runs:
            self._turn_into(keys, values, self.unturned_kv(layer))
        self._laid.add(layer)

    def lay_front(self) -> None:
        """Lay the exact front of all layers. On a GPU that takes two orders instead of two for each
        layer."""
        stored = self._front.layers
        if not stored or self._is_front_laid:
            return
        end, layers = len(self._front.token_ids), range(len(stored))
        torch._foreach_copy_([self.kv.keys(i)[:end] for i in layers], [kv.k for kv in stored])
        torch._foreach_copy_([self.kv.values(i)[:end] for i in layers], [kv.v for kv in stored])
        self._is_front_laid = True

    def lay_for(self, rows: Tensor) -> None:
        for layer in range(self._decoder.spec.num_layers):
            self.lay(layer)

    def begin_rows(self, rows: Tensor) -> Tensor:
        return on_device(rows, self._decoder.device)

    def keep(self, layer: int) -> None:
        """Do nothing: the layer lies where it belongs."""

    def keep_shifts(self, shifts: Sequence[Shift]) -> None:
        """Do nothing: shifts were added to the prompt's own copy."""

    def unturned_kv(self, layer: int) -> LayerKV:
        started_s = perf_counter()
        stored = self._source.layer(layer)
        self._waited_s += perf_counter() - started_s
        return stored

    def extras(self, name: str) -> Mapping[ChunkKey, Tensor]:
        return self._source.extras(name)

    def _turn_into(self, keys: Tensor, values: Tensor, stored: LayerKV) -> None:
        at = 0
        for start, end in self._runs:
            part = slice(at, at + end - start)
            turn = Angles(self._turn.cos[part], self._turn.sin[part])
            rotate(stored.k[part], turn, out=keys[start:end])
            values[start:end] = stored.v[part]
            at += end - start

    @cached_property
    def _turn(self) -> Angles:
        """Angles of all placed tokens."""
        placed = torch.cat([torch.arange(start, end) for start, end in self._runs])
        turn = self._decoder.angles(on_device(placed, self._decoder.device))
        return per_head(turn, self._decoder.spec.num_kv_heads)
