"""What the engine is asked for, and the handle that answers come through."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from torch import Tensor

from kvweave.engine.sampling import Choice, Sampling, TokenConstraint
from kvweave.fuse.protocol import Prefix
from kvweave.fuse.record import FuseRecord
from kvweave.fuse.request import PromptChunk
from kvweave.fuse.strategy import Strategy
from kvweave.kv.store import KVStore
from kvweave.types import ChunkId


class EngineChunk(NamedTuple):
    """A chunk of a prompt: `id` names its tokens, so equal ids mean equal tokens."""

    id: ChunkId
    token_ids: tuple[int, ...]


class LoadCost(NamedTuple):
    """What a fused request is expected to take on this machine."""

    load_s: float  # until all its bytes are in host memory
    compute_s: float  # of its pass


@dataclass(frozen=True, slots=True)
class FusedPart:
    """How a prompt is woven from stored chunk KV. See fuse/prefill.py for the fields' meaning."""

    store: KVStore
    preamble: Prefix  # the exact KV in front of all chunks
    chunks: tuple[PromptChunk, ...]  # the request's, with the names of their KV
    strategy: Strategy
    ratio: float
    asked: tuple[int, int] | None = None
    encoding: str = ""
    computed: Mapping[int, str] = field(default_factory=dict)  # places computed although stored
    expected: LoadCost | None = None  # by the cost model; None: not known
    # An answer whose first token leads by fewer nats is thrown away before it is handed out, and
    # the prompt is computed exactly: what fusion overturns are close calls. 0: never.
    close_call: float = 0.0

    @property
    def shifts_chunks(self) -> bool:
        """Whether what is not recomputed of its chunks may be moved by what is."""
        strategy = self.strategy
        return bool(strategy.drift) and strategy.selector is not None and 0 < self.ratio < 1


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt and how it is to be answered.

    preamble ‖ chunk ‖ chunk ‖ … ‖ question

    `use_tree` takes what the knowledge tree has of preamble and chunks, and offers it what is
    computed exactly of them, of the chunks the first `num_kept` (None: all); without it all is
    computed and nothing is kept. A prompt that is one
    `question` is no other prompt's prefix: there is nothing to name it by.

    `background` is computed in idle time alone: while no other request has anything to compute, in
    steps so short that an arrival waits for one of them at most. It gives its pages back before any
    other, and is not seen by `Engine.is_busy` and `Engine.pending_prefills`. `forced` are the
    answer's tokens, instead of drawn ones; none of them ends the answer but the last. Of the first
    `watched` tokens of an answer the ticket keeps what the model thought: `Ticket.distributions`.
    """

    question: tuple[int, ...]
    sampling: Sampling
    eos_ids: frozenset[int]
    preamble: tuple[int, ...] = ()
    chunks: tuple[EngineChunk, ...] = ()
    use_tree: bool = False
    num_kept: int | None = None
    fused: FusedPart | None = None
    namespace: str = ""  # tenants share exact KV only within one
    as_of: int | None = None  # when its chunks were found (see tombstones.py); None: as it begins
    background: bool = False
    forced: tuple[int, ...] = ()
    watched: int = 0
    constraint: Callable[[], TokenConstraint] | None = None  # of the answer; None: any token

    @property
    def prompt_ids(self) -> list[int]:
        middle = chain.from_iterable(chunk.token_ids for chunk in self.chunks)
        return [*self.preamble, *middle, *self.question]


@dataclass(slots=True)
class RequestTimeline:
    """When things happened to a request, by time.perf_counter; None: not yet."""

    submitted_s: float
    admitted_s: float | None = None  # it got its pages
    loading_s: float = 0.0  # waiting for bytes while others ran
    computing_s: float = 0.0  # steps it took part in, until its first token
    beside_s: float = 0.0  # of those, what the rows of other requests in them took
    first_token_s: float | None = None
    finished_s: float | None = None
    preempted: int = 0  # times its pages were taken away
    prefilled_s: float | None = (
        None  # a speculation: its prompt was computed before it was released
    )
    saved_tokens: int = 0  # a speculation that was right: computed before it was released
    wasted_tokens: int = 0  # one that was wrong: computed, and not kept in the knowledge tree
    shared: bool = False  # others were computed in the same steps
    drafted: int = 0  # tokens of the answer that were guessed from what the request has read
    copied: int = 0  # of those, the ones that were right

    def add_step(self, seconds: float, share: float = 1.0) -> None:
        """Add the time of a step that the request took part in; `share` of its rows were its."""
        if self.first_token_s is None:
            self.computing_s += seconds
            self.beside_s += seconds * (1 - share)
            self.shared = self.shared or share < 1


class Ticket(Iterator[Choice]):
    """An answer on its way: iterate for tokens, as they come. Any thread; one thread iterates.

    What failed is raised behind the tokens that came before. The engine waits for no reader: tokens
    that are not read yet are kept. A ticket that is no longer wanted must be cancelled.
    """

    def __init__(
        self, request: EngineRequest, held: bool, wake: Callable[["Ticket"], None]
    ) -> None:
        self.request = request
        self.record: FuseRecord | None = None  # how the prompt was prefilled; from the first token
        self.timeline = RequestTimeline(time.perf_counter())
        # [V] float32 on the host, log-probabilities of the vocabulary: one for each of the first
        # `request.watched` tokens, there when its token is. The engine thread appends.
        self.distributions: list[Tensor] = []
        self.watched_ids: list[int] = []  # those tokens; kept when they are read, too
        self._changed = threading.Condition()
        self._choices: deque[Choice] = deque()
        self._error: BaseException | None = None
        self._done = False
        self._held = held
        self._cancelled = False
        self._wake = wake

    def __next__(self) -> Choice:
        with self._changed:
            self._changed.wait_for(lambda: self._choices or self._done)
            if self._choices:
                return self._choices.popleft()
            if self._error is not None:
                raise self._error
            raise StopIteration

    def cancel(self) -> None:
        """Give up the answer: the request ends between two steps. Harmless when it is done."""
        with self._changed:
            if self._done or self._cancelled:
                return
            self._cancelled = True
        self._wake(self)

    close = cancel  # so that it can be closed like a generator

    def release(self) -> None:
        """Let a held request go on; its first token is there at once if its prompt is computed."""
        with self._changed:
            if not self._held:
                return
            self._held = False
        self._wake(self)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the request is done, without reading. False: it is not."""
        with self._changed:
            return self._changed.wait_for(lambda: self._done, timeout_s)

    @property
    def is_held(self) -> bool:
        return self._held

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled

    @property
    def is_done(self) -> bool:
        return self._done

    # ---- the engine's side

    def put(self, choice: Choice) -> None:
        with self._changed:
            if self.timeline.first_token_s is None:
                self.timeline.first_token_s = time.perf_counter()
            if len(self.watched_ids) < self.request.watched:
                self.watched_ids.append(choice.token_id)
            self._choices.append(choice)
            self._changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        """End the answer: no more tokens come. The first end counts."""
        with self._changed:
            if self._done:
                return
            self._done = True
            self._error = error
            self.timeline.finished_s = time.perf_counter()
            self._changed.notify_all()
