"""Exact KV that leaves the pool: pages are free at once, bytes get there whole or not at all.

Here bytes are carried from one part of host memory to another, on the thread and through the calls
that a GPU's take; tests/gpu/test_cuda_leaving.py has the streams.
"""

import queue
import random
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvweave.engine import offload as offload_module
from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.offload import ArrivedCopy, CudaLink
from kvweave.engine.pages import PageAllocator
from kvweave.engine.prefixes import AFTER_FAILURE_S, ExactPrefixes, guessed_cost_s
from kvweave.kv.format.memory import Memory, new_memory
from kvweave.kv.tree import ChunkRef, TreeLease
from kvweave.kv.tree.node import DEVICE
from kvweave.model.decoder import Decoder
from kvweave.model.paged_kv import KVPool, PagedKV
from kvweave.types import ChunkId
from worlds.engine import SMALL, alone, ids, with_chunks

PAGE, NUM_PAGES = 4, 16
CFG = EngineConfig(page_tokens=PAGE, pool_tokens=PAGE * NUM_PAGES, tree_share=1.0, host_tokens=64)
A, B, C, D = (ChunkRef(ChunkId(name), 2 * PAGE) for name in "abcd")


class GatedLink:
    """Carries when it is let to. Until then a home holds what no test may ever see."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.gate = threading.Event()
        self.began = threading.Event()
        self.error: Exception | None = None  # raised instead of carrying
        self.refuses = False  # the device takes no orders
        self.source = torch.empty(0, dtype=torch.uint8)  # what was carried last
        self.num_carried = 0
        if is_open:
            self.gate.set()

    def mark(self) -> object:
        if self.refuses:
            raise RuntimeError("out of memory")
        return None

    def carry(self, source: Tensor, home: Tensor, behind: object) -> None:
        home.fill_(0xFF)
        self.began.set()
        assert self.gate.wait(30), "the gate stayed shut"
        if self.error is not None:
            raise self.error
        home.copy_(source)
        self.source = source
        self.num_carried += 1


class World:
    """A tree over a small pool, whose engine thread is the test."""

    def __init__(self, decoder: Decoder, link: GatedLink, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(offload_module, "open_link", lambda _: link)
        self.link = link
        self.posted: queue.SimpleQueue[ArrivedCopy] = queue.SimpleQueue()
        self.pool = KVPool(decoder.spec, NUM_PAGES, PAGE, torch.float32, torch.device("cpu"))
        self.pages = PageAllocator(NUM_PAGES)
        self.prefixes = ExactPrefixes(CFG, self.pool, self.pages, guessed_cost_s, self.post)
        self.overwrite()

    def post(self, item: ArrivedCopy) -> None:
        self.posted.put(item)

    def offer(self, *path: ChunkRef) -> list[Tensor]:
        """Compute a path and offer it; what its pages held, by node."""
        lease = self.prefixes.acquire(path, 1, count=True)
        kv = PagedKV(self.pool, self.prefixes.table(lease))
        known = len(kv.page_table)
        count = sum(chunk.num_tokens for chunk in path) // PAGE - known
        taken = self.pages.take(count)
        assert taken is not None
        kv.append(taken)
        for page in taken:
            for part in (self.pool.keys, self.pool.values):
                part[:, page] = torch.randn_like(part[:, page])
        for chunk in path[len(lease.nodes) - 1 :]:
            assert self.prefixes.offer(lease, chunk, lease.num_tokens, kv)
        self.pages.release(taken)
        held = [self.read(lease, node) for node in range(1, len(lease.nodes))]
        lease.release()
        return held

    def read(self, lease: TreeLease, node: int) -> Tensor:
        """The KV of one node on the device."""
        at = self.prefixes.table(lease)[2 * (node - 1) : 2 * node]
        return torch.stack([self.pool.keys[:, at], self.pool.values[:, at]])

    def leave(self) -> None:
        """One leaf leaves the pool."""
        assert self.prefixes.tree.shrink()

    def overwrite(self) -> None:
        """Whatever is not held is written to."""
        for page in range(NUM_PAGES):
            if not self.pages.refs(page):
                self.pool.keys[:, page] = self.pool.values[:, page] = torch.nan

    def step(self) -> None:
        """The next step boundary at which there is news."""
        self.prefixes.settle(self.posted.get(timeout=30))

    def check(self) -> None:
        self.pages.check_integrity()
        self.prefixes.tree.check_integrity()
        assert sorted(self.prefixes.held_pages()) == [
            page for page in range(NUM_PAGES) for _ in range(self.pages.refs(page))
        ]

    def stats(self) -> list[int]:
        """Copies made, refused and failed, and nodes' worth of bytes on the way."""
        made, refused, failed, leaving = self.prefixes.copy_stats().values()
        return [made, refused, failed, leaving // (2 * self.pool.page_bytes)]


@pytest.fixture
def world(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(decoder, GatedLink(), monkeypatch)
    yield world
    world.link.gate.set()
    world.prefixes.close()


def test_pages_are_free_and_overwritten_while_their_copy_is_on_its_way(world: World) -> None:
    _, held = world.offer(A, B)
    world.leave()
    assert (world.pages.num_free, world.stats()) == (NUM_PAGES - 2, [0, 0, 0, 1])
    world.overwrite()
    world.link.gate.set()
    world.step()
    assert world.stats() == [1, 0, 0, 0]
    world.overwrite()
    world.link.source.fill_(0xFF)  # nor is the memory needed that it was gathered into
    with world.prefixes.acquire((A, B), 1, count=True) as lease:
        assert lease.num_tokens == 4 * PAGE
        assert world.read(lease, 2).equal(held)
    world.check()


def test_what_is_on_its_way_comes_back_whole_and_without_waiting(world: World) -> None:
    _, held = world.offer(A, B)
    world.leave()
    world.overwrite()
    assert world.link.began.wait(30)  # its home holds something else by now
    with world.prefixes.acquire((A, B), 1, count=True) as lease:
        assert world.read(lease, 2).equal(held)
    assert world.stats() == [0, 0, 0, 1]
    world.link.gate.set()
    world.step()
    world.leave()  # the copy is there: this time nothing travels
    world.overwrite()
    with world.prefixes.acquire((A, B), 1, count=True) as lease:
        assert world.read(lease, 2).equal(held)
    assert (world.stats(), world.link.num_carried) == ([1, 0, 0, 0], 1)
    world.check()


def test_a_copy_is_taken_over_between_two_steps_and_not_before(world: World) -> None:
    _, held = world.offer(A, B)
    world.leave()
    world.link.gate.set()
    arrived = world.posted.get(timeout=30)  # it is there, and the engine has not heard of it
    assert world.stats() == [0, 0, 0, 1]
    with world.prefixes.acquire((A, B), 1, count=True) as lease:
        assert world.read(lease, 2).equal(held)
    world.prefixes.settle(arrived)
    assert world.stats() == [1, 0, 0, 0]


def test_more_than_may_be_on_its_way_is_dropped_and_counted_without_waiting(
    world: World,
) -> None:
    """An eighth of sixteen pages is on its way: one node."""
    world.offer(A, B)
    world.offer(C)
    for _ in range(3):  # b or c sets off; with the other one, or what hangs below, it is over
        world.leave()
    assert world.stats() == [0, 2, 0, 1]
    assert world.pages.num_free == NUM_PAGES
    world.check()
    world.link.gate.set()
    world.step()
    assert world.stats() == [1, 2, 0, 0]
    world.offer(D)
    world.leave()
    assert world.stats()[3] == 1  # there is room again
    world.step()
    world.check()


@pytest.mark.parametrize("error", [RuntimeError("a CUDA error"), MemoryError("no memory")])
def test_a_copy_that_fails_loses_its_node_and_is_counted(world: World, error: Exception) -> None:
    world.offer(A, B)
    world.link.error = error
    world.link.gate.set()
    world.leave()
    world.step()
    assert world.stats() == [0, 0, 1, 0]
    with world.prefixes.acquire((A, B), 1, count=True) as lease:
        assert lease.num_tokens == 2 * PAGE
    assert len(world.prefixes.tree) == 1
    world.check()


def test_a_copy_that_fails_leaves_alone_what_is_back_on_the_device(world: World) -> None:
    _, held = world.offer(A, B)
    world.leave()
    world.prefixes.acquire((A, B), 1, count=True).release()
    world.link.error = RuntimeError("a CUDA error")
    world.link.gate.set()
    world.step()
    with world.prefixes.acquire((A, B), 1, count=True) as lease:
        assert world.read(lease, 2).equal(held)
    assert world.stats() == [0, 0, 1, 0]
    world.check()


@pytest.mark.parametrize("error", [None, RuntimeError("a CUDA error")])
def test_what_is_deleted_on_its_way_is_not_found_again(
    world: World, error: Exception | None
) -> None:
    world.offer(A, B)
    world.leave()
    world.prefixes.forget([B.id])
    world.link.error = error
    world.link.gate.set()
    world.step()
    assert len(world.prefixes.tree) == 1
    assert world.stats() == [int(error is None), 0, int(error is not None), 0]
    world.check()


def test_a_device_that_takes_no_orders_loses_a_node_and_no_page(world: World) -> None:
    world.offer(A, B)
    world.link.refuses = True
    world.leave()
    assert (len(world.prefixes.tree), world.stats()) == (1, [0, 0, 1, 0])
    assert world.pages.num_free == NUM_PAGES - 2
    world.check()


def test_in_idle_moments_nodes_are_copied_ahead_and_leave_without_a_copy(world: World) -> None:
    held = world.offer(A, B)
    assert world.prefixes.replicate_some() == 2 * world.pool.page_bytes
    assert world.prefixes.replicate_some() == 0, "one is on its way"
    assert world.stats() == [0, 0, 0, 1]
    world.link.gate.set()
    world.step()
    assert world.prefixes.replicate_some() == 2 * world.pool.page_bytes
    world.step()
    assert world.prefixes.replicate_some() == 0, "all have one"
    assert (world.stats(), world.link.num_carried) == ([2, 0, 0, 0], 2)
    world.leave()
    world.leave()
    assert (world.pages.num_free, world.link.num_carried) == (NUM_PAGES, 2)
    world.overwrite()
    with world.prefixes.acquire((A, B), 1, count=True) as lease:
        assert all(world.read(lease, place).equal(kv) for place, kv in enumerate(held, 1))
    world.check()


def test_after_a_failure_nothing_is_copied_ahead_for_a_while(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.offer(A)
    world.link.error = RuntimeError("a CUDA error")
    world.link.gate.set()
    assert world.prefixes.replicate_some()
    world.step()
    assert world.stats() == [0, 0, 1, 0]
    assert len(world.prefixes.tree) == 1, "it is still in the pool"
    assert world.prefixes.replicate_some() == 0
    later_s = time.monotonic() + AFTER_FAILURE_S
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    world.link.error = None
    assert world.prefixes.replicate_some()
    world.step()
    assert world.stats() == [1, 0, 1, 0]
    world.check()


class Moment:
    """As torch.cuda.Event, where everything happens when it is ordered."""

    def __init__(self, blocking: bool = False) -> None:
        self.is_recorded = False

    def record(self, stream: object) -> None:
        self.is_recorded = True

    def synchronize(self) -> None:
        assert self.is_recorded, "nothing to wait for"


class Stream:
    def __init__(self, device: torch.device) -> None:
        self.behind: list[Moment] = []

    def wait_event(self, moment: Moment) -> None:
        assert moment.is_recorded
        self.behind.append(moment)

    def synchronize(self) -> None:
        assert self.behind, "it did not wait for what was marked"


@pytest.mark.parametrize("size_bytes", [1, 99, 100, 101, 250, 1000])
def test_bytes_pass_through_two_pieces_and_none_is_overwritten_before_it_is_home(
    monkeypatch: pytest.MonkeyPatch, size_bytes: int
) -> None:
    for name, stand_in in (("Event", Moment), ("Stream", Stream), ("stream", nullcontext)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    made: list[int] = []

    def unlocked(size: int, *, pinned: bool) -> Memory:
        made.append(size)
        assert pinned
        return new_memory(size, pinned=False)

    monkeypatch.setattr(offload_module, "new_memory", unlocked)
    link = CudaLink(torch.device("cpu"), piece_bytes=100)
    for _ in range(2):
        source = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8)
        home = torch.zeros_like(source)
        link.carry(source, home, link.mark())
        assert home.equal(source)
    assert made == [100, 100], "made once"


class SlowLink(GatedLink):
    """Takes its time, and fails now and then."""

    def __init__(self, seed: int) -> None:
        super().__init__(is_open=True)
        self._rng = random.Random(seed)
        self._wait = threading.Event()  # never set

    def carry(self, source: Tensor, home: Tensor, behind: object) -> None:
        self._wait.wait(self._rng.choice([0.0, 0.001, 0.01]))
        self.error = RuntimeError("a CUDA error") if self._rng.random() < 0.2 else None
        super().carry(source, home, behind)


@pytest.mark.parametrize("seed", range(12))
def test_answers_are_those_of_each_request_alone_while_kv_leaves_and_comes_back(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(offload_module, "open_link", lambda _: SlowLink(seed))
    preamble, *chunks = (ids(rng, rng.randint(3, 13)) for _ in range(6))
    cfg = replace(SMALL, pool_tokens=4 * 32, host_tokens=rng.choice([40, 400]), tree_share=0.6)
    requests = [
        with_chunks(preamble, rng.sample(chunks, 3), ids(rng, 3), max_tokens=4) for _ in range(12)
    ]
    with Engine(decoder, cfg) as engine:
        for first in range(0, len(requests), 3):
            together = requests[first : first + 3]
            tickets = [engine.submit(request) for request in together]
            for ticket, request in zip(tickets, together, strict=True):
                assert list(ticket) == alone(decoder, request)
            engine.run_alone(engine.check_integrity)
        stats = engine.stats()
        left = sum(stats[f"tree_copies_{how}"] for how in ("made", "refused", "failed"))
        assert left + stats["tree_leaving_bytes"] > 0


def test_a_copy_that_arrives_when_all_requests_have_ended_is_taken_over(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine thread has nothing to do any more, and still hears of it."""
    rng = random.Random(1)
    link = GatedLink()
    monkeypatch.setattr(offload_module, "open_link", lambda _: link)
    cfg = replace(SMALL, pool_tokens=4 * 24, host_tokens=400, tree_share=0.6, idle_s=0.01)
    with Engine(decoder, cfg) as engine:
        for _ in range(3):
            list(engine.submit(with_chunks(ids(rng, 9), [ids(rng, 12)], ids(rng, 3))))
        thread = engine.run_alone(threading.current_thread)
        assert link.began.wait(30)
        thread.join(0.2)  # many times idle_s
        assert engine.stats()["tree_leaving_bytes"] > 0
        link.gate.set()
        thread.join(30)
        assert not thread.is_alive()
        stats = engine.stats()
        assert (stats["tree_leaving_bytes"], stats["tree_copies_failed"]) == (0, 0)
        assert stats["tree_copies_made"] > 0


def test_an_idle_engine_copies_ahead_and_evicts_without_copies(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(1)
    link = GatedLink(is_open=True)
    monkeypatch.setattr(offload_module, "open_link", lambda _: link)
    cfg = replace(SMALL, pool_tokens=4 * 64, host_tokens=400, tree_share=1.0, idle_s=0.01)
    request = with_chunks(ids(rng, 9), [ids(rng, 12), ids(rng, 7)], ids(rng, 3))
    with Engine(decoder, cfg) as engine:
        answer = list(engine.submit(request))
        thread = engine.run_alone(threading.current_thread)
        thread.join(30)
        assert not thread.is_alive(), "there is nothing more to copy"
        assert len(engine.tree) == engine.stats()["tree_copies_made"] == 3
        while engine.run_alone(engine.tree.shrink):
            pass
        assert engine.run_alone(lambda: engine.tree.used_bytes(DEVICE)) == 0
        ticket = engine.submit(request)
        assert list(ticket) == answer == alone(decoder, request)
        assert engine.stats()["tree_copies_made"] == 3
        engine.run_alone(engine.check_integrity)


def test_a_closed_engine_has_nothing_on_its_way(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(1)
    link = GatedLink()
    monkeypatch.setattr(offload_module, "open_link", lambda _: link)
    cfg = replace(SMALL, pool_tokens=4 * 24, host_tokens=400, tree_share=0.6)
    engine = Engine(decoder, cfg)
    for _ in range(3):
        list(engine.submit(with_chunks(ids(rng, 9), [ids(rng, 12)], ids(rng, 3))))
    assert link.began.wait(30)
    closing = threading.Thread(target=engine.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()  # one is being carried: its memory must not go before it is done
    link.gate.set()
    closing.join(30)
    assert not closing.is_alive()
    assert link.num_carried == 1  # the rest was left
    assert not [t for t in threading.enumerate() if t.name.startswith("engine-offload")]
