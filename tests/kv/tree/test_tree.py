"""The knowledge tree's promises, one by one, in a world of a few tokens."""

import math
from collections.abc import Callable

import pytest

from kvweave.errors import ConfigError
from kvweave.kv.policies import HALF_LIFE_S
from kvweave.kv.tree import Extended, KnowledgeTree, Pages, TreeConfig
from worlds.tree import DEVICE, HOST, PREAMBLE, Clock, TensorOwner, World, cost_s, refs


def make_pair(policy: str = "pgdsf") -> World:
    """Room for two chunks of five on the device, none on host."""
    return World(device_tokens=10, host_tokens=0, policy=policy)


def test_the_same_chunk_behind_two_paths_is_two_nodes() -> None:
    world = World()
    world.ask("a", "c")
    world.ask("b", "c")
    assert {path for path in world.where() if path[-1] == "c"} == {("a", "c"), ("b", "c")}


def test_a_shorter_prefix_of_a_stored_path_is_found() -> None:
    world = World()
    world.ask("a", "b", "c")
    assert len(world.tree.match([ref.id for ref in refs(["a", "b", "d"])]).nodes) == 2
    assert world.tree.match([]).num_tokens == PREAMBLE.num_tokens


def test_of_two_nodes_equal_but_for_frequency_the_rarer_leaves() -> None:
    world = make_pair()
    world.ask("b")
    world.ask("a")
    world.ask("b")
    world.ask("a")
    world.ask("a")
    world.ask("c")
    assert set(world.where()) == {("a",), ("c",)}


def test_of_two_nodes_equal_but_for_cost_the_cheaper_leaves() -> None:
    """Seconds per new token: a short question makes the same chunk dearer per token."""
    world = make_pair()
    world.ask("a", question=1)
    world.ask("b", question=500)
    world.ask("c")
    assert set(world.where()) == {("a",), ("c",)}


def test_of_two_nodes_the_one_that_is_cheaper_by_the_new_price_leaves() -> None:
    world = make_pair()
    world.tree.price(lambda cached, new: new * new)  # now a long prefill is dearer per token
    world.ask("a", question=1)
    world.ask("b", question=500)
    world.ask("c")
    assert set(world.where()) == {("b",), ("c",)}


def test_a_new_price_counts_in_the_units_of_before() -> None:
    world = make_pair()
    world.ask("a", question=1)
    world.tree.price(lambda cached, new: 1e6 * cost_s(cached, new))
    world.ask("b", question=500)
    world.ask("c")
    assert set(world.where()) == {("a",), ("c",)}, "as if nothing had changed"


def test_lru_on_the_same_tree_forgets_the_oldest() -> None:
    world = make_pair("lru")
    for name in "aabc":
        world.ask(name)
    assert set(world.where()) == {("b",), ("c",)}


def test_a_parent_outlives_its_children() -> None:
    world = World(device_tokens=15, host_tokens=0)
    world.ask("a", "b", "c")
    world.ask("d")
    assert set(world.where()) == {("a",), ("a", "b"), ("d",)}


def test_a_node_is_copied_to_host_once() -> None:
    world = World(device_tokens=5, host_tokens=100)
    for name in "abababab":
        world.ask(name)
    assert world.owner.copies_out == 2
    assert world.owner.copies_in == 6


def test_bytes_survive_the_way_out_and_back() -> None:
    world = World(device_tokens=5)
    chunk = refs(["a"])[0]
    with world.tree.acquire([chunk], 1) as lease:
        pages = world.owner.make(5, value=7.0)
        assert world.tree.extend(lease, chunk, pages) is Extended.ADOPTED
    world.ask("b")
    assert world.where()[("a",)] == {"host"}
    with world.tree.acquire([chunk], 1) as lease:
        world.tree.load(lease)
        assert world.owner.read(DEVICE, lease.nodes[1].pages[DEVICE]).tolist() == [7.0] * 5


