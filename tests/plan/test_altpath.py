"""A chunk is found again in any context; the exact tree is read and never changed."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.plan.altpath import AlternativePaths
from kvweave.types import ChunkId
from treeworld import World, refs


def ids(names: str) -> list[ChunkId]:
    return [chunk.id for chunk in refs(names)]


def test_the_whole_path_is_exact_and_shorter_ones_are_not() -> None:
    world = World(device_tokens=100)
    world.ask("a", "b")
    world.ask("b", "c")
    paths = AlternativePaths(world.tree)
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
    found = AlternativePaths(world.tree).find(ids("abc"))
    assert found[0] is None
    assert found[2] is not None
    assert found[2].context == ("b",)


def test_a_chunk_first_seen_inside_a_request_is_found_in_another() -> None:
    world = World()
    paths = AlternativePaths(world.tree)
    assert paths.stored(ChunkId("b"), context=ids("a"))
    assert not paths.stored(ChunkId("b"))
    assert len(paths) == 1
    [_, found] = paths.find(ids("xb"))
    assert found is not None
    assert not found.exact
    assert found.node is None
    paths.forget(ChunkId("b"))
    assert paths.find(ids("b")) == [None]


def test_nothing_is_found_in_the_tree_of_a_lost_preamble() -> None:
    world = World()
    world.ask("a")
    world.tree.lose_device()
    assert AlternativePaths(world.tree).find(ids("a")) == [None]


REQUEST = st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(REQUEST, max_size=6), REQUEST)
def test_lookup_agrees_with_a_table_of_all_paths_and_changes_nothing(
    past: list[list[str]], request: list[str]
) -> None:
    world = World(device_tokens=1000)
    paths = AlternativePaths(world.tree)
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
