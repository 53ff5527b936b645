"""What the routes of one server share: its context, and parameters of paths and queries."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from fastapi import Path, Request

from kvweave.app.answer.kept_answers import KeptAnswers
from kvweave.app.hosts import LocalModel, ModelHost
from kvweave.app.libraries.libraries import Libraries
from kvweave.serve.access.api_keys import client_of, tenant_of
from kvweave.serve.access.errors import ApiError
from kvweave.serve.access.limits import USUAL, Limits
from kvweave.serve.observe.prometheus import ServerMetrics, StateCollector
from kvweave.serve.observe.tenant_series import TenantSeries
from kvweave.serve.observe.tracing import AnswerSpans, find_tracer
from kvweave.serve.routes.model_names import ModelNames, RequestDefaults
from kvweave.serve.uploads.quotas import TenantQuotas
from kvweave.serve.uploads.reader import UploadReader
from kvweave.serve.wire.base import NAME_PATTERN
from kvweave.serve.workers.answer_pool import AnswerPool
from kvweave.serve.workers.engine_watch import EngineTrial
from kvweave.serve.workers.task_pool import TaskPool
from kvweave.types import ChunkId

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

P = ParamSpec("P")
T = TypeVar("T")

Name: Any = Path(
    description="A knowledge base: letters, digits, - and _",
    json_schema_extra={"pattern": NAME_PATTERN},
)


def check_limit(limit: int, most: int) -> None:
    """Raise a 400 unless a `limit` of a query can be meant."""
    if not 1 <= limit <= most:
        message = f"'limit' must be between 1 and {most}, got {limit}"
        raise ApiError(400, message, param="limit")


@dataclass(frozen=True, slots=True)
class PageConfig:
    """What a server keeps for those who look at its web page."""

    # of each tenant, whose details can be asked for; 0: none
    kept_answers: int = USUAL.kept_answers
    # folder of conversations that are kept for holders of API keys; None: none are
    conversations: FilePath | None = None


@dataclass(slots=True)
class Readiness:
    """Whether a server takes work. `server.Server` alone writes it, on the event loop or in a
    signal handler."""

    preparing: str | None = None  # what is done before the server is ready, if anything
    is_stopping: bool = False  # takes no new work; what runs may finish
    broken: str | None = None  # what is wrong with the engine, for good


@dataclass(frozen=True, slots=True)
class Context:
    """Owns the threads of one server: `close` it on the event loop. `make_context` makes it."""

    weave: ModelHost
    libraries: Libraries
    limits: Limits
    answers: AnswerPool
    tasks: TaskPool  # searches, lists, embeddings
    writing: TaskPool  # uploads and deletions
    quotas: TenantQuotas  # whether a tenant may upload more
    uploads: UploadReader
    metrics: ServerMetrics
    tracer: "Tracer | None"  # of OpenTelemetry; None: no spans
    usual: RequestDefaults  # what requests may leave out
    models: ModelNames  # what they may call the model
    tenants: TenantSeries  # what each tenant's answers did lately
    kept: KeptAnswers  # the last answers, for those who look closer
    page: PageConfig
    readiness: Readiness = field(default_factory=Readiness)
    trial: EngineTrial = field(default_factory=EngineTrial)  # what a failure says of the engines

    @property
    def by_name(self) -> dict[str, LocalModel]:
        """The models that are in this process."""
        return {model.model_name: model for model in self.weave.engines}

    async def run(
        self, request: Request, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call `work` on a thread for searches and the like, as a task of the request's client."""
        call = partial(work, *args, **kwargs)
        return await self.tasks.run(call, client=client_of(request.scope))

    async def write(
        self, request: Request, kb: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Call `work` on a thread for writers, when the writers of `kb` before it are done."""
        call, turn = partial(work, *args, **kwargs), (tenant_of(request.scope), kb)
        return await self.writing.run(call, turn=turn, client=client_of(request.scope))

    def give_up(self) -> None:
        """Have everything that runs end as soon as it can; its clients get a 503."""
        self.answers.abandon_all()
        self.tasks.stop()
        self.writing.stop()

    async def close(self) -> None:
        """Give up what still runs and wait for its threads."""
        await self.answers.close()
        await self.tasks.close()
        await self.writing.close()


def make_context(
    weave: ModelHost,
    limits: Limits | None = None,
    *,
    libraries: Libraries | None = None,
    usual: RequestDefaults | None = None,
    tracer: "Tracer | None" = None,
    page: PageConfig | None = None,
) -> Context:
    """`libraries` are its knowledge bases by name, closed by the caller who made them. `usual` is
    for requests that leave things out, before what `weave` was configured with. `tracer` None is
    the process's own, if OpenTelemetry is configured. `page` None keeps the usual."""
    limits, usual = limits or Limits(), usual or RequestDefaults()
    libraries = libraries or Libraries(weave)
    tracer = tracer or find_tracer()
    metrics = ServerMetrics(None if tracer is None else AnswerSpans(tracer))
    tenants = TenantSeries()
    answers = AnswerPool(limits, metrics, tenants)
    metrics.watch(StateCollector(answers.counts, libraries, weave.samples))
    page = page or PageConfig()
    if not weave.engines:  # answers from elsewhere have no details to look at
        page = replace(page, kept_answers=0)
    return Context(
        weave,
        libraries,
        limits,
        answers,
        tasks=TaskPool(limits, "searches or embeddings"),
        writing=TaskPool(limits, "uploads"),
        quotas=TenantQuotas(limits, libraries),
        uploads=UploadReader(limits),
        metrics=metrics,
        tracer=tracer,
        usual=usual,
        models=ModelNames(weave, libraries, usual.aliases),
        tenants=tenants,
        kept=KeptAnswers(page.kept_answers, partial(_is_gone, weave.engines)),
        page=page,
    )


def _is_gone(
    engines: Sequence[LocalModel], model: str, chunk_id: ChunkId, as_of: int, tenant: str
) -> bool:
    """Whether a chunk was removed since, as the model has heard."""
    clients = (engine.runtime.client for engine in engines if engine.model_name == model)
    return any(client.is_gone(chunk_id, as_of, tenant) for client in clients)
