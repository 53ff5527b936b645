"""Stored chunks on their way to a GPU: copied ahead in groups of layers, laid where they belong.

    store ─► page-locked host memory ─copy stream─► ring of slots ─compute stream─► the request's KV

Bytes travel as they are stored; decoding, turning and placing is one kernel. The host thread only
gives orders: it blocks for bytes that have not reached host memory, never for the device. While it
blocks there, what it ordered before goes on.

Once all chunks lie whole in host memory a chunk's part of several layers is one copy: the first
layer comes alone, so that the pass begins, then two, then four. Layers that are still on their way
from a tier, or are taken out of order, come one by one.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from kvweave.fuse.needs import Needs
from kvweave.fuse.protocol import FusionDecoder
from kvweave.fuse.request import ChunkSpan
from kvweave.fuse.sources import ChunkSource, LayerTransfer, StoredChunks, check_arrived
from kvweave.fuse.transfer.placement import Placement, parts_of, strides_of
from kvweave.fuse.transfer.ring import RINGS, Ring, Slot, depth_for, new_event, seconds_between
from kvweave.kv.format.codec import LayerKV
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.format.objects import EncodedLayer

GROUP_LAYERS = 4
GROUP_BYTES = 128 << 20  # unless one layer has more


def group_for(layer_bytes: int, ring_bytes: int) -> int:
    """How many layers may travel together: as many as leave room for two more such groups."""
    most = min(GROUP_BYTES, ring_bytes // 3) // max(1, layer_bytes)
    return max(1, min(GROUP_LAYERS, most))


def taking_order(needs: Needs, num_layers: int) -> list[int]:
    """The order in which a request takes its layers: those that rows are chosen by, then the pass.

    A view of the full context and choices in flight take them from the bottom up anyway.
    """
    first = sorted(needs.key_layers) if needs.probe not in ("none", "full") else []
    return [*first, *(layer for layer in range(num_layers) if layer not in first)]


class LayerQueue:
    """Layers of one request that are still to be brought, in the order they will be taken.

    For the thread that runs the pass. `most` is how many a group may have: 1 until all of them are
    known to be in host memory.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self.most = 1
        self._grown = 1  # how many the next group may have
        self._order = list(order)
        pass_begins = self._order.index(0) if 0 in self._order else len(self._order)
        self._alone = frozenset(self._order[:pass_begins])  # scored before it, one by one

    def __bool__(self) -> bool:
        return bool(self._order)

    def next_group(self) -> range:
        """The layers to bring next: neighbours at the head of the order. They stay there."""
        first, size = self._order[0], 1
        most = min(self._grown, (len(self._order) + 1) // 2)
        while size < most and self._order[size] == first + size:
            size += 1
        return range(first, first + size)

    def take(self, group: range) -> None:
        """Remove the layers of `next_group`, which are being brought."""
        del self._order[: len(group)]
        if group.start not in self._alone:
            self._grown = min(2 * self._grown, self.most)

    def remove(self, layer: int) -> None:
        """Remove a layer that was asked for before its turn, or again."""
        if layer in self._order:
            self._order.remove(layer)

    def put_back(self, layers: Sequence[int]) -> None:
        """Put layers that made room for others back at the head of the order."""
        self._order[:0] = layers


AT_A_TIME = 2  # groups of layers


@contextmanager
def open_source(
    decoder: FusionDecoder,
    placed: Sequence[ChunkSpan],
    layers: LayerTransfer,
    needs: Needs,
    slots: Tensor | None = None,
) -> Iterator[ChunkSource]:
    """Stored chunks for one prefill: through a ring to a GPU, straight from host memory else.
    A placer lays them to `slots` if there are any: see Placement."""
    if decoder.device.type != "cuda" or not placed:
        yield StoredChunks(decoder, placed, layers, slots)
        return
    ring = RINGS.take(decoder.device)
    # without a question to push through first, the pass or the scoring takes layers at once
    at_once = needs.probe in ("none", "full")
    try:
        source = PipelinedChunks(
            decoder,
            placed,
            layers,
            ring,
            LookAhead(
                taking_order(needs, decoder.spec.num_layers),
                0.0 if at_once else ring.start_s.get(needs.probe, float("inf")),
                begins=at_once,
            ),
            slots,
        )
        begun_s = time.perf_counter()
        yield source
        if source.pass_began_s is not None:
            ring.record_start(needs.probe, source.pass_began_s - begun_s)
    except BaseException:
        # what the pass was told may still read slots, or anchors in memory that goes with the lease
        torch.cuda.current_stream(decoder.device).synchronize()
        raise
    finally:
        ring.finish()  # the lease on the bytes may be released after that
        RINGS.give_back(ring)


class LookAhead(NamedTuple):
    """When which layers are wanted."""

    order: Sequence[int] | None = None  # others come when they are asked for; None: bottom up
    start_s: float = float("inf")  # until the pass begins, see `depth_for`
    begins: bool = True  # at once; else with `begin`


class PipelinedChunks:
    """A ChunkSource that is its own LayerPlacer. For the thread that runs the pass.

    The ring must be finished before the bytes may go: `open_source` sees to that.
    """

    def __init__(
        self,
        decoder: FusionDecoder,
        placed: Sequence[ChunkSpan],
        layers: LayerTransfer,
        ring: Ring,
        ahead: LookAhead | None = None,
        slots: Tensor | None = None,
    ) -> None:
        """Copying begins here, with what has arrived, or with `begin`. `slots`: see Placement."""
        ahead = ahead or LookAhead()
        self._decoder = decoder
        self._placed = placed
        self._layers = layers
        self._ring = ring
        self._num_layers = decoder.spec.num_layers
        order = range(self._num_layers) if ahead.order is None else ahead.order
        self._queue = LayerQueue(order)
        self._start_s = ahead.start_s
        self._slots = slots
        self._strides: dict[ChunkKey, int] | None = None  # once the first layer is there
        self._placement: Placement | None = None
        self._whole: Sequence[Tensor] | None = None  # all layers of each chunk, if all are there
        self._brought: dict[int, Slot] = {}  # layers in the ring, the next to be taken first
        self._stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.pass_began_s: float | None = None  # host clock when the lowest layer was taken
        self._waited_s = 0.0  # where there is no device to wait
        self._begun = False
        if ahead.begins:
            self.begin()

    @property
    def placer(self) -> "PipelinedChunks":
        return self

    def begin(self) -> None:
        self._begun = True
        self._look_ahead()

    def lay(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write one layer of all placed chunks into the request's KV [T, Hk, D], keys turned; or
        into the `slots` they were given."""
        slot, placement = self._take(layer)
        if layer == 0:
            self.pass_began_s = time.perf_counter()
        placement.lay(slot.data, _place(slot, layer), keys, values)
        self._give_back(slot)

    def layer(self, layer: int) -> LayerKV:
        slot, placement = self._take(layer)
        spec, dtype = self._decoder.spec, self._decoder.dtype
        shape = (2, placement.num_tokens, spec.num_kv_heads, spec.head_dim)
        out = LayerKV(*torch.empty(shape, dtype=dtype, device=self._decoder.device))
        placement.write_unturned(slot.data, _place(slot, layer), out.k, out.v)
        self._give_back(slot)
        return out

    def extras(self, name: str) -> Mapping[ChunkKey, Tensor]:
        return self._layers.extras(name)

    def stalled_s(self) -> float:
        """How long the device stood still for bytes, as far as it is known by now."""
        return self._waited_s + sum(seconds_between(*stall) for stall in self._stalls)

    def _take(self, layer: int) -> tuple[Slot, Placement]:
        """Return the slot of a layer, filled as far as the current stream can see."""
        slot = self._brought.get(layer)
        if slot is None or slot.left == len(slot.layers):  # else the stream has waited already
            slot = self._wait_for(layer)
        del self._brought[layer]
        slot.left -= 1
        assert self._placement is not None, "a layer was brought"
        return slot, self._placement

    def _wait_for(self, layer: int) -> Slot:
        on_device = self._decoder.device.type == "cuda"
        started_s = time.perf_counter()
        if on_device:  # behind all that was ordered so far: there the device begins to wait
            began, ended = (new_event() for _ in range(2))
            began.record()
        if layer not in self._brought:
            self._queue.remove(layer)
            self._bring(layer)
        slot = self._brought[layer]
        if on_device:
            self._ring.wait(slot)
            ended.record()
            self._stalls.append((began, ended))
        else:
            self._waited_s += time.perf_counter() - started_s
        return slot

    def _give_back(self, slot: Slot) -> None:
        if slot.left:
            return
        self._ring.release(slot)
        if self._begun:
            self._look_ahead()

    def _look_ahead(self) -> None:
        """Bring the next layers, as far as they have arrived and there is room.

        A few groups at a time: a copy per chunk takes the host a while to order, in which the
        device may have run out of other orders.
        """
        for _ in range(AT_A_TIME):
            if not self._queue:
                return
            group = self._queue.next_group()
            if self._whole is None and not self._layers.is_ready(group.start):
                return
            arrived = self._open(group.start) if self._strides is None else None
            slot = self._ring.slot(group)
            if slot is None:
                return
            self._queue.take(group)
            self._fill(slot, arrived)

    def _bring(self, layer: int) -> None:
        """Begin to copy a layer that is asked for now. Blocks and raises as `_fill`."""
        arrived = self._open(layer) if self._strides is None else None
        slot = self._ring.slot(range(layer, layer + 1))
        if slot is None:  # asked for out of order: what would be taken last makes room
            last = self._brought[next(reversed(self._brought))]
            back = [other for other in last.layers if self._brought.get(other) is last]
            for other in back:
                del self._brought[other]
            self._queue.put_back(back)
            self._ring.release(last)
            slot = self._ring.slot(range(layer, layer + 1))
            assert slot is not None, "there is room now"
        self._fill(slot, arrived)

    def _open(self, layer: int) -> Mapping[ChunkKey, EncodedLayer]:
        """Wait for a first layer, and cut the ring by its sizes."""
        arrived = self._layers.wait_layer(layer)
        check_arrived(self._decoder, self._placed, arrived)
        strides = self._strides = strides_of(self._placed, arrived)
        size, ring = sum(strides.values()), self._ring
        whole = self._layers.whole(strides)
        lengths = [self._num_layers * stride for stride in strides.values()]
        if whole is not None and [data.numel() for data in whole] == lengths:
            self._whole = whole
            self._queue.most = group_for(size, ring.ring_bytes)
        group, num_layers = self._queue.most, self._num_layers
        speed, most_bytes = ring.bytes_per_s, ring.ring_bytes
        ring.cut(size, depth_for(size, speed, self._start_s, num_layers, most_bytes, group))
        return arrived

    def _fill(self, slot: Slot, arrived: Mapping[ChunkKey, EncodedLayer] | None = None) -> None:
        """Begin to copy a slot's layers; blocks until they are in host memory. Raises ChunkLost."""
        assert self._strides is not None, "a layer was there"
        strides = self._strides
        there = parts_of(slot.data, strides, len(slot.layers))
        if self._whole is not None:
            at, size = slot.layers.start, len(slot.layers)
            pairs = zip(self._whole, strides.values(), strict=True)
            here = [data.narrow(0, at * stride, size * stride) for data, stride in pairs]
        else:
            arrived = arrived or self._layers.wait_layer(slot.layers.start)
            if strides.keys() - arrived.keys():
                check_arrived(self._decoder, self._placed, arrived)
            here = [arrived[key].data for key in strides]
            there = [part[: len(data)] for part, data in zip(there, here, strict=True)]
        self._ring.copy(slot, there, here)
        self._brought.update(dict.fromkeys(slot.layers, slot))
        if self._placement is None:  # while the first bytes travel
            assert arrived is not None, "it is the first layer"
            most = self._queue.most
            self._placement = Placement(self._decoder, self._placed, arrived, most, self._slots)


def _place(slot: Slot, layer: int) -> tuple[int, int]:
    """How many layers the slot holds, and which of them this one is."""
    return len(slot.layers), layer - slot.layers.start
