"""Knowledge bases by name, over one host: opened on use, a few at a time, made on first upload.

All methods may be called from any thread.
"""

import logging
import os
import sqlite3
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvweave.app.answer.conversations import Conversations
from kvweave.app.answer.guessing import Paces, PrefillPace, SearchPace, SearchPaces
from kvweave.app.answer.question import QuestionDefaults, check_order
from kvweave.app.answer.settings import AnswerSettings, ChunkUses
from kvweave.app.hosts import LibraryHost, ModelHost, PieceStream
from kvweave.app.libraries.embedders import Embedded, Embedders
from kvweave.app.libraries.library_browser import LibraryBrowser, NotInLibrary
from kvweave.app.libraries.library_folders import (
    LibraryFolders,
    LibraryKey,
    NoSuchKnowledgeBase,
    check_name,
    check_tenant,
    is_library,
)
from kvweave.app.libraries.open_cache import AllInUse, InUse, Loan, OpenCache, OpenCounts
from kvweave.app.library.kv_progress import NEVER, KVProgress, KVState
from kvweave.app.library.library import DEFAULT_EMBEDDER, OpenEmbedder, open_sentence_embedder
from kvweave.app.library.library_kv import KVOptions
from kvweave.config import PlannerSettings, ServerSettings, SpeculationSettings
from kvweave.corpus.catalogue import Totals
from kvweave.corpus.disk_files import disk_trouble
from kvweave.corpus.embedder import OLD_IDENTITY
from kvweave.corpus.kb_folder import remove_folder
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.corpus.metadata import Metadata, MetadataFilter, check_metadata
from kvweave.corpus.parsers import ENDINGS, ParseLimits
from kvweave.corpus.parsers.base import LONGEST_TITLE
from kvweave.corpus.parsers.parser_process import read_fields
from kvweave.corpus.search import Retrieval, SearchOptions
from kvweave.corpus.settings import KnowledgeBaseSettings, check_settings, read_settings
from kvweave.errors import (
    ConfigError,
    CorpusBusy,
    CorpusError,
    CorpusFull,
    CorpusMismatch,
    CorpusReadOnly,
    EngineClosed,
    KVWeaveError,
    ModelError,
    RequestError,
)
from kvweave.ingest.report import IngestProgress, IngestReport, OnProgress
from kvweave.ingest.sources import FileBytes, IngestOptions, Later, TextSource
from kvweave.metrics import Metrics
from kvweave.plan.ordering import PROMOTION

__all__ = [
    "ENDINGS",
    "LONGEST_TITLE",
    "AllInUse",
    "Embedded",
    "FileBytes",
    "InUse",
    "IngestProgress",
    "IngestReport",
    "KVProgress",
    "KVState",
    "Later",
    "Libraries",
    "LibrariesConfig",
    "LibraryKey",
    "Metadata",
    "NoSuchKnowledgeBase",
    "NotInLibrary",
    "OnProgress",
    "SearchOptions",
    "TextSource",
    "check_metadata",
    "check_name",
    "check_tenant",
    "read_fields",
]

log = logging.getLogger(__name__)

LEAST_HOST_BYTES = 8 << 30
CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
stages = logging.getLogger("kvweave.stages")  # what a server does before it is ready

T = TypeVar("T")

SEARCHERS = 4  # threads that look things up: each has a connection to every catalogue it met
# What is said of a knowledge base that does not open, by the kind of trouble; the log says more
PROBLEMS = {
    "CorpusDamaged": "damaged; its administrator can look with kvweave kb check",
    "CorpusMismatch": "made with an embedder or a model that this server does not have; its log "
    "says which",
    "CorpusBusy": "being written by another process; look again in a moment",
    "CorpusFull": "on a disk that is full",
    "CorpusReadOnly": "in a folder that the server may not use",
    "": "not to be opened; the server's log says why",
}


# Trouble that passes: a knowledge base is not given up for it. Of a full disk it is: deleting is
# the way out of that.
PASSING = (AllInUse, InUse, NoSuchKnowledgeBase, CorpusBusy, CorpusReadOnly)


class LibraryStatus(NamedTuple):
    """A knowledge base as a list shows it."""

    totals: Totals
    kv: KVProgress
    problem: str | None = None  # what is wrong with it, in words that name no path
    order: str | None = None  # of chunks, for questions that do not say it


