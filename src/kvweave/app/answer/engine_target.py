"""The engine of this process as a target: prompts in, tokens out."""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvweave.app.answer.answer_stream import AnswerStream
from kvweave.app.answer.guessing import GuessFigures, PrefillPace
from kvweave.app.answer.notes import AnswerNotes, AnswerWait
from kvweave.app.answer.question import KVTransfer, PlainOptions, Question
from kvweave.app.answer.router import Router
from kvweave.app.answer.settings import AnswerSettings, SamplingDefaults
from kvweave.app.answer.stages import (
    Asked,
    LaidOut,
    Planned,
    PromptWords,
    Recall,
    Submitted,
    TurnOpening,
)
from kvweave.app.answer.wrapped_answers import tool_sampling
from kvweave.app.audit.audit_log import open_log
from kvweave.app.audit.auditor import Auditor
from kvweave.app.auto.measurements import Measurements
from kvweave.app.auto.requests import exact_request
from kvweave.app.auto.self_calibration import SelfCalibration
from kvweave.app.library.document_memory import DocumentMemory
from kvweave.app.library.kv_behind import PreambleKey
from kvweave.app.library.library import Library
from kvweave.app.library.runtime import EngineClient, ModelRuntime
from kvweave.engine.request import EngineRequest, Ticket
from kvweave.engine.sampling import Choice, Sampling
from kvweave.errors import EngineClosed
from kvweave.plan.ordering import OrderPermission
from kvweave.text.json_grammar import JsonGrammars
from kvweave.text.prompt import Prompt, chat_prompt, lay_out, refuse_long, split_template
from kvweave.types import ChunkId

GUESSES_ON_CPU = 1  # whose cores are all busy with one
GUESSES_ON_DEVICE = 4  # which takes several at once


class TokenStream(Iterator[Choice]):
    """The tokens of an answer. One thread iterates; any may `close`, which ends the work between
    two steps of the engine, whether its prompt waits, loads or is being computed."""

    def __init__(
        self,
        client: EngineClient,
        request: EngineRequest,
        listeners: tuple[Callable[[Ticket], None], ...] = (),
        *,
        is_held: bool = False,
    ) -> None:
        """Submitted when the first token is asked for; one that is held is submitted now, and hands
        nothing out before it is released. `listeners` hear of its ticket once the first token is
        with its reader: when the next is asked for, or at the end."""
        self._client = client
        self._request = request
        self._listeners = listeners
        self._counted = client.answers.one()
        self._begun = False  # its first token is there
        self._reader = 0  # the thread that asked for a token last
        self._lock = threading.Lock()  # guards the next two
        self._ticket: Ticket | None = None
        self._closed = False
        if is_held:
            self.begin(is_held=True)

    def begin(self, *, is_held: bool = False) -> Ticket | None:
        """Submit it, if that was not done. None: it was closed before."""
        with self._lock:
            if self._closed:
                return None
            if self._ticket is None:
                self._ticket = self._client.engine.submit(self._request, held=is_held)
                self._counted.__enter__()
            return self._ticket

    def __next__(self) -> Choice:
        self._reader = threading.get_ident()
        ticket = self.begin()
        self._tell()
        if ticket is None:
            raise StopIteration
        try:
            choice = next(ticket)
            self._counted.begin_telling()
            self._begun = True
            return choice
        except BaseException:  # it is over
            self.close()
            raise

    def close(self) -> None:
        """No more of it is wanted. Any thread; harmless the second time."""
        with self._lock:
            was_closed, self._closed = self._closed, True
            ticket = self._ticket
        if ticket is not None and not was_closed:
            ticket.cancel()
            self._counted.__exit__(None, None, None)
        if threading.get_ident() == self._reader:  # the first token was the last it wanted
            self._tell()

    def _tell(self) -> None:
        """Have the listeners hear of a first token that was handed out, once. On the thread that
        reads: whoever closes must not wait for them."""
        ticket = self._ticket
        if self._begun and ticket is not None:
            listeners, self._listeners = self._listeners, ()
            for hear in listeners:
                hear(ticket)

    def current_wait(self) -> AnswerWait | None:
        """What its first token waits for; None: for nothing any more. Any thread."""
        ticket = self._ticket
        if ticket is None or ticket.timeline.first_token_s is not None:
            return None
        if ticket.timeline.admitted_s is not None:
            return AnswerWait("reading")
        try:
            others = self._client.engine.pending_prefills(ticket)
        except EngineClosed:  # who waits for the token hears of it
            return None
        is_loading = not others and self._request.fused is not None
        return AnswerWait("loading" if is_loading else "waiting", others)

    # ── as a guess ───────────────────────────────────────────────────────────

    @property
    def is_done(self) -> bool:
        return self._ticket is not None and self._ticket.is_done

    def cancel(self) -> None:
        self.close()

    def release(self) -> None:
        if self._ticket is not None:
            self._ticket.release()

    @property
    def figures(self) -> GuessFigures:
        if self._ticket is None:
            return GuessFigures()
        line = self._ticket.timeline
        return GuessFigures(
            line.saved_tokens, line.wasted_tokens, line.prefilled_s, line.finished_s
        )

    def __del__(self) -> None:
        self.close()


