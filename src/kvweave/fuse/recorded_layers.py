"""The steps between attentions, recorded as CUDA graphs: one order each instead of seven or more.

A layer of some hundred rows is computed before the host has given its orders. What stands between
two attentions is the same for every request of about as many rows, so the second one records it,
step by step as it goes, and every later one plays it. Rows are filled up to a multiple: rows do not
look at each other here, so those behind a pass's own change nothing.

All recordings of a decoder work on one set of buffers and one pool of memory: one pass at a time.

Shapes: R rows of a pass, P with those that fill up, E hidden dim, Hq query heads, Hk KV heads, D
head dim.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvweave.fuse.protocol import Captures, FusionDecoder, Projected
from kvweave.kernels.recording import Refusals

FEW_ROWS, FEW_STEP, STEP = 128, 16, 64  # multiples of 16 up to 128, of 64 above
MOST_ROWS = 2048  # beyond, the device has enough to do while orders are given
KEPT = 24  # numbers of rows per decoder

Play = Callable[[], object]


def padded_rows(num_rows: int) -> int | None:
    """Rows that are computed for `num_rows`; None: not recorded."""
    step = FEW_STEP if num_rows <= FEW_ROWS else STEP
    padded = -(-num_rows // step) * step
    return padded if 0 < padded <= MOST_ROWS else None


class Room(NamedTuple):
    """Memory that recordings read and write, for as many rows as it has."""

    hidden: Tensor  # [P, E]
    attended: Tensor  # [P, Hq, D]
    fused: Tensor  # [P, Hq + 2 Hk, D]: queries, keys and values of a row

    @classmethod
    def new(cls, h: Tensor, like: Projected) -> "Room":
        """For the most rows there are. Zeros: what fills up is always a number."""
        heads, dim = like.q.shape[1:]
        both = heads + 2 * like.k.shape[1]
        with torch.inference_mode(False):  # used inside such a mode and outside it
            return cls(
                torch.zeros(MOST_ROWS, h.shape[1], dtype=h.dtype, device=h.device),
                torch.zeros(MOST_ROWS, heads, dim, dtype=h.dtype, device=h.device),
                torch.zeros(MOST_ROWS, both, dim, dtype=h.dtype, device=h.device),
            )

    def of(self, num_rows: int) -> "Room":
        return Room(*(x[:num_rows] for x in self))

    def projected(self) -> "Fresh":
        heads = self.attended.shape[1]
        kv_heads = (self.fused.shape[1] - heads) // 2
        return Fresh(*torch.split(self.fused, [heads, kv_heads, kv_heads], dim=1))


class Fresh(NamedTuple):
    """Projections, as views of a room."""

    q: Tensor  # [R, Hq, D]
    k: Tensor  # [R, Hk, D]
    v: Tensor  # [R, Hk, D]


def compute(decoder: Captures, room: Room, layer: int) -> None:
    """Projections of `layer` from the room's hidden states, behind the end of the layer below."""
    h = room.hidden
    if layer:
        h = decoder.finish(layer - 1, h, room.attended)
    decoder.qkv(layer, h, room.fused.flatten(1))


class Recorder(Protocol):
    """Makes one order of many."""

    def record(self, decoder: Captures, work: Play) -> Play:
        """What does as `work` does whenever it is called. Raises RuntimeError if it cannot."""
        ...


class Graphs:
    """A recorder over one pool of device memory. What was recorded holds nothing between plays."""

    def __init__(self, decoder: Captures, room: Room) -> None:
        """Overwrites `room`, which is as large as any that will follow."""
        self._stream = torch.cuda.Stream(decoder.device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(decoder.device)
        with decoder.capturing():
            compute(decoder, room, 1)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):  # the vendor's work space of a stream comes here
                compute(decoder, room.of(FEW_STEP), 1)
            current.wait_stream(self._stream)
        # the largest first: what follows finds room in its memory, whatever the order of sizes
        self._largest = self.record(decoder, lambda: compute(decoder, room, 1))

    def record(self, decoder: Captures, work: Play) -> Play:
        graph = torch.cuda.CUDAGraph()
        with decoder.capturing(), torch.cuda.stream(self._stream):
            # other threads go on locking memory and the like
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph.replay


