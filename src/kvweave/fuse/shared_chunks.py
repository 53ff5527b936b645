"""A prompt over chunks that lie once, in pages of a pool, for all prompts.

    pages of chunks ──turned by each chunk's start──► one layer of scratch ──► the pass, as ever
    pages of its own ◄──rows that were computed──────────────┘

Keys lie in the pages turned to their places in the chunk. For each layer they are laid, turned on,
into memory that the next layer takes over; what the pass computes is kept in the request's own
pages. So no copy of a chunk outlives the pass. A chunk whose pages are empty is filled on the way,
from the bytes that arrive for it; what has arrived once is not asked for again. Pages that hold
chunks in 8 bits are filled by way of one more layer of memory, and whoever brought a chunk sees
what later requests will see.

For the thread that runs the pass. Shapes: N tokens laid, m own rows, Hk KV heads, D head dim.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.fuse.drift import Shift
from kvweave.fuse.prompt_layers import PromptAttempt
from kvweave.fuse.protocol import ModelShape, PoolLayers
from kvweave.fuse.request import ChunkSpan, FuseRequest
from kvweave.fuse.sources import LayerPlacer
from kvweave.kernels.coded import decode_rows, encode_rows, relocate_coded
from kvweave.kernels.host import on_device
from kvweave.kernels.place import relocate
from kvweave.kernels.rope import Angles, rotate
from kvweave.kernels.shift import mean_turned
from kvweave.kernels.types import RowMoves
from kvweave.kv.format.codec import LayerKV
from kvweave.kv.format.keys import ChunkKey

Slots = NDArray[np.int64]  # places in a pool, token by token


class PoolRoom(Protocol):
    """What a prompt has in the pool. Called on the thread that runs the pass."""

    @property
    def pool(self) -> PoolLayers: ...

    @property
    def num_present(self) -> int:
        """Own rows from the front that hold exact KV already."""
        ...

    def chunk_slots(self, key: ChunkKey) -> Slots:
        """Where the tokens of a chunk of the request lie: in `slots` of the pool, or in its `codes`
        if there are any."""
        ...

    def is_filled(self, key: ChunkKey) -> bool:
        """Whether its KV is there."""
        ...

    def own_slots(self, request: FuseRequest, num_rows: int) -> Slots:
        """Where the first `num_rows` own rows of a prompt lie. Pages of chunks that turned out lost
        become own ones."""
        ...

    def lay_out(self, request: FuseRequest, own_positions: Slots) -> None:
        """The pass begins: rows at these positions, ascending, will be own ones."""
        ...

    def shift_slots(self, spans: Sequence[ChunkSpan]) -> Slots:
        """Where the shifts of these chunks lie. Once the pass is ordered, rows see the chunks moved
        by what is there."""
        ...


class ScratchMemory:
    """Layers of memory that passes work in, one pass at a time. Grows, and is kept."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        self._row = (shape.num_kv_heads, shape.head_dim)
        self._dtype = dtype
        self._device = device
        self._layers: list[Tensor] = []  # [2, rows, Hk, D]

    def layers(self, num_tokens: int, count: int) -> list[Tensor]:
        """`count` layers with room for a prompt."""
        if self._layers and self._layers[0].shape[1] < num_tokens:
            self._layers.clear()
        rows = self._layers[0].shape[1] if self._layers else num_tokens
        with torch.inference_mode(False):  # used inside such a mode and outside it
            while len(self._layers) < count:
                shape = (2, rows, *self._row)
                made = torch.empty(shape, dtype=self._dtype, device=self._device)
                self._layers.append(made)
        return self._layers[:count]

    @property
    def num_bytes(self) -> int:
        return sum(layer.nbytes for layer in self._layers)


class LayerScratch:
    """The KVBuffer of a pass over shared chunks: it holds the last few layers that were asked for.

    As many as a selector scores at once, and one.
    """

    def __init__(self, memory: ScratchMemory, num_tokens: int, num_scored: int) -> None:
        self._num_tokens = num_tokens
        self._memory = memory
        self._num_layers = num_scored + 1
        self._free: list[Tensor] | None = None  # None: nothing was asked for yet
        self._held: dict[int, Tensor] = {}  # by layer, the one asked for longest ago first

    def reserve(self, num_tokens: int) -> None:
        assert num_tokens <= self._num_tokens, "the prompt is known"

    def holds(self, layer: int) -> bool:
        """Whether what was written to a layer is still there."""
        return layer in self._held

    def keys(self, layer: int) -> Tensor:
        return self._memory_of(layer)[0, : self._num_tokens]

    def values(self, layer: int) -> Tensor:
        return self._memory_of(layer)[1, : self._num_tokens]

    def _memory_of(self, layer: int) -> Tensor:
        """Return the memory of a layer; the layer that was asked for longest ago gives its memory
        up where none is free."""
        if self._free is None:
            self._free = self._memory.layers(self._num_tokens, self._num_layers)
        held = self._held.pop(layer, None)
        if held is None:
            held = self._free.pop() if self._free else self._held.pop(next(iter(self._held)))
        self._held[layer] = held
        return held


