"""The encoder that ingest is handed: chunks in, chunk KV in the store."""

import logging
import time
from collections.abc import Callable, Sequence

from kvweave.fuse.encode import Prefix, encode_chunks, encode_prefix, passes
from kvweave.fuse.protocol import Decoder
from kvweave.kv.forget import CHUNK
from kvweave.kv.keys import ChunkKey, KeyContext, make_chunk_key
from kvweave.kv.objects import pack_chunk
from kvweave.kv.residency import Residency
from kvweave.kv.store import KVStore
from kvweave.types import Chunk

log = logging.getLogger(__name__)

SAVE_WAIT_S = 600.0  # ingest waits for a slow disk rather than drop what it has computed


class ChunkEncoder:
    """Computes and saves the KV of chunks that the store does not have yet.

    Idempotent by key, so a run that was killed goes on where it stopped. For one thread, the one
    that owns the decoder. Holds no lock on the store: others may read meanwhile.
    """

    def __init__(
        self,
        decoder: Decoder,
        store: KVStore,
        context: KeyContext,
        *,
        on_saved: Callable[[int], None] | None = None,
    ) -> None:
        """`on_saved` hears how many chunks were handled each time some were."""
        self._decoder = decoder
        self._store = store
        self._context = context
        self._on_saved = on_saved
        self._preamble: Prefix | None = None

    @property
    def preamble_ids(self) -> tuple[int, ...]:
        """What stands in front of every chunk this encoder computes."""
        return self._context.preamble_ids

    @property
    def preamble(self) -> Prefix:
        """The preamble's KV, computed on first use."""
        if self._preamble is None:
            self._preamble = encode_prefix(self._decoder, self._context.preamble_ids)
        return self._preamble

    def key(self, token_ids: Sequence[int]) -> ChunkKey:
        """The name of a chunk's KV under this model, preamble and tenant."""
        return make_chunk_key(self._context, token_ids)

    def encode(self, chunks: Sequence[Chunk]) -> None:
        """Compute and save what is absent. Raises what the device raises; the store never does.

        A chunk with values that the codec cannot hold is counted, named in the log and left out:
        requests compute it.
        """
        todo = self._absent(chunks)
        for run in passes([len(chunk.token_ids) for chunk in todo]):
            batch = [todo[i] for i in run]
            started_s = time.perf_counter()
            made = encode_chunks(self._decoder, self.preamble, [chunk.token_ids for chunk in batch])
            num_rows = sum(len(chunk.token_ids) for chunk in batch)
            per_row_s = (time.perf_counter() - started_s) / num_rows
            for chunk, layers in zip(batch, made, strict=True):
                extras = {CHUNK: chunk.id.encode()}
                key = self.key(chunk.token_ids)
                try:
                    packed = pack_chunk(key, layers, self._context.codec, extras)
                except ValueError as error:
                    log.warning("chunk %s is not saved: %s", chunk.id, error)
                    self._store.metrics.count("kv_saves_dropped_total", reason="not representable")
                    continue
                cost_s = per_row_s * len(chunk.token_ids)
                self._store.save(packed, cost_s=cost_s, wait_s=SAVE_WAIT_S)
            if self._on_saved is not None:
                self._on_saved(len(batch))

    def _absent(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Chunks without KV, each once, longest first so that a pass holds chunks of a length."""
        by_key = {self.key(chunk.token_ids): chunk for chunk in chunks if chunk.token_ids}
        peeks = self._store.peek(list(by_key))
        absent = [
            chunk
            for chunk, peek in zip(by_key.values(), peeks, strict=True)
            if peek.residency is Residency.ABSENT
        ]
        return sorted(absent, key=lambda chunk: -len(chunk.token_ids))
