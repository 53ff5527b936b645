"""vLLM's own modules, cut where fusion works: a `FusionDecoder` (fuse/protocol.py).

Products run through vLLM's linear layers, so whatever it has packed there is used as it is; norms
and rotation are kvweave's operators over vLLM's weights. Nothing is captured and nothing
compiled: beside a compiled model the same modules run eagerly. On the thread of the forward pass,
between two of vLLM's own passes. Where LoRA is on, vLLM's layers are wrapped: see lora.py.

Shapes: R rows, E hidden dim, Hq query heads, Hk KV heads, D head dim, V vocabulary.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvweave.fuse.protocol import Projected
from kvweave.hosts.vllm.lora import Adapter, add_adapter, base_of, find_slot
from kvweave.kernels.elementwise import rms_norm
from kvweave.kernels.rope import Angles, make_angles
from kvweave.model.rope import frequencies
from kvweave.model.rows import QKV
from kvweave.model.spec import ModelSpec


class VllmDecoder:
    """A causal language model of vLLM: Llama, Mistral, Qwen2 or Qwen3."""

    can_record = False  # recordings belong to vLLM here

    def __init__(
        self, model: Any, spec: ModelSpec, lora: Adapter | None = None, ranks: Any = None
    ) -> None:
        """`model` is the outer module, with the head; it was found fit by capabilities.py. `lora`
        is computed with, which must be loaded then. `ranks` is vLLM's group of those that share
        the heads out, of which `spec` has one rank's; None: all are here."""
        self.spec = spec
        self._model = model
        self._lora = lora
        self._ranks = ranks
        self._layers = list(model.model.layers)
        norm = model.model.norm.weight
        self.device: torch.device = norm.device
        self.dtype: torch.dtype = norm.dtype
        self._inv_freq = frequencies(spec.rope).to(self.device)

    def angles(self, positions: Tensor) -> Angles:
        return make_angles(positions, self._inv_freq, self.spec.rope.attention_factor, self.dtype)

    def turn(self, positions: Tensor) -> Angles:
        return make_angles(positions, self._inv_freq, 1.0, torch.float32)

    def embed(self, ids: Tensor) -> Tensor:
        hidden: Tensor = base_of(self._model.model.embed_tokens)(ids)
        return hidden

    def qkv(self, layer: int, h: Tensor, out: Tensor | None = None) -> Projected:
        assert out is None, "nothing is recorded here"
        spec, each = self.spec, self._layers[layer]
        attention = each.self_attn
        fused = self._product(attention.qkv_proj, self._norm(h, each.input_layernorm))
        fused = fused.view(len(h), spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        q, k, v = fused.split_with_sizes(heads, dim=1)
        if spec.qk_norm:
            q, k = self._norm(q, attention.q_norm), self._norm(k, attention.k_norm)
        return QKV(q, k, v)

    def finish(self, layer: int, h: Tensor, attended: Tensor) -> Tensor:
        each = self._layers[layer]
        h.add_(self._product(each.self_attn.o_proj, attended.flatten(1)))
        normed = self._norm(h, each.post_attention_layernorm)
        gate, up = self._product(each.mlp.gate_up_proj, normed).chunk(2, dim=-1)
        # not in place: some of vLLM's products want their rows side by side
        return h.add_(self._product(each.mlp.down_proj, F.silu(gate).mul_(up)))

    def logits(self, h: Tensor) -> Tensor:
        model = self._model
        processor, head = base_of(model.logits_processor), base_of(model.lm_head)
        made: Tensor = processor(head, self._norm(h, model.model.norm))
        return made.float()

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        if self._ranks is None or not x.numel():  # of nothing vLLM's CPU build divides by zero
            return x
        # gathered, and added up in one order everywhere: ranks decide by it
        shares: Tensor = self._ranks.all_gather(x.to(self.device).contiguous()[None], dim=0)
        return shares.sum(0).to(x.device)

    def recording(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _product(self, module: Any, x: Tensor) -> Tensor:
        """Rows x [R, in] through a linear layer, and through its part of the adapter."""
        base = base_of(module)
        made: Tensor = base(x)[0]
        if self._lora is not None and base is not module:
            add_adapter(made, x, module, find_slot(self._model, self._lora.number))
        return made

    def _norm(self, x: Tensor, norm: Any) -> Tensor:
        return rms_norm(x, norm.weight, self.spec.norm_eps)
