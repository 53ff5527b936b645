"""Which chunks stand in front of which when their KV is computed: the neighbours of a chunk.

    a chunk gets KV     entry written · KV saved

Here the knowledge base, which knows what is near, meets the encoder, which computes behind it.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from kvweave.app.library.stored_kv import KV_FOLDER, StoredKV
from kvweave.calibrate.encodings import Nearest, TokenIds
from kvweave.corpus.chunker import make_chunk_id
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder, NeighboursOf
from kvweave.fuse.encode.neighbour_encoder import NeighbourEncoder
from kvweave.fuse.encode.neighbour_table import FILE, NeighbourTable
from kvweave.fuse.encode.preparation import Preparation
from kvweave.ingest.report import IngestProgress, OnProgress
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.provenance import Provenance
from kvweave.types import ChunkId

BATCH = 16  # chunks that get their neighbours at a time: what a kill can cost


def neighbours_of(kb: KnowledgeBase, table: NeighbourTable, size: int) -> NeighboursOf:
    """What an encoder must know: the neighbours of a chunk, as long as all of them exist.

    Asked again for every prompt, because another process may have removed a document just now.
    """

    def find(token_ids: Sequence[int]) -> Sequence[ChunkId] | None:
        found = table.get(size, make_chunk_id(token_ids))
        if not found:
            return found
        return found if kb.catalogue.existing(found) == set(found) else None

    return find


def nearest_by_tokens(kb: KnowledgeBase, table: NeighbourTable | None, size: int) -> Nearest:
    """For measuring: the neighbours of chunks by token ids, those whose KV is served or would be.

    What ingest noted counts as long as all of it exists; for other chunks it is what ingest would
    choose now. A chunk that is not in the knowledge base has none.
    """
    noted = neighbours_of(kb, table, size) if table is not None else _none_noted

    def find(chunks: Sequence[TokenIds]) -> list[list[TokenIds]]:
        ids = [make_chunk_id(chunk) for chunk in chunks]
        found = {each: noted(chunk) for each, chunk in zip(ids, chunks, strict=True)}
        new = [each for each, others in found.items() if others is None]
        found |= kb.nearest(list(kb.catalogue.chunks(new).values()), size)
        wanted = {other for others in found.values() for other in others or ()}
        known = kb.catalogue.chunks(sorted(wanted))
        return [[known[i].token_ids for i in found[each] or () if i in known] for each in ids]

    return find


def _none_noted(_: Sequence[int]) -> Sequence[ChunkId] | None:
    return None


def open_table(folder: Path, preparation: Preparation | None = None) -> NeighbourTable | None:
    """The neighbours of the knowledge base in `folder`; None if it has none and wants none."""
    path = folder / KV_FOLDER / FILE
    wanted = preparation is not None and preparation.variant.kind == "neighbours"
    return NeighbourTable(path) if wanted or path.is_file() else None


class NeighbourKeeper:
    """Gives chunks their neighbours, and KV behind them. For the holder of the writer lock."""

    def __init__(
        self, kb: KnowledgeBase, table: NeighbourTable, encoder: ChunkEncoder, kept: StoredKV
    ) -> None:
        """`encoder` computes behind neighbours."""
        self._kb = kb
        self._table = table
        self._encoder = encoder
        self._kept = kept
        self._size = encoder.preparation.variant.size

    def give(self, tell: OnProgress | None, only: Sequence[ChunkId] | None) -> None:
        """Neighbours to chunks that have none, and KV to those that have none; of `only`, or of
        all."""
        catalogue, table = self._kb.catalogue, self._table
        second = NeighbourEncoder(self._encoder, catalogue.chunks)
        total, done = catalogue.num_chunks() if only is None else len(only), 0
        batches = (
            catalogue.all_chunks(BATCH) if only is None else catalogue.some_chunks(only, BATCH)
        )
        report = _teller(tell, total)
        report(0)
        for batch in batches:
            known = table.get_many(self._size, [chunk.id for chunk in batch])
            new = self._kb.nearest([c for c in batch if c.id not in known], self._size)
            if new:
                table.put(self._size, new)  # before the KV, which must never be without
            found = {**known, **new}
            second.encode(batch, found)
            # with nothing between preamble and chunk, isolated KV is all there is
            self._encoder.encode_isolated([c for c in batch if not found.get(c.id)])
            done += len(batch)
            report(done)

    def drop_outdated(self) -> None:
        """Entries whose neighbours would be others now, and their KV."""
        outdated: dict[str, tuple[ChunkId, ...]] = {}  # chunk to the neighbours it had
        for batch in self._kb.catalogue.all_chunks(BATCH):
            known = self._table.get_many(self._size, [chunk.id for chunk in batch])
            now = self._kb.nearest([c for c in batch if c.id in known], self._size)
            outdated |= {each: known[each] for each in now if now[each] != known[each]}
        if not outdated:
            return
        chunk_ids = [ChunkId(each) for each in outdated]
        keys = self.keys_at_hand(chunk_ids)

        def is_old(of: Provenance) -> bool:
            return bool(of.behind) and outdated.get(of.chunk) == of.behind

        # KV first: killed before the entries go, they name nothing and are computed as they are
        if self._kept.may_have_objects():
            self._kept.flush()
            self._kept.delete([*self._kept.find(is_old), *keys])
        self._table.drop(chunk_ids, self._size)

    def keys_at_hand(self, chunk_ids: Collection[ChunkId]) -> list[ChunkKey]:
        """Names of KV behind neighbours that may be in memory alone; others are found on disk."""
        chunks = self._kb.catalogue.chunks(list(chunk_ids))
        found = self._table.get_many(self._size, list(chunks))
        return [
            self._encoder.key_behind(chunks[each].token_ids, others)
            for each, others in found.items()
            if others
        ]


def _teller(tell: OnProgress | None, total: int) -> Callable[[int], None]:
    def report(done: int) -> None:
        if tell is not None:
            tell(IngestProgress("neighbours", 0, None, 0, done, "", total))

    return report
