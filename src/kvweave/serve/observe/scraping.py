"""Numbers that others keep, read at every scrape.

the bridge   answers running and waiting
stores       bytes, loads, misses, evictions of every tier of every open knowledge base
kbs          open and in use
the engine   whatever `engine.stats()` says; knowledge bases by name share it
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvweave.app.libraries.libraries import Libraries


class CountsLike(Protocol):
    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...


class EngineLike(Protocol):
    """What the server asks of an engine. Called on the event loop; must not block."""

    def stats(self) -> object:
        """A dataclass, a NamedTuple or a mapping of numbers, or of mappings of numbers."""


class LiveNumbers(Collector):
    """See the module."""

    def __init__(
        self, counts: Callable[[], CountsLike], libraries: Libraries, engine: EngineLike
    ) -> None:
        self._counts = counts
        self._libraries = libraries
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        counts = self._counts()
        yield GaugeMetricFamily("kvweave_running", "Answers being computed", counts.running)
        yield GaugeMetricFamily("kvweave_waiting", "Answers admitted, not begun", counts.waiting)
        pinned = self._libraries.num_pinned()
        yield GaugeMetricFamily("kvweave_kv_pinned", "Chunk KV that a lease holds", pinned)
        yield from self._knowledge_bases()
        yield from self._stores()
        yield from engine_metrics(self._engine.stats())

    def _knowledge_bases(self) -> Iterator[Metric]:
        counts, config = self._libraries.counts(), self._libraries.config
        for name, words, value in (
            ("kb_open", "Knowledge bases that are open", counts.open),
            ("kb_open_most", "Knowledge bases that may be open", config.open_most),
            ("kb_in_use", "Knowledge bases that a request or an upload uses", counts.in_use),
            ("kb_host_most_bytes", "Host memory for chunk KV of all of them", config.host_bytes),
        ):
            yield GaugeMetricFamily(f"kvweave_{name}", words, value)
        opened = "Knowledge bases opened"
        yield CounterMetricFamily("kvweave_kb_opened", opened, counts.opened)
        closed = "Knowledge bases closed to make way for others"
        yield CounterMetricFamily("kvweave_kb_closed", closed, counts.closed)
        failed = "Knowledge bases that were not closed in order, see the log"
        yield CounterMetricFamily("kvweave_kb_close_failures", failed, counts.close_failures)

    def _stores(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for place, metrics in self._libraries.metrics():
            for sample in metrics.snapshot():
                names = ["tenant", "kb", *(name for name, _ in sample.labels)]
                values = [place.tenant, place.name, *(value for _, value in sample.labels)]
                key = f"{sample.name}{names}"
                if key not in families:
                    kind = CounterMetricFamily if sample.is_counter else GaugeMetricFamily
                    name = f"kvweave_{sample.name.removesuffix('_total')}"
                    families[key] = kind(
                        name, "Of a chunk KV store, see docs/store.md", labels=names
                    )
                families[key].add_metric(values, sample.value)
        yield from families.values()


def engine_metrics(stats: object) -> Iterable[Metric]:
    """Numbers as gauges named kvweave_engine_…; a mapping of numbers has its keys as labels."""
    found: Mapping[str, Any]
    if is_dataclass(stats) and not isinstance(stats, type):
        found = asdict(stats)
    else:
        found = stats._asdict() if hasattr(stats, "_asdict") else dict(stats)  # type: ignore[call-overload]
    for name, value in found.items():
        if isinstance(value, Mapping):
            family = GaugeMetricFamily(f"kvweave_engine_{name}", "Of the engine", labels=["kind"])
            for kind, part in value.items():
                if isinstance(part, int | float):
                    family.add_metric([str(kind)], part)
            yield family
        elif isinstance(value, int | float):
            yield GaugeMetricFamily(f"kvweave_engine_{name}", "Of the engine", value)
