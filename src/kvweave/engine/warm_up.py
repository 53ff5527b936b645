"""What requests on a GPU would wait for once is made in idle time: kernels and recordings.

Triton compiles a kernel when it is launched for the first time, which takes up to some seconds
(later starts find it on disk). How many rows a step has, how many keys they see and whether their
pages lie side by side decides which kernels it launches, and so does whether chunks are shared: in
idle time an engine that has just begun runs one small pass of each sort, over pages that belong to
no request.

Later idle moments are for recordings (CUDA graphs) of what requests have needed once: they come
back, and the next one need not wait for it. Not right behind a request, though: whoever asks one
thing after the other would wait for what may never be needed again. What no request has needed yet
is recorded last, once there are no jobs either.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from kvweave.engine.pages import PageAllocator
from kvweave.engine.runner import Runner
from kvweave.fuse.recordings import recordings_of
from kvweave.kernels.dispatch import has_triton
from kvweave.kernels.host import on_device
from kvweave.kernels.shift import mean_turned
from kvweave.kernels.types import SharedChunk
from kvweave.model.decoder import Decoder
from kvweave.model.paged_kv import KVPool, PagedKV
from kvweave.model.rows import Rows

log = logging.getLogger(__name__)
# a prompt, its last rows if they are few, a token, and what lies between (kernels/gpu/attention.py)
ROWS = (40, 1, 4, 8)
TABLES = (torch.int64, torch.int32, torch.uint8)  # a kernel fetches tables in words of each length
LEAST_PAGE = 4  # tokens: a sequence over a shared chunk has three rows of its own
MANY_KEYS = 2048  # so many are cut into pieces, whose answers are merged
REST_S = 0.5  # without a request, before something is made
JOB_REST_S = 1.0  # without a job, before what was never needed is recorded


class WarmUp:
    """What is left to be made. For the thread that owns the device."""

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        allocator: PageAllocator,
        runner: Runner,
        *,
        shares: bool = False,
    ) -> None:
        """`shares`: requests read chunks that lie once for all."""
        self._decoder = decoder
        self._pool = pool
        self._allocator = allocator
        self._runner = runner
        many = min(MANY_KEYS, decoder.spec.max_context)
        sorts = [(rows, 0) for rows in ROWS]
        sorts += [(rows, many - rows) for rows in ROWS if rows < many]
        passes: list[Callable[[], None]] = [partial(self._compile, *sort) for sort in sorts]
        if shares and pool.page_tokens >= LEAST_PAGE:
            passes += [partial(self._compile_shared, shifted=each) for each in (True, False)]
        is_needed = decoder.device.type == "cuda" and has_triton()
        self._left = passes[::-1] if is_needed else []
        self._from_s = 0.0  # by time.monotonic: nothing is made before
        self._job_s = -JOB_REST_S  # when the last job came, by time.monotonic
        self._at_rest = not self._left  # nothing is left to be made, as far as is known

    @property
    def is_over(self) -> bool:
        """Whether all kernels of steps are compiled, or could not be."""
        return not self._left

    def note_request_ended(self) -> None:
        """Note that a request has ended: there may be something new to make, a while from now."""
        self._from_s = time.monotonic() + REST_S
        self._at_rest = not (self._left or self._decoder.can_record)

    def note_job(self) -> None:
        """Note that others have work for the device: chunk KV to make, or a calibration."""
        self._job_s = time.monotonic()

    @property
    def due_s(self) -> float | None:
        """Seconds until something may be made; None: there is nothing to make."""
        return None if self._at_rest else max(0.0, self._from_s - time.monotonic())

    def step(self) -> bool:
        """Make one thing more, if it is time, and wait for it. False: nothing was made."""
        if self.due_s != 0.0:
            return False
        if self._left:
            try:
                self._left[-1]()
                self._left.pop()
            except Exception as error:  # whoever asks next hears of it, if it is still so
                log.warning("kernels could not be compiled ahead: %s", error)
                self._left.clear()
            return True
        self._at_rest = True  # also if this fails
        recordings = recordings_of(self._decoder)
        made = self._runner.record_ahead() or recordings.record_ahead(self._decoder)
        rested_s = time.monotonic() - self._job_s
        if not made and rested_s >= JOB_REST_S:
            made = recordings.record_near(self._decoder)
        elif not made:
            self._from_s = self._job_s + JOB_REST_S
        self._at_rest = not made and rested_s >= JOB_REST_S
        return made

    def _compile(self, num_rows: int, num_before: int) -> None:
        if num_before:  # the same page again and again lies apart
            self._compute(num_rows, num_before, [self._pool.scratch_page])
        elif pages := self._allocator.take_run(-(-num_rows // self._pool.page_tokens)):
            try:
                self._compute(num_rows, 0, pages)
            finally:
                self._allocator.release(pages)

    def _compute(self, num_rows: int, num_before: int, pages: Sequence[int]) -> None:
        num_pages = -(-(num_before + num_rows) // self._pool.page_tokens)
        kv = PagedKV(self._pool, [*pages] * (num_pages // len(pages)))
        positions = range(num_before, num_before + num_rows)
        self._run(lambda _: [Rows([0] * num_rows, positions, kv, [num_rows - 1])])

    def _compile_shared(self, *, shifted: bool) -> None:
        """Compute a step of two sequences that decode over one chunk, of which each has a row
        replaced."""
        pool, page = self._pool, self._pool.scratch_page
        size = pool.page_tokens
        replaced = torch.arange(size) == 0
        shift = page * size if shifted else None
        chunk = SharedChunk([page], size, 1, replaced, shift)

        def decoding(decoder: Decoder) -> Rows:
            if shifted:  # as a prompt does before its answer
                by = torch.zeros(2, 1, *pool.memory[0].shape[2:], device=decoder.device)
                mean_turned(by, [size], decoder.turn)
            kv = PagedKV(pool, [page])
            kv.lay_out(np.array([0, 1]), [chunk], 1 + size)
            return Rows([0], [1 + size], kv, [0])

        self._run(lambda decoder: [decoding(decoder), decoding(decoder)])

    @torch.inference_mode()
    def _run(self, batch: Callable[[Decoder], list[Rows]]) -> None:
        """Compute a batch with a decoder of its own: nobody has asked for this, and who made the
        engine may still be using the other."""
        decoder = Decoder(self._decoder.spec, self._decoder.weights)
        for dtype in TABLES:
            on_device(torch.zeros(1, dtype=dtype), decoder.device)
        decoder.forward(batch(decoder))
        if decoder.device.type == "cuda":
            torch.cuda.synchronize(decoder.device)
