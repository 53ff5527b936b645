"""Decode steps as the engine records them, for machines without CUDA graphs or without kernels."""

import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from kvweave.kernels.paged_attention import attend_paged_reference
from kvweave.kernels.rope import Angles, Turn, rotate
from kvweave.kernels.segments import attend_segments_reference
from kvweave.kernels.types import CodedPages, PagedSegment, SegmentedRows, SharedChunk
from kvweave.model import recorded_decode
from kvweave.model.decoder import Decoder
from kvweave.model.recorded_decode import StepResult


class EagerGraph:
    """Computes anew at every replay. A step of no sequence comes first, as in a recording."""

    def __init__(
        self, decoder: Decoder, compute: Callable[[], StepResult], shared: "EagerGraph | None"
    ) -> None:
        self._compute = compute
        compute()

    def replay(self) -> StepResult:
        return self._compute()


class PlainTables:
    """As kernels/gpu/decode.DecodeTables, which needs Triton."""

    def __init__(self, num_sequences: int, max_pages: int, **how: object) -> None:
        self.num_sequences = num_sequences
        self.room = num_sequences * max_pages

    def update(
        self, num_keys: Sequence[int], page_tables: Sequence[ArrayLike], rows: ArrayLike
    ) -> None:
        self.num_keys = list(num_keys)
        self.page_tables = [np.asarray(table).tolist() for table in page_tables]
        assert sum(map(len, self.page_tables)) <= self.room
        self.rows = torch.tensor(rows, dtype=torch.int32)


def attend_plainly(
    q: Tensor, tables: PlainTables, key_pages: Tensor, value_pages: Tensor
) -> Tensor:
    """As kernels/gpu/decode.attend_decode."""
    assert len(q) == tables.num_sequences
    num = len(tables.num_keys)
    out = torch.zeros_like(q)
    if num:
        segments = [PagedSegment(i, i + 1, table) for i, table in enumerate(tables.page_tables)]
        positions = torch.tensor(tables.num_keys) - 1
        out[:num] = attend_paged_reference(q[:num], positions, segments, key_pages, value_pages)
    return out


class PlainSegmentTables:
    """As kernels/gpu/segment_tables.SegmentTables, which needs Triton."""

    def __init__(self, num_rows: int, room: int, *_: object) -> None:
        self.num_rows, self.room = num_rows, room
        self.chunks: list[Sequence[SharedChunk]] = []
        self.own_keys: list[int] = []

    def hold(self, chunks: Sequence[Sequence[SharedChunk]]) -> bool:
        if sum(map(len, chunks)) > self.room:
            return False
        self.chunks = list(chunks)
        return True

    def update(
        self, own_keys: Sequence[int], own_pages: Sequence[ArrayLike], rows: ArrayLike
    ) -> None:
        self.own_keys = list(own_keys)
        self.own_pages = [np.asarray(table).tolist() for table in own_pages]
        assert len(self.own_keys) == len(self.chunks), "what a row holds is told before"
        self.rows = torch.tensor(rows, dtype=torch.int32)


def attend_segments_plainly(
    q: Tensor,
    tables: PlainSegmentTables,
    turn: Turn,
    key_pages: Tensor,
    value_pages: Tensor,
    at: Angles,
    coded: CodedPages | None = None,
) -> Tensor:
    """As kernels/gpu/segments.attend_tables. A step has nothing but the decoder's turn."""
    num = len(tables.own_keys)
    out = torch.zeros_like(q)
    if num:
        rows = [
            SegmentedRows(i, i + 1, PagedSegment(i, i + 1, table), chunks)
            for i, (table, chunks) in enumerate(zip(tables.own_pages, tables.chunks, strict=True))
        ]
        behind = torch.full((num,), 1 << 30)  # everything stands in front of rows that decode
        ranks = torch.tensor(tables.own_keys) - 1
        turned = rotate(q, at)[:num]
        out[:num] = attend_segments_reference(
            turned, behind, ranks, rows, key_pages, value_pages, turn, coded
        )
    return out


class PlainPromptTables:
    """As kernels/gpu/prompt_rows.PromptTables, which needs Triton."""

    def __init__(self, num_rows: int, most_pages: int, *_: object) -> None:
        self.most_pages = most_pages
        self.own_keys: list[int] = []

    def update(
        self,
        chunks: Sequence[SharedChunk],
        own_keys: Sequence[int],
        own_pages: ArrayLike,
        rows: ArrayLike,
    ) -> bool:
        own = np.asarray(own_pages).tolist()
        if len(own) + sum(len(chunk.pages) for chunk in chunks) > self.most_pages:
            return False
        assert all(chunk.replaced is None for chunk in chunks), "chunks are seen whole"
        self.chunks, self.own_keys, self.own_pages = chunks, list(own_keys), own
        self.rows = torch.tensor(rows, dtype=torch.int32)
        return True


def attend_prompt_plainly(
    q: Tensor,
    tables: PlainPromptTables,
    at: Angles,
    turn: Turn,
    key_pages: Tensor,
    value_pages: Tensor,
    coded: CodedPages | None = None,
) -> Tensor:
    """As kernels/gpu/prompt_rows.attend_prompt_rows."""
    num = len(tables.own_keys)
    out = torch.zeros_like(q)
    if num:
        rows = [SegmentedRows(0, num, PagedSegment(0, num, tables.own_pages), tables.chunks)]
        behind = torch.full((num,), 1 << 30)
        ranks = torch.tensor(tables.own_keys) - 1
        turned = rotate(q, at)[:num]
        out[:num] = attend_segments_reference(
            turned, behind, ranks, rows, key_pages, value_pages, turn, coded
        )
    return out


def without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings compute anew at every step."""
    monkeypatch.setattr(recorded_decode, "StepGraph", EagerGraph)


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, and attention runs in plain PyTorch."""
    without_graphs(monkeypatch)
    stand_in = ModuleType("kvweave.kernels.gpu.decode")
    stand_in.DecodeTables = PlainTables  # type: ignore[attr-defined]
    stand_in.attend_decode = attend_plainly  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvweave.kernels.gpu.decode", stand_in)
    tables = ModuleType("kvweave.kernels.gpu.segment_tables")
    tables.SegmentTables = PlainSegmentTables  # type: ignore[attr-defined]
    tables.SegmentShape = lambda *_: None  # type: ignore[attr-defined]
    tables.room_for_rows = lambda rows, tokens, chunks, *_: chunks  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvweave.kernels.gpu.segment_tables", tables)
    shared = ModuleType("kvweave.kernels.gpu.segments")
    shared.begin_step = lambda tables, turn: turn  # type: ignore[attr-defined]
    shared.attend_tables = attend_segments_plainly  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvweave.kernels.gpu.segments", shared)
    prompts = ModuleType("kvweave.kernels.gpu.prompt_rows")
    prompts.PromptTables = PlainPromptTables  # type: ignore[attr-defined]
    prompts.turned_back = lambda tables, turn: turn  # type: ignore[attr-defined]
    prompts.attend_prompt_rows = attend_prompt_plainly  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvweave.kernels.gpu.prompt_rows", prompts)
