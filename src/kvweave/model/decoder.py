"""One decoder for the RoPE family, over flat batches of rows.

A row is one token of one sequence. Rows of many sequences lie behind each other in one batch, with
their positions beside them; each row writes its key and value into its sequence's KV and attends to
what stands at or before its position. Full prefill, a slice of a prefill, recomputing scattered
rows and decoding are therefore the same call.

`embed`, `qkv`, `finish` and `logits` are the seams that fusion works through: it runs its own loop
over layers, with chunk KV laid in between.

Shapes: R rows, E hidden dim, Hq query heads, Hk KV heads, D head dim, V vocabulary.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvweave.kernels.attention import Segment, attend
from kvweave.kernels.gate import silu_mul
from kvweave.kernels.host import on_device
from kvweave.kernels.norm import rms_norm
from kvweave.kernels.paged_attention import attend_paged
from kvweave.kernels.rope import Angles, make_angles, rotate
from kvweave.model.experts import routed_mlp
from kvweave.model.paged_kv import PagedKV, PagedPlaces
from kvweave.model.rope import frequencies
from kvweave.model.sequence_kv import DenseKV, SequenceKV
from kvweave.model.spec import ModelSpec
from kvweave.model.weights import Weights


class QKV(NamedTuple):
    """Projections of some rows: after q/k norm, before RoPE."""

    q: Tensor  # [R, Hq, D]
    k: Tensor  # [R, Hk, D]
    v: Tensor  # [R, Hk, D]


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of a batch that belong to one sequence."""

    token_ids: Sequence[int]
    positions: Sequence[int]  # ascending; as many as token_ids
    kv: DenseKV | PagedKV  # gets the rows' keys and values; of one kind in a batch
    wanted: Sequence[int]  # which of these rows (0-based, ascending) need logits


