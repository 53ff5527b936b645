"""The answer path: prompts in, token choices out, through the one engine of a Weave.

Part of the composition root: only `app.py` and its helpers use it. Any thread.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from kvweave.app.answer.answering import ActiveAnswers, AnswerNotes
from kvweave.corpus.chunker import make_chunk_id
from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.request import EngineChunk, EngineRequest, Ticket
from kvweave.engine.sampling import Choice, Sampling
from kvweave.errors import EngineClosed
from kvweave.model.decoder import Decoder
from kvweave.plan.profile import MachineProfile
from kvweave.text.prompt import Prompt
from kvweave.types import ChunkId

Make = Callable[[], EngineRequest]
OnFirst = Callable[[Ticket], None]


class Submission(NamedTuple):
    """How one prompt is to be answered."""

    prompt_tokens: int
    request: EngineRequest | Make
    on_first: OnFirst
    note: AnswerNotes


class EngineClient:
    """Owns the engine, which is made when it is first needed."""

    def __init__(self, decoder: Decoder, cfg: EngineConfig | None = None) -> None:
        self._decoder = decoder
        self._cfg = cfg
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._closed = False
        self.answers = ActiveAnswers()  # under way
        self.heard: dict[str, int] = {}  # catalogues: removals up to there are in the tombstones
        self.measured: MachineProfile | None = None  # in this process; set on the engine thread

    @property
    def engine(self) -> Engine:
        with self._lock:
            if self._closed:
                raise EngineClosed("this Weave was closed; open another one to ask")
            if self._engine is None:
                self._engine = Engine(self._decoder, self._cfg)
            return self._engine

    def close(self) -> None:
        """End what runs. Harmless the second time."""
        with self._lock:
            self._closed = True
            engine = self._engine
        if engine is not None:
            engine.close()

    def forget(self, chunk_ids: Collection[ChunkId] | None) -> None:
        """Chunks were deleted: their exact KV is no longer found either. None: nobody knows which,
        so that all of it goes."""
        with self._lock:
            engine = None if self._closed else self._engine
        if engine is not None:
            engine.forget(chunk_ids)

    def now(self) -> int:
        """Read it before chunks are looked for: what is deleted behind it, is deleted for them."""
        return self.engine.tombstones.generation

    def is_gone(self, chunk_id: ChunkId, as_of: int) -> bool:
        """Whether a chunk that was found `as_of` then has been deleted since."""
        with self._lock:
            engine = self._engine
        return engine is not None and engine.tombstones.is_gone(chunk_id, as_of)

    def check(self, prompt_ids: Sequence[int]) -> None:
        """Raise RequestError unless the model and the engine's pool can take a prompt."""
        self.engine.check(prompt_ids)

    def choices(
        self, request: EngineRequest | Make, on_first: OnFirst | None = None
    ) -> "TokenStream":
        """The tokens of an answer. Submitted when the first one is asked for.

        `on_first` hears of the ticket when its first token is there.
        """
        return TokenStream(self.answers, lambda: self.engine.submit(request), on_first)

    def under_way(self, ticket: Ticket, on_first: OnFirst | None = None) -> "TokenStream":
        """The tokens of an answer that has begun."""
        choices = TokenStream(self.answers, lambda: ticket, on_first)
        choices.begin()
        return choices


class TokenStream(Iterator[Choice]):
    """The tokens of an answer. One thread iterates; any may `close`, which ends the work between
    two steps of the engine, whether its prompt waits, loads or is being computed."""

    def __init__(
        self, answers: ActiveAnswers, submit: Callable[[], Ticket], on_first: OnFirst | None
    ) -> None:
        self._submit = submit
        self._on_first = on_first
        self._counted = answers.one()
        self._lock = threading.Lock()  # guards the next two
        self._ticket: Ticket | None = None
        self._closed = False

    def begin(self) -> Ticket | None:
        """Submit it, if nobody has. None: it was closed before."""
        with self._lock:
            if self._closed:
                return None
            if self._ticket is None:
                self._ticket = self._submit()
                self._counted.__enter__()
            return self._ticket

    def __next__(self) -> Choice:
        ticket = self.begin()
        if ticket is None:
            raise StopIteration
        try:
            choice = next(ticket)
            if self._on_first is not None:
                on_first, self._on_first = self._on_first, None
                on_first(ticket)
            return choice
        except BaseException:  # it is over, or whoever heard of it failed
            self.close()
            raise

    def close(self) -> None:
        """Nobody wants more of it. Any thread; harmless the second time."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            ticket = self._ticket
        if ticket is not None:
            ticket.cancel()
            self._counted.__exit__(None, None, None)

    def __del__(self) -> None:
        self.close()


def exact_request(
    prompt: Prompt, sampling: Sampling, eos_ids: Collection[int], *, use_tree: bool
) -> EngineRequest:
    """A prompt of which nothing is approximated."""
    return EngineRequest(
        prompt.question,
        sampling,
        frozenset(eos_ids),
        prompt.preamble,
        engine_chunks(prompt),
        use_tree=use_tree,
        namespace=prompt.tenant,
        as_of=prompt.as_of,
    )


def plain_request(
    prompt_ids: Sequence[int], sampling: Sampling, eos_ids: Collection[int]
) -> EngineRequest:
    """A prompt without parts."""
    return EngineRequest(tuple(prompt_ids), sampling, frozenset(eos_ids))


def engine_chunks(prompt: Prompt) -> tuple[EngineChunk, ...]:
    """What stands between preamble and question; what was said before is a part like others."""
    parts = (*prompt.history, *prompt.chunks)
    return tuple(EngineChunk(make_chunk_id(ids), ids) for ids in parts)


def keep_record(note: AnswerNotes, prompt: Prompt) -> OnFirst:
    """Brings the record of a prompt to whoever shows the answer."""

    def on_first(ticket: Ticket) -> None:
        if ticket.record is not None:
            note.keep(ticket.record)
        note.laid(prompt)

    return on_first
