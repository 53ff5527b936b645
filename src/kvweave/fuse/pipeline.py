"""Stored chunks on their way to a GPU: copied ahead layer by layer, laid where they belong.

    store ─► page-locked host memory ─copy stream─► ring of slots ─compute stream─► the request's KV

Bytes travel as they are stored; decoding, turning and placing is one kernel. The host thread only
gives orders: it blocks for bytes that have not reached host memory, never for the device. While it
blocks there, what it ordered before goes on.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kvweave.fuse.placement import Placement
from kvweave.fuse.protocol import Decoder
from kvweave.fuse.request import Span
from kvweave.fuse.ring import RINGS, Ring, Slot, depth_for, new_event, seconds_between
from kvweave.fuse.selectors.base import Needs
from kvweave.fuse.sources import ChunkSource, Layers, StoredChunks, check_arrived
from kvweave.fuse.strategy import Strategy
from kvweave.kv.codec import LayerKV
from kvweave.kv.keys import ChunkKey


@contextmanager
def open_source(
    decoder: Decoder, placed: Sequence[Span], layers: Layers, strategy: Strategy
) -> Iterator[ChunkSource]:
    """Stored chunks for one prefill: through a ring to a GPU, straight from host memory else."""
    if decoder.device.type != "cuda" or not placed:
        yield StoredChunks(decoder, placed, layers)
        return
    needs = strategy.needs(decoder.spec.num_layers)
    ring = RINGS.take(decoder.device)
    # without a question to push through first, the pass or the scoring takes layers at once
    at_once = needs.probe in ("none", "full")
    try:
        source = PipelinedChunks(
            decoder,
            placed,
            layers,
            ring,
            taking_order(needs, decoder.spec.num_layers),
            0.0 if at_once else ring.start_s.get(needs.probe, float("inf")),
            begins=at_once,
        )
        begun_s = time.perf_counter()
        yield source
        if source.pass_began_s is not None:
            ring.started(needs.probe, source.pass_began_s - begun_s)
    except BaseException:
        # what the pass was told may still read slots, or anchors in memory that goes with the lease
        torch.cuda.current_stream(decoder.device).synchronize()
        raise
    finally:
        ring.finish()  # the lease on the bytes may be released after that
        RINGS.give_back(ring)


def taking_order(needs: Needs, num_layers: int) -> list[int]:
    """The order in which a request takes its layers: those that rows are chosen by, then the pass.

    A view of the full context and choices in flight take them from the bottom up anyway.
    """
    first = sorted(needs.key_layers) if needs.probe in ("question", "anchors") else []
    return [*first, *(layer for layer in range(num_layers) if layer not in first)]


class PipelinedChunks:
    """A ChunkSource that lays its layers itself. For the thread that runs the pass.

    Whoever lends the ring finishes it before the bytes may go: see `open_source`.
    """

    def __init__(
        self,
        decoder: Decoder,
        placed: Sequence[Span],
        layers: Layers,
        ring: Ring,
        order: Sequence[int] | None = None,
        start_s: float = float("inf"),
        begins: bool = True,
    ) -> None:
        """`order` is that in which layers will be asked for; others come when they are asked for.

        Copying begins here, with what has arrived, or with `begin`. `start_s`: see `depth_for`.
        """
        self._decoder = decoder
        self._placed = placed
        self._layers = layers
        self._ring = ring
        self._num_layers = decoder.spec.num_layers
        self._order = list(range(self._num_layers) if order is None else order)  # still to bring
        self._start_s = start_s
        self._placement: Placement | None = None
        self._free: list[Slot] = []
        self._brought: dict[int, Slot] = {}  # layers in the ring, the next to be taken first
        self._stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.pass_began_s: float | None = None  # host clock when the lowest layer was taken
        self._waited_s = 0.0  # where there is no device to wait
        self._begun = False
        if begins:
            self.begin()

    def begin(self) -> None:
        self._begun = True
        self._look_ahead()

    def lay(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write one layer of all placed chunks into the request's KV [T, Hk, D], keys turned."""
        slot, placement = self._take(layer)
        if layer == 0:
            self.pass_began_s = time.perf_counter()
        placement.lay(slot.data, keys, values)
        self._give_back(slot)

    def layer(self, layer: int, out: LayerKV | None = None) -> LayerKV:
        slot, placement = self._take(layer)
        if out is None:
            spec, dtype = self._decoder.spec, self._decoder.dtype
            shape = (2, placement.num_tokens, spec.num_kv_heads, spec.head_dim)
            out = LayerKV(*torch.empty(shape, dtype=dtype, device=self._decoder.device))
        placement.unturned(slot.data, out.k, out.v)
        self._give_back(slot)
        return out

    def beside(self, name: str) -> Mapping[ChunkKey, bytes]:
        return {key: bytes(data) for key, data in self._layers.extras(name).items()}

    def tensors_beside(self, name: str) -> Mapping[ChunkKey, Tensor]:
        return self._layers.extra_tensors(name)

    def stalled_s(self) -> float:
        """How long the device stood still for bytes, as far as it is known by now."""
        return self._waited_s + sum(seconds_between(*stall) for stall in self._stalls)

    def _take(self, layer: int) -> tuple[Slot, Placement]:
        """The slot of a layer, filled as far as the current stream can see."""
        on_device = self._decoder.device.type == "cuda"
        started_s = time.perf_counter()
        if on_device:  # behind all that was ordered so far: there the device begins to wait
            began, ended = (new_event() for _ in range(2))
            began.record()
        if layer not in self._brought:
            if layer in self._order:
                self._order.remove(layer)
            self._bring(layer)
        slot = self._brought.pop(layer)
        if on_device:
            self._ring.wait(slot)
            ended.record()
            self._stalls.append((began, ended))
        else:
            self._waited_s += time.perf_counter() - started_s
        assert self._placement is not None, "a layer was brought"
        return slot, self._placement

    def _give_back(self, slot: Slot) -> None:
        self._ring.release(slot)
        self._free.append(slot)
        if self._begun:
            self._look_ahead()

    def _look_ahead(self) -> None:
        """Bring the next layers, as far as they have arrived and there are slots."""
        while self._order and (self._free or self._placement is None):
            if not self._layers.is_ready(self._order[0]):
                return
            self._bring(self._order.pop(0))

    def _bring(self, layer: int) -> None:
        """Begin to copy a layer; blocks until its bytes are in host memory. Raises ChunkLost."""
        arrived = self._layers.wait_layer(layer)
        if self._placement is None or self._placement.offsets.keys() - arrived.keys():
            check_arrived(self._decoder, self._placed, arrived)
        if self._placement is None:
            self._placement = Placement(self._decoder, self._placed, arrived)
            size, ring = self._placement.num_bytes, self._ring
            depth = depth_for(
                size, ring.bytes_per_s, self._start_s, self._num_layers, ring.ring_bytes
            )
            self._free = ring.slots(size, depth)[:]
        if not self._free:  # asked for out of order: what would be taken last makes room
            last = next(reversed(self._brought))
            self._order.insert(0, last)
            self._free.append(self._brought.pop(last))
        slot = self._free.pop(0)
        offsets = self._placement.offsets
        self._ring.copy(slot, ((at, arrived[key].data) for key, at in offsets.items()))
        self._brought[layer] = slot
