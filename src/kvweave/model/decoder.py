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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvweave.kernels.dispatch import find_compiled
from kvweave.kernels.elementwise import rms_norm, silu_mul
from kvweave.kernels.host import on_device
from kvweave.kernels.linear import Linear
from kvweave.kernels.native.layers import CompiledLayers, LayerSizes
from kvweave.kernels.native.loading import NativeKernels, kernels_so_far
from kvweave.kernels.rope import Angles, make_angles, rotate
from kvweave.model.batch_kv import BatchKV, open_batch_kv
from kvweave.model.rope import frequencies
from kvweave.model.rows import QKV, Rows, after_exits, flat, hooked_rows, run_hooks, wanted_rows
from kvweave.model.sequence_kv import SequenceKV
from kvweave.model.spec import ExpertSpec, ModelSpec
from kvweave.model.weights import ExpertWeights, Weights

# rows up to which compiled layers run in one call; with more, a layer takes long enough to be
# heard of
FEW_ROWS = 16
# nats per token to the exact weights: below it rounded ones count as the same model (`--quant auto`
# asks for half of it on its short text: `load.AUTO_KL`)
SMALL_KL = 0.01


class CalibratedAs(NamedTuple):
    """Names under which calibration tables are looked up."""

    fingerprint: str  # of weights
    revision: str  # of a decoder


