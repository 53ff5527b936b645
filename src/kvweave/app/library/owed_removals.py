"""Deleted documents whose KV a tier that machines share may still have.

Whoever deleted them hears of it and tells again, in another life too: a gateway notes what its
engines were not told. So this lives as long as the process, and is bounded.
"""

import threading
from collections.abc import Collection

from kvweave.types import ChunkId

MOST_OWED = 100_000  # chunks of a tenant, one by one


class OwedRemovals:
    """By tenant. Any thread."""

    def __init__(self, most: int = MOST_OWED) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._owed: dict[str, set[ChunkId]] = {}
        self._overfull: set[str] = set()  # tenants of which some are not noted

    def add(self, chunk_ids: Collection[ChunkId], tenant: str) -> None:
        """These are to be removed. Of what is beyond the bound only that there is some is noted:
        until the tenant owes nothing, any that was ever deleted counts as owed."""
        with self._lock:
            owed = self._owed.setdefault(tenant, set())
            for each in chunk_ids:
                if len(owed) >= self._most and each not in owed:
                    self._overfull.add(tenant)
                else:
                    owed.add(each)

    def strike(self, chunk_ids: Collection[ChunkId], tenant: str) -> None:
        """These are removed everywhere."""
        with self._lock:
            owed = self._owed.get(tenant, set())
            owed.difference_update(chunk_ids)
            if not owed:
                self._owed.pop(tenant, None)
                self._overfull.discard(tenant)

    def by_tenant(self) -> dict[str, frozenset[ChunkId]]:
        """What is owed, as it is now."""
        with self._lock:
            return {tenant: frozenset(owed) for tenant, owed in self._owed.items()}

    def without(self, chunk_ids: Collection[str]) -> set[str]:
        """Return the chunks that no tenant owes. A copy that machines share is everybody's."""
        with self._lock:
            if self._overfull:
                return set()
            return set(chunk_ids).difference(*self._owed.values())
