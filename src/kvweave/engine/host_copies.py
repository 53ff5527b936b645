"""The bytes of the knowledge tree's nodes: out of the pool to host memory, and back.

On a GPU a node that leaves the pool is gathered there into memory of its own, its pages are free at
once, and the copy goes to host memory while steps go on (`leaving.py`). Until it has arrived, a
request that wants the node back gets it from that memory, which stands before it in the order of
the stream: nobody reads bytes that are still on their way. On a CPU a copy is made at once.

A copy that is not made loses a node of the tree, never an answer: its tokens are computed again.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvweave.engine.offload import Offload
from kvweave.engine.pages import PageAllocator
from kvweave.kernels.host import on_device
from kvweave.kv.tree import Pages, TreeTier
from kvweave.kv.tree.node import DEVICE
from kvweave.model.paged_kv import KVPool

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class HostCopy:
    """Pages outside the pool. Changed once, on the engine thread: when they are in host memory."""

    kv: Tensor  # [2, L, pages, page, Hk, D]: keys, values; on the device until they have arrived
    is_held: bool = True  # by a node of the tree


class TreePages:
    """Moves the bytes of the tree's nodes (see PageOwner). On the engine thread.

    `lost` hears of a copy that the tree was given and that did not arrive.
    """

    def __init__(
        self,
        pool: KVPool,
        pages: PageAllocator,
        leaving: Offload | None,
        lost: Callable[[HostCopy], None],
    ) -> None:
        self._pool = pool
        self._pages = pages
        self._leaving = leaving
        self._lost = lost
        self.num_made = 0  # copies that are in host memory, or were
        self.num_refused = 0  # not begun: as much as may be was on its way
        self.num_failed = 0  # in either direction

    def copy_out(self, pages: Pages) -> Pages | None:
        leaving = self._leaving
        if leaving is not None and not leaving.has_room(pages.size_bytes):
            self.num_refused += 1
            return None
        try:
            copy = HostCopy(self._gather(pages.handle))
            if leaving is None:
                self.num_made += 1
            else:
                leaving.begin(copy.kv, lambda got: self._arrived(copy, got))
        except RuntimeError as error:  # torch's word for every CUDA error, and for no memory
            self._failed(error)
            return None
        return Pages(pages.size_bytes, copy)

    def copy_in(self, pages: Pages) -> Pages | None:
        copy: HostCopy = pages.handle
        taken = self._pages.take(copy.kv.shape[2])
        if taken is None:
            return None
        pool = self._pool
        try:
            at = on_device(torch.tensor(taken), pool.keys.device)
            pool.keys[:, at], pool.values[:, at] = copy.kv.to(pool.keys.device)
        except RuntimeError as error:
            self._pages.release(taken)
            self._failed(error)
            return None
        return Pages(pages.size_bytes, tuple(taken))

    def free(self, tier: TreeTier, pages: Pages) -> None:
        if tier is DEVICE:
            self._pages.release(pages.handle)
        else:
            pages.handle.is_held = False

    def stats(self) -> dict[str, int]:
        """What became of copies, and what is on its way. Any thread."""
        return {
            "tree_copies_made": self.num_made,
            "tree_copies_refused": self.num_refused,
            "tree_copies_failed": self.num_failed,
            "tree_leaving_bytes": 0 if self._leaving is None else self._leaving.num_bytes,
        }

    def _gather(self, page_ids: Sequence[int]) -> Tensor:
        """On the stream that computes: behind what was written to the pages, before what will be
        once they are somebody else's."""
        keys, values = self._pool.keys, self._pool.values
        at = on_device(torch.tensor(page_ids), keys.device)
        kv = keys.new_empty((2, len(keys), len(page_ids), *keys.shape[2:]))
        for part, found in zip((keys, values), kv, strict=True):
            torch.index_select(part, 1, at, out=found)
        return kv

    def _arrived(self, copy: HostCopy, got: Tensor | Exception) -> None:
        """Between two steps: a copy is in host memory, or will never be."""
        if isinstance(got, Tensor):
            self.num_made += 1
            copy.kv = got  # what lay on the device goes: orders that read it were given before
            return
        self._failed(got)
        if copy.is_held:
            self._lost(copy)

    def _failed(self, error: Exception) -> None:
        self.num_failed += 1
        log.warning("exact KV could not be copied (%s): it is computed when it is needed", error)
