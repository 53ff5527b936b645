"""Which replica a request goes to. No network: replicas are told how they are."""

from collections import Counter
from dataclasses import replace

import pytest

from kvweave.engine.sampling import Sampling
from kvweave.errors import UpstreamError
from kvweave.gateway.bodies import UpstreamRequest, body_of
from kvweave.gateway.cards import UpstreamCard, UpstreamKind
from kvweave.gateway.connections import UpstreamFailed
from kvweave.gateway.fleet import Fleet, ReplicaLease, RoutedPrompt
from kvweave.gateway.mirror import PromptPart
from kvweave.gateway.prompts import COMPLETIONS, UpstreamPrompt
from kvweave.gateway.replica import ReplicaHealth
from worlds.gateways import QUICK

PRE = PromptPart(b"preamble", 40)


def make_fleet(num: int, *, fuses: bool = False, **how: object) -> Fleet:
    urls = tuple(f"http://127.0.0.1:{port}" for port in range(1, num + 1))
    fleet = Fleet(replace(QUICK, upstreams=urls, wait_s=0.0, **how))  # type: ignore[arg-type]
    for replica in fleet.replicas:
        replica.card = UpstreamCard(UpstreamKind.VLLM, "m", fuses=fuses)
        replica.health = ReplicaHealth.UP
    return fleet


def prompt(*chunks: str, question: str = "q", salt: bytes = b"") -> RoutedPrompt:
    parts = [PRE, *(PromptPart(c.encode(), 200, True) for c in chunks)]
    return RoutedPrompt((*parts, PromptPart(question.encode(), 10)), salt)


def ask(fleet: Fleet, asked: RoutedPrompt) -> ReplicaLease:
    """A request that is over at once."""
    lease = fleet.lease(asked)
    lease.record_success()
    lease.give_back()
    return lease


def test_a_prompt_goes_where_its_beginning_lies() -> None:
    fleet = make_fleet(4)
    homes = {name: ask(fleet, prompt(name, "z")).replica for name in "abcdefgh"}
    assert len(set(homes.values())) > 1, "what is new is spread"
    for name, home in homes.items():
        lease = ask(fleet, prompt(name, "y", question="another"))
        assert lease.replica is home
        assert lease.match.exact == 240


def test_what_is_new_goes_by_its_first_chunk_whichever_gateway_it_comes_through() -> None:
    chosen = [
        [ask(make_fleet(5), prompt(name)).replica.name for name in "abcdefgh"] for _ in range(2)
    ]
    assert chosen[0] == chosen[1]


def test_the_preamble_alone_draws_nothing() -> None:
    fleet = make_fleet(4)
    used = Counter(ask(fleet, prompt(f"{n}", f"{n + 1}")).replica.name for n in range(200))
    assert len(used) == 4
    assert max(used.values()) < 100


def test_chunks_count_where_replicas_fuse_them() -> None:
    for fuses in (False, True):
        fleet = make_fleet(8, fuses=fuses)
        first = ask(fleet, prompt("a", "b", "c", "d")).replica
        hits = 0
        for n in range(16):  # other first chunks, so the hash alone would go elsewhere
            hits += ask(fleet, prompt(f"new{n}", "b", "c", "d")).replica is first
        assert (hits >= 8) is fuses, f"{hits} of 16"


def test_no_replica_gets_more_than_the_factor_of_the_mean_load() -> None:
    fleet = make_fleet(4)
    leases = [fleet.lease(prompt("hot", "hotter")) for _ in range(64)]
    loads = [replica.load for replica in fleet.replicas]
    assert sum(loads) == 64
    assert max(loads) <= 1.25 * 64 / 4 + 1
    for lease in leases:
        lease.give_back()
        lease.give_back()
    assert [replica.load for replica in fleet.replicas] == [0] * 4
    assert fleet.pending_prefills() == 0


def test_a_short_way_elsewhere_beats_a_long_queue_at_home() -> None:
    fleet = make_fleet(2, load_factor=8.0)  # the bound on the load is far
    home = ask(fleet, prompt("a", "b")).replica
    waiting = [fleet.lease(prompt("a", "b", f"new{n}")) for n in range(3)]
    assert waiting[0].replica is home, "with nothing to wait for"
    # 200 new tokens each before it: the third one is through sooner where it computes 600
    assert [lease.replica is home for lease in waiting] == [True, True, True]
    lease = fleet.lease(prompt("a", "b", "newer"))
    assert lease.replica is not home
    for each in (*waiting, lease):
        each.first_token()
        each.give_back()
    assert [replica.backlog for replica in fleet.replicas] == [0, 0]


def test_what_was_tried_comes_last() -> None:
    fleet = make_fleet(2)
    home = ask(fleet, prompt("a")).replica
    other = fleet.lease(prompt("a"), tried=[home]).replica
    assert other is not home
    assert fleet.lease(prompt("a"), tried=[home, other]).replica in (home, other)


def test_round_robin_takes_turns_and_least_loaded_fills_up() -> None:
    turns = make_fleet(3, routing="round_robin")
    assert list(Counter(ask(turns, prompt("a")).replica.name for _ in range(9)).values()) == [
        3,
        3,
        3,
    ]
    least = make_fleet(3, routing="least_loaded")
    assert len({least.lease(prompt("a")).replica.name for _ in range(3)}) == 3


def test_where_none_takes_requests_all_are_named() -> None:
    fleet = make_fleet(2)
    fleet.replicas[0].health = ReplicaHealth.DRAINING
    for _ in range(QUICK.breaker_failures):
        fleet.replicas[1].breaker.record_failure("broken")
    with pytest.raises(UpstreamError, match=r":1 is draining.*:2 is resting"):
        fleet.lease(prompt("a"))


def test_a_closed_fleet_takes_nothing() -> None:
    fleet = make_fleet(1)
    fleet.close()
    with pytest.raises(UpstreamError, match="stopping"):
        fleet.lease(prompt("a"))


@pytest.mark.parametrize("status", [429, None])
def test_a_probe_that_tells_nothing_leaves_the_next_one_to_another(status: int | None) -> None:
    fleet = make_fleet(1, breaker_failures=1, breaker_rest_s=0.0)
    lease = fleet.lease(prompt("a"))
    lease.record_failure(UpstreamFailed("broken", 500))
    lease.give_back()
    probe = fleet.lease(prompt("a"))
    with pytest.raises(UpstreamError, match="resting"):
        fleet.lease(prompt("a"))
    if status is not None:  # else its client left
        probe.record_failure(UpstreamFailed("busy", status))
    probe.give_back()
    ask(fleet, prompt("a"))
    assert not fleet.replicas[0].breaker.is_open


def test_a_replica_that_dies_right_after_it_was_chosen_fails_as_one_that_does_not_answer() -> None:
    fleet = make_fleet(1)
    content = UpstreamPrompt(COMPLETIONS, {"prompt": [1]}, prompt("a"), 1)
    lease = fleet.lease(content.routed)
    fleet.replicas[0].card = None  # a look found it dead
    body = body_of(UpstreamRequest(content, Sampling()), lease.card)
    assert body["model"] == "m"
    with pytest.raises(UpstreamFailed):
        lease.exchange(COMPLETIONS, body).begin(1.0)