class SharedLayers:
    """The `PromptLayers` of a prompt over shared chunks: pages of chunks and of the exact front are
    laid into scratch memory, and what is computed goes to pages of its own."""

    keeps_shifts = True

    def __init__(
        self,
        attempt: PromptAttempt,
        room: PoolRoom,
        kv: LayerScratch,
        placer: LayerPlacer | None = None,
        empty_slots: Tensor | None = None,
    ) -> None:
        """`placer` brings what is to be filled, if anything is: to `empty_slots` [n] of the pool,
        on the device, or side by side where chunks lie as codes."""
        request = attempt.request
        self.kv = kv
        self._decoder = attempt.decoder
        self._request = request
        self._room = room
        self._pool = room.pool
        self._placer = placer
        self._empty_slots = empty_slots
        self._filled: set[int] = set()  # layers
        self._kept: RowMoves | None = None
        self._uncoded: Tensor | None = None
        self._front_slots = room.own_slots(request, request.preamble_len)
        if room.num_present < request.preamble_len:
            self._write_front(attempt.front.layers, self._front_slots)

    @property
    def is_here(self) -> bool:
        """Whether all chunks lie in their pages."""
        return self._placer is None

    @property
    def load_s(self) -> float:
        return 0.0 if self._placer is None else self._placer.stalled_s()

    def begin(self) -> None:
        if self._placer is not None:
            self._placer.begin()

    def lay(self, layer: int) -> None:
        """Write the exact front and all placed chunks to their positions, unless the scratch memory
        still holds the layer."""
        if self.kv.holds(layer):
            return
        keys, values = self.kv.keys(layer), self.kv.values(layer)
        self._fill(layer)
        coded, (moves, turn) = self._pool.codes(layer), self._plan
        pages = self._pool.slots(layer)
        if coded is None:
            relocate(*pages, moves, turn, keys, values)
        else:  # the pages are those of the exact front, which has turn 0
            relocate_coded(*pages, coded, moves, turn, keys, values)

    def lay_front(self) -> None:
        """Do nothing: the front is laid with each layer."""

    def lay_for(self, rows: Tensor) -> None:
        """Do nothing: rows in slices look at the chunks where they lie."""
        self._begin_rows(rows)

    def begin_rows(self, rows: Tensor) -> Tensor:
        both = torch.stack([rows, torch.from_numpy(self._begin_rows(rows))])
        self._kept = RowMoves(*on_device(both, self._decoder.device).unbind())
        return self._kept.source

    def _begin_rows(self, rows: Tensor) -> Slots:
        """Reserve the slots of rows at these positions [R], on the host, that will be computed into
        own pages."""
        request = self._request
        own = np.concatenate([np.arange(request.preamble_len), rows.numpy()])
        slots = self._room.own_slots(request, len(own))[request.preamble_len :]
        self._room.lay_out(request, own)
        return slots

    def keep(self, layer: int) -> None:
        """Write the own rows of a finished layer to their pages."""
        assert self._kept is not None, "the pass has begun"
        keys, values = self.kv.keys(layer), self.kv.values(layer)
        relocate(keys, values, self._kept, None, *self._pool.slots(layer))

    def keep_shifts(self, shifts: Sequence[Shift]) -> None:
        """Write what chunks were moved by to rows of the prompt's own, one for each chunk; zeros in
        layers in which a chunk was not moved."""
        spans = list({span.start: span for shift in shifts for span in shift.spans}.values())
        if not spans:
            return
        nth = {span.start: n for n, span in enumerate(spans)}
        device, (keys, values) = self._decoder.device, self._pool.memory
        by = torch.zeros(len(keys), 2, len(spans), *keys.shape[2:], device=device)
        for shift in shifts:
            at = torch.tensor([nth[span.start] for span in shift.spans])
            layers = by[shift.layers.start : shift.layers.stop]
            if len(at) == len(spans):  # as a rule, in this order
                layers.copy_(shift.by)
            else:
                layers[:, :, on_device(at, device)] = shift.by
        num_tokens = [span.num_tokens for span in spans]
        by_keys = mean_turned(by[:, 0] * self._key_factor, num_tokens, self._decoder.turn)
        if self._lift is not None:
            by_keys /= self._lift
        slots = on_device(torch.from_numpy(self._room.shift_slots(spans)), device)
        keys.index_copy_(1, slots, by_keys.to(keys.dtype))
        values.index_copy_(1, slots, by[:, 1].to(values.dtype))

    @cached_property
    def _lift(self) -> Tensor | None:
        """[layers, 1, Hk, D] that keys are divided by in pages of chunks; None: by nothing."""
        coded = [self._pool.codes(layer) for layer in range(self._decoder.spec.num_layers)]
        lifts = [each.lift for each in coded if each is not None and each.lift is not None]
        return torch.stack(lifts)[:, None] if lifts else None

    @cached_property
    def _key_factor(self) -> Tensor:
        """[D] that YaRN multiplies the channels of keys with, where they are turned."""
        nowhere = torch.zeros(1, dtype=torch.int64, device=self._decoder.device)
        turning = self._decoder.angles(nowhere).cos.flatten().float()
        still = turning.new_ones(self._decoder.spec.head_dim - 2 * len(turning))
        return torch.cat([turning, turning, still])

    def unturned_kv(self, layer: int) -> LayerKV:
        self._fill(layer)
        first = self._request.preamble_len
        slots, device = self._plan[0].source[first:], self._decoder.device
        lengths = [span.num_tokens for span in self._request.placed]
        nth = torch.cat([torch.arange(length) for length in lengths])
        back = self._decoder.turn(on_device(-nth, device))
        coded = self._pool.codes(layer)
        if coded is None:
            turned, values = (x.index_select(0, slots) for x in self._pool.slots(layer))
        else:
            turned, values = decode_rows(coded, slots, self._decoder.dtype)
        k = rotate(turned.to(back.cos.dtype), back) / self._key_factor
        return LayerKV(k.to(turned.dtype), values)

    def extras(self, name: str) -> Mapping[ChunkKey, Tensor]:
        return {}  # strategies that want some do not share

    def _fill(self, layer: int) -> None:
        """Bring a layer of the chunks whose pages are empty. Blocks; raises ChunkLost."""
        slots, coded = self._empty_slots, self._pool.codes(layer)
        if self._placer is None or slots is None or layer in self._filled:
            return
        keys, values = self._pool.slots(layer) if coded is None else self._before_coding(slots)
        self._placer.lay(layer, keys, values)
        if coded is not None:
            encode_rows(keys, values, slots, coded)
        self._filled.add(layer)

    def _before_coding(self, slots: Tensor) -> Tensor:
        """[2, n, Hk, D]: a layer of what is being brought, used again for the next one."""
        if self._uncoded is None:
            like = self._pool.slots(0)[0]
            self._uncoded = like.new_empty(2, len(slots), *like.shape[1:])
        return self._uncoded

    def _write_front(self, front: Sequence[LayerKV], slots: Slots) -> None:
        """Write those rows of the exact front that the room lacks: others may read the rest."""
        there = self._room.num_present
        at = on_device(torch.from_numpy(slots[there:]), self._decoder.device)
        for layer, made in enumerate(front):
            keys, values = self._pool.slots(layer)
            keys[at], values[at] = made.k[there:].to(keys.dtype), made.v[there:].to(values.dtype)

    @cached_property
    def _plan(self) -> tuple[RowMoves, Angles]:
        """From which slot to which position each token goes, and by how much it is turned. Made
        when the first layer is laid: by then a device is busy with the question."""
        placed, room, front_slots = self._request.placed, self._room, self._front_slots
        slots = [front_slots, *(room.chunk_slots(span.key) for span in placed)]
        where = [np.arange(len(front_slots)), *(np.arange(s.start, s.end) for s in placed)]
        which = np.repeat(np.arange(len(slots)), [len(each) for each in slots])
        table = np.stack([np.concatenate(slots), np.concatenate(where), which])
        device = self._decoder.device
        moves = RowMoves(*on_device(torch.from_numpy(table), device).unbind())
        starts = torch.tensor([0, *(span.start for span in placed)])
        return moves, self._decoder.turn(on_device(starts, device))
