"""The engine: one thread that computes for everybody.

    submit ─► inbox ─► waiting ─► running ─► tokens
                         ▲           │ pages run out
                         └───────────┘

Requests come from any thread and are computed together, a few rows of each per step. Between two
steps requests come and go; within one nothing changes. An error of one request is that request's.
"""

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TypeVar

from kvweave.engine.config import EngineConfig, for_device, make_pool
from kvweave.engine.lifecycle import Lifecycle
from kvweave.engine.loading import Loading
from kvweave.engine.page_manager import PageManager
from kvweave.engine.prefixes import Cost, guessed_cost_s
from kvweave.engine.request import EngineRequest, Ticket
from kvweave.engine.runner import run
from kvweave.engine.scheduler import Scheduler
from kvweave.engine.sequence import EngineSequence
from kvweave.engine.tombstones import Tombstones
from kvweave.engine.worker import Worker
from kvweave.errors import EngineClosed
from kvweave.fuse.encode.chunk_pass import Prefix
from kvweave.fuse.recordings import recordings_of
from kvweave.kernels.recording import count_refusals
from kvweave.kv.tree import KnowledgeTree, TreeTier
from kvweave.model.decoder import Decoder
from kvweave.model.recorded_decode import open_recorded
from kvweave.types import ChunkId

T = TypeVar("T")


class Engine:
    """Computes requests of one model. Close it, or use it as a context manager.

    The thread (`worker.py`) starts with the first work and ends when there was none for a while, so
    an engine that nobody uses costs nothing.
    """

    def __init__(
        self,
        decoder: Decoder,
        cfg: EngineConfig | None = None,
        *,
        cost_s: Cost = guessed_cost_s,
    ) -> None:
        """`cost_s` is the time of a prefill, by which the knowledge tree prices what it keeps:
        `price` brings a measured one."""
        self.cfg = for_device(cfg or EngineConfig(), decoder.device)
        self._decoder = decoder
        self._placing = PageManager(self.cfg, make_pool(self.cfg, decoder), cost_s, self._post)
        self._recorded = open_recorded(decoder, self._placing.pool, self.cfg.recorded_rows)
        # of what fused prompts play; those of decoding go with `_recorded`
        self._fused_refusals = recordings_of(decoder).refusals
        self._scheduler: Scheduler[EngineSequence] = Scheduler(
            self.cfg,
            self._placing.lengths,
            self._placing.admit,
            self._placing.grow,
            self._placing.retire,
            lambda live: self._desk.loads_again(live),
        )
        self._loading = Loading(decoder.spec.num_layers, self._post)
        self._desk = Lifecycle(decoder, self._scheduler, self._placing, self._loading)
        self._worker = Worker(self._desk, self.step, decoder.device, self.cfg.idle_s)

    # ---- any thread

    def submit(
        self, request: EngineRequest | Callable[[], EngineRequest], *, held: bool = False
    ) -> Ticket:
        """Compute a request. Raises RequestError at once when it cannot be computed here.

        A function instead of a request is called on the engine thread right before it begins: a
        plan sees the tree as it is then. What it raises, the ticket raises. `held` computes the
        prompt and gives nothing out until `Ticket.release`.
        """
        if isinstance(request, EngineRequest):
            self._desk.check(request.prompt_ids)
        make = (lambda: request) if isinstance(request, EngineRequest) else request
        ticket = Ticket(make, held, self._notify)
        self._post(ticket)
        return ticket

    def check(self, prompt_ids: Sequence[int]) -> None:
        """Raise RequestError unless a prompt can be computed here, as `submit` would."""
        self._desk.check(prompt_ids)

    def forget(self, chunk_ids: Collection[ChunkId] | None) -> int:
        """Chunks were deleted: nobody finds their exact KV from now on, and no request that found
        them before brings it back. None: any may have been. Returns nodes that went."""
        prefixes = self._placing.prefixes
        return self.run_alone(
            lambda: prefixes.forget_all() if chunk_ids is None else prefixes.forget(chunk_ids)
        )

    def pin_preamble(self, preamble: Prefix, namespace: str = "") -> bool:
        """Keep a preamble's exact KV in the tree for good. On the engine thread. False: no room."""
        return self._placing.prefixes.pin(namespace, preamble)

    def price(self, cost_s: Cost) -> None:
        """From now on the tree prices what it keeps by `cost_s`. On the engine thread."""
        self.tree.price(cost_s)

    def run_alone(self, job: Callable[[], T]) -> T:
        """Run a job on the engine thread, between two steps; wait for it and give its result."""
        return self._worker.run_alone(job)

    @property
    def tombstones(self) -> Tombstones:
        """What was deleted. Others than the engine thread only read."""
        return self._placing.prefixes.tombstones

    @property
    def tree(self) -> KnowledgeTree:
        """Exact KV by path. Others than the engine thread may only `match`."""
        return self._placing.prefixes.tree

    def stats(self) -> dict[str, float]:
        """How full the engine is, and what it has done since it was made. Any thread; the numbers
        of a moment, perhaps not of the same one."""
        pages, scheduler = self._placing.pages, self._scheduler
        decoding = [] if self._recorded is None else [self._recorded.refusals]
        return {
            "pages_used": pages.num_used,
            "pages_free": pages.num_free,
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
            "parked": len(scheduler.parked),
            "preemptions": scheduler.preemptions,
            "tree_nodes": len(self.tree),
            **{f"tree_{tier}_bytes": self.tree.used_bytes(tier) for tier in TreeTier},
            **self._placing.prefixes.copy_stats(),
            **count_refusals([*self._fused_refusals, *decoding]),
            **self._desk.counts.snapshot(),
        }

    @property
    def is_busy(self) -> bool:
        """Whether requests run or wait to: one that begins now would run beside them. Any thread;
        as it was a moment ago."""
        return self._scheduler.is_busy

    def pending_prefills(self) -> int:
        """Requests whose prompt is not computed yet. Speculation starts when there are few.

        Those that nobody wants any more are not counted: their turn never comes.
        """
        lives = dict(self._desk.lives)  # a copy in one go: the engine thread changes it
        prompts = sum(
            live.computed < live.prompt_len and not ticket.is_cancelled
            for ticket, live in lives.items()
        )
        news = self._worker.news()
        return prompts + sum(not (ticket.is_cancelled or ticket in lives) for ticket in news)

    def check_integrity(self) -> None:
        """Raise AssertionError unless all books balance. On the engine thread: see `run_alone`."""
        self._placing.check_integrity(list(self._desk.lives.values()))

    def close(self) -> None:
        """End what runs with EngineClosed and stop the thread. Harmless the second time."""
        self._worker.close()
        self._loading.close()
        self._placing.prefixes.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _notify(self, ticket: Ticket) -> None:
        """A ticket changed. A closed engine has ended it already, or is about to."""
        with suppress(EngineClosed):
            self._post(ticket)

    def _post(self, item: Ticket | Callable[[], None]) -> None:
        self._worker.post(item)

    # ---- the engine thread

    def step(self) -> bool:
        """One round: news, who computes what, compute it, hand it out. False: nothing to do."""
        self._worker.take_in()
        works = self._scheduler.next_step()
        if not works:
            return False
        if works[0].seq.own_step:
            self._desk.weave(works[0].seq)
            return True
        started_s = time.perf_counter()
        ran = run(self._decoder, works, self._recorded)
        seconds = time.perf_counter() - started_s
        for each in ran:
            self._desk.hand_out(each, seconds, shared=len(works) > 1)
        return True
