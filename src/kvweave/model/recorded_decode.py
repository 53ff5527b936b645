"""Decode steps played from recorded CUDA graphs.

A step in which every sequence computes one row takes a GPU less time than the host needs to launch
its hundred or so kernels. The launches are the same at every step with as many sequences: the
second such step is recorded, and every later one is one copy of small numbers and a single launch.

Batches are filled up to a few sizes (`padded_rows`). Rows that only fill up write into the pool's
scratch page and look at nothing. Lengths and pages are read from tables on the device
(`kernels/gpu/decode.py`), so sequences grow, come and go without another recording.

Shapes: B rows of a recording, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.kernels.attention import KERNEL_DTYPES
from kvweave.kernels.dispatch import has_triton
from kvweave.kernels.recording import Refusals
from kvweave.kernels.rope import rotate
from kvweave.model.decoder import Decoder
from kvweave.model.paged_kv import KVPool, PagedKV
from kvweave.model.rows import Rows

STEP = 8  # rows between two sizes of large batches
COLUMNS = 3  # token id, position, slot of each row


class StepResult(NamedTuple):
    """What a recorded step computed. In memory of the recording: valid until the next step."""

    logits: Tensor  # [rows, V] float32
    likeliest: Tensor  # [rows] int64, on the device


def is_decode(batch: Sequence[Rows]) -> bool:
    """Whether a step is one row of each sequence that needs logits, without a hook or an early
    exit."""
    return bool(batch) and all(
        len(rows.token_ids) == len(rows.wanted) == 1
        and isinstance(rows.kv, PagedKV)
        and rows.hook is None
        and rows.early_exit is None
        for rows in batch
    )


def padded_rows(num_rows: int) -> int:
    """Rows of the recording that serves so many: 1, 2, 4, 8, 16, 24, 32 and so on."""
    if num_rows <= STEP:
        return 1 << (num_rows - 1).bit_length()
    return -(-num_rows // STEP) * STEP


def open_recorded(decoder: Decoder, pool: KVPool, most_rows: int) -> "RecordedDecode | None":
    """Recordings of steps of up to `most_rows` sequences over `pool`; None where steps cannot be
    recorded: off a GPU, without Triton, in precisions without a kernel, or with experts."""
    if not (most_rows and decoder.can_record and has_triton() and decoder.dtype in KERNEL_DTYPES):
        return None
    return RecordedDecode(decoder, pool, most_rows)


class RecordedDecode:
    """The recorded steps of one decoder over one pool. Used by the thread that owns the device.

    There is at most one recording per size, and sizes are bounded by `most_rows`. All share one
    pool of device memory.
    """

    def __init__(self, decoder: Decoder, pool: KVPool, most_rows: int) -> None:
        self._decoder = decoder
        self._pool = pool
        self._most_rows = most_rows
        self._recordings: dict[int, RecordedStep | None] = {}  # by rows; None: seen once
        self.refusals = Refusals("decoding", "steps take longer")
        self._page_arrays = PageArrays()
        self.num_played = 0  # steps

    @property
    def sizes(self) -> list[int]:
        """Rows of what is recorded."""
        return sorted(size for size, made in self._recordings.items() if made is not None)

    @property
    def memory_pools(self) -> set[Any]:
        """The pools of device memory that recordings took; one, however many there are."""
        return {made.graph.memory_pool for made in self._recordings.values() if made is not None}

    @torch.inference_mode()
    def play(self, batch: Sequence[Rows]) -> StepResult | None:
        """Compute a step that `is_decode`. None: it is not recorded (yet), and nothing was done."""
        num_rows = padded_rows(len(batch))
        if num_rows > self._most_rows:
            return None
        if num_rows not in self._recordings:  # the first of its size warms everything up
            self._recordings[num_rows] = None
            return None
        recording = self._recordings[num_rows] or self._record(num_rows)
        if recording is None:
            return None
        self.num_played += 1
        return recording.play(batch)

    def _record(self, num_rows: int) -> "RecordedStep | None":
        if not self.refusals.may_record(num_rows):
            return None
        other = next((made for made in self._recordings.values() if made is not None), None)
        try:
            made = RecordedStep(self._decoder, self._pool, num_rows, self._page_arrays, other)
        except Exception as error:  # CUDA's, or Triton's: its kernel is compiled here first
            self.refusals.failed(num_rows, error)
            return None
        self._recordings[num_rows] = made
        return made


class PageArrays:
    """Page tables of sequences as arrays, each made anew only when it has grown."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[PagedKV, NDArray[np.int32]] = WeakKeyDictionary()

    def of(self, kv: PagedKV) -> NDArray[np.int32]:
        known = self._known.get(kv)
        if known is None or len(known) != len(kv.page_table):
            known = self._known[kv] = np.array(kv.page_table, dtype=np.int32)
        return known


