"""The chunk KV that a knowledge base keeps: found by whose text it carries, deleted wherever it is.

Works on the folders, and through the store where one is open, so that copies in memory and bytes on
their way go too; remote tiers are told as soon as they answer (`kv_places.py`). `kv_sync.py` and
`neighbours.py` decide what goes.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from kvweave.app.library.kv_places import Known, KVPlaces, RemovalTarget, TierTarget
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.provenance import Provenance, carries, find_keys
from kvweave.kv.store import KVStore
from kvweave.kv.tiers import Tier
from kvweave.kv.tiers.config import DiskTierConfig
from kvweave.kv.tiers.disk import DiskTier
from kvweave.types import ChunkId

log = logging.getLogger(__name__)

KV_FOLDER = "kv"  # in the folder of the knowledge base


class StoredKV:
    """For the holder of the writer lock. May block: the disk is read object by object."""

    def __init__(
        self,
        kb_folder: Path,
        store: KVStore | None = None,
        remotes: Sequence[Tier] = (),
        on_owing: Callable[[], None] = lambda: None,
        engines: Sequence[RemovalTarget] = (),
    ) -> None:
        """`remotes` are tiers that may be used where no store is open, `engines` what keeps chunk
        KV by itself. `on_owing` is called when one of these could not be told of a removal."""
        self.folder = kb_folder / KV_FOLDER
        self._store = store
        tiers = list(remotes) if store is None else store.remotes()
        self._remotes = [*map(TierTarget, tiers), *engines]
        self._places = KVPlaces(self.folder)
        self._on_owing = on_owing

    def may_have_objects(self) -> bool:
        """On a disk, or in an open store: it may do without a disk that could not be opened."""
        return self._store is not None or bool(self._disks())

    def find(self, is_wanted: Callable[[Provenance], bool]) -> list[ChunkKey]:
        """Objects of some provenance, on a disk or in memory alone; see `find_keys`."""
        found = [] if self._store is None else self._store.keys_at_hand(is_wanted)
        for folder in self._disks():
            found += find_keys(DiskTier(DiskTierConfig(folder), sweep=False), is_wanted)
        return found

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
        """Delete objects, and whatever else on a disk may hold bytes of them; returns how many
        there were. No power cut brings them back: who calls may note that they are gone."""
        unique = list(dict.fromkeys(keys))
        in_store = set() if self._store is None else self._store.places()
        deleted: set[ChunkKey] = set()

        def clear(folder: Path) -> None:
            disk = DiskTier(DiskTierConfig(folder))  # sweeps what a dead writer left half-way
            disk.clear_quarantine()
            if disk.place not in in_store:
                deleted.update(key for key in unique if disk.delete(key))

        def sync(folder: Path) -> None:
            DiskTier(DiskTierConfig(folder), sweep=False).sync_deletions(unique)

        self._on_each_disk(clear)
        num_deleted = 0 if self._store is None else self._store.delete(unique)
        self._on_each_disk(sync)
        return max(num_deleted, len(deleted))

    def _on_each_disk(self, work: Callable[[Path], None]) -> None:
        """Raises TierError for one that hangs, where a store knows how long to wait for it."""
        for folder in self._disks():
            if self._store is None:
                work(folder)
            else:
                self._store.clean(str(folder.absolute()), partial(work, folder))

    def forget_at_hand(self) -> None:
        """A disk cannot be looked through, which is counted: what an open store knows of chunks
        that exist no more goes without it."""
        if self._store is not None:
            self._store.metrics.count("kv_tier_errors_total", tier="disk", verb="remove")
            self._store.forget(None)

    # ---- elsewhere: remote tiers, engines

    def note_places(self) -> None:
        """Others write chunk KV to all of these. Raises ConfigError if that cannot be noted."""
        self._places.add(None, [each.place for each in self._remotes])

    def owe(self, gone: Collection[ChunkId], behind: Collection[ChunkId] = ()) -> None:
        """These chunks went, and these may have been computed behind them. Other places are told
        by `pay`, now or in another life; from now on nothing of it is served from there."""
        if gone and self._store is not None and self._remotes:
            self._store.bar(gone)
        self._places.owe(gone, behind)

    def is_owing(self) -> bool:
        """Whether one that is in use has not been told of a removal."""
        return self._places.is_owing(self._remotes)

    def pay(self, known: Known) -> None:
        """Tell the other places what went; `known` says which chunks exist. One that does not
        answer is told later."""
        store = self._store
        delete = (lambda _: None) if store is None else store.delete
        if not self._places.pay(self._remotes, known, delete) and self.is_owing():
            owing = [tier.name for tier in self._remotes if self._places.is_owing([tier])]
            if store is not None:
                for name in owing:
                    store.metrics.count("kv_tier_errors_total", tier=name, verb="remove")
            self._on_owing()

    def _disks(self) -> list[Path]:
        """Folders with objects. Looking must not make them, nor fail where a file is in the way."""
        folders = [self.folder, *self._places.disks()]
        return [folder for folder in folders if (folder / "objects").is_dir()]
