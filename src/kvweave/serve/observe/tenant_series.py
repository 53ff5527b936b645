"""What each tenant's answers did over the last half hour, in steps of ten seconds.

Filled as tokens come and answers end, so nothing has to be sampled; a tenant hears of its own
answers alone.
"""

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvweave.app.weave import Answer
from kvweave.serve.wire.watching import SeriesOut

STEP_S = 10
STEPS = 180  # half an hour
MOST_TENANTS = 256  # those whose last answer is oldest are forgotten first
RATE_STEPS = 2  # over which tokens per second are told
SOURCES = ("exact", "reused", "recomputed", "computed")


class Step(NamedTuple):
    """What happened in one step."""

    number: int  # since 1970, counted in steps
    counts: "Counter[str]"


@dataclass(slots=True)
class _Tenant:
    steps: deque[Step] = field(default_factory=lambda: deque(maxlen=STEPS))
    tokens: Counter[str] = field(default_factory=Counter)  # of prompts, by source
    tiers: Counter[str] = field(default_factory=Counter)  # chunks, by the tier that had their KV
    whys: Counter[str] = field(default_factory=Counter)  # chunks that were computed, by reason
    answers: int = 0
    made: int = 0  # tokens of answers


class TenantTotals(NamedTuple):
    """What one tenant's answers did since the server began."""

    answers: int
    made: int  # tokens of answers
    tokens: dict[str, int]  # of prompts, by source
    tiers: dict[str, int]  # chunks of prompts, by the tier that had their KV; none: computed
    whys: dict[str, int]  # chunks computed although reuse was asked for, by reason


class TenantSeries:
    """Any thread; nothing here waits."""

    def __init__(self, now_s: Callable[[], float] = time.time) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()

    def record_token(self, tenant: str) -> None:
        """A token of an answer was made."""
        with self._lock:
            own = self._own(tenant)
            own.made += 1
            self._step(own)["made"] += 1

    def record_answer(self, tenant: str, answer: Answer) -> None:
        """An answer is finished."""
        record = answer.explain
        counts = {"computed": answer.prompt_tokens} if record is None else record.counts
        with self._lock:
            own = self._own(tenant)
            own.answers += 1
            own.tokens.update(counts)
            step = self._step(own)
            step["answers"] += 1
            step.update(counts)
            for chunk in () if record is None else record.chunks:
                own.tiers[chunk.tier or "none"] += 1
                if chunk.why is not None:
                    own.whys[chunk.why] += 1

    def totals(self, tenant: str) -> TenantTotals:
        with self._lock:
            own = self._tenants.get(tenant) or _Tenant()
            tokens = {source: own.tokens[source] for source in SOURCES}
            return TenantTotals(own.answers, own.made, tokens, dict(own.tiers), dict(own.whys))

    def rate(self, tenant: str) -> float:
        """Tokens of answers per second, just now."""
        made = self.series(tenant).tokens_per_s[-RATE_STEPS:]
        return round(sum(made) / len(made), 3)

    def series(self, tenant: str) -> SeriesOut:
        last = int(self._now_s() // STEP_S)
        first = last - STEPS + 1
        with self._lock:
            own = self._tenants.get(tenant) or _Tenant()
            by_number = {step.number: Counter(step.counts) for step in own.steps}
        steps = [by_number.get(number, Counter()) for number in range(first, last + 1)]
        return SeriesOut(
            step_s=STEP_S,
            t0=first * STEP_S,
            answers=[step["answers"] for step in steps],
            exact=[step["exact"] for step in steps],
            reused=[step["reused"] for step in steps],
            recomputed=[step["recomputed"] for step in steps],
            computed=[step["computed"] for step in steps],
            hit_rate=[_hit_rate(step) for step in steps],
            tokens_per_s=[round(step["made"] / STEP_S, 3) for step in steps],
        )

    def _own(self, tenant: str) -> _Tenant:
        """Lock is held."""
        own = self._tenants.get(tenant)
        if own is None:
            own = self._tenants[tenant] = _Tenant()
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > MOST_TENANTS:
            self._tenants.popitem(last=False)
        return own

    def _step(self, own: _Tenant) -> "Counter[str]":
        """Lock is held."""
        number = int(self._now_s() // STEP_S)
        if not own.steps or own.steps[-1].number != number:
            own.steps.append(Step(number, Counter()))
        return own.steps[-1].counts


def _hit_rate(step: "Counter[str]") -> float | None:
    total = sum(step[source] for source in SOURCES)
    return round((step["exact"] + step["reused"]) / total, 4) if total else None
