"""The question behind nothing but the preamble, or alone, recorded once as a CUDA graph.

A probe of some dozen rows is over before the host has given its orders: some hundred launches. They
are the same for every question of about that length: they are recorded behind the first one, in
idle time, or for the second one, and every later one is a single order. Rows are filled up to a
multiple; rows behind a row never change it.

Shapes: U question rows, P preamble tokens, Hq query heads, Hk KV heads, D head dim.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvweave.fuse.protocol import FusionDecoder
from kvweave.kernels.host import on_device
from kvweave.kernels.recording import Refusals
from kvweave.kernels.rope import rotate
from kvweave.kv.format.codec import LayerKV

STEP = 16  # rows
MOST_ROWS = 512  # beyond, computing takes longer than ordering
# Tokens in front: a system prompt's. Longer fronts have chunks in them, in as many lengths as there
# are prompts, and would push each other out.
MOST_FRONT = 192
KEPT = 8  # recordings per decoder
# cuDNN is left out: it plans every shape anew, which takes up to a second
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

Found = dict[int, tuple[Tensor, Tensor]]  # layer to q [U, Hq, D], k [U, Hk, D], both turned


class ProbeKind(NamedTuple):
    """What one recording can play."""

    num_rows: int
    in_front: int  # P
    layers: tuple[int, ...]


class ProbeRecording:
    """A question of one kind as a CUDA graph, with the memory that it reads and writes."""

    def __init__(self, decoder: FusionDecoder, kind: ProbeKind) -> None:
        self._device = device = decoder.device
        inputs = torch.zeros(2, kind.num_rows, dtype=torch.int64, device=device)
        self._inputs = inputs  # ids, positions
        spec, layers = decoder.spec, kind.layers
        shape = (max(layers), 2, kind.in_front, spec.num_kv_heads, spec.head_dim)
        self.front = torch.zeros(shape, dtype=decoder.dtype, device=device)
        # the first keys of the KV that lies there, which are not kept alive for it
        self._shown: Callable[[], Tensor | None] = _nothing
        self._graph = torch.cuda.CUDAGraph()
        with decoder.recording():
            # what is made on first use is made here
            _question(decoder, inputs, layers, self.front)
            torch.cuda.synchronize(decoder.device)
        # scratch memory anew: taken inside it is the recording's own, and replays write there
        with (
            decoder.recording(),
            # other threads go on locking memory and the like
            torch.cuda.graph(self._graph, capture_error_mode="thread_local"),
        ):
            self._found = _question(decoder, inputs, layers, self.front)

    def play(self, ids: Sequence[int], first: int, front: Sequence[LayerKV]) -> Found:
        below = front[: len(self.front)]  # nothing, if the lowest layer is the only one asked for
        if below and below[0].k is not self._shown():  # the same preamble, question after question
            self._shown = _nothing
            torch._foreach_copy_(list(self.front[:, 0]), [kv.k for kv in below])
            torch._foreach_copy_(list(self.front[:, 1]), [kv.v for kv in below])
            self._shown = ref(below[0].k)
        num_rows = self._inputs.shape[1]
        host = torch.zeros(2, num_rows, dtype=torch.int64)
        host[0, : len(ids)] = torch.tensor(ids)
        host[1] = torch.arange(first, first + num_rows)
        self._inputs.copy_(on_device(host, self._device))
        self._graph.replay()
        return {at: (q[: len(ids)], k[: len(ids)]) for at, (q, k) in self._found.items()}


class ProbeRecordings:
    """The probes that were recorded for one decoder. Used by the thread that owns the device."""

    def __init__(
        self, record: Callable[[FusionDecoder, ProbeKind], ProbeRecording] = ProbeRecording
    ) -> None:
        self._record = record
        self._recordings: OrderedDict[ProbeKind, ProbeRecording | None] = OrderedDict()
        self._under_way: _ProbeUnderWay | None = None
        self.refusals = Refusals("the question", "probes take longer")

    def probe(
        self,
        decoder: FusionDecoder,
        ids: Sequence[int],
        first: int,
        layers: Sequence[int],
        front: Sequence[LayerKV] = (),
    ) -> Found | None:
        """Queries and keys at `layers` of tokens at positions from `first` on, which see `front`
        and each other. None: not recorded yet; results are valid until the next call."""
        before, self._under_way = self._under_way, None
        if before is not None and before.is_of(ids, first, layers, front):
            return before.found
        return self._play(decoder, ids, first, layers, front)

    def begin(
        self,
        decoder: FusionDecoder,
        ids: Sequence[int],
        first: int,
        layers: Sequence[int],
        front: Sequence[LayerKV] = (),
    ) -> None:
        """Order a probe that is recorded already ahead of the call that asks for it. A call that
        asks for another takes its place."""
        self._under_way = None
        kind = _kind(ids, layers, front)
        if kind is not None and self._recordings.get(kind) is not None:
            found = self._play(decoder, ids, first, layers, front)
            if found is not None:
                shown = ref(front[0].k) if front else _nothing
                self._under_way = _ProbeUnderWay(tuple(ids), first, tuple(layers), shown, found)

    def _play(
        self,
        decoder: FusionDecoder,
        ids: Sequence[int],
        first: int,
        layers: Sequence[int],
        front: Sequence[LayerKV],
    ) -> Found | None:
        key = _kind(ids, layers, front)
        if key is None:
            return None
        if key not in self._recordings:  # the first of its kind warms everything up
            self._recordings[key] = None
            if len(self._recordings) > KEPT:
                self._recordings.popitem(last=False)
            return None
        self._recordings.move_to_end(key)
        recording = self._recordings[key] or self._try_to_record(decoder, key)
        return None if recording is None else recording.play(ids, first, front)

    def record_ahead(self, decoder: FusionDecoder) -> bool:
        """Record a kind of question that was asked before. False: there is none, or it cannot
        be."""
        for kind, made in self._recordings.items():
            if made is None and not self.refusals.is_paused(kind.num_rows):
                self._under_way = None
                return self._try_to_record(decoder, kind) is not None
        return False

    def _try_to_record(self, decoder: FusionDecoder, kind: ProbeKind) -> ProbeRecording | None:
        """Record a kind of question; None: it cannot be recorded, or not now."""
        made = self.refusals.attempt(kind.num_rows, partial(self._record, decoder, kind))
        self._recordings[kind] = made
        return made

    @property
    def kept(self) -> dict[ProbeKind, bool]:
        """Kinds that are kept, the latest used last, and whether each is recorded by now."""
        return {kind: made is not None for kind, made in self._recordings.items()}


class _ProbeUnderWay(NamedTuple):
    """A probe that was ordered ahead."""

    ids: tuple[int, ...]
    first: int
    layers: tuple[int, ...]
    shown: Callable[[], Tensor | None]  # the first keys of its front, as of a recording
    found: Found

    def is_of(
        self, ids: Sequence[int], first: int, layers: Sequence[int], front: Sequence[LayerKV]
    ) -> bool:
        asked = (tuple(ids), first, tuple(layers))
        same = asked == (self.ids, self.first, self.layers)
        shown = self.shown()
        return same and (shown is front[0].k if front else self.shown is _nothing)


def _kind(ids: Sequence[int], layers: Sequence[int], front: Sequence[LayerKV]) -> ProbeKind | None:
    """Which recording plays such a probe; None: none ever does."""
    num_rows = -(-len(ids) // STEP) * STEP
    in_front = len(front[0].k) if front else 0
    if num_rows > MOST_ROWS or in_front > MOST_FRONT:
        return None
    return ProbeKind(num_rows, in_front, tuple(sorted(layers)))


def _nothing() -> None:
    return None


def _question(
    decoder: FusionDecoder, inputs: Tensor, layers: tuple[int, ...], front: Tensor
) -> Found:
    """`front` [deepest, 2, P, Hk, D]: keys (turned) and values that every row sees."""
    (ids, positions), in_front = inputs, front.shape[2]
    angles = decoder.angles(positions)
    h = decoder.embed(ids)
    found: Found = {}
    seen = None  # [U, P + U]
    if in_front:
        seen = torch.ones(len(ids), in_front + len(ids), dtype=torch.bool, device=ids.device)
        seen = seen.tril(in_front)
    for layer in range(max(layers) + 1):
        projected = decoder.qkv(layer, h)
        q, k = rotate(projected.q, angles), rotate(projected.k, angles)
        if layer in layers:
            found[layer] = q, k
        if layer == max(layers):
            break
        keys = torch.cat([front[layer, 0], k]) if in_front else k
        values = torch.cat([front[layer, 1], projected.v]) if in_front else projected.v
        query, key, value = (x.transpose(0, 1)[None] for x in (q, keys, values))
        with sdpa_kernel(BACKENDS):
            o = F.scaled_dot_product_attention(
                query, key, value, seen, is_causal=seen is None, enable_gqa=True
            )
        h = decoder.finish(layer, h, o[0].transpose(0, 1))
    return found
