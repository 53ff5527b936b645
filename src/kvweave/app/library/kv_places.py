"""Where chunk KV of a knowledge base may lie, and which removals have not got there yet.

    <kb>/kv/places.json

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
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kvweave.corpus.disk_files import make_folder, sync
from kvweave.errors import ConfigError, TierError
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.provenance import find_tagged
from kvweave.kv.tiers import Tier
from kvweave.types import ChunkId

log = logging.getLogger(__name__)

FILE = "places.json"
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

    @property
    def place(self) -> str:
        return self._tier.place

    @property
    def name(self) -> str:
        return self._tier.name

    def remove(
        self, gone: Collection[ChunkId], behind: Collection[ChunkId], delete: Delete
    ) -> None:
        keys = find_tagged(self._tier, gone, behind)
        delete(keys)
        for key in keys:
            self._tier.delete(key)  # raises where the store would count


class Owed(NamedTuple):
    """What a place has still to be rid of."""

    gone: frozenset[ChunkId]  # chunks that were removed
    behind: frozenset[ChunkId]  # chunks whose KV may have been computed behind them


class KVPlaces:
    """See the module. Any thread and process; each change is one whole new file."""

    def __init__(self, kv_folder: Path) -> None:
        self._path = kv_folder / FILE

    def add(self, disk: Path | None, remotes: Iterable[str]) -> None:
        """Note that chunk KV may be written there from now on: a folder, and remote tiers by their
        `place`. Raises ConfigError if that cannot be noted."""
        folders = [] if disk is None else [str(disk.absolute())]
        names = list(remotes)
        if set(folders) <= set(map(str, self.disks())) and set(names) <= self._owed().keys():
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
        if not gone or not self._owed():
            return
        with self._changing() as noted:
            for each in noted["remotes"].values():
                each["gone"] = sorted({*each.get("gone", ()), *gone})
                each["behind"] = sorted({*each.get("behind", ()), *behind})

    def is_owing(self, targets: Iterable[RemovalTarget]) -> bool:
        """Whether one of these has something to delete."""
        owed = self._owed()
        return any(owed[each.place].gone for each in targets if each.place in owed)

    def barred(self) -> frozenset[ChunkId]:
        """Chunks that were removed and whose KV some remote tier may still have."""
        return frozenset(name for each in self._owed().values() for name in each.gone)

    def pay(self, targets: Iterable[RemovalTarget], known: Known, delete: Delete) -> bool:
        """Delete in these places what they owe; chunks that are back by now (`known`) stay.
        `delete` takes copies of the found from elsewhere. False: some of it is left for later,
        which the log says."""
        by_place = {each.place: each for each in targets}
        is_paid = True
        for place, owed in self._owed().items():
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

    def _owed(self) -> dict[str, Owed]:
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
            temporary = self._path.with_suffix(".tmp")
            with temporary.open("w") as file:
                file.write(json.dumps(noted, indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())  # the catalogue forgets what is noted here
            temporary.replace(self._path)
            sync(self._path.parent)
