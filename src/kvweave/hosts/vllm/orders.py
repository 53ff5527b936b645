"""What the halves tell each other. Plain data: it is pickled from process to process."""

from dataclasses import dataclass, field
from typing import Any

from kvweave.hosts.vllm.lora import Adapter
from kvweave.hosts.vllm.reuse_request import ReuseRequest


@dataclass(frozen=True, slots=True)
class FuseOrder:
    """Fill blocks of a request before the step's forward pass."""

    request_id: str
    token_ids: tuple[int, ...]  # of the prompt
    wish: ReuseRequest
    block_ids: tuple[int, ...]  # of the request, in position order
    num_local: int  # tokens in front whose KV vLLM has: never written
    is_local_ready: bool = True  # it was there before this step: may be read
    lora: Adapter | None = None


@dataclass(frozen=True, slots=True)
class EncodeOrder:
    """Encode chunks that are not stored, when there is time."""

    number: int
    preamble_ids: tuple[int, ...]
    tenant: str
    in_front: tuple[tuple[int, ...], ...]  # token ids of chunks wanted right behind the preamble
    behind: tuple[tuple[int, ...], ...]  # of chunks wanted behind the encoding context
    lora: Adapter | None = None


@dataclass(frozen=True, slots=True)
class ForgetOrder:
    """Delete the KV of chunks that are no more."""

    chunk_ids: tuple[str, ...]
    number: int = 0  # nobody waits for it


@dataclass(slots=True)
class StepOrders:
    """From the scheduler, with every step."""

    fuse: list[FuseOrder] = field(default_factory=list)
    encode: list[EncodeOrder] = field(default_factory=list)
    forget: list[ForgetOrder] = field(default_factory=list)
    is_idle: bool = False  # nothing is computed in this step
    has_turn: bool = False  # ranks, which have to do so at once, make a chunk in this step


@dataclass(slots=True)
class StepReport:
    """From the worker, with a step's output."""

    fused: dict[str, dict[str, Any]] = field(default_factory=dict)  # by request: what was done
    settled: set[int] = field(default_factory=set)  # encode orders that are done with
    made: list[bytes] = field(default_factory=list)  # keys that were saved
    lost: list[bytes] = field(default_factory=list)  # keys that no tier had, or gave

    def __bool__(self) -> bool:
        return bool(self.fused or self.settled or self.made or self.lost)

    def add(self, other: "StepReport") -> None:
        self.fused.update(other.fused)
        self.settled |= other.settled
        self.made += other.made
        self.lost += other.lost
