"""The connector in vLLM's scheduler: which requests are fused, and how much of them vLLM may take
for computed.

A request arrives with its spans. The store is looked into, the exact blocks that vLLM has are
counted, and the rows of either way are compared; where no strategy was named, calibration says
which may be taken (auto_reuse.py). A request that is fused gets its blocks salted and
is declared computed up to its last token: the worker fills these blocks before the forward pass. A
request that is not fused is vLLM's alone, down to its exact prefixes. What was not stored is
encoded when a request is finished, in steps in which vLLM has nothing to do.

One thread, the scheduler's. Nothing here raises for what a request says: an exception would end the
engine. Looking into the store may wait for a tier, at most `locate_deadline_s`
(kv/tiers/config.py).
"""

import hashlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

from kvweave.errors import KVWeaveError
from kvweave.fuse.request import State
from kvweave.fuse.strategy import Strategy
from kvweave.hosts.vllm.auto_reuse import AutoReuse, PermittedReuse
from kvweave.hosts.vllm.chunk_maker import BUSY_SHARE
from kvweave.hosts.vllm.identity import ModelIdentity
from kvweave.hosts.vllm.lora import Adapter, AdapterNames
from kvweave.hosts.vllm.orders import (
    EncodeOrder,
    ForgetOrder,
    FuseOrder,
    StepOrders,
    StepReport,
)
from kvweave.hosts.vllm.reuse_request import (
    AUTO,
    NAME,
    Defaults,
    Part,
    ReuseRequest,
    parse_forget,
    parse_reuse_request,
)
from kvweave.hosts.vllm.salted_hashes import salt_blocks
from kvweave.hosts.vllm.settings import HostSettings
from kvweave.kv.format.keys import ChunkKey, make_tag, tag_of
from kvweave.kv.lookup import Residency
from kvweave.kv.store import KVStore
from kvweave.reasons import Reason

log = logging.getLogger(__name__)

WORTH = 0.8  # fused only if it computes at most this share of the rows that vLLM would
LEAST_SAVED = 64  # rows: for fewer a pass of its own does not pay
MOST_MADE = 1 << 20  # keys remembered of what the worker saved

Ids = tuple[int, ...]


class ServedRequest(Protocol):
    """The part of a vLLM request that is looked at."""

    request_id: str
    prompt_token_ids: Sequence[int] | None
    kv_transfer_params: Mapping[str, Any] | None
    block_hashes: list[Any]
    _block_hasher: Callable[[Any], list[Any]] | None
    lora_request: Any
    mm_features: Sequence[Any]
    prompt_embeds: Any
    resumable: bool


@dataclass(slots=True)
class RequestPlan:
    """What was decided for a request that has spans."""

    way: Literal["fused", "exact", "refused"]
    why: str = ""
    reason: str = ""  # of `why`, without its figures: what is counted
    wish: ReuseRequest | None = None  # set exactly when fused
    salt: bytes = b""
    num_tokens: int = 0  # of its prompt
    owed: tuple[list[Ids], list[Ids]] = field(default_factory=lambda: ([], []))  # not stored: ids
    told: dict[str, Any] = field(default_factory=dict)  # more that the reply says
    preamble_ids: Ids = ()
    tenant: str = ""
    lora: Adapter | None = None


class RowCount(NamedTuple):
    """What of a prompt there is to compute, in rows through all layers."""

    plain: int  # by vLLM alone
    computed: int  # behind what vLLM has: chunks that are not stored, and gaps
    reused: int  # stored
    question: int

    def count_fused(self, strategy: Strategy, ratio: float, num_layers: int) -> float:
        """Rows of the fused way, its probe among them."""
        needs = strategy.needs(num_layers)
        wide = needs.full_width_layers / num_layers
        depth = strategy.depth(num_layers) if ratio < 1 else 1.0
        recomputed = self.reused * (wide + (1 - wide) * ratio * depth)
        return self.computed + recomputed + self.question * (1 + needs.probe_depth / num_layers)


