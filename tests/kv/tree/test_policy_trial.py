"""The tree goes by the policy that would keep more."""

import random
from collections.abc import Iterator

from kvweave.kv.tree.policy_trial import TRIED
from worlds.tree import World

PGDSF, GDSF = TRIED
STEADY, DRIFTING = 0x3400, 0x4E00  # where names of one letter begin


def steady(length: int = 3000) -> Iterator[str]:
    """Some chunks come more often than others, and that stays so."""
    names = [chr(STEADY + number) for number in range(300)]
    weights = [1 / (1 + number) for number in range(300)]
    yield from random.Random(0).choices(names, weights, k=length)


def drifting() -> Iterator[str]:
    """What is asked for is another thing every hundred questions."""
    drawn = random.Random(0)
    for number in range(3000):
        yield chr(DRIFTING + 12 * (number // 100) + drawn.randrange(12))


def ask_all(names: Iterator[str], policy: str) -> tuple[int, World]:
    """Return how often the chunk that was asked for was there."""
    world = World(device_tokens=60, host_tokens=0, policy=policy)
    found = 0
    for name in names:
        found += world.ask(name)
    return found, world


def test_a_stream_that_drifts_is_served_by_the_policy_that_forgets() -> None:
    remembering, _ = ask_all(drifting(), PGDSF)
    forgetting, _ = ask_all(drifting(), GDSF)
    found, world = ask_all(drifting(), "auto")
    assert world.tree.policy == GDSF
    assert remembering < 0.9 * forgetting, "the stream tells the two apart"
    assert found > 0.95 * forgetting


def test_a_stream_that_stays_is_served_by_the_policy_that_remembers() -> None:
    remembering, _ = ask_all(steady(), PGDSF)
    forgetting, _ = ask_all(steady(), GDSF)
    found, world = ask_all(steady(), "auto")
    assert world.tree.policy == PGDSF
    assert forgetting < 0.95 * remembering, "the stream tells the two apart"
    assert found == remembering


def test_it_turns_back_when_the_stream_does() -> None:
    _, world = ask_all(drifting(), "auto")
    for name in steady(9000):
        world.ask(name)
    assert world.tree.policy == PGDSF


def test_what_a_leaf_is_worth_keeps_its_scale() -> None:
    """Shared chunks in the same pool are ranked by the policy that the tree began with."""
    _, remembering = ask_all(drifting(), PGDSF)
    _, world = ask_all(drifting(), "auto")
    ranks = remembering.tree.lowest_rank(), world.tree.lowest_rank()
    assert world.tree.policy == GDSF
    assert ranks[0] is not None
    assert ranks[1] is not None
    assert abs(ranks[0] - ranks[1]) < 4.0, "both are logarithms of seconds per token"


def test_nothing_is_decided_by_a_few_accesses() -> None:
    _, world = ask_all(iter("abcabc"), "auto")
    assert world.tree.policy == PGDSF
