"""Exact KV that leaves a GPU's pool beside the steps: what arrives is what lay in the pages.

Needs bare PyTorch, transformers and a CUDA device: `pytest -m gpu tests/gpu/test_cuda_leaving.py`.
tests/engine/test_offload.py holds the rules that need no device.
"""

import queue
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvweave.engine import offload as offload_module
from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.offload import (
    ArrivedCopy,
    CudaLink,
    HostCopy,
    Offload,
    OffloadLink,
    TreePages,
)
from kvweave.engine.pages import PageAllocator
from kvweave.kv.tree import Pages, TreeTier
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.model.paged_kv import KVPool
from worlds.engine import ids, tokens, with_chunks
from worlds.tiny_models import make_model_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="streams need a CUDA device"),
]

NUM_PAGES, NODE_PAGES = 64, (3, 17, 4, 41, 9)  # not side by side
A_WHILE = 200_000_000  # cycles: some tenths of a second in which the device does nothing else


class World:
    """Nodes of a pool on the device, and the test as its engine thread."""

    def __init__(self, decoder: Decoder, piece_bytes: int, most_bytes: int = 1 << 30) -> None:
        device = decoder.device
        self.posted: queue.SimpleQueue[ArrivedCopy] = queue.SimpleQueue()
        self.lost: list[HostCopy] = []
        self.pool = KVPool(decoder.spec, NUM_PAGES, 16, torch.bfloat16, device)
        for part in (self.pool.keys, self.pool.values):
            part.normal_()
        self.pages = PageAllocator(NUM_PAGES)
        self.leaving = Offload(CudaLink(device, piece_bytes), most_bytes, self.post)
        self.owner = TreePages(self.pool, self.pages, self.leaving)
        self.node = Pages(len(NODE_PAGES) * self.pool.page_bytes, NODE_PAGES)
        assert self.pages.take(NUM_PAGES) is not None  # the test hands them out itself
        self.held = self.read(NODE_PAGES).cpu()
        # what is loaded on first use, for which a device may be waited for, is by now
        assert self.owner.copy_out(self.node) is not None
        self.step()
        torch.empty_like(self.pool.keys).fill_(torch.nan)
        torch.cuda.synchronize()

    def read(self, page_ids: tuple[int, ...]) -> Tensor:
        at = list(page_ids)
        return torch.stack([self.pool.keys[:, at], self.pool.values[:, at]])

    def leave_and_overwrite(self) -> HostCopy:
        """On a device that is busy: nothing of this has happened when it returns."""
        torch.cuda._sleep(A_WHILE)
        busy = torch.cuda.Event()
        busy.record()
        copy = self.owner.copy_out(self.node)
        assert copy is not None
        self.owner.free(TreeTier.DEVICE, self.node)
        for part in (self.pool.keys, self.pool.values):
            part.fill_(torch.nan)
        assert not busy.query(), "the host waited for the device"
        handle = copy.handle
        assert isinstance(handle, HostCopy)
        return handle

    def post(self, item: ArrivedCopy) -> None:
        self.posted.put(item)

    def step(self) -> None:
        arrived = self.posted.get(timeout=60)
        if not self.owner.settle(arrived):
            self.lost.append(arrived.copy)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = make_model_folder(
        tmp_path_factory.mktemp("leaving"), "llama", max_position_embeddings=2048
    )
    return load_decoder(folder, device="cuda", dtype="float32")


@pytest.fixture(params=[1 << 10, 1000, 1 << 24], ids=["1 KiB", "1000 B", "16 MiB"])
def world(decoder: Decoder, request: pytest.FixtureRequest) -> Iterator[World]:
    """Pieces that divide what leaves, that do not, and one that is larger."""
    world = World(decoder, request.param)
    yield world
    world.leaving.close()


def test_what_arrives_is_what_lay_in_pages_that_were_overwritten_right_afterwards(
    world: World,
) -> None:
    copy = world.leave_and_overwrite()
    assert copy.kv.is_cuda
    assert world.leaving.num_bytes == world.node.size_bytes
    world.step()
    assert not copy.kv.is_cuda
    assert copy.kv.equal(world.held)
    assert (world.leaving.num_bytes, world.owner.num_made, world.lost) == (0, 2, [])
    at = world.owner.copy_in(Pages(world.node.size_bytes, copy))
    assert at is not None
    assert world.read(at.handle).cpu().equal(world.held)


