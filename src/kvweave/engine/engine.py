"""The engine: one thread that computes for everybody.

    submit ─► inbox ─► waiting ─► running ─► tokens
                         ▲           │ pages run out
                         └───────────┘

Requests come from any thread and are computed together, a few rows of each per step. Between two
steps requests come and go; within one nothing changes. An error of one request is that request's.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

import torch

from kvweave.engine.config import EngineConfig, for_device, make_pool
from kvweave.engine.desk import Desk
from kvweave.engine.live import Live
from kvweave.engine.loading import Loading
from kvweave.engine.placing import Placing
from kvweave.engine.prefixes import Cost, guessed_cost_s
from kvweave.engine.request import EngineRequest, Ticket
from kvweave.engine.runner import run
from kvweave.engine.scheduler import Scheduler
from kvweave.engine.tombstones import Tombstones
from kvweave.errors import EngineClosed
from kvweave.fuse import captured_probe, recorded_layers
from kvweave.fuse.encode import Prefix
from kvweave.kernels.recording import count_refusals
from kvweave.kv.tree import KnowledgeTree, TreeTier
from kvweave.model.decoder import Decoder
from kvweave.model.recorded_decode import open_recorded
from kvweave.types import ChunkId

log = logging.getLogger(__name__)
T = TypeVar("T")


class Engine:
    """Computes requests of one model. Close it, or use it as a context manager.

    The thread starts with the first work and ends when there was none for a while, so an engine
    that nobody uses costs nothing.
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
        self._placing = Placing(self.cfg, make_pool(self.cfg, decoder), cost_s, self._post)
        self._recorded = open_recorded(decoder, self._placing.pool, self.cfg.recorded_rows)
        # of what fused prompts play; those of decoding go with `_recorded`
        both = recorded_layers.recordings_of(decoder), captured_probe.recordings_of(decoder)
        self._fused_refusals = [recordings.refusals for recordings in both]
        self._scheduler: Scheduler[Live] = Scheduler(
            self.cfg,
            self._placing.lengths,
            self._placing.admit,
            self._placing.grow,
            self._placing.retire,
            lambda live: self._desk.loads_again(live),
        )
        self._loading = Loading(decoder.spec.num_layers, self._post)
        self._desk = Desk(decoder, self._scheduler, self._placing, self._loading)
        self._inbox: deque[Ticket | Callable[[], None]] = deque()
        self._changed = threading.Condition()  # guards the inbox, the thread and closed
        self._thread: threading.Thread | None = None
        self._closed = False

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

    def forget(self, chunk_ids: Collection[ChunkId]) -> int:
        """Chunks were deleted: nobody finds their exact KV from now on, and no request that found
        them before brings it back. Returns nodes that went."""
        return self.run_alone(lambda: self._placing.prefixes.forget(chunk_ids))

    def pin_preamble(self, preamble: Prefix, namespace: str = "") -> bool:
        """Keep a preamble's exact KV in the tree for good. On the engine thread. False: no room."""
        return self._placing.prefixes.pin(namespace, preamble)

    def price(self, cost_s: Cost) -> None:
        """From now on the tree prices what it keeps by `cost_s`. On the engine thread."""
        self.tree.price(cost_s)

    def run_alone(self, job: Callable[[], T]) -> T:
        """Run a job on the engine thread, between two steps; wait for it and give its result."""
        if threading.current_thread() is self._thread:
            return job()
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(job())
            except BaseException as error:  # whoever waits must hear of it
                future.set_exception(error)

        self._post(work)
        return future.result()

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
        return bool(self._scheduler.running or self._scheduler.waiting)

    def pending_prefills(self) -> int:
        """Requests whose prompt is not computed yet. Speculation starts when there are few.

        Those that nobody wants any more are not counted: their turn never comes.
        """
        lives = dict(self._desk.lives)  # a copy in one go: the engine thread changes it
        prompts = sum(
            live.computed < live.prompt_len and not ticket.is_cancelled
            for ticket, live in lives.items()
        )
        with self._changed:
            news = [item for item in self._inbox if isinstance(item, Ticket)]
        return prompts + sum(not (ticket.is_cancelled or ticket in lives) for ticket in news)

    def check_integrity(self) -> None:
        """Raise AssertionError unless all books balance. On the engine thread: see `run_alone`."""
        self._placing.check_integrity(list(self._desk.lives.values()))

    def close(self) -> None:
        """End what runs with EngineClosed and stop the thread. Harmless the second time."""
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
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
        """Something for the engine thread: a ticket that changed, or a job."""
        with self._changed:
            if self._closed:
                raise EngineClosed("the engine is closed; open another one to ask")
            self._inbox.append(item)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    # ---- the engine thread

    def step(self) -> bool:
        """One round: news, who computes what, compute it, hand it out. False: nothing to do."""
        self._take_in()
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

    def _work(self) -> None:
        """The thread: steps while there is work, then waits for some, then ends."""
        if self._decoder.device.index is not None and self._decoder.device.type == "cuda":
            torch.cuda.set_device(self._decoder.device)  # kernels go to the thread's own device
        while True:
            busy = self._guarded_step()
            with self._changed:
                if not busy and not self._inbox and not self._closed:
                    self._changed.wait(self.cfg.idle_s)
                if self._closed or not (busy or self._inbox):
                    ending = self._closed
                    if ending or not self._desk.lives:
                        self._thread = None
                        break
        if ending:
            self._end_all(EngineClosed("the engine was closed before the answer was finished"))

    def _guarded_step(self) -> bool:
        """A step whose own failure, which would be a bug, ends all requests and not the thread."""
        try:
            return self.step()
        except Exception as error:
            log.exception("a step failed in a way nobody foresaw")
            self._end_all(error)
            return False

    def _take_in(self) -> None:
        for _ in range(len(self._inbox)):
            with self._changed:  # one by one: while a job runs, what waits behind it still counts
                item = self._inbox.popleft()
            if isinstance(item, Ticket):
                self._desk.heard_of(item)
            else:
                item()

    def _end_all(self, error: BaseException) -> None:
        """Every request ends with `error`; jobs that were asked for still run."""
        with self._changed:
            news = list(self._inbox)
            self._inbox.clear()
        for item in news:
            if not isinstance(item, Ticket):
                item()
        new = [item for item in news if isinstance(item, Ticket)]
        for ticket in [*self._desk.lives, *new]:
            try:
                self._desk.end(ticket, error)
            except Exception:  # a bug that is being reported already; the others must hear too
                log.exception("a request could not give back what it held")
