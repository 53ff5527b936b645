"""The chunk KV that a knowledge base keeps: found by whose text it carries, deleted wherever it is.

Works on the folder, and through the store where one is open, so that copies in memory and bytes on
their way go too. `kv_sync.py` and `neighbours.py` decide what goes.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from kvweave.kv.config import DiskTierConfig
from kvweave.kv.keys import ChunkKey
from kvweave.kv.provenance import Provenance, carries, find_keys
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.disk import DiskTier
from kvweave.types import ChunkId

log = logging.getLogger(__name__)

KV_FOLDER = "kv"  # in the folder of the knowledge base


class StoredKV:
    """For the holder of the writer lock. May block: the disk is read object by object."""

    def __init__(self, kb_folder: Path, store: KVStore | None) -> None:
        self.folder = kb_folder / KV_FOLDER
        self._store = store

    def may_have_objects(self) -> bool:
        """On the disk, or in an open store: it may do without a disk that could not be opened."""
        return self._store is not None or self._is_on_disk()

    def find(self, is_wanted: Callable[[Provenance], bool]) -> list[ChunkKey]:
        """Objects of some provenance, on the disk or in memory alone; see `find_keys`."""
        at_hand = [] if self._store is None else self._store.keys_at_hand(is_wanted)
        if not self._is_on_disk():
            return at_hand
        disk = DiskTier(DiskTierConfig(self.folder), sweep=False)
        return [*find_keys(disk, is_wanted), *at_hand]

    def of_chunks(self, chunk_ids: Collection[ChunkId]) -> list[ChunkKey]:
        """Objects that carry text of one of these chunks."""
        return self.find(carries(chunk_ids)) if chunk_ids else []

    def flush(self) -> bool:
        """Wait for what is still on its way: it must not land behind a deletion. False: a tier is
        too slow for that, which the log says; some of it may."""
        if self._store is None or self._store.flush():
            return True
        log.warning("a tier is too slow: chunk KV may be written behind its own deletion")
        return False

    def delete(self, keys: Sequence[ChunkKey]) -> int:
        """Delete objects, and whatever else on the disk may hold bytes of them; returns how many
        there were."""
        disk = None
        if self._is_on_disk():
            disk = DiskTier(DiskTierConfig(self.folder))  # sweeps what a dead writer left half-way
            disk.clear_quarantine()
        if self._store is not None:
            return self._store.delete(keys)
        return 0 if disk is None else sum(disk.delete(key) for key in dict.fromkeys(keys))

    def _is_on_disk(self) -> bool:
        """Looking must not make the folders, nor fail where a file is in their way."""
        return (self.folder / "objects").is_dir()
