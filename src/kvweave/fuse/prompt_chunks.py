"""The chunks of a prompt, and which stored KV each of them takes."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvweave.fuse.strategy import Strategy
from kvweave.kv.keys import ChunkKey
from kvweave.kv.residency import Residency
from kvweave.kv.store import KVStore

NEVER = ChunkKey(b"")  # the key of a chunk that a strategy does not want from the store


class PromptChunk(NamedTuple):
    """A chunk of a prompt and the names of its stored KV."""

    token_ids: tuple[int, ...]
    key: ChunkKey  # behind its encoding context
    exact_key: ChunkKey  # isolated; the same as `key` if that is the encoding context


def named_kv(
    chunks: Sequence[PromptChunk],
    store: KVStore,
    strategy: Strategy,
    computed: Mapping[int, str],
) -> list[tuple[ChunkKey | None, tuple[int, ...]]]:
    """Which stored KV each chunk takes; None computes it.

    The first chunk takes its isolated KV if the store has it: there, and only there, it is exact.
    """
    named: list[tuple[ChunkKey | None, tuple[int, ...]]] = []
    for i, chunk in enumerate(chunks):
        key: ChunkKey | None = chunk.key
        if i in computed:
            named.append((None, chunk.token_ids))
            continue
        if i == 0 and chunk.key != chunk.exact_key:
            (peek,) = store.peek([chunk.exact_key])
            is_stored = peek.residency is not Residency.ABSENT
            # a strategy that takes nothing else asks all the same, so that the miss is on record
            key = chunk.exact_key if is_stored or strategy.reuses == "exact" else chunk.key
        if strategy.reuses == "none" or (
            strategy.reuses == "exact" and not (i == 0 and key == chunk.exact_key)
        ):
            key = None
        named.append((key, chunk.token_ids))
    return named