def test_what_is_on_its_way_comes_back_behind_the_order_that_overwrote_its_pages(
    world: World,
) -> None:
    copy = world.leave_and_overwrite()
    at = world.owner.copy_in(Pages(world.node.size_bytes, copy))  # not even gathered yet
    assert at is not None
    world.step()  # the memory it was read from goes, and is somebody else's
    for _ in range(8):
        torch.full_like(world.held, torch.nan, device=world.pool.keys.device)
    assert world.read(at.handle).cpu().equal(world.held)
    assert copy.kv.equal(world.held)


def test_many_nodes_at_once_arrive_each_as_it_was(decoder: Decoder) -> None:
    """The two pieces of page-locked memory are used again and again."""
    world = World(decoder, 1 << 12)
    torch.cuda._sleep(A_WHILE)
    found = []
    for first in range(0, NUM_PAGES, 4):
        page_ids = tuple(range(first, first + 4))
        held = world.read(page_ids)
        copy = world.owner.copy_out(Pages(4 * world.pool.page_bytes, page_ids))
        assert copy is not None
        found.append((held, copy.handle))
        world.pool.keys[:, list(page_ids)] = torch.nan
    for _ in found:
        world.step()
    for held, handle in found:
        assert handle.kv.equal(held.cpu())
    world.leaving.close()


def test_above_its_bound_nothing_sets_off_and_nothing_waits(decoder: Decoder) -> None:
    world = World(decoder, 1 << 12, most_bytes=1)
    copy = world.leave_and_overwrite()  # one alone may
    assert world.owner.copy_out(world.node) is None
    assert world.owner.num_refused == 1
    world.step()
    assert copy.kv.equal(world.held)
    world.leaving.close()


def test_a_copy_that_the_device_refuses_is_told_and_counted(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(decoder, 1 << 12)

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: a test's")

    monkeypatch.setattr(CudaLink, "_pass_through", fail)
    copy = world.leave_and_overwrite()
    world.step()
    assert (world.lost, world.owner.num_failed, world.leaving.num_bytes) == ([copy], 1, 0)
    world.leaving.close()


class CountedLink(CudaLink):
    num_carried = 0

    def carry(self, source: Tensor, home: Tensor, behind: object) -> None:
        super().carry(source, home, behind)
        CountedLink.num_carried += 1


def test_answers_are_the_same_while_kv_leaves_and_comes_back(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a small pool beside host memory, as with a pool that all of it fits into."""
    torch.backends.cuda.matmul.allow_tf32 = False

    def small_pieces(device: torch.device) -> OffloadLink:
        return CountedLink(device, 1000)

    monkeypatch.setattr(offload_module, "open_link", small_pieces)
    rng = random.Random(7)
    preamble, *chunks = (ids(rng, rng.randint(20, 70)) for _ in range(9))
    requests = [
        with_chunks(preamble, rng.sample(chunks, 4), ids(rng, 5), max_tokens=6) for _ in range(40)
    ]
    large = EngineConfig(
        page_tokens=16, pool_tokens=16 * 1024, host_tokens=0, max_running=4,
        share_chunks=False,
    )  # fmt: skip
    small = replace(large, pool_tokens=16 * 64, host_tokens=16 * 1024)
    answers = []
    for cfg in (large, small):
        with Engine(decoder, cfg) as engine:
            found = []
            for first in range(0, len(requests), 4):
                tickets = [engine.submit(request) for request in requests[first : first + 4]]
                found += [tokens(ticket) for ticket in tickets]
                engine.run_alone(engine.check_integrity)
            stats = engine.stats()
        answers.append(found)
    assert answers[0] == answers[1]
    assert CountedLink.num_carried > 0
    assert stats["tree_copies_failed"] == 0
    assert stats["tokens_exact"] > 0
