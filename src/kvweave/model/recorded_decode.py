"""Decode steps played from recorded CUDA graphs.

A step in which every sequence computes one row takes a GPU less time than the host needs to launch
its hundred or so kernels. The launches are the same at every step with as many sequences: they are
recorded behind the first such step, in idle time, or at the second one, and every later one is one
copy of small numbers and a single launch.

Batches are filled up to a few sizes (`padded_rows`). Rows that only fill up write into the pool's
scratch page and look at nothing. Lengths and pages are read from tables on the device
(`step_attention.py`), so sequences grow, come and go without another recording. A size has a
recording for each `StepKind`.

Shapes: B rows of a recording, V vocabulary.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.kernels.attention import KERNEL_DTYPES
from kvweave.kernels.dispatch import has_triton
from kvweave.kernels.recording import Refusals, note_first_time
from kvweave.kernels.rope import rotate
from kvweave.model.decoder import Decoder
from kvweave.model.paged_kv import KVPool, PagedKV
from kvweave.model.rope import frequencies
from kvweave.model.rows import Rows
from kvweave.model.step_attention import (
    COLUMNS,
    PageArrays,
    PagedAttention,
    PromptAttention,
    SharedAttention,
    StepAttention,
)

STEP = 8  # rows between two sizes of large batches
FEW_ROWS, WIDE_STEP = 64, 32  # and of those beyond so many
FEW_ROWS_OF_ONE = 8  # of one sequence, each of which reads all its keys for itself
MOST_OWN_KEYS = 1 << 16  # that rows of one prompt read one by one, each for itself


class StepResult(NamedTuple):
    """What a recorded step computed. In memory of the recording: valid until the next step."""

    logits: Tensor  # [rows, V] float32
    likeliest: Tensor  # [rows] int64, on the device


def one_by_one(batch: Sequence[Rows]) -> list[Rows] | None:
    """The rows of a step one by one, if a recorded step can compute them so: each sees what stands
    before it all the same. Those of a prompt over shared chunks can, behind all of them: each chunk
    is read once for all, and their own rows are few. So can those of a draft, which are few
    anyway. None: they cannot."""
    singles: list[Rows] = []
    for rows in batch:
        kv, num_rows = rows.kv, len(rows.token_ids)
        if rows.hook is not None or rows.early_exit is not None or not isinstance(kv, PagedKV):
            return None
        if num_rows == 1:
            singles.append(rows)
            continue
        if rows.positions[0] < kv.chunks_end or not (kv.chunks or num_rows <= FEW_ROWS_OF_ONE):
            return None
        if num_rows * (rows.positions[-1] - kv.num_shared) > MOST_OWN_KEYS:
            return None
        for i, (token, position) in enumerate(zip(rows.token_ids, rows.positions, strict=True)):
            singles.append(Rows([token], [position], kv, [0] if i in rows.wanted else []))
    return singles


class StepKind(Enum):
    """What the rows of a step look at."""

    OWN = "own"  # each at pages of its own
    SHARED = "shared"  # some at chunks that others may look at too
    SHIFTED = "shifted"  # and see some of these shifted
    PROMPT = "prompt"  # all are of one prompt, and nothing of its chunks is replaced or shifted


def kind_of(batch: Sequence[Rows], *, turns_whole: bool) -> StepKind:
    """The kind of a step, row by row. `turns_whole`: positions turn all channels of a head."""
    kvs = {rows.paged_kv for rows in batch}
    if any(kv.is_shifted for kv in kvs):
        return StepKind.SHIFTED
    chunks = [chunk for kv in kvs for chunk in kv.chunks]
    is_one = len(batch) > 1 and len(kvs) == 1 and turns_whole
    if is_one and chunks and all(chunk.replaced is None for chunk in chunks):
        return StepKind.PROMPT
    return StepKind.SHARED if chunks else StepKind.OWN


ATTENTIONS: dict[StepKind, Callable[[Decoder, KVPool, int, PageArrays], StepAttention]] = {
    StepKind.OWN: PagedAttention,
    StepKind.SHARED: SharedAttention,
    StepKind.SHIFTED: partial(SharedAttention, shifted=True),
    StepKind.PROMPT: PromptAttention,
}


def padded_rows(num_rows: int) -> int:
    """Rows of the recording that serves so many: 1, 2, 4, 8, 16, 24, 32 and so on to 64, then 96,
    128 and so on."""
    if num_rows <= STEP:
        return 1 << (num_rows - 1).bit_length()
    step = STEP if num_rows <= FEW_ROWS else WIDE_STEP
    return -(-num_rows // step) * step


def open_recorded(decoder: Decoder, pool: KVPool, most_rows: int) -> "RecordedDecode | None":
    """Recordings of steps of up to `most_rows` sequences over `pool`; None where steps cannot be
    recorded: off a GPU, without Triton, in precisions without a kernel, or with experts."""
    if not (most_rows and decoder.can_record and has_triton() and decoder.dtype in KERNEL_DTYPES):
        return None
    return RecordedDecode(decoder, pool, most_rows)


class RecordedDecode:
    """The recorded steps of one decoder over one pool. Used by the thread that owns the device.

    There is at most one recording per size and kind, and sizes are bounded by `most_rows`. All
    share one pool of device memory.
    """

    def __init__(self, decoder: Decoder, pool: KVPool, most_rows: int) -> None:
        self._decoder = decoder
        self._pool = pool
        self._most_rows = most_rows
        self._turns_whole = 2 * len(frequencies(decoder.spec.rope)) == decoder.spec.head_dim
        self._recordings: dict[tuple[int, StepKind], RecordedStep | None] = {}  # None: seen once
        self._refusals = {
            StepKind.OWN: Refusals("decoding", "steps take longer"),
            StepKind.SHARED: Refusals("decoding over shared chunks", "such steps take longer"),
            StepKind.SHIFTED: Refusals("decoding over shifted chunks", "such steps take longer"),
            StepKind.PROMPT: Refusals("a question over shared chunks", "it takes longer"),
        }
        self._page_arrays = PageArrays()
        self.num_played = 0  # steps

    @property
    def sizes(self) -> list[int]:
        """Rows of what is recorded."""
        return sorted({size for (size, _), made in self._recordings.items() if made is not None})

    @property
    def refusals(self) -> list[Refusals]:
        """What could not be recorded, by kind. Any thread."""
        return list(self._refusals.values())

    @torch.inference_mode()
    def play(self, batch: Sequence[Rows], *, may_record: bool = True) -> StepResult | None:
        """Compute a step of one wanted row each, in pages, without hooks. None: it is not recorded
        (yet, or because it may not be now), or its sequences hold more chunks than a recording has
        room for, and nothing was done."""
        size = padded_rows(len(batch))
        if size > self._most_rows:
            return None
        kind = kind_of(batch, turns_whole=self._turns_whole)
        if (size, kind) not in self._recordings:  # the first of its size warms everything up
            self._recordings[size, kind] = None
            note_first_time(f"a step of {size} rows")
            return None
        recording = self._recordings[size, kind]
        if recording is None and may_record:
            recording = self._record(size, kind)
        played = None if recording is None else recording.play(batch)
        self.num_played += played is not None
        return played

    @torch.inference_mode()
    def record_ahead(self) -> bool:
        """Record a sort of step that was computed before, while none is. False: there is none, or
        it cannot be."""
        for (num_rows, kind), made in self._recordings.items():
            if made is None and not self._refusals[kind].is_paused(num_rows):
                return self._record(num_rows, kind) is not None
        return False

    def _record(self, num_rows: int, kind: StepKind) -> "RecordedStep | None":
        refusals = self._refusals[kind]
        if not refusals.may_record(num_rows):
            return None
        other = next((made for made in self._recordings.values() if made is not None), None)
        try:
            tables = ATTENTIONS[kind](self._decoder, self._pool, num_rows, self._page_arrays)
            made = RecordedStep(self._decoder, self._pool, num_rows, tables, other)
        except Exception as error:  # CUDA's, or Triton's: its kernel is compiled here first
            refusals.note_failure(num_rows, error)
            return None
        self._recordings[num_rows, kind] = made
        return made


class RecordedStep:
    """The step of one batch size. Its tables and results never move as long as it lives."""

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        num_rows: int,
        attention: StepAttention,
        other: "RecordedStep | None",
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._num_rows = num_rows
        self._attention = attention
        attention.send([], self._numbers([]))  # no sequences: it touches the scratch page alone
        shared = None if other is None else other.graph
        self.graph: StepGraph = StepGraph(decoder, self._compute, shared)

    def play(self, batch: Sequence[Rows]) -> StepResult | None:
        """None: the tables have no room for what these sequences look at."""
        if not self._attention.send(batch, self._numbers(batch)):
            return None
        found = self.graph.replay()
        return StepResult(found.logits[: len(batch)], found.likeliest[: len(batch)])

    def _numbers(self, batch: Sequence[Rows]) -> NDArray[np.int32]:
        """Token id, position and slot of every row."""
        numbers = np.zeros((COLUMNS, self._num_rows), dtype=np.int32)
        numbers[2] = self._pool.scratch_page * self._pool.page_tokens
        slots = []
        for rows in batch:
            kv, position = rows.paged_kv, rows.positions[0]
            assert kv.pool is self._pool, "recorded rows live in the pool they were recorded over"
            kv.reserve(position + 1)
            slots += kv.slots([position])
        ids = [rows.token_ids[0] for rows in batch]
        numbers[:, : len(batch)] = ids, [rows.positions[0] for rows in batch], slots
        return numbers

    def _compute(self) -> StepResult:
        """`Decoder.forward` for one row of every sequence, by the tables on the device."""
        decoder, pool, attention = self._decoder, self._pool, self._attention
        ids, positions, slots = attention.rows.long()
        angles = decoder.angles(positions)
        attend = attention.begin()
        h = decoder.embed(ids)
        for layer in range(decoder.spec.num_layers):
            q, k, v = decoder.qkv(layer, h)
            keys, values = pool.slots(layer)
            keys[slots] = rotate(k, angles)
            values[slots] = v
            h = decoder.finish(layer, h, attend(layer, q, angles))
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
