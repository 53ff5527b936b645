"""The engine: one thread that computes for all requests.

    submit ─► inbox ─► waiting ─► running ─► tokens
                         ▲           │ pages run out
                         └───────────┘

Requests come from any thread and are computed together, a few rows of each per step. Between two
steps requests come and go; within one nothing changes. An error of one request is that request's.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import BinaryIO, TypeVar

from kvweave.engine.arrivals import Arrivals, RequestLimits
from kvweave.engine.chunk_loader import ChunkLoader
from kvweave.engine.chunk_pages import ChunkPages
from kvweave.engine.common_steps import AHEAD, CommonSteps
from kvweave.engine.config import EngineConfig, for_device
from kvweave.engine.fused_prompts import FusedPrompts
from kvweave.engine.inbox import Inbox
from kvweave.engine.left_prefixes import read_prefixes, write_prefixes
from kvweave.engine.lifecycle import Lifecycle, Message
from kvweave.engine.own_steps import OwnSteps
from kvweave.engine.page_manager import PageManager, make_pool
from kvweave.engine.pages import PageAllocator
from kvweave.engine.prefixes import Cost, ExactPrefixes, guessed_cost_s, path_of
from kvweave.engine.request import EngineChunk, EngineRequest, Ticket
from kvweave.engine.runner import Runner
from kvweave.engine.scheduler import Scheduler
from kvweave.engine.sequence import EngineSequence
from kvweave.engine.warm_up import WarmUp
from kvweave.engine.worker import Pulse, Worker
from kvweave.errors import ConfigError, EngineClosed, RequestError
from kvweave.fuse.protocol import Prefix
from kvweave.fuse.recordings import recordings_of
from kvweave.kernels.dispatch import has_triton
from kvweave.kernels.fixed_order import fix_order
from kvweave.kernels.recording import count_refusals
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.tree import TreeTier
from kvweave.kv.tree.policy_trial import first_policy
from kvweave.model.decoder import Decoder
from kvweave.model.paged_kv import KVPool
from kvweave.model.recorded_decode import open_recorded
from kvweave.types import ChunkId

T = TypeVar("T")

LEAVE_S = 2.0  # for the thread to end, before what it may change is read
FULL_SHARE = 0.9  # of its part of the pool, from which on the knowledge tree counts as full


class Engine:
    """Computes requests of one model. Close it, or use it as a context manager.

    Any thread calls it, unless a method says otherwise. The engine thread (`worker.py`) starts with
    the first work (on a GPU, compiling what requests will need) and ends when there was none for a
    while: an idle engine costs nothing.
    """

    def __init__(
        self,
        decoder: Decoder,
        cfg: EngineConfig | None = None,
        *,
        cost_s: Cost = guessed_cost_s,
        pool: KVPool | None = None,
        runner: Runner | None = None,
    ) -> None:
        """`cost_s` is the time of a prefill, by which the knowledge tree prices what it keeps:
        `price` brings a measured one. `pool` and `runner` are made from `cfg` unless given."""
        self.cfg = for_device(cfg or EngineConfig(), decoder.device.type)
        if self.cfg.exact:
            _check_order_can_be_fixed(decoder)
            fix_order()
        if decoder.can_record:
            recordings_of(decoder).lend(self)
        if pool is None:
            pool = make_pool(self.cfg, decoder)
        if runner is None:
            runner = Runner(decoder, open_recorded(decoder, pool, self.cfg.recorded_rows))
        self._pool = pool
        self._inbox: Inbox[Message] = Inbox()
        self._allocator = PageAllocator(pool.num_pages)
        self._chunks: ChunkPages | None = None
        if self.cfg.share_chunks:
            rounds = pool.codes(0) is not None
            self._chunks = ChunkPages(
                self._allocator,
                pool.chunk_page_tokens,
                rounds=rounds,
                policy=first_policy(self.cfg.tree_policy),
            )
        self._prefixes = ExactPrefixes(
            self.cfg, pool, self._allocator, cost_s, self._inbox.post, self._chunks
        )
        # what was deleted, and exact KV by path: threads other than the engine's only read the one
        # and `match` in the other
        self.tombstones, self.tree = self._prefixes.tombstones, self._prefixes.tree
        self._pages = PageManager(pool, self._allocator, self._prefixes, self._chunks)
        self._loader = ChunkLoader(decoder.spec.num_layers, self._inbox.post, self._chunks)
        self._scheduler: Scheduler[EngineSequence] = Scheduler(self.cfg, self._pages, self._loader)
        self._warm_up = WarmUp(
            decoder, pool, self._allocator, runner, shares=bool(self.cfg.share_chunks)
        )
        self._limits = RequestLimits(decoder.spec, self._pages.most_tokens)
        ranks = self._scheduler.ranks
        self._lifecycle = Lifecycle(
            Arrivals(self._limits, ranks, self._pages, self._prefixes),
            self._scheduler,
            self._pages,
            self._prefixes,
            self._loader,
            self._warm_up,
            self.cfg.copy_tokens or 0,
        )
        fused = FusedPrompts(decoder, self._pages, self._prefixes, self._loader)
        per_step = self.cfg.prompts_per_step if self.cfg.overlap_steps else 0
        self._own_steps = OwnSteps(self._scheduler, runner, self._lifecycle, fused, per_step)
        self._common_steps = CommonSteps(self._inbox, self._scheduler, runner, self._lifecycle)
        self._worker = Worker(
            self._inbox,
            self._lifecycle,
            self._scheduler,
            self._common_steps,
            self._own_steps,
            decoder.device,
            self.cfg.idle_s,
        )
        self._decoder = decoder
        self._runner = runner
        decoder.on_layer = self._worker.beat
        self._refusals = [
            *recordings_of(decoder).refusals,  # of what fused prompts play
            *runner.refusals,
        ]
        if not self._warm_up.is_over:
            self._worker.post(lambda: None)  # wakes the thread

    # ---- any thread

    def submit(self, request: EngineRequest, *, held: bool = False) -> Ticket:
        """Compute a request. Raises RequestError at once when it cannot be computed here.

        `held` computes the prompt and gives nothing out until `Ticket.release`.
        """
        if held and request.background:
            raise RequestError("a background request cannot be held; submit it as one of the two")
        self._limits.check_prompt(request.prompt_ids)
        self._limits.check_answer(request)
        ticket = Ticket(request, held, self._notify)
        self._worker.post(ticket)
        return ticket

    def check(self, prompt_ids: Sequence[int]) -> None:
        """Raise RequestError unless a prompt can be computed here, as `submit` would."""
        self._limits.check_prompt(prompt_ids)

    def check_answer(self, request: EngineRequest) -> None:
        """Raise RequestError unless what is asked of the answer makes sense, as `submit` would."""
        self._limits.check_answer(request)

    def forget(
        self, chunk_ids: Collection[ChunkId] | None, namespaces: Collection[str] = ("",)
    ) -> int:
        """Let no request of these namespaces find the exact KV of deleted chunks, nor bring it
        back if it found them before. None: any chunk may have been deleted. Returns nodes that
        went."""
        prefixes = self._prefixes

        def forget(namespace: str) -> int:
            if chunk_ids is None:
                return prefixes.forget_all(namespace)
            return prefixes.forget(chunk_ids, namespace)

        return self.run_alone(lambda: sum(map(forget, namespaces)))

    def read_exact(
        self, preamble: Sequence[int], chunk: EngineChunk, namespace: str = ""
    ) -> Prefix | None:
        """Return a copy of the exact KV of a preamble with a chunk right behind it, keys turned to
        their positions; None: no prompt has left it here."""
        path = path_of(namespace, preamble, (chunk,))
        if self.tree.match_tokens(path) <= len(preamble):  # as it was a moment ago
            return None
        return self.run_alone(lambda: self._prefixes.read(path, (*preamble, *chunk.token_ids)))

    def pin_preamble(self, preamble: Prefix, namespace: str = "") -> bool:
        """Keep a preamble's exact KV in the tree for good. On the engine thread. False: no room."""
        return self._prefixes.pin(namespace, preamble)

    def price(self, cost_s: Cost) -> None:
        """Let the tree price what it keeps by `cost_s` from now on. On the engine thread."""
        self.tree.price(cost_s)

    def run_alone(self, job: Callable[[], T]) -> T:
        """Run a job on the engine thread, between two steps; wait for it and give its result."""
        return self._worker.run_alone(job)

    def resident(self, keys: Collection[ChunkKey], namespace: str = "") -> set[ChunkKey]:
        """Which of these chunks a request of a namespace would find in the pool: nothing is brought
        for them. As it was a moment ago."""
        return set() if self._chunks is None else self._chunks.holds(namespace, keys)

    def stats(self) -> dict[str, float]:
        """How full the engine is, and what it has done since it was made: the numbers of a moment,
        perhaps not of the same one."""
        scheduler = self._scheduler
        return {
            "pages_used": self._allocator.num_used,
            "pages_free": self._allocator.num_free,
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
            "parked": len(scheduler.parked),
            "background": len(scheduler.background),
            "preemptions": scheduler.preemptions,
            "steps_parted": self._runner.num_parted,
            "steps_given_up": self._common_steps.num_given_up,
            "steps_overlapped": self._own_steps.num_steps,
            "tree_nodes": len(self.tree),
            **{f"tree_{tier}_bytes": self.tree.used_bytes(tier) for tier in TreeTier},
            **self._prefixes.copy_stats(),
            **({} if self._chunks is None else self._chunks.stats()),
            **count_refusals(self._refusals),
            **self._lifecycle.counts.snapshot(),
        }

    @property
    def is_warm(self) -> bool:
        """Whether the kernels of plain steps are compiled: on a GPU the first idle moments are for
        that."""
        return self._warm_up.is_over

    @property
    def is_tree_full(self) -> bool:
        """Whether exact KV has next to no room left in the pool: what comes pushes some out. As it
        was a moment ago."""
        tree = self.tree
        return tree.used_bytes(TreeTier.DEVICE) > FULL_SHARE * tree.config.device_bytes

    @property
    def is_busy(self) -> bool:
        """Whether requests run or wait to: one that begins now would run beside them, those in the
        background left out. As it was a moment ago."""
        return self._scheduler.is_busy

    def pending_prefills(self, before: Ticket | None = None) -> int:
        """Requests whose prompt is not computed yet; with `before` those that came before that one.
        Speculation starts when there are few.

        Those that were cancelled are not counted: their turn never comes. Nor are those in the
        background: it never comes before another's.
        """
        sequences = dict(self._lifecycle.sequences)  # in one go: the engine thread changes it
        prompts = sum(
            sequence.progress.computed < sequence.prompt_len and _counts(ticket, before)
            for ticket, sequence in sequences.items()
        )
        new = (item for item in self._inbox.peek() if isinstance(item, Ticket))
        prompts += sum(_counts(ticket, before) and ticket not in sequences for ticket in new)
        # the one that a device is at counts as computed
        return prompts + self._own_steps.has_prompt

    def guess_boundary_s(self, row_s: float, prefill_s: float) -> float:
        """How long a wrong guess stands in the way, where a prompt and a row of it take so long: a
        step of it, or the layers that were ordered when it is given up."""
        cfg = self.cfg
        assert cfg.guess_rows is not None, "a config for a device says how long steps are"
        assert cfg.guess_alone_rows is not None, "alone, too"
        step_s = row_s * cfg.guess_rows
        if cfg.guess_alone_rows <= cfg.guess_rows:
            return step_s
        return min(step_s, prefill_s * (1 + AHEAD) / self._decoder.spec.num_layers)

    def check_integrity(self) -> None:
        """Raise AssertionError unless all books balance. On the engine thread: see `run_alone`."""
        self._pages.check_integrity(list(self._lifecycle.sequences.values()))

    def pulse(self) -> Pulse:
        """Return how the engine thread is, for whoever watches it."""
        return self._worker.pulse()

    def abandon(self, why: str) -> None:
        """Give up an engine that hangs or cannot compute: everybody who waits hears `why` as an
        EngineClosed, and it takes nothing more. `close` then waits for nothing."""
        self._worker.abandon(EngineClosed(why))

    def leave_exact(self, file: BinaryIO, most_bytes: int) -> int:
        """Write exact KV that can still be read to a file, for another process, so many bytes of
        it at most; return how many chunks. Behind `abandon`. Waits a moment for the thread; one
        that hangs changes nothing."""
        self._worker.wait_for_end(LEAVE_S)
        revision = self._decoder.revision
        return write_prefixes(self._prefixes, self._pool, revision, file, most_bytes)

    def take_exact(self, file: BinaryIO) -> int:
        """Take exact KV that another process left; return how many chunks. Raises ValueError or
        OSError if the file is not whole."""
        return self.run_alone(
            lambda: read_prefixes(self._prefixes, self._pool, self._decoder.revision, file)
        )

    def close(self) -> None:
        """End what runs with EngineClosed and stop the thread. Harmless the second time."""
        self._worker.close()
        recordings_of(self._decoder).players.discard(self)
        if self._decoder.on_layer == self._worker.beat:
            self._decoder.on_layer = lambda: None  # else it would keep this engine's pool alive
        if self._worker.is_abandoned:
            return  # its thread may still use what the others hold
        self._loader.close()
        self._prefixes.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _notify(self, ticket: Ticket) -> None:
        """Tell the worker that a ticket changed. A closed engine has ended it already, or is about
        to."""
        with suppress(EngineClosed):
            self._worker.post(ticket)


def _check_order_can_be_fixed(decoder: Decoder) -> None:
    """Raise ConfigError where sums would have no fixed order although one is wanted."""
    if decoder.device.type != "cuda":
        return  # there it is so, whatever is wanted
    lacks = (
        "Triton" if not has_triton() else "a model without experts" if decoder.spec.experts else ""
    )
    if lacks:
        raise ConfigError(f"engine.exact needs {lacks}; leave it out")


def _counts(ticket: Ticket, before: Ticket | None) -> bool:
    """Whether others wait for a request's turn, or `before` does."""
    if ticket.is_cancelled or ticket.request.background:
        return False
    return before is None or ticket.timeline.submitted_s < before.timeline.submitted_s
