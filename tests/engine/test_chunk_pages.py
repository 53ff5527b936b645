"""The books of chunks that lie in the pool: leases, pages, who leaves, what is forgotten."""

import random
from collections.abc import Sequence

import pytest

from kvweave.engine.chunk_pages import ChunkLease, ChunkPages, WantedChunk
from kvweave.engine.pages import PageAllocator
from kvweave.kv.format.keys import ChunkKey
from kvweave.types import ChunkId

PAGE = 4


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def wanted(*names: str, num_tokens: int = 6) -> list[WantedChunk]:
    return [WantedChunk(ChunkKey(n.encode()), ChunkId(n), num_tokens) for n in names]


def key(name: str) -> ChunkKey:
    return ChunkKey(name.encode())


def never(_: ChunkId) -> bool:
    return False


class Books:
    def __init__(self, num_pages: int = 20) -> None:
        self.allocator = PageAllocator(num_pages)
        self.chunks = ChunkPages(self.allocator, PAGE, Clock())

    def take(self, some: Sequence[WantedChunk], tenant: str = "") -> ChunkLease:
        lease = self.chunks.hold(tenant, some)
        assert self.chunks.missing_pages(tenant, some) <= self.allocator.num_free
        self.chunks.complete(lease, tenant, some)
        return lease

    def bring(self, some: Sequence[WantedChunk], cost_s: float = 1.0) -> None:
        """A request that reads these and is over."""
        lease = self.take(some)
        self.chunks.mark_filled(lease, cost_s, never)
        lease.release()


def test_a_chunk_has_pages_once_and_stays_when_nobody_reads_it() -> None:
    books = Books()
    some = wanted("a", "b", "a")
    first = books.take(some)
    assert books.allocator.num_used == books.chunks.num_pages == 4
    assert books.chunks.holds("", [key("a")]) == set()  # empty pages are found by nobody who looks
    second = books.take(some)
    assert books.allocator.num_used == 4
    books.chunks.mark_filled(first, 1.0, never)
    assert second.filled == {key("a"), key("b")}
    books.chunks.check_integrity([first, second])
    for lease in (first, second, first):
        lease.release()
    books.chunks.check_integrity([])
    assert books.chunks.holds("", [key("a"), key("c")]) == {key("a")}
    assert books.chunks.holds("other", [key("a")]) == set()
    assert books.allocator.num_used == 4


def test_pages_that_nobody_filled_are_free_again() -> None:
    books = Books()
    lease, other = books.take(wanted("a")), books.take(wanted("a", "b"))
    lease.release()
    assert books.allocator.num_used == 4
    other.release()
    assert books.allocator.num_used == 0
    assert len(list(books.chunks)) == 0


def test_what_is_used_often_and_dear_leaves_last() -> None:
    books = Books()
    for name, cost_s in (("cheap", 0.1), ("dear", 10.0), ("hot", 0.1)):
        books.bring(wanted(name), cost_s)
    for _ in range(8):
        books.bring(wanted("hot"))
    held = books.take(wanted("held"))
    books.chunks.mark_filled(held, 0.001, never)
    ranks, left = [], []
    while (rank := books.chunks.lowest_rank()) is not None:
        before = {chunk.key for chunk in books.chunks}
        ranks.append(rank)
        assert books.chunks.shrink()
        left += before - {chunk.key for chunk in books.chunks}
    assert left == [key("cheap"), key("hot"), key("dear")]
    assert ranks == sorted(ranks)
    assert not books.chunks.shrink()
    assert books.chunks.stats()["chunk_evictions"] == 3
    assert books.allocator.num_used == 2  # what is leased


def test_use_is_remembered_beyond_leaving() -> None:
    books = Books()
    for _ in range(5):
        books.bring(wanted("often"))
    while books.chunks.shrink():
        pass
    books.bring(wanted("once"))
    books.bring(wanted("often"))
    assert books.chunks.shrink()
    assert [chunk.key for chunk in books.chunks] == [key("often")]


def test_a_deleted_chunk_is_found_no_more_and_its_pages_go_with_the_last_lease() -> None:
    books = Books()
    books.bring(wanted("b"))
    lease = books.take(wanted("a"))
    books.chunks.mark_filled(lease, 1.0, never)
    assert books.chunks.forget([ChunkId("a"), ChunkId("b")], "other") == 0
    assert books.chunks.forget([ChunkId("a"), ChunkId("b")], "") == 2
    assert books.chunks.holds("", [key("a"), key("b")]) == set()
    books.chunks.check_integrity([lease])
    assert books.allocator.num_used == 2
    again = books.take(wanted("a"))  # of a request that did not hear of it: other pages
    assert books.allocator.num_used == 4
    books.chunks.mark_filled(again, 1.0, lambda chunk_id: chunk_id == "a")
    assert books.chunks.holds("", [key("a")]) == set()
    lease.release()
    again.release()
    assert books.allocator.num_used == 0


@pytest.mark.parametrize("seed", range(20))
def test_books_balance_through_random_lives(seed: int) -> None:
    rng, books = random.Random(seed), Books(40)
    leases: list[ChunkLease] = []
    names = "abcdefghij"
    for _ in range(200):
        match rng.randrange(6):
            case 0 | 1:
                some = wanted(*rng.sample(names, 3), num_tokens=rng.choice([1, 4, 9]))
                some = [w._replace(num_tokens=1 + ord(w.id) % 9) for w in some]
                lease = books.chunks.hold("", some)
                lacking = books.chunks.missing_pages("", some)
                while books.allocator.num_free < lacking and books.chunks.shrink():
                    pass
                if books.allocator.num_free < lacking:
                    lease.release()
                else:
                    books.chunks.complete(lease, "", some)
                    leases.append(lease)
            case 2 if leases:
                books.chunks.mark_filled(rng.choice(leases), rng.random(), never)
            case 3 | 4 if leases:
                leases.pop(rng.randrange(len(leases))).release()
            case 5:
                books.chunks.forget([ChunkId(rng.choice(names))], "")
            case _:
                books.chunks.shrink()
        books.chunks.check_integrity(leases)
        books.allocator.check_integrity()
        assert books.allocator.num_used == books.chunks.num_pages
    for lease in leases:
        lease.release()
    books.chunks.forget_all("")
    assert books.allocator.num_used == 0
