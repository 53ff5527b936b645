"""Find the KV of chunks that must go, and of chunks that were computed behind them.

A key names bytes, not text: it cannot be guessed from a chunk without knowing the model, preamble
and tenant it was computed for. So each object carries the id of its chunk as a named extra, and the
ids of the chunks it was computed behind if there were any. Forgetting looks at the objects
themselves, whichever model wrote them. Every load reads these two extras, asked for or not, so that
a copy in host memory can tell as well when its file is gone.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from kvweave.errors import TierCorrupt, TierError, TierForeign
from kvweave.kv.format.header import Header, Reader, check_section
from kvweave.kv.format.keys import ChunkKey, make_tag, tag_of
from kvweave.kv.format.memory import Memory, new_memory
from kvweave.kv.format.objects import extra_of, read_header
from kvweave.kv.tiers.base import Tier

CHUNK = "chunk"  # the extra that holds a chunk's id
BEHIND = "behind"  # the extra that holds the ids of the chunks it has seen, nearest first
PROVENANCE = frozenset((CHUNK, BEHIND))


class Provenance(NamedTuple):
    """Whose text an object carries."""

    chunk: str
    behind: tuple[str, ...]  # chunks whose KV stood in front of it


def pack_ids(chunk_ids: Sequence[str]) -> bytes:
    """Return the bytes of the extra BEHIND."""
    return "\n".join(chunk_ids).encode()


def carries(chunk_ids: Collection[str]) -> Callable[[Provenance], bool]:
    """Whether an object was computed for one of these chunks, or behind one."""
    wanted = frozenset(chunk_ids)
    return lambda of: of.chunk in wanted or not wanted.isdisjoint(of.behind)


def find_keys(tier: Tier, is_wanted: Callable[[Provenance], bool]) -> list[ChunkKey]:
    """Keys of all objects in `tier` of some provenance.

    Reads every header, so it takes a while on a large store. Damaged objects are among the found:
    it cannot be said whose text they hold, and they are never served. Objects of another version
    and those that do not say where they come from are passed over.
    """
    found = []
    for each in tier.scan():
        try:
            provenance = _provenance(tier, each.key)
        except TierCorrupt:
            found.append(each.key)
            continue
        except TierError:
            continue
        if provenance is not None and is_wanted(provenance):
            found.append(each.key)
    return found


def find_tagged(
    tier: Tier, chunk_ids: Collection[str], behind: Collection[str] = ()
) -> list[ChunkKey]:
    """Keys of all objects in `tier` that carry text of these chunks: their own, found by name, and
    those of the chunks `behind`, if it was these that they were computed behind.

    Raises TierError where the tier fails: then there may be more.
    """
    own = {tag for each in chunk_ids if (tag := make_tag(each)) is not None}
    others = {tag for each in behind if (tag := make_tag(each)) is not None} - own
    is_wanted = carries(chunk_ids)
    found = []
    for key in tier.tagged_keys(own | others):
        if tag_of(key) not in own:
            try:
                provenance = _provenance(tier, key)
            except TierCorrupt:
                provenance = None  # never served
            if provenance is None or not is_wanted(provenance):
                continue
        found.append(key)
    return found


def provenance_in(header: Header, memory: Memory) -> Provenance | None:
    """Provenance of an object in memory. None: its extras do not say."""
    found = [extra_of(header, memory, name) for name in (CHUNK, BEHIND)]
    return _make_provenance(*(None if data is None else _decode(data) for data in found))


def _provenance(tier: Tier, key: ChunkKey) -> Provenance | None:
    """Provenance of an object in a tier. None: it is gone, of another version, or does not say.
    Raises TierError."""
    reader = tier.open(key)
    if reader is None:
        return None
    try:
        header = read_header(reader, key)
        chunk = _extra(reader, header, CHUNK)
        behind = _extra(reader, header, BEHIND)
    except TierForeign:
        return None
    finally:
        reader.close()
    return _make_provenance(chunk, behind)


def _make_provenance(chunk: str | None, behind: str | None) -> Provenance | None:
    return None if chunk is None else Provenance(chunk, tuple((behind or "").split()))


def _decode(data: memoryview) -> str:
    return bytes(data).decode(errors="replace")


def _extra(reader: Reader, header: Header, name: str) -> str | None:
    section = header.extras.get(name)
    if section is None:
        return None
    padded = header.padded_end(section) - section.offset
    span = new_memory(padded, pinned=False).view[:padded]
    reader.read(section.offset, span)
    check_section(header, name, section, span)
    return _decode(span[: section.size_bytes])
