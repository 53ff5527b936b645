"""Ordering is a permission, a permutation, and never worse than what was given."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.errors import ConfigError
from kvweave.kv.tree import ChunkRef
from kvweave.plan.ordering import (
    MAX_VISITS,
    AccessTable,
    Ordering,
    OrderPermission,
    OrderRules,
    OrderWorth,
    choose_order,
    frequency_order,
    num_worth_keeping,
    tree_order,
)
from kvweave.types import ChunkId
from worlds.tree import World, refs

FREE, KEEP = OrderPermission.FREE, OrderPermission.AS_FOUND


def names(chunks: Sequence[ChunkRef]) -> list[str]:
    return [str(chunk.id) for chunk in chunks]


def make_table(*requests: str, window: int = 1000) -> AccessTable:
    table = AccessTable(window)
    for request in requests:
        table.push([ChunkId(name) for name in request])
    return table


def matching(world: World) -> OrderWorth:
    """An order is worth the tokens that the tree matches of it."""
    return OrderWorth(lambda order: world.tree.match([chunk.id for chunk in order]).num_tokens)


def choose(world: World, chunks: list[ChunkRef], table: AccessTable | None = None) -> Ordering:
    return choose_order(
        world.tree.root,
        chunks,
        table or AccessTable(),
        OrderRules(FREE),
        matching(world),
    )


def test_a_run_of_chunks_that_came_often_is_worth_keeping() -> None:
    table = make_table("ab", "a")
    assert num_worth_keeping(refs("abc"), 0, table, 1) == 3
    assert num_worth_keeping(refs("abc"), 0, table, 2) == 2, "with this request b came twice"
    assert num_worth_keeping(refs("abc"), 0, table, 3) == 1
    assert num_worth_keeping(refs("cab"), 0, table, 2) == 0, "behind one that is new, none"
    assert num_worth_keeping(refs("cab"), 1, table, 2) == 3, "what is matched is there"


def test_ties_are_broken_the_same_way_whatever_retrieval_said() -> None:
    table = make_table("abc")
    assert frequency_order(refs("cab"), table) == frequency_order(refs("bca"), table)


def test_the_most_retrieved_chunk_comes_first() -> None:
    assert names(frequency_order(refs("abc"), make_table("c", "c", "bc", "bc"))) == ["c", "b", "a"]


def test_counts_that_barely_differ_do_not_swap_chunks() -> None:
    first = frequency_order(refs("ab"), make_table(*["a"] * 6, *["b"] * 5))
    second = frequency_order(refs("ab"), make_table(*["a"] * 6, *["b"] * 7))
    assert first == second


def test_the_window_forgets() -> None:
    table = make_table("a", "b", "b", window=2)
    assert (table.count(ChunkId("a")), table.count(ChunkId("b")), len(table)) == (0, 2, 1)
    with pytest.raises(ConfigError, match="window"):
        AccessTable(0)


def test_a_chunk_retrieved_twice_in_one_request_counts_once() -> None:
    assert make_table("aa").count(ChunkId("a")) == 1


def test_crafts_worked_example() -> None:
    """Counts 1, 1; [C1,C2,C5] runs, then [C1,C2,C6]: what is common stays in front."""
    table = make_table("12")
    for request in ("125", "126", "126"):
        order = frequency_order([ChunkRef(ChunkId(c), 5) for c in request], table)
        table.push([chunk.id for chunk in order])
        assert names(order) == list(request)


def test_the_walk_finds_the_longest_path_made_of_these_chunks() -> None:
    world = World(device_tokens=60)
    world.ask("a9", "b9")
    world.ask("c9", "d9", "e9")
    order = tree_order(world.tree.root, refs(["x", "e9", "a9", "d9", "b9", "c9"]))
    assert names(order) == ["c9", "d9", "e9", "x", "a9", "b9"]


def test_a_gain_too_small_keeps_the_given_order() -> None:
    world = World(device_tokens=200)
    world.ask("a63")
    assert choose(world, refs(["x", "a63"])).how == "given"
    world.ask("b64")
    assert choose(world, refs(["x", "b64"])).how == "tree"


def test_a_common_tail_stands_behind_the_match_in_frequency_order() -> None:
    world = World(device_tokens=200)
    world.ask("b70")
    chunks = refs(["b70", "x9", "c9", "a9"])
    order = choose_order(
        world.tree.root,
        chunks,
        make_table(),
        OrderRules(FREE, common_tail=True),
        matching(world),
    )
    assert names(order.chunks) == ["b70", "a9", "c9", "x9"]
    assert order.how == "frequency"


def test_without_permission_nothing_moves() -> None:
    world = World(device_tokens=200)
    world.ask("b90")
    chunks = refs(["x", "b90"])
    kept = choose_order(
        world.tree.root, chunks, AccessTable(), OrderRules(KEEP), OrderWorth(lambda order: 0)
    )
    assert (kept.chunks, kept.how) == (tuple(chunks), "given")


def test_with_an_empty_tree_the_longest_chunk_that_is_exact_first_leads() -> None:
    world = World(device_tokens=200)
    chunks = refs(["x50", "a70", "b90"])
    first = {chunk.id: chunk.num_tokens for chunk in chunks[1:]}
    worth = OrderWorth(lambda o: first.get(o[0].id, 0), first.keys())
    order = choose_order(world.tree.root, chunks, AccessTable(), OrderRules(FREE), worth)
    assert (names(order.chunks), order.how) == (["b90", "x50", "a70"], "first hit")


POOL = ["a64", "b70", "c80", "d90", "e99", "f65"]
REQUEST = st.lists(st.sampled_from(POOL), min_size=1, max_size=6, unique=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(REQUEST, max_size=6), REQUEST, st.booleans())
def test_an_order_is_a_permutation_and_never_matches_less(
    past: list[list[str]], request: list[str], common_tail: bool
) -> None:
    world = World(device_tokens=500)
    table = AccessTable()
    for earlier in past:
        world.ask(*earlier)
        table.push([chunk.id for chunk in refs(earlier)])
    chunks = refs(request)

    worth, rules = matching(world), OrderRules(FREE, common_tail)
    match = worth.exact_tokens
    order = choose_order(world.tree.root, chunks, table, rules, worth)
    assert sorted(order.chunks) == sorted(chunks)
    assert order.exact_tokens == match(order.chunks) >= match(chunks) == order.given_tokens


def test_a_walk_through_a_bushy_tree_ends() -> None:
    """All orders of six chunks are 1,956 paths; the walk looks at no more than its budget."""
    world = World(device_tokens=100_000)
    import itertools

    for path in itertools.permutations(POOL, 4):
        world.ask(*path)
    assert len(world.tree) > MAX_VISITS
    order = tree_order(world.tree.root, refs(POOL))
    assert sorted(order) == sorted(refs(POOL))
