"""bench/altpath.py: it counts what the product stores, by the product's own rules."""

from altpath import Product
from kvweave.types import ChunkId

KNOWN = [ChunkId(f"known-{i}") for i in range(9)]


def make_product(*, is_idle: bool = False) -> Product:
    return Product(KNOWN, 20, is_idle=is_idle)


def names(*words: str) -> list[ChunkId]:
    return [ChunkId(word) for word in words]


def test_a_chunk_of_the_knowledge_base_gets_a_second_copy_where_it_stands_first() -> None:
    world = make_product()
    assert world.ask(names("known-1", "known-2")) == (1, 0), "the first is computed, exactly"
    assert world.num_stored == len(KNOWN) + 1
    assert world.repeats == 1
    assert world.ask(names("known-1", "known-3")) == (2, 0)
    assert (world.num_stored, world.repeats) == (len(KNOWN) + 1, 1)


def test_what_requests_bring_is_stored_when_it_comes_back() -> None:
    world = make_product()
    world.ask(names("known-1", "new"))
    assert (world.num_stored, world.repeats) == (len(KNOWN) + 1, 1)
    assert world.ask(names("known-1", "new", "known-2"))[0] == 2, "once seen it is not stored"
    assert world.num_stored == len(KNOWN) + 2
    assert world.repeats == 3, "computed with the second prompt, and once more to be stored"
    assert world.ask(names("known-1", "known-2", "new"))[0] == 3


def test_idle_time_makes_a_bounded_share_of_copies_ahead() -> None:
    world = make_product(is_idle=True)
    for i in range(1, 9):
        world.ask(names("known-0", f"known-{i}"))
    assert world.num_stored == len(KNOWN) + len(KNOWN) // 3
    assert world.ask(names("known-1", "known-7"))[0] == 2, "nothing of it was ever first"
