"""What is remembered of chunks: how often they were asked for, and that they were removed."""

from collections.abc import Collection

import pytest

from kvweave.kv.inventory import RemovedChunks, UsageBook
from kvweave.kv.provenance import Provenance
from worlds.kv import make_key


def test_frequency_survives_eviction_but_the_book_is_bounded() -> None:
    book = UsageBook(max_keys=3)
    for _ in range(5):
        book.touch(make_key(0), 1.0, 10)
    assert book.snapshot(make_key(0)).uses == 5
    for number in range(1, 4):
        book.touch(make_key(number), 1.0, 10)
    assert book.snapshot(make_key(0)).uses == 0


def test_an_unknown_cost_is_taken_as_the_mean_of_the_known() -> None:
    book = UsageBook()
    book.record_computation(make_key(0), cost_s=2.0, num_tokens=100)
    book.record_found(make_key(1), written_s=0.0, size_bytes=10)
    assert book.snapshot(make_key(1)).cost_per_unit_s == pytest.approx(0.02)


def test_what_was_found_on_disk_is_worth_what_computing_such_a_chunk_takes() -> None:
    book = UsageBook()
    book.touch(make_key(0), 1.0, 1000)
    book.record_computation(make_key(0), 2.56, 256)
    assert book.record_found(make_key(1), 1.0, 1000).cost_s == pytest.approx(2.56)
    assert book.record_found(make_key(2), 1.0, 500).cost_s == pytest.approx(1.28)
    assert book.snapshot(make_key(2)).cost_per_unit_s == pytest.approx(0.01)


def test_deletions_that_are_forgotten_count_for_what_is_older_and_not_known_to_be_there() -> None:
    removed, alive = RemovedChunks(most=2), {"alive"}
    removed.know_by(alive.intersection)
    for name in "abc":  # the first is remembered no more
        removed.add([name])
    of = [Provenance(name, ()) for name in "abcx"]
    assert [removed.covers(each, 0) for each in of] == [True] * 4, "x perhaps: nobody remembers"
    assert [removed.covers(each, 1) for each in of] == [False, True, True, False]
    assert [removed.covers(each, 3) for each in of] == [False] * 4
    assert not removed.covers(Provenance("alive", ()), 0)
    assert removed.covers(Provenance("alive", ("b",)), 0)
    assert not removed.covers(None, 0), "it does not say"


def test_a_deletion_that_is_heard_of_while_we_look_is_not_taken_for_undone() -> None:
    removed = RemovedChunks()

    def deleted_again(names: Collection[str]) -> Collection[str]:
        removed.add(["a"])
        return names

    removed.add(["a"])
    removed.know_by(deleted_again)
    assert not removed.covers(Provenance("a", ()), 0)
    removed.know_by(lambda names: ())
    assert removed.covers(Provenance("a", ()), 1)
