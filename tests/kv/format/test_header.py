"""One object: a header that defends itself, aligned layers, named extras."""

import struct

import pytest

from kvweave.errors import TierCorrupt, TierForeign
from kvweave.kv.format import header as header_format
from kvweave.kv.format.codec import DTYPES
from kvweave.kv.format.header import ALIGN, LAYOUT_VERSION, checksum_of, parse_header
from kvweave.kv.format.objects import verify_object
from worlds.kv import make_chunk, make_key


def test_a_header_parses_back_to_itself() -> None:
    chunk = make_chunk(extras={"anchors": b"abc", "scores": b"x" * 5000})
    parsed = parse_header(chunk.view, chunk.key, len(chunk.view))
    assert parsed == chunk.header
    anchors = parsed.extras["anchors"]
    assert bytes(chunk.view[anchors.offset : anchors.offset + anchors.size_bytes]) == b"abc"


def test_layers_and_extras_start_on_page_boundaries_and_tile_the_object() -> None:
    header = make_chunk(extras={"anchors": b"abc"}).header
    sections = [*header.extras.values(), *header.layers]
    assert all(section.offset % ALIGN == 0 for section in sections)
    ends = [header.header_bytes, *(header.padded_end(section) for section in sections)]
    assert [section.offset for section in sections] == ends[:-1]
    assert ends[-1] == header.total_bytes


def test_many_layers_make_a_longer_header() -> None:
    chunk = make_chunk(num_layers=200)
    assert chunk.header.header_bytes == 2 * ALIGN
    assert parse_header(chunk.view, chunk.key, len(chunk.view)) == chunk.header


def test_an_object_under_the_wrong_key_is_refused() -> None:
    chunk = make_chunk(1)
    with pytest.raises(TierCorrupt, match="another key"):
        parse_header(chunk.view, make_key(2), len(chunk.view))


def test_an_object_of_the_wrong_length_is_refused() -> None:
    chunk = make_chunk()
    with pytest.raises(TierCorrupt, match="its header says"):
        parse_header(chunk.view, chunk.key, len(chunk.view) - ALIGN)


def test_another_layout_version_is_foreign_not_corrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header_format, "LAYOUT_VERSION", LAYOUT_VERSION + 1)
    chunk = make_chunk()
    monkeypatch.undo()
    with pytest.raises(TierForeign, match="written by another kvweave"):
        parse_header(chunk.view, chunk.key, len(chunk.view))


def test_a_damaged_version_is_corrupt_not_foreign() -> None:
    chunk = make_chunk()
    raw = bytearray(chunk.view)
    struct.pack_into("<I", raw, 8, 7)
    with pytest.raises(TierCorrupt, match="header checksum"):
        parse_header(raw, chunk.key, len(raw))


@pytest.mark.parametrize("name", ["sha9", "crc32"])
def test_an_unknown_checksum_is_foreign_and_says_which_is_known(name: str) -> None:
    with pytest.raises(TierForeign, match=f"unknown checksum '{name}'.* knows xxh3"):
        checksum_of(name)


FIELDS = {"layers": 56, "tokens": 60, "heads": 64, "dim": 68, "align": 72, "extras": 76}


def resealed(raw: bytearray, header_bytes: int = ALIGN) -> bytearray:
    """The same bytes with a right header checksum: it has no key, so anybody can make one."""
    raw[header_bytes - 8 : header_bytes] = header_format.header_checksum(raw[: header_bytes - 8])
    return raw


def with_field(field: str, value: int) -> bytearray:
    raw = bytearray(make_chunk(extras={"anchors": b"abc"}).view)
    struct.pack_into("<I", raw, FIELDS[field], value)
    return resealed(raw)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("layers", n) for n in (0, 1, 4, 2**20, 2**31)),
        *((field, 0) for field in ("tokens", "heads", "dim", "align", "extras")),
        ("align", 512),
        ("extras", 2),
        ("extras", 2**31),
    ],
)
def test_a_checksummed_header_that_claims_nonsense_is_corrupt(field: str, value: int) -> None:
    raw = with_field(field, value)
    with pytest.raises(TierCorrupt):
        parse_header(raw, make_key(), len(raw))


@pytest.mark.parametrize("at", [80, 96, 112], ids=["dtype", "codec", "algorithm"])
def test_a_name_that_is_not_ascii_is_corrupt(at: int) -> None:
    raw = bytearray(make_chunk().view)
    raw[at : at + 16] = b"\xff" * 16
    with pytest.raises(TierCorrupt, match="as a name"):
        parse_header(resealed(raw), make_key(), len(raw))


@pytest.mark.parametrize(
    ("field", "value"), [(0, 0), (0, 2 * ALIGN), (1, 0), (1, ALIGN + 1), (1, 2**63)]
)
def test_sections_that_do_not_tile_the_object_are_corrupt(field: int, value: int) -> None:
    raw = bytearray(make_chunk().view)
    struct.pack_into("<Q", raw, header_format.FIXED_BYTES + 8 * field, value)  # of layer 0
    with pytest.raises(TierCorrupt):
        parse_header(resealed(raw), make_key(), len(raw))


def test_what_is_written_is_what_a_codec_can_decode() -> None:
    assert tuple(DTYPES) == header_format.DTYPES


class ReadOnceReader:
    """Gives each byte once; a second look finds it changed, as a file written under us would."""

    def __init__(self, raw: memoryview) -> None:
        self.size_bytes = len(raw)
        self._raw = bytearray(raw)

    def read(self, offset: int, out: memoryview) -> None:
        span = slice(offset, offset + len(out))
        out[:] = self._raw[span]
        self._raw[span] = bytes(len(out))

    def close(self) -> None:
        """Holds nothing."""


def test_no_byte_of_a_long_header_is_read_twice() -> None:
    chunk = make_chunk(num_layers=200)
    assert verify_object(ReadOnceReader(chunk.view), chunk.key) == chunk.header