class EngineTarget:
    """One model and, where one is open, its knowledge base. Any thread. `settle` it while the
    engine still runs, then `close` it."""

    def __init__(
        self, runtime: ModelRuntime, library: Library | None, settings: AnswerSettings
    ) -> None:
        self.tokenizer = runtime.tokenizer
        self.max_context = runtime.max_context
        self._client = runtime.client
        self._grammars = JsonGrammars(runtime.tokenizer, runtime.decoder.spec.vocab_size)
        self._library = library
        self._settings = settings
        self.sampling = SamplingDefaults(settings.usual.sampling, runtime.generation)
        self.documents: DocumentMemory | None = None
        if library is None and settings.documents.is_on:
            self.documents = DocumentMemory(runtime, settings.documents)
        codec = settings.documents.codec
        if library is not None:
            codec = library.encoder.context.codec
        self.measured = Measurements(runtime, codec, settings.profile)
        opens = partial(open_log, runtime, library)
        self.auditor = Auditor(runtime.client, settings.usual.quality, opens, self._catch_up)
        source = library or self.documents
        self.router = Router(runtime, source, self.measured, self.auditor, settings.planner)
        self.calibration: SelfCalibration | None = None
        if library is not None and library.kv.worth.evidence.is_asked:
            self.calibration = SelfCalibration(runtime, library, settings.system)
        is_cpu = runtime.decoder.device.type == "cpu"
        self.max_guesses = GUESSES_ON_CPU if is_cpu else GUESSES_ON_DEVICE

    def settle(self) -> None:
        """Begin nothing more."""
        if self.calibration is not None:
            self.calibration.close()
        self.auditor.close()
        self.measured.settle()
        if self.documents is not None:
            self.documents.settle()

    def close(self) -> None:
        """Keep what was learnt, give back what is held. Not the library."""
        self.measured.close()
        if self.documents is not None:
            self.documents.close()

    # ── stages of a question ─────────────────────────────────────────────────

    def check(self, question: Question) -> None:
        self._catch_up()
        refuse_long(self.tokenizer, question.texts, self.max_context)
        self.router.open_named(question.reuse, question.ratio)

    def open_turn(self, question: Question, recall: Recall) -> TurnOpening:
        if self._library is not None:
            self._library.asked_by(question.tenant)
        as_of = self._client.generation()
        return TurnOpening(recall(partial(self._client.is_gone, namespace=question.tenant)), as_of)

    def say(self, messages: Sequence[Mapping[str, Any]], sampling: Sampling, tenant: str) -> str:
        prompt, drawn = chat_prompt(self.tokenizer, messages), PlainOptions(sampling, tenant=tenant)
        return self.answer_plain(prompt, drawn, time.perf_counter()).finish().text

    def make_prompt(self, words: PromptWords) -> Prompt:
        question = words.asked.question
        prompt = lay_out(
            self.tokenizer,
            question.question,
            words.chunks,
            question.system or "",
            words.history,
            question.tool_use,
            question.since,
        )
        as_of = words.asked.turn.as_of
        return replace(prompt, left_out=words.left_out, tenant=question.tenant, as_of=as_of)

    def has_room(self, prompt: Prompt, max_tokens: int) -> bool:
        return len(prompt.token_ids) + max_tokens <= self.max_context

    def plan(self, laid: LaidOut[Prompt], notes: AnswerNotes) -> Planned[Prompt, EngineRequest]:
        asked = laid.words.asked
        question = asked.question
        named = self.router.open_named(question.reuse, question.ratio)
        if named is not None:
            named = named._replace(is_usual=asked.is_usual)
        planned = self.router.plan(laid.prompt, question, named, notes)
        notes.prompt, notes.full_s = planned.prompt, self.measured.full_prefill_s
        request = _add_measurements(self._constrain(planned.request), question)
        listeners = partial(_note_ticket, notes, question.watched), self._learn
        return replace(planned, request=request).heard_by(*listeners)

    def submit(
        self, planned: Planned[Prompt, EngineRequest], *, is_held: bool = False
    ) -> Submitted:
        request = planned.request
        tokens = TokenStream(self._client, request, planned.listeners, is_held=is_held)
        return Submitted(self._stream(planned, tokens), planned.notes, tokens)

    def may_guess(self, asked: Asked) -> bool:
        question, num_layers = asked.question, self.measured.decoder.spec.num_layers
        named = self.router.open_named(question.reuse, question.ratio)
        return named is None or not named.strategy.needs(num_layers).extras

    def get_ready(self, asked: Asked) -> None:
        question = asked.question
        tools = () if question.tool_use is None else question.tool_use.tools
        preamble, _ = split_template(self.tokenizer, question.system or "", tools)
        named = self.router.open_named(question.reuse, question.ratio)
        key = PreambleKey(question.tenant, tuple(preamble))
        self.router.get_ready(key, question, named)

    def pending_prefills(self) -> int:
        return self._client.engine.pending_prefills()

    def boundary_s(self, pace: PrefillPace) -> float | None:
        if pace.row_s is None:
            return None
        return self._client.engine.guess_boundary_s(pace.row_s, pace.prefill_s)

    # ── prompts that are no question ─────────────────────────────────────────

    def answer_plain(
        self, prompt: Prompt, drawn: PlainOptions, called_s: float, question: str = ""
    ) -> AnswerStream:
        """The answer to a prompt without chunks; `question` is what was asked last in it. Calls of
        tools are text here."""
        sampling = tool_sampling(drawn.sampling or self.sampling.sampling(), drawn.tool_use)
        self._client.check(prompt.token_ids)
        prompt = replace(prompt, tenant=drawn.tenant or self._settings.tenant)
        use_tree = (drawn.reuse or self._settings.usual.reuse) != "full"
        request = exact_request(prompt, sampling, self.tokenizer.eos_ids, use_tree=use_tree)
        notes = AnswerNotes(called_s, question=question, prompt=prompt)
        notes.full_s = self.measured.full_prefill_s
        listener = partial(_note_plain, notes)
        planned = Planned(prompt, self._constrain(request), notes, (listener,))
        return self._stream(planned)

    def answer_spanned(
        self, prompt: Prompt, asked: KVTransfer, drawn: PlainOptions, called_s: float
    ) -> AnswerStream:
        """The answer to a prompt whose chunks were named by a gateway: it retrieved and ordered
        them, so they stay where they are."""
        question = Question(
            "…",  # its words are in the prompt
            documents=(),
            sampling=drawn.sampling or self.sampling.sampling(),
            reuse=asked.reuse,
            ratio=asked.ratio,
            bound=asked.bound,
            order=OrderPermission.AS_FOUND,
        ).fill_in(self._settings.usual)
        named = self.router.open_named(question.reuse, question.ratio)
        tenant = drawn.tenant or self._settings.tenant
        prompt = replace(prompt, tenant=tenant, as_of=self._client.generation())
        notes = AnswerNotes(called_s)
        planned = self.router.plan(prompt, question, named, notes)
        planned = replace(planned, request=self._constrain(planned.request))
        return self._stream(planned.heard_by(partial(_note_ticket, notes, 0)))

    def forget_brought(self, chunk_ids: Collection[ChunkId], tenant: str) -> None:
        """Whoever brought these chunks with requests of a tenant has deleted them: no exact KV of
        theirs is found any more, and none that is stored by itself. May wait for the engine. Raises
        TierError where a tier that machines share may have kept some of it."""
        tenant = tenant or self._settings.tenant
        self._client.forget(chunk_ids, (tenant,))
        if self.documents is not None:
            self.documents.forget(chunk_ids, tenant)

    def _stream(
        self, planned: Planned[Prompt, EngineRequest], tokens: TokenStream | None = None
    ) -> AnswerStream:
        """The text of an answer, from `tokens` or from those of a prompt that nobody submitted."""
        request, num_tokens = planned.request, len(planned.prompt.token_ids)
        tokens = tokens or TokenStream(self._client, request, planned.listeners)
        called_s, notes = planned.notes.called_s, planned.notes
        how = self.tokenizer, request.sampling, num_tokens, called_s, notes
        return AnswerStream(tokens, *how, current_wait=tokens.current_wait)

    def _catch_up(self) -> None:
        """Other processes may have removed documents."""
        if self._library is not None:
            self._library.catch_up()

    def _constrain(self, request: EngineRequest) -> EngineRequest:
        """A request whose answer is held to a JSON schema, if it asks for that. Raises RequestError
        for one that no answer can be held to."""
        self._client.engine.check_answer(request)  # before a reply begins
        schema = request.sampling.json_schema
        if schema is None:
            return request
        self._grammars.check(schema)
        return replace(request, constraint=partial(self._grammars.constraint, schema))

    def _learn(self, ticket: Ticket) -> None:
        """Learn the pace of the engine from a prompt that is through."""
        record, timeline = ticket.record, ticket.timeline
        if record is None or timeline.shared:
            return
        rows = record.counts["computed"] + record.counts["recomputed"]
        self._settings.paces.prefill.note_prefill(rows, timeline.computing_s)


def _note_ticket(notes: AnswerNotes, watched: int, ticket: Ticket) -> None:
    """Keep when the engine did what, and what the model thought where that is wanted."""
    notes.timeline = ticket.timeline
    notes.watched = ticket if watched else None


def _note_plain(notes: AnswerNotes, ticket: Ticket) -> None:
    """Keep how a prompt without chunks was prefilled: its parts are messages."""
    notes.timeline = ticket.timeline
    if ticket.record is not None:
        notes.keep(replace(ticket.record, chunks=()))


def _add_measurements(request: EngineRequest, question: Question) -> EngineRequest:
    """A request whose answer is watched or forced, or that knows no other, if the question asks for
    that."""
    if not (question.watched or question.forced or question.alone):
        return request
    use_tree = request.use_tree and not question.alone
    watched, forced = max(question.watched, request.watched), tuple(question.forced)
    return replace(request, watched=watched, forced=forced, use_tree=use_tree)
