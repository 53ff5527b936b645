"""From a question to the answer in the making.

question ─► prompt ─► router ─► engine ─► text
   └── speculation, where a search and a prefill go side by side
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from kvweave.app.answer.answer_stream import AnswerStream
from kvweave.app.answer.citations import CitedAnswer
from kvweave.app.answer.conversations import Conversations, ConversationScope
from kvweave.app.answer.nothing_found import NOTHING_TEXT, NothingFound, SaidAnswer
from kvweave.app.answer.piece_stream import PieceStream
from kvweave.app.answer.recognised import conversation_name
from kvweave.app.answer.rewriting import SAMPLING, read_rewritten, rewriting_messages
from kvweave.app.answer.router import NO_LIBRARY, Router
from kvweave.app.answer.sources import RetrievedChunk
from kvweave.app.answer.speculation import LookUp, Speculation, SpeculationConfig, at_once
from kvweave.app.answer.talk import Talk
from kvweave.app.answer.token_stream import Submission, TokenStream
from kvweave.app.answer.tool_answer import ToolAnswer, tool_sampling
from kvweave.app.audit.audit_log import FILE as AUDIT_FILE
from kvweave.app.audit.audit_log import AuditLog, AuditSubject
from kvweave.app.audit.auditor import AuditConfig, Auditor
from kvweave.app.auto.measurements import Measurements
from kvweave.app.library.chunk_uses import ChunkUses
from kvweave.app.library.document_memory import DocumentMemory, DocumentMemoryConfig
from kvweave.app.library.kv_behind import PreambleKey
from kvweave.app.library.library import Library
from kvweave.app.library.library_kv import CODEC
from kvweave.app.notes import AnswerEvent, AnswerNotes
from kvweave.app.question import (
    KVTransfer,
    PlainOptions,
    Question,
    QuestionDefaults,
    refuse_empty,
)
from kvweave.app.requests import exact_request
from kvweave.app.runtime import ModelRuntime
from kvweave.app.sampling_defaults import SamplingDefaults
from kvweave.calibrate.profiles import Profile
from kvweave.config import WeaveConfig, given
from kvweave.corpus.search import SearchOptions
from kvweave.engine.request import EngineRequest, Ticket
from kvweave.errors import ConfigError
from kvweave.metrics import Metrics
from kvweave.plan.ordering import OrderPermission
from kvweave.plan.search_pace import Paces
from kvweave.text.json_grammar import JsonGrammars
from kvweave.text.length import refuse_long
from kvweave.text.prompt import (
    SYSTEM,
    Document,
    Prompt,
    build_prompt,
    chat_prompt,
    chunk_text,
    lay_out,
    past_messages,
    split_template,
)
from kvweave.text.tool_calls import texts_of_tools
from kvweave.types import ChunkId, Hit

if TYPE_CHECKING:
    from kvweave.plan.plan import Plan


HISTORY_SHARE = 2  # a part of the context: more is not taken by chunks of earlier turns


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """What holds for all answers of one Weave."""

    system: str = SYSTEM  # the system prompt, unless a question brings another
    tenant: str = ""  # whose it is: tenants share no exact KV and no conversations
    speculation: SpeculationConfig | None = None  # None: where it is expected to gain time
    profile: Profile | None = None  # what was measured of the model; None: the user's, the packaged
    usual: QuestionDefaults = field(default_factory=QuestionDefaults)  # what questions leave open
    # what is remembered of documents, where there is no knowledge base
    documents: DocumentMemoryConfig = field(default_factory=DocumentMemoryConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)  # of fused answers, in idle time
    look_up: LookUp = at_once  # runs searches: a catalogue keeps a connection per thread
    # where conversations are remembered; another's, if they are to outlive this Weave
    conversations: Conversations | ConversationScope = field(default_factory=Conversations)
    paces: Paces = field(default_factory=Paces)  # what speculation knows already; likewise
    uses: ChunkUses = field(default_factory=ChunkUses)  # which chunks were in prompts; likewise

    @classmethod
    def of(cls, config: WeaveConfig) -> "AnswerSettings":
        """What a configuration says."""
        system, library = config.model.system, config.library
        return cls(
            SYSTEM if system is None else system,
            speculation=SpeculationConfig(**given(config.speculation)),
            usual=QuestionDefaults.of(config),
            documents=DocumentMemoryConfig(
                library.remembered_bytes, library.promotion, config.store.codec or CODEC
            ),
            audit=AuditConfig.of(config.quality),
        )


class Answerer:
    """Answers with one model and, where one is open, its knowledge base. Any thread. `settle` it
    while the engine still runs, then `close` it."""

    def __init__(
        self, runtime: ModelRuntime, library: Library | None, settings: AnswerSettings
    ) -> None:
        self._tokenizer = runtime.tokenizer
        self._client = runtime.client
        self._max_context = runtime.max_context
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
        open_log = partial(_open_audit_log, runtime, library)
        self.auditor = Auditor(runtime.client, settings.audit, open_log, self._catch_up)
        self.router = Router(runtime, library or self.documents, self.measured, self.auditor)
        self._speculation: Speculation | None = None
        if library is not None:
            device = runtime.decoder.device
            self._speculation = Speculation(
                library.kb,
                runtime.client,
                device,
                settings.speculation,
                settings.look_up,
                settings.paces,
            )

    def settle(self) -> None:
        """Begin nothing more."""
        self.auditor.close()
        self.measured.settle()
        if self.documents is not None:
            self.documents.settle()

    def close(self) -> None:
        """Keep what was learnt, give back what is held. Not the library."""
        self.measured.close()
        if self.documents is not None:
            self.documents.close()

    def answer(self, asked: Question, called_s: float) -> PieceStream:
        """The answer to a question, searched for and planned. Its prompt is not computed yet,
        unless a search guessed."""
        self._catch_up()
        question = self._rewritten(self._filled(asked))
        found: list[RetrievedChunk] = []
        answering: PieceStream
        try:
            answering = self._begin(asked, question, called_s, found)
        except NothingFound:
            words = self._settings.usual.nothing_text or NOTHING_TEXT
            return SaidAnswer(words, called_s, question.query)
        if (use := question.tool_use) is not None:
            answering = ToolAnswer(answering, use)
        if not question.cite:
            return answering
        return CitedAnswer(answering, [self._tokenizer.decode(c.token_ids) for c in found])

    def _begin(
        self, asked: Question, question: Question, called_s: float, found: list[RetrievedChunk]
    ) -> AnswerStream:
        """The answer to a question as it was `asked`, with what it leaves open filled in. Its
        chunks are added to `found`. Raises NothingFound."""
        if self._library is not None:
            self._library.asked_by(self._tenant_of(question))
        as_of = self._client.generation()
        named, talk = self.router.named(question.reuse, question.ratio), self._talk(question)
        if named is not None:
            named = named._replace(is_usual=asked.reuse is None and asked.ratio is None)

        uses = self._settings.uses

        def submission(retrieved: Sequence[RetrievedChunk]) -> Submission:
            began_s = time.perf_counter()
            if not retrieved and self._says_nothing(question, talk):
                raise NothingFound
            notes = AnswerNotes(retrieve_ms=(began_s - called_s) * 1e3, query=question.query)
            chunks = [chunk.token_ids for chunk in retrieved]
            laid, prompt = self._laid(chunks, question, talk)
            prompt = replace(prompt, as_of=as_of)
            notes.left_out = len(prompt.left_out)
            made = self.router.submission(prompt, question, named, notes)
            notes.question, notes.retrieved = question.question, tuple(retrieved)
            notes.prompt, notes.full_s = made.prompt, self.measured.full_prefill_s
            made = _measured(made._replace(request=self._held(made.request)), question)
            notes.events.append(AnswerEvent("plan", "plan", began_s, time.perf_counter()))

            def sent(ticket: Ticket) -> None:
                notes.timeline = ticket.timeline
                notes.watched = ticket if question.watched else None
                uses.saw([chunk.id for chunk in retrieved if chunk.id is not None])
                # in the order that the engine was given: a plan may have moved them
                laid.sent(question.question, made.prompt.chunks, as_of)

            return made.also(sent)

        speculation = self._speculation
        if question.documents is None and speculation is not None:
            chosen, tokens = speculation.answer(
                question,
                lambda hits: submission([RetrievedChunk.found(hit) for hit in hits]),
                lambda: self.router.get_ready(self._key(question), question, named),
            )
        else:
            chosen = submission(self._given(question))
            tokens = TokenStream(self._client, chosen.request, chosen.on_first)
        num_tokens = len(chosen.prompt.token_ids)
        found += chosen.notes.retrieved
        return AnswerStream(
            tokens, self._tokenizer, question.drawn, num_tokens, called_s, chosen.notes
        )

    def _says_nothing(self, question: Question, talk: Talk) -> bool:
        """Whether a question that nothing was found for is answered by saying so: it was to be
        searched for, and the conversation holds no chunks of earlier turns."""
        is_searched = question.documents is None and self._library is not None
        return is_searched and question.nothing_found == "say" and not talk.holds_chunks

    def _rewritten(self, question: Question) -> Question:
        """A follow-up with the query that the model makes of it, where that is asked for."""
        is_searched = question.documents is None and self._library is not None
        if not (question.rewrite and question.history and is_searched):
            return question
        messages = rewriting_messages(question.question, question.history)
        prompt = chat_prompt(self._tokenizer, messages)
        drawn = PlainOptions(SAMPLING, tenant=question.tenant)
        made = self.plain(prompt, drawn, time.perf_counter()).finish()
        return replace(question, query=read_rewritten(made.text))

    def plain(
        self, prompt: Prompt, drawn: PlainOptions, called_s: float, question: str = ""
    ) -> AnswerStream:
        """The answer to a prompt without chunks; `question` is what was asked last in it. Calls of
        tools are text here."""
        usual = self._settings.usual
        ids = prompt.token_ids
        sampling = tool_sampling(drawn.sampling or self.sampling.sampling(), drawn.tool_use)
        self._client.check(ids)
        prompt = replace(prompt, tenant=drawn.tenant or self._settings.tenant)
        use_tree = (drawn.reuse or usual.reuse) != "full"
        request = self._held(
            exact_request(prompt, sampling, self._tokenizer.eos_ids, use_tree=use_tree)
        )
        full_s = self.measured.full_prefill_s
        notes = AnswerNotes(question=question, prompt=prompt, full_s=full_s)

        def note(ticket: Ticket) -> None:
            notes.timeline = ticket.timeline
            if ticket.record is not None:
                notes.keep(replace(ticket.record, chunks=()))  # its parts are messages

        tokens = TokenStream(self._client, request, (note,))
        return AnswerStream(tokens, self._tokenizer, sampling, len(ids), called_s, notes)

    def spanned(
        self, prompt: Prompt, asked: KVTransfer, drawn: PlainOptions, called_s: float
    ) -> AnswerStream:
        """The answer to a prompt whose chunks were named by a gateway: it retrieved and ordered
        them, so they stay where they are."""
        sampling = drawn.sampling or self.sampling.sampling()
        question = Question(
            "…",  # its words are in the prompt
            documents=(),
            sampling=sampling,
            reuse=asked.reuse,
            ratio=asked.ratio,
            bound=asked.bound,
            order=OrderPermission.AS_FOUND,
        ).filled(self._settings.usual)
        named = self.router.named(question.reuse, question.ratio)
        tenant = drawn.tenant or self._settings.tenant
        prompt = replace(prompt, tenant=tenant, as_of=self._client.generation())
        made = self.router.submission(prompt, question, named, AnswerNotes())
        tokens = TokenStream(self._client, self._held(made.request), made.on_first)
        num_tokens = len(prompt.token_ids)
        return AnswerStream(tokens, self._tokenizer, sampling, num_tokens, called_s, made.notes)

    def forget_brought(self, chunk_ids: Collection[ChunkId], tenant: str) -> None:
        """Whoever brought these chunks with requests of a tenant has deleted them: no exact KV of
        theirs is found any more, and none that is stored by itself. May wait for the engine."""
        tenant = tenant or self._settings.tenant
        self._client.forget(chunk_ids, (tenant,))
        if self.documents is not None:
            self.documents.forget(chunk_ids, tenant)

    def plan(self, asked: Question) -> "Plan":
        """What "auto" would do for a question."""
        self._catch_up()
        question = self._filled(asked)
        if question.documents is None and self._library is not None:
            found = self.search(question.question, question.num_chunks, question.search)
            chunks = [hit.chunk.token_ids for hit in found]
        else:
            chunks = [chunk.token_ids for chunk in self._given(question)]
        _, prompt = self._laid(chunks, question, self._talk(question))
        return self.router.plan(prompt, question)

    def search(self, question: str, k: int, how: SearchOptions | None = None) -> list[Hit]:
        """The chunks of the knowledge base nearest to a question, best first; None: found as is
        usual."""
        if self._library is None:
            raise ConfigError(NO_LIBRARY)
        kb, how = self._library.kb, how or self._settings.usual.search
        return self._settings.look_up(lambda: kb.search(question, k, how))

    def build_prompt(
        self, question: str, documents: Sequence[Document | str], system: str | None
    ) -> Prompt:
        """The prompt of a question over documents, without a history."""
        refuse_empty(question)
        words = self._words(system)
        return build_prompt(self._tokenizer, question, _documents(documents), words)

    def _filled(self, asked: Question) -> Question:
        """A question, with what it leaves open as is usual."""
        texts = [asked.question, asked.system or ""]
        texts += [str(message.get("content")) for message in asked.history]
        texts += [str(message.get("content")) for message in asked.since]
        texts += texts_of_tools(asked.tools, [*asked.history, *asked.since])
        texts += [d.title + d.text for d in _documents(asked.documents or ())]
        refuse_long(self._tokenizer, texts, self._max_context)
        sampling = tool_sampling(asked.sampling or self.sampling.sampling(), asked.tool_use)
        kb_order = None if self._library is None else self._library.kb.settings.order
        return replace(asked.filled(self._settings.usual, kb_order), sampling=sampling)

    def _held(self, request: EngineRequest) -> EngineRequest:
        """A request whose answer is held to a JSON schema, if it asks for that. Raises RequestError
        for one that no answer can be held to."""
        self._client.engine.check_answer(request)  # before a reply begins
        schema = request.sampling.json_schema
        if schema is None:
            return request
        self._grammars.check(schema)
        return replace(request, constraint=partial(self._grammars.constraint, schema))

    def _catch_up(self) -> None:
        """Other processes may have removed documents."""
        if self._library is not None:
            self._library.catch_up()

    def _talk(self, question: Question) -> Talk:
        """What was said before, with the chunks that stood there."""
        past, tenant = past_messages(question.history), self._tenant_of(question)
        name = conversation_name(question, past, is_searched=self._library is not None)
        is_gone = partial(self._client.is_gone, namespace=tenant)
        conversations = self._settings.conversations
        most_tokens = self._max_context // HISTORY_SHARE
        return conversations.talk(tenant, name, past, is_gone, most_tokens)

    def _given(self, question: Question) -> list[RetrievedChunk]:
        """The documents of a request as chunks."""
        encode = self._tokenizer.encode_text
        return [
            RetrievedChunk.brought(document, tuple(encode(chunk_text(document))))
            for document in _documents(question.documents or ())
        ]

    def _laid(
        self, chunks: Sequence[tuple[int, ...]], question: Question, talk: Talk
    ) -> tuple[Talk, Prompt]:
        """The prompt of a turn that found these chunks. Chunks of earlier turns that nobody asked
        for take no room from the answer."""
        laid = talk.bringing(chunks)
        prompt = self._prompt(chunks, question, laid)
        is_long = len(prompt.token_ids) + question.drawn.max_tokens > self._max_context
        if is_long and laid.plain is not None:
            laid = laid.plain
            prompt = self._prompt(chunks, question, laid)
        return laid, prompt

    def _prompt(self, chunks: Sequence[tuple[int, ...]], question: Question, talk: Talk) -> Prompt:
        """The question behind its history and the chunks that the history does not hold."""
        held = talk.held(chunks)
        new = [ids for ids in chunks if ids not in held]
        system = self._words(question.system)
        use, since = question.tool_use, question.since
        words = question.question
        prompt = lay_out(self._tokenizer, words, new, system, talk.messages, use, since)
        return replace(prompt, left_out=tuple(held), tenant=self._tenant_of(question))

    def _key(self, question: Question) -> PreambleKey:
        use = question.tool_use
        tools = () if use is None else use.tools
        preamble, _ = split_template(self._tokenizer, self._words(question.system), tools)
        return PreambleKey(self._tenant_of(question), tuple(preamble))

    def _words(self, system: str | None) -> str:
        return self._settings.system if system is None else system

    def _tenant_of(self, question: Question) -> str:
        return question.tenant or self._settings.tenant


def _open_audit_log(runtime: ModelRuntime, library: Library | None, metrics: Metrics) -> AuditLog:
    """With the knowledge base; in memory where there is none."""
    revision = runtime.decoder.revision
    if library is None:
        return AuditLog(AuditSubject(revision, "documents"), metrics)
    encoder = library.encoder
    encoding = f"{encoder.encoding_context} {encoder.context.codec}"
    return AuditLog(AuditSubject(revision, encoding), metrics, library.kb.folder / AUDIT_FILE)


def _measured(made: Submission, question: Question) -> Submission:
    """A submission whose answer is watched or forced, or that knows no other, if the question asks
    for that."""
    if not (question.watched or question.forced or question.alone):
        return made
    request = made.request
    use_tree = request.use_tree and not question.alone
    watched, forced = max(question.watched, request.watched), tuple(question.forced)
    request = replace(request, watched=watched, forced=forced, use_tree=use_tree)
    return made._replace(request=request)


def _documents(documents: Sequence[Document | str]) -> list[Document]:
    return [Document(d) if isinstance(d, str) else d for d in documents]
