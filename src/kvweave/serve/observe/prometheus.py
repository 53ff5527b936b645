"""What the server counts, for Prometheus: answers as they happen, and the state at a scrape."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvweave.app.answer.notes import UpstreamNote
from kvweave.app.libraries.libraries import Libraries
from kvweave.app.weave import REPETITION, Answer
from kvweave.metrics import Sample
from kvweave.serve.observe.tracing import AnswerSpans
from kvweave.serve.wire.explain import strategy_of

FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BETWEEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class PoolCounts(NamedTuple):
    """What the pool of answers is doing and has done."""

    running: int
    waiting: int
    finished: int
    failed: int
    abandoned: int


class ServerMetrics:
    """The meter of one server's answers, and its page. Used from any thread."""

    def __init__(self, spans: AnswerSpans | None = None) -> None:
        self._spans = spans
        self._registry = registry = CollectorRegistry()
        self._state: StateCollector | None = None

        def times(name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"kvweave_{name}", words, buckets=buckets, registry=registry)

        def count(name: str, words: str, *labels: str) -> Counter:
            return Counter(f"kvweave_{name}", words, labels, registry=registry)

        self._first = times(
            "time_to_first_token_seconds", "From the call to the first token", FIRST_TOKEN_S
        )
        self._between = times("time_between_tokens_seconds", "Between two tokens", BETWEEN_S)
        self._queue = times("queue_seconds", "Admitted, not begun", FIRST_TOKEN_S)
        self._answers = count("answers", "Answers by outcome", "outcome")
        self._requests = count("http_requests", "Requests", "route", "status")
        self._prompt = count("prompt_tokens", "Prompt tokens by where their KV is from", "source")
        self._made = count("completion_tokens", "Tokens of answers")
        self._degraded = count(
            "degradations", "Chunks computed although reuse was asked for, by reason", "reason"
        )
        self._chunks = count(
            "chunks", "Chunks of prompts that reuse, by the tier that had their KV", "tier"
        )
        self._unprepared = count(
            "prepare_failures", "What failed before the server was ready, see the log"
        )
        self._resumed = count(
            "requests_resumed", "Requests of a process that was lost, begun again in this one"
        )
        self._loops = count(
            "looping_answers", "Answers ended because they only repeated themselves"
        )
        self._nothing = count("nothing_found", "Answers that say that nothing was found")
        self._strategies = count("strategies", "Answers by how they were prefilled", "strategy")
        self._ordered = count("ordered", "Answers whose chunks were moved, by what for", "by")
        self._left_out = count("left_out_chunks", "Chunks not sent: the history holds them")
        self._staged = count("staged_searches", "Answers whose search had stages to guess at")
        self._guesses = count("guesses", "Prompts begun before the search was over", "outcome")
        for outcome in ("right", "wrong"):
            self._guesses.labels(outcome)
        for by in ("frequency", "tree", "first hit"):
            self._ordered.labels(by)
        for outcome in ("finished", "failed", "abandoned"):
            self._answers.labels(outcome)
        for source in ("exact", "reused", "recomputed", "computed"):
            self._prompt.labels(source)

    # ── answers, on their worker threads ─────────────────────────────────────

    def record_start(self, queue_s: float) -> None:
        self._queue.observe(queue_s)

    def record_token(self, since_last_s: float | None) -> None:
        """`since_last_s` is None for the first one."""
        if since_last_s is not None:
            self._between.observe(since_last_s)

    def record_end(self, outcome: str, answer: Answer | None, queue_s: float) -> None:
        """`outcome` is one of PoolCounts: finished, failed, abandoned."""
        self._answers.labels(outcome).inc()
        if answer is None:
            return
        if self._spans is not None:
            self._spans.tell(answer, queue_s)
        if answer.nothing_found:  # no model was asked: there is no first token
            self._nothing.inc()
            return
        self._first.observe(answer.ttft_ms / 1e3)
        self._made.inc(answer.completion_tokens)
        self._loops.inc(answer.stopped_because == REPETITION)
        if (guessed := answer.speculation) is not None:
            right = int(guessed.right_stage is not None)
            self._staged.inc()
            self._guesses.labels("right").inc(right)
            self._guesses.labels("wrong").inc(guessed.guesses - right)
        record = answer.explain
        if answer.decision is not None and answer.decision.plan.ordered_by != "given":
            self._ordered.labels(answer.decision.plan.ordered_by).inc()
        if answer.upstream is not None:
            self._record_upstream(answer, answer.upstream)
            return
        self._strategies.labels(strategy_of(answer)).inc()
        if record is None:
            self._prompt.labels("computed").inc(answer.prompt_tokens)
            return
        self._left_out.inc(record.left_out)
        for source, count in record.counts.items():
            self._prompt.labels(source).inc(count)
        for chunk in record.chunks:
            self._chunks.labels(chunk.tier or "none").inc()
            if chunk.why is not None:
                self._degraded.labels(chunk.why).inc()

    def _record_upstream(self, answer: Answer, note: UpstreamNote) -> None:
        """Count what the upstream says of an answer that came through a gateway."""
        self._strategies.labels(strategy_of(answer)).inc()
        self._left_out.inc(note.left_out)
        if note.ordered_by != "given":
            self._ordered.labels(note.ordered_by).inc()
        counts = note.tokens(answer.prompt_tokens) or {"unknown": answer.prompt_tokens}
        for source, count in counts.items():
            self._prompt.labels(source).inc(count)

    def request(self, route: str, status: int) -> None:
        self._requests.labels(route, str(status)).inc()

    def not_prepared(self) -> None:
        self._unprepared.inc()

    def record_resumed(self) -> None:
        self._resumed.inc()

    # ── the page ─────────────────────────────────────────────────────────────

    def watch(self, state: "StateCollector") -> None:
        """Read these at every scrape."""
        self._state = state

    def page(self, *, with_names: bool = True) -> bytes:
        """`with_names`: tenants and knowledge bases are told apart, by their names; without, what
        is counted of them is added up."""
        state = None if self._state is None else self._state.collect(with_names)
        return generate_latest(_Page(self._registry, state or ()))


