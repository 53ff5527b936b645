"""Stitched KV: chunk KV turned to its place and laid into the request's own buffer.

A layer is laid once, when it is first asked for: by the pass in order, before that by a selector
that scores at the last layer. Bytes that were loaded for scoring are therefore never fetched twice.

Over chunks that lie in shared pages (shared_chunks.py) the buffer holds a few layers at a time: one
that made room is laid again, and the pass says when a layer is done.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from kvweave.fuse.drift import Shift
from kvweave.fuse.encode.chunk_pass import Prefix
from kvweave.fuse.pass_tables import PassTables
from kvweave.fuse.protocol import FusionDecoder, KVBuffer
from kvweave.fuse.request import FuseRequest, State
from kvweave.fuse.shared_chunks import LayerScratch, SharedChunks
from kvweave.fuse.sources import ChunkSource
from kvweave.kernels.host import on_device
from kvweave.kernels.rope import Angles, per_head, rotate
from kvweave.kv.format.codec import LayerKV
from kvweave.kv.keys import ChunkKey


class Stitched:
    """The KV of one request before anything is recomputed. Owned by the request's thread.

    Holds what every step of fusion works on: the `decoder`, the `request` and its buffer `kv`.
    Layers that were laid may be overwritten by the pass, row by row; `lay` never writes them again.
    """

    def __init__(
        self,
        decoder: FusionDecoder,
        request: FuseRequest,
        preamble: Prefix,
        source: ChunkSource,
        kv: KVBuffer,
    ) -> None:
        assert len(preamble.token_ids) == request.preamble_len, "the preamble is the request's"
        self.decoder = decoder
        self.request = request
        self.kv = kv
        self._preamble = preamble
        self._source = source
        self._placer = source.placer
        self._shared = source if isinstance(source, SharedChunks) else None
        self._scratch = kv if isinstance(kv, LayerScratch) else None
        assert (self._shared is None) == (self._scratch is None), "shared chunks want scratch"
        self._laid: set[int] = set()
        self._is_preamble_laid = False
        self._waiting: Tensor | None = None  # [N, Hk, D] keys of one layer before they are turned
        self._waited_s = 0.0
        self.tables: PassTables | None = None  # None: not made ahead
        runs = request.runs(State.EXACT, State.REUSED)
        self._runs = [(run.start, run.stop) for run in runs]  # of the placed chunks
        self.placed = positions_of(runs)  # [N]
        kv.reserve(len(request.prompt_ids))

    def lay(self, layer: int, change: Callable[[LayerKV], None] | None = None) -> bool:
        """Bring a layer into the buffer unless it is there. Blocks for its bytes; ChunkLost.

        `change` may write to what is laid before its keys are turned, as `unturned` has it. Returns
        whether it was asked: only where that memory is the request's own.
        """
        if self._scratch is not None and self._shared is not None:
            if not self._scratch.holds(layer):
                self._shared.lay(layer, self.kv.keys(layer), self.kv.values(layer))
            return False
        if layer in self._laid:
            return False
        self.lay_preamble()
        keys, values = self.kv.keys(layer), self.kv.values(layer)
        changes = False
        if self._runs and self._placer is not None:
            self._placer.lay(layer, keys, values)
        elif self._runs:
            room = self._memory(keys, values)
            stored = self.unturned(layer, room)
            if change is not None and stored is room:
                change(stored)
                changes = True
            self._turn_into(keys, values, stored)
        self._laid.add(layer)
        return changes

    def lay_preamble(self) -> None:
        """The preamble of every layer, unless it is there: on a GPU two orders instead of two per
        layer. The first layer needs it; a caller may order it earlier, while the device is busy."""
        stored = self._preamble.layers
        if not stored or self._is_preamble_laid or self._shared is not None:
            return  # shared chunks lay the front with each layer
        end, layers = len(self._preamble.token_ids), range(len(stored))
        torch._foreach_copy_([self.kv.keys(i)[:end] for i in layers], [kv.k for kv in stored])
        torch._foreach_copy_([self.kv.values(i)[:end] for i in layers], [kv.v for kv in stored])
        self._is_preamble_laid = True

    def make_tables(self) -> None:
        """Make what a pass needs whichever rows it computes, and lay its first layer if nothing is
        to be waited for: to be called while a device is busy with their choice. Without a device
        there is nothing to gain."""
        if self.tables is not None or self.decoder.device.type == "cpu":
            return
        self.tables = PassTables(self.decoder, self.request)
        if self._shared is not None and self._shared.is_filled:
            self.lay(0)

    def begin_rows(self, rows: Tensor) -> Tensor:
        """The pass begins: it computes the rows at these positions [R], on the host. They are
        given back on the device."""
        if self._shared is not None:
            return self._shared.begin_rows(rows)
        return on_device(rows, self.decoder.device)

    def keep(self, layer: int) -> None:
        """The pass has written all it computes of a layer. Its memory may be another's next."""
        if self._shared is not None:
            self._shared.keep(layer, self.kv.keys(layer), self.kv.values(layer))

    @property
    def is_shared(self) -> bool:
        """Whether its chunks stay where others read them."""
        return self._shared is not None

    def keep_shifts(self, shifts: Sequence[Shift]) -> None:
        """The pass has moved chunks for itself; whoever reads them behind it is to see them so."""
        if self._shared is not None:
            self._shared.keep_shifts(shifts)

    def _turn_into(self, keys: Tensor, values: Tensor, stored: LayerKV) -> None:
        at = 0
        for start, end in self._runs:
            part = slice(at, at + end - start)
            turn = Angles(self._turn.cos[part], self._turn.sin[part])
            rotate(stored.k[part], turn, out=keys[start:end])
            if stored.v.data_ptr() != values[start:].data_ptr():
                values[start:end] = stored.v[part]
            at += end - start

    @cached_property
    def _turn(self) -> Angles:
        """Angles of everything placed."""
        turn = self.decoder.angles(on_device(self.placed, self.decoder.device))
        return per_head(turn, self.decoder.spec.num_kv_heads)

    @property
    def load_s(self) -> float:
        """Spent waiting for chunk KV so far and, on a CPU, decoding it."""
        return self._waited_s + (0.0 if self._placer is None else self._placer.stalled_s())

    def keys(self, layer: int) -> Tensor:
        """[T, Hk, D] of the whole prompt; garbage where nothing is placed or computed yet."""
        self.lay(layer)
        return self.kv.keys(layer)

    def values(self, layer: int) -> Tensor:
        """[T, Hk, D], as `keys`."""
        self.lay(layer)
        return self.kv.values(layer)

    def unturned(self, layer: int, out: LayerKV | None = None) -> LayerKV:
        """Chunk KV as stored, keys before RoPE, [N, Hk, D] in the order of `placed`."""
        started_s = time.perf_counter()
        stored = self._source.layer(layer, out)
        self._waited_s += time.perf_counter() - started_s
        return stored

    @property
    def front(self) -> Sequence[LayerKV]:
        """The preamble's keys (turned) and values, layer by layer; nothing if it is empty."""
        return self._preamble.layers

    def preamble(self, layer: int) -> LayerKV | None:
        """The preamble's keys (turned) and values; None if it is empty."""
        return self._preamble.layers[layer] if self._preamble.layers else None

    def extras(self, name: str) -> Mapping[ChunkKey, bytes]:
        """The extra `name` of the placed chunks that have it."""
        return self._source.extras(name)

    def extra_tensors(self, name: str) -> Mapping[ChunkKey, Tensor] | None:
        """The same as tensors to copy to the device; None: the source has bytes only."""
        return None if self._placer is None else self._placer.extra_tensors(name)

    def begin(self) -> None:
        """Let layers come ahead, if the source waits to be told."""
        if self._placer is not None:
            self._placer.begin()

    def _memory(self, keys: Tensor, values: Tensor) -> LayerKV | None:
        """Where a source may decode to: values into their place, keys where they wait to be turned.

        Only if the chunks stand side by side; else they are laid run by run.
        """
        if len(self._runs) != 1:
            return None
        if self._waiting is None:
            self._waiting = torch.empty_like(keys[: len(self.placed)])
        start, end = self._runs[0]
        return LayerKV(self._waiting, values[start:end])


def positions_of(runs: Sequence[range]) -> Tensor:
    """The positions of some runs, one behind the other, int64 on the host."""
    if not runs:
        return torch.empty(0, dtype=torch.int64)
    return torch.cat([torch.arange(run.start, run.stop) for run in runs])
