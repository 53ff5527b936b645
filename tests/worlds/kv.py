"""Small worlds for tests of chunk KV: keys, chunks and stores with a few layers of a few tokens."""

from pathlib import Path

import torch

from kvweave.kv.format.codec import LayerKV
from kvweave.kv.format.keys import ChunkKey, KeyContext, make_chunk_key
from kvweave.kv.format.objects import EncodedLayer, PackedChunk, pack_chunk
from kvweave.kv.tiers.config import DiskTierConfig, HostTierConfig, StoreConfig
from kvweave.kv.transfers import Transfer

LAYERS = 3


def make_context(**changes: object) -> KeyContext:
    fields: dict[str, object] = {
        "model": "weights-1",
        "dtype": "float32",
        "codec": "raw",
        "tokenizer": "tokens-1",
        "preamble_ids": (1, 2, 3),
        "rope": "default theta=10000",
    }
    return KeyContext(**{**fields, **changes})  # type: ignore[arg-type]


def make_key(number: int = 0, context: KeyContext | None = None) -> ChunkKey:
    return make_chunk_key(context or make_context(), [number, number + 1, number + 2])


def make_layers(
    number: int = 0, num_layers: int = LAYERS, num_tokens: int = 5, dtype: str = "float32"
) -> list[LayerKV]:
    """Keys and values that only chunk `number` has."""
    generator = torch.Generator().manual_seed(number)

    def values() -> torch.Tensor:
        return torch.randn(num_tokens, 2, 8, generator=generator).to(getattr(torch, dtype))

    return [LayerKV(values(), values()) for _ in range(num_layers)]


def make_chunk(
    number: int = 0,
    codec: str = "raw",
    extras: dict[str, bytes] | None = None,
    num_layers: int = LAYERS,
    num_tokens: int = 5,
) -> PackedChunk:
    layers = make_layers(number, num_layers, num_tokens)
    return pack_chunk(make_key(number), layers, codec, extras)


def is_layer_of(number: int, layer: int, encoded: EncodedLayer, num_layers: int = LAYERS) -> bool:
    """Whether a raw layer holds exactly what `make_chunk(number)` put there."""
    want = make_layers(number, num_layers, encoded.shape.num_tokens)[layer]
    got = encoded.decode()
    return torch.equal(want.k, got.k) and torch.equal(want.v, got.v)


CHUNK_BYTES = make_chunk().header.total_bytes


def read_extras(transfer: Transfer, name: str) -> dict[ChunkKey, bytes]:
    """The extra of each chunk that has it, as the bytes that were stored."""
    return {key: data.numpy().tobytes() for key, data in transfer.extras(name).items()}


def make_config(
    root: Path | None, host_chunks: int | None = 4, disk_chunks: int = 64, **changes: object
) -> StoreConfig:
    """A store with room for so many chunks per tier; `None` leaves the tier out."""
    tiers: list[object] = []
    if host_chunks is not None:
        tiers.append(HostTierConfig(capacity_bytes=host_chunks * CHUNK_BYTES, pinned=False))
    if root is not None:
        tiers.append(DiskTierConfig(root, capacity_bytes=disk_chunks * CHUNK_BYTES))
    fields: dict[str, object] = {"tiers": tuple(tiers), "policy": "lru"}
    return StoreConfig(**{**fields, **changes})  # type: ignore[arg-type]
