"""The question alone through the model, recorded once as a CUDA graph.

A probe of some dozen rows is over before the host has given its orders: some hundred launches. They
are the same for every question of about that length, so the second one is recorded and every later
one is a single order. Rows are filled up to a multiple; rows behind a row never change it.

Shapes: U question rows, Hq query heads, Hk KV heads, D head dim.
"""

from collections import OrderedDict
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from kvweave.fuse.protocol import Captures, Decoder
from kvweave.kernels.host import on_device
from kvweave.kernels.recording import Refusals
from kvweave.kernels.rope import rotate

STEP = 16  # rows
MOST_ROWS = 512  # beyond, computing takes longer than ordering
KEPT = 8  # recordings per decoder

Found = dict[int, tuple[Tensor, Tensor]]  # layer to q [U, Hq, D], k [U, Hk, D], both turned


class Recordings:
    """What was recorded for one decoder. Used by the thread that owns the device."""

    def __init__(self) -> None:
        self._graphs: OrderedDict[tuple[int, tuple[int, ...]], _Recording | None] = OrderedDict()
        self.refusals = Refusals("the question", "probes take longer")

    def probe(
        self, decoder: Captures, ids: Sequence[int], first: int, layers: Sequence[int]
    ) -> Found | None:
        """Queries and keys at `layers` of tokens at positions from `first` on. None: not recorded
        yet; results are valid until the next call."""
        num_rows = -(-len(ids) // STEP) * STEP
        if num_rows > MOST_ROWS:
            return None
        key = (num_rows, tuple(sorted(layers)))
        if key not in self._graphs:  # the first of its kind warms everything up
            self._graphs[key] = None
            if len(self._graphs) > KEPT:
                self._graphs.popitem(last=False)
            return None
        self._graphs.move_to_end(key)
        recording = self._graphs[key]
        if recording is None and self.refusals.may_record(num_rows):
            try:
                recording = self._graphs[key] = _Recording(decoder, *key)
            except RuntimeError as error:  # torch's word for every CUDA error
                self.refusals.failed(num_rows, error)
        return None if recording is None else recording.play(ids, first)


class _Recording:
    def __init__(self, decoder: Captures, num_rows: int, layers: tuple[int, ...]) -> None:
        self._device = decoder.device
        inputs = torch.zeros(2, num_rows, dtype=torch.int64, device=decoder.device)
        self._inputs = inputs  # ids, positions
        self._graph = torch.cuda.CUDAGraph()
        with decoder.capturing():
            _question_alone(decoder, inputs, layers)  # what is made on first use is made here
            torch.cuda.synchronize(decoder.device)
        # scratch memory anew: taken inside it is the recording's own, and replays write there
        with (
            decoder.capturing(),
            # other threads go on locking memory and the like
            torch.cuda.graph(self._graph, capture_error_mode="thread_local"),
        ):
            self._found = _question_alone(decoder, inputs, layers)

    def play(self, ids: Sequence[int], first: int) -> Found:
        num_rows = self._inputs.shape[1]
        host = torch.zeros(2, num_rows, dtype=torch.int64)
        host[0, : len(ids)] = torch.tensor(ids)
        host[1] = torch.arange(first, first + num_rows)
        self._inputs.copy_(on_device(host, self._device))
        self._graph.replay()
        return {at: (q[: len(ids)], k[: len(ids)]) for at, (q, k) in self._found.items()}


def _question_alone(decoder: Decoder, inputs: Tensor, layers: tuple[int, ...]) -> Found:
    ids, positions = inputs
    angles = decoder.angles(positions)
    h = decoder.embed(ids)
    found: Found = {}
    for layer in range(max(layers) + 1):
        projected = decoder.qkv(layer, h)
        q, k = rotate(projected.q, angles), rotate(projected.k, angles)
        if layer in layers:
            found[layer] = q, k
        if layer == max(layers):
            break
        query, key, value = (x.transpose(0, 1)[None] for x in (q, k, projected.v))
        o = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        h = decoder.finish(layer, h, o[0].transpose(0, 1))
    return found


_recordings: WeakKeyDictionary[Decoder, Recordings] = WeakKeyDictionary()


def recordings_of(decoder: Decoder) -> Recordings:
    return _recordings.setdefault(decoder, Recordings())
