"""Exact KV that leaves the device: out of the pool to host memory beside the steps, and back.

    engine thread   kv, gathered from pages ── mark ──┐            ┌─► ArrivedCopy
    own thread                                        └─► carry ───┘   posted to the engine thread
                                              side stream, two page-locked pieces

On a GPU a node of the knowledge tree that leaves the pool is gathered, on the stream that computes,
into memory of its own: later writes to its pages come behind that, so the pages are free at once.
The bytes then travel on a stream of their own, piece by piece through a little page-locked memory,
and a thread that waits for each piece lays it into ordinary host memory. The engine thread hears of
it between two steps. Until then a request that wants the node back gets it from the memory it was
gathered into, which stands before it in the order of the stream: bytes that are still on their way
are never read. On a CPU a copy is made at once.

A copy that is not made loses a node of the tree, never an answer: its tokens are computed again.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvweave.engine.pages import PageAllocator
from kvweave.errors import EngineClosed
from kvweave.kernels.host import on_device
from kvweave.kv.format.memory import new_memory
from kvweave.kv.tree import Pages, TreeTier
from kvweave.kv.tree.node import DEVICE
from kvweave.model.paged_kv import KVPool

log = logging.getLogger(__name__)

POOL_SHARE = 8  # at most this part of the pool's bytes is on its way at once
MOST_BYTES = 2 << 30  # and not more than this: it lies on the device, beside the pool
PIECE_BYTES = 16 << 20  # of page-locked memory; there are two


@dataclass(slots=True, eq=False)
class HostCopy:
    """Pages outside the pool. Changed once, on the engine thread: when they are in host memory."""

    kv: Tensor  # [2, L, pages, page, Hk, D]: keys, values; on the device until they have arrived
    is_held: bool = True  # by a node of the tree


class ArrivedCopy(NamedTuple):
    """A copy that is in host memory, or will never be."""

    copy: HostCopy
    result: Tensor | Exception  # its `kv` in host memory, or why that is not there


class OffloadLink(Protocol):
    """Carries bytes from the device. `carry` is called on one thread, `mark` on the engine's."""

    def mark(self) -> object:
        """Names this moment: all that the engine thread has told the device so far."""
        ...

    def carry(self, source: Tensor, home: Tensor, behind: object) -> None:
        """Copy device bytes (uint8 [n]), as they are behind a marked moment, to host bytes.

        Returns when they are there, and touches neither tensor afterwards, also if it raises.
        """
        ...


