"""Keys and values of many sequences in pages of one pool.

    pool   [L, pages, page_tokens, Hk, D], once for keys (rotated) and once for values
    table  page j of a sequence holds its positions [j * page_tokens, (j + 1) * page_tokens)

Pages of chunks that sequences share may hold them in 8 bits: the same bytes, and more tokens. Any
page can become either: one pool, one book of pages. Scales have room for all of them.

    a page of own rows     | token 0       | token 1       | ..      in the dtype of the pool
    a page of a chunk      | 0     | 1     | 2     | 3     | ..      in bytes, scales apart

Which sequence holds which page is decided by the engine, in plain ints; here are the bytes. One
thread at a time.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.kernels.types import CodedPages, PagedSegment, SegmentedRows, SharedChunk
from kvweave.model.rope import frequencies
from kvweave.model.sequence_kv import room_for
from kvweave.model.spec import ModelSpec
from kvweave.model.weights import Weights

SCALE = torch.float16
FEW_ROWS = 16  # whose places are found one by one: arrays take longer to begin
USUAL = 4.0  # how large a pair of key channels is about, without a bias


class ChunkCodes:
    """All pages of a pool as codes (`kernels/coded.py`). Views: writing codes writes the pool."""

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
    """One sequence's part of a pool. Grows by `append`; the caller takes and frees the pages.

    Most of its prompt may lie in chunks, in pages that others read as well, keys turned to their
    places in the chunk (`kernels/segments.py`): nothing is written there. The rest are own rows: in
    its own pages, in position order without gaps, keys turned to their positions.

        position   0 .. 9 | 10 ........ 25 | 26 .. 33 | 34 ..
                   own    | chunk          | chunk    | question and answer: own
        own slot   0 .. 9 |   10, 11       |          | 12 ..      rows 13 and 20 were recomputed

    Where drift moves what a sequence reads of a chunk, a row of its own says by how much
    (`kernels/shifted.py`).
    """

    def __init__(self, pool: KVPool, pages: Sequence[int] = (), shifts: Sequence[int] = ()) -> None:
        """`shifts` are pages for one row of each chunk that it shifts."""
        self.pool = pool
        self.page_table: list[int] = []  # its own pages
        self.runs: list[tuple[int, int]] = []  # the table as (first page, pages)
        self.num_tokens = 0  # own rows that hold something, counted from 0
        self.shift_pages = tuple(shifts)
        self.chunks: tuple[SharedChunk, ...] = ()  # made anew, never changed: tables are kept of it
        self.own_positions: NDArray[np.int64] = np.empty(0, np.int64)  # of the prompt; ascending
        self.is_shifted = False  # some of its chunks are
        self.num_shared = 0  # positions of the prompt that lie in pages of chunks alone
        self.chunks_end = 0  # all positions from here on are own rows
        self.append(pages)

    @property
    def pages(self) -> list[int]:
        """All pages that it holds: its own ones, and those of shifts."""
        return [*self.page_table, *self.shift_pages]

    @property
    def capacity(self) -> int:
        """Own rows that its pages have room for."""
        return len(self.page_table) * self.pool.page_tokens

    def append(self, pages: Sequence[int]) -> None:
        """Add own pages at the end."""
        for page in pages:
            if self.runs and page == self.runs[-1][0] + self.runs[-1][1]:
                self.runs[-1] = (self.runs[-1][0], self.runs[-1][1] + 1)
            else:
                self.runs.append((page, 1))
        self.page_table += pages

    def lay_out(
        self, own_positions: NDArray[np.int64], chunks: Sequence[SharedChunk], num_tokens: int
    ) -> None:
        """The prompt has `num_tokens`: these positions are own rows, and chunks have the others."""
        self.own_positions = own_positions
        self.chunks = tuple(chunks)
        self.is_shifted = any(chunk.shift is not None for chunk in chunks)
        self.num_shared = num_tokens - len(own_positions)
        self.chunks_end = max((each.start + each.num_tokens for each in chunks), default=0)
        self.reserve(num_tokens)

    def reserve(self, num_tokens: int) -> None:
        """Count positions [0, num_tokens) as present. The pages must be there."""
        num_rows = num_tokens - self.num_shared
        assert num_rows <= self.capacity, f"{num_rows} tokens in {self.capacity} slots"
        self.num_tokens = max(self.num_tokens, num_rows)

    def ranks(self, positions: Sequence[int]) -> Sequence[int]:
        """Return the own slots of positions that are own rows."""
        if not self.num_shared:
            return positions
        if positions[0] >= self.chunks_end:  # question and answer: nothing to look for
            return [position - self.num_shared for position in positions]
        at = np.asarray(positions)
        inside = np.searchsorted(self.own_positions, at)
        prompt_end = self.num_shared + len(self.own_positions)
        ranks: list[int] = np.where(at < prompt_end, inside, at - self.num_shared).tolist()
        return ranks

    def slots(self, positions: Sequence[int]) -> list[int]:
        """Return where own rows lie in the pool's token order."""
        page, ranks = self.pool.page_tokens, self.ranks(positions)
        if len(ranks) <= FEW_ROWS:
            return [self.page_table[rank // page] * page + rank % page for rank in ranks]
        at = np.asarray(ranks)
        slots: list[int] = (np.asarray(self.page_table)[at // page] * page + at % page).tolist()
        return slots

    def own_segment(self, start: int, end: int) -> PagedSegment:
        """Return what rows [start, end) of a batch look at in the sequence's own pages."""
        return PagedSegment(start, end, self.page_table, self.runs)

    def segment(self, start: int, end: int) -> SegmentedRows:
        """Return what rows [start, end) of a batch look at, chunks included."""
        return SegmentedRows(start, end, self.own_segment(start, end), self.chunks)

    def keys(self, layer: int) -> Tensor:
        """[num_tokens, Hk, D], rotated; a view. Only while its own pages lie side by side."""
        return self.pool.slots(layer)[0][self._only_run()]

    def values(self, layer: int) -> Tensor:
        """[num_tokens, Hk, D]; a view, under the condition of `keys`."""
        return self.pool.slots(layer)[1][self._only_run()]

    def _only_run(self) -> slice:
        assert len(self.runs) <= 1, "pages that do not lie side by side have no dense view"
        start = self.runs[0][0] * self.pool.page_tokens if self.runs else 0
        return slice(start, start + self.num_tokens)
