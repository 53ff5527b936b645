"""Keeps chunk KV in step with the documents: forgets what is gone, before and after an ingest.

Chunk KV behind neighbours carries their text. So a chunk that goes takes with it the KV of every
chunk that was computed behind it. The order of steps makes a kill at any moment harmless:

    a document goes     catalogue, which notes what went · noted for remote tiers · entries dropped
                        · KV deleted · settled · KV in remote tiers deleted, now or later
    a chunk gets KV     entry written · KV saved (`neighbours.py`)

A writer that finds that something went since KV was last settled deletes its KV first. Where some
KV is behind neighbours, all of it is compared with the documents.

Which encodings cover all chunks is noted, so that an upload need not look at each chunk:

    <kb>/kv/encoded.json     { encoding: state of the catalogue that it covers }

A note counts only while the catalogue is in that very state: a process that adds chunks without
their KV, or is killed in between, makes it worthless by that alone, and the next ingest looks at
every chunk again.
"""

import json
import logging
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvweave.app.library.neighbours import NeighbourKeeper, open_table
from kvweave.app.library.stored_kv import RemovalTarget, StoredKV
from kvweave.corpus.catalogue import Written
from kvweave.corpus.disk_files import atomic_file
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.errors import ConfigError, CorpusFull, TierError
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
from kvweave.fuse.encode.neighbour_table import NeighbourTable
from kvweave.ingest.report import OnProgress
from kvweave.kv.format.keys import ChunkKey, ContextId
from kvweave.kv.tiers import open_tier
from kvweave.kv.tiers.config import TierConfig
from kvweave.types import ChunkId, DocumentId

log = logging.getLogger(__name__)
FULL_TRIES = 3  # to remove documents from a full disk, each with more room than the one before

Forgotten = Callable[[Collection[ChunkId]], None]
FILE = "encoded.json"


@dataclass(frozen=True, slots=True)
class SyncJob:
    """What one run does beside forgetting what is gone."""

    encodes: bool = False  # compute KV, also behind neighbours if that is the encoder's context
    only_new: bool = False  # leave out chunks the encoder was offered, where that is known of all
    refresh: bool = False  # chunks whose neighbours are others by now get new KV as well
    forgotten: Forgotten | None = None  # hears of chunks that are no more, to drop its own KV


