"""Chunk KV behind neighbours: preamble, filler, the KV of similar chunks, then the chunk.

    preamble ‖ filler ‖ nearest ‖ … ‖ farthest ‖ chunk      only the chunk's rows are kept

Neighbours bring the KV they have behind the filler: isolated KV there would be a beginning each,
which nothing in the middle of a prompt is. It is taken as it is stored, rounded by its codec, so
the same neighbours give the same bytes whether their KV was still there or had to be computed
again. What had to be is stored: a chunk is a neighbour of many. No request is served from it, so
it gives way to all that is.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from kvweave.fuse.encode.chunk_encoder import SAVE_WAIT_S, ChunkEncoder
from kvweave.fuse.encode.chunk_pass import encode_chunks, passes
from kvweave.fuse.encode.contexts import neighbour_prefix
from kvweave.kv.format.codec import DTYPES, LayerKV
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.format.objects import EncodedLayer, PackedChunk, layer_of, pack_chunk
from kvweave.kv.lookup import Residency
from kvweave.kv.provenance import BEHIND, CHUNK, pack_ids
from kvweave.types import Chunk, ChunkId

log = logging.getLogger(__name__)

PASS_BYTES = 256 << 20  # of stitched KV held at a time: ten times what is computed behind it

ChunksById = Callable[[Sequence[ChunkId]], Mapping[ChunkId, Chunk]]
Filled = tuple[Chunk, list[LayerKV]]  # a chunk and its KV behind the filler


class NeighbourEncoder:
    """Computes and saves what is absent. Idempotent by key; for the thread of its encoder.

    Neighbours must be chosen and noted before: what this saves carries their text, and deleting one
    of them must find it (`NeighbourTable.users_of`).
    """

    def __init__(
        self, encoder: ChunkEncoder, chunks_by_id: ChunksById, pass_bytes: int = PASS_BYTES
    ) -> None:
        self._encoder = encoder
        self._chunks_by_id = chunks_by_id
        self._pass_bytes = pass_bytes
        self._unstorable: set[ChunkId] = set()  # what the codec cannot hold, as far as it was met

    def encode(
        self, chunks: Sequence[Chunk], neighbours: Mapping[ChunkId, Sequence[ChunkId]]
    ) -> int:
        """Compute and save the KV of `chunks` behind their `neighbours`; returns how many.

        A chunk without any is left out: its isolated KV is all there is.
        """
        behind_of = {chunk.token_ids: neighbours.get(chunk.id, ()) for chunk in chunks}

        def key_of(token_ids: Sequence[int]) -> ChunkKey:
            return self._encoder.key_behind(token_ids, behind_of[tuple(token_ids)])

        todo = self._encoder.absent([c for c in chunks if neighbours.get(c.id)], key_of)
        ids = {other for chunk in todo for other in neighbours[chunk.id]}
        self._encode_all(todo, neighbours, (), self._chunks_by_id(sorted(ids)))
        return len(todo)

    def add_extras(self, chunks: Sequence[Chunk], names: Collection[str]) -> list[ChunkKey]:
        """Encode again those chunks behind neighbours whose stored KV lacks some of these extras,
        and keep them beside it; returns whose. See `ChunkEncoder.add_extras`."""
        noted = {chunk.id: self._encoder.neighbours(chunk.token_ids) for chunk in chunks}
        neighbours = {chunk_id: others for chunk_id, others in noted.items() if others}
        known = self._chunks_by_id(sorted({i for others in neighbours.values() for i in others}))
        behind = [c for c in chunks if c.id in neighbours and known.keys() >= {*neighbours[c.id]}]
        lacking = self._encoder.find_lacking(behind, self._encoder.key, names)
        for chunk, wanted in lacking:
            self._encode_all([chunk], neighbours, wanted, known)  # also of one that went just now
        return [self._encoder.key(chunk.token_ids) for chunk, _ in lacking]

    def _encode_all(
        self,
        todo: Sequence[Chunk],
        neighbours: Mapping[ChunkId, Sequence[ChunkId]],
        names: Sequence[str],
        known: Mapping[ChunkId, Chunk],
    ) -> None:
        """Compute and save chunks with these extras; `known` has the neighbours of all."""
        behind = [[known[other] for other in neighbours[chunk.id]] for chunk in todo]
        front_len = len(self._encoder.preamble_ids) + len(self._encoder.texts.filler)
        lengths = [
            front_len + sum(len(other.token_ids) for other in others) + len(chunk.token_ids)
            for chunk, others in zip(todo, behind, strict=True)
        ]
        for run in passes(lengths, max(1, self._pass_bytes // self._token_bytes())):
            self._encode([todo[i] for i in run], [behind[i] for i in run], names)

    def _encode(
        self, batch: Sequence[Chunk], behind: Sequence[Sequence[Chunk]], names: Sequence[str]
    ) -> None:
        """Compute and save some chunks in one pass."""
        encoder = self._encoder
        started_s = time.perf_counter()
        made, extras, fresh = encoder.run_alone(partial(self._compute, batch, behind, names))
        num_rows = sum(len(chunk.token_ids) for chunk in batch)
        num_rows += sum(packed.header.shape.num_tokens for packed in fresh)
        per_row_s = (time.perf_counter() - started_s) / num_rows
        for packed in fresh:
            # it gives way (`ChunkEncoder`); where it finds no room no chunk lacks KV: it is no save
            encoder.store.save(packed, wait_s=SAVE_WAIT_S)
        for chunk, others, layers, each in zip(batch, behind, made, extras, strict=True):
            cost_s = per_row_s * len(chunk.token_ids)
            key = encoder.key_behind(chunk.token_ids, [other.id for other in others])
            if names:  # in place of what is there
                encoder.store.delete([key])
            encoder.save(chunk, key, layers, each, cost_s)

    def _compute(
        self, batch: Sequence[Chunk], behind: Sequence[Sequence[Chunk]], names: Sequence[str]
    ) -> tuple[list[list[LayerKV]], list[dict[str, bytes]], list[PackedChunk]]:
        """Compute all that one pass needs of the decoder: KV, its extras, and the KV of neighbours
        that is to be stored."""
        encoder = self._encoder
        chunks = {other.id: other for others in behind for other in others}
        filled = self._read_behind_filler(chunks)
        fresh: list[PackedChunk] = []
        absent = [chunks[each] for each in sorted(chunks.keys() - filled.keys())]
        for chunk, layers in self._encode_behind_filler(absent):
            packed = self._pack(chunk, layers)
            filled[chunk.id] = layers if packed is None else self._round(packed)
            fresh += [] if packed is None else [packed]
        prefixes = [
            neighbour_prefix(
                encoder.decoder,
                encoder.filled,
                [(other.token_ids, filled[other.id]) for other in others],
            )
            for others in behind
        ]
        made = encode_chunks(encoder.decoder, prefixes, [chunk.token_ids for chunk in batch])
        extras = [
            {
                **encoder.extras(names, prefix, [chunk], [layers])[0],
                BEHIND: pack_ids([other.id for other in others]),
            }
            for chunk, others, prefix, layers in zip(batch, behind, prefixes, made, strict=True)
        ]
        return made, extras, fresh

    def _read_behind_filler(self, chunks: Mapping[ChunkId, Chunk]) -> dict[ChunkId, list[LayerKV]]:
        """Read the KV behind the filler, to the device, of those chunks whose KV the store has."""
        keys = {chunk_id: self._encoder.filled_key(c.token_ids) for chunk_id, c in chunks.items()}
        stored = self._read_stored(list(keys.values()))
        return {chunk_id: stored[key] for chunk_id, key in keys.items() if key in stored}

    def _encode_behind_filler(self, chunks: Sequence[Chunk]) -> list[Filled]:
        """Compute the KV of chunks right behind the filler."""
        found: list[Filled] = []
        for run in passes([len(chunk.token_ids) for chunk in chunks]):
            batch = [chunks[i] for i in run]
            tokens = [chunk.token_ids for chunk in batch]
            made = encode_chunks(self._encoder.decoder, self._encoder.filled, tokens)
            found += zip(batch, made, strict=True)
        return found

    def _read_stored(self, keys: Sequence[ChunkKey]) -> dict[ChunkKey, list[LayerKV]]:
        """Read whole chunks from the store; those that it does not have are left out."""
        store, num_layers = self._encoder.store, self._encoder.decoder.spec.num_layers
        peeks = zip(keys, store.peek(keys), strict=True)
        # only what is there: acquiring the rest would count as requests that found nothing
        there = [key for key, peek in peeks if peek.residency is not Residency.ABSENT]
        found: dict[ChunkKey, list[LayerKV]] = {}
        with store.acquire(there) as lease:
            transfer = store.load(lease)
            for layer in range(num_layers):
                for key, encoded in transfer.wait_layer(layer).items():
                    found.setdefault(key, []).append(self._decode(encoded))
        return {key: layers for key, layers in found.items() if len(layers) == num_layers}

    def _pack(self, chunk: Chunk, layers: Sequence[LayerKV]) -> PackedChunk | None:
        """Pack computed KV for the store.

        None: it has a value that the codec cannot hold, which is logged once. Such a chunk is
        computed again whenever it is a neighbour, as keeping it here would have no bound.
        """
        key, codec = self._encoder.filled_key(chunk.token_ids), self._encoder.context.codec
        try:
            return pack_chunk(key, layers, codec, {CHUNK: chunk.id.encode()})
        except ValueError as error:
            if chunk.id not in self._unstorable:
                self._unstorable.add(chunk.id)
                log.warning("chunk %s is not saved behind the filler: %s", chunk.id, error)
                metrics = self._encoder.store.metrics
                metrics.count("kv_saves_dropped_total", reason="not representable")
            return None

    def _round(self, packed: PackedChunk) -> list[LayerKV]:
        """Return KV as the store would give it back."""
        num_layers = self._encoder.decoder.spec.num_layers
        each = (layer_of(packed.header, packed.memory, i) for i in range(num_layers))
        return [self._decode(encoded) for encoded in each]

    def _decode(self, encoded: EncodedLayer) -> LayerKV:
        """Decode a layer to a copy on the device: views of stored bytes end with their lease."""
        kv = encoded.decode()
        device = self._encoder.decoder.device
        return LayerKV(kv.k.to(device, copy=True), kv.v.to(device, copy=True))

    def _token_bytes(self) -> int:
        spec = self._encoder.decoder.spec
        size = DTYPES[self._encoder.context.dtype].itemsize
        return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * size
