"""Tensor-parallel ranks as threads: each has some heads of kvweave's own decoder."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from kvweave.kernels.rope import Angles
from kvweave.model.decoder import Decoder
from kvweave.model.rows import QKV
from kvweave.model.spec import ModelSpec

T = TypeVar("T")
WAIT_S = 30.0  # a rank that computes something else than the others is found out


class Ranks:
    """Where ranks meet, and how often they did."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.meetings = 0
        self._barrier = threading.Barrier(count, timeout=WAIT_S)
        self._brought: list[Tensor] = [torch.empty(0)] * count

    def gather(self, rank: int, x: Tensor) -> list[Tensor]:
        """What every rank brings, in their order. All of them must come, with the same shape."""
        self._brought[rank] = x.clone()
        self._barrier.wait()
        found = list(self._brought)
        self._barrier.wait()
        self.meetings += rank == 0
        return found

    def all(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Run a job on each rank at once; on this thread where there is one rank."""
        if self.count == 1:
            return [job() for job in jobs]
        with ThreadPoolExecutor(self.count) as pool:
            return [done.result() for done in [pool.submit(job) for job in jobs]]


class RankDecoder:
    """The heads of one rank. The products behind attention are made by each from all heads."""

    can_record = False

    def __init__(self, whole: Decoder, spec: ModelSpec, rank: int, ranks: Ranks) -> None:
        """`spec` is that of a rank; no other uses `whole`."""
        self.spec = spec
        self.device, self.dtype = whole.device, whole.dtype
        self._whole = whole
        self._rank = rank
        self._ranks = ranks

    def angles(self, positions: Tensor) -> Angles:
        return self._whole.angles(positions)

    def turn(self, positions: Tensor) -> Angles:
        return self._whole.turn(positions)

    def embed(self, ids: Tensor) -> Tensor:
        return self._whole.embed(ids)

    def qkv(self, layer: int, h: Tensor, out: Tensor | None = None) -> QKV:
        whole = self._whole.qkv(layer, h)
        parts = (x.chunk(self._ranks.count, dim=1)[self._rank] for x in (whole.q, whole.k, whole.v))
        return QKV(*(part.contiguous() for part in parts))

    def finish(self, layer: int, h: Tensor, attended: Tensor) -> Tensor:
        return self._whole.finish(layer, h, torch.cat(self._ranks.gather(self._rank, attended), 1))

    def logits(self, h: Tensor) -> Tensor:
        return self._whole.logits(h)

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        return torch.stack(self._ranks.gather(self._rank, x)).sum(0)

    def recording(self) -> AbstractContextManager[None]:
        return nullcontext()
