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

A header is planned before anything is encoded, sealed when all is, and parsed with care. The first
16 bytes and the place of the header checksum hold for all versions: a reader can tell "damaged"
(checksum wrong) from "foreign" (checksum right, version unknown). Little-endian throughout. No
torch here.
"""

import hashlib
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

from kvweave.errors import TierCorrupt, TierForeign

Buffer = bytes | bytearray | memoryview
ALGORITHM = "xxh3"


@cache
def checksum_of(algorithm: str) -> Callable[[Buffer], int]:
    """Return the function behind a name, which stands in each object's header. It releases the
    interpreter lock on long buffers.

    Over blocks of 384 KiB (a SmolLM2 layer of 256 tokens) a core of a 2-core Xeon checks 11.1 GB/s
    by xxh3, 4.0 by crc32, 2.8 by adler32, 1.5 by sha1. It copies 14 GB/s and reads the page cache
    at 5.5. Two readers that check with xxh3 keep 0.96 of a plain `readinto`, with crc32 0.49.
    """
    if algorithm != ALGORITHM:
        raise TierForeign(
            f"unknown checksum {algorithm!r}: another kvweave's; this one knows {ALGORITHM}"
        )
    from xxhash import xxh3_64_intdigest  # here, so that the core imports without it

    digest: Callable[[Buffer], int] = xxh3_64_intdigest
    return digest


LAYOUT_VERSION = 1
_MAGIC = b"kvweave\x00"
_START = struct.Struct("<8sII")  # magic, version, header bytes: fixed for all versions
_FIXED = struct.Struct("<8sIIQ32sIIIIII16s16s16s")
FIXED_BYTES = _FIXED.size  # the layer table begins here
_LAYER = struct.Struct("<QQQ")
_EXTRA = struct.Struct("<32sQQQ")
_CHECKSUM_BYTES = 8
_MAX_HEADER_BYTES = 1 << 20
_MAX_LAYERS = 4096
_LEAST_EXTRAS_BYTES = 1 << 20  # of any object; of a large one as many as its layers unpacked
_WIDEST_PAIR = 8  # bytes of a key and a value in float32
DTYPES = ("float32", "bfloat16", "float16")  # model dtypes an object may name
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


class Reader(Protocol):
    """One open object, as a tier gives it. Used by several threads at once; closing twice is
    harmless. An object deleted while open stays readable or raises TierError; it never turns into
    another.
    """

    size_bytes: int

    def read(self, offset: int, out: memoryview) -> None:
        """Fill `out` from `offset`. After an exception `out` holds garbage.

        Raises TierCorrupt if the object ends early, TierError if the tier fails.
        """
        ...

    def close(self) -> None: ...


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


def plan_header(
    key: bytes,
    shape: LayerShape,
    codec: str,
    algorithm: str,
    num_layers: int,
    layer_bytes: int,
    extras: Mapping[str, int],
) -> Header:
    """A header with every offset in place and every checksum still 0."""
    assert len(key) == 32, f"a chunk key has 32 bytes, not {len(key)}"
    used = FIXED_BYTES + num_layers * _LAYER.size + len(extras) * _EXTRA.size + _CHECKSUM_BYTES
    header_bytes = offset = round_up(used, ALIGN)
    placed: dict[str, Section] = {}
    for name, size in extras.items():
        assert name.isascii(), f"extra {name!r}: names are ASCII"
        assert 0 < len(name) <= 32, f"extra {name!r}: names have 1 to 32 bytes"
        placed[name] = Section(offset, size, 0)
        offset = round_up(offset + size, ALIGN)
    stride = round_up(layer_bytes, ALIGN)
    layers = tuple(Section(offset + i * stride, layer_bytes, 0) for i in range(num_layers))
    total = offset + num_layers * stride
    return Header(key, shape, codec, algorithm, layers, placed, header_bytes, total)


def seal_header(header: Header, payload: memoryview) -> tuple[Header, bytes]:
    """Checksum every section of a filled object; returns the final header and its bytes."""
    digest = checksum_of(header.algorithm)

    def seal_section(section: Section) -> Section:
        span = payload[section.offset : header.padded_end(section)]
        return section._replace(checksum=digest(span))

    final = Header(
        header.key,
        header.shape,
        header.codec,
        header.algorithm,
        tuple(seal_section(s) for s in header.layers),
        {name: seal_section(s) for name, s in header.extras.items()},
        header.header_bytes,
        header.total_bytes,
        header.align,
    )
    return final, _pack(final)


def needed_header_bytes(prelude: Buffer) -> int:
    """How long the header is, from its first 16 bytes. Raises TierCorrupt if it cannot be one."""
    if len(prelude) < _START.size:
        raise TierCorrupt(f"object is cut short: {len(prelude)} bytes")
    magic, _, header_bytes = _START.unpack_from(prelude)
    if magic != _MAGIC:
        raise TierCorrupt("object does not start like a chunk object")
    if not ALIGN <= header_bytes <= _MAX_HEADER_BYTES or header_bytes % 512:
        raise TierCorrupt(f"header claims {header_bytes} bytes")
    return int(header_bytes)


def parse_header(raw: Buffer, key: bytes, object_bytes: int) -> Header:
    """The header of an object that a tier holds under `key` with `object_bytes` in all.

    Raises TierCorrupt if bytes are damaged, cut short or filed under the wrong key, TierForeign if
    they are intact and of another layout version. The checksum has no key, so a stranger who writes
    to a tier can make one that is right: every number is checked before it is used.
    """
    header_bytes = needed_header_bytes(raw)
    if len(raw) < header_bytes:
        raise TierCorrupt(f"header is cut short: {len(raw)} of {header_bytes} bytes")
    raw = memoryview(raw)[:header_bytes]
    if bytes(raw[-_CHECKSUM_BYTES:]) != header_checksum(raw[:-_CHECKSUM_BYTES]):
        raise TierCorrupt("header checksum is wrong")
    _, version, _ = _START.unpack_from(raw)
    if version != LAYOUT_VERSION:
        raise TierForeign(
            f"layout version {version} is not {LAYOUT_VERSION}: written by another kvweave; "
            "encode the chunks again, then `kvweave cache gc --foreign`"
        )
    (_, _, _, total, own_key, num_layers, tokens, heads, dim, align, num_extras, *names) = (
        _FIXED.unpack_from(raw)
    )
    dtype, codec, algorithm = (_text(name) for name in names)
    if own_key != key:
        raise TierCorrupt(f"object of key {own_key.hex()[:16]}… is filed under another key")
    if total != object_bytes:
        raise TierCorrupt(f"object has {object_bytes} bytes, its header says {total}")
    shape = LayerShape(tokens, heads, dim, dtype)
    if dtype not in DTYPES or min(tokens, heads, dim) < 1:
        raise TierCorrupt(f"header claims layers of {shape}")
    tables = FIXED_BYTES + num_layers * _LAYER.size + num_extras * _EXTRA.size + _CHECKSUM_BYTES
    if align != ALIGN or not 1 <= num_layers <= _MAX_LAYERS or tables > header_bytes:
        raise TierCorrupt(
            f"header claims {num_layers} layers and {num_extras} extras, aligned to {align}"
        )
    extras_at = FIXED_BYTES + num_layers * _LAYER.size
    extras_end = extras_at + num_extras * _EXTRA.size
    layers = tuple(map(Section._make, _LAYER.iter_unpack(raw[FIXED_BYTES:extras_at])))
    named = _EXTRA.iter_unpack(raw[extras_at:extras_end])
    extras = {_text(name): Section(*section) for name, *section in named}
    if len(extras) != num_extras:
        raise TierCorrupt("header names an extra twice")
    header = Header(own_key, shape, codec, algorithm, layers, extras, header_bytes, total, align)
    _check_tiling(header)
    beside = layers[0].offset - header_bytes
    if beside > max(_LEAST_EXTRAS_BYTES, _WIDEST_PAIR * tokens * heads * dim * num_layers):
        raise TierCorrupt(f"extras take {beside} bytes, more than the layers could")
    return header


def _check_tiling(header: Header) -> None:
    """Raise TierCorrupt unless the sections fill the object behind its header exactly."""
    at = header.header_bytes
    for i, (offset, size_bytes, _) in enumerate((*header.extras.values(), *header.layers)):
        if offset != at or offset % header.align:
            name, _ = named_sections(header)[i]
            raise TierCorrupt(f"{name} starts at {offset}, not at {at}")
        at = round_up(offset + size_bytes, header.align)
    if at != header.total_bytes:
        raise TierCorrupt(f"sections end at {at}, the object at {header.total_bytes}")


def _text(raw: bytes) -> str:
    """A name in a header: ASCII, filled up with zeros."""
    name = raw.rstrip(b"\0")
    if not name.isascii() or not name:
        raise TierCorrupt(f"header holds {raw!r} as a name")
    return name.decode("ascii")


def _pack(header: Header) -> bytes:
    raw = bytearray(header.header_bytes)
    shape = header.shape
    _FIXED.pack_into(
        raw,
        0,
        _MAGIC,
        LAYOUT_VERSION,
        header.header_bytes,
        header.total_bytes,
        header.key,
        len(header.layers),
        shape.num_tokens,
        shape.num_kv_heads,
        shape.head_dim,
        header.align,
        len(header.extras),
        shape.dtype.encode(),
        header.codec.encode(),
        header.algorithm.encode(),
    )
    at = FIXED_BYTES
    for section in header.layers:
        _LAYER.pack_into(raw, at, *section)
        at += _LAYER.size
    for name, section in header.extras.items():
        _EXTRA.pack_into(raw, at, name.encode(), *section)
        at += _EXTRA.size
    raw[-_CHECKSUM_BYTES:] = header_checksum(memoryview(raw)[:-_CHECKSUM_BYTES])
    return bytes(raw)


def header_checksum(raw: Buffer) -> bytes:
    """blake2b: slow but in every Python, and a header is small."""
    return hashlib.blake2b(raw, digest_size=_CHECKSUM_BYTES).digest()
