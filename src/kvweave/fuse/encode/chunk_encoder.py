"""The encoder that ingest is handed: chunks in, chunk KV in the store."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Protocol, TypeVar

from kvweave.errors import ConfigError
from kvweave.fuse.encode.anchors import REPEAT
from kvweave.fuse.encode.chunk_pass import Prefix, encode_chunks, encode_prefix, passes
from kvweave.fuse.encode.contexts import (
    ISOLATED,
    context_filler,
    filler_of,
    filler_passages,
    variant_name,
)
from kvweave.fuse.encode.extras import compute_extras
from kvweave.fuse.encode.preparation import Preparation
from kvweave.fuse.encode.save_log import SaveLog, Saves
from kvweave.fuse.protocol import FusionDecoder
from kvweave.kv.format.codec import LayerKV
from kvweave.kv.format.objects import pack_chunk
from kvweave.kv.keys import ChunkKey, KeyContext, make_chunk_key
from kvweave.kv.provenance import CHUNK
from kvweave.kv.residency import Residency
from kvweave.kv.store import KVStore
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import Chunk, ChunkId

T = TypeVar("T")
log = logging.getLogger(__name__)

SAVE_WAIT_S = 600.0  # ingest waits for a slow disk rather than drop what it has computed
# Token ids of a chunk to the ids of its neighbours, nearest first; None: none were chosen yet.
NeighboursOf = Callable[[Sequence[int]], Sequence[ChunkId] | None]


@dataclass(frozen=True, slots=True)
class Texts:
    """Token ids that preparation needs besides the chunks'."""

    filler: tuple[int, ...] = ()
    repeat: tuple[int, ...] = ()  # asks for a repetition, answer header included
    passage_ends: tuple[int, ...] = ()  # tokens of filler:1, filler:2, … as far as there is any

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, preparation: Preparation, closing: Sequence[int] = ()
    ) -> "Texts":
        """`closing` is what the chat template puts behind the user's words."""
        repeat = (*tokenizer.encode_text(REPEAT), *closing)
        filler = context_filler(tokenizer, preparation.variant)
        if not filler:
            return cls(repeat=repeat)
        lengths = (len(tokenizer.encode_text(passage)) for passage in filler_passages())
        return cls(filler, repeat, tuple(accumulate(lengths)))


class RunAlone(Protocol):
    """Runs a job while nothing else uses the decoder, and returns its result."""

    def __call__(self, job: Callable[[], T]) -> T: ...


def run_at_once(job: Callable[[], T]) -> T:
    """A `RunAlone` for a decoder that nothing else uses: on the calling thread, at once."""
    return job()


