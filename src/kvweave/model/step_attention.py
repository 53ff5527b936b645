"""What a recorded decode step looks at: tables on the device that are written before each replay.

Three kinds: sequences that each own their pages (`kernels/gpu/decode.py`), batches in which some
share chunks (`kernels/gpu/segments.py`), each of which is read once for all that hold it, and rows
of one prompt behind all of its chunks (`kernels/gpu/prompt_rows.py`).

Shapes: B rows of a recording, Hq query heads, D head dim.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvweave.kernels.rope import Angles, rotate
from kvweave.model.decoder import Decoder
from kvweave.model.paged_kv import KVPool, PagedKV
from kvweave.model.rows import Rows

if TYPE_CHECKING:
    from kvweave.kernels.gpu.segment_tables import SegmentShape

COLUMNS = 3  # token id, position, slot of each row
CHUNKS = 136  # of a sequence, on average of a batch: more are decoded without a recording
SPARE_CHUNKS = 256  # of a batch besides


# layer, queries [B, Hq, D], the angles that turn them to their positions: output [B, Hq, D]
Attend = Callable[[int, Tensor, Angles], Tensor]


class StepAttention(Protocol):
    """Attention of one row per sequence. Owned by the thread that launches."""

    @property
    def rows(self) -> Tensor:
        """[COLUMNS, B] int32 on the device: the numbers that were sent."""
        ...

    def send(self, batch: Sequence[Rows], numbers: NDArray[np.int32]) -> bool:
        """What the rows of `batch` look at, and all rows' numbers. False: there is no room, and
        nothing has changed. Does not wait for the device."""
        ...

    def begin(self) -> Attend:
        """Launch what stands in front of the first layer; how the layers of this step attend."""
        ...


class PageArrays:
    """Page tables of sequences as arrays, each made anew only when it has grown."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[PagedKV, NDArray[np.int32]] = WeakKeyDictionary()

    def table(self, kv: PagedKV) -> NDArray[np.int32]:
        """Return the own pages of a sequence."""
        known = self._known.get(kv)
        if known is None or len(known) != len(kv.page_table):
            known = self._known[kv] = np.array(kv.page_table, dtype=np.int32)
        return known

    def own(self, batch: Sequence[Rows]) -> tuple[list[int], list[NDArray[np.int32]]]:
        """How many own keys the row of each sequence sees, and its own pages."""
        keys, pages = [], []
        for rows in batch:
            keys.append(rows.paged_kv.ranks(rows.positions)[0] + 1)
            pages.append(self.table(rows.paged_kv))
        return keys, pages


class PagedAttention:
    """Every sequence looks at its own pages."""

    def __init__(
        self, decoder: Decoder, pool: KVPool, num_rows: int, page_arrays: PageArrays
    ) -> None:
        from kvweave.kernels.gpu.decode import DecodeTables

        spec = decoder.spec
        self._pool, self._page_arrays = pool, page_arrays
        self._tables = DecodeTables(
            num_rows,
            _most_pages(decoder, pool),
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=decoder.dtype,
            device=decoder.device,
            num_columns=COLUMNS,
        )

    @property
    def rows(self) -> Tensor:
        return self._tables.rows

    def send(self, batch: Sequence[Rows], numbers: NDArray[np.int32]) -> bool:
        self._tables.update(*self._page_arrays.own(batch), numbers)
        return True

    def begin(self) -> Attend:
        from kvweave.kernels.gpu.decode import attend_decode

        def attend(layer: int, q: Tensor, angles: Angles) -> Tensor:
            keys, values = self._pool.keys[layer], self._pool.values[layer]
            return attend_decode(rotate(q, angles), self._tables, keys, values)

        return attend


class SharedAttention:
    """Sequences look at their own pages, and some at chunks that they share; `shifted`, if drift
    moves them."""

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        num_rows: int,
        page_arrays: PageArrays,
        *,
        shifted: bool = False,
    ) -> None:
        from kvweave.kernels.gpu.segment_tables import SegmentTables, room_for_rows

        spec = decoder.spec
        self._decoder, self._pool, self._page_arrays = decoder, pool, page_arrays
        shape = _segment_shape(decoder, pool, shifted=shifted)
        room = room_for_rows(
            num_rows, spec.max_context, CHUNKS * num_rows + SPARE_CHUNKS, pool.num_pages, shape
        )
        self._tables = SegmentTables(num_rows, room, shape, decoder.device, COLUMNS)

    @property
    def rows(self) -> Tensor:
        return self._tables.rows

    def send(self, batch: Sequence[Rows], numbers: NDArray[np.int32]) -> bool:
        if not self._tables.hold([rows.paged_kv.chunks for rows in batch]):
            return False
        self._tables.update(*self._page_arrays.own(batch), numbers)
        return True

    def begin(self) -> Attend:
        from kvweave.kernels.gpu.segments import attend_tables, begin_step

        # not kept: memory of a recording goes to the next one
        step = begin_step(self._tables, self._decoder.turn)

        def attend(layer: int, q: Tensor, angles: Angles) -> Tensor:
            keys, values = self._pool.keys[layer], self._pool.values[layer]
            coded = self._pool.codes(layer)
            return attend_tables(q, self._tables, step, keys, values, angles, coded)

        return attend


class PromptAttention:
    """All rows are of one prompt, of whose chunks nothing is replaced."""

    def __init__(
        self, decoder: Decoder, pool: KVPool, num_rows: int, page_arrays: PageArrays
    ) -> None:
        from kvweave.kernels.gpu.prompt_rows import PromptTables

        self._decoder, self._pool, self._page_arrays = decoder, pool, page_arrays
        shape = _segment_shape(decoder, pool)
        self._tables = PromptTables(num_rows, pool.num_pages, shape, decoder.device, COLUMNS)

    @property
    def rows(self) -> Tensor:
        return self._tables.rows

    def send(self, batch: Sequence[Rows], numbers: NDArray[np.int32]) -> bool:
        if not batch:
            return self._tables.update((), (), (), numbers)
        kv = batch[0].paged_kv
        keys = [rank + 1 for rank in kv.ranks([rows.positions[0] for rows in batch])]
        return self._tables.update(kv.chunks, keys, self._page_arrays.table(kv), numbers)

    def begin(self) -> Attend:
        from kvweave.kernels.gpu.prompt_rows import attend_prompt_rows, turned_back

        back = turned_back(self._tables, self._decoder.turn)

        def attend(layer: int, q: Tensor, angles: Angles) -> Tensor:
            keys, values = self._pool.keys[layer], self._pool.values[layer]
            coded = self._pool.codes(layer)
            return attend_prompt_rows(q, self._tables, angles, back, keys, values, coded)

        return attend


def _segment_shape(decoder: Decoder, pool: KVPool, *, shifted: bool = False) -> "SegmentShape":
    from kvweave.kernels.gpu.segment_tables import SegmentShape

    spec = decoder.spec
    return SegmentShape(
        spec.num_heads, spec.num_kv_heads, spec.head_dim, pool.page_tokens, decoder.dtype,
        pool.codes(0) is not None, shifted,
    )  # fmt: skip


def _most_pages(decoder: Decoder, pool: KVPool) -> int:
    """Return how many pages one sequence may have."""
    return min(pool.num_pages, -(-decoder.spec.max_context // pool.page_tokens))
