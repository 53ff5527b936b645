"""The order of a prompt's chunks, where the caller lets them move.

An exact prefix is found again only if the chunks stand in the same order again. So those that some
replica holds as a path go first, in that path's order, and the rest follows most retrieved first,
which is the order that other prompts will have too. Nothing moves for a gain that is not clear.
"""

import threading
from collections.abc import Sequence
from typing import NamedTuple

from kvweave.corpus.chunker import make_chunk_id
from kvweave.gateway.fleet import Fleet, RoutedPrompt
from kvweave.gateway.mirror import PromptPart
from kvweave.kv.tree.node import ChunkRef
from kvweave.plan.ordering import (
    MIN_GAIN_SHARE,
    MIN_GAIN_TOKENS,
    WINDOW,
    AccessTable,
    OrderPermission,
    frequency_order,
)


class OrderedChunks(NamedTuple):
    """Chunks in the order they are sent in, and what for."""

    chunks: tuple[tuple[int, ...], ...]
    by: str = "given"


class ChunkOrder:
    """Orders the chunks of one knowledge base. Any thread."""

    def __init__(self, fleet: Fleet, window: int = WINDOW) -> None:
        """`window`: requests whose chunks count."""
        self._fleet = fleet
        self._lock = threading.Lock()  # guards the table
        self._table = AccessTable(window)

    def choose(
        self,
        front: RoutedPrompt,
        chunks: Sequence[tuple[int, ...]],
        permission: OrderPermission,
    ) -> OrderedChunks:
        """The order behind `front`. "auto" leaves them as they are: whether a model minds is
        measured where it runs."""
        refs = [ChunkRef(make_chunk_id(ids), len(ids)) for ids in chunks]
        with self._lock:
            usual = frequency_order(refs, self._table)
            self._table.push([ref.id for ref in refs])
        if permission is not OrderPermission.FREE or len({ref.id for ref in refs}) < 2:
            return OrderedChunks(tuple(chunks))
        stored = self._fleet.best_order(front, _parts(usual))
        given = self._given_tokens(front, refs)
        gained = sum(usual[place].num_tokens for place in stored) - given
        least = max(MIN_GAIN_TOKENS, MIN_GAIN_SHARE * sum(ref.num_tokens for ref in refs))
        if stored and gained < least and given:
            return OrderedChunks(tuple(chunks))
        by_id = {ref.id: ids for ref, ids in zip(refs, chunks, strict=True)}
        first = [usual[place] for place in stored]
        rest = [ref for ref in usual if ref not in first]
        order = tuple(by_id[ref.id] for ref in (*first, *rest))
        return OrderedChunks(order, _purpose(order == tuple(chunks), bool(stored)))

    def _given_tokens(self, front: RoutedPrompt, refs: Sequence[ChunkRef]) -> int:
        """Tokens of the given order that some replica holds as a path."""
        parts = _parts(refs)
        for num in range(len(parts), 0, -1):
            if self._fleet.holds(front, parts[:num]):
                return sum(part.num_tokens for part in parts[:num])
        return 0


def _parts(refs: Sequence[ChunkRef]) -> list[PromptPart]:
    return [PromptPart(ref.id.encode(), ref.num_tokens, is_chunk=True) for ref in refs]


def _purpose(is_given: bool, is_stored: bool) -> str:
    if is_given:
        return "given"
    return "tree" if is_stored else "frequency"
