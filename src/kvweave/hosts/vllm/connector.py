"""The class that vLLM loads: it speaks vLLM's language and hands everything to one of the halves.

Written against the connector interface of vLLM 0.26 to 0.32 (`KVConnectorBase_V1`): nothing is used
here that one of them has not, or calls at another moment.
"""

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import ForwardContext

from kvweave.app.library.store_tiers import check_store
from kvweave.errors import ConfigError
from kvweave.hosts.vllm.adapter import VllmDecoder
from kvweave.hosts.vllm.capabilities import config_complaints, model_complaints, refuse
from kvweave.hosts.vllm.identity import ServedModel, identify
from kvweave.hosts.vllm.kv_blocks import BackendWriter, KVBlocks
from kvweave.hosts.vllm.models import find_model
from kvweave.hosts.vllm.orders import StepOrders, StepReport
from kvweave.hosts.vllm.scheduler_half import SchedulerHalf
from kvweave.hosts.vllm.settings import read_settings
from kvweave.hosts.vllm.stats import FusionMetrics, FusionStats
from kvweave.hosts.vllm.worker_half import WorkerHalf
from kvweave.kv.store import KVStore

log = logging.getLogger("vllm.kvweave")  # vLLM shows what is below its own name


@dataclass
class FusionOrders(KVConnectorMetadata):
    """A step's orders, as vLLM carries them to the worker."""

    orders: StepOrders = field(default_factory=StepOrders)


@dataclass
class FusionReport(KVConnectorWorkerMetadata):
    """A step's report, as vLLM carries it back."""

    report: StepReport = field(default_factory=StepReport)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, FusionReport), "there is one kind of report"
        self.report.add(other.report)
        return self


class KvweaveConnector(KVConnectorBase_V1):
    """Made twice, in the scheduler's process and in the worker's."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        refuse(config_complaints(vllm_config))
        if len(kv_cache_config.kv_cache_groups) != 1:
            kinds = [type(g.kv_cache_spec).__name__ for g in kv_cache_config.kv_cache_groups]
            refuse([f"layers differ in what they cache: {', '.join(kinds)}"])
        self._config = vllm_config
        self._settings = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        check_store(self._settings.store)
        model = vllm_config.model_config
        served = ServedModel(model.model, model.revision, model.dtype, model.quantization)
        self._identity = identify(served, self._settings.preparation, self._settings.codec)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._block_tokens: int = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._held: dict[str, list[int]] = {}  # blocks by request: 0.26 tells what is new alone
        if role is KVConnectorRole.SCHEDULER:
            self._open_scheduler()

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # nobody waits for what is saved here

    # ---- in the scheduler's process

    def _open_scheduler(self) -> None:
        policy = self._kv_transfer_config.kv_load_failure_policy
        if policy != "recompute":
            log.info("kv_load_failure_policy: %s → recompute", policy)
            self._kv_transfer_config.kv_load_failure_policy = "recompute"
        hashed = getattr(self._config.cache_config, "hash_block_size", None) or self._block_tokens
        store = KVStore(self._settings.store_config(is_look=True))
        num_ranks = self._config.parallel_config.tensor_parallel_size
        self._scheduler = SchedulerHalf(self._settings, self._identity, store, hashed, num_ranks)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._half.look_at_cache(
            lambda block_hash: gpu_block_pool.get_cached_block(block_hash, [0]) is not None
        )

    def on_new_request(self, request: Any) -> None:
        self._half.plan_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._half.external_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._half.order_fill(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        is_idle = scheduler_output.total_num_scheduled_tokens == 0
        self._note_blocks(scheduler_output)
        writes = self._writes(scheduler_output)
        return FusionOrders(self._half.take_orders(writes, is_idle))

    def update_connector_output(self, connector_output: Any) -> None:
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, FusionReport):
            self._half.note_report(told.report)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._half.forget_request(request.request_id)

    def get_kv_connector_stats(self) -> FusionStats | None:
        counts = {} if self._scheduler is None else self._scheduler.take_counts()
        return FusionStats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FusionStats:
        return FusionStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> FusionMetrics:
        return FusionMetrics(*args)

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.is_owed

    def _note_blocks(self, scheduler_output: Any) -> None:
        """Follow which blocks the requests hold that are scheduled."""
        for new in scheduler_output.scheduled_new_reqs:
            self._held[new.req_id] = list(new.block_ids[0])
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self._held[request_id] = []
            self._held[request_id] += more[0] if more else []
        for request_id in scheduler_output.finished_req_ids:
            self._held.pop(request_id, None)

    def _writes(self, scheduler_output: Any) -> Iterator[tuple[str, list[int]]]:
        """By request, the blocks that the step's forward pass writes."""
        size, cached = self._block_tokens, scheduler_output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in scheduler_output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            start = computed[request_id]
            yield request_id, self._held[request_id][start // size : -(-(start + count) // size)]

    @property
    def _half(self) -> SchedulerHalf:
        assert self._scheduler is not None, "the scheduler's half is in the scheduler's process"
        return self._scheduler

    # ---- in the worker's process

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        modules = self._config.compilation_config.static_forward_context
        names = sorted(kv_caches, key=lambda name: _layer_number(name))
        attention = [modules[name] for name in names]
        model = find_model(attention[0])
        if model is None:
            raise ConfigError(
                "vLLM's model was not found: install kvweave where vLLM is, and let VLLM_PLUGINS, "
                "if it is set, name kvweave"
            )
        ranks = get_tp_group()
        identity = self._identity.of_rank(ranks.rank_in_group, ranks.world_size)
        spec = identity.spec
        refuse(model_complaints(model, spec))
        caches = [kv_caches[name] for name in names]
        writers = [BackendWriter(each) for each in attention]
        blocks = KVBlocks(caches, writers, self._block_tokens, spec.head_dim)
        store = KVStore(self._settings.store_config())
        group = ranks if ranks.world_size > 1 else None
        decoder_with = partial(VllmDecoder, model, spec, ranks=group)  # an adapter
        self._worker = WorkerHalf(decoder_with(), blocks, store, identity, decoder_with)
        tiers = ", ".join(slot.name for slot in store.inventory.slots)
        log.info(
            "kvweave fuses in %s: chunk KV %s behind %s in %s; blocks are %s",
            type(model).__name__,
            self._settings.codec,
            self._settings.preparation.variant,
            tiers,
            f"read as {blocks.reads}" if blocks.can_read else "written and not read",
        )

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.fill(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass  # all layers are filled before the pass begins

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        pass  # chunks are encoded by themselves

    def wait_for_save(self) -> None:
        pass  # 0.26 leaves it out in steps without a forward pass, which are those of the maker

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        if self._worker is None:
            return None
        if self.has_connector_metadata():
            self._worker.rest(self._orders())
        report = self._worker.take_report()
        return FusionReport(report) if report else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_blocks() if self._worker is not None else set()

    def _orders(self) -> StepOrders:
        told = self._get_connector_metadata()
        assert isinstance(told, FusionOrders), "orders come from our own scheduler half"
        return told.orders

    # ---- both

    def shutdown(self) -> None:
        for half in (self._worker, self._scheduler):
            with suppress(Exception):  # the process ends; what is not saved is a miss
                if half is not None:
                    half.close()


def _layer_number(name: str) -> int:
    """The number in a layer's name such as "model.layers.11.self_attn.attn"."""
    return int(next(part for part in name.split(".") if part.isdigit()))
