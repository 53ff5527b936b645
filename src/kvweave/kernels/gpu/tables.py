"""Small tables to the device, past the line of copies.

Copies to a GPU stand in one line, whatever their stream: a table of row numbers that a kernel waits
for would stand behind a gigabyte of chunk KV ordered before it. So the device fetches it itself:
the host writes it into page-locked memory, and a small kernel reads it from there over the link.
"""

import threading
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvweave.kernels.gpu.quick import quick

HALF_BYTES = 4 << 20  # of page-locked memory; there are two halves, written in turn
ALIGN = 256
BLOCK = 1024


@quick
@triton.jit(do_not_specialize=["num_words"])
def _fetch(here_ptr, there_ptr, num_words, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    live = at < num_words
    # never from a cache: the host has written there since the last kernel looked
    tl.store(there_ptr + at, tl.load(here_ptr + at, live, other=0, cache_modifier=".cv"), live)


@dataclass(slots=True, eq=False)
class _Staging:
    """Page-locked memory of one stream, written by one thread."""

    halves: tuple[Tensor, Tensor]  # uint8
    half: int = 0  # that is being written
    at: int = 0  # next free byte of it
    read: list[torch.cuda.Event | None] = field(default_factory=lambda: [None, None])

    def room(self, num_bytes: int, stream: torch.cuda.Stream) -> Tensor:
        """Memory that no kernel reads any more. Waits only if 4 MB of tables are unread."""
        if self.at + num_bytes > HALF_BYTES:
            done = torch.cuda.Event()
            done.record(stream)
            self.read[self.half] = done
            self.half, self.at = 1 - self.half, 0
            before = self.read[self.half]
            if before is not None:
                before.synchronize()
        start = self.at
        self.at += -(-num_bytes // ALIGN) * ALIGN
        return self.halves[self.half][start : start + num_bytes]


class _ThreadStagings(threading.local):
    """The staging memory of each stream that this thread sends tables on."""

    def __init__(self) -> None:
        self.by_stream: dict[tuple[int | None, int], _Staging] = {}


_stagings = _ThreadStagings()


def can_fetch(num_bytes: int) -> bool:
    """Whether a table of this size is fetched: larger ones are copies like others, and what a
    recording reads must not be written over."""
    return 0 < num_bytes <= HALF_BYTES and not torch.cuda.is_current_stream_capturing()


def fetch(x: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`, in the order of the current stream. Waits as `_Staging.room`."""
    x = x.contiguous()
    stream = torch.cuda.current_stream(device)
    key = (stream.device_index, int(stream.cuda_stream))
    staging = _stagings.by_stream.get(key)
    if staging is None:
        one, other = (torch.empty(HALF_BYTES, dtype=torch.uint8).pin_memory() for _ in range(2))
        staging = _stagings.by_stream[key] = _Staging((one, other))
    with torch.inference_mode(False):  # kept memory is written inside such a mode and outside it
        here = staging.room(x.nbytes, stream)
        here.view(x.dtype).view(x.shape).copy_(x)
    there = torch.empty(x.shape, dtype=x.dtype, device=device)
    word = next(t for t, size in _WORDS if x.nbytes % size == 0)
    num_words = x.nbytes // word.itemsize
    grid = (triton.cdiv(num_words, BLOCK),)
    _fetch[grid](here.view(word), there.view(-1).view(word), num_words, SIZE=BLOCK)
    return there


_WORDS = ((torch.int64, 8), (torch.int32, 4), (torch.uint8, 1))
