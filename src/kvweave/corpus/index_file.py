"""An index as one file that defends itself.

    magic 8 │ header length u32 │ header JSON │ ids │ tombstones │ FAISS bytes │ crc32 u32

Written under a temporary name, synced, renamed: a killed process leaves the old file. The file is
derived from the catalogue, so whatever is wrong with it, the answer is to build it again.
"""

import json
import struct
import zlib
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from kvweave.corpus.disk_files import atomic_file
from kvweave.corpus.index import KINDS
from kvweave.corpus.index.faiss_index import FaissIndex, IndexRows
from kvweave.errors import CorpusError

MAGIC = b"KVWINDX1"
BLOCK = 1 << 20


class LoadedIndex(NamedTuple):
    vectors: FaissIndex
    generation: int  # of the catalogue that it reflects
    catalogue_uid: str  # which catalogue that was


def save_index(path: Path, index: FaissIndex, generation: int, catalogue_uid: str = "") -> None:
    """Replace the file, or leave the old one untouched."""
    import faiss

    rows = index.rows
    header = {
        "kind": index.kind,
        "dim": index.dim,
        "generation": generation,
        "catalogue_uid": catalogue_uid,
        "num_rows": rows.num_rows,
        "num_trained": index.num_trained,
        "has_vectors": index.faiss_index is not None,
    }
    text = json.dumps(header).encode()
    with atomic_file(path) as file:
        out = _Summed(file)
        out.write(MAGIC + struct.pack("<I", len(text)) + text)
        out.write(rows.by_row.astype("<i8").tobytes())
        out.write(np.packbits(rows.dead).tobytes())
        if index.faiss_index is not None:
            faiss.write_index(index.faiss_index, faiss.PyCallbackIOWriter(out.write, BLOCK))
        file.write(struct.pack("<I", out.crc))


def load_index(path: Path) -> LoadedIndex | None:
    """What was saved, or None when there is no file. Raises CorpusError for a damaged one."""
    import faiss

    if not path.is_file():
        return None
    _verify(path)
    with path.open("rb") as file:
        file.seek(len(MAGIC))
        (length,) = struct.unpack("<I", file.read(4))
        header = json.loads(file.read(length))
        num_rows, dim = header["num_rows"], header["dim"]
        ids = np.frombuffer(file.read(8 * num_rows), "<i8").astype(np.int64)
        bits = np.frombuffer(file.read(-(-num_rows // 8)), np.uint8)
        rows = IndexRows(ids, np.unpackbits(bits, count=num_rows).astype(np.bool_))
        inner = None
        if header["has_vectors"]:
            inner = faiss.read_index(faiss.PyCallbackIOReader(file.read, BLOCK))
    if header["kind"] not in KINDS:
        raise CorpusError(f"{path} holds an index of unknown kind {header['kind']!r}")
    index = KINDS[header["kind"]](
        dim, faiss_index=inner, rows=rows, num_trained=header["num_trained"]
    )
    return LoadedIndex(index, header["generation"], header.get("catalogue_uid", ""))


class _Summed:
    """Writes through and keeps the checksum."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.crc = 0

    def write(self, data: bytes) -> int:
        self.crc = zlib.crc32(data, self.crc)
        return self._file.write(data)


def _verify(path: Path) -> None:
    """FAISS trusts the sizes in a file, so nothing of it is parsed before the checksum holds."""
    size = path.stat().st_size
    crc = 0
    with path.open("rb") as file:
        left = size - 4
        if left < len(MAGIC) + 4 or file.read(len(MAGIC)) != MAGIC:
            raise CorpusError(f"{path} is not an index file")
        file.seek(0)
        while left > 0:
            block = file.read(min(BLOCK, left))
            crc = zlib.crc32(block, crc)
            left -= len(block)
        (stored,) = struct.unpack("<I", file.read(4))
    if stored != crc:
        raise CorpusError(f"{path} is damaged: its checksum does not match")
