"""Hashes of blocks that hold fused KV: no exact request finds them.

vLLM names a block of its prefix cache by a chain of hashes over token ids. Fused KV is not what
full prefill gives for these tokens, so from its first block on every hash is salted with everything
that made it: the plan and the whole prompt. The blocks in front, which are exact, keep their names
and are shared as ever; the same prompt with the same plan finds its own blocks again, also after a
preemption. Blocks of generated tokens are salted as they come.
"""

import hashlib
from collections.abc import Callable
from typing import Any, Protocol


class HashedRequest(Protocol):
    """The part of a vLLM request that is hashed."""

    block_hashes: list[Any]  # bytes each, of full blocks from the first on
    _block_hasher: Callable[[Any], list[Any]] | None  # hashes of blocks that have none yet


class SaltedHasher:
    """Stands in for a request's hasher. On the scheduler's thread."""

    def __init__(self, inner: Callable[[Any], list[Any]], first: int, salt: bytes) -> None:
        """`first` is the first block whose hash is salted."""
        self.first = first
        self._inner = inner
        self._salt = salt

    def __call__(self, request: HashedRequest) -> list[Any]:
        known = len(request.block_hashes)
        hashes = self._inner(request)
        at = max(0, self.first - known)
        return hashes[:at] + self.add_salt(hashes[at:])

    def add_salt(self, hashes: list[Any]) -> list[Any]:
        return [hashlib.sha256(self._salt + each).digest()[: len(each)] for each in hashes]


def salt_blocks(request: HashedRequest, first: int, salt: bytes) -> None:
    """Blocks of the request from `first` on get names of their own. Again is harmless, and may
    begin further in front. Without a hasher nothing is cached, and nothing is done.

    What is named already is not hashed once more: a long prompt has thousands of blocks.
    """
    hasher, hashes = request._block_hasher, request.block_hashes
    if hasher is None:
        return
    behind = len(hashes)
    if isinstance(hasher, SaltedHasher):
        behind, hasher.first = hasher.first, min(first, hasher.first)
    else:
        hasher = request._block_hasher = SaltedHasher(hasher, first, salt)
    hashes[first:behind] = hasher.add_salt(hashes[first:behind])
