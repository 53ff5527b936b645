"""Read tensors out of safetensors files, straight into the memory they will live in.

`safetensors` reads and checks the table of a file: a truncated or hostile one is refused before a
single weight is read. The bytes are read here, because the library maps the file: mapped pages
count as memory of the process until the file is closed, and sampling a mapped file reads nearly all
of it (SmolLM2, cold: 538 MB for the fingerprint, against 20 MB by plain reads). With `readinto` a
tensor goes into its final place, be it a slice of a larger fused matrix, and is never held twice.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvweave.errors import ModelCorrupt, ModelNotFound

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# beside them in files of packed weights (AWQ, GPTQ, FP8, INT8), which another program loads
PACKED_DTYPES = {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
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

    def __init__(self, folder: Path, *, packed: bool = False) -> None:
        """`packed`: tensors may also be of types that only another program computes with; they are
        there to be named."""
        self._folder = folder
        self._entries: dict[str, TensorEntry] = {}
        dtypes = {**DTYPES, **PACKED_DTYPES} if packed else DTYPES
        for path in _weight_files(folder):
            self._entries.update(_read_table(path, dtypes))

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

    @property
    def num_weights(self) -> int:
        return sum(math.prod(entry.shape) for entry in self._entries.values())

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


def _read_table(path: Path, dtypes: Mapping[str, torch.dtype]) -> dict[str, TensorEntry]:
    """Every tensor of a file. Tensors fill it from the end of the table to the end of the file, one
    behind the other: the format forbids gaps, and `safe_open` refuses a file that has any."""
    try:
        with safe_open(path, framework="np") as file:
            tensors = {name: file.get_slice(name) for name in file.offset_keys()}
            rows = {name: (each.get_dtype(), each.get_shape()) for name, each in tensors.items()}
    except SafetensorError as error:
        raise ModelCorrupt(
            f"{path} is truncated or not a safetensors file; download it again"
        ) from error
    entries: dict[str, TensorEntry] = {}
    offset = 0
    for name, (kind, shape) in rows.items():
        dtype = dtypes.get(kind)
        if dtype is None:
            raise ModelCorrupt(
                f"{path.name}: tensor {name!r} is {kind}; kvweave reads {', '.join(dtypes)}"
            )
        size_bytes = dtype.itemsize * math.prod(shape)
        entries[name] = TensorEntry(path, dtype, tuple(shape), offset, size_bytes)
        offset += size_bytes
    start = path.stat().st_size - offset
    return {name: each._replace(offset=start + each.offset) for name, each in entries.items()}


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _read_exactly(file: FileIO, view: memoryview, path: Path) -> None:
    while len(view):
        count = file.readinto(view)
        if not count:
            raise ModelCorrupt(f"{path} ended early; download it again")
        view = view[count:]