def test_a_full_host_pushes_out_its_own_lowest_rank() -> None:
    world = World(device_tokens=5, host_tokens=10)
    for name in ("a", "b", "a", "a", "c", "d"):
        world.ask(name)
    assert world.where()[("a",)] == {"host"}
    assert ("b",) not in world.where()


def test_a_chunk_larger_than_host_is_dropped_with_what_hangs_below_it() -> None:
    world = World(device_tokens=20, host_tokens=4)
    world.tree.replicate(10**6)
    world.ask("a", "b3")
    world.ask("c14")
    assert world.where()[("a", "b3")] == {"host"}
    world.ask("c18")
    assert set(world.where()) == {("c18",)}


def test_leased_nodes_are_in_nobodys_way_but_never_leave() -> None:
    world = World(device_tokens=10)
    world.ask("a")
    with world.tree.acquire(refs(["a"]), 1):
        world.ask("b", "c")
        assert world.where()[("a",)] == {"device"}


def test_no_room_changes_nothing() -> None:
    world = World(device_tokens=10)
    world.ask("a")
    world.ask("b")
    before = world.where()
    with world.tree.acquire(refs(["a"]), 1) as lease:
        big = world.owner.make(11)
        assert world.tree.extend(lease, refs(["z11"])[0], big) is Extended.NO_ROOM
        world.owner.free(DEVICE, big)
    assert world.where() == before
    world.check()


def test_a_second_request_for_the_same_new_path_keeps_its_own_pages() -> None:
    world = World()
    chunk = refs(["a"])[0]
    first, second = (world.tree.acquire([chunk], 1) for _ in range(2))
    assert world.tree.extend(first, chunk, world.owner.make(5)) is Extended.ADOPTED
    late = world.owner.make(5)
    assert world.tree.extend(second, chunk, late) is Extended.PRESENT
    world.owner.free(DEVICE, late)
    assert second.num_tokens == PREAMBLE.num_tokens + 5
    first.release()
    second.release()
    second.release()  # once more does nothing
    world.check()


def test_usage_outlives_eviction() -> None:
    """Pushed out once, a popular path comes back with its old count."""
    world = make_pair()
    for name in ("a", "a", "a", "b", "c", "d", "a", "e", "f"):
        world.ask(name)
    assert ("a",) in world.where()


def test_a_failed_copy_is_a_shorter_match() -> None:
    world = World(device_tokens=5)
    world.ask("a")
    world.ask("b")
    world.owner.fail_copies = True
    with world.tree.acquire(refs(["a"]), 1) as lease:
        assert len(lease.nodes) == 2
        assert world.tree.load(lease) == 0
        assert lease.num_tokens == PREAMBLE.num_tokens
    world.check()


def test_a_copy_that_cannot_be_made_pushes_nobody_out_of_host() -> None:
    world = World(device_tokens=5, host_tokens=5)
    world.ask("a")
    world.ask("b")
    world.owner.fail_copies = True
    world.ask("c")  # b leaves the device for good
    assert world.where() == {("a",): {"host"}, ("c",): {"device"}}


def test_a_copy_that_is_lost_takes_its_node_along_and_what_hangs_below() -> None:
    world = World(device_tokens=10, host_tokens=100)
    world.ask("a", "b")
    world.ask("c10")
    assert world.where()[("a", "b")] == {"host"}
    upper = next(node for node in world.tree if node.chunk_id == "a")
    world.tree.lose_copy(upper.pages[HOST].handle)
    assert set(world.where()) == {("c10",)}
    world.check()


def test_a_copy_that_is_lost_takes_nothing_along_that_is_on_the_device() -> None:
    world = World(device_tokens=10, host_tokens=100)
    world.ask("a")
    world.tree.replicate(10**6)
    node = next(iter(world.tree))
    world.tree.lose_copy(node.pages[HOST].handle)
    assert world.where() == {("a",): {"device"}}
    world.check()
    with world.tree.acquire(refs(["a"]), 1) as lease:
        world.tree.replicate(10**6)
        copy = lease.nodes[1].pages[HOST].handle
        world.tree.forget(refs(["a"])[0].id)
        world.tree.lose_copy(copy)  # of a node that only the lease still holds
        world.check()
    world.check()
    assert not world.where()