class SchedulerHalf:
    """Decides which requests are fused, in vLLM's scheduler."""

    def __init__(
        self,
        settings: HostSettings,
        identity: ModelIdentity,
        store: KVStore,
        block_tokens: int,
        num_ranks: int = 1,
    ) -> None:
        """`block_tokens` are hashed together. `num_ranks` share the heads of `identity` out."""
        self._settings = settings
        self._identity = identity
        self._ranks = [identity.of_rank(rank, num_ranks) for rank in range(num_ranks)]
        self._store = store
        self._block_tokens = block_tokens
        self._is_cached: Callable[[Any], bool] = lambda _hash: False
        self._plans: dict[str, RequestPlan] = {}
        self._reports: dict[str, dict[str, Any]] = {}
        self._orders = StepOrders()
        self._owed: dict[int, list[ChunkKey]] = {}  # encode orders that are not settled
        self._next_order = 0
        self._turn_s = 0.0  # when ranks last had a turn in a busy step
        self._next_turn_s = 0.0  # when they may have another; infinite while they are at it
        self._counts: Counter[str] = Counter()  # since they were last taken
        self._made: dict[bytes, None] = {}  # what the worker saved: host memory is not seen here
        self._adapters = AdapterNames()
        self._auto = AutoReuse(identity)
        if settings.reuse == AUTO:
            self._auto.tell()

    def look_at_cache(self, is_cached: Callable[[Any], bool]) -> None:
        """`is_cached` says whether vLLM's prefix cache has a block of this hash."""
        self._is_cached = is_cached

    # ---- a request

    def plan_request(self, request: ServedRequest) -> None:
        """Decide what is done for a new request. Before vLLM looks it up."""
        params = request.kv_transfer_params
        if not isinstance(params, Mapping) or NAME not in params:
            return
        try:
            plan = self._plan(request, params)
        except KVWeaveError as error:
            plan = RequestPlan("refused", str(error))
        except Exception:  # ours to mend; the request is answered without us
            log.exception("planning request %s failed; it is computed", request.request_id)
            plan = RequestPlan("refused", "an error inside kvweave; see the log of vLLM")
        if plan.way == "refused":
            log.warning("request %s is not fused: %s", request.request_id, plan.why)
        elif plan.way == "fused":
            salt_blocks(request, self._num_cached(request), plan.salt)
        if plan.way != "fused":  # that is counted when it is done
            self._counts[f"way {plan.way}"] += 1
        if plan.reason:
            self._counts[f"why {plan.reason}"] += 1
        self._plans[request.request_id] = plan

    def external_tokens(self, request: ServedRequest, num_local: int) -> int:
        """Tokens behind the first `num_local`, which vLLM has, that the worker will fill."""
        plan = self._plans.get(request.request_id)
        if plan is None or plan.wish is None or num_local >= plan.wish.question_start:
            return 0
        # what was cached when it arrived may be gone: what is filled now must not be named exact
        salt_blocks(request, num_local // self._block_tokens, plan.salt)
        return plan.num_tokens - 1 - num_local

    def order_fill(
        self, request: ServedRequest, block_ids: Sequence[int], num_external: int
    ) -> None:
        """Order the filling of the last `num_external` tokens, once vLLM allocated blocks."""
        plan = self._plans.get(request.request_id)
        if plan is None or plan.wish is None or not num_external:
            return
        token_ids = tuple(request.prompt_token_ids or ())
        num_local = plan.num_tokens - 1 - num_external
        order = FuseOrder(
            request.request_id, token_ids, plan.wish, tuple(block_ids), num_local, lora=plan.lora
        )
        self._orders.fuse.append(order)

    def forget_request(self, request_id: str) -> dict[str, Any] | None:
        """Forget a request and return what its reply says of it."""
        plan = self._plans.pop(request_id, None)
        report = self._reports.pop(request_id, {})
        if plan is None:
            return None
        if self._settings.making == "idle":
            self._owe(plan)
        told = {"way": plan.way, "why": plan.why} if plan.why else {"way": plan.way}
        return {NAME: {**told, **plan.told, **report}}

    def take_counts(self) -> dict[str, int]:
        """Requests by way and tokens of fused ones by state, since this was last asked."""
        counts, self._counts = self._counts, Counter()
        return dict(counts)

    # ---- a step

    def take_orders(self, writes: Iterable[tuple[str, Iterable[int]]], is_idle: bool) -> StepOrders:
        """What the worker is to do in this step. `writes` are, by request, the blocks that the
        step's forward pass writes: what another request writes cannot be read before it."""
        orders, self._orders = self._orders, StepOrders()
        orders.is_idle = is_idle
        now_s = time.monotonic()
        orders.has_turn = is_idle or (bool(self._owed) and now_s >= self._next_turn_s)
        if orders.has_turn and not is_idle:
            self._turn_s, self._next_turn_s = now_s, math.inf
        if orders.fuse:
            written: dict[int, set[str]] = {}
            for request_id, block_ids in writes:
                for block_id in block_ids:
                    written.setdefault(block_id, set()).add(request_id)
            orders.fuse = [self._mark_ready(order, written) for order in orders.fuse]
        return orders

    def note_report(self, report: StepReport) -> None:
        """Note what the worker did."""
        for request_id, each in report.fused.items():
            if request_id in self._plans:
                self._reports[request_id] = each
            self._counts[f"way {each.get('way', 'fused')}"] += 1
            if why := each.get("why"):
                self._counts[f"why {why}"] += 1
            for state in State:
                if tokens := each.get(str(state)):
                    self._counts[f"state {state}"] += tokens
        for number in report.settled:
            self._owed.pop(number, None)
            if self._next_turn_s == math.inf:
                now_s = time.monotonic()
                self._next_turn_s = now_s + (now_s - self._turn_s) * (1 / BUSY_SHARE - 1)
        self._made.update(dict.fromkeys(report.made))
        for key in report.lost:  # evicted since, or never saved: looked for again, and made again
            self._made.pop(key, None)
        if report.lost:
            self._store.confirm([ChunkKey(key) for key in report.lost])
        while len(self._made) > MOST_MADE:
            del self._made[next(iter(self._made))]

    @property
    def is_owed(self) -> bool:
        """Whether the worker still has chunks to encode: vLLM must go on taking steps."""
        return bool(self._owed or self._orders.encode)

    def close(self) -> None:
        self._store.close()

    # ---- deciding

    def _plan(self, request: ServedRequest, params: Mapping[str, Any]) -> RequestPlan:
        if gone := parse_forget(params):
            self._forget(gone)
            return RequestPlan("exact", "it forgets chunks", told={"forgotten": len(gone)})
        ids = tuple(request.prompt_token_ids or ())
        settings = self._settings
        defaults = Defaults(settings.reuse, settings.ratio, settings.bound)
        num_layers = self._identity.spec.num_layers
        if unfit := _unfit(request, ids):
            return RequestPlan("refused", unfit)
        wish = parse_reuse_request(params, len(ids), defaults, num_layers)
        if wish is None:
            return RequestPlan("refused", f"{NAME} is null; leave it out")
        adapted = getattr(request, "lora_request", None)
        lora = None if adapted is None else self._adapters.name(adapted)
        stored = self._find_stored(wish, ids, lora)
        chunks = [part for part in wish.parts() if part.is_chunk]
        missing = [part for part, is_there in zip(chunks, stored, strict=True) if not is_there]
        owed: tuple[list[Ids], list[Ids]] = ([], [])
        for part in missing:
            owed[0 if wish.stands_in_front(part) else 1].append(ids[part.start : part.end])
        plan = RequestPlan(
            "exact",
            owed=owed,
            num_tokens=len(ids),
            told={"stored": len(chunks) - len(missing), "missing": len(missing)},
            preamble_ids=ids[: wish.preamble],
            tenant=wish.tenant,
            lora=lora,
        )
        rows = self._count_rows(request, wish, missing, len(ids))
        if wish.reuse == AUTO:
            return self._plan_freely(plan, wish, ids, rows)
        strategy = wish.strategy(num_layers)
        chooser = type(strategy.selector).__module__
        if len(self._ranks) > 1 and strategy.selector and not chooser.startswith("kvweave."):
            return replace(plan, way="refused", why=f"{wish.reuse} may choose by heads of one rank")
        if strategy.reuses != "all":
            plan.reason, plan.why = Reason.FUSES_NOTHING, f"{Reason.FUSES_NOTHING}: {wish.reuse}"
            return plan
        return self._plan_cheapest(plan, [PermittedReuse(wish, 0.0)], ids, rows)

    def _plan_freely(
        self, plan: RequestPlan, wish: ReuseRequest, ids: Ids, rows: RowCount
    ) -> RequestPlan:
        """Plan with what calibration lets through."""
        if plan.lora is not None:  # nobody has calibrated these weights
            why = str(Reason.NOT_CALIBRATED)
            return replace(plan, reason=why, why=why, owed=([], []))
        verdict = self._auto.judge(wish, ids)
        if verdict.gate:
            plan.told["gate"] = verdict.gate
        if verdict.permitted:
            return self._plan_cheapest(plan, verdict.permitted, ids, rows)
        if self._auto.doubt is not None:
            plan.owed = [], []  # chunk KV that no request will be let to use
        return replace(plan, reason=verdict.why, why=verdict.why)

    def _plan_cheapest(
        self, plan: RequestPlan, permitted: Sequence[PermittedReuse], ids: Ids, rows: RowCount
    ) -> RequestPlan:
        """Plan with what computes the fewest rows, if that is clearly fewer than vLLM would."""
        num_layers = self._identity.spec.num_layers

        def count(way: PermittedReuse) -> float:
            strategy, ratio = way.wish.strategy(num_layers), way.wish.ratio
            again = way.close * rows.plain  # a close call is computed a second time
            return rows.count_fused(strategy, ratio, num_layers) + again

        best = min(permitted, key=count)
        fewest, wish = count(best), best.wish
        if fewest > min(WORTH * rows.plain, rows.plain - LEAST_SAVED) and not wish.is_encoded_first:
            why = f"{Reason.FUSING_IS_DEARER}: {fewest:,.0f} rows beside {rows.plain:,}"
            return replace(plan, reason=Reason.FUSING_IS_DEARER, why=why)
        salt = hashlib.sha256(repr((wish, ids, plan.lora)).encode()).digest()
        return replace(plan, way="fused", wish=wish, salt=salt)

    def _forget(self, chunk_ids: tuple[str, ...]) -> None:
        """Forget chunks that are no more. The worker deletes them with this step, before any
        reply."""
        number = 0
        if len(self._ranks) > 1:  # turns go on until it was carried out behind all chunks as well
            self._next_order += 1
            number = self._next_order
            self._owed[number] = []
        self._orders.forget.append(ForgetOrder(chunk_ids, number))
        tags = {make_tag(each) for each in chunk_ids}
        self._made = {key: None for key in self._made if tag_of(ChunkKey(key)) not in tags}

    def _find_stored(self, wish: ReuseRequest, ids: Ids, lora: Adapter | None) -> list[bool]:
        """Whether each chunk's KV is in some tier, the heads of all ranks."""
        keys = []
        for rank in self._ranks:
            names = rank.with_lora(lora).names(ids[: wish.preamble], wish.tenant)
            for part in wish.parts():
                if part.is_chunk:
                    name = names.exact_key if wish.stands_in_front(part) else names.key
                    keys.append(name(ids[part.start : part.end]))
        found = [
            key in self._made or peek.residency is not Residency.ABSENT
            for key, peek in zip(keys, self._store.peek(keys), strict=True)
        ]
        num_chunks = len(wish.chunks)
        return [all(found[chunk::num_chunks]) for chunk in range(num_chunks)]

    def _count_rows(
        self, request: ServedRequest, wish: ReuseRequest, missing: Sequence[Part], num_tokens: int
    ) -> RowCount:
        num_exact = self._num_cached(request) * self._block_tokens
        beyond = {part: max(0, part.end - max(part.start, num_exact)) for part in wish.parts()}
        absent = set(missing)
        computed = sum(n for part, n in beyond.items() if part in absent or not part.is_chunk)
        reused = sum(beyond.values()) - computed
        question = num_tokens - wish.question_start
        return RowCount(num_tokens - num_exact, computed, reused, question)

    def _num_cached(self, request: ServedRequest) -> int:
        """Number of blocks in front that vLLM has."""
        count = 0
        for each in request.block_hashes:
            if not self._is_cached(each):
                break
            count += 1
        return count

    def _owe(self, plan: RequestPlan) -> None:
        """Have what was missing encoded, unless that is ordered already."""
        names = self._identity.with_lora(plan.lora).names(plan.preamble_ids, plan.tenant)
        ordered = {key for keys in self._owed.values() for key in keys}
        fresh = [
            (is_behind, ids, key)
            for is_behind, name in enumerate((names.exact_key, names.key))
            for key, ids in {name(ids): ids for ids in plan.owed[is_behind]}.items()
            if key not in ordered
        ]
        # what ranks make in a turn is not cut into layers: they have a turn for each chunk
        runs = [fresh] if len(self._ranks) == 1 else [[each] for each in fresh]
        for run in filter(None, runs):
            self._next_order += 1
            number = self._next_order
            self._owed[number] = [key for *_, key in run]
            in_front = tuple(ids for is_behind, ids, _ in run if not is_behind)
            behind = tuple(ids for is_behind, ids, _ in run if is_behind)
            order = EncodeOrder(number, plan.preamble_ids, plan.tenant, in_front, behind, plan.lora)
            self._orders.encode.append(order)

    @staticmethod
    def _mark_ready(order: FuseOrder, written: Mapping[int, set[str]]) -> FuseOrder:
        """Mark whether blocks that vLLM has for a request are free of other writers in this
        step."""
        others = (written.get(block_id, set()) - {order.request_id} for block_id in order.block_ids)
        return replace(order, is_local_ready=not any(others))


def _unfit(request: ServedRequest, ids: Ids) -> str | None:
    """What about a request cannot be fused."""
    if not ids:
        return "the prompt has no token ids"
    if getattr(request, "prompt_embeds", None) is not None:
        return "prompt embeddings cannot be fused"
    if getattr(request, "mm_features", None):
        return "images and audio cannot be fused"
    if getattr(request, "resumable", False):
        return "a streaming-input session cannot be fused"
    if not hasattr(request, "_block_hasher"):
        return "this vLLM hides how blocks are hashed; fused blocks could not be kept apart"
    return None
