"""The knowledge tree against a slow, obvious model of it, over random lives."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvweave.kv.tree import Extended, TreeLease
from kvweave.types import ChunkId
from worlds.tree import BYTES_PER_TOKEN, DEVICE, HOST, Item, Path, SlowTree, World, refs

NAMES = st.lists(
    st.sampled_from(["a2", "b3", "c5", "d7", "e4"]), min_size=1, max_size=4, unique=True
)


class TreeLife(RuleBasedStateMachine):
    """Requests come and go, some held open, some loading, some that only offer."""

    policy = "pgdsf"

    def __init__(self) -> None:
        super().__init__()
        self.world = World(device_tokens=14, host_tokens=26, policy=self.policy)
        self.model = SlowTree(14, 26, self.policy)
        self.open: list[tuple[TreeLease, Path, list[Item]]] = []
        self.clocks = (0.0, 0.0)

    @rule(names=NAMES, question=st.integers(1, 9), seconds=st.integers(1, 5000))
    def start(self, names: list[str], question: int, seconds: int) -> None:
        """A request: find, load, compute and offer the rest; its lease stays open."""
        if len(self.open) == 3:
            self.finish(0)
        world, model, path = self.world, self.model, tuple(names)
        world.clock.now_s += seconds
        found = model.match(path)
        assert len(world.tree.match([chunk.id for chunk in refs(names)]).nodes) == found
        model.access(path, question, world.clock.now_s)
        lease = world.tree.acquire(refs(names), question)
        self.pin(path[:found], 1)
        world.tree.load(lease)
        loaded = model.load(path[:found])
        assert len(lease.nodes) - 1 == loaded
        self.pin(path[:found], -1)
        self.pin(path[:loaded], 1)
        if loaded == found:
            loaded = self.compute(lease, path, found)
        held = [self.model.items[path[:depth]] for depth in range(1, loaded + 1)]
        self.open.append((lease, path[:loaded], held))

    @rule(names=NAMES, seconds=st.integers(1, 5000))
    def bring(self, names: list[str], seconds: int) -> None:
        """A request that asks for nothing, computes all and offers it; its lease stays open."""
        if len(self.open) == 3:
            self.finish(0)
        self.world.clock.now_s += seconds
        lease = self.world.tree.acquire((), 0, count=False)
        depth = self.compute(lease, tuple(names), 0)
        held = [self.model.items[tuple(names[:place])] for place in range(1, depth + 1)]
        self.open.append((lease, tuple(names[:depth]), held))

    def compute(self, lease: TreeLease, path: Path, found: int) -> int:
        for place in range(found, len(path)):
            chunk = refs(path)[place]
            pages = self.world.owner.make(chunk.num_tokens)
            took = self.world.tree.extend(lease, chunk, pages)
            if took is not Extended.ADOPTED:
                self.world.owner.free(DEVICE, pages)
            assert (took in (Extended.ADOPTED, Extended.PRESENT)) == self.model.extend(
                path[: place + 1], self.world.clock.now_s
            )
            if took is Extended.NO_ROOM:
                return place
            self.model.items[path[: place + 1]].pins += 1
        return len(path)

    def pin(self, path: Path, by: int) -> None:
        for depth in range(1, len(path) + 1):
            self.model.items[path[:depth]].pins += by

    @precondition(lambda self: self.open)
    @rule(place=st.integers(0, 2))
    def finish(self, place: int) -> None:
        lease, _, held = self.open.pop(place % len(self.open))
        lease.release()
        for item in held:  # the very ones: a path that was forgotten may be there anew
            item.pins -= 1
        self.model.released()

    @rule(room=st.integers(0, 20))
    def replicate(self, room: int) -> None:
        """An idle moment: upper nodes go to host ahead of time."""
        copied = self.world.tree.replicate(room * BYTES_PER_TOKEN)
        assert copied == self.model.replicate(room) * BYTES_PER_TOKEN

    @rule(name=st.sampled_from(["a2", "b3", "c5", "d7", "e4"]))
    def forget(self, name: str) -> None:
        """A chunk is deleted, perhaps while requests read it."""
        assert self.world.tree.forget(ChunkId(name)) == self.model.forget(name)
        assert not any(name in path for path in self.world.where())

    @invariant()
    def both_hold_the_same(self) -> None:
        self.world.check()
        assert self.world.where() == self.model.stored()

    @invariant()
    def clocks_never_fall(self) -> None:
        now = (self.world.tree.clock(DEVICE), self.world.tree.clock(HOST))
        if self.policy == "gdsf":
            assert now == pytest.approx((self.model.clock["device"], self.model.clock["host"]))
        assert now >= self.clocks
        assert now[1] >= self.clocks[1]
        self.clocks = now

    @invariant()
    def leased_paths_stay(self) -> None:
        where = self.world.where()
        doomed = {id(item) for held in self.model.doomed for item in held}
        for lease, path, held in self.open:
            assert all(DEVICE in node.pages for node in lease.nodes), "pages of a lease went"
            for depth, item in enumerate(held, 1):
                assert id(item) in doomed or "device" in where[path[:depth]]


class LruLife(TreeLife):
    policy = "lru"


class LfuLife(TreeLife):
    policy = "lfu"


class GdsfLife(TreeLife):
    policy = "gdsf"


LIFE = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
TestTreeLife = TreeLife.TestCase
TestTreeLife.settings = LIFE
TestLruLife = LruLife.TestCase
TestLruLife.settings = settings(LIFE, max_examples=25)
TestLfuLife = LfuLife.TestCase
TestLfuLife.settings = settings(LIFE, max_examples=25)
TestGdsfLife = GdsfLife.TestCase
TestGdsfLife.settings = settings(LIFE, max_examples=25)