class Decoder:
    """Computes a model. Stateless between calls: everything that changes lives in the rows' KV.

    One thread at a time. Tensors it returns belong to the caller.
    """

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self.spec = spec
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._inv_freq = frequencies(spec.rope).to(self.device)
        self._scratch = torch.empty(0, dtype=self.dtype, device=self.device)

    @cached_property
    def revision(self) -> str:
        """Names the function this decoder computes: weights, every setting and the precision."""
        parts = (self.weights.fingerprint, repr(self.spec), str(self.dtype))
        return hashlib.blake2b("|".join(parts).encode(), digest_size=16).hexdigest()

    @property
    def can_capture(self) -> bool:
        """Whether passes can be recorded as CUDA graphs: experts are chosen on the host."""
        return self.device.type == "cuda" and self.spec.experts is None

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Record a pass in here: it takes scratch memory of its own, from the recording's pool.

        One recording each, and no pass before it: what that took is given back at the end.
        """
        before, self._scratch = self._scratch, self._scratch.new_empty(0)
        try:
            yield
        finally:
            self._scratch = before

    def new_kv(self, capacity: int) -> SequenceKV:
        """An empty KV with room for `capacity` tokens (it grows)."""
        return SequenceKV(self.spec, capacity, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, batch: Sequence[Rows]) -> Tensor:
        """Run all rows through all layers; return logits [wanted rows, V] in float32."""
        positions_host = _flat([rows.positions for rows in batch])  # [R]
        angles = self.angles(on_device(positions_host, self.device))
        ids = on_device(_flat([rows.token_ids for rows in batch]), self.device)
        for rows in batch:
            rows.kv.reserve(rows.positions[-1] + 1)
        h = self.embed(ids)
        wanted = _wanted_rows(batch)
        access = _PagedAccess(batch, self.device) if _is_paged(batch) else _DenseAccess(batch)
        for layer in range(self.spec.num_layers):
            q, k, v = self.qkv(layer, h)
            row_angles, row_positions, counts = angles, positions_host, None
            access.write(layer, k, v, angles)
            if layer == self.spec.num_layers - 1:  # behind the last keys only logits rows matter
                at = on_device(wanted, self.device)
                q, h, counts = q[at], h[at], [len(rows.wanted) for rows in batch]
                row_angles = Angles(angles.cos[at], angles.sin[at])
                row_positions = positions_host[wanted]
            o = access.attend(layer, rotate(q, row_angles), row_positions, counts)
            h = self.finish(layer, h, o)
        return self.logits(h)

    def angles(self, positions: Tensor) -> Angles:
        """RoPE angles of `positions` [R], for every layer alike."""
        return make_angles(positions, self._inv_freq, self.spec.rope.attention_factor, self.dtype)

    def embed(self, ids: Tensor) -> Tensor:
        """Hidden states [R, E] of token ids [R]."""
        return F.embedding(ids, self.weights.embedding)

    def qkv(self, layer: int, h: Tensor, out: Tensor | None = None) -> QKV:
        """What layer `layer` makes of hidden states [R, E].

        With `out` [R, (Hq + 2 Hk) D] it is written there, and the answer is views of it.
        """
        spec, w = self.spec, self.weights.layers[layer]
        fused = w.qkv(self._norm(h, w.input_norm), out)
        fused = fused.view(len(h), spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        sizes = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        q, k, v = torch.split(fused, sizes, dim=1)
        if w.q_norm is not None and w.k_norm is not None:
            into = (None, None) if out is None else (q, k)
            q, k = self._norm(q, w.q_norm, into[0]), self._norm(k, w.k_norm, into[1])
        return QKV(q, k, v)

    def finish(self, layer: int, h: Tensor, attended: Tensor) -> Tensor:
        """The rest of layer `layer`: h [R, E] and attention output [R, Hq, D] to the next h.

        Works in place: `h` is overwritten and returned.
        """
        w = self.weights.layers[layer]
        w.out.add_to(h, attended.flatten(1))
        x = self._norm(h, w.mlp_norm)
        if w.experts is not None:
            assert self.spec.experts is not None, "expert weights without an expert spec"
            return h.add_(routed_mlp(x, w.experts, self.spec.experts))
        assert w.gate_up is not None, "layer has neither MLP nor experts"
        assert w.down is not None, "layer has neither MLP nor experts"
        w.down.add_to(h, silu_mul(w.gate_up(x, out=self._inner(len(x)))))
        return h

    def logits(self, h: Tensor) -> Tensor:
        """Next-token logits [R, V] of final hidden states [R, E], in float32."""
        return self.weights.head(self._norm(h, self.weights.final_norm)).float()

    def _inner(self, num_rows: int) -> Tensor:
        """Memory [R, 2 I] for the widest product of a layer, kept from pass to pass."""
        width = 2 * self.spec.inner_dim
        if len(self._scratch) < num_rows * width:
            self._scratch = self._scratch.new_empty(num_rows * width)
        return self._scratch[: num_rows * width].view(num_rows, width)

    def _norm(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        return rms_norm(x, weight, self.spec.norm_eps, out)


def _flat(parts: Sequence[Sequence[int]]) -> Tensor:
    """All numbers behind each other, int64 in host memory. A range costs nothing per number."""
    return torch.cat(
        [
            torch.arange(part.start, part.stop, part.step)
            if isinstance(part, range)
            else torch.tensor(part, dtype=torch.int64)
            for part in parts
        ]
    )


def _wanted_rows(batch: Sequence[Rows]) -> Tensor:
    """Indices into the flat batch of the rows whose logits are asked for."""
    wanted, start = [], 0
    for rows in batch:
        wanted += [start + i for i in rows.wanted]
        start += len(rows.token_ids)
    return torch.tensor(wanted, dtype=torch.int64)


def _bounds(batch: Sequence[Rows], counts: Sequence[int] | None) -> Iterator[tuple[int, int]]:
    """Rows [start, end) of each sequence; `counts` replaces how many there are."""
    start = 0
    for i, rows in enumerate(batch):
        end = start + (len(rows.token_ids) if counts is None else counts[i])
        yield start, end
        start = end


def _is_paged(batch: Sequence[Rows]) -> bool:
    return bool(batch) and isinstance(batch[0].kv, PagedKV)


class _DenseAccess:
    """Rows of sequences that own a dense buffer each."""

    def __init__(self, batch: Sequence[Rows]) -> None:
        self._batch = batch
        self._kvs = [rows.kv for rows in batch if not isinstance(rows.kv, PagedKV)]
        assert len(self._kvs) == len(batch), "a batch has KV of one kind"
        self._scattered: dict[int, Tensor] = {}  # places of rows that are no run, for every layer

    def write(self, layer: int, k: Tensor, v: Tensor, angles: Angles) -> None:
        """Keep keys (turned on the way) and values [R, Hk, D] of all rows."""
        for rows, kv, (start, end) in zip(
            self._batch, self._kvs, _bounds(self._batch, None), strict=True
        ):
            part = Angles(angles.cos[start:end], angles.sin[start:end])
            first, last = rows.positions[0], rows.positions[-1]
            if last - first == end - start - 1:  # one run: rotate straight into the buffer
                rotate(k[start:end], part, out=kv.keys(layer)[first : last + 1])
                kv.values(layer)[first : last + 1] = v[start:end]
            else:
                places = self._scattered.get(start)
                if places is None:
                    places = on_device(_flat([rows.positions]), k.device)
                    self._scattered[start] = places
                kv.keys(layer)[places] = rotate(k[start:end], part)
                kv.values(layer)[places] = v[start:end]

    def attend(
        self, layer: int, q: Tensor, positions: Tensor, counts: Sequence[int] | None
    ) -> Tensor:
        bounds = _bounds(self._batch, counts)
        segments = [
            Segment(start, end, kv.keys(layer), kv.values(layer))
            for kv, (start, end) in zip(self._kvs, bounds, strict=True)
        ]
        return attend(q, positions, segments)


class _PagedAccess:
    """Rows of sequences that share a pool: written in one go, whoever they belong to."""

    def __init__(self, batch: Sequence[Rows], device: torch.device) -> None:
        self._batch = batch
        self._kvs = [rows.kv for rows in batch if isinstance(rows.kv, PagedKV)]
        assert len(self._kvs) == len(batch), "a batch has KV of one kind"
        positions = [rows.positions for rows in batch]
        self._places = PagedPlaces.of(list(zip(self._kvs, positions, strict=True)), device)

    def write(self, layer: int, k: Tensor, v: Tensor, angles: Angles) -> None:
        """As `_DenseAccess.write`."""
        pool, slots = self._places
        keys, values = pool.slots(layer)
        if isinstance(slots, slice):
            rotate(k, angles, out=keys[slots])
        else:
            keys[slots] = rotate(k, angles)
        values[slots] = v

    def attend(
        self, layer: int, q: Tensor, positions: Tensor, counts: Sequence[int] | None
    ) -> Tensor:
        pool = self._places.pool
        bounds = _bounds(self._batch, counts)
        segments = [kv.segment(*rows) for kv, rows in zip(self._kvs, bounds, strict=True)]
        return attend_paged(q, positions, segments, pool.keys[layer], pool.values[layer])
