"""A chunk is found again in any context; the exact tree is read and never changed."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.kv.tree.tree import TreeBehind
from kvweave.plan.other_paths import AlternativePaths
from kvweave.types import ChunkId
from worlds.tree import World, refs


def ids(names: str) -> list[ChunkId]:
    return [chunk.id for chunk in refs(names)]


def no_copy(chunk_id: ChunkId) -> bool:
    return False


def test_the_whole_path_is_exact_and_shorter_ones_are_not() -> None:
    world = World(device_tokens=100)
    world.ask("a", "b")
    world.ask("b", "c")
    paths = AlternativePaths(world.tree, no_copy)
    found = paths.find(ids("abc"))
    assert [f and (f.context, f.exact) for f in found] == [
        ((), True),
        (("a",), True),
        (("b",), False),
    ]


def test_the_longest_path_wins() -> None:
    world = World(device_tokens=100)
    for path in ("c", "bc"):
        world.ask(*path)
    found = AlternativePaths(world.tree, no_copy).find(ids("abc"))
    assert found[0] is None
    assert found[2] is not None
    assert found[2].context == ("b",)


def test_a_chunk_kept_by_content_is_found_in_any_context() -> None:
    world = World()
    copies = set(ids("b"))
    paths = AlternativePaths(world.tree, copies.__contains__)
    [missing, found] = paths.find(ids("xb"))
    assert missing is None
    assert found is not None
    assert (found.node, found.exact) == (None, False)
    copies.clear()
    assert paths.find(ids("b")) == [None]


def test_chunks_that_the_tree_has_behind_other_paths_alone_are_named() -> None:
    world = World(device_tokens=100)
    world.ask("a", "b")
    world.ask("c", "d")
    paths = AlternativePaths(world.tree, no_copy)
    assert paths.only_elsewhere(ids("xab")) == set(ids("ab"))
    assert paths.only_elsewhere(ids("ab")) == set(), "exact here"
    kept = AlternativePaths(world.tree, set(ids("a")).__contains__)
    assert kept.only_elsewhere(ids("xab")) == set(ids("b"))


def test_nothing_is_found_behind_a_preamble_that_the_tree_does_not_hold() -> None:
    world = World()
    world.ask("a")
    behind = TreeBehind(world.tree, refs(["s9"])[0])
    assert AlternativePaths(behind, no_copy).find(ids("a")) == [None]


REQUEST = st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(REQUEST, max_size=6), REQUEST)
def test_lookup_agrees_with_a_table_of_all_paths_and_changes_nothing(
    past: list[list[str]], request: list[str]
) -> None:
    world = World(device_tokens=1000)
    paths = AlternativePaths(world.tree, no_copy)
    table: set[tuple[str, ...]] = set()
    for earlier in past:
        world.ask(*earlier)
        table |= {tuple(earlier[: i + 1]) for i in range(len(earlier))}
    before = world.where()
    for place, found in enumerate(paths.find(ids("".join(request)))):
        tails = [tuple(request[start : place + 1]) for start in range(place + 1)]
        hits = [tail for tail in tails if tail in table]
        if not hits:
            assert found is None
        else:
            assert found is not None
            assert (*found.context, request[place]) == hits[0]
            assert found.exact == (len(hits[0]) == place + 1)
    assert world.where() == before
