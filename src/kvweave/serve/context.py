"""What the routes of one server share."""

from dataclasses import dataclass

from fastapi import Request

from kvweave.app.libraries.libraries import Libraries
from kvweave.app.weave import Weave
from kvweave.serve.limits import Limits
from kvweave.serve.observe.prometheus import ServerMetrics
from kvweave.serve.workers.answer_pool import AnswerPool
from kvweave.serve.workers.task_pool import TaskPool


@dataclass(slots=True)
class Context:
    """Made once by `build_http`; only the last two change."""

    weave: Weave
    libraries: Libraries
    limits: Limits
    answers: AnswerPool
    tasks: TaskPool  # searches, lists, embeddings
    writing: TaskPool  # uploads and deletions
    metrics: ServerMetrics
    preparing: str | None = None  # what is done before it is ready, if anything
    is_stopping: bool = False  # takes no new work; what runs may finish


def tenant_of(request: Request) -> str:
    """Whose request it is; set by `auth.ApiKeys`, "" where there are no keys."""
    return str(getattr(request.state, "tenant", ""))
