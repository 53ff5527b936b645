"""The chunk KV that a knowledge base keeps: found by whose text it carries, deleted wherever it is.

    <kb>/kv/places.json      where else it may lie, and which removals have not got there yet

Works on the folders, and through the store where one is open, so that copies in memory and bytes on
their way go too. `kv_sync.py` and `neighbours.py` decide what goes.

Chunk KV may lie outside the knowledge base's own folder: in a folder for all of them, on a Valkey
or Redis server, in a bucket. Each such place is noted before anything is written there, so that a
removal knows of it whoever removes, with whichever settings. A remote tier may be down at that
moment, or unknown to the process that removes; then the chunks that went are noted beside its name
until some process has deleted their KV there. Until then none of it is served (`KVStore.bar`).

The order makes a kill at any moment harmless: noted · deleted elsewhere · deleted there · struck.
"""

import fcntl
import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kvweave.corpus.disk_files import atomic_file, make_folder
from kvweave.errors import ConfigError, TierError
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.provenance import Provenance, carries, find_keys, find_tagged
from kvweave.kv.store import KVStore
from kvweave.kv.tiers import Tier
from kvweave.kv.tiers.config import DiskTierConfig
from kvweave.kv.tiers.disk import DiskTier
from kvweave.types import ChunkId

log = logging.getLogger(__name__)
KV_FOLDER = "kv"  # in the folder of the knowledge base
PLACES_FILE = "places.json"
Known = Callable[[Collection[ChunkId]], Collection[ChunkId]]  # which of some chunks exist
Delete = Callable[[list[ChunkKey]], object]


class RemovalTarget(Protocol):
    """A place elsewhere that may hold chunk KV of a knowledge base, and can be told of removals."""

    @property
    def place(self) -> str:
        """Which one it is, without secrets: equal for all who use it, in any process."""
        ...

    @property
    def name(self) -> str:
        """What counters call it."""
        ...

    def remove(
        self, gone: Collection[ChunkId], behind: Collection[ChunkId], delete: Delete
    ) -> None:
        """Delete what carries text of chunks that are gone; those `behind` may have been computed
        behind them. `delete` takes copies of what is found from elsewhere, before it goes here. May
        block. Raises TierError where some of it may be left; calling again is harmless."""
        ...


class TierTarget:
    """A remote tier."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self.place, self.name = tier.place, tier.name

    def remove(
        self, gone: Collection[ChunkId], behind: Collection[ChunkId], delete: Delete
    ) -> None:
        keys = find_tagged(self._tier, gone, behind)
        delete(keys)
        for key in keys:
            self._tier.delete(key)  # raises where the store would count


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


class Owed(NamedTuple):
    """What a place has still to be rid of."""

    gone: frozenset[ChunkId]  # chunks that were removed
    behind: frozenset[ChunkId]  # chunks whose KV may have been computed behind them


class KVPlaces:
    """The places that KV of a base lies in. Any thread and process; each change is one whole new
    file."""

    def __init__(self, kv_folder: Path) -> None:
        self._path = kv_folder / PLACES_FILE

    def add(self, disk: Path | None, remotes: Iterable[str]) -> None:
        """Note that chunk KV may be written there from now on: a folder, and remote tiers by their
        `place`. Raises ConfigError if that cannot be noted."""
        folders = [] if disk is None else [str(disk.absolute())]
        names = list(remotes)
        if set(folders) <= set(map(str, self.disks())) and set(names) <= self._read_owed().keys():
            return
        try:
            with self._changing() as noted:
                noted["disks"] = sorted({*noted.get("disks", ()), *folders})
                owed = noted.setdefault("remotes", {})
                for name in names:
                    owed.setdefault(name, {})
        except OSError as error:
            raise ConfigError(
                f"cannot note in {self._path} where chunk KV lies: {error.strerror}; make that "
                "folder writable, or leave store.disk_folder, redis_url and s3_url out"
            ) from error

    def disks(self) -> list[Path]:
        """Folders of chunk KV besides the knowledge base's own."""
        return [Path(each) for each in self._read().get("disks", ())]

    def owe(self, gone: Collection[ChunkId], behind: Collection[ChunkId] = ()) -> None:
        """These chunks go: every remote tier owes the deletion of what carries their text."""
        if not gone or not self._read_owed():
            return
        with self._changing() as noted:
            for each in noted["remotes"].values():
                each["gone"] = sorted({*each.get("gone", ()), *gone})
                each["behind"] = sorted({*each.get("behind", ()), *behind})

    def is_owing(self, targets: Iterable[RemovalTarget]) -> bool:
        """Whether one of these has something to delete."""
        owed = self._read_owed()
        return any(owed[each.place].gone for each in targets if each.place in owed)

    def find_barred(self) -> frozenset[ChunkId]:
        """Chunks that were removed and whose KV some remote tier may still have."""
        return frozenset(name for each in self._read_owed().values() for name in each.gone)

    def pay(self, targets: Iterable[RemovalTarget], known: Known, delete: Delete) -> bool:
        """Delete in these places what they owe; chunks that are back by now (`known`) stay.
        `delete` takes copies of the found from elsewhere. False: some of it is left for later,
        which the log says."""
        by_place = {each.place: each for each in targets}
        is_paid = True
        for place, owed in self._read_owed().items():
            if not owed.gone:
                continue
            target = by_place.get(place)
            if target is None:
                is_paid = False
                log.warning(
                    "chunk KV of %d removed chunks may be left in %s, which is not in use now; run "
                    "once with its setting, or take it out of %s if it is no more",
                    *(len(owed.gone), place, self._path),
                )
                continue
            try:
                target.remove(owed.gone.difference(known(owed.gone)), owed.behind, delete)
            except TierError as error:
                is_paid = False
                log.warning(
                    "chunk KV of %d removed chunks is not deleted yet, and not served: %s",
                    *(len(owed.gone), error),
                )
                continue
            self._strike(place, owed)
        return is_paid

    def _strike(self, place: str, paid: Owed) -> None:
        with self._changing() as noted:
            each = noted.get("remotes", {}).get(place, {})
            left = sorted(set(each.get("gone", ())) - paid.gone)
            # what was noted meanwhile may be behind those that were noted before
            noted["remotes"][place] = {"gone": left, "behind": each["behind"]} if left else {}

    def _read_owed(self) -> dict[str, Owed]:
        """By the place of each remote tier that was ever in use."""
        remotes = self._read().get("remotes", {})
        return {
            place: Owed(frozenset(each.get("gone", ())), frozenset(each.get("behind", ())))
            for place, each in remotes.items()
        }

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._path.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self._path} cannot be read ({error}); it says where chunk KV lies: mend it, or "
                "delete it if no other place was ever set"
            ) from error
        return found if isinstance(found, dict) else {}

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Any]]:
        """What is noted, to be changed by one at a time, in any process."""
        make_folder(self._path.parent)
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            noted = self._read()
            yield noted
            with atomic_file(self._path) as file:  # the catalogue forgets what is noted here
                file.write(f"{json.dumps(noted, indent=1)}\n".encode())