def revision_of(fingerprint: str, spec: ModelSpec, dtype: torch.dtype) -> str:
    """Names what weights of this fingerprint compute, whoever computes it."""
    parts = (fingerprint, repr(spec), str(dtype))
    return hashlib.blake2b("|".join(parts).encode(), digest_size=16).hexdigest()


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
        self._compiled: CompiledLayers | None = None  # made when kernels were, and rows come
        self.on_layer: Callable[[], None] = lambda: None  # hears of every layer that is reached

    @cached_property
    def revision(self) -> str:
        """Names the function this decoder computes: weights, every setting and the precision."""
        return revision_of(self.weights.fingerprint, self.spec, self.dtype)

    @cached_property
    def calibrated_as(self) -> CalibratedAs:
        """Whose calibration tables hold for this decoder: its own, or, where rounding its weights
        costs less than SMALL_KL, those of the same weights in float32 (docs/calibration.md)."""
        cost = self.weights.rounding
        if cost is None or cost.kl_nats >= SMALL_KL:
            return CalibratedAs(self.weights.fingerprint, self.revision)
        exact = cost.exact_fingerprint
        return CalibratedAs(exact, revision_of(exact, self.spec, self.dtype))

    @cached_property
    def revision_in_float32(self) -> str | None:
        """Names these weights in float32; their tables hold for a half type once its rounding was
        measured and is small (`calibrate/own_evidence.py`); None: it computes in float32."""
        if self.dtype == torch.float32:
            return None
        return revision_of(self.weights.fingerprint, self.spec, torch.float32)

    @property
    def weights_words(self) -> str:
        """What its weights are, for people; and what is missing to multiply them fast."""
        kernels = self._kernels
        missing = "" if kernels is None or kernels.library is not None else f"; {kernels.words}"
        cost = self.weights.rounding
        held = str(self.dtype).removeprefix("torch.") if cost is None else "8 bits, for speed"
        random = "RANDOM weights, for load tests: answers mean nothing; " * self.weights.is_random
        return f"{random}weights in {held}{missing}"

    @property
    def _kernels(self) -> NativeKernels | None:
        """Compiled kernels, asked for where a model of some size runs in float32 on a CPU."""
        is_theirs = self.device.type == "cpu" and self.dtype == torch.float32
        return kernels_so_far() if is_theirs else None

    @property
    def weights_detail(self) -> str:
        """What rounding its weights costs and how they are multiplied, for those who measure."""
        cost, kernels = self.weights.rounding, self._kernels
        compiled = "" if kernels is None else f"; {kernels.words}"
        if cost is None:
            return f"weights in {str(self.dtype).removeprefix('torch.')}{compiled}"
        return f"weights in 8 bits, {cost.kl_nats:.4f} nats per token from float32{compiled}"

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Return `x`: all heads are here."""
        return x

    @property
    def can_record(self) -> bool:
        """Whether passes can be recorded as CUDA graphs: experts are chosen on the host."""
        return self.device.type == "cuda" and self.spec.experts is None

    @contextmanager
    def recording(self) -> Iterator[None]:
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
        """Run all rows through their layers; return logits [wanted rows, V] in float32."""
        positions = flat([rows.positions for rows in batch])  # [R] on the host
        angles = self.angles(on_device(positions, self.device))
        ids = on_device(flat([rows.token_ids for rows in batch]), self.device)
        for rows in batch:
            rows.kv.reserve(rows.positions[-1] + 1)
        h = self.embed(ids)
        kv, hooked = open_batch_kv(batch, self.device, self.turn), hooked_rows(batch)
        done = 0  # layers
        for layer in range(self.spec.num_layers):
            if layer < done:
                continue
            if not hooked and (done := self._run(layer, h, batch, kv, positions, angles)) > layer:
                continue
            fresh = self.qkv(layer, h)
            run_hooks(hooked, layer, fresh)
            q = fresh.q
            kv.write(layer, fresh.k, fresh.v, angles)
            counts, keep = None, None
            if layer == self.spec.num_layers - 1:  # behind the last keys only logits rows matter
                keep, counts = wanted_rows(batch), [len(rows.wanted) for rows in batch]
            elif (remaining := after_exits(batch, layer)) is not None:
                batch, keep = remaining
                kv, hooked = open_batch_kv(batch, self.device, self.turn), hooked_rows(batch)
            if keep is not None:
                at, positions = on_device(keep, self.device), positions[keep]
                q, h, angles = q[at], h[at], Angles(angles.cos[at], angles.sin[at])
            if not batch:
                break  # every row has stopped, and none needs logits
            h = self.finish(layer, h, kv.attend(layer, rotate(q, angles), positions, counts))
        return self.logits(h)

    def _run(
        self,
        layer: int,
        h: Tensor,
        batch: Sequence[Rows],
        kv: BatchKV,
        positions: Tensor,
        angles: Angles,
    ) -> int:
        """Run layers from `layer` on by compiled kernels, as far as all rows go on together and
        these can: the first layer that is left, `layer` itself where they cannot."""
        kernels = self._layers(h)
        if kernels is None or not len(h):
            return layer
        end = kernels.stretch(layer)
        if any(len(rows.wanted) < len(rows.token_ids) for rows in batch):
            end = min(end, self.spec.num_layers - 1)  # behind its keys only logits rows matter
        exits = [rows.early_exit.layer for rows in batch if rows.early_exit is not None]
        end = min([end, *(at for at in exits if at >= layer)])
        if end <= layer:
            return layer
        places = kv.locate_rows(positions)
        if places is None:
            return layer
        step = end - layer if len(h) <= FEW_ROWS else 1
        for first in range(layer, end, step):
            self.on_layer()
            kernels.run(range(first, first + step), h, angles, places)
        return end

    def _layers(self, h: Tensor) -> CompiledLayers | None:
        """The layers as compiled kernels have them, if there are any for rows like h."""
        library = find_compiled(h)
        if library is None or not h.is_contiguous():
            return None
        if self._compiled is None or self._compiled.library is not library:
            spec = self.spec
            sizes = LayerSizes(
                spec.hidden_dim, spec.inner_dim, spec.num_heads, spec.num_kv_heads, spec.head_dim,
                len(self._inv_freq), spec.norm_eps,
            )  # fmt: skip
            self._compiled = CompiledLayers(library, sizes, self.weights.layers)
        return self._compiled

    def angles(self, positions: Tensor) -> Angles:
        """RoPE angles of `positions` [R], for every layer alike."""
        return make_angles(positions, self._inv_freq, self.spec.rope.attention_factor, self.dtype)

    def turn(self, positions: Tensor) -> Angles:
        """The rotation by `positions` [R] alone, in float32: without the factor that `angles` put
        into queries and keys already. For what was turned before, as keys in pages of a chunk."""
        return make_angles(positions, self._inv_freq, 1.0, torch.float32)

    def embed(self, ids: Tensor) -> Tensor:
        """Hidden states [R, E] of token ids [R]."""
        return F.embedding(ids, self.weights.embedding)

    def qkv(self, layer: int, h: Tensor, out: Tensor | None = None) -> QKV:
        """What layer `layer` makes of hidden states [R, E].

        With `out` [R, (Hq + 2 Hk) D] it is written there, and the answer is views of it.
        """
        spec, w = self.spec, self.weights.layers[layer]
        heads = spec.num_heads + 2 * spec.num_kv_heads
        sizes = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        kernels = self._layers(h)
        if kernels is not None and kernels.fits(layer):
            fused = h.new_empty(len(h), heads * spec.head_dim) if out is None else out
            kernels.begin(layer, h, fused)
            return QKV(*torch.split(fused.view(len(h), heads, spec.head_dim), sizes, dim=1))
        fused = w.qkv(self._norm(h, w.input_norm), out)
        q, k, v = torch.split(fused.view(len(h), heads, spec.head_dim), sizes, dim=1)
        if w.q_norm is not None and w.k_norm is not None:
            into = (None, None) if out is None else (q, k)
            q, k = self._norm(q, w.q_norm, into[0]), self._norm(k, w.k_norm, into[1])
        return QKV(q, k, v)

    def finish(self, layer: int, h: Tensor, attended: Tensor) -> Tensor:
        """The rest of layer `layer`: h [R, E] and attention output [R, Hq, D] to the next h.

        Works in place: `h` is overwritten and returned.
        """
        self.on_layer()
        w, attended = self.weights.layers[layer], attended.flatten(1)
        kernels = self._layers(h)
        if kernels is not None and kernels.fits(layer):
            kernels.end(layer, h, attended)
            return h
        w.out.add_to(h, attended)
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


def routed_mlp(x: Tensor, weights: ExpertWeights, spec: ExpertSpec) -> Tensor:
    """Mix the chosen experts' outputs for rows x [R, E]."""
    shares = Linear(weights.router)(x).softmax(dim=-1, dtype=torch.float32)  # [R, experts]
    share, chosen = shares.topk(spec.per_token, dim=-1)  # [R, per_token] each
    if spec.renormalise:
        share = share / share.sum(dim=-1, keepdim=True)
    out = torch.zeros_like(x, dtype=torch.float32)  # sums of few terms, rounded once at the end
    for expert in range(spec.num_experts):
        rows, slot = torch.where(chosen == expert)
        if len(rows) == 0:
            continue
        y = weights.down[expert](silu_mul(weights.gate_up[expert](x[rows])))
        out.index_add_(0, rows, y * share[rows, slot, None])
    return out.to(x.dtype)