class _Page(NamedTuple):
    """What generate_latest reads of a registry: the counters, and then the state."""

    registry: CollectorRegistry
    state: Iterable[Metric]

    def collect(self) -> Iterator[Metric]:
        yield from self.registry.collect()
        yield from self.state


@dataclass(eq=False)
class StateCollector:
    """Numbers that other objects keep, read at every scrape, on the event loop: nothing blocks.

    Answers running and waiting; knowledge bases open and in use; every tier of every open store;
    and what the host of the model counts, which knowledge bases by name share.
    """

    _counts: Callable[[], PoolCounts]
    _libraries: Libraries
    _host_samples: Callable[[], Iterable[Sample]]

    def collect(self, with_names: bool) -> Iterator[Metric]:
        counts = self._counts()
        yield GaugeMetricFamily("kvweave_running", "Answers being computed", counts.running)
        yield GaugeMetricFamily("kvweave_waiting", "Answers admitted, not begun", counts.waiting)
        pinned = self._libraries.num_pinned()
        yield GaugeMetricFamily("kvweave_kv_pinned", "Chunk KV that a lease holds", pinned)
        yield from self._knowledge_bases()
        yield from self._stores(with_names)
        yield from families_of(self._host_samples())

    def _knowledge_bases(self) -> Iterator[Metric]:
        counts, config = self._libraries.counts(), self._libraries.config
        for name, words, value in (
            ("kb_open", "Knowledge bases that are open", counts.open),
            ("kb_open_most", "Knowledge bases that may be open", config.open_most),
            ("kb_in_use", "Knowledge bases that a request or an upload uses", counts.in_use),
            ("kb_host_most_bytes", "Host memory for chunk KV of all of them", config.host_bytes),
        ):
            yield GaugeMetricFamily(f"kvweave_{name}", words, value)
        for name, words, count in (
            ("kb_opened", "Knowledge bases opened", counts.opened),
            ("kb_closed", "Knowledge bases closed to make way for others", counts.closed),
            (
                "kb_close_failures",
                "Knowledge bases that were not closed in order, see the log",
                counts.close_failures,
            ),
        ):
            yield CounterMetricFamily(f"kvweave_{name}", words, count)

    def _stores(self, with_names: bool) -> Iterator[Metric]:
        added: dict[Sample, float] = {}  # the samples without a value
        for place, metrics in self._libraries.metrics():
            own = (("tenant", place.tenant), ("kb", place.name)) if with_names else ()
            for sample in metrics.snapshot():
                kind = sample._replace(labels=(*own, *sample.labels), value=0.0)
                added[kind] = added.get(kind, 0.0) + sample.value
        yield from families_of(kind._replace(value=value) for kind, value in added.items())


PAGES = {"audit": "audit", "engine": "engine", "upstream": "gateway"}  # first word → docs page


def families_of(samples: Iterable[Sample]) -> Iterator[Metric]:
    """Samples as Prometheus has them, those of one name and the same labels together."""
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for sample in samples:
        names = [name for name, _ in sample.labels]
        key = f"{sample.name}{names}"
        if key not in families:
            kind = CounterMetricFamily if sample.is_counter else GaugeMetricFamily
            name = f"kvweave_{sample.name.removesuffix('_total')}"
            page = PAGES.get(sample.name.partition("_")[0], "store")
            families[key] = kind(name, f"See docs/{page}.md", labels=names)
        families[key].add_metric([value for _, value in sample.labels], sample.value)
    yield from families.values()
