"""Whether a row gets the same bits in slices, beside others, in other pages and after a
preemption, on whatever device a decoder is."""

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.request import EngineRequest, Ticket
from kvweave.model.decoder import Decoder
from kvweave.model.paged_kv import KVPool, PagedKV
from kvweave.model.rows import Rows
from worlds.engine import alone, ids, plain, with_chunks

ROOM, LONGEST = 1280, 600  # tokens: of a pool, of a prompt
PAGES = (1, 4, 16, 32)  # tokens of one


class Prefilled:
    """One prompt in pages drawn at random, prefilled in slices beside another sequence."""

    def __init__(self, decoder: Decoder, rng: random.Random, prompt: list[int]) -> None:
        self._page = rng.choice(PAGES)
        num_pages = ROOM // self._page
        pool = KVPool(decoder.spec, num_pages, self._page, decoder.dtype, decoder.device)
        for part in (pool.keys, pool.values):
            part.fill_(torch.nan)  # what nobody wrote is never looked at
        self._free = rng.sample(range(num_pages), num_pages)
        if rng.random() < 0.3:
            self._free.sort()
        self._pool, self._decoder, self._rng, self._prompt = pool, decoder, rng, prompt
        self._table: list[int] = []
        self._admit()
        self._room = (ROOM - LONGEST) // self._page // 2 * self._page  # of the other sequence
        self._other = PagedKV(pool, self._take(self._room))

    def in_slices(
        self, ends: list[int], *, beside: bool, preempted_at: int | None = None
    ) -> Tensor:
        """Return the logits of the prompt's last token. `beside`: another sequence takes rows.
        `preempted_at`: behind so many slices its pages are taken away, once."""
        rng, start, other = self._rng, 0, 0
        found, left = torch.empty(0), list(ends)
        while left:
            if len(ends) - len(left) == preempted_at:
                preempted_at = None
                self._free += self._table
                rng.shuffle(self._free)
                self._admit()
                start, left = 0, list(ends) if rng.random() < 0.5 else left
            end = left.pop(0)
            is_last = end == len(self._prompt)
            wanted = [end - start - 1] if is_last else []
            if is_last and rng.random() < 0.3:
                wanted = list(range(end - start))
            batch = [Rows(self._prompt[start:end], range(start, end), self._own, wanted)]
            count = min(rng.choice([1, 1, 2, 5, 30]), self._room - other)
            if beside and count > 0:
                drawn = [rng.randrange(97) for _ in range(count)]
                also = Rows(drawn, range(other, other + count), self._other, [])
                batch.insert(rng.randrange(2), also)
                other += count
            found, start = self._decoder.forward(batch), end
        return found[-1]

    def kv(self) -> Tensor:
        """Keys and values of the prompt, by position."""
        slots = [page * self._page + i for page in self._table for i in range(self._page)]
        at = torch.tensor(slots[: len(self._prompt)], device=self._decoder.device)
        parts = (self._pool.keys, self._pool.values)
        layers = range(self._decoder.spec.num_layers)
        return torch.stack([part[n].flatten(0, 1)[at] for part in parts for n in layers])

    def _admit(self) -> None:
        self._table = self._take(len(self._prompt))
        self._own = PagedKV(self._pool, self._table)

    def _take(self, num_tokens: int) -> list[int]:
        count = -(-num_tokens // self._page)
        taken, self._free = self._free[:count], self._free[count:]
        return taken


def count_different(decoder: Decoder, num_pairs: int, seed: int) -> int:
    """Prompts whose KV or logits differ from one prefill of the same prompt, alone."""
    rng, different = random.Random(seed), 0
    for _ in range(num_pairs):
        length = rng.choice([rng.randint(2, 40), rng.randint(2, LONGEST)])
        prompt = [rng.randrange(97) for _ in range(length)]
        alone = Prefilled(decoder, rng, prompt)
        right = alone.in_slices([length], beside=False)
        cuts = rng.sample(range(1, length), min(length - 1, rng.choice([0, 1, 2, 5])))
        if rng.random() < 0.3:  # decoded: a few rows by themselves
            cuts += range(max(1, length - rng.choice([1, 3])), length)
        ends = sorted({*cuts, length})
        other = Prefilled(decoder, rng, prompt)
        preempted_at = rng.randrange(len(ends)) if rng.random() < 0.4 else None
        found = other.in_slices(ends, beside=rng.random() < 0.6, preempted_at=preempted_at)
        same = torch.equal(found, right) and torch.equal(other.kv(), alone.kv())
        different += not same
    return different


def make_request(rng: random.Random, chunks: Sequence[Sequence[int]]) -> EngineRequest:
    """A prompt whose answer says how likely its tokens were."""
    if rng.random() < 0.3:
        request = plain(ids(rng, rng.randint(1, 60)))
    else:
        chosen = [rng.choice(chunks) for _ in range(rng.randint(0, 4))]
        use_tree = rng.random() < 0.8
        request = with_chunks(chunks[0], chosen, ids(rng, rng.randint(1, 6)), use_tree=use_tree)
    sampling = replace(request.sampling, max_tokens=rng.randint(1, 40), logprobs=3)
    return replace(request, sampling=sampling)


def count_different_answers(decoder: Decoder, cfg: EngineConfig, seed: int) -> tuple[int, int]:
    """Answers of one crowded engine that differ from the same prompt prefilled at once and decoded
    alone, by a token or by a bit of a probability; and how often somebody was preempted."""
    rng = random.Random(seed)
    chunks = [ids(rng, rng.randint(1, 30)) for _ in range(4)]
    requests = [make_request(rng, chunks) for _ in range(10)]
    with Engine(Decoder(decoder.spec, decoder.weights), cfg) as engine:
        tickets: list[Ticket] = [engine.submit(request) for request in requests]
        answers = [list(ticket) for ticket in tickets]
        preemptions = engine.stats()["preemptions"]
    right = [alone(decoder, request) for request in requests]
    return sum(a != b for a, b in zip(answers, right, strict=True)), int(preemptions)
