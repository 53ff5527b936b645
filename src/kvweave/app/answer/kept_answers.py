"""The last answers of each tenant, for those who want to look closer at one.

What is kept of an answer are references to what it was made of (`AnswerTrace`): a few kilobytes of
token ids, and on a device the scores of its stored tokens. An answer one of whose chunks was
deleted since is no longer given: its prompt would show the text.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvweave.app.answer.answer_stream import Answer
from kvweave.corpus.chunker import make_chunk_id
from kvweave.errors import RequestError
from kvweave.types import ChunkId

# whether a chunk that this model found then was deleted since, for this tenant
IsGoneFor = Callable[[str, ChunkId, int, str], bool]
KEPT = 64  # of one tenant
TENANTS = 16  # that may have so many at a time; beyond that, whose last answer is oldest has fewer


class NoSuchAnswer(RequestError):
    """It is not kept, or no longer."""


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """An answer, and what its server knows of it."""

    id: str
    model: str  # that gave it
    kb: str | None  # name of the knowledge base it was asked of
    answer: Answer
    queue_s: float = 0.0  # it waited so long before it was begun
    created: float = field(default_factory=time.time)  # seconds since 1970

    @property
    def question(self) -> str:
        return "" if self.answer.trace is None else self.answer.trace.question


class KeptAnswers:
    """Keeps the last answers so that someone may look closer. Any thread; nothing here waits."""

    def __init__(self, most: int, is_gone: IsGoneFor) -> None:
        """`most` of each tenant; 0 keeps none."""
        self._most = most
        self._is_gone = is_gone
        self._lock = threading.Lock()
        self._by_tenant: OrderedDict[str, OrderedDict[str, KeptAnswer]] = OrderedDict()

    def add(self, tenant: str, kept: KeptAnswer) -> None:
        if not self._most or kept.answer.trace is None:
            return
        # a float per word of the vocabulary for each watched token: megabytes, read by nobody here
        kept = replace(kept, answer=replace(kept.answer, watched=None))
        with self._lock:
            own = self._by_tenant.setdefault(tenant, OrderedDict())
            own[kept.id] = kept
            if len(own) > self._most:
                own.popitem(last=False)
            self._by_tenant.move_to_end(tenant)
            if sum(map(len, self._by_tenant.values())) > self._most * TENANTS:
                self._drop_one()

    def get(self, tenant: str, answer_id: str) -> KeptAnswer:
        """Raises NoSuchAnswer."""
        with self._lock:
            kept = self._own(tenant).get(answer_id)
        if kept is None or self._shows_deleted(kept):
            self._forget(tenant, answer_id)
            raise NoSuchAnswer(
                f"answer {answer_id!r} is not kept here: the last {self._most} are, and none of "
                "deleted documents; ask again"
            )
        return kept

    def all(self, tenant: str) -> list[KeptAnswer]:
        """Newest first."""
        with self._lock:
            found = list(self._own(tenant).values())
        for kept in found:
            if self._shows_deleted(kept):
                self._forget(tenant, kept.id)
        return [kept for kept in reversed(found) if not self._shows_deleted(kept)]

    def forget_kb(self, tenant: str, kb: str) -> None:
        """A knowledge base is no more, nor are answers from it."""
        with self._lock:
            own = self._own(tenant)
            for answer_id in [k.id for k in own.values() if k.kb == kb]:
                del own[answer_id]

    def _forget(self, tenant: str, answer_id: str) -> None:
        with self._lock:
            self._own(tenant).pop(answer_id, None)

    def _own(self, tenant: str) -> OrderedDict[str, KeptAnswer]:
        """Lock is held."""
        return self._by_tenant.get(tenant) or OrderedDict()

    def _drop_one(self) -> None:
        """Lock is held."""
        tenant, own = next((t, own) for t, own in self._by_tenant.items() if own)
        own.popitem(last=False)
        if not own:
            del self._by_tenant[tenant]

    def _shows_deleted(self, kept: KeptAnswer) -> bool:
        trace = kept.answer.trace
        if trace is None or trace.prompt.as_of is None:
            return False
        prompt, as_of = trace.prompt, trace.prompt.as_of
        parts = (*prompt.history, *prompt.chunks)
        ids = (make_chunk_id(part) for part in parts)
        return any(self._is_gone(kept.model, each, as_of, prompt.tenant) for each in ids)
