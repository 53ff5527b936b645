"""A chunk's KV as one object: packing tensors into bytes, and looking at bytes as layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kvweave.errors import TierCorrupt, TierForeign
from kvweave.kv.format.codec import CODECS, Codec, LayerKV, dtype_name, open_codec
from kvweave.kv.format.header import (
    ALGORITHM,
    ALIGN,
    PRELUDE_BYTES,
    Header,
    LayerShape,
    Reader,
    check_section,
    named_sections,
    needed_header_bytes,
    parse_header,
    plan_header,
    seal_header,
)
from kvweave.kv.format.keys import ChunkKey
from kvweave.kv.format.memory import Memory, new_memory

ENCODED_TOGETHER = 2**25  # keys of the layers that a device encodes together: 128 MiB as float32


@dataclass(frozen=True, slots=True, eq=False)
class PackedChunk:
    """An object ready to be saved. Owns its bytes; they never change after packing."""

    key: ChunkKey
    header: Header
    memory: Memory = field(repr=False)

    @property
    def view(self) -> memoryview:
        return self.memory.view[: self.header.total_bytes]

    @classmethod
    def from_bytes(cls, key: ChunkKey, data: memoryview) -> "PackedChunk":
        """A copy of an object that some tier holds whole. Checks the header, not the layers."""
        memory = new_memory(len(data), pinned=False)
        memory.view[:] = data
        return cls(key, _check_decodable(parse_header(memory.view, key, len(data))), memory)


class EncodedLayer(NamedTuple):
    """One layer of one chunk as stored. Valid while the lease it came through is held."""

    data: Tensor  # uint8 [n] on the host: read-only
    shape: LayerShape
    codec: Codec

    def decode(self) -> LayerKV:
        """Keys and values, each [T, H, D]; for `raw` these are views of `data`."""
        return self.codec.decode(self.data, self.shape)


def pack_chunk(
    key: ChunkKey,
    layers: Sequence[LayerKV],
    codec: str = "raw",
    extras: Mapping[str, bytes] | None = None,
) -> PackedChunk:
    """Encode the layers of one chunk, on whatever device they are, into one object.

    Raises ValueError if the codec cannot represent a value, or if there are no tokens.
    """
    assert layers, "a chunk has layers"
    first = layers[0].k
    extras = extras or {}
    num_tokens, num_kv_heads, head_dim = first.shape
    shape = LayerShape(num_tokens, num_kv_heads, head_dim, dtype_name(first.dtype))
    if not first.numel():
        raise ValueError(f"layers of {shape} hold nothing to store")
    coder = open_codec(codec)
    size = coder.num_bytes(shape)
    extra_sizes = {name: len(data) for name, data in extras.items()}
    plan = plan_header(key, shape, codec, ALGORITHM, len(layers), size, extra_sizes)
    memory = new_memory(plan.total_bytes, pinned=False)  # zeroed: so is the padding
    for name, section in plan.extras.items():
        memory.view[section.offset : section.offset + section.size_bytes] = extras[name]
    rows = memory.tensor[plan.layers[0].offset :].view(len(layers), -1)  # with their padding
    together = 1  # on a CPU a layer stays in the cache
    if first.device.type != "cpu":
        together = max(1, ENCODED_TOGETHER // first.numel())
    for start in range(0, len(layers), together):
        run, target = layers[start : start + together], rows[start : start + together]
        assert all(kv.k.shape == kv.v.shape == first.shape for kv in run), "layers are alike"
        if first.device.type == "cpu":
            coder.encode_joined(run, target[:, :size])
        else:
            encoded = torch.zeros(target.shape, dtype=torch.uint8, device=first.device)
            coder.encode_joined(run, encoded[:, :size])
            target.copy_(encoded)
    header, raw = seal_header(plan, memory.view)
    memory.view[: len(raw)] = raw
    return PackedChunk(key, header, memory)


def extra_of(header: Header, memory: Memory, name: str) -> memoryview | None:
    """A read-only view of a named extra of an object in `memory`; None if it has none."""
    section = header.extras.get(name)
    if section is None:
        return None
    return memory.view[section.offset : section.offset + section.size_bytes].toreadonly()


def extra_tensor(header: Header, memory: Memory, name: str) -> Tensor | None:
    """A named extra as uint8 [n] on the host, read-only by promise: a device copies from it."""
    section = header.extras.get(name)
    if section is None:
        return None
    return memory.tensor[section.offset : section.offset + section.size_bytes]


def layer_of(header: Header, memory: Memory, layer: int) -> EncodedLayer:
    """A view of one layer of an object that lies whole in `memory`."""
    section = header.layers[layer]
    data = memory.tensor[section.offset : section.offset + section.size_bytes]
    return EncodedLayer(data, header.shape, open_codec(header.codec))


def layers_of(header: Header, memory: Memory) -> Tensor:
    """All layers of an object in memory, uint8 [n]: one behind the other, each padded to the
    alignment. They are alike and end where the object ends, see `_check_decodable` and
    header.py."""
    return memory.tensor[header.layers[0].offset : header.total_bytes]


class Head(NamedTuple):
    """The front of an object, as it was read and checked."""

    header: Header
    raw: memoryview  # what was read, the header's own bytes at least


def read_head(reader: Reader, key: ChunkKey, scratch: memoryview) -> Head:
    """Read and check an object's header. `scratch` is page-aligned, at least PRELUDE_BYTES long,
    and filled as far as the object goes: small extras come along. `raw` may be a part of it.

    Raises TierCorrupt, TierForeign or TierError.
    """
    if reader.size_bytes < PRELUDE_BYTES:
        raise TierCorrupt(f"object is cut short: {reader.size_bytes} bytes")
    raw = scratch[: min(len(scratch), reader.size_bytes // ALIGN * ALIGN)]
    reader.read(0, raw)
    needed = needed_header_bytes(raw)
    if needed > reader.size_bytes:
        raise TierCorrupt(f"header claims {needed} of {reader.size_bytes} bytes")
    if needed > len(raw):
        first, raw = raw, new_memory(needed, pinned=False).view
        raw[: len(first)] = first  # not read again: what was looked at is what is checked
        reader.read(len(first), raw[len(first) :])
    return Head(_check_decodable(parse_header(raw, key, reader.size_bytes)), raw)


def read_header(reader: Reader, key: ChunkKey) -> Header:
    """Read and check the header alone. Raises what `read_head` raises."""
    return read_head(reader, key, new_memory(PRELUDE_BYTES, pinned=False).view).header


def _check_decodable(header: Header) -> Header:
    """Return the header if its layers can be decoded here. Raises TierCorrupt or TierForeign."""
    if header.codec not in CODECS:
        raise TierForeign(f"codec {header.codec!r} is not known here: written by a newer kvweave")
    try:
        expected = open_codec(header.codec).num_bytes(header.shape)
    except ValueError as error:
        raise TierCorrupt(f"{header.codec} layers of {header.shape}: {error}") from None
    if any(section.size_bytes != expected for section in header.layers):
        raise TierCorrupt(f"{header.codec} layers of {header.shape} must have {expected} bytes")
    return header


def verify_object(reader: Reader, key: ChunkKey) -> Header:
    """Read a whole object and check every byte. Raises TierCorrupt, TierForeign or TierError."""
    header, raw = read_head(reader, key, new_memory(PRELUDE_BYTES, pinned=False).view)
    memory = new_memory(header.total_bytes, pinned=False)
    body = memory.view[len(raw) : header.total_bytes]
    memory.view[: len(raw)] = raw
    if len(body):
        reader.read(len(raw), body)
    for name, section in named_sections(header):
        check_section(
            header, name, section, memory.view[section.offset : header.padded_end(section)]
        )
    return header
