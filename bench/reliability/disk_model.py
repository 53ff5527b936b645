"""How a disk may look after a power cut, given what was asked of it until then.

What POSIX promises, and no more: the content of a file is on the disk up to its last fsync, the
names in a folder up to the last fsync of that folder. Of all that came later any part may be there:
a write without the one before it, half of a write, a name without its content, a removal that did
not happen. A rename is whole: a file never loses both names by it. `Weather` says which part.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from reliability.disk_log import Kind, Record

SECTOR = 512  # a disk writes so many bytes or none of them


@dataclass(slots=True)
class _Node:
    """A file or a folder, whatever its names are."""

    is_folder: bool
    synced: int = -1  # place in the log of the last fsync
    content: list[tuple[int, Record]] = field(default_factory=list)  # of a file
    entries: list["_Entry"] = field(default_factory=list)  # of a folder


class _Entry(NamedTuple):
    """A change of one name in a folder."""

    place: int  # in the log
    name: str
    node: _Node | None  # None: the name goes
    moved_from: str | None = None  # in this folder: that name goes in the same moment
    other: _Node | None = None  # of a rename from one folder to another, the other one


class Weather(NamedTuple):
    """What becomes of a change that was not synced."""

    name: str
    keeps_name: Callable[[int, random.Random], bool]  # by its place in the log
    keeps_data: Callable[[int, random.Random], bool]
    tears: bool = False  # of a write that is kept, some sectors are not
    zeroes: bool = False  # of a write that is not kept, the size is


def weathers(cut: int, rng: random.Random) -> list[Weather]:
    """Kinds of trouble for a cut at `cut`; `rng` draws what they are made of."""
    last = rng.randrange(max(1, cut - 400), cut + 1)  # an earlier moment that all of it stopped at

    def always(*_: object) -> bool:
        return True

    def never(*_: object) -> bool:
        return False

    def often(_: int, draw: random.Random) -> bool:
        return draw.random() < 0.5

    def ordered(place: int, _: random.Random) -> bool:
        return place < last

    return [
        Weather("nothing unsynced is kept", never, never),
        Weather("all of it is kept", always, always),
        Weather("all of it up to an earlier moment", ordered, ordered),
        Weather("any part of it", often, often),
        Weather("any part of it, torn", often, often, tears=True),
        Weather("names without content", always, never, zeroes=True),
        Weather("content without names", never, always),
    ]


class DiskImage:
    """The tree at a cut. `write` makes it a folder; may be called once."""

    def __init__(self, records: Sequence[Record], cut: int) -> None:
        """`cut`: so many records happened."""
        self._root = _Node(is_folder=True)
        self._nodes: dict[int, _Node] = {}  # by inode: the last file that had it
        self._live: dict[int, dict[str, _Node]] = {id(self._root): {}}  # names as programs saw them
        self._fates: dict[int, bool] = {}  # of unsynced names, by place
        for place in range(cut):
            self._take(place, records[place])

    def write(self, target: Path, weather: Weather, rng: random.Random) -> None:
        """Make the folder `target`. Files that SQLite maps (-shm) are not in it."""
        self._write_folder(self._root, target, weather, rng)

    def _take(self, place: int, record: Record) -> None:
        match record.kind:
            case Kind.CREATE | Kind.MKDIR:
                made = _Node(is_folder=record.kind is Kind.MKDIR)
                self._nodes[record.node] = made
                if made.is_folder:
                    self._live[id(made)] = {}
                self._name(place, record.path, made)
            case Kind.WRITE | Kind.TRUNCATE:
                self._nodes[record.node].content.append((place, record))
            case Kind.SYNC:
                node = self._nodes.get(record.node, self._root)  # made before all: the root
                node.synced = place
            case Kind.RENAME:
                self._rename(place, record.path, record.to)
            case Kind.UNLINK | Kind.RMDIR:
                self._name(place, record.path, None)
            case Kind.LINK:
                self._name(place, record.to, self._find(record.path))

    def _name(self, place: int, path: str, node: _Node | None) -> None:
        folder, name = self._folder_of(path)
        folder.entries.append(_Entry(place, name, node))
        if node is None:
            del self._live[id(folder)][name]
        else:
            self._live[id(folder)][name] = node

    def _rename(self, place: int, old: str, new: str) -> None:
        node = self._find(old)
        (source, old_name), (target, new_name) = self._folder_of(old), self._folder_of(new)
        if source is target:
            source.entries.append(_Entry(place, new_name, node, moved_from=old_name))
        else:
            target.entries.append(_Entry(place, new_name, node, other=source))
            source.entries.append(_Entry(place, old_name, None, other=target))
        del self._live[id(source)][old_name]
        self._live[id(target)][new_name] = node

    def _find(self, path: str) -> _Node:
        folder, name = self._folder_of(path)
        return self._live[id(folder)][name]

    def _folder_of(self, path: str) -> tuple[_Node, str]:
        *above, name = path.split("/")
        folder = self._root
        for each in above:
            folder = self._live[id(folder)][each]
        return folder, name

    # ── what is left of it ───────────────────────────────────────────────────

    def _write_folder(
        self, folder: _Node, target: Path, weather: Weather, rng: random.Random
    ) -> None:
        target.mkdir()
        for name, node in self._names(folder, weather, rng).items():
            if node.is_folder:
                self._write_folder(node, target / name, weather, rng)
            elif not name.endswith("-shm"):
                (target / name).write_bytes(_content(node, weather, rng))

    def _names(self, folder: _Node, weather: Weather, rng: random.Random) -> dict[str, _Node]:
        names: dict[str, _Node] = {}
        for entry in folder.entries:
            if not self._is_kept(entry, folder, weather, rng):
                continue
            if entry.moved_from is not None:
                names.pop(entry.moved_from, None)
            if entry.node is None:
                names.pop(entry.name, None)
            else:
                names[entry.name] = entry.node
        return names

    def _is_kept(self, entry: _Entry, folder: _Node, weather: Weather, rng: random.Random) -> bool:
        """A rename from one folder to another is one change: it is there as soon as one of the two
        was synced. The old name may stay beside the new one, but never goes without it."""
        if folder.synced > entry.place:
            return True
        if entry.place not in self._fates:
            self._fates[entry.place] = weather.keeps_name(entry.place, rng)
        if entry.other is None or entry.node is None:
            return self._fates[entry.place]
        return self._fates[entry.place] or entry.other.synced > entry.place


def _content(file: _Node, weather: Weather, rng: random.Random) -> bytes:
    """What the file holds, unsynced changes as the weather has them."""
    found = bytearray()
    for place, record in file.content:
        is_kept = place <= file.synced or weather.keeps_data(place, rng)
        if record.kind is Kind.TRUNCATE:
            if is_kept:
                _resize(found, record.offset)
            continue
        end = record.offset + len(record.data)
        if not is_kept:
            if weather.zeroes and len(found) < end:
                _resize(found, end)
            continue
        if len(found) < record.offset:
            _resize(found, record.offset)
        if place <= file.synced or not weather.tears:
            found[record.offset : end] = record.data
            continue
        for start in range(0, len(record.data), SECTOR):
            if rng.random() < 0.5:
                piece = record.data[start : start + SECTOR]
                at = record.offset + start
                if len(found) < at:
                    _resize(found, at)
                found[at : at + len(piece)] = piece
    return bytes(found)


def _resize(data: bytearray, size: int) -> None:
    if len(data) > size:
        del data[size:]
    else:
        data.extend(bytes(size - len(data)))
