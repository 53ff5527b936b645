"""A question over chunks, as calibration sees it.

Token ids by part, and what is known of the answer. Made outside, from data sets or from a user's
own questions; fusion knows neither files nor chat templates. Pure data.
"""

import hashlib
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from kvweave.fuse.request import FuseRequest, classify
from kvweave.kv.format.keys import ChunkKey


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt to try strategies on."""

    preamble: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]  # none of them empty
    question: tuple[int, ...]
    asked: tuple[int, int]  # the part [start, end) of `question` that the user wrote
    gold: tuple[int, ...] = ()  # positions in the prompt of tokens that spell an answer
    answers: tuple[str, ...] = ()  # known answers; the first is the one whose NLL is taken
    history: tuple[int, ...] = ()  # what was said before, between preamble and chunks

    @property
    def front(self) -> tuple[int, ...]:
        """What stands in front of the chunks and is exact whatever the strategy."""
        return (*self.preamble, *self.history)

    @property
    def num_tokens(self) -> int:
        return len(self.front) + self.num_chunk_tokens + len(self.question)

    @property
    def num_chunk_tokens(self) -> int:
        return sum(map(len, self.chunks))

    @property
    def keys(self) -> tuple[ChunkKey, ...]:
        """A name per place: the same chunk at two places may have been encoded differently."""
        return tuple(ChunkKey(place.to_bytes(32)) for place in range(len(self.chunks)))

    def request(self, present: Collection[ChunkKey], *, first_is_exact: bool) -> FuseRequest:
        """The prompt with the chunks of `present` taken as stored. Behind a history no chunk is
        exact: none was computed there."""
        return classify(
            self.front,
            list(zip(self.keys, self.chunks, strict=True)),
            self.question,
            present=present,
            first_is_exact=first_is_exact and not self.history,
            asked=self.asked,
        )

    def with_another_order(self) -> "Case":
        """Return the case with its chunks in another order: drawn, equal in every process, and
        never the order they have, unless there is one chunk."""
        order = list(range(len(self.chunks)))
        rng = random.Random(repr(self.chunks[0][:8]))  # noqa: S311 a sample, no secret
        while len(order) > 1 and order == sorted(order):
            rng.shuffle(order)
        return replace(self, chunks=tuple(self.chunks[i] for i in order), gold=())


def hash_cases(cases: Iterable[Case]) -> str:
    """Return a name of the data that was measured on: every token and every known answer."""
    digest = hashlib.blake2b(digest_size=16)
    for case in cases:
        parts: Sequence[object] = (
            case.preamble,
            case.chunks,
            case.question,
            case.gold,
            case.answers,
            *((case.history,) if case.history else ()),
        )
        digest.update(repr(parts).encode())
    return digest.hexdigest()
