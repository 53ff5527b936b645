"""A small world for the knowledge tree: owners of pages, and a slow, obvious model of the tree."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvweave.kv.policies import HALF_LIFE_S
from kvweave.kv.tree import (
    ChunkRef,
    Extended,
    KnowledgeTree,
    Pages,
    TreeConfig,
    TreeLease,
    TreeTier,
)
from kvweave.kv.tree.node import path_key
from kvweave.types import ChunkId

DEVICE, HOST = TreeTier.DEVICE, TreeTier.HOST
PREAMBLE = ChunkRef(ChunkId("preamble"), 4)
BYTES_PER_TOKEN = 10


class TensorOwner:
    """Pages are real tensors; every live one is in `tensors`, so an orphan shows."""

    def __init__(self) -> None:
        self.tensors: dict[TreeTier, dict[int, Tensor]] = {DEVICE: {}, HOST: {}}
        self.copies_out = 0
        self.copies_in = 0
        self.fail_copies = False
        self._next = 0

    def make(self, num_tokens: int, tier: TreeTier = DEVICE, value: float = 0.0) -> Pages:
        return self._add(tier, torch.full((num_tokens,), value), num_tokens * BYTES_PER_TOKEN)

    def read(self, tier: TreeTier, pages: Pages) -> Tensor:
        return self.tensors[tier][pages.handle]

    def copy_out(self, pages: Pages) -> Pages | None:
        if self.fail_copies:
            return None
        self.copies_out += 1
        return self._add(HOST, self.tensors[DEVICE][pages.handle].clone(), pages.size_bytes)

    def copy_in(self, pages: Pages) -> Pages | None:
        if self.fail_copies:
            return None
        self.copies_in += 1
        return self._add(DEVICE, self.tensors[HOST][pages.handle].clone(), pages.size_bytes)

    def free(self, tier: TreeTier, pages: Pages) -> None:
        del self.tensors[tier][pages.handle]

    def _add(self, tier: TreeTier, tensor: Tensor, size_bytes: int) -> Pages:
        self._next += 1
        self.tensors[tier][self._next] = tensor
        return Pages(size_bytes, self._next)


def cost_s(cached: int, new: int) -> float:
    return 0.5 + 0.1 * new + 0.001 * cached * new


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class World:
    """A tree with its owner and clock, and one call per request."""

    def __init__(
        self,
        device_tokens: int = 20,
        host_tokens: int = 100,
        policy: str = "pgdsf",
    ) -> None:
        self.owner = TensorOwner()
        self.clock = Clock()
        config = TreeConfig(
            (device_tokens + PREAMBLE.num_tokens) * BYTES_PER_TOKEN,
            host_tokens * BYTES_PER_TOKEN,
            policy,
        )
        pages = self.owner.make(PREAMBLE.num_tokens)
        self.tree = KnowledgeTree(config, self.owner, cost_s, PREAMBLE, pages, self.clock)

    def ask(self, *names: str, question: int = 2) -> int:
        """One whole request: returns how many of its chunks were found."""
        chunks = refs(names)
        self.clock.now_s += 1.0
        with self.tree.acquire(chunks, question) as lease:
            found = len(lease.nodes) - 1
            self.tree.load(lease)
            self.offer(lease, chunks[len(lease.nodes) - 1 :])
        self.check()
        return found

    def bring(self, *names: str) -> None:
        """A request that computes all of its prompt, asks the tree for nothing and offers it."""
        self.clock.now_s += 1.0
        with self.tree.acquire((), 0, count=False) as lease:
            self.offer(lease, refs(names))
        self.check()

    def offer(self, lease: TreeLease, chunks: Sequence[ChunkRef]) -> None:
        for chunk in chunks:
            pages = self.owner.make(chunk.num_tokens)
            extended = self.tree.extend(lease, chunk, pages)
            if extended is not Extended.ADOPTED:
                self.owner.free(DEVICE, pages)
            if extended not in (Extended.ADOPTED, Extended.PRESENT):
                break

    def check(self) -> None:
        self.tree.check_integrity()
        assert self.pages_owned(DEVICE) == set(self.owner.tensors[DEVICE])
        assert self.pages_owned(HOST) == set(self.owner.tensors[HOST])

    def pages_owned(self, tier: TreeTier) -> set[int]:
        nodes = [self.tree.root, *self.tree, *self.tree.doomed_nodes()]
        return {node.pages[tier].handle for node in nodes if tier in node.pages}

    def where(self) -> dict[tuple[str, ...], set[str]]:
        """path → tiers, preamble left out."""
        found: dict[tuple[str, ...], set[str]] = {}
        paths: dict[int, tuple[str, ...]] = {id(self.tree.root): ()}
        for node in self.tree:
            path = (*paths[id(node.parent)], str(node.chunk_id))
            paths[id(node)] = path
            found[path] = {tier.value for tier in node.pages}
        return found


def refs(names: Sequence[str]) -> list[ChunkRef]:
    """`"a3"` is a chunk named a3 of 3 tokens; a name without a number has 5."""
    return [ChunkRef(ChunkId(name), int(name[1:] or 5)) for name in names]


Path = tuple[str, ...]


@dataclass
class Item:
    """All there is to know about one path, in the tree or not."""

    size: int
    before: int = 0  # tokens in front of it
    tiers: set[str] = field(default_factory=set)
    uses: float = 0.0
    last_s: float = 0.0
    mean_cost: float = 0.0
    misses: int = 0
    rank: dict[str, float] = field(default_factory=dict)
    pins: int = 0


def path_order(path: Path) -> bytes:
    """How the tree breaks ties between paths."""
    key = path_key(b"", PREAMBLE.id)
    for name in path:
        key = path_key(key, ChunkId(name))
    return key


class SlowTree:
    """The tree as its rules read, one scan after another. No heaps, no counters."""

    def __init__(self, device_tokens: int, host_tokens: int, policy: str) -> None:
        self.room = {"device": device_tokens, "host": host_tokens}
        self.policy = policy
        self.clock = {"device": 0.0, "host": 0.0}
        self.items: dict[Path, Item] = {}
        self.doomed: list[list[Item]] = []  # subtrees out of the tree while a lease holds them

    def stored(self) -> dict[Path, set[str]]:
        return {path: set(item.tiers) for path, item in self.items.items() if item.tiers}

    def match(self, names: Path) -> int:
        depth = 0
        while depth < len(names) and self.items.get(names[: depth + 1], Item(0)).tiers:
            depth += 1
        return depth

    def item(self, path: Path) -> Item:
        *above, last = [chunk.num_tokens for chunk in refs(path)]
        return self.items.setdefault(path, Item(last, PREAMBLE.num_tokens + sum(above)))

    def access(self, names: Path, question: int, now_s: float) -> None:
        depth = self.match(names)
        sizes = [chunk.num_tokens for chunk in refs(names)]
        cached = PREAMBLE.num_tokens + sum(sizes[:depth])
        new = sum(sizes[depth:]) + question
        for i in range(len(names)):
            item = self.item(names[: i + 1])
            if item.uses:
                item.uses *= 0.5 ** ((now_s - item.last_s) / HALF_LIFE_S)
            item.uses += 1
            item.last_s = now_s
            if i >= depth:
                item.misses += 1
                item.mean_cost += (cost_s(cached, new) / new - item.mean_cost) / item.misses
            for tier in item.tiers:
                item.rank[tier] = self.worth(item, tier)

    def worth(self, item: Item, tier: str) -> float:
        if self.policy == "lru":
            return item.last_s
        if self.policy == "lfu":
            return item.uses
        if self.policy == "gdsf":
            token_s = cost_s(0, 1024) / 1024
            return self.clock[tier] + item.uses * (item.size * token_s) / item.size
        alone = cost_s(item.before, item.size) / item.size
        cost = (item.mean_cost * item.misses + alone) / (item.misses + 1)
        return math.log2(item.uses * cost) + item.last_s / HALF_LIFE_S

    def used(self, tier: str) -> int:
        gone = [item for subtree in self.doomed for item in subtree]
        return sum(i.size for i in (*self.items.values(), *gone) if tier in i.tiers)

    def below(self, path: Path) -> list[Path]:
        deep = len(path)
        return [p for p, i in self.items.items() if len(p) > deep and p[:deep] == path and i.tiers]

    def pick(self, tier: str, missing: int) -> list[Path] | None:
        chosen: list[Path] = []
        while sum(self.items[path].size for path in chosen) < missing:
            leaves = []
            for path, item in self.items.items():
                if tier not in item.tiers or item.pins or path in chosen:
                    continue
                if tier == "host" and "device" in item.tiers:
                    continue
                below = [p for p in self.below(path) if p not in chosen]
                if tier == "device":
                    below = [p for p in below if "device" in self.items[p].tiers]
                if not below:
                    leaves.append((item.rank[tier], item.last_s, path))
            if not leaves:
                return None
            chosen.append(min(leaves)[2])
        return chosen

    def room_on_device(self, size: int) -> bool:
        victims = self.pick("device", size - (self.room["device"] - self.used("device")))
        if victims is None:
            return False
        for path in victims:
            self.clock["device"] = max(self.clock["device"], self.items[path].rank["device"])
        for path in victims:
            item = self.items[path]
            if "host" not in item.tiers and not self.swap_out(path):
                for gone in [path, *self.below(path)]:
                    self.items[gone].tiers.clear()
            item.tiers.discard("device")
        return True

    def swap_out(self, path: Path) -> bool:
        item = self.items[path]
        victims = self.pick("host", item.size - (self.room["host"] - self.used("host")))
        if victims is None:
            return False
        rank = self.worth(item, "host")
        if any(self.items[v].rank["host"] > rank for v in victims):
            return False
        for victim in victims:
            self.clock["host"] = max(self.clock["host"], self.items[victim].rank["host"])
            self.items[victim].tiers.clear()
        item.tiers.add("host")
        item.rank["host"] = self.worth(item, "host")
        return True

    def load(self, names: Path) -> int:
        for i in range(len(names)):
            item = self.items[names[: i + 1]]
            if "device" in item.tiers:
                continue
            if not self.room_on_device(item.size):
                return i
            item.tiers.add("device")
            item.rank["device"] = self.worth(item, "device")
        return len(names)

    def extend(self, path: Path, now_s: float) -> bool:
        item = self.item(path)
        if "device" in item.tiers:
            return True
        if not self.room_on_device(item.size):
            return False
        if not item.uses:
            item.uses, item.last_s = 1.0, now_s
        item.tiers.add("device")
        item.rank["device"] = self.worth(item, "device")
        return True

    def replicate(self, enough: int) -> int:
        """Upper nodes to host, level by level, the worthiest first; returns tokens copied."""
        copied, level = 0, [()]
        while level:
            below = [p for p in self.on_device() if p[:-1] in level]
            below.sort(key=lambda path: (-self.items[path].rank["device"], path_order(path)))
            for path in below:
                item = self.items[path]
                if "host" not in item.tiers:
                    free = self.room["host"] - self.used("host")
                    if copied >= enough or item.size > free or not self.swap_out(path):
                        return copied
                    copied += item.size
            level = below
        return copied

    def on_device(self) -> list[Path]:
        return [path for path, item in self.items.items() if "device" in item.tiers]

    def forget(self, name: str) -> int:
        """Every path through a chunk leaves; a subtree that a lease holds keeps its room."""
        gone = [path for path, item in self.items.items() if name in path and item.tiers]
        for top in [path for path in gone if path.index(name) == len(path) - 1]:
            subtree = [path for path in gone if path[: len(top)] == top]
            held = [self.items[path] for path in subtree]
            for path in subtree:  # what is remembered of it stays: its use, not its pages
                item = self.items[path]
                self.items[path] = replace(item, tiers=set(), rank={}, pins=0)
            if any(item.pins for item in held):
                self.doomed.append(held)
        return len(gone)

    def released(self) -> None:
        self.doomed = [held for held in self.doomed if any(item.pins for item in held)]
