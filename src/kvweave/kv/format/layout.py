"""The bytes of one chunk object: a versioned header, named extras, then the layers, one after one.

    0        fixed part: magic, version, header size, object size, key, shape, names
             layer table: offset, size, checksum of every layer
             extras table: name, offset, size, checksum (anchors, scores: whatever comes later)
             zeros; the last 8 bytes of the header are its own checksum
    align·a  extras, each padded with zeros to the alignment
    align·b  layer 0 (keys, then values, as its codec writes them), padded; layer 1; …

One layer is one read: it starts on a 4 KiB boundary and is padded to the next, which is what
O_DIRECT and page-aligned copies ask for and costs 2 KiB per layer on average (0.5 % of a raw
SmolLM2 layer). Checksums cover the padding too, so no byte of an object can change unseen. Extras
come before the layers because selectors want them first; each is a section of its own, so a load
that does not want them passes them over.

How a header is made, written and read is `headers.py`. No torch here.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvweave.errors import TierCorrupt
from kvweave.kv.format.checksum import checksum_of

ALIGN = 4096
PRELUDE_BYTES = ALIGN  # no object is shorter; it usually holds the whole header
FRONT_BYTES = 2 * ALIGN  # a load fetches this much first: the header, and the chunk's id with it
HEAD_BYTES = 4 * ALIGN  # and this much where it wants extras: small ones come along


class LayerShape(NamedTuple):
    """What one layer holds: keys and values, each [num_tokens, num_kv_heads, head_dim]."""

    num_tokens: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # model dtype: what decoding gives back


class Section(NamedTuple):
    """A run of bytes in an object. The checksum covers it and its padding."""

    offset: int
    size_bytes: int  # without padding
    checksum: int


@dataclass(frozen=True, slots=True)
class Header:
    """Everything about an object but its payload."""

    key: bytes
    shape: LayerShape
    codec: str
    algorithm: str  # of the section checksums
    layers: tuple[Section, ...]
    extras: Mapping[str, Section]
    header_bytes: int
    total_bytes: int
    align: int = ALIGN

    def padded_end(self, section: Section) -> int:
        return round_up(section.offset + section.size_bytes, self.align)

    def bytes_with(self, extras: Collection[str]) -> int:
        """What is read of an object by a load that wants these extras."""
        unread = (section for name, section in self.extras.items() if name not in extras)
        return self.total_bytes - sum(round_up(each.size_bytes, self.align) for each in unread)


def round_up(size: int, align: int) -> int:
    return -(-size // align) * align


def check_section(header: Header, name: str, section: Section, span: memoryview) -> None:
    """Raise TierCorrupt unless `span`, the padded bytes of a section, match their checksum."""
    if checksum_of(header.algorithm)(span) != section.checksum:
        raise TierCorrupt(f"{name}: {header.algorithm} checksum is wrong")


def named_sections(header: Header) -> Sequence[tuple[str, Section]]:
    """Extras and layers in the order they lie in the object."""
    layers = [(f"layer {i}", section) for i, section in enumerate(header.layers)]
    return [*header.extras.items(), *layers]