@dataclass(slots=True, eq=False)
class _Size:
    """What is recorded for one number of rows."""

    rows: int  # P
    uses: int = 0
    plays: dict[int, Play] = field(default_factory=dict)  # by layer


class LayerRecordings:
    """What was recorded for one decoder. Used by the thread that owns the device.

    Holds no decoder: recordings go when it goes.
    """

    def __init__(self, new_recorder: Callable[[Captures, Room], Recorder] = Graphs) -> None:
        self._new_recorder = new_recorder
        self._recorder: Recorder | None = None
        self._room: Room | None = None
        self._sizes: OrderedDict[int, _Size] = OrderedDict()
        self.refusals = Refusals("layers", "prefills take longer")
        self._passes = 0  # begun: the latest has the buffers

    def begin(self, decoder: Captures, h: Tensor) -> "Recorded | None":
        """Steps of rows with hidden states h [R, E], which are copied. None: not by recordings."""
        rows = padded_rows(len(h))
        if rows is None or decoder.spec.num_layers < 2:
            return None
        if self._room is None:
            self._room = Room.new(h, decoder.qkv(0, h[:1]))
        size = self._sizes.setdefault(rows, _Size(rows))
        self._sizes.move_to_end(rows)
        if len(self._sizes) > KEPT:
            self._sizes.popitem(last=False)
        size.uses += 1
        if size.uses > 1 and self._recorder is None:
            self._try(MOST_ROWS, lambda room: self._open(decoder, room))
        self._passes += 1
        return Recorded(decoder, self, self._passes, self._room.of(rows), size, h)

    def run(self, nth: int, decoder: Captures, size: _Size, room: Room, layer: int) -> None:
        """A step of the nth pass. The first of a size runs it plainly, the second records it."""
        assert nth == self._passes, "another pass has taken these buffers"

        def work() -> None:
            compute(decoder, room, layer)

        if layer not in size.plays and size.uses > 1 and self._recorder is not None:
            self._try(size.rows, lambda _: self._record(decoder, size, layer, work))
        size.plays.get(layer, work)()

    def _open(self, decoder: Captures, room: Room) -> None:
        self._recorder = self._new_recorder(decoder, room)

    def _record(self, decoder: Captures, size: _Size, layer: int, work: Play) -> None:
        assert self._recorder is not None, "opened when the pass began"
        size.plays[layer] = self._recorder.record(decoder, work)

    def _try(self, num_rows: int, what: Callable[[Room], None]) -> None:
        if not self.refusals.may_record(num_rows):
            return
        assert self._room is not None, "made when the first pass began"
        try:
            what(self._room)
        except RuntimeError as error:  # torch's word for every CUDA error
            self.refusals.failed(num_rows, error)


class Recorded:
    """The steps of one pass, over the buffers of its decoder's recordings. See layer_steps.Steps.

    Used until the next pass begins: the projections and `hidden` are then overwritten.
    """

    def __init__(
        self,
        decoder: Captures,
        owner: LayerRecordings,
        nth: int,
        room: Room,
        size: _Size,
        h: Tensor,
    ) -> None:
        self._decoder = decoder
        self._owner = owner
        self._nth = nth
        self._padded = room
        self._size = size
        own = room.of(len(h))
        self.hidden: Tensor = own.hidden
        self.room: Tensor | None = own.attended
        self._attended = own.attended
        self._projected = own.projected()
        own.hidden.copy_(h)
        if len(h) < size.rows:  # left over from other passes, they would grow from one to the next
            room.hidden[len(h) :].zero_()

    def first(self) -> Projected:
        return self._step(0)

    def next(self, layer: int, attended: Tensor) -> Projected:
        if attended.data_ptr() != self._attended.data_ptr():
            self._attended.copy_(attended.view_as(self._attended))
        return self._step(layer + 1)

    def _step(self, layer: int) -> Projected:
        self._owner.run(self._nth, self._decoder, self._size, self._padded, layer)
        return self._projected


_recordings: WeakKeyDictionary[FusionDecoder, LayerRecordings] = WeakKeyDictionary()


def recordings_of(decoder: FusionDecoder) -> LayerRecordings:
    """Of this decoder, kept as long as it is."""
    found = _recordings.get(decoder)
    if found is None:
        found = _recordings[decoder] = LayerRecordings()
    return found