def test_upper_nodes_are_copied_ahead_the_worthiest_first() -> None:
    world = World(device_tokens=30)
    for path in ("ab", "ab", "c", "cd", "cd"):
        world.ask(*path)
    assert world.tree.replicate(0) == 0
    assert world.tree.replicate(51) == 100  # until there are so many
    assert {path for path, tiers in world.where().items() if "host" in tiers} == {("a",), ("c",)}
    assert world.tree.replicate(10**6) == 100
    assert world.tree.replicate(10**6) == 0
    made = world.owner.copies_out
    world.ask("e20")
    assert world.where()[("a", "b")] == {"host"}, "it left the device"
    assert world.owner.copies_out == made, "and its copy was there"


def test_nothing_leaves_host_for_what_is_copied_ahead() -> None:
    world = World(device_tokens=10, host_tokens=12)
    for name in ("a", "b", "c10", "c10", "c10"):
        world.ask(name)
    before = world.where()
    assert before[("a",)] == before[("b",)] == {"host"}
    assert world.tree.replicate(10**6) == 0
    assert world.where() == before


def test_a_node_that_leaves_the_device_pushes_no_worthier_one_out_of_host() -> None:
    world = World(device_tokens=10, host_tokens=10)
    for name in "aabb":
        world.ask(name)
    world.ask("c10")
    world.ask("d10")
    assert set(world.where()) == {("a",), ("b",), ("d10",)}
    assert world.owner.copies_out == 2


def test_what_a_plain_request_brought_is_kept_by_its_use() -> None:
    """It asked the tree for nothing, so no miss of it was ever priced."""
    world = World(device_tokens=15, host_tokens=0)
    world.bring("a")
    for name in "bc":
        world.ask(name)
    for _ in range(10):
        assert world.ask("a") == 1
    for name in "bcdefbcdef":
        world.ask(name)
    assert ("a",) in world.where()


@pytest.mark.parametrize("cost", [cost_s, lambda cached, new: new * (1 + cached)])
def test_what_a_plain_request_brought_costs_what_it_would_take_again(
    cost: Callable[[int, int], float],
) -> None:
    """Deep behind its path or first, by the price of today; a pinned preamble likewise."""
    owner, clock = TensorOwner(), Clock()
    tree = KnowledgeTree(TreeConfig(1000, 0), owner, cost_s, now_s=clock)
    chunks = refs(["p8", "a", "b"])
    with tree.acquire((), 0, count=False) as lease:
        for chunk in chunks:
            assert tree.extend(lease, chunk, owner.make(chunk.num_tokens)) is Extended.ADOPTED
    tree.price(cost)
    scale = cost_s(0, 1024) / cost(0, 1024)  # prices are comparable with those of before
    with tree.acquire(chunks, 1) as lease:
        assert len(lease.nodes) == 4
        for node in lease.nodes[1:]:
            before = node.end - node.num_tokens
            worth = 2 * scale * cost(before, node.num_tokens) / node.num_tokens
            assert node.ranks[DEVICE] == pytest.approx(math.log2(worth)), "used twice"


def test_paths_that_come_once_do_not_flush_what_comes_again() -> None:
    """A clock that rises with each of them, as GDSF has, outruns the others."""
    found = {}
    for policy in ("pgdsf", "gdsf"):
        world = World(device_tokens=25, host_tokens=0, policy=policy)
        once = map(chr, range(1000, 3000))
        found[policy] = 0
        for _ in range(20):
            found[policy] += world.ask("a")
            for _ in range(60):
                world.ask(next(once))
    assert found["pgdsf"] == 18, "all but the first two"
    assert found["gdsf"] < 6