class KVSync:
    """Keeps chunk KV in step with documents. `before`, `after` and `forget` are for the holder of
    the writer lock."""

    def __init__(
        self,
        kb: KnowledgeBase,
        table: NeighbourTable | None,
        kept: StoredKV | None = None,
        encoder: ChunkEncoder | None = None,
        job: SyncJob | None = None,
    ) -> None:
        """`kept` and `encoder` with a store where one is open, so that copies in memory go too."""
        job = job or SyncJob()
        self._kb = kb
        self._table = table
        self._kept = kept or StoredKV(kb.folder)
        self._neighbours: NeighbourKeeper | None = None
        kind = None if encoder is None else encoder.preparation.variant.kind
        if encoder is not None and table is not None and kind == "neighbours":
            self._neighbours = NeighbourKeeper(kb, table, encoder, self._kept)
        self._encoding = encoder if job.encodes else None  # what is computed in this run
        self._only_new = job.only_new and not job.refresh
        self._notes = EncodedNotes(self._kept.folder)
        self._encodes = job.encodes
        self._forgotten = job.forgotten
        self._refresh = job.refresh
        self._is_behind = False  # KV of what went earlier could not be deleted yet
        if job.refresh and not (job.encodes and self._neighbours is not None):
            raise ConfigError(
                "only chunk KV behind neighbours can be refreshed; "
                "ingest with --kv --encoding neighbours:COUNT"
            )

    @property
    def is_settled(self) -> bool:
        """Chunk KV agrees with the documents as they are now, also where remote tiers have it."""
        return self._is_settled_here and not self.is_owing

    @property
    def is_owing(self) -> bool:
        """A remote tier that is in use has not been told of a removal."""
        return self._kept.is_owing()

    @property
    def _is_settled_here(self) -> bool:
        has_settled = self._table is None or self._table.settled_state() == self.state()
        return has_settled and self._kb.catalogue.removals.pending_kv() is None

    def before(self) -> None:
        """Finish what an interrupted run left undone. Quick if there was none. What a disk keeps
        from being deleted is left to the next writer: documents come and go all the same."""
        if not self._is_settled_here:
            with self._or_later():
                self._settle_here()
        self._kept.pay(self._kb.catalogue.existing)

    @contextmanager
    def _or_later(self) -> Iterator[None]:
        """What a disk refuses is said and counted, and stays owed: nothing is settled. Copies in
        memory go now."""
        try:
            yield
        except (OSError, TierError) as error:
            self._is_behind = True
            folder = self._kb.folder
            log.warning("%s: chunk KV of what was removed goes later: %s", folder, error)
            self._kept.forget_at_hand()

    def _settle_here(self) -> None:
        num_deleted, is_flushed = 0, True
        pending = set(self._kb.catalogue.removals.pending_kv() or ())
        if self._table is not None:
            mentioned = self._table.mentioned_chunks()
            gone = mentioned - self._kb.catalogue.existing(mentioned) | pending
            users = self._table.users_of(gone)
            self._kept.owe(gone, users)
            self._table.drop(gone | users)
        else:
            self._kept.owe(pending)
        if self._kept.may_have_objects():
            is_flushed = self._kept.flush()
            keys = self._pending_keys() if self._table is None else self._stray_keys()
            num_deleted = self._kept.delete(keys)
        if num_deleted:
            log.warning("%d chunk KV of removed documents were left over: deleted", num_deleted)
        if is_flushed:
            self._settle()

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
        if self._encodes and self._neighbours is not None:
            if self._refresh:
                self._neighbours.drop_outdated()
            self._neighbours.give(tell, touched)
        if self._encoding is not None and not self._encoding.saves().dropped:
            self._notes.put(self._encoding.context.context_id(), self.state())

    def keep_notes(self, before: str) -> None:
        """Move the notes to the catalogue's state now: chunks went and none came since `before`.
        Where some saw others, the next ingest looks at all: those have no KV any more."""
        if self._table is None:
            self._notes.move(before, self.state())

    def forget(self, chunk_ids: Collection[ChunkId]) -> int:
        """Delete the KV of these chunks and what saw them, whichever model computed it; returns
        how many objects. The caller has called `before`, and these chunks are all that went since.
        """
        keys: list[ChunkKey] = []
        if chunk_ids and self._forgotten is not None:
            self._forgotten(chunk_ids)
        users = set() if self._table is None else self._table.users_of(chunk_ids)
        self._kept.owe(chunk_ids, users)  # before the entries go, which say who the users are
        if self._table is not None:
            keys = self._keys_at_hand(users)
            self._table.drop(users | set(chunk_ids))
        num_deleted, is_flushed = 0, True
        with self._or_later():
            if chunk_ids and self._kept.may_have_objects():
                is_flushed = self._kept.flush()
                num_deleted = self._kept.delete([*self._kept.of_chunks(chunk_ids), *keys])
        if is_flushed:  # else the next `before` looks again
            if not self._is_behind:
                self._settle()
            self._kept.pay(self._kb.catalogue.existing)
        return num_deleted

    def make_room(self, ids: Sequence[DocumentId]) -> None:
        """Free room on a full disk: the chunk KV of documents that are about to go, and the index,
        which is made again."""
        placed = (p for each in ids for p in self._kb.catalogue.document_chunks(each))
        self._kb.drop_index()
        with self._or_later():
            self._kept.delete(self._kept.of_chunks({p.chunk.id for p in placed}))

    def state(self) -> str:
        """State of the documents: another one after every change."""
        catalogue = self._kb.catalogue
        return f"{catalogue.uid()}:{catalogue.generation()}"

    def _settle(self) -> None:
        """KV agrees with the documents as they are now; the writer lock keeps them so."""
        if self._table is not None:
            self._table.settle(self.state())
        catalogue = self._kb.catalogue
        if catalogue.removals.pending_kv() is not None:
            catalogue.removals.settle_kv(catalogue.generation())

    def _pending_keys(self) -> list[ChunkKey]:
        """Objects of chunks whose removal has not reached them yet. No others: what requests
        brought and was never ingested stays."""
        pending = self._kb.catalogue.removals.pending_kv()
        return [] if pending is None else self._kept.of_chunks(pending)

    def _stray_keys(self) -> list[ChunkKey]:
        """Objects with text of chunks that are no more."""
        alive: set[str] = set(self._kb.catalogue.chunk_ids())
        return self._kept.find(lambda of: not alive.issuperset((of.chunk, *of.behind)))

    def _keys_at_hand(self, chunk_ids: Collection[ChunkId]) -> list[ChunkKey]:
        return [] if self._neighbours is None else self._neighbours.keys_at_hand(chunk_ids)


