"""What the connector counts, in vLLM's own log and on its /metrics page.

vllm:kvweave_requests_total{way}    requests with chunks: fused, exact, refused, failed
vllm:kvweave_exact_total{why}       those that were computed exactly: a reason (reasons.py)
vllm:kvweave_tokens_total{state}    prompt tokens of fused ones: exact, reused, …
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

SERIES = {
    "way": ("vllm:kvweave_requests", "Requests that declared chunks, by what became of them."),
    "why": ("vllm:kvweave_exact", "Requests with chunks that were computed exactly, by why."),
    "state": ("vllm:kvweave_tokens", "Prompt tokens of fused requests, by where KV came from."),
}


@dataclass
class FusionStats(KVConnectorStats):
    """Counts since the last step, by series and label: "way fused", "state reused"."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class FusionMetrics(KVConnectorPromMetrics):
    """The counters of an API server. On its one thread."""

    def __init__(self, *args: Any) -> None:
        """vLLM calls this with its config, kinds of metrics, labels and their values by engine."""
        super().__init__(*args)
        self._counters = {
            label: self._counter_cls(
                name=name, documentation=words, labelnames=[*self._labelnames, label]
            )
            for label, (name, words) in SERIES.items()
        }

    def observe(self, transfer_stats_data: Mapping[str, int], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            label, _, value = name.partition(" ")
            labels = [*self.per_engine_labelvalues[engine_idx], value]
            self._counters[label].labels(*labels).inc(count)