def test_what_was_hot_long_ago_makes_room() -> None:
    world = make_pair()
    for _ in range(8):
        world.ask("a")
    world.clock.now_s += 10 * HALF_LIFE_S
    for name in "bcbc":
        world.ask(name)
    assert set(world.where()) == {("b",), ("c",)}


def test_a_deleted_chunk_is_not_found_and_its_leased_pages_wait() -> None:
    world = World()
    world.ask("a", "b", "a9")
    world.ask("c", "b")
    lease = world.tree.acquire(refs(["a", "b"]), 1)
    assert world.tree.forget(refs(["b"])[0].id) == 3
    assert set(world.where()) == {("a",), ("c",)}
    world.check()
    assert lease.nodes[-1].pages
    lease.release()
    assert not list(world.tree.doomed_nodes())
    world.check()


def test_nested_copies_of_a_deleted_chunk_go_once() -> None:
    world = World(device_tokens=30)
    world.ask("a", "b", "c")
    chunk = refs(["a"])[0]
    with world.tree.acquire(refs(["a", "b", "c"]), 1) as lease:
        assert world.tree.extend(lease, chunk, world.owner.make(5)) is Extended.ADOPTED
    assert world.tree.forget(chunk.id) == 4
    assert len(world.tree) == 0
    world.check()


def test_a_speculative_look_counts_nothing() -> None:
    world = World()
    world.ask("a")
    uses = world.tree.match([refs(["a"])[0].id]).nodes[0].usage.uses
    world.tree.acquire(refs(["a"]), 1, count=False).release()
    assert world.tree.match([refs(["a"])[0].id]).nodes[0].usage.uses == uses


def test_a_match_says_what_must_be_loaded_first() -> None:
    world = World(device_tokens=5)
    world.ask("a")
    world.ask("b")
    match = world.tree.match([refs(["a"])[0].id])
    assert (match.host_bytes, match.host_tokens) == (50, 5)


def test_several_preambles_share_a_budget_below_an_empty_root() -> None:
    owner = TensorOwner()
    tree = KnowledgeTree(TreeConfig(140, 100), owner, cost_s)
    for tenant in ("s2", "t2"):
        with tree.acquire(refs([tenant, "a"]), 1) as lease:
            tree.load(lease)
            for chunk in refs([tenant, "a"]):
                pages = owner.make(chunk.num_tokens)
                assert tree.extend(lease, chunk, pages) is Extended.ADOPTED
    tree.check_integrity()
    assert len(tree) == 4
    assert tree.used_bytes(DEVICE) == 140


def test_wrong_settings_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="device_bytes"):
        TreeConfig(0, 10)
    with pytest.raises(ConfigError, match="a preamble of 40 bytes does not fit"):
        KnowledgeTree(TreeConfig(30, 0), TensorOwner(), cost_s, PREAMBLE, Pages(40, None))
    with pytest.raises(ConfigError, match="no policy 'best'"):
        KnowledgeTree(TreeConfig(10, 10, "best"), TensorOwner(), cost_s)


def test_a_tree_that_remembers_no_absent_path_still_serves() -> None:
    owner = TensorOwner()
    config = TreeConfig(1000, 0, remembered_paths=0)
    tree = KnowledgeTree(config, owner, lambda x, y: float(y))
    with tree.acquire(refs(["a"]), 1) as lease:
        assert tree.extend(lease, refs(["a"])[0], owner.make(5)) is Extended.ADOPTED
    assert len(tree.match([c.id for c in refs(["a"])]).nodes) == 1
    with pytest.raises(ConfigError, match="remembered_paths"):
        TreeConfig(1000, 0, remembered_paths=-1)


def test_the_last_evictions_are_remembered_with_the_path_they_were_on() -> None:
    world = make_pair()
    world.ask("b")
    world.ask("a")
    world.ask("a")
    world.ask("c")
    (gone,) = world.tree.evictions()
    assert (gone.chunk_id, gone.path, gone.tier) == ("b", "b", DEVICE)
    assert gone.size_bytes > 0
    assert math.isfinite(gone.rank)
