"""Prompts of drawn token ids: chunks out of a pool, some asked for far more often than others."""

import random
from typing import Any, NamedTuple

PREAMBLE, QUESTION = 32, 64
POOL = 60  # chunks
SKEW = 0.8  # the chunk of rank r is wanted with weight 1 / r ** SKEW


class Size(NamedTuple):
    name: str
    chunks: int
    chunk_tokens: int

    @classmethod
    def parse(cls, text: str) -> "Size":
        name, _, rest = text.partition("=")
        chunks, _, tokens = rest.partition("x")
        return cls(name, int(chunks), int(tokens))

    @property
    def tokens(self) -> int:
        return PREAMBLE + self.chunks * self.chunk_tokens + QUESTION


class DrawnPrompt(NamedTuple):
    ids: list[int]
    spans: list[list[int]]

    def wish(self, **how: Any) -> dict[str, Any]:
        return {"chunks": self.spans, "preamble": PREAMBLE, **how}


class Prompts:
    """By number: each has another choice and order of chunks. The same in every process."""

    def __init__(self, size: Size, vocab: int, seed: int) -> None:
        self.size = size
        self._vocab, self._seed = vocab, seed
        self._preamble = self._draw("preamble", PREAMBLE)
        self.pool = [self._draw(f"chunk {i}", size.chunk_tokens) for i in range(POOL)]

    def known(self, number: int) -> DrawnPrompt:
        """One with chunks of the pool."""
        draw = random.Random(f"{self._seed} {self.size} order {number}")
        # sampled without putting back: Efraimidis and Spirakis' keys
        keys = [draw.random() ** ((i + 1) ** SKEW) for i in range(POOL)]
        best = sorted(range(POOL), key=lambda i: -keys[i])[: self.size.chunks]
        draw.shuffle(best)
        return self._lay([self.pool[i] for i in best], number)

    def fresh(self, number: int) -> DrawnPrompt:
        """One whose chunks nobody has seen."""
        count, tokens = self.size.chunks, self.size.chunk_tokens
        return self._lay([self._draw(f"{number} fresh {i}", tokens) for i in range(count)], number)

    def pages(self) -> list[DrawnPrompt]:
        """Prompts that have all chunks of the pool, in front and behind others."""
        count = self.size.chunks
        return [self._lay(self.pool[at : at + count], -at) for at in range(0, POOL, count)]

    def _lay(self, chunks: list[list[int]], number: int) -> DrawnPrompt:
        ids, spans = list(self._preamble), []
        for chunk in chunks:
            spans.append([len(ids), len(ids) + len(chunk)])
            ids += chunk
        return DrawnPrompt(ids + self._draw(f"question {number}", QUESTION), spans)

    def _draw(self, what: str, count: int) -> list[int]:
        draw = random.Random(f"{self._seed} {self.size} {what}")
        return [draw.randrange(10, self._vocab) for _ in range(count)]