def _remove_from_catalogue(kb: KnowledgeBase, ids: Sequence[DocumentId], sync: KVSync) -> Written:
    """Remove documents from the catalogue, on a full disk too: SQLite has to write before it frees
    anything. Chunk KV that is saved meanwhile may take the room that was freed, so what is freed
    grows: the KV of these documents, then of all, which can be made again."""
    for attempt in range(FULL_TRIES):
        try:
            return kb.catalogue.remove(ids)
        except CorpusFull:
            sync.make_room([each.id for each in kb.documents()] if attempt else ids)
    return kb.catalogue.remove(ids)


def remove_documents(kb: KnowledgeBase, ids: Sequence[DocumentId], sync: KVSync) -> Written:
    """Remove documents with their vectors, words and chunk KV, and all KV that saw their text."""
    with kb.writing():
        sync.before()
        before = sync.state()
        written = _remove_from_catalogue(kb, ids, sync)
        kb.publish()
        try:
            sync.forget(written.orphaned)
            sync.keep_notes(before)
        except (OSError, sqlite3.Error, TierError) as error:
            # The documents are gone: saying that they are not would be wrong. The catalogue owes
            # the removal of their KV, and the next writer pays it.
            log.warning("%s: chunk KV of what was removed goes later: %s", kb.folder, error)
    return written


@contextmanager
def sync_without_model(
    kb: KnowledgeBase,
    remotes: Sequence[TierConfig] = (),
    engines: Sequence[RemovalTarget] = (),
    on_owing: Callable[[], None] = lambda: None,
) -> Iterator[KVSync]:
    """Keeps the chunk KV that is there in step with the documents; computes none. `remotes` are the
    remote tiers in use; `engines`, if any, write there and keep chunk KV of their own. `on_owing`:
    see `StoredKV`."""
    with ExitStack() as stack:
        tiers = [stack.enter_context(closing(open_tier(cfg))) for cfg in remotes]
        table = open_table(kb.folder)
        if table is not None:
            stack.callback(table.close)
        kept = StoredKV(kb.folder, remotes=tiers, engines=engines, on_owing=on_owing)
        if engines:
            kept.note_places()
        yield KVSync(kb, table, kept)


def remove_with_kv(
    kb: KnowledgeBase, ids: Sequence[DocumentId], remotes: Sequence[TierConfig] = ()
) -> Written:
    """Remove documents and their chunk KV where no store is open."""
    with sync_without_model(kb, remotes) as sync:
        return remove_documents(kb, ids, sync)


class EncodedNotes:
    """Notes of chunks that were encoded. They say what was looked at, not what a tier still has:
    chunk KV that was evicted or deleted since is not missed."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    def covers(self, encoding: ContextId, state: str) -> bool:
        """Whether all chunks of the catalogue in `state` were offered to this encoding."""
        return self._read().get(encoding.hex()) == state

    def put(self, encoding: ContextId, state: str) -> None:
        self._write({**self._read(), encoding.hex(): state})

    def move(self, before: str, after: str) -> None:
        """Chunks went and none came: what covered all of them still does."""
        notes = self._read()
        moved = {name: after if state == before else state for name, state in notes.items()}
        if moved != notes:
            self._write(moved)

    def _read(self) -> dict[str, str]:
        try:
            found = json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read (%s): every chunk is looked at", self._path, error)
            return {}
        return found if isinstance(found, dict) else {}

    def _write(self, notes: dict[str, str]) -> None:
        with atomic_file(self._path) as file:
            file.write(f"{json.dumps(notes)}\n".encode())
