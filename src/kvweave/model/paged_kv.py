"""Keys and values of many sequences in pages of one pool.

    pool   [L, pages, page_tokens, Hk, D], once for keys (rotated) and once for values
    table  page j of a sequence holds its positions [j * page_tokens, (j + 1) * page_tokens)

Pages of chunks that sequences share may hold them in 8 bits: the same bytes, and
more tokens.

Which sequence holds which page is decided by the engine, in plain ints; here are the bytes. One
thread at a time.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.kernels.rope import Turn
from kvweave.kernels.types import CodedPages, PagedSegment, SegmentedRows, SharedChunk
from kvweave.model.rope import frequencies
from kvweave.model.sequence_kv import room_for
from kvweave.model.spec import ModelSpec
from kvweave.model.weights import Weights

SCALE = torch.float16
USUAL = 4.0  # how large a pair of key channels is about, without a bias


class ChunkCodes:
    """All pages of a pool as codes. Views: whoever writes codes writes the pool."""

    def __init__(self, keys: Tensor, values: Tensor, lifts: Tensor | None) -> None:
        """Keys and values of a pool [L, P, page, Hk, D]. `lifts`: see `key_lifts`."""
        layers, pages, page, heads, head_dim = keys.shape
        self.page_tokens = page * keys.element_size()
        codes = (layers, pages, self.page_tokens, heads, head_dim // 2)
        both = [x.view(torch.int16).view(codes) for x in (keys, values)]
        scales = (layers, pages, heads, self.page_tokens, 2)
        zeros = torch.zeros(scales, dtype=SCALE, device=keys.device)
        each = [None] * layers if lifts is None else lifts
        # once: a layer is asked for at every step, and each view takes the host a while
        self._layers = list(map(CodedPages, *both, zeros, each))

    def layer(self, layer: int) -> CodedPages:
        return self._layers[layer]


def scale_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """What a pool with codes needs besides, for each of its tokens."""
    return 2 * spec.num_layers * spec.num_kv_heads * dtype.itemsize * SCALE.itemsize


@torch.no_grad()
def key_lifts(spec: ModelSpec, weights: Weights) -> Tensor | None:
    """[L, Hk, D] float32: what key channels are divided by before they share a scale, and queries
    multiplied by. None: the projections have no bias, or a norm follows.

    A bias makes a few channels large for all tokens. With Qwen2.5-Coder-0.5B codes of the first 500
    of 560 tokens cost the others 0.0028 nats without this and 0.0001 with it (tried by hand, on a
    CPU in float32); with SmolLM2, which has no bias, 0.00015.
    """
    layers = weights.layers
    if not spec.qkv_bias or layers[0].k_norm is not None:
        return None
    nothing = torch.zeros_like(weights.embedding[:1])
    first = spec.num_heads * spec.head_dim
    end = first + spec.num_kv_heads * spec.head_dim
    # what a product makes of nothing is its bias, however its weights are kept
    bias = torch.stack([layer.qkv(nothing)[0, first:end].float() for layer in layers])
    square = bias.view(len(layers), spec.num_kv_heads, spec.head_dim).square()
    half = len(frequencies(spec.rope))
    pair = square[..., :half] + square[..., half : 2 * half]  # channels that turn together
    each = torch.cat((pair, pair, square[..., 2 * half :]), dim=-1)
    return (each + USUAL**2).sqrt()


class KVPool:
    """The memory of all pages. Allocated once; on a CPU it costs nothing until it is written.

    Pages [0, num_pages) can be given to sequences. The one behind them, `scratch_page`, belongs to
    none: rows that only fill up a batch write there, and nothing there is ever read.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        codes_chunks: bool = False,
        lifts: Tensor | None = None,
    ) -> None:
        """`codes_chunks`: chunks lie in 8 bits. `lifts` [L, Hk, D] are then `key_lifts`."""
        shape = (spec.num_layers, num_pages + 1, page_tokens, spec.num_kv_heads, spec.head_dim)
        self.page_tokens = page_tokens
        self.num_pages = num_pages
        self.scratch_page = num_pages
        self.keys = room_for(shape, dtype, device)  # [L, P + 1, page, Hk, D]
        self.values = room_for(shape, dtype, device)
        self._codes = ChunkCodes(self.keys, self.values, lifts) if codes_chunks else None
        self._flat = (-1, spec.num_kv_heads, spec.head_dim)
        every = (spec.num_layers, *self._flat)
        self.memory = self.keys.view(every), self.values.view(every)  # [L, slots, Hk, D], as views

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, keys and values."""
        return 2 * self.keys.nbytes // self.keys.shape[1]

    @property
    def chunk_page_tokens(self) -> int:
        """Tokens of a chunk in a page that requests share."""
        return self.page_tokens if self._codes is None else self._codes.page_tokens

    def codes(self, layer: int) -> CodedPages | None:
        """One layer of chunks in 8 bits; None: they lie as own rows do."""
        return None if self._codes is None else self._codes.layer(layer)

    def slots(self, layer: int) -> tuple[Tensor, Tensor]:
        """One layer token by token: keys and values [slots, Hk, D], as views."""
        return self.keys[layer].view(self._flat), self.values[layer].view(self._flat)

    def copy_rows(self, source: int, target: int, num_rows: int) -> None:
        """Copy the first rows of a page to another page, in every layer."""
        for part in (self.keys, self.values):
            part[:, target, :num_rows] = part[:, source, :num_rows]


class PagedKV:
    """One sequence's part of a pool. Grows by `append`; the caller takes and frees the pages."""

    def __init__(self, pool: KVPool, pages: Sequence[int] = ()) -> None:
        self.pool = pool
        self.page_table: list[int] = []
        self.runs: list[tuple[int, int]] = []  # the table as (first page, pages)
        self.num_tokens = 0  # positions that hold something, counted from 0
        self.append(pages)

    @property
    def pages(self) -> list[int]:
        """All pages that it holds."""
        return self.page_table

    @property
    def capacity(self) -> int:
        """Positions that its pages have room for."""
        return len(self.page_table) * self.pool.page_tokens

    def append(self, pages: Sequence[int]) -> None:
        """More pages at the end."""
        for page in pages:
            if self.runs and page == self.runs[-1][0] + self.runs[-1][1]:
                self.runs[-1] = (self.runs[-1][0], self.runs[-1][1] + 1)
            else:
                self.runs.append((page, 1))
        self.page_table += pages

    def reserve(self, num_tokens: int) -> None:
        """Count positions [0, num_tokens) as present. The pages must be there."""
        assert num_tokens <= self.capacity, f"{num_tokens} tokens in {self.capacity} slots"
        self.num_tokens = max(self.num_tokens, num_tokens)

    def slots(self, positions: Sequence[int]) -> list[int]:
        """Where positions lie in the pool's token order."""
        page = self.pool.page_tokens
        return [self.page_table[p // page] * page + p % page for p in positions]

    def segment(self, start: int, end: int) -> PagedSegment:
        """What rows [start, end) of a batch look at."""
        return PagedSegment(start, end, self.page_table, self.runs)

    def keys(self, layer: int) -> Tensor:
        """[num_tokens, Hk, D], rotated; a view. Only while its pages lie side by side."""
        return self.pool.slots(layer)[0][self._only_run()]

    def values(self, layer: int) -> Tensor:
        """[num_tokens, Hk, D]; as `keys`."""
        return self.pool.slots(layer)[1][self._only_run()]

    def _only_run(self) -> slice:
        assert len(self.runs) <= 1, "pages that do not lie side by side have no dense view"
        start = self.runs[0][0] * self.pool.page_tokens if self.runs else 0
        return slice(start, start + self.num_tokens)


class SegmentedKV:
    """One sequence's part of a pool. Grows at its end, as a `PagedKV` does."""

    def __init__(self, own: PagedKV, turn: Turn, shifts: Sequence[int] = ()) -> None:
        """`own` are its pages. `turn` is the decoder's. `shifts` are pages for one row of each
        chunk that it shifts."""
        self.own = own
        self.shift_pages = tuple(shifts)
        self.turn = turn
        self.chunks: tuple[SharedChunk, ...] = ()  # made anew, never changed: tables are kept of it
        self.own_positions: NDArray[np.int64] = np.empty(0, np.int64)  # of the prompt; ascending
        self.is_shifted = False  # some of its chunks are
        self._end = 0  # positions [0, end) are the prompt
        self.chunks_end = 0  # all positions from here on are own rows

    @property
    def pool(self) -> KVPool:
        return self.own.pool

    @property
    def page_table(self) -> list[int]:
        """Its own pages."""
        return self.own.page_table

    @property
    def pages(self) -> list[int]:
        """All pages that it holds: its own ones, and those of shifts."""
        return [*self.own.page_table, *self.shift_pages]

    @property
    def num_shared(self) -> int:
        """Positions of the prompt that lie in pages of chunks alone."""
        return self._end - len(self.own_positions)

    def append(self, pages: Sequence[int]) -> None:
        """More pages of its own, at the end."""
        self.own.append(pages)

    def lay_out(
        self, own_positions: NDArray[np.int64], chunks: Sequence[SharedChunk], num_tokens: int
    ) -> None:
        """The prompt has `num_tokens`: these positions are own rows, and chunks have the others."""
        self.own_positions = own_positions
        self.chunks = tuple(chunks)
        self.is_shifted = any(chunk.shift is not None for chunk in chunks)
        self._end = num_tokens
        self.chunks_end = max((each.start + each.num_tokens for each in chunks), default=0)
        self.own.reserve(len(own_positions))

    def reserve(self, num_tokens: int) -> None:
        """Count positions [0, num_tokens) as present. The pages must be there."""
        self.own.reserve(num_tokens - self.num_shared)

    def ranks(self, positions: Sequence[int]) -> list[int]:
        """The own slots of positions that are own rows."""
        if positions[0] >= self.chunks_end:  # question and answer: nothing to look for
            return [position - self.num_shared for position in positions]
        at = np.asarray(positions)
        inside = np.searchsorted(self.own_positions, at)
        ranks: list[int] = np.where(at < self._end, inside, at - self.num_shared).tolist()
        return ranks

    def slots(self, positions: Sequence[int]) -> list[int]:
        """Where own rows lie in the pool's token order."""
        return self.own.slots(self.ranks(positions))

    def segment(self, start: int, end: int) -> SegmentedRows:
        """What rows [start, end) of a batch look at."""
        return SegmentedRows(start, end, self.own.segment(start, end), self.chunks)
