"""Tenants take turns: nobody's first job waits for another's."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.serve.workers.fair_turns import FairTurns

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from("abc")),
        st.tuples(st.just("done"), st.integers(0, 20)),
        st.tuples(st.just("drop"), st.integers(0, 20)),
    ),
    max_size=120,
)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS, places=st.integers(1, 4))
def test_whoever_waits_runs_something_and_places_are_used(
    steps: list[tuple[str, object]], places: int
) -> None:
    turns: FairTurns[int] = FairTurns(places)
    waiting: dict[str, list[int]] = {name: [] for name in "abc"}
    running: list[tuple[str, int]] = []
    for number, (what, which) in enumerate(steps):
        if what == "put":
            assert isinstance(which, str)
            turns.put(which, number)
            waiting[which].append(number)
        elif what == "done" and running:
            assert isinstance(which, int)
            tenant, _ = running.pop(which % len(running))
            turns.done(tenant)
        elif what == "drop" and any(waiting.values()):
            assert isinstance(which, int)
            flat = [(name, job) for name in waiting for job in waiting[name]]
            tenant, job = flat[which % len(flat)]
            turns.drop(tenant, job)
            waiting[tenant].remove(job)
        while (begins := turns.next()) is not None:
            tenant, job = begins
            assert job == waiting[tenant].pop(0), "in order within a tenant"
            running.append(begins)
        of = {name: sum(tenant == name for tenant, _ in running) for name in "abc"}
        assert turns.num_running == len(running)
        for name in "abc":
            assert not waiting[name] or of[name], "its first job never waits"
        if any(waiting.values()):
            assert len(running) >= places, "no place is left empty"
        assert len(running) <= places + len("abc")


def test_the_one_with_fewest_goes_first() -> None:
    turns: FairTurns[str] = FairTurns(3)
    for job in ("a1", "a2", "a3", "a4"):
        turns.put("a", job)
    assert [turns.next() for _ in range(4)] == [("a", "a1"), ("a", "a2"), ("a", "a3"), None]
    turns.put("b", "b1")
    turns.put("b", "b2")
    assert turns.next() == ("b", "b1"), "a place more"
    assert turns.next() is None
    turns.done("a")
    turns.done("a")
    assert turns.next() == ("b", "b2") or turns.next() is None
