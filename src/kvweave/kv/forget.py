"""Delete the KV of chunks that no document uses any more.

A key names bytes, not text: it cannot be guessed from a chunk without knowing the model, preamble
and tenant it was computed for. So each object carries the id of its chunk as a named extra, and
forgetting looks at the objects themselves, whichever model wrote them.
"""

from collections.abc import Collection

from kvweave.errors import TierError
from kvweave.kv.keys import ChunkKey
from kvweave.kv.layout import check_section
from kvweave.kv.memory import new_memory
from kvweave.kv.objects import read_header
from kvweave.kv.tiers.base import Tier

CHUNK = "chunk"  # the extra that holds a chunk's id


def keys_of_chunks(tier: Tier, chunk_ids: Collection[str]) -> list[ChunkKey]:
    """Keys of all objects in `tier` that were computed for one of these chunks.

    Reads every header, so it takes a while on a large store. Unreadable objects are passed over:
    they are never served either.
    """
    wanted = {chunk_id.encode() for chunk_id in chunk_ids}
    if not wanted:
        return []
    return [each.key for each in tier.scan() if _chunk_of(tier, each.key) in wanted]


def _chunk_of(tier: Tier, key: ChunkKey) -> bytes | None:
    reader = tier.open(key)
    if reader is None:
        return None
    try:
        header = read_header(reader, key)
        section = header.extras.get(CHUNK)
        if section is None:
            return None
        padded = header.padded_end(section) - section.offset
        span = new_memory(padded, pinned=False).view[:padded]
        reader.read(section.offset, span)
        check_section(header, CHUNK, section, span)
        return bytes(span[: section.size_bytes])
    except TierError:
        return None
    finally:
        reader.close()
