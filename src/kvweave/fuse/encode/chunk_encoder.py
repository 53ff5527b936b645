"""The encoder that ingest is handed: chunks in, chunk KV in the store."""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import NamedTuple, Protocol, TypeVar

import torch

from kvweave.errors import ConfigError
from kvweave.fuse.encode.chunk_pass import PASS_ROWS, ChunkPass, encode_prefix, passes, prefix_of
from kvweave.fuse.encode.contexts import (
    ISOLATED,
    filler_of,
    variant_name,
)
from kvweave.fuse.encode.extras import choose_beside, compute_extras
from kvweave.fuse.encode.preparation import Preparation, Texts
from kvweave.fuse.encode.save_log import SaveLog, Saves
from kvweave.fuse.protocol import FusionDecoder, Prefix
from kvweave.kernels.rope import Angles, rotate
from kvweave.kv.format.codec import LayerKV, is_lossless, open_codec
from kvweave.kv.format.header import LayerShape, plan_header
from kvweave.kv.format.keys import ChunkKey, KeyContext, make_chunk_key
from kvweave.kv.format.objects import pack_chunk
from kvweave.kv.lookup import Residency
from kvweave.kv.provenance import CHUNK, PROVENANCE
from kvweave.kv.store import KVStore
from kvweave.types import Chunk, ChunkId, EncodeWork

T = TypeVar("T")
log = logging.getLogger(__name__)

SAVE_WAIT_S = 600.0  # ingest waits for a slow disk rather than drop what it has computed
SLICE_S = 0.05  # where nobody says how long the decoder may be had at a time
CPU_PASS_ROWS = 512  # on a CPU more rows are no faster, and progress is told of less often
FIRST_ROW_S = 1e-3  # what a row is taken to cost before a pass was timed
# Token ids of a chunk to the ids of its neighbours, nearest first; None: none were chosen yet.
NeighboursOf = Callable[[Sequence[int]], Sequence[ChunkId] | None]


class RunAlone(Protocol):
    """Runs a job while nothing else uses the decoder, and returns its result."""

    def __call__(self, job: Callable[[], T]) -> T: ...


class Pace(Protocol):
    """When one who can wait may have the decoder. On the thread that encodes."""

    def wait(self) -> float:
        """Wait until the decoder may be had; return for how many seconds, or a layer if that takes
        longer. Raises to give up what was begun."""
        ...

    def record_hold(self, seconds: float) -> None:
        """Record how long the decoder was had."""
        ...


OnEncoded = Callable[[EncodeWork], None]  # hears of each pass; on the thread that encodes


def run_at_once(job: Callable[[], T]) -> T:
    """Run a job on the calling thread, at once: a `RunAlone` for a decoder that nothing else
    uses."""
    return job()


class EncodeJob(NamedTuple):
    """How chunks are encoded and under which names their KV is saved."""

    key_of: Callable[[Sequence[int]], ChunkKey]
    context_ids: tuple[int, ...]  # between preamble and chunk
    extras: tuple[str, ...] = ()  # made beside the KV, which is saved in place of what is there


