"""What the server counts, for Prometheus.

answers      time to the first token, between tokens, in the queue; outcomes; tokens by source
stores       bytes, hits, misses, evictions of every tier of every open knowledge base
the engine   whatever `engine.stats()` says
"""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from kvweave.app.weave import Answer
from kvweave.serve.observe.scraping import LiveNumbers
from kvweave.serve.observe.spans import AnswerSpans

FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BETWEEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class ServerMetrics:
    """The meter of one server's bridge, and its page. Used from any thread."""

    def __init__(self, spans: AnswerSpans | None = None) -> None:
        self._spans = spans
        self._registry = registry = CollectorRegistry()

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
        self._strategies = count("strategies", "Answers by how they were prefilled", "strategy")
        for outcome in ("finished", "failed", "abandoned"):
            self._answers.labels(outcome)
        for source in ("exact", "reused", "recomputed", "computed"):
            self._prompt.labels(source)

    # ── the bridge's meter ───────────────────────────────────────────────────

    def began(self, queue_s: float) -> None:
        self._queue.observe(queue_s)

    def token(self, since_last_s: float | None) -> None:
        if since_last_s is not None:
            self._between.observe(since_last_s)

    def ended(self, outcome: str, answer: Answer | None, queue_s: float) -> None:
        self._answers.labels(outcome).inc()
        if answer is None:
            return
        if self._spans is not None:
            self._spans.tell(answer, queue_s)
        self._first.observe(answer.ttft_ms / 1e3)
        self._made.inc(answer.completion_tokens)
        record = answer.explain
        if record is None:
            self._strategies.labels("full").inc()
            self._prompt.labels("computed").inc(answer.prompt_tokens)
            return
        self._strategies.labels(record.strategy).inc()
        for source, count in record.counts.items():
            self._prompt.labels(source).inc(count)
        for chunk in record.chunks:
            self._chunks.labels(chunk.tier or "none").inc()
            if chunk.why is not None:
                self._degraded.labels(chunk.why).inc()

    def request(self, route: str, status: int) -> None:
        self._requests.labels(route, str(status)).inc()

    def not_prepared(self) -> None:
        self._unprepared.inc()

    # ── the page ─────────────────────────────────────────────────────────────

    def watch(self, live: LiveNumbers) -> None:
        """Read these at every scrape."""
        self._registry.register(live)

    def page(self) -> bytes:
        return generate_latest(self._registry)
