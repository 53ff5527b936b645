"""Keeps the vector index in step with the catalogue, and in a file that defends itself.

The index never hears of documents. It remembers the catalogue's generation and pulls what it has
missed: at the next search in any process, and once more when a writer publishes. So vectors get in
and out by one function, and an index that is stale, damaged or gone repairs itself.

    magic 8 │ header length u32 │ header JSON │ ids │ tombstones │ FAISS bytes │ crc32 u32

The file is written under a temporary name, synced, renamed: a killed process leaves the old one. It
is derived from the catalogue, so whatever is wrong with it, the answer is to build it again.
"""

import json
import logging
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from kvweave.corpus.catalogue import Catalogue
from kvweave.corpus.disk_files import atomic_file
from kvweave.corpus.index import KINDS, IndexHits, VectorIndex, is_remote, make_index, resolve_kind
from kvweave.corpus.index.base import Vector
from kvweave.corpus.index.faiss_index import FaissIndex, IndexRows
from kvweave.corpus.removals import VectorIds
from kvweave.corpus.settings import KnowledgeBaseSettings
from kvweave.errors import CorpusError

MAGIC = b"KVWINDX1"
BLOCK = 1 << 20


class LoadedIndex(NamedTuple):
    vectors: FaissIndex
    generation: int  # of the catalogue that it reflects
    catalogue_uid: str  # which catalogue that was


def save_index(path: Path, index: FaissIndex, generation: int, catalogue_uid: str = "") -> None:
    """Replace the file, or leave the old one untouched."""
    import faiss

    rows = index.rows
    header = {
        "kind": index.kind,
        "dim": index.dim,
        "generation": generation,
        "catalogue_uid": catalogue_uid,
        "num_rows": rows.num_rows,
        "num_trained": index.num_trained,
        "has_vectors": index.faiss_index is not None,
    }
    text = json.dumps(header).encode()
    with atomic_file(path) as file:
        out = _Summed(file)
        out.write(MAGIC + struct.pack("<I", len(text)) + text)
        out.write(rows.by_row.astype("<i8").tobytes())
        out.write(np.packbits(rows.dead).tobytes())
        if index.faiss_index is not None:
            faiss.write_index(index.faiss_index, faiss.PyCallbackIOWriter(out.write, BLOCK))
        file.write(struct.pack("<I", out.crc))


