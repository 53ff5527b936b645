"""The reader believes nothing: whatever is wrong with a file is one line that says so."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from kvweave.errors import ModelCorrupt, ModelError, ModelNotFound, UnsupportedModel
from kvweave.model.files.gguf.file import GGUFFile
from worlds.gguf_files import write_gguf

METADATA = {
    "some.text": "naïve ☕",
    "some.flag": True,
    "some.count": 7,
    "some.share": 0.5,
    "some.words": ["a", "", "日本"],
    "some.numbers": [1, 2, 3],
}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    tensors = {
        "first": rng.standard_normal((3, 32)).astype(np.float32),
        "second": rng.standard_normal((2, 4, 64)).astype(np.float32),
        "line": rng.standard_normal(5).astype(np.float16),
    }
    quant = gguf.GGMLQuantizationType.Q8_0
    return write_gguf(tmp_path / "small.gguf", METADATA, tensors, quant=quant)


def edited(path: Path, old: bytes, new: bytes) -> Path:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    return path


def problem_with(path: Path) -> str | None:
    try:
        GGUFFile(path)
    except ModelError as error:
        return str(error)
    return None


def entry(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return (
        struct.pack("<Q", len(name))
        + name.encode()
        + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        + struct.pack("<IQ", kind, offset)
    )


def test_metadata_and_tensors_equal_the_reference_reader(small: Path) -> None:
    ours = GGUFFile(small)
    theirs = gguf.GGUFReader(small)
    assert ours.metadata == METADATA | {"general.architecture": "llama"}
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(int(n) for n in tensor.shape[::-1])
        expected = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(-1, info.shape[-1])
        np.testing.assert_array_equal(ours.rows(info), expected)
        np.testing.assert_array_equal(ours.rows(info, 0, 1), expected[:1])


def test_a_file_cut_anywhere_is_refused_in_one_line(small: Path, tmp_path: Path) -> None:
    whole = small.read_bytes()
    last = max(GGUFFile(small).tensors.values(), key=lambda info: info.start)
    cut = tmp_path / "cut.gguf"
    for length in range(last.start + last.size_bytes):  # behind it there is only padding
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelCorrupt, match=r"cut\.gguf .*; download it again") as caught:
            GGUFFile(cut)
        assert "\n" not in str(caught.value)


def test_a_file_with_any_byte_of_its_head_altered_never_gives_a_traceback(small: Path) -> None:
    whole = bytearray(small.read_bytes())
    head = min(info.start for info in GGUFFile(small).tensors.values())
    refused = 0
    for at in range(head):
        for value in (0x00, 0xFF, whole[at] ^ 0x01):
            altered = whole.copy()
            altered[at] = value
            small.write_bytes(altered)
            problem = problem_with(small)
            refused += problem is not None
            assert "\n" not in (problem or "")
    assert refused > head


def test_an_absent_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"absent\.gguf cannot be read: No such file"):
        GGUFFile(tmp_path / "absent.gguf")


def test_another_kind_of_file_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "page.gguf"
    path.write_text("<!doctype html><title>404</title>")
    with pytest.raises(ModelCorrupt, match="is not a GGUF file"):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("version", "words"), [(1, "GGUF version 1"), (4, "version 4"), (3 << 24, "big-endian")]
)
def test_other_versions_are_refused_by_number(small: Path, version: int, words: str) -> None:
    edited(small, struct.pack("<4sI", b"GGUF", 3), struct.pack("<4sI", b"GGUF", version))
    with pytest.raises(UnsupportedModel, match=words):
        GGUFFile(small)


def test_version_2_reads_like_version_3(small: Path) -> None:
    edited(small, struct.pack("<4sI", b"GGUF", 3), struct.pack("<4sI", b"GGUF", 2))
    assert set(GGUFFile(small).tensors) == {"first", "second", "line"}


def test_a_tensor_type_we_cannot_unpack_is_refused_by_name(small: Path) -> None:
    edited(small, entry("first", (32, 3), 8, 0), entry("first", (32, 3), 23, 0))
    with pytest.raises(UnsupportedModel, match=r"'first' of type IQ4_XS; .* Q4_K"):
        GGUFFile(small)


@pytest.mark.parametrize(
    ("dims", "offset", "words"),
    [
        ((33, 3), 0, "impossible for Q8_0"),
        ((0, 3), 0, "impossible for Q8_0"),
        ((1 << 60, 3), 0, "inside tensor 'first'"),
        ((32, 3), 1 << 40, "inside tensor 'first'"),
        ((32, 3), 4, "unaligned offset 4"),
    ],
)
def test_an_impossible_tensor_entry_is_corrupt(
    small: Path, dims: tuple[int, int], offset: int, words: str
) -> None:
    edited(small, entry("first", (32, 3), 8, 0), entry("first", dims, 8, offset))
    with pytest.raises(ModelCorrupt, match=words):
        GGUFFile(small)


def test_a_length_that_lies_does_not_allocate(small: Path) -> None:
    data = small.read_bytes()
    at = data.index(b"some.numbers") + len(b"some.numbers") + 4
    kind, count = struct.unpack_from("<IQ", data, at)
    assert count == 3
    small.write_bytes(data[:at] + struct.pack("<IQ", kind, 1 << 50) + data[at + 12 :])
    with pytest.raises(ModelCorrupt, match=r"inside metadata 'some\.numbers'"):
        GGUFFile(small)
