"""What fusion needs of a model: the seams between which it lays chunk KV.

Our own decoder satisfies this, and so can an adapter inside another engine. Called on the thread
that owns the device. Tensors belong to the caller once returned.

Shapes: R rows, E hidden dim, Hq query heads, Hk KV heads, D head dim, V vocabulary.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvweave.kernels.rope import Angles
from kvweave.kernels.types import CodedPages
from kvweave.kv.format.codec import LayerKV


class Meanwhile(NamedTuple):
    """What the host does where it would wait for its device, which has more to do until then: other
    work for it may be ordered. Called on the thread of the pass."""

    scoring: Callable[[], None]  # rows are being scored; they are chosen next
    computing: Callable[[], None]  # the pass is ordered


class Prefix(NamedTuple):
    """What stands in front of a chunk while it is computed, ready to be attended to."""

    token_ids: tuple[int, ...]
    layers: tuple[LayerKV, ...]  # keys rotated to positions 0..; one per model layer


class ModelShape(Protocol):
    """The part of a model's spec that fusion looks at."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_context(self) -> int: ...


class Projected(Protocol):
    """Queries, keys and values of some rows: after q/k norm, before RoPE."""

    @property
    def q(self) -> Tensor: ...  # [R, Hq, D]
    @property
    def k(self) -> Tensor: ...  # [R, Hk, D]
    @property
    def v(self) -> Tensor: ...  # [R, Hk, D]


class FusionDecoder(Protocol):
    """A model, cut where fusion works."""

    @property
    def spec(self) -> ModelShape: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def angles(self, positions: Tensor) -> Angles:
        """RoPE angles of positions [R] on the device."""
        ...

    def turn(self, positions: Tensor) -> Angles:
        """The rotation alone, in float32, without YaRN's factor."""
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [R] to hidden states [R, E]."""
        ...

    def qkv(self, layer: int, h: Tensor, out: Tensor | None = None) -> Projected:
        """Projections of hidden states [R, E]. With `out` [R, (Hq + 2 Hk) D] they are written
        there, q, k and v of a row side by side, and returned as views of it; only a decoder that
        can be recorded is given one."""
        ...

    def finish(self, layer: int, h: Tensor, attended: Tensor) -> Tensor:
        """The rest of the layer. Overwrites h [R, E] and returns it."""
        ...

    def logits(self, h: Tensor) -> Tensor:
        """Next-token logits [R, V] of hidden states behind the last layer."""
        ...

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """What `x` comes to over all heads, where ranks share them out; `x` where this one has them
        all. Equal on all ranks, which ask for the same sums in the same order."""
        ...

    @property
    def can_record(self) -> bool:
        """Whether its work can be recorded as CUDA graphs: on a GPU, with no step that looks at its
        results. One that says no is never asked for `recording`."""
        ...

    def recording(self) -> AbstractContextManager[None]:
        """Inside, nothing that the decoder keeps from call to call is written to."""
        ...


class KVBuffer(Protocol):
    """A request's own keys (rotated) and values, dense by position."""

    def reserve(self, num_tokens: int) -> None:
        """Make positions [0, num_tokens) writable."""
        ...

    def keys(self, layer: int) -> Tensor:
        """[num_tokens, Hk, D]; writing to it writes the buffer."""
        ...

    def values(self, layer: int) -> Tensor:
        """[num_tokens, Hk, D]; as keys."""
        ...


class PoolLayers(Protocol):
    """Memory of many sequences, token by token."""

    def slots(self, layer: int) -> tuple[Tensor, Tensor]:
        """One layer: keys and values [slots, Hk, D]; writing to them writes the memory."""
        ...

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """All layers: keys and values [L, slots, Hk, D], as `slots`."""
        ...

    def codes(self, layer: int) -> CodedPages | None:
        """One layer of the same memory, where chunks that are shared lie in 8 bits; None: they lie
        in `slots`."""
        ...