class ChunkEncoder:
    """Computes and saves the KV of chunks that the store does not have yet.

    Each chunk is stored isolated, and behind its encoding context if there is one. Idempotent by
    key, so a run that was killed goes on where it stopped. For one thread; the decoder is used
    through `run_alone`, a batch at a time. Holds no lock on the store: others may read meanwhile.
    """

    def __init__(
        self,
        decoder: FusionDecoder,
        store: KVStore,
        context: KeyContext,
        preparation: Preparation | None = None,
        texts: Texts | None = None,
        *,
        neighbours_of: NeighboursOf | None = None,
        run_alone: RunAlone = run_at_once,
    ) -> None:
        """`neighbours_of` knows what each chunk was or will be computed behind, for the encoding
        context of that name. `run_alone` does all computing: where an engine shares the decoder it
        is `Engine.run_alone`."""
        self.preparation = preparation or Preparation.parse(ISOLATED)
        self.texts = texts or Texts()
        variant = self.preparation.variant
        if variant.kind != ISOLATED and not self.texts.filler:
            raise ConfigError(f"an encoder behind {variant} needs the filler's token ids")
        if variant.kind == "neighbours" and neighbours_of is None:
            raise ConfigError("an encoder behind neighbours needs to be told who they are")
        self.decoder = decoder
        self.store = store
        self._base = context
        self._neighbours_of = neighbours_of
        beside = "".join(f"+{name}" for name in self.preparation.extras)  # other bytes, other key
        name = variant_name(variant, self.texts.filler)
        self.encoding_context = name  # with a digest of the filler, and nothing of what lies beside
        self._isolated = replace(context, variant=ISOLATED + beside)
        filled = variant_name(filler_of(variant), self.texts.filler)
        self._filled = replace(context, variant=filled)
        self._context = replace(context, variant=name + beside)
        if variant.kind == "neighbours":  # what they bring is used with every pass, never served
            store.give_way(self._filled.context_id())
        self.run_alone = run_alone
        self._saves = SaveLog(store)
        self._prefixes: dict[tuple[int, ...], Prefix] = {}

    def behind(
        self, preamble_ids: tuple[int, ...], tenant_salt: str | None = None
    ) -> "ChunkEncoder":
        """Another that is the same but for what stands in front of all chunks, and whose they are;
        None: the same tenant's. Computes nothing."""
        salt = self._base.tenant_salt if tenant_salt is None else tenant_salt
        return ChunkEncoder(
            self.decoder,
            self.store,
            replace(self._base, preamble_ids=preamble_ids, tenant_salt=salt),
            self.preparation,
            self.texts,
            neighbours_of=self._neighbours_of,
            run_alone=self.run_alone,
        )

    @property
    def context(self) -> KeyContext:
        """What the KV of all its chunks depends on."""
        return self._context

    @property
    def preamble_ids(self) -> tuple[int, ...]:
        """What stands in front of every chunk this encoder computes."""
        return self._context.preamble_ids

    @property
    def preamble(self) -> Prefix:
        """The preamble's KV, computed on first use."""
        return self._prefix(())

    @property
    def filled(self) -> Prefix:
        """The KV of preamble and filler, computed on first use."""
        return self._prefix(self.texts.filler)

    def key(self, token_ids: Sequence[int]) -> ChunkKey:
        """The name of a chunk's KV under this model, preamble, encoding context and tenant.

        Behind neighbours it is the name for those it has now; without any there is nothing between
        preamble and chunk, and before they were chosen nothing is stored under the name.
        """
        if self._neighbours_of is None or self.preparation.variant.kind != "neighbours":
            return make_chunk_key(self._context, token_ids)
        neighbours = self._neighbours_of(token_ids)
        if neighbours is None:
            return make_chunk_key(self._context, token_ids)
        return self.key_behind(token_ids, neighbours)

    def key_behind(self, token_ids: Sequence[int], neighbours: Sequence[ChunkId]) -> ChunkKey:
        """The name of its KV behind these neighbours."""
        if not neighbours:
            return self.exact_key(token_ids)
        return make_chunk_key(self._context, token_ids, neighbours)

    def exact_key(self, token_ids: Sequence[int]) -> ChunkKey:
        """The name of its isolated KV, which is exact right behind the preamble."""
        return make_chunk_key(self._isolated, token_ids)

    def filled_key(self, token_ids: Sequence[int]) -> ChunkKey:
        """The name of its KV right behind preamble and filler, with nothing beside it: what it
        brings where it is a neighbour."""
        return make_chunk_key(self._filled, token_ids)

    def encode(self, chunks: Sequence[Chunk]) -> None:
        """Compute and save what is absent. Raises what the device raises; the store never does.

        What stands behind neighbours comes later, when all chunks can be searched: see
        `neighbour_encoder`.

        A chunk with values that the codec cannot hold is counted, named in the log and left out:
        requests compute it.
        """
        self._encode(chunks, self.exact_key, ())
        if self.preparation.variant.kind == "filler":
            self._encode(chunks, self.key, self.texts.filler)

    def _encode(
        self,
        chunks: Sequence[Chunk],
        key_of: Callable[[Sequence[int]], ChunkKey],
        context_ids: tuple[int, ...],
    ) -> None:
        todo = self.absent(chunks, key_of)
        for run in passes([len(chunk.token_ids) for chunk in todo]):
            batch = [todo[i] for i in run]
            made, extras, seconds = self.run_alone(partial(self._compute, batch, context_ids))
            per_row_s = seconds / sum(len(chunk.token_ids) for chunk in batch)
            for chunk, layers, each in zip(batch, made, extras, strict=True):
                cost_s = per_row_s * len(chunk.token_ids)
                self.save(chunk, key_of(chunk.token_ids), layers, each, cost_s)

    def _compute(
        self, batch: Sequence[Chunk], context_ids: tuple[int, ...]
    ) -> tuple[list[list[LayerKV]], list[dict[str, bytes]], float]:
        """KV of a batch, its extras, and how long it took. All that the decoder does."""
        started_s = time.perf_counter()
        prefix = self._prefix(context_ids)
        made = encode_chunks(self.decoder, prefix, [chunk.token_ids for chunk in batch])
        extras = self.extras(prefix, batch, made)
        return made, extras, time.perf_counter() - started_s

    def save(
        self,
        chunk: Chunk,
        key: ChunkKey,
        layers: Sequence[LayerKV],
        extras: dict[str, bytes],
        cost_s: float,
    ) -> None:
        """Save one chunk's KV with its id and its extras."""
        self.store.metrics.count("kv_chunks_encoded_total")
        try:
            beside = {CHUNK: chunk.id.encode(), **extras}
            packed = pack_chunk(key, layers, self._context.codec, beside)
        except ValueError as error:
            log.warning("chunk %s is not saved: %s", chunk.id, error)
            self.store.metrics.count("kv_saves_dropped_total", reason="not representable")
            self._saves.add_dropped()
            return
        self._saves.add(self.store.save(packed, cost_s=cost_s, wait_s=SAVE_WAIT_S))

    def saves(self) -> Saves:
        """What became of all that it saved, since it was made. Waits for a slow disk."""
        return self._saves.finish(SAVE_WAIT_S)

    def _prefix(self, context_ids: tuple[int, ...]) -> Prefix:
        if context_ids not in self._prefixes:
            ids = (*self.preamble_ids, *context_ids)
            self._prefixes[context_ids] = encode_prefix(self.decoder, ids)
        return self._prefixes[context_ids]

    def extras(
        self, prefix: Prefix, batch: Sequence[Chunk], made: Sequence[Sequence[LayerKV]]
    ) -> list[dict[str, bytes]]:
        """The extras of each chunk, which lie beside its KV."""
        ids = [chunk.token_ids for chunk in batch]
        names, repeat_ids = self.preparation.extras, self.texts.repeat
        return compute_extras(self.decoder, names, prefix, ids, made, repeat_ids)

    def absent(
        self, chunks: Sequence[Chunk], key_of: Callable[[Sequence[int]], ChunkKey]
    ) -> list[Chunk]:
        """Chunks without KV, each once, longest first so that a pass holds chunks of a length."""
        by_key = {key_of(chunk.token_ids): chunk for chunk in chunks if chunk.token_ids}
        self.store.confirm(by_key)  # removed elsewhere, and ingested again
        peeks = self.store.peek(list(by_key))
        absent = [
            chunk
            for chunk, peek in zip(by_key.values(), peeks, strict=True)
            if peek.residency is Residency.ABSENT
        ]
        return sorted(absent, key=lambda chunk: -len(chunk.token_ids))
