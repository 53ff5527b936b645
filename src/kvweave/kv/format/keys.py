"""The name of a chunk's KV: a hash over everything that changes its bytes.

    key = context id (8 bytes) ‖ chunk tag (8 bytes) ‖ content id (16 bytes)

The context id stands for model, dtype, codec, tokenizer, preamble, variant, RoPE configuration,
tenant salt and layout version; the content id for the context, the chunk's token ids and the ids of
the chunks it was computed behind, if any. Keys of one model, preamble and tenant therefore share
their first 8 bytes, which lets a tier keep them together and lets people see whose bytes fill a
folder.

The chunk tag is the first half of the chunk's id and of nothing else. So a removal finds all KV of
a chunk by name, whichever model, preamble or tenant it was computed for and whoever wrote it: also
on a server that lists names and would take hours to give out what they name.

Token ids are hashed, never text, and never with Python's `hash`: the same chunk gets the same key
in every process and on every machine. `tests/kv/test_keys.py` holds golden values.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NewType

from kvweave.kv.format.header import LAYOUT_VERSION

ChunkKey = NewType("ChunkKey", bytes)
ContextId = NewType("ContextId", bytes)
ChunkTag = NewType("ChunkTag", bytes)

KEY_BYTES = 32
CONTEXT_BYTES = 8
TAG_BYTES = 8
_TAG_END = CONTEXT_BYTES + TAG_BYTES
_CHUNK_ID_BYTES = 16  # of which the tag is the first half


@dataclass(frozen=True, slots=True)
class KeyContext:
    """What a chunk's KV depends on besides the chunk itself."""

    model: str  # fingerprint of the weights, not a name that may be moved to other weights
    dtype: str  # model dtype, "float32", "bfloat16" or "float16"
    codec: str  # how layers are encoded, see format/codec.py
    tokenizer: str  # fingerprint of the tokenizer
    preamble_ids: tuple[int, ...]  # tokens that stood in front of the chunk, BOS included
    rope: str  # effective RoPE configuration: another YaRN factor gives other hidden states
    variant: str = "isolated"  # encoding context, with its parameters if it has any
    tenant_salt: str = ""  # tenants share KV exactly when they share this
    layout_version: int = LAYOUT_VERSION

    def context_id(self) -> ContextId:
        return _begin_hashes(self)[0]

    def encode_fields(self) -> list[bytes]:
        encoded: list[bytes] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                encoded.append(_ids_bytes(value))
            else:
                encoded.append(str(value).encode())
        return encoded


def make_chunk_key(
    context: KeyContext, token_ids: Sequence[int], behind: Sequence[str] = ()
) -> ChunkKey:
    """The key of a chunk in a context. Pure, stable across processes and machines.

    `behind` names the chunks it was computed behind, in order. They are part of the content id
    alone: a context of its own for each chunk would be a folder of its own on disk.
    """
    return _make_chunk_key(context, tuple(token_ids), tuple(behind))


@lru_cache(maxsize=2048)  # an answer asks for each of its chunks' keys several times
def _make_chunk_key(
    context: KeyContext, token_ids: tuple[int, ...], behind: tuple[str, ...]
) -> ChunkKey:
    context_id, begun = _begin_hashes(context)
    ids = _ids_bytes(token_ids)
    content = _add_fields(begun.copy(), ids, *(name.encode() for name in behind)).digest()
    # the hash that corpus/chunker.py names chunks by: tests/kv/test_keys.py holds the two together
    chunk_id = hashlib.blake2b(ids, digest_size=_CHUNK_ID_BYTES).digest()
    return ChunkKey(context_id + chunk_id[:TAG_BYTES] + content)


@lru_cache(maxsize=256)  # a plan names every chunk of its prompt in several contexts
def _begin_hashes(context: KeyContext) -> tuple[ContextId, "hashlib.blake2b"]:
    """Return the id of a context, and the hash of a chunk in it up to the chunk's own tokens."""
    fields = context.encode_fields()
    named = hashlib.blake2b(digest_size=CONTEXT_BYTES)
    context_id = ContextId(_add_fields(named, b"kvweave context 2", *fields).digest())
    content = hashlib.blake2b(digest_size=KEY_BYTES - _TAG_END)
    return context_id, _add_fields(content, b"kvweave chunk", *fields)


def context_of(key: ChunkKey) -> ContextId:
    """Which context a key belongs to."""
    return ContextId(key[:CONTEXT_BYTES])


def tag_of(key: ChunkKey) -> ChunkTag:
    """Which chunk a key belongs to, as `make_tag` says it."""
    return ChunkTag(key[CONTEXT_BYTES:_TAG_END])


def make_tag(chunk_id: str) -> ChunkTag | None:
    """The tag of a chunk by its id; None for what is no id of a chunk."""
    try:
        raw = bytes.fromhex(chunk_id)
    except ValueError:
        return None
    return ChunkTag(raw[:TAG_BYTES]) if len(raw) == _CHUNK_ID_BYTES else None


def parse_key(text: str) -> ChunkKey | None:
    """A key from its hexadecimal form, None if it is not one."""
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        return None
    return ChunkKey(raw) if len(raw) == KEY_BYTES and text == raw.hex() else None


def _add_fields(state: "hashlib.blake2b", *parts: bytes) -> "hashlib.blake2b":
    """Add fields to a hash and return it. Each carries its length, so no two lists look alike."""
    for part in parts:
        state.update(struct.pack("<Q", len(part)))
        state.update(part)
    return state


def _ids_bytes(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)
