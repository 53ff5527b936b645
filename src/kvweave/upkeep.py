"""Keeps chunk KV in step with the documents: forgets what is gone, gives chunks their neighbours.

Chunk KV behind neighbours carries their text. So a chunk that goes takes with it the KV of every
chunk that was computed behind it. The order of steps makes a kill at any moment harmless:

    a document goes     catalogue · entries dropped · KV deleted · settled
    a chunk gets KV     entry written · KV saved

Whoever finds that the catalogue has moved on since KV was last settled compares all of it with the
documents first. Part of the composition root: it sees both the knowledge base and the encoder.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from kvweave.corpus.catalogue import Written
from kvweave.corpus.chunker import make_chunk_id
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.encoded import EncodedNotes
from kvweave.errors import ConfigError
from kvweave.fuse.chunk_encoder import ChunkEncoder, NeighboursOf
from kvweave.fuse.neighbour_encoder import NeighbourEncoder
from kvweave.fuse.neighbours import FILE, NeighbourTable
from kvweave.fuse.preparation import Preparation
from kvweave.ingest.report import IngestProgress, OnProgress
from kvweave.kv.config import DiskTierConfig
from kvweave.kv.forget import Provenance, find_keys, keys_of_chunks
from kvweave.kv.keys import ChunkKey
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.disk import DiskTier
from kvweave.types import ChunkId, DocumentId

log = logging.getLogger(__name__)

KV_FOLDER = "kv"
Forgotten = Callable[[Collection[ChunkId]], None]
BATCH = 16  # chunks that get their neighbours at a time: what a kill can cost


def neighbours_of(kb: KnowledgeBase, table: NeighbourTable, size: int) -> NeighboursOf:
    """What an encoder must know: the neighbours of a chunk, as long as all of them exist.

    Asked again for every prompt, because another process may have removed a document just now.
    """

    def find(token_ids: Sequence[int]) -> Sequence[ChunkId] | None:
        found = table.get(size, make_chunk_id(token_ids))
        if not found:
            return found
        return found if kb.catalogue.known(found) == set(found) else None

    return find


def open_table(folder: Path, preparation: Preparation | None = None) -> NeighbourTable | None:
    """The neighbours of the knowledge base in `folder`; None if it has none and wants none."""
    path = folder / KV_FOLDER / FILE
    wanted = preparation is not None and preparation.variant.kind == "neighbours"
    return NeighbourTable(path) if wanted or path.is_file() else None


class Upkeep:
    """See the module. `before`, `after` and `forget` are for the holder of the writer lock."""

    def __init__(
        self,
        kb: KnowledgeBase,
        table: NeighbourTable | None,
        store: KVStore | None = None,
        encoder: ChunkEncoder | None = None,
        *,
        encodes: bool = False,
        only_new: bool = False,
        refresh: bool = False,
        forgotten: Forgotten | None = None,
    ) -> None:
        """`store` and `encoder` where they are open, so that copies in memory go too.

        `forgotten` hears of chunks that are no more, for whoever else keeps KV of them. `only_new`
        leaves out chunks that the encoder was offered before, where that is known of all of them.
        `encodes` computes KV behind neighbours if that is the encoder's context; with `refresh` the
        chunks whose neighbours are others by now get new KV as well.
        """
        self._kb = kb
        self._table = table
        self._folder = kb.folder / KV_FOLDER
        self._store = store
        variant = encoder.preparation.variant if encoder is not None else None
        self._encoder = encoder if variant is not None and variant.kind == "neighbours" else None
        self._size = variant.size if variant is not None else 0
        self._encoding = encoder if encodes else None  # what is computed in this run
        self._only_new = only_new and not refresh
        self._notes = EncodedNotes(self._folder)
        self._encodes = encodes
        self._forgotten = forgotten
        self._refresh = refresh
        if refresh and not (encodes and self._encoder is not None):
            raise ConfigError(
                "only chunk KV behind neighbours can be refreshed; "
                "ingest with --kv --encoding neighbours:COUNT"
            )

    @property
    def is_settled(self) -> bool:
        """Chunk KV agrees with the documents as they are now."""
        return self._table is None or self._table.settled() == self.state()

    def before(self) -> None:
        """Finish what an interrupted run left undone. Quick if there was none."""
        if self._table is None or self.is_settled:
            return
        gone = self._gone(self._table.mentioned())
        self._table.drop(gone | self._table.users_of(gone))
        num_deleted = self._delete(self._stray_keys()) if self._has_objects() else 0
        if num_deleted:
            log.warning("%d chunk KV of removed documents were left over: deleted", num_deleted)
        self._table.settle(self.state())

    def is_encoded(self) -> bool:
        """Every chunk that is there now was offered to the encoder, and all of it was saved."""
        if self._encoding is None or not self._only_new:
            return False
        return self._notes.covers(self._encoding.context.context_id(), self.state())

    def after(
        self,
        orphaned: Collection[ChunkId],
        tell: OnProgress | None = None,
        new: Collection[ChunkId] | None = None,
    ) -> None:
        """Forget the KV of chunks that are no more, and all that saw them; then compute anew: what
        saw them and what is `new`, or whatever has none where `new` is None."""
        touched = None
        if new is not None and self._table is not None:
            touched = [*new, *self._table.users_of(orphaned)]
        self.forget(orphaned)
        if self._encodes and self._encoder is not None and self._table is not None:
            self._give_neighbours(self._encoder, self._table, tell, touched)
        if self._encoding is not None and not self._encoding.saves().dropped:
            self._notes.put(self._encoding.context.context_id(), self.state())

    def removed(self, before: str) -> None:
        """Chunks went and none came since the catalogue was in state `before`. Where some saw
        others, the next ingest looks at all: those have no KV any more."""
        if self._table is None:
            self._notes.move(before, self.state())

    def forget(self, chunk_ids: Collection[ChunkId]) -> int:
        """Delete the KV of these chunks and what saw them, whichever model computed it; returns
        how many objects. The caller has called `before`, and these chunks are all that went since.
        """
        keys: list[ChunkKey] = []
        if chunk_ids and self._forgotten is not None:
            self._forgotten(chunk_ids)
        if self._table is not None:
            users = self._table.users_of(chunk_ids)
            keys = self._keys_at_hand(users)
            self._table.drop(users | set(chunk_ids))
        num_deleted = 0
        if chunk_ids and self._has_objects():
            if self._store is not None:
                self._store.flush()  # what is still on its way must not land behind us
            num_deleted = self._delete([*keys_of_chunks(self._disk(), chunk_ids), *keys])
        if self._table is not None:
            self._table.settle(self.state())
        return num_deleted

    # ── neighbours ───────────────────────────────────────────────────────────

    def _give_neighbours(
        self,
        encoder: ChunkEncoder,
        table: NeighbourTable,
        tell: OnProgress | None,
        only: Sequence[ChunkId] | None = None,
    ) -> None:
        """To chunks that have none, and KV to those that have none; `only` are looked at."""
        catalogue, size = self._kb.catalogue, self._size
        if self._refresh:
            self._drop_outdated(table)
        second = NeighbourEncoder(encoder, catalogue.chunks)
        total, done = catalogue.num_chunks() if only is None else len(only), 0
        batches = (
            catalogue.all_chunks(BATCH) if only is None else catalogue.some_chunks(only, BATCH)
        )
        report = _teller(tell, total)
        report(0)
        for batch in batches:
            known = table.get_many(size, [chunk.id for chunk in batch])
            new = self._kb.nearest([c for c in batch if c.id not in known], size)
            if new:
                table.put(size, new)  # before the KV, which must never be without
            chosen = {**known, **new}
            second.encode(batch, chosen)
            done += len(batch)
            report(done)

    def _drop_outdated(self, table: NeighbourTable) -> None:
        """Entries whose neighbours would be others now, and their KV."""
        outdated: dict[str, tuple[ChunkId, ...]] = {}  # chunk to the neighbours it had
        for batch in self._kb.catalogue.all_chunks(BATCH):
            known = table.get_many(self._size, [chunk.id for chunk in batch])
            now = self._kb.nearest([c for c in batch if c.id in known], self._size)
            outdated |= {each: known[each] for each in now if now[each] != known[each]}
        if not outdated:
            return
        chunk_ids = [ChunkId(each) for each in outdated]
        keys = self._keys_at_hand(chunk_ids)

        def is_old(of: Provenance) -> bool:
            return bool(of.behind) and outdated.get(of.chunk) == of.behind

        # KV first: killed before the entries go, they name nothing and are computed as they are
        if self._has_objects():
            if self._store is not None:
                self._store.flush()
            self._delete([*find_keys(self._disk(), is_old), *keys])
        table.drop(chunk_ids, self._size)

    # ── documents and objects ────────────────────────────────────────────────

    def state(self) -> str:
        """Of the documents: another one after every change."""
        catalogue = self._kb.catalogue
        return f"{catalogue.uid()}:{catalogue.generation()}"

    def _gone(self, chunk_ids: Collection[ChunkId]) -> set[ChunkId]:
        return set(chunk_ids) - self._kb.catalogue.known(chunk_ids)

    def _stray_keys(self) -> list[ChunkKey]:
        """Objects with text of chunks that are no more."""
        alive: set[str] = set(self._kb.catalogue.chunk_ids())
        return find_keys(self._disk(), lambda of: not alive.issuperset((of.chunk, *of.behind)))

    def _keys_at_hand(self, chunk_ids: Collection[ChunkId]) -> list[ChunkKey]:
        """Names of KV behind neighbours that may be in memory alone; others are found on disk."""
        if self._encoder is None or self._table is None:
            return []
        chunks = self._kb.catalogue.chunks(list(chunk_ids))
        found = self._table.get_many(self._size, list(chunks))
        return [
            self._encoder.key_behind(chunks[each].token_ids, others)
            for each, others in found.items()
            if others
        ]

    def _delete(self, keys: Sequence[ChunkKey]) -> int:
        """Delete objects, and whatever else on the disk may hold bytes of them."""
        disk = DiskTier(DiskTierConfig(self._folder))  # sweeps what a dead writer left half-way
        disk.clear_quarantine()
        if self._store is not None:
            return self._store.delete(keys)
        return sum(disk.delete(key) for key in dict.fromkeys(keys))

    def _has_objects(self) -> bool:
        return (self._folder / "objects").is_dir()

    def _disk(self) -> DiskTier:
        return DiskTier(DiskTierConfig(self._folder), sweep=False)


def remove_documents(kb: KnowledgeBase, ids: Sequence[DocumentId], upkeep: Upkeep) -> Written:
    """Remove documents with their vectors, words and chunk KV, and all KV that saw their text."""
    with kb.writing():
        upkeep.before()
        before = upkeep.state()
        written = kb.catalogue.remove(ids)
        kb.publish()
        upkeep.forget(written.orphaned)
        upkeep.removed(before)
    return written


def _teller(tell: OnProgress | None, total: int) -> Callable[[int], None]:
    def report(done: int) -> None:
        if tell is not None:
            tell(IngestProgress("neighbours", 0, None, 0, done, "", total))

    return report
