"""The connector in vLLM's worker: fills the blocks of fused requests, and encodes chunks.

A fused request is prefilled by fuse/prefill.py over vLLM's own modules into a dense buffer, and
from there into the request's blocks, up to its last token: vLLM's forward pass computes that one
and draws from its logits. What vLLM has exactly is read and never written. If anything fails,
the blocks are reported, and vLLM computes them.

On the worker's one thread, but for what the store and the maker do on theirs.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from kvweave.fuse.encode.chunk_encoder import ChunkEncoder, run_at_once
from kvweave.fuse.prefill import NEVER, PromptFrame, StoredPrompt
from kvweave.fuse.protocol import FusionDecoder, Prefix
from kvweave.fuse.record import ChunkRecord, FuseRecord
from kvweave.fuse.request import PromptChunk
from kvweave.fuse.transfer.rooms import OwnRoom
from kvweave.hosts.vllm.chunk_maker import ChunkMaker, Turns, encode_order
from kvweave.hosts.vllm.identity import ChunkNames, ModelIdentity
from kvweave.hosts.vllm.kv_blocks import KVBlocks
from kvweave.hosts.vllm.lora import Adapter
from kvweave.hosts.vllm.orders import (
    EncodeOrder,
    ForgetOrder,
    FuseOrder,
    StepOrders,
    StepReport,
)
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.store import KVStore
from kvweave.model.sequence_kv import SequenceKV
from kvweave.reasons import Reason

log = logging.getLogger(__name__)

EncoderKey = tuple[tuple[int, ...], str, Adapter | None]  # preamble, tenant
KEPT_ENCODERS = 8  # preambles whose KV, with the filler's behind it, stays in memory


class UnfilledFront(Exception):
    """A request begins with blocks of one that was left to vLLM, on every rank."""


class WorkerHalf:
    """Fills blocks of fused requests and encodes chunks, in the worker. Close it."""

    def __init__(
        self,
        decoder: FusionDecoder,
        blocks: KVBlocks,
        store: KVStore,
        identity: ModelIdentity,
        adapt: Callable[[Adapter], FusionDecoder] | None = None,
    ) -> None:
        """`decoder` computes what `identity` names, `adapt` gives one with an adapter on it; None:
        no request has any. Closes the store."""
        self._decoder = decoder
        self._adapt = adapt
        self._blocks = blocks
        self._store = store
        self._identity = identity
        self._turns = Turns()
        self._is_alone = identity.num_ranks == 1  # else ranks compute together, in steps alone
        self._maker = ChunkMaker(self._work_off, has_thread=self._is_alone)
        self._encoders: OrderedDict[EncoderKey, ChunkEncoder] = OrderedDict()
        self._encoders_lock = threading.Lock()  # the maker's thread asks for them too
        self._buffer: SequenceKV | None = None
        self._report = StepReport()
        self._failed_blocks: set[int] = set()
        self._gone: list[ChunkKey] = []  # deleted since the last report

    # ---- a step

    def fill(self, orders: StepOrders) -> None:
        """Before the forward pass: delete what is no more, fill blocks. Encode orders are noted."""
        for gone in orders.forget:
            self._work_off(gone)
            self._maker.put(gone)  # once more, behind what is being encoded
        for order in orders.fuse:
            started_s = time.perf_counter()
            try:
                record = self._fuse(order)
            except Exception as error:  # whatever it was: vLLM computes what was not filled
                if not (self._is_alone or isinstance(error, UnfilledFront)):
                    raise  # other ranks are waiting for this one in the middle of a pass
                log.exception("request %s could not be fused; it is computed", order.request_id)
                self._store.metrics.count("vllm_fuse_failures_total")
                self._leave(order, {"way": "failed"})
                continue
            if record is None:
                self._leave(order, {"way": "exact", "why": str(Reason.CLOSE_CALL)})
                continue
            took_ms = (time.perf_counter() - started_s) * 1e3
            self._report.fused[order.request_id] = _reply_fields(record, took_ms)
        for encode in orders.encode:
            self._maker.put(encode)

    def rest(self, orders: StepOrders) -> None:
        """After the forward pass, or in a step without one: a turn for the maker."""
        if self._is_alone:
            self._turns.give(is_idle=orders.is_idle)
        elif orders.has_turn:
            self._maker.work_off_next()

    def take_report(self) -> StepReport:
        settled, made = self._maker.take_settled()
        self._report.add(StepReport(settled=settled, made=list(made)))
        gone, self._gone = self._gone, []
        self._report.lost += gone
        report, self._report = self._report, StepReport()
        return report

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def close(self) -> None:
        self._maker.close()
        self._turns.close()
        self._store.close()

    # ---- fusing

    def _num_had(self, order: FuseOrder) -> int:
        """Number of blocks in front that vLLM has."""
        return order.num_local // self._blocks.block_tokens

    def _leave(self, order: FuseOrder, told: dict[str, Any]) -> None:
        """Leave a request to vLLM, which computes blocks that are reported."""
        self._failed_blocks.update(order.block_ids[self._num_had(order) :])
        self._report.fused[order.request_id] = told

    def _fuse(self, order: FuseOrder) -> FuseRecord | None:
        """Fill the blocks of a request. None: its first token was a close call, and they are to be
        computed."""
        if not self._failed_blocks.isdisjoint(order.block_ids[: self._num_had(order)]):
            raise UnfilledFront("it begins with blocks that were not filled in this step")
        ids, wish, spec = order.token_ids, order.wish, self._identity.spec
        names = self._names(ids[: wish.preamble], wish.tenant, order.lora)
        encoder = self._encoder(ids[: wish.preamble], wish.tenant, order.lora)
        parts = wish.parts()
        if wish.is_encoded_first:
            self._report.made += self._encode(_all_of(order), encoder)
        exact, num_exact = self._exact(order, encoder)
        computed = dict.fromkeys(range(num_exact), Reason.IN_VLLM)
        chunks = []
        for place, part in enumerate(parts):
            tokens = ids[part.start : part.end]
            if not part.is_chunk:
                computed.setdefault(place, Reason.BETWEEN_CHUNKS)
                chunks.append(PromptChunk(tokens, NEVER, NEVER))
            else:
                chunks.append(PromptChunk(tokens, names.key(tokens), names.exact_key(tokens)))
        start = wish.question_start
        asked = None if wish.asked is None else (wish.asked[0] - start, wish.asked[1] - start)
        frame = PromptFrame(exact, ids[start:], num_exact, asked, encoder.encoding_context)
        strategy = wish.strategy(spec.num_layers)
        kv = self._room(len(ids))
        with StoredPrompt(spec.num_layers, chunks, self._store, strategy, computed) as stored:
            if not self._is_alone:
                stored.arrive_on_all_ranks(encoder.decoder)
            ordered = stored.order(encoder.decoder, frame, OwnRoom(kv), wish.ratio)
            self._write(order, kv)  # a GPU gets there behind the pass, which is waited for once
            made = ordered.finish()
        record = made.record
        lost = {chunk.start for chunk in record.chunks if _is_lost(chunk)}
        for part in parts:
            if part.start in lost:
                name = names.exact_key if wish.stands_in_front(part) else names.key
                self._report.lost.append(name(ids[part.start : part.end]))
        return None if wish.close_call and made.lead < wish.close_call else record

    def _exact(self, order: FuseOrder, encoder: ChunkEncoder) -> tuple[Prefix, int]:
        """Exact KV in front, and how many parts behind the preamble it covers: what vLLM has, up to
        the end of a part, if that can be read; else the preamble's."""
        ends = [part.end for part in order.wish.parts() if part.end <= order.num_local]
        if not ends or not order.is_local_ready or not self._blocks.can_read:
            return encoder.preamble, 0
        layers = self._blocks.read(order.block_ids, ends[-1])
        return Prefix(order.token_ids[: ends[-1]], tuple(layers)), len(ends)

    def _write(self, order: FuseOrder, kv: SequenceKV) -> None:
        start, end = order.num_local, len(order.token_ids) - 1
        slots = self._blocks.slots(order.block_ids, start, end)
        for layer in range(self._identity.spec.num_layers):
            keys, values = kv.keys(layer)[start:end], kv.values(layer)[start:end]
            self._blocks.write(layer, keys, values, slots)

    def _room(self, num_tokens: int) -> SequenceKV:
        """Memory for a prompt, kept from request to request: it is overwritten from the front."""
        decoder = self._decoder
        if self._buffer is None or self._buffer.capacity < num_tokens:
            spec = self._identity.spec
            self._buffer = SequenceKV(spec, num_tokens, decoder.dtype, decoder.device)
        self._buffer.clear()
        return self._buffer

    # ---- encoding and forgetting

    def _work_off(self, order: EncodeOrder | ForgetOrder) -> list[ChunkKey]:
        """Carry out an order on any thread. Returns keys of what is stored from now on."""
        if isinstance(order, EncodeOrder):
            return self._encode(order)
        keys = self._store.delete_chunks(order.chunk_ids)
        log.info("%d chunks are no more: %d stored KV deleted", len(order.chunk_ids), len(keys))
        self._gone.extend(keys)
        return []

    def _encode(self, order: EncodeOrder, encoder: ChunkEncoder | None = None) -> list[ChunkKey]:
        """Any thread: what needs the model is done on the worker's."""
        encoder = encoder or self._encoder(order.preamble_ids, order.tenant, order.lora)
        names = self._names(order.preamble_ids, order.tenant, order.lora)
        return encode_order(encoder, names, order)

    def _decoder_with(self, lora: Adapter | None) -> FusionDecoder:
        if lora is None:
            return self._decoder
        assert self._adapt is not None, "vLLM has LoRA on where a request has an adapter"
        return self._adapt(lora)

    def _names(
        self, preamble_ids: tuple[int, ...], tenant: str, lora: Adapter | None
    ) -> ChunkNames:
        return self._identity.with_lora(lora).names(preamble_ids, tenant)

    def _encoder(
        self, preamble_ids: tuple[int, ...], tenant: str, lora: Adapter | None = None
    ) -> ChunkEncoder:
        """One that was used lately, or another that has computed nothing yet."""
        key, identity = (preamble_ids, tenant, lora), self._identity
        with self._encoders_lock:
            made = self._encoders.pop(key, None) or ChunkEncoder(
                self._decoder_with(lora),
                self._store,
                self._names(preamble_ids, tenant, lora).context,
                identity.preparation,
                identity.texts,
                run_alone=self._turns.run if self._is_alone else run_at_once,
            )
            self._encoders[key] = made
            while len(self._encoders) > KEPT_ENCODERS:
                self._encoders.popitem(last=False)
        return made