def usual_host_bytes() -> int:
    """Host memory for chunk KV of a server: a quarter of what this machine, or the container it
    runs in, has; LEAST_HOST_BYTES at least. One chunk of an 8B model takes tens of megabytes, and
    from a disk it comes no faster than it is computed on a GPU."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in CONTAINER_LIMITS:
        with suppress(OSError, ValueError):  # no container, or no limit ("max")
            whole = min(whole, int(limit.read_text()))
    return max(LEAST_HOST_BYTES, whole // 4)


@dataclass(frozen=True, slots=True)
class LibrariesConfig:
    """Where knowledge bases are and how new ones are made."""

    root: Path | None = None  # folder of knowledge bases; None: only those in `folders`
    folders: Mapping[LibraryKey, Path] = field(default_factory=dict)  # some that lie elsewhere
    embedder: str = DEFAULT_EMBEDDER  # of new ones, and of /v1/embeddings
    kv: KVOptions = field(default_factory=KVOptions)  # of each; system and tenant are its own
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    usual: QuestionDefaults = field(default_factory=QuestionDefaults)  # what requests leave open
    planner: PlannerSettings = field(default_factory=PlannerSettings)
    promotion: int = PROMOTION  # requests that bring a chunk before its KV is stored; 0: never
    parsing: ParseLimits = field(default_factory=ParseLimits)  # of files that are uploaded
    open_most: int = (
        ServerSettings().open_kbs
    )  # at a time; the one that was not used for longest makes way
    # for the host tiers of all that are open, an equal part for each
    host_bytes: int = field(default_factory=usual_host_bytes)
    wait_s: float = 10.0  # for one to make way, where all that are open are in use

    def __post_init__(self) -> None:
        for name in ("open_most", "host_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"LibrariesConfig.{name} must be at least 1")


class Libraries:
    """Many knowledge bases, of which a few are open. `close` it before the host it was made
    with."""

    def __init__(
        self,
        weave: ModelHost,
        config: LibrariesConfig | None = None,
        *,
        open_embedder: OpenEmbedder = open_sentence_embedder,
    ) -> None:
        self.config = config or LibrariesConfig()
        self.folders = LibraryFolders(self.config.root, self.config.folders)
        self._weave = weave
        self._embedders = Embedders(open_embedder, self._is_quiet)
        self._searching = ThreadPoolExecutor(SEARCHERS, thread_name_prefix="search")
        # these outlive the closing of a knowledge base
        self._conversations = Conversations()
        self._prefill_pace = PrefillPace()
        self._search_paces = defaultdict[LibraryKey, SearchPaces](lambda: SearchPaces(SearchPace))
        self._uses: dict[LibraryKey, ChunkUses] = {}
        # of those that did not fit when they were opened last: their settings then, and why
        self._unfit: dict[LibraryKey, tuple[KnowledgeBaseSettings | None, CorpusMismatch]] = {}
        self._making = Counter[LibraryKey]()  # knowledge bases that may be made now
        self._making_lock = threading.Lock()
        self._open_cache: OpenCache[LibraryKey, LibraryHost] = OpenCache(
            self._open, self.config.open_most, self.config.wait_s
        )

    def models_of(self, tenant: str, name: str) -> Sequence[str]:
        """The models that answer from one of `names`, the usual one first."""
        try:
            return self._weave.models_of(self.folders.get(LibraryKey(tenant, name)))
        except CorpusError:  # what is wrong with it is told to those who ask it
            return [self._weave.model_name]

    def open_ahead(self) -> None:
        """Load the embedder and open as many knowledge bases as may be open, those that changed
        last: so that no question waits for it. One that does not open is told of in the log, and
        is refused when it is asked for."""
        stages.info("opening the embedder and knowledge bases")
        try:
            self.embed([""])
        except KVWeaveError as error:
            log.warning("the embedder of new knowledge bases does not open: %s", error)
        for place in self.folders.changed_last(self.config.open_most):
            try:
                with self.use(place.tenant, place.name) as weave:
                    weave.kb.warm()
                    weave.kb.load_index()
            except EngineClosed:
                raise
            except KVWeaveError as error:
                log.warning("knowledge base %r does not open: %s", place.name, error)

    def has_some(self) -> bool:
        """Whether there is a knowledge base, of whatever tenant."""
        return bool(self.folders.changed_last(1))

    def lend(self, tenant: str, name: str, *, create: bool = False) -> Loan[LibraryHost]:
        """What answers from it, which stays open until the loan is given back. Raises
        NoSuchKnowledgeBase, or makes it where `create` allows; AllInUse if there is no room."""
        place = LibraryKey(tenant, check_name(name))
        if not (create or read_settings(self.folders.get(place))):
            raise self.folders.unknown(place)
        with self._may_make(place, create):
            return self._open_cache.lend(place)

    @contextmanager
    def _may_make(self, place: LibraryKey, create: bool) -> Iterator[None]:
        with self._making_lock:
            self._making[place] += create
        try:
            yield
        finally:
            with self._making_lock:
                self._making[place] -= create

    @contextmanager
    def use(self, tenant: str, name: str, *, create: bool = False) -> Iterator[LibraryHost]:
        """Lend a knowledge base until the end of the `with`."""
        loan = self.lend(tenant, name, create=create)
        try:
            yield loan.thing
        finally:
            loan.give_back()

    def stream(self, place: LibraryKey, question: str, **options: Any) -> PieceStream:
        """Answer a question from a knowledge base, which stays open until the answer is closed.

        A strategy that the model is not ready for is a RequestError.
        """
        loan = self.lend(place.tenant, place.name)
        with ExitStack() as unless_streamed:
            unless_streamed.callback(loan.give_back)
            try:
                reuse, ratio = options.get("reuse"), options.get("ratio")
                loan.thing.check_strategy(reuse, ratio, options.get("model"))
            except ConfigError as error:
                raise RequestError(str(error)) from error
            answer = loan.thing.stream(question, **options)
            answer.when_closed(loan.give_back)
            unless_streamed.pop_all()
        return answer

    def _open(self, place: LibraryKey) -> LibraryHost:
        folder = self.folders.get(place)
        if read_settings(folder) is None and not self._making[place]:
            raise NoSuchKnowledgeBase(f"{place.name!r} was deleted just now")
        config, system, tenant = self.config, self._weave.system, place.tenant
        store = replace(config.kv.store, host_bytes=config.host_bytes // config.open_most)
        options = replace(config.kv, system=system, tenant_salt=tenant, store=store)
        settings = AnswerSettings(
            system,
            tenant,
            config.speculation,
            usual=config.usual,
            planner=config.planner,
            look_up=self._look_up,
            conversations=self._conversations.part(place.name),
            paces=Paces(self._search_paces[place], self._prefill_pace),
            uses=self._uses_of(place),
        )
        try:
            host = self._weave.over(
                folder,
                options,
                settings,
                new_embedder=config.embedder,
                open_embedder=self._embedders.get,
                promotion=config.promotion,
            )
        except (CorpusMismatch, ModelError) as error:
            unfit = CorpusMismatch(str(error))
            self._unfit[place] = (read_settings(folder), unfit)
            raise unfit from error
        self._unfit.pop(place, None)
        return host

    # ── documents ────────────────────────────────────────────────────────────

    def ingest(
        self,
        tenant: str,
        name: str,
        sources: Sequence[TextSource | FileBytes | Later],
        *,
        chunk_kv: bool = False,
        progress: OnProgress | None = None,
        metadata: Metadata | None = None,
    ) -> IngestReport:
        """Bring documents in. Makes the knowledge base if it is new. Their chunk KV is made in the
        background, if that is configured; `chunk_kv`: before this returns. `metadata` of all of
        them; what a source says of itself goes before."""
        with self._writer(tenant, name, create=True) as weave:
            return weave.ingest(
                *sources,
                chunk_kv=chunk_kv,
                progress=progress,
                options=IngestOptions(limits=self.config.parsing, metadata=metadata or {}),
                only_new=True,
            )

    @contextmanager
    def browse(self, tenant: str, name: str) -> Iterator[LibraryBrowser]:
        """Look around in a knowledge base, which stays open until the end."""
        with self.use(tenant, name) as weave:
            yield LibraryBrowser(weave, self._uses_of(LibraryKey(tenant, name)))

    def search_options(
        self,
        retrieval: Retrieval | None = None,
        min_score: float | None = None,
        among: Mapping[str, Any] | None = None,
    ) -> SearchOptions:
        """How a search finds chunks that says so much, and leaves the rest as is usual. Raises
        RequestError."""
        usual = self.config.usual.search
        return SearchOptions(
            retrieval or usual.retrieval,
            usual.min_score if min_score is None else min_score,
            MetadataFilter.parse(among),
            usual.reranker,
        )

    def status(self, tenant: str, name: str) -> LibraryStatus:
        """Counts of a knowledge base, how far its chunk KV is, and what is wrong with it, if it
        cannot be opened. Never raises for that: others are asked about in the same breath."""
        try:
            totals, kv = self.totals(tenant, name), self.kv_progress(tenant, name)
            settings = self._check_opens(LibraryKey(tenant, check_name(name)))
            return LibraryStatus(totals, kv, order=settings.order if settings else None)
        except (CorpusError, ModelError, sqlite3.Error, OSError) as error:
            log.warning("knowledge base %r cannot be looked into: %s", name, error)
            progress = KVProgress("failed", 0, 0, 0, why="the knowledge base cannot be opened")
            is_ours = isinstance(error, KVWeaveError)
            kind = type(error).__name__ if is_ours else "CorpusDamaged"
            return LibraryStatus(Totals(0, 0, 0), progress, PROBLEMS.get(kind, PROBLEMS[""]))

    def _check_opens(self, place: LibraryKey) -> KnowledgeBaseSettings | None:
        """Return its settings. Raises CorpusMismatch where they did not fit when it was opened
        last, or do not fit the models and embedders that are loaded. Loads none itself."""
        folder = self.folders.get(place)
        settings = read_settings(folder)
        if settings is None:
            return None
        found, unfit = self._unfit.get(place, (None, None))
        if unfit is not None and found == settings:
            raise unfit
        if not self._weave.models_of(folder):
            raise CorpusMismatch(f"{folder} was cut with another tokenizer; serve its model")
        embedder = self._embedders.peek(settings.embedder)
        # what an old identity means is found out when it is opened
        if embedder is not None and not OLD_IDENTITY.fullmatch(settings.embedder_identity):
            check_settings(folder, settings, embedder_identity=embedder.identity)
        return settings

    def totals(self, tenant: str, name: str) -> Totals:
        """Counts of a knowledge base, which is not opened for it."""
        with KnowledgeBase.open(self.folders.get(LibraryKey(tenant, check_name(name)))) as kb:
            return kb.totals()

    def kv_progress(self, tenant: str, name: str) -> KVProgress:
        """How far its chunk KV is; it is not opened for it, and looked at from outside unless it is
        open and makes KV."""
        place = LibraryKey(tenant, check_name(name))
        with self._open_cache.all_open() as weaves:
            progress = [weave.kv_progress() for key, weave in weaves if key == place]
        made = progress[0] if progress else None
        if made is not None and made.state not in ("unused", "failed"):
            return made
        with KnowledgeBase.open(self.folders.get(place)) as kb:
            found = self._weave.peek_kv(kb, tenant)
        if made is None and found.state == "off" and self._weave.engines:
            is_never = self.config.kv.background is None
            return found._replace(why=NEVER) if is_never else found
        if made is None or found.state in ("ready", "making"):
            return found
        return found._replace(state=made.state, why=made.why, calibration=made.calibration)

    def hurry_kv(self, tenant: str, name: str) -> None:
        """Have the chunk KV that a knowledge base lacks made now, beside answers, until nothing is
        left. Raises RequestError where none is made."""
        with self.use(tenant, name) as weave:
            if not weave.engines:
                raise RequestError("chunk KV is made by the servers behind this gateway; ask those")
            for engine in weave.engines:
                engine.library.hurry_kv()

    def catch_up(self, tenant: str, name: str) -> None:
        """Hear of what other processes have removed from it; it is opened for that."""
        with self.use(tenant, name) as weave:
            weave.catch_up()

    def remove(self, tenant: str, name: str, document_id: str) -> int:
        """Remove one document by its whole id; returns how many chunks went with it."""
        with self._writer(tenant, name) as weave:
            if not any(d.id == document_id for d in weave.kb.documents()):
                raise NoSuchKnowledgeBase(f"{name!r} has no document {document_id!r}")
            return weave.remove(document_id)

    def set_order(self, tenant: str, name: str, order: str | None) -> None:
        """Whether chunks may move in its prompts, for questions that do not say it; None: as is
        configured."""
        check_order(order)
        with self._writer(tenant, name) as weave:
            weave.kb.set_order(order)

    def delete(self, tenant: str, name: str) -> None:
        """Delete a knowledge base: documents, vectors, chunk KV in every tier, its folder. Waits a
        while for those who use it. Raises InUse, NoSuchKnowledgeBase; RequestError for one whose
        folder was named when the server was started."""
        place = LibraryKey(tenant, check_name(name))
        folder = self.folders.get(place)
        if not is_library(folder):
            raise self.folders.unknown(place)
        if place in self.config.folders:
            raise RequestError(
                f"{name!r} lies in a folder that was named with --kb; stop the server and delete "
                "that folder, or delete its documents"
            )

        def empty(host: LibraryHost) -> None:
            try:
                is_told = host.remove_all()
            except CorpusFull as error:
                log.warning("%r: its documents go with its folder: %s", name, error)
                return
            if not is_told:
                raise InUse(
                    f"the documents of {name!r} are deleted; a shared tier does not answer and "
                    "may still hold chunk KV of them: delete the knowledge base again later"
                )

        try:
            self._open_cache.retire(place, empty, lambda: remove_folder(folder))
        except (CorpusError, sqlite3.DatabaseError) as error:
            if isinstance(error, PASSING):
                raise
            # what shared tiers hold of its chunks stays there; nothing finds it, either
            log.warning("%r does not open, its folder is deleted as it is: %s", name, error)
            remove_folder(folder)
        self._search_paces.pop(place, None)
        self._uses.pop(place, None)
        self._unfit.pop(place, None)

    def _uses_of(self, place: LibraryKey) -> ChunkUses:
        return self._uses.setdefault(place, ChunkUses())

    # ── the rest ─────────────────────────────────────────────────────────────

    def _is_quiet(self, timeout_s: float) -> bool:
        """Whether no model makes an answer, after waiting for that so long at most."""
        return all(each.runtime.wait_for_quiet(timeout_s) for each in self._weave.engines)

    def embed(self, texts: Sequence[str], *, as_query: bool = False) -> Embedded:
        """Vectors of texts, by the embedder of new knowledge bases."""
        return self._embedders.get(self.config.embedder).embed(texts, as_query=as_query)

    def metrics(self) -> Iterator[tuple[LibraryKey, Metrics]]:
        """The counters of every open knowledge base's store and audit, brought up to date; what is
        audited of documents without one has no name."""
        for metrics in self._weave.metrics():
            yield LibraryKey("", ""), metrics
        with self._open_cache.all_open() as weaves:
            for place, weave in weaves:
                for metrics in weave.metrics():
                    yield place, metrics

    @contextmanager
    def open_of(self, tenant: str) -> Iterator[list[tuple[str, LibraryHost]]]:
        """The tenant's knowledge bases that are open now, by name; none of them closes meanwhile.
        None is opened for it."""
        with self._open_cache.all_open() as weaves:
            yield [(place.name, weave) for place, weave in weaves if place.tenant == tenant]

    def counts(self) -> OpenCounts:
        """Knowledge bases open and in use."""
        return self._open_cache.counts()

    def num_pinned(self) -> int:
        """Chunk KV that some lease holds, over all open knowledge bases."""
        with self._open_cache.all_open() as weaves:
            engines = [each for _, weave in weaves for each in weave.engines]
            return sum(each.library.store.num_pinned() for each in engines)

    def close(self) -> None:
        self._open_cache.stop()
        self._searching.shutdown()
        self._open_cache.close()

    def _look_up(self, search: Callable[[], T], /) -> T:
        """On a few threads, however many ask."""
        return self._searching.submit(search).result()

    @contextmanager
    def _writer(self, tenant: str, name: str, *, create: bool = False) -> Iterator[LibraryHost]:
        """One writer each; the others wait."""
        loan = self.lend(tenant, name, create=create)
        try:
            with loan.writing, disk_trouble(f"cannot write {name!r}"):
                yield loan.thing
        finally:
            loan.give_back()