def load_index(path: Path) -> LoadedIndex | None:
    """What was saved, or None when there is no file. Raises CorpusError for a damaged one."""
    import faiss

    if not path.is_file():
        return None
    _verify(path)
    with path.open("rb") as file:
        file.seek(len(MAGIC))
        (length,) = struct.unpack("<I", file.read(4))
        header = json.loads(file.read(length))
        num_rows, dim = header["num_rows"], header["dim"]
        ids = np.frombuffer(file.read(8 * num_rows), "<i8").astype(np.int64)
        bits = np.frombuffer(file.read(-(-num_rows // 8)), np.uint8)
        rows = IndexRows(ids, np.unpackbits(bits, count=num_rows).astype(np.bool_))
        inner = None
        if header["has_vectors"]:
            inner = faiss.read_index(faiss.PyCallbackIOReader(file.read, BLOCK))
    if header["kind"] not in KINDS:
        raise CorpusError(f"{path} holds an index of unknown kind {header['kind']!r}")
    index = KINDS[header["kind"]](
        dim, faiss_index=inner, rows=rows, num_trained=header["num_trained"]
    )
    return LoadedIndex(index, header["generation"], header.get("catalogue_uid", ""))


class _Summed:
    """Writes through and keeps the checksum."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.crc = 0

    def write(self, data: bytes) -> int:
        self.crc = zlib.crc32(data, self.crc)
        return self._file.write(data)


def _verify(path: Path) -> None:
    """FAISS trusts the sizes in a file, so nothing of it is parsed before the checksum holds."""
    size = path.stat().st_size
    crc = 0
    with path.open("rb") as file:
        left = size - 4
        if left < len(MAGIC) + 4 or file.read(len(MAGIC)) != MAGIC:
            raise CorpusError(f"{path} is not an index file")
        file.seek(0)
        while left > 0:
            block = file.read(min(BLOCK, left))
            crc = zlib.crc32(block, crc)
            left -= len(block)
        (stored,) = struct.unpack("<I", file.read(4))
    if stored != crc:
        raise CorpusError(f"{path} is damaged: its checksum does not match")


log = logging.getLogger(__name__)
FILE = "vectors.index"
SERVER_FILE = "server.json"
PULL = 16_384  # vectors moved at a time: 25 MB at 384 dimensions


@dataclass(eq=False)
class CatalogueIndex:
    """Safe for many threads. Loads on first use."""

    _folder: Path
    _catalogue: Catalogue
    _settings: KnowledgeBaseSettings
    _api_key: str | None = None
    _index: VectorIndex | None = None
    _generation: int = 0  # of the catalogue that the index reflects
    _last_id: int = 0  # highest vector id it was ever given

    def __post_init__(self) -> None:
        self._lock = SharedLock()

    def search(self, vector: Vector, k: int) -> IndexHits:
        self.refresh()
        with self._lock.read():
            return self._loaded.search(vector, k)

    def search_staged(self, vector: Vector, k: int, stages: int) -> Iterator[IndexHits]:
        """Holds the lock within a stage, never between two: the caller may take its time."""
        self.refresh()
        with self._lock.read():
            steps = self._loaded.search_staged(vector, k, stages)
        while True:
            with self._lock.read():
                hits = next(steps, None)
            if hits is None:
                return
            yield hits

    def num_stages(self, k: int, stages: int) -> int:
        """The stages that `search_staged` has if it may have `stages`: at least one."""
        self.refresh()
        with self._lock.read():
            return self._loaded.num_stages(k, stages)

    def refresh(self) -> None:
        """Catch up with the catalogue. Cheap when nothing changed."""
        if self._index is not None and (
            self._index.shared or self._generation == self._catalogue.generation()
        ):
            return  # a shared index is the writer's to change
        with self._lock.write():
            if self._index is None:
                self._load()
            if not self._loaded.shared:
                self._pull()

    def publish(self) -> None:
        """Catch up, rebuild if that is due, save. Only for the holder of the writer lock."""
        kind = resolve_kind(self._settings.index, self._catalogue.num_chunks())
        with self._lock.write():
            if self._index is None:
                self._load()
            index = self._loaded
            if index.shared and not self._generation:
                # A server we know nothing about: what is there and should not be, must go.
                index.remove(self._find_strangers())
            self._pull()
            if not is_remote(kind) and (index.kind != kind or index.wants_rebuild):
                self._start_over(kind)
                self._pull()
            self._save()

    def problems(self) -> list[str]:
        """Where index and catalogue disagree, after catching up."""
        self.refresh()
        with self._lock.read():
            have = self._loaded.ids()
            want = self._catalogue.removals.vector_changes(0, 0).added
        missing = np.setdiff1d(want, have)
        extra = np.setdiff1d(have, want)
        return [
            f"the index {words} {len(ids)} vectors"
            for words, ids in (("misses", missing), ("has kept", extra))
            if len(ids)
        ]

    @property
    def kind(self) -> str:
        self.refresh()
        return self._loaded.kind

    @property
    def _loaded(self) -> VectorIndex:
        assert self._index is not None, "used before loading"
        return self._index

    def _pull(self) -> None:
        """Apply what happened since. Repeating a part of it, after a crash, changes nothing."""
        index = self._loaded
        changes = self._catalogue.removals.vector_changes(self._generation, self._last_id)
        removed = self._find_strangers() if changes.removed is None else changes.removed
        if len(removed):
            index.remove(removed)
        everything = index.learns_from_first_add and not self._last_id
        step = max(1, len(changes.added)) if everything else PULL
        for start in range(0, len(changes.added), step):
            ids = changes.added[start : start + step]
            index.add(*self._catalogue.vectors(ids, self._settings.dim))
            self._last_id = int(ids[-1])
        self._generation = changes.generation

    def _find_strangers(self) -> VectorIds:
        """Vectors in the index that are no more, by comparing all of them."""
        return np.setdiff1d(self._loaded.ids(), self._catalogue.removals.vector_changes(0, 0).added)

    def _start_over(self, kind: str) -> None:
        self._generation = self._last_id = 0
        self._index = make_index(
            kind,
            self._settings.dim,
            collection=f"kvweave-{self._settings.uid}",
            owner=self._settings.uid,
            api_key=self._api_key,
        )

    def _load(self) -> None:
        kind = resolve_kind(self._settings.index, self._catalogue.num_chunks())
        if is_remote(kind):
            self._start_over(kind)
            self._load_server_state()
            return
        try:
            loaded = load_index(self._folder / FILE)
        except CorpusError as error:
            log.warning("%s; building it again from the catalogue", error)
            loaded = None
        if (
            loaded is None
            or loaded.catalogue_uid != self._catalogue.uid()  # the catalogue was made anew
            or loaded.generation > self._catalogue.generation()  # … or restored
        ):
            self._start_over(kind)
            return
        self._index, self._generation = loaded.vectors, loaded.generation
        self._last_id = int(loaded.vectors.rows.by_row.max(initial=0))

    def _save(self) -> None:
        index = self._loaded
        if index.shared:
            state = {
                "url": self._settings.index,
                "catalogue_uid": self._catalogue.uid(),
                "generation": self._generation,
                "last_id": self._last_id,
                "num_vectors": len(index),
            }
            with atomic_file(self._folder / SERVER_FILE) as file:
                file.write(json.dumps(state).encode())
        elif isinstance(index, FaissIndex):
            save_index(self._folder / FILE, index, self._generation, self._catalogue.uid())

    def _load_server_state(self) -> None:
        """What this knowledge base last sent. A server that lost vectors gets them all again."""
        path = self._folder / SERVER_FILE
        if not path.is_file() or not self._loaded.shared:
            return
        state = json.loads(path.read_text())
        if (
            state["url"] == self._settings.index
            and state.get("catalogue_uid") == self._catalogue.uid()
            and state["num_vectors"] == len(self._loaded)
        ):
            self._generation, self._last_id = state["generation"], state["last_id"]


class SharedLock:
    """Many readers or one writer, within a process.

    Waiting writers hold back new readers, so a stream of searches cannot starve an update.
    Not re-entrant: a thread that reads must not ask to read again, or a waiting writer stops both.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_readers = 0
        self._num_waiting = 0
        self._is_written = False

    @contextmanager
    def read(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_written and not self._num_waiting)
            self._num_readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_readers -= 1
                self._changed.notify_all()

    @contextmanager
    def write(self) -> Iterator[None]:
        with self._changed:
            self._num_waiting += 1
            try:
                self._changed.wait_for(lambda: not self._is_written and not self._num_readers)
                self._is_written = True
            finally:
                self._num_waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._is_written = False
                self._changed.notify_all()
