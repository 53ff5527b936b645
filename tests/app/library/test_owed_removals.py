"""What shared tiers are still to be rid of is each tenant's own, and bounded."""

from kvweave.app.library.owed_removals import OwedRemovals
from kvweave.types import ChunkId

A, B, C = map(ChunkId, "abc")


def test_what_one_tenant_has_paid_another_may_owe() -> None:
    owed = OwedRemovals()
    owed.add([A, B], "one")
    owed.add([B], "two")
    owed.strike([A, B], "one")
    assert owed.by_tenant() == {"two": {B}}
    assert owed.without([A, B]) == {A}
    owed.strike([B], "two")
    assert owed.without([A, B]) == {A, B}


def test_beyond_the_bound_nothing_counts_as_paid_until_all_is() -> None:
    owed = OwedRemovals(most=2)
    owed.add([A, B, C], "one")
    assert owed.by_tenant() == {"one": {A, B}}
    owed.strike([A], "one")
    assert owed.without([A, C]) == set()
    owed.strike([B], "one")
    assert owed.without([A, C]) == {A, C}


def test_one_tenant_takes_no_place_of_another() -> None:
    owed = OwedRemovals(most=1)
    owed.add([A, B], "one")
    owed.add([C], "two")
    assert owed.by_tenant()["two"] == {C}
