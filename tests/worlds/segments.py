"""Prompts in segments, and the same prompts dense.

Chunks lie once in shuffled pages of a pool that is NaN wherever nothing was written; prompts hold
some of them anywhere, with some rows replaced by their own.

Shapes: R rows, Hq query heads, Hk KV heads, D head dim, T tokens of a prompt.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvweave.kernels.attention import attend_reference
from kvweave.kernels.coded import decode_rows, encode_rows_reference
from kvweave.kernels.rope import Angles, rotate
from kvweave.kernels.types import (
    CodedPages,
    PagedSegment,
    Segment,
    SegmentedRows,
    SharedChunk,
)


@dataclass
class Heads:
    """The shape of a layer."""

    num: int = 8
    kv: int = 2
    dim: int = 16
    rotary: int = 16


@dataclass
class Prompt:
    """One sequence: what it looks at, and its keys and values by position [T, Hk, D]."""

    own: PagedSegment
    own_positions: list[int]
    chunks: tuple[SharedChunk, ...]
    keys: Tensor
    values: Tensor


@dataclass
class SegmentWorld:
    """A pool, chunks in it and prompts over them, in float64 on the host until `to`."""

    heads: Heads
    page: int
    seed: int
    num_pages: int = 512
    prompts: list[Prompt] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._drawn = torch.Generator().manual_seed(self.seed)
        shape = (self.num_pages, self.page, self.heads.kv, self.heads.dim)
        self.key_pages = torch.full(shape, torch.nan, dtype=torch.float64)
        self.value_pages = torch.full(shape, torch.nan, dtype=torch.float64)
        self._free = self._rng.sample(range(self.num_pages), self.num_pages)
        half = self.heads.rotary // 2
        self._inv_freq = 10_000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
        self._frequencies: dict[torch.device, Tensor] = {}
        self._bank: list[tuple[list[int], Tensor, Tensor]] = []
        self._shifts: list[int] = []  # slots

    def turn(self, positions: Tensor) -> Angles:
        known = self._frequencies.get(positions.device)
        if known is None:  # once: nothing is copied while a graph is recorded
            known = self._frequencies[positions.device] = self._inv_freq.to(positions.device)
        phase = positions.double()[:, None, None] * known
        return Angles(phase.cos(), phase.sin())

    def add_chunk(self, num_tokens: int) -> int:
        """A chunk in pages of its own; its number."""
        keys, values = self._draw(num_tokens), self._draw(num_tokens)
        turned = rotate(keys, self.turn(torch.arange(num_tokens)))
        self._bank.append((self._put(turned, values), keys, values))
        return len(self._bank) - 1

    def lift(self) -> Tensor:
        """[Hk, D] float32, alike for channels that turn together."""
        half, dim = self.heads.rotary // 2, self.heads.dim
        drawn = torch.rand(self.heads.kv, dim, generator=self._drawn) * 9 + 1
        return torch.cat((drawn[:, :half], drawn[:, :half], drawn[:, 2 * half :]), dim=-1)

    def coded(self, fold: int, lift: Tensor | None = None) -> CodedPages:
        """The chunks in 8 bits, `fold` times as many tokens to a page: the first pages of each have
        them all. What nobody wrote has scales that are no numbers. The keys of shifts are divided
        by `lift` from now on."""
        page, heads = fold * self.page, self.heads
        codes = (self.num_pages, page, heads.kv, heads.dim // 2)
        keys, values = (torch.full(codes, 9999, dtype=torch.int16) for _ in "kv")
        scales = torch.full((self.num_pages, heads.kv, page, 2), torch.nan, dtype=torch.float16)
        made = CodedPages(keys, values, scales, lift)
        if lift is not None:
            self.key_pages.flatten(0, 1)[self._shifts] /= lift
        for pages, k, v in self._bank:
            turned = rotate(k, self.turn(torch.arange(len(k))))
            encode_rows_reference(turned, v, _slots(pages, len(k), fold * self.page), made)
        return made

    def decoded(self, coded: CodedPages) -> tuple[Tensor, Tensor]:
        """Pages of this world with what `coded` says of the chunks."""
        key_pages, value_pages = self.key_pages.clone(), self.value_pages.clone()
        for pages, k, _ in self._bank:
            there = _slots(pages, len(k), coded.keys.shape[1])
            here = _slots(pages, len(k), self.page)
            found = decode_rows(coded, there, torch.float64)
            key_pages.flatten(0, 1)[here], value_pages.flatten(0, 1)[here] = found
        if coded.lift is not None:
            key_pages.flatten(0, 1)[self._shifts] *= coded.lift
        return key_pages, value_pages

    def add_prompt(
        self,
        chunks: Sequence[int],
        front: int = 5,
        behind: int = 7,
        ratio: float = 0.2,
        shifted: float = 0.0,
    ) -> Prompt:
        """Own rows, chunks, own rows; `ratio` of the chunks' rows are replaced by own ones, and of
        such chunks about as many as `shifted` says have the other rows shifted."""
        keys, values = [self._draw(front)], [self._draw(front)]
        own, held, at = list(range(front)), [], front
        for number in chunks:
            pages, k, v = self._bank[number]
            gone = torch.rand(len(k), generator=self._drawn) < ratio
            k, v, shift = k.clone(), v.clone(), None
            if bool(gone.any()) and self._rng.random() < shifted:
                by_k, by_v = self._draw(1), self._draw(1)
                k = k + rotate(by_k.expand_as(k), self.turn(-torch.arange(len(k))))
                v = v + by_v
                shift = self._put(by_k, by_v)[0] * self.page
                self._shifts.append(shift)
            k[gone], v[gone] = self._draw(int(gone.sum())), self._draw(int(gone.sum()))
            held.append(SharedChunk(pages, len(k), at, gone if ratio else None, shift))
            own += [at + int(j) for j in gone.nonzero()]
            keys.append(k)
            values.append(v)
            at += len(k)
        own += range(at, at + behind)
        keys.append(self._draw(behind))
        values.append(self._draw(behind))
        turned = rotate(torch.cat(keys), self.turn(torch.arange(at + behind)))
        dense = torch.cat(values)
        pages = self._put(turned[own], dense[own])
        made = Prompt(PagedSegment(0, 0, pages), own, tuple(held), turned, dense)
        self.prompts.append(made)
        return made

    def batch(
        self, positions: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Tensor, Sequence[SegmentedRows]]:
        """Rows at own positions of each prompt: positions, ranks and what they look at."""
        rows: list[SegmentedRows] = []
        at: list[int] = []
        ranks: list[int] = []
        for prompt, wanted in zip(self.prompts, positions, strict=True):
            start = len(at)
            at += wanted
            ranks += [prompt.own_positions.index(p) for p in wanted]
            own = prompt.own._replace(start=start, end=len(at))
            rows.append(SegmentedRows(start, len(at), own, prompt.chunks))
        return torch.tensor(at), torch.tensor(ranks), rows

    def last_rows(self) -> list[list[int]]:
        """What a decode step computes."""
        return [prompt.own_positions[-1:] for prompt in self.prompts]

    def queries(self, positions: Tensor) -> Tensor:
        """[R, Hq, D], turned."""
        shape = (len(positions), self.heads.num, self.heads.dim)
        q = torch.randn(shape, generator=self._drawn, dtype=torch.float64)
        return rotate(q, self.turn(positions))

    def dense(self, q: Tensor, positions: Tensor, rows: Sequence[SegmentedRows]) -> Tensor:
        """Attention of the same rows over the same keys side by side."""
        segments = [
            Segment(each.start, each.end, prompt.keys, prompt.values)
            for each, prompt in zip(rows, self.prompts, strict=True)
        ]
        return attend_reference(q, positions, segments)

    def _draw(self, num: int) -> Tensor:
        shape = (num, self.heads.kv, self.heads.dim)
        return torch.randn(shape, generator=self._drawn, dtype=torch.float64)

    def _put(self, keys: Tensor, values: Tensor) -> list[int]:
        pages = [self._free.pop() for _ in range(-(-len(keys) // self.page))]
        for nth, page in enumerate(pages):
            part = slice(nth * self.page, (nth + 1) * self.page)
            num = len(keys[part])
            self.key_pages[page, :num], self.value_pages[page, :num] = keys[part], values[part]
        return pages


def _slots(pages: Sequence[int], count: int, size: int) -> Tensor:
    return (torch.tensor(pages)[:, None] * size + torch.arange(size)).flatten()[:count]


def random_world(
    seed: int, heads: Heads | None = None, page: int = 4, shifted: float = 0.0
) -> SegmentWorld:
    """A few prompts over a few chunks, some of them held by several prompts."""
    rng = random.Random(seed)
    world = SegmentWorld(heads or Heads(), page, seed)
    bank = [world.add_chunk(rng.choice([1, page, rng.randint(1, 70)])) for _ in range(5)]
    for _ in range(rng.randint(1, 6)):
        held = rng.choices(bank, k=rng.randint(0, 5))
        ratio = rng.choice([0.0, 0.15, 0.6, 1.0])
        world.add_prompt(held, rng.randint(1, 9), rng.randint(1, 40), ratio, shifted)
    return world
