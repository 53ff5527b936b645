"""What was done for a prompt, on its way from those who prefill it to its answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvweave.app.audit.figures import AuditNote
from kvweave.fuse.record import FuseRecord
from kvweave.plan.plan import Decision
from kvweave.plan.retrieval import SpeculationRecord


@dataclass(slots=True, eq=False)
class AnswerNotes:
    """Written before the answer's first token is handed out, read when it is finished."""

    record: FuseRecord | None = None  # how the prompt was prefilled
    decision: Decision | None = None  # why so; None unless the planner chose
    speculation: SpeculationRecord | None = None  # what was guessed while searching
    audit: AuditNote | None = None  # of a fused one that may be audited
    retrieve_ms: float = 0.0
    left_out: int = 0  # chunks that were found and not sent: the history holds them
    why: str | None = None  # no more is reused, and what to do about it

    def keep(self, record: FuseRecord) -> None:
        """The prompt is prefilled, and this is how. Heard once, before the first token."""
        stages = replace(record.stages, retrieve=self.retrieve_ms)
        self.record = replace(record, stages=stages, why=self.why, left_out=self.left_out)


@dataclass(frozen=True, slots=True)
class UpstreamNote:
    """What a gateway knows of an answer that another server computed."""

    upstream: str  # which one
    attempts: int  # upstreams that were tried, this one included
    matched_tokens: int  # of the prompt, that it was believed to hold already
    cached_tokens: int | None  # that it says it held; None: it does not say
    chunks: tuple[tuple[int, int], ...] = ()  # half-open spans of the prompt; empty: not known
    left_out: int = 0  # chunks that were found and not sent: the history holds them
    retrieve_ms: float = 0.0
    ordered_by: str = "given"  # what the chunks were moved for
    # what the upstream says it did: way, strategy, exact, reused, recomputed, computed, why, …
    told: Mapping[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "upstream": self.upstream,
            "attempts": self.attempts,
            "matched_tokens": self.matched_tokens,
            "cached_tokens": self.cached_tokens,
            "ordered_by": self.ordered_by,
            "told": dict(self.told),
        }
