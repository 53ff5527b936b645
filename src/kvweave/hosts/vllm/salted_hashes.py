"""Hashes of blocks that hold fused KV: no exact request finds them.

vLLM names a block of its prefix cache by a chain of hashes over token ids. Fused KV is not what
full prefill gives for these tokens, so from its first block on the chain is salted with everything
that made it: the plan and the whole prompt. The blocks in front, which are exact, keep their names
and are shared as ever; the same prompt with the same plan finds its own blocks again, also after a
preemption. Every hash behind a salted one depends on it, generated tokens included.
"""

import hashlib
from collections.abc import Callable
from typing import Any, Protocol


class HashedRequest(Protocol):
    """The part of a vLLM request that is hashed."""

    block_hashes: list[Any]  # bytes each, of full blocks from the first on
    _block_hasher: Callable[[Any], list[Any]] | None  # hashes of blocks that have none yet

    def update_block_hashes(self) -> None: ...


class SaltedHasher:
    """Stands in for a request's hasher. On the scheduler's thread."""

    def __init__(self, inner: Callable[[Any], list[Any]], first: int, salt: bytes) -> None:
        """`first` is the first block whose hash is salted."""
        self.inner = inner
        self.first = first
        self._salt = salt

    def __call__(self, request: HashedRequest) -> list[Any]:
        known = len(request.block_hashes)
        hashes = self.inner(request)
        if not known <= self.first < known + len(hashes):
            return hashes  # all in front of it, or chained to it already
        at = self.first - known
        front = [*hashes[:at], self._salt_hash(hashes[at])]
        request.block_hashes.extend(front)  # what follows is chained to the salted one
        try:
            return front + self.inner(request)
        finally:
            del request.block_hashes[known:]

    def _salt_hash(self, value: bytes) -> bytes:
        return hashlib.sha256(self._salt + value).digest()[: len(value)]


def salt_blocks(request: HashedRequest, first: int, salt: bytes) -> None:
    """Blocks of the request from `first` on get names of their own. Again is harmless, and may
    begin further in front. Without a hasher nothing is cached, and nothing is done."""
    hasher = request._block_hasher
    if hasher is None:
        return
    if isinstance(hasher, SaltedHasher):
        first, hasher = min(first, hasher.first), hasher.inner
    request._block_hasher = SaltedHasher(hasher, first, salt)
    del request.block_hashes[first:]
    request.update_block_hashes()
