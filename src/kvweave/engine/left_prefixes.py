"""Exact KV that one process leaves to the next: the upper levels of the knowledge tree, as a file.

    line of JSON: model, page size      once
    line of JSON: path, bytes │ bytes   a node each, parents before children

A device that is lost takes what lies on it along. What was copied to host memory, in idle time or
when it had to leave, can still be read; where the pool itself is host memory, all of it. The next
process has it on its device before its first request: as far as the tree has room.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from kvweave.engine.bad_pages import has_bad_rows
from kvweave.engine.free_memory import free_bytes
from kvweave.engine.prefixes import ExactPrefixes
from kvweave.kv.tree import ChunkRef, Node
from kvweave.kv.tree.node import DEVICE, HOST
from kvweave.model.paged_kv import KVPool
from kvweave.types import ChunkId

log = logging.getLogger(__name__)

MOST_BYTES = 4 << 30  # that one process leaves, of all its models; a few seconds of a start
MOST_SHARE = 0.5  # of the memory that is free: what is left lies in memory, twice for a while


class LeftNode(NamedTuple):
    """A node of the tree with the bytes of its pages."""

    path: tuple[ChunkRef, ...]  # to it and with it
    kv: Tensor  # [2, L, pages, page, Hk, D], in host memory


def room_bytes() -> int:
    """Bytes that a process may leave now."""
    return min(MOST_BYTES, int(MOST_SHARE * free_bytes()))


def write_prefixes(
    prefixes: ExactPrefixes, pool: KVPool, model: str, file: BinaryIO, most_bytes: int
) -> int:
    """Write what can be read of the tree, the upper levels first and the worthiest of each, so many
    bytes of KV at most; return how many nodes. Nobody may change the tree meanwhile."""
    file.write(_line({"model": model, **_shape(pool)}))
    num_nodes, left_bytes = 0, most_bytes
    for node in _readable(prefixes.tree.root, pool):
        left_bytes -= max(pages.size_bytes for pages in node.node.pages.values())
        if left_bytes < 0:
            break
        kv = _bytes_of(node.node, pool)
        path = [[ref.id, ref.num_tokens] for ref in node.path]
        file.write(_line({"path": path, "pages": kv.shape[2], "bytes": kv.nbytes}))
        file.write(kv.contiguous().view(-1).view(torch.uint8).numpy().data)
        num_nodes += 1
    file.write(_line({"path": None}))
    return num_nodes


def read_prefixes(prefixes: ExactPrefixes, pool: KVPool, model: str, file: BinaryIO) -> int:
    """Put what another process left into the tree; return how many nodes. On the engine thread.

    Raises ValueError or OSError if the file is not whole. All of it is read, also what finds no
    room, so that what follows can be.
    """
    head = json.loads(file.readline())
    fits = head == {"model": model, **_shape(pool)}
    num_nodes = 0
    while (about := json.loads(file.readline()))["path"] is not None:
        content = file.read(about["bytes"])
        if len(content) != about["bytes"]:
            raise ValueError("the file ends within a node")
        if fits:
            path = tuple(ChunkRef(ChunkId(name), tokens) for name, tokens in about["path"])
            num_nodes += _put(prefixes, pool, path, _tensor(content, pool, about["pages"]))
    return num_nodes


class _Found(NamedTuple):
    node: Node
    path: tuple[ChunkRef, ...]


def _readable(root: Node, pool: KVPool) -> Iterator[_Found]:
    """Nodes level by level, as far as their bytes are in host memory."""
    level = [_Found(root, ())]
    while level:
        below = [
            _Found(node, (*found.path, ChunkRef(node.chunk_id, node.num_tokens)))
            for found in level
            for node in found.node.children.values()
            if _is_readable(node, pool)
        ]
        below.sort(key=lambda found: (-max(found.node.ranks.values(), default=0.0), found.node.key))
        yield from (found for found in below if found.node.num_tokens)
        level = below


def _is_readable(node: Node, pool: KVPool) -> bool:
    if not node.num_tokens:  # the beginning of a path: it has no bytes
        return True
    if HOST in node.pages:
        return bool(node.pages[HOST].handle.kv.device.type == "cpu")  # else still on its way
    return DEVICE in node.pages and pool.keys.device.type == "cpu"


def _bytes_of(node: Node, pool: KVPool) -> Tensor:
    if HOST in node.pages:
        kv: Tensor = node.pages[HOST].handle.kv
        return kv
    at = torch.tensor(node.pages[DEVICE].handle)
    return torch.stack([pool.keys[:, at], pool.values[:, at]])


def _put(prefixes: ExactPrefixes, pool: KVPool, path: Sequence[ChunkRef], kv: Tensor) -> int:
    """Put a node behind its parent. 0: there is no room, or its parent did not come."""
    try:
        return int(prefixes.adopt(path, kv, lambda pages, rows: has_bad_rows(pool, pages, rows)))
    except RuntimeError as error:  # torch's word for every CUDA error, and for no memory
        log.warning("exact KV that was left could not be taken: %s", error)
        return 0


def _tensor(content: bytes, pool: KVPool, num_pages: int) -> Tensor:
    shape = (2, len(pool.keys), num_pages, *pool.keys.shape[2:])
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(pool.keys.dtype).view(shape)


def _shape(pool: KVPool) -> dict[str, Any]:
    layers, _, *page = pool.keys.shape
    return {"layers": layers, "page": page, "dtype": str(pool.keys.dtype)}


def _line(about: dict[str, Any]) -> bytes:
    return json.dumps(about).encode() + b"\n"