class RecordedStep:
    """The step of one batch size. Its tables and results never move as long as it lives."""

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        num_rows: int,
        page_arrays: PageArrays,
        other: "RecordedStep | None",
    ) -> None:
        from kvweave.kernels.gpu.decode import DecodeTables

        spec = decoder.spec
        longest = -(-spec.max_context // pool.page_tokens)
        self._decoder = decoder
        self._pool = pool
        self._page_arrays = page_arrays
        self._tables = DecodeTables(
            num_rows,
            min(pool.num_pages, longest),
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=decoder.dtype,
            device=decoder.device,
            num_columns=COLUMNS,
        )
        self._send([])  # a step without sequences: it touches the scratch page alone
        shared = None if other is None else other.graph
        self.graph: StepGraph = StepGraph(decoder, self._compute, shared)

    def play(self, batch: Sequence[Rows]) -> StepResult:
        self._send(batch)
        found = self.graph.replay()
        return StepResult(found.logits[: len(batch)], found.likeliest[: len(batch)])

    def _send(self, batch: Sequence[Rows]) -> None:
        """Everything that differs from step to step, in one copy."""
        numbers = np.zeros((COLUMNS, self._tables.num_sequences), dtype=np.int32)
        numbers[2] = self._pool.scratch_page * self._pool.page_tokens
        positions = [rows.positions[0] for rows in batch]
        slots, pages = [], []
        for rows, position in zip(batch, positions, strict=True):
            kv = rows.kv
            assert isinstance(kv, PagedKV), "recorded rows live in pages"
            assert kv.pool is self._pool, "recorded rows live in the pool they were recorded over"
            kv.reserve(position + 1)
            slots += kv.slots([position])
            pages.append(self._page_arrays.of(kv))
        ids = [rows.token_ids[0] for rows in batch]
        numbers[:, : len(batch)] = ids, positions, slots
        self._tables.update([position + 1 for position in positions], pages, numbers)

    def _compute(self) -> StepResult:
        """`Decoder.forward` for one row of every sequence, by the tables on the device."""
        from kvweave.kernels.gpu.decode import attend_decode

        decoder, pool = self._decoder, self._pool
        ids, positions, slots = self._tables.rows.long()
        angles = decoder.angles(positions)
        h = decoder.embed(ids)
        for layer in range(decoder.spec.num_layers):
            q, k, v = decoder.qkv(layer, h)
            keys, values = pool.slots(layer)
            keys[slots] = rotate(k, angles)
            values[slots] = v
            q = rotate(q, angles)
            o = attend_decode(q, self._tables, pool.keys[layer], pool.values[layer])
            h = decoder.finish(layer, h, o)
        logits = decoder.logits(h)
        return StepResult(logits, logits.argmax(-1))


class StepGraph:
    """A computation without inputs of its own, recorded. Raises RuntimeError if it cannot be.

    It takes the memory that `shared` took: no two of them play at the same time.
    """

    def __init__(
        self, decoder: Decoder, compute: Callable[[], StepResult], shared: "StepGraph | None"
    ) -> None:
        with decoder.recording():
            compute()  # what is made on first use is made here
            torch.cuda.synchronize(decoder.device)
        self._graph = torch.cuda.CUDAGraph()
        memory = None if shared is None else shared.memory_pool
        # scratch memory anew: taken inside it is the recording's own, and replays write there
        with (
            decoder.recording(),
            # other threads go on locking memory and the like
            torch.cuda.graph(self._graph, pool=memory, capture_error_mode="thread_local"),
        ):
            self._found = compute()

    @property
    def memory_pool(self) -> Any:
        """Names the device memory that it took, as torch does."""
        return self._graph.pool()

    def replay(self) -> StepResult:
        self._graph.replay()
        return self._found
