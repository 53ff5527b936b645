"""Keys and values of many sequences in pages of one pool.

    pool   [L, pages, page_tokens, Hk, D], once for keys (rotated) and once for values
    table  page j of a sequence holds its positions [j * page_tokens, (j + 1) * page_tokens)

Pages of chunks that sequences share may hold them in 8 bits (`chunk_codes.py`): the same bytes, and
more tokens.

Which sequence holds which page is decided by the engine, in plain ints; here are the bytes. One
thread at a time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvweave.kernels.types import CodedPages, PagedSegment
from kvweave.model.chunk_codes import ChunkCodes
from kvweave.model.sequence_kv import room_for
from kvweave.model.spec import ModelSpec


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