class Offload:
    """What is on its way. The engine thread calls it; a thread of its own carries the bytes and
    posts an ArrivedCopy, which `settle` is to be given. `num_bytes` is read by any thread."""

    def __init__(
        self, link: OffloadLink, most_bytes: int, post: Callable[[ArrivedCopy], None]
    ) -> None:
        self._link = link
        self.most_bytes = most_bytes  # that may be on their way at once
        self._post = post
        self._thread: ThreadPoolExecutor | None = None
        self.num_bytes = 0  # on their way, or there and not heard of yet

    def has_room(self, size_bytes: int) -> bool:
        """Whether so much may set off now. One alone always may, however large it is."""
        return not self.num_bytes or self.num_bytes + size_bytes <= self.most_bytes

    def begin(self, copy: HostCopy) -> None:
        """Send off a copy whose tensor is contiguous and not written to any more. Waits for
        nothing. Raises RuntimeError if the device refuses the order."""
        behind = self._link.mark()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine-offload")
        self._thread.submit(self._carry, copy, copy.kv, behind)
        self.num_bytes += copy.kv.nbytes

    def settle(self, arrived: ArrivedCopy) -> None:
        """Take in that a copy arrived. On the engine thread."""
        self.num_bytes -= arrived.copy.kv.nbytes

    def close(self) -> None:
        """Wait for what is being carried and leave the rest: memory that is read may go now."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _carry(self, copy: HostCopy, source: Tensor, behind: object) -> None:
        result: Tensor | Exception
        try:
            home = new_memory(source.nbytes, pinned=False).tensor
            self._link.carry(source.view(-1).view(torch.uint8), home, behind)
            result = home.view(source.dtype).view(source.shape)
        except Exception as error:  # CUDA's, or no memory: the engine thread must hear of it
            result = error
        try:
            self._post(ArrivedCopy(copy, result))
        except EngineClosed:
            return  # the tree is not read any more


class _Piece(NamedTuple):
    """A part of the bytes that is in page-locked memory, or about to be."""

    start: int
    staged: Tensor  # uint8
    copied: torch.cuda.Event


class CudaLink:
    """From a GPU, on a stream of its own. See OffloadLink."""

    def __init__(self, device: torch.device, piece_bytes: int = PIECE_BYTES) -> None:
        self._device = device
        self._piece_bytes = piece_bytes
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._staging: list[Tensor] = []  # made by the thread that carries: locking takes a while

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def carry(self, source: Tensor, home: Tensor, behind: object) -> None:
        if not self._staging:
            pieces = (new_memory(self._piece_bytes, pinned=True) for _ in range(2))
            self._staging = [piece.tensor for piece in pieces]
        assert isinstance(behind, torch.cuda.Event), "a moment that this link marked"
        try:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(behind)
                self._pass_through(source, home)
        finally:  # after an error a piece may still be travelling
            self._stream.synchronize()

    def _pass_through(self, source: Tensor, home: Tensor) -> None:
        """While one piece is laid into its home the next one travels."""
        before: _Piece | None = None
        for number, start in enumerate(range(0, len(source), self._piece_bytes)):
            part = source[start : start + self._piece_bytes]
            staged = self._staging[number % 2][: len(part)]  # the piece before the last is home
            staged.copy_(part, non_blocking=True)
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record(self._stream)
            _land(before, home)
            before = _Piece(start, staged, copied)
        _land(before, home)


def _land(piece: _Piece | None, home: Tensor) -> None:
    if piece is not None:
        piece.copied.synchronize()  # asleep, not spinning, and without the interpreter's lock
        home[piece.start : piece.start + len(piece.staged)].copy_(piece.staged)


def open_link(device: torch.device) -> OffloadLink | None:
    """How bytes leave a device beside its work; None: at once, as on a CPU, where they are in host
    memory and a copy of them is all there is to do."""
    return CudaLink(device) if device.type == "cuda" else None


def open_offload(pool: KVPool, post: Callable[[ArrivedCopy], None]) -> Offload | None:
    """How bytes leave a pool beside the steps; None: at once."""
    link = open_link(pool.keys.device)
    most_bytes = min(pool.num_pages * pool.page_bytes // POOL_SHARE, MOST_BYTES)
    return None if link is None else Offload(link, most_bytes, post)


class TreePages:
    """Moves the bytes of the tree's nodes (see PageOwner). Called on the engine thread."""

    def __init__(self, pool: KVPool, allocator: PageAllocator, offload: Offload | None) -> None:
        """Without an `offload` copies are made at once."""
        self._pool = pool
        self._allocator = allocator
        self._offload = offload
        self.num_made = 0  # copies that are in host memory, or were
        self.num_refused = 0  # not begun: as much as may be was on its way
        self.num_failed = 0  # in either direction

    def copy_out(self, pages: Pages) -> Pages | None:
        offload = self._offload
        if offload is not None and not offload.has_room(pages.size_bytes):
            self.num_refused += 1
            return None
        try:
            copy = HostCopy(self._gather(pages.handle))
            if offload is None:
                self.num_made += 1
            else:
                offload.begin(copy)
        except RuntimeError as error:  # torch's word for every CUDA error, and for no memory
            self.report_failure(error)
            return None
        return Pages(pages.size_bytes, copy)

    def copy_in(self, pages: Pages) -> Pages | None:
        copy: HostCopy = pages.handle
        taken = self._allocator.take(copy.kv.shape[2])
        if taken is None:
            return None
        pool = self._pool
        try:
            at = on_device(torch.tensor(taken), pool.keys.device)
            pool.keys[:, at], pool.values[:, at] = copy.kv.to(pool.keys.device)
        except RuntimeError as error:
            self._allocator.release(taken)
            self.report_failure(error)
            return None
        return Pages(pages.size_bytes, tuple(taken))

    def free(self, tier: TreeTier, pages: Pages) -> None:
        if tier is DEVICE:
            self._allocator.release(pages.handle)
        else:
            pages.handle.is_held = False

    def settle(self, arrived: ArrivedCopy) -> bool:
        """Take in that a copy is in host memory, or will never be. Called between two steps. False:
        the tree has the copy and must do without it."""
        assert self._offload is not None, "what arrives was sent off"
        self._offload.settle(arrived)
        copy, result = arrived
        if isinstance(result, Exception):
            self.report_failure(result)
            return not copy.is_held
        self.num_made += 1
        copy.kv = result  # what lay on the device goes: orders that read it were given before
        return True

    def report_failure(self, error: Exception) -> None:
        """Count and log that the device refused to copy exact KV."""
        self.num_failed += 1
        log.warning("exact KV could not be copied (%s): it is computed when it is needed", error)

    def stats(self) -> dict[str, int]:
        """What became of copies, and what is on its way. Any thread."""
        return {
            "tree_copies_made": self.num_made,
            "tree_copies_refused": self.num_refused,
            "tree_copies_failed": self.num_failed,
            "tree_leaving_bytes": 0 if self._offload is None else self._offload.num_bytes,
        }

    def _gather(self, page_ids: Sequence[int]) -> Tensor:
        """Copy pages to one piece of device memory. It runs on the stream that computes: behind
        what was written to the pages, before what others will write there."""
        keys, values = self._pool.keys, self._pool.values
        at = on_device(torch.tensor(page_ids), keys.device)
        kv = keys.new_empty((2, len(keys), len(page_ids), *keys.shape[2:]))
        for part, found in zip((keys, values), kv, strict=True):
            torch.index_select(part, 1, at, out=found)
        return kv