class ChunkEncoder:
    """Computes and saves the KV of chunks that the store does not have yet.

    A chunk is stored behind its encoding context; isolated as well where it stands in front of a
    prompt (`encode_isolated`): there, and only there, isolated KV is exact. Idempotent by key, so a
    run that was killed goes on where it stopped. The decoder is used through `run_alone`, a few
    layers at a time. Any thread; two that encode the same chunk compute it twice. Holds no lock on
    the store: others may read meanwhile.
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
        name = variant_name(variant, self.texts.filler)
        self.encoding_context = name  # with a digest of the filler
        self._isolated = replace(context, variant=ISOLATED)
        filled = variant_name(filler_of(variant), self.texts.filler)
        self._filled = replace(context, variant=filled)
        self.context = replace(context, variant=name)  # what the KV of all its chunks depends on
        if variant.kind == "neighbours":  # what they bring is used with every pass, never served
            store.give_way(self._filled.context_id())
        self.run_alone = run_alone
        self._saves = SaveLog(store)
        self._prefixes: dict[tuple[int, ...], Prefix] = {}
        self._row_s = FIRST_ROW_S  # what a row took in the last pass

    def behind(
        self, preamble_ids: tuple[int, ...], tenant_salt: str | None = None
    ) -> "ChunkEncoder":
        """Return an encoder that differs only in what stands in front of all chunks, and whose they
        are; None: the same tenant's. Computes nothing."""
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
    def pass_rows(self) -> int:
        """How many rows of chunks are computed together, at most."""
        return CPU_PASS_ROWS if self.decoder.device.type == "cpu" else PASS_ROWS

    @property
    def preamble_ids(self) -> tuple[int, ...]:
        """What stands in front of every chunk this encoder computes."""
        return self.context.preamble_ids

    @property
    def preamble(self) -> Prefix:
        """The preamble's KV, computed on first use."""
        return self._prefix(())

    @property
    def filled(self) -> Prefix:
        """The KV of the preamble with the filler behind it, computed on first use."""
        return self._prefix(self.texts.filler)

    def key(self, token_ids: Sequence[int]) -> ChunkKey:
        """The name of a chunk's KV under this model, preamble, encoding context and tenant.

        Behind neighbours it is the name for those it has now; without any there is nothing between
        preamble and chunk, and before they were chosen nothing is stored under the name.
        """
        neighbours = self.neighbours(token_ids)
        if neighbours is None:
            return make_chunk_key(self.context, token_ids)
        return self.key_behind(token_ids, neighbours)

    def neighbours(self, token_ids: Sequence[int]) -> Sequence[ChunkId] | None:
        """The neighbours that a chunk has now; None: none were chosen, or it stands behind a fixed
        text."""
        if self._neighbours_of is None or self.preparation.variant.kind != "neighbours":
            return None
        return self._neighbours_of(token_ids)

    def key_behind(self, token_ids: Sequence[int], neighbours: Sequence[ChunkId]) -> ChunkKey:
        """The name of its KV behind these neighbours."""
        if not neighbours:
            return self.exact_key(token_ids)
        return make_chunk_key(self.context, token_ids, neighbours)

    def exact_key(self, token_ids: Sequence[int]) -> ChunkKey:
        """The name of its isolated KV, which is exact right behind the preamble."""
        return make_chunk_key(self._isolated, token_ids)

    def filled_key(self, token_ids: Sequence[int]) -> ChunkKey:
        """The name of its KV right behind preamble and filler: what it brings where it is a
        neighbour."""
        return make_chunk_key(self._filled, token_ids)

    def encode(
        self,
        chunks: Sequence[Chunk],
        tell: OnEncoded | None = None,
        pace: Pace | None = None,
    ) -> None:
        """Compute and save what is absent behind the encoding context. Raises what the device
        raises, and what `pace` does; the store never does.

        What stands behind neighbours comes later, when all chunks can be searched: see
        `neighbour_encoder`.

        A chunk with values that the codec cannot hold is counted, named in the log and left out:
        requests compute it.
        """
        if self._is_encoded_here:
            is_alone = self.preparation.variant.kind == ISOLATED
            work = EncodeJob(self.key, () if is_alone else self.texts.filler)
            self._encode(self.absent(chunks, self.key), work, tell, pace)

    def encode_isolated(self, chunks: Sequence[Chunk], pace: Pace | None = None) -> None:
        """Compute and save what is absent right behind the preamble: the KV that a chunk takes
        where it stands in front. Raises as `encode` does."""
        todo = self.absent(chunks, self.exact_key)
        self._encode(todo, EncodeJob(self.exact_key, ()), None, pace)

    def add_extras(
        self, chunks: Sequence[Chunk], names: Collection[str], *, isolated: bool = False
    ) -> list[ChunkKey]:
        """Encode again those chunks whose stored KV lacks some of these extras, and keep them
        beside it; returns whose. `isolated`: of the KV that they take in front.

        A chunk that is not stored is left alone, and so is one behind neighbours: see
        `NeighbourEncoder`. Raises as `encode` does.
        """
        key_of = self.exact_key if isolated else self.key
        lacking = self.find_lacking(chunks, key_of, names)
        behind = () if isolated or self.preparation.variant.kind == ISOLATED else self.texts.filler
        done: list[ChunkKey] = []
        for chunk, wanted in lacking:
            key = key_of(chunk.token_ids)
            is_alone = key == self.exact_key(chunk.token_ids)
            if is_alone or self._is_encoded_here:
                job = EncodeJob(key_of, () if is_alone else behind, wanted)
                self._encode([chunk], job, None, None)
                done.append(key)
        return done

    def find_lacking(
        self,
        chunks: Sequence[Chunk],
        key_of: Callable[[Sequence[int]], ChunkKey],
        names: Collection[str],
    ) -> list[tuple[Chunk, tuple[str, ...]]]:
        """Chunks whose stored KV lacks some of these extras, each with all that has to lie beside
        it then. Waits for headers that are not in host memory."""
        by_key = {key_of(chunk.token_ids): chunk for chunk in chunks if chunk.token_ids}
        peeks = zip(by_key, self.store.peek(list(by_key)), strict=True)
        unsure = [
            key
            for key, peek in peeks
            if peek.residency is not Residency.ABSENT and not peek.extras.issuperset(names)
        ]
        if not unsure:
            return []
        with self.store.acquire(unsure) as lease:
            headers = self.store.load(lease).headers()
        beside = {key: set(header.extras) - PROVENANCE for key, header in headers.items()}
        return [
            (by_key[key], choose_beside(names, there))
            for key, there in beside.items()
            if not there.issuperset(names)
        ]

    @property
    def can_take_exact(self) -> bool:
        """Whether isolated KV may be taken from prompts. Its keys were turned there and are turned
        back, which rounds: less than the codec does in float32, but not where that keeps all."""
        context = self._isolated
        is_coarse = self.decoder.dtype != torch.float32
        return not (is_coarse or is_lossless(context.codec, context.dtype))

    @torch.inference_mode()
    def take_exact(self, chunk: Chunk, path: Prefix) -> None:
        """Save the isolated KV of a chunk that some prompt has computed. `path` is the preamble
        with the chunk behind it."""
        start = len(self.preamble_ids)
        angles = self.decoder.angles(torch.arange(start, len(path.token_ids)))
        norm = angles.cos.square() + angles.sin.square()  # not 1 with YaRN
        back = Angles(angles.cos / norm, -angles.sin / norm)
        layers = [LayerKV(rotate(kv.k[start:], back), kv.v[start:]) for kv in path.layers]
        cost_s = self._row_s * len(chunk.token_ids)
        self.save(chunk, self.exact_key(chunk.token_ids), layers, {}, cost_s)

    def missing(self, chunks: Sequence[Chunk]) -> EncodeWork:
        """Return the chunks that `encode` would compute."""
        found = self.absent(chunks, self.key) if self._is_encoded_here else []
        lengths = [len(chunk.token_ids) for chunk in found]
        return EncodeWork(len(found), sum(lengths), sum(map(self.plain_bytes, lengths)))

    @property
    def _is_encoded_here(self) -> bool:
        """Whether `encode` computes chunk KV. Behind neighbours others do, when all chunks can be
        searched."""
        return self.preparation.variant.kind != "neighbours"

    def plain_bytes(self, num_tokens: int) -> int:
        """What a chunk's KV takes with nothing beside the layers but the chunk's id."""
        spec, context = self.decoder.spec, self.context
        shape = LayerShape(num_tokens, spec.num_kv_heads, spec.head_dim, context.dtype)
        layer_bytes = open_codec(context.codec).num_bytes(shape)
        beside = {CHUNK: 1}  # a page
        codec, layers = context.codec, spec.num_layers
        return plan_header(bytes(32), shape, codec, "", layers, layer_bytes, beside).total_bytes

    def _encode(
        self, todo: Sequence[Chunk], job: "EncodeJob", tell: OnEncoded | None, pace: Pace | None
    ) -> None:
        for run in passes([len(chunk.token_ids) for chunk in todo], self.pass_rows):
            batch = [todo[i] for i in run]
            num_rows = sum(len(chunk.token_ids) for chunk in batch)
            prefix = self._prefix_in_turns(job.context_ids, pace)
            made, seconds = self._compute_in_turns(
                prefix, [chunk.token_ids for chunk in batch], pace
            )
            self._row_s = seconds / num_rows
            extras: list[dict[str, bytes]] = [{} for _ in batch]
            if job.extras:
                work = partial(self.extras, job.extras, prefix, batch, made)
                extras, _ = self._turn(_whole(work), pace)
            num_bytes = 0
            for chunk, layers, each in zip(batch, made, extras, strict=True):
                cost_s = seconds / num_rows * len(chunk.token_ids)
                key = job.key_of(chunk.token_ids)
                if job.extras:  # in place of what is there
                    self.store.delete([key])
                num_bytes += self.save(chunk, key, layers, each, cost_s)
            if tell is not None:
                tell(EncodeWork(len(batch), num_rows, num_bytes))

    def _compute_in_turns(
        self, prefix: Prefix, chunks: Sequence[Sequence[int]], pace: Pace | None
    ) -> tuple[list[list[LayerKV]], float]:
        """Compute the KV of some chunks in one pass; return it and how long the decoder was had."""
        begun: list[ChunkPass] = []

        def advance(most_s: float) -> bool:
            if not begun:
                begun.append(ChunkPass(self.decoder, prefix, chunks))
            return begun[0].advance(most_s)

        seconds, is_done = 0.0, False
        while not is_done:
            is_done, took_s = self._turn(advance, pace)
            seconds += took_s
        return begun[0].made, seconds

    def _turn(self, job: Callable[[float], T], pace: Pace | None) -> tuple[T, float]:
        """Run a job when the decoder may be had, and tell it for how many seconds; return its
        result and how long it took."""
        most_s = SLICE_S if pace is None else pace.wait()

        def run_timed() -> tuple[T, float]:
            started_s = time.perf_counter()
            done = job(most_s)
            return done, time.perf_counter() - started_s

        done, took_s = self.run_alone(run_timed)
        if pace is not None:
            pace.record_hold(took_s)
        return done, took_s

    def save(
        self,
        chunk: Chunk,
        key: ChunkKey,
        layers: Sequence[LayerKV],
        extras: dict[str, bytes],
        cost_s: float,
    ) -> int:
        """Save one chunk's KV with its id and its extras; returns its bytes, 0 if it has no form
        that can be saved."""
        self.store.metrics.count("kv_chunks_encoded_total")
        try:
            beside = {CHUNK: chunk.id.encode(), **extras}
            packed = pack_chunk(key, layers, self.context.codec, beside)
        except ValueError as error:
            log.warning("chunk %s is not saved: %s", chunk.id, error)
            self.store.metrics.count("kv_saves_dropped_total", reason="not representable")
            self._saves.add_dropped()
            return 0
        self._saves.add(self.store.save(packed, cost_s=cost_s, wait_s=SAVE_WAIT_S))
        return packed.header.total_bytes

    def saves(self) -> Saves:
        """Return what became of all that was saved since this encoder was made. Waits for a slow
        disk."""
        return self._saves.finish(SAVE_WAIT_S)

    def _prefix(self, context_ids: tuple[int, ...]) -> Prefix:
        if context_ids not in self._prefixes:
            ids = (*self.preamble_ids, *context_ids)
            self._prefixes[context_ids] = encode_prefix(self.decoder, ids)
        return self._prefixes[context_ids]

    def _prefix_in_turns(self, context_ids: tuple[int, ...], pace: Pace | None) -> Prefix:
        """Compute a prefix as `_prefix` does, on a thread that does not have the decoder yet."""
        if context_ids not in self._prefixes:
            ids = (*self.preamble_ids, *context_ids)
            if not ids:
                return Prefix((), ())
            (layers,), _ = self._compute_in_turns(Prefix((), ()), [ids], pace)
            turned, _ = self._turn(_whole(partial(prefix_of, self.decoder, ids, layers)), pace)
            self._prefixes[context_ids] = turned
        return self._prefixes[context_ids]

    def extras(
        self,
        names: Sequence[str],
        prefix: Prefix,
        batch: Sequence[Chunk],
        made: Sequence[Sequence[LayerKV]],
    ) -> list[dict[str, bytes]]:
        """Compute the extras of these names of each chunk, which lie beside its KV."""
        ids = [chunk.token_ids for chunk in batch]
        return compute_extras(self.decoder, names, prefix, ids, made, self.texts.repeat)

    def absent(
        self, chunks: Sequence[Chunk], key_of: Callable[[Sequence[int]], ChunkKey]
    ) -> list[Chunk]:
        """Chunks without KV on some rank, each once, longest first so that a pass holds chunks of a
        length."""
        by_key = {key_of(chunk.token_ids): chunk for chunk in chunks if chunk.token_ids}
        self.store.confirm(by_key)  # removed elsewhere, and ingested again
        peeks = self.store.peek(list(by_key))
        is_absent = torch.tensor([float(peek.residency is Residency.ABSENT) for peek in peeks])
        absent_on = self.decoder.sum_over_ranks(is_absent).tolist()
        absent = compress(by_key.values(), absent_on)
        return sorted(absent, key=lambda chunk: -len(chunk.token_ids))


def _whole(job: Callable[[], T]) -> Callable[[float], T]:
    """Return a job that takes the time it takes, however long the decoder may be had."""
    return lambda _: job()