def _all_of(order: FuseOrder) -> EncodeOrder:
    """All chunks of a prompt: those that are stored are left alone."""
    ids, wish = order.token_ids, order.wish
    front: list[tuple[int, ...]] = []
    behind: list[tuple[int, ...]] = []
    for part in wish.parts():
        if part.is_chunk:
            (front if wish.stands_in_front(part) else behind).append(ids[part.start : part.end])
    front_ids, behind_ids = tuple(front), tuple(behind)
    return EncodeOrder(0, ids[: wish.preamble], wish.tenant, front_ids, behind_ids, order.lora)


def _is_lost(chunk: ChunkRecord) -> bool:
    """Whether its bytes were wanted and did not come."""
    return chunk.why not in (None, Reason.BETWEEN_CHUNKS, Reason.IN_VLLM)


def _reply_fields(record: FuseRecord, took_ms: float) -> dict[str, Any]:
    """What a reply says of a fused prompt."""
    lost = [chunk.why for chunk in record.chunks if _is_lost(chunk)]
    told: dict[str, Any] = {
        "reuse": record.strategy,
        "ratio": record.ratio,
        **record.counts,
        "work": round(record.work, 4),
        "load_ms": round(record.stages.load, 1),
        "select_ms": round(record.stages.select, 1),
        "compute_ms": round(record.stages.compute, 1),
        "fill_ms": round(took_ms, 1),
        "loaded_bytes": record.loaded_bytes,
    }
    return {**told, "lost": lost} if lost else told
