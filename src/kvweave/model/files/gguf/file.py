"""Reads a GGUF file: metadata, the table of tensors, and rows of a tensor as float32.

    magic "GGUF" · version · number of tensors · number of metadata pairs
    metadata: key, type, value …
    tensors:  name, shape, type, offset …
    padding to the alignment · tensor data

The file is memory-mapped and never trusted: every length is checked against the bytes that are
left before anything is read or allocated, so a truncated or altered file is a ModelCorrupt that
names the spot.

A GGUFFile is read-only and may be shared between threads. The mapping goes when the object does.
"""

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from kvweave.errors import ModelCorrupt, ModelNotFound, UnsupportedModel
from kvweave.model.files.gguf.packings import F32, PACKINGS, REFUSED, GGUFPacking, dequantise

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_MAX_NESTING = 4  # arrays of arrays: nothing in the wild goes deeper than 2

# metadata type number → struct code
_SCALARS: dict[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


class TensorInfo(NamedTuple):
    """Where a tensor lies in the file."""

    name: str
    shape: tuple[int, ...]  # outermost axis first, as numpy has it (GGUF stores the reverse)
    packing: GGUFPacking
    start: int  # first byte, from the start of the file
    size_bytes: int

    @property
    def num_rows(self) -> int:
        """Rows when all axes but the last are laid flat."""
        rows = 1
        for n in self.shape[:-1]:
            rows *= n
        return rows


class GGUFFile:
    """An open GGUF file. `metadata` and `tensors` are complete and checked after construction."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        except OSError as error:
            raise ModelNotFound(f"{path} cannot be read: {error.strerror}") from error
        reader = _Reader(path, data)
        num_tensors, num_pairs = reader.header()
        self.metadata: dict[str, Any] = reader.metadata(num_pairs)
        self.tensors: dict[str, TensorInfo] = reader.tensors(
            num_tensors, self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        )
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(data, np.uint8)

    def rows(self, info: TensorInfo, start: int = 0, end: int | None = None) -> F32:
        """Rows [start, end) of a tensor laid flat to two axes, as float32 [R, C]."""
        end = info.num_rows if end is None else end
        assert 0 <= start <= end <= info.num_rows, f"rows {start}:{end} of {info.name}"
        row_bytes = info.size_bytes // info.num_rows
        first = info.start + start * row_bytes
        packed = self._bytes[first : first + (end - start) * row_bytes]
        return dequantise(packed.reshape(end - start, row_bytes), info.packing)


class _Reader:
    """A cursor over the head of the file. Each method eats one section."""

    def __init__(self, path: Path, data: mmap.mmap | bytes) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def header(self) -> tuple[int, int]:
        """Number of tensors and of metadata pairs."""
        if len(self._data) == 0:
            self._corrupt("is empty")
        if self._data[:4] != _MAGIC[: len(self._data)]:
            self._corrupt("is not a GGUF file (wrong first bytes)")
        self._at = 4
        version = self._number("I", "version")
        if version & 0xFFFF == 0:
            self._refuse("is a big-endian GGUF; convert it to little-endian first")
        if version not in _VERSIONS:
            self._refuse(f"is GGUF version {version}; versions 2 and 3 can be read")
        return self._number("Q", "tensor count"), self._number("Q", "metadata count")

    def metadata(self, num_pairs: int) -> dict[str, Any]:
        self._expect(num_pairs * 13, f"{num_pairs} metadata pairs")  # key length, type, one byte
        pairs: dict[str, Any] = {}
        for i in range(num_pairs):
            key = self._string(f"metadata key {i}")
            if key in pairs:
                self._corrupt(f"has metadata key {key!r} twice")
            pairs[key] = self._value(self._number("I", f"type of {key!r}"), f"metadata {key!r}")
        return pairs

    def tensors(self, num_tensors: int, alignment: Any) -> dict[str, TensorInfo]:
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            self._corrupt(f"has general.alignment {alignment!r}, not a power of two from 8 up")
        self._expect(num_tensors * 32, f"{num_tensors} tensor entries")
        entries = [self._tensor_entry(i) for i in range(num_tensors)]
        data_start = -(-self._at // alignment) * alignment
        table: dict[str, TensorInfo] = {}
        for entry in entries:
            info = entry._replace(start=data_start + entry.start)
            if info.name in table:
                self._corrupt(f"has tensor {info.name!r} twice")
            if entry.start % alignment:
                self._corrupt(f"has tensor {info.name!r} at an unaligned offset {entry.start}")
            if info.start + info.size_bytes > len(self._data):
                self._corrupt(
                    f"ends at byte {len(self._data):,} inside tensor {info.name!r}, "
                    f"which needs {info.start + info.size_bytes:,}"
                )
            table[info.name] = info
        return table

    def _tensor_entry(self, i: int) -> TensorInfo:
        """One line of the table; `start` still counts from the data section."""
        name = self._string(f"name of tensor {i}")
        num_dims = self._number("I", f"axes of {name!r}")
        if not 1 <= num_dims <= _MAX_DIMS:
            self._corrupt(f"gives tensor {name!r} {num_dims} axes")
        shape = tuple(self._number("Q", f"shape of {name!r}") for _ in range(num_dims))[::-1]
        kind = self._number("I", f"type of {name!r}")
        offset = self._number("Q", f"offset of {name!r}")
        packing = PACKINGS.get(kind)
        if packing is None:
            known = ", ".join(p.name for p in PACKINGS.values())
            self._refuse(
                f"has tensor {name!r} of type {REFUSED.get(kind, kind)}; "
                f"choose a file quantised as one of {known}"
            )
        if 0 in shape or shape[-1] % packing.values:
            self._corrupt(f"gives tensor {name!r} shape {shape}, impossible for {packing.name}")
        info = TensorInfo(name, shape, packing, offset, 0)
        row_bytes = shape[-1] // packing.values * packing.record_bytes
        return info._replace(size_bytes=info.num_rows * row_bytes)

    def _value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind], what)
        if kind == _STRING:
            return self._string(what)
        if kind != _ARRAY or depth == _MAX_NESTING:
            self._corrupt(f"has {what} of unknown type {kind}")
        item_kind = self._number("I", what)
        count = self._number("Q", what)
        if item_kind in _SCALARS:
            code = _SCALARS[item_kind]
            size = struct.calcsize(f"<{code}")
            self._expect(count * size, what)
            values = list(struct.unpack_from(f"<{count}{code}", self._data, self._at))
            self._at += count * size
            return values
        self._expect(count * 8, what)  # a string or an array takes at least its own length field
        return [self._value(item_kind, what, depth + 1) for _ in range(count)]

    def _string(self, what: str) -> str:
        length = self._number("Q", what)
        self._expect(length, what)
        raw = self._data[self._at : self._at + length]
        self._at += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self._corrupt(f"has text that is not UTF-8 in {what}")

    def _number(self, code: str, what: str) -> Any:
        size = struct.calcsize(f"<{code}")
        self._expect(size, what)
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += size
        return value

    def _expect(self, num_bytes: int, what: str) -> None:
        if self._at + num_bytes > len(self._data):
            self._corrupt(f"ends at byte {len(self._data):,} inside {what}")

    def _corrupt(self, problem: str) -> NoReturn:
        raise ModelCorrupt(f"{self._path} {problem}; download it again")

    def _refuse(self, problem: str) -> NoReturn:
        raise UnsupportedModel(f"{self._path} {problem}")
