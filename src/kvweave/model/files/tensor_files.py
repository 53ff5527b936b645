"""Read tensors out of safetensors files, straight into the memory they will live in.

The format is a length, a JSON table and raw bytes, so a tensor can be read with one `readinto` into
its final place, be it a slice of a larger fused matrix. Loading a model then never holds a tensor
twice, and a truncated file is noticed from its table before a single weight is read.
"""

import hashlib
import json
import struct
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kvweave.errors import ModelCorrupt, ModelNotFound

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
HEADER_LIMIT_BYTES = 100 << 20  # the format's own bound on the table
SAMPLE_BYTES = 4096  # read at a time for the fingerprint
SAMPLE_STRIDE = 256 << 10  # bytes from one sample to the next


class TensorEntry(NamedTuple):
    """Where one tensor lies."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    size_bytes: int


class TensorFiles:
    """All tensors of a model folder by name. Opens files on demand; not for many threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries: dict[str, TensorEntry] = {}
        for path in _weight_files(folder):
            self._entries.update(_read_table(path))

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def read_into(self, name: str, out: Tensor) -> None:
        """Fill `out` with the tensor `name`, converting its dtype. Shapes must be equal."""
        entry = self._entries.get(name)
        if entry is None:
            raise ModelCorrupt(f"{self._folder.name}: tensor {name!r} is missing; get it again")
        if entry.shape != tuple(out.shape):
            raise ModelCorrupt(
                f"{self._folder.name}: tensor {name!r} has shape {list(entry.shape)}, "
                f"config.json wants {list(out.shape)}"
            )
        in_place = out.dtype == entry.dtype and out.device.type == "cpu" and out.is_contiguous()
        staging = out if in_place else torch.empty(entry.shape, dtype=entry.dtype)
        with entry.path.open("rb", buffering=0) as file:
            file.seek(entry.offset)
            _read_exactly(file, _bytes_of(staging), entry.path)
        if not in_place:
            out.copy_(staging)

    def fingerprint(self) -> str:
        """Names the weights: changes with any tensor's name, type, shape or sampled bytes.

        Reads a page in every SAMPLE_STRIDE of each tensor and its end rather than all bytes, so
        that a 100 GB model is named in seconds. Training moves all of a tensor; a change of fewer
        bytes than a stride may go unseen. Independent of how tensors are spread over files.
        """
        digest = hashlib.blake2b(digest_size=16)
        for name, entry in sorted(self._entries.items()):
            digest.update(f"{name}|{entry.dtype}|{entry.shape}|".encode())
            with entry.path.open("rb", buffering=0) as file:
                head = min(SAMPLE_BYTES, entry.size_bytes)
                starts = range(entry.offset, entry.offset + entry.size_bytes, SAMPLE_STRIDE)
                for offset in (*starts, entry.offset + entry.size_bytes - head):
                    file.seek(offset)
                    digest.update(file.read(head))
        return digest.hexdigest()


def _weight_files(folder: Path) -> Sequence[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelCorrupt(f"{index} is broken; download the model again") from error
        if any(Path(name).name != name for name in names):
            raise ModelCorrupt(f"{index} names a file outside its folder")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelCorrupt(f"{folder} lacks {missing[0]}; download the model again")
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    raise ModelNotFound(
        f"{folder} has no model.safetensors; convert the weights to safetensors first"
    )


def _read_table(path: Path) -> dict[str, TensorEntry]:
    file_bytes = path.stat().st_size
    broken = ModelCorrupt(f"{path} is truncated or not a safetensors file; download it again")
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise broken
        (header_bytes,) = struct.unpack("<Q", prefix)
        if header_bytes > min(HEADER_LIMIT_BYTES, file_bytes - 8):
            raise broken
        try:
            table = json.loads(file.read(header_bytes))
            table.pop("__metadata__", None)
            entries = {}
            for name, row in table.items():
                start, end = row["data_offsets"]
                dtype = DTYPES.get(row["dtype"])
                if dtype is None:
                    raise ModelCorrupt(
                        f"{path.name}: tensor {name!r} is {row['dtype']}; "
                        f"kvweave reads {', '.join(DTYPES)}"
                    )
                shape = tuple(row["shape"])
                size_bytes = dtype.itemsize * torch.Size(shape).numel()
                if end - start != size_bytes or 8 + header_bytes + end > file_bytes:
                    raise broken
                entries[name] = TensorEntry(
                    path, dtype, shape, 8 + header_bytes + start, size_bytes
                )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise broken from error
    return entries


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _read_exactly(file: FileIO, view: memoryview, path: Path) -> None:
    while len(view):
        count = file.readinto(view)
        if not count:
            raise ModelCorrupt(f"{path} ended early; download it again")
        view = view[count:]
