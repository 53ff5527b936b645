"""The ledger of the crash benches: it sees what is lost and what is back, and excuses no more."""

import pytest

from reliability.disk_log import Kind, Record
from reliability.ledger import Ledger
from reliability.notes import Version, fault_in, versions_in
from reliability.power import ledger_at

ONE, TWO = Version(3, 1), Version(3, 2)


def told(*states: Version | None) -> Ledger:
    ledger = Ledger()
    for state in states:
        ledger.begin(3, state)
        ledger.acknowledge(3)
    return ledger


def test_what_was_acknowledged_and_is_not_there_is_lost() -> None:
    assert told(ONE).faults({3: ONE}) == ([], [])
    assert told(ONE).faults({}) == (["note 3 is absent, told k3v1z"], [])
    assert told(ONE, TWO).faults({3: ONE}) == (["note 3 is k3v1z, told k3v2z"], [])


def test_what_was_deleted_and_is_there_is_back() -> None:
    assert told(ONE, None).faults({}) == ([], [])
    assert told(ONE, None).faults({3: ONE}) == ([], ["note 3 is k3v1z, told absent"])
    assert told(ONE, None).gone() == {ONE}
    assert Ledger().faults({3: ONE})[1] == ["k3v1z is there and nobody sent it"]


@pytest.mark.parametrize("found", [ONE, TWO])
def test_what_was_begun_may_have_happened_or_not(found: Version) -> None:
    ledger = told(ONE)
    ledger.begin(3, TWO)
    assert ledger.faults({3: found}) == ([], [])
    assert ledger.faults({})[0] == ["note 3 is absent, told k3v1z or k3v2z"]
    ledger.settle({3: found})
    assert ledger.faults({3: found}) == ([], [])
    assert ledger.gone() == {ONE, TWO} - {found}


def test_a_refusal_leaves_what_was() -> None:
    ledger = told(ONE)
    ledger.begin(3, None)
    ledger.refuse(3)
    assert ledger.faults({})[0]


def test_the_ledger_of_a_cut_knows_what_stands_in_front_of_it() -> None:
    marks = ["begin 3 1", "ack 3", "other uploaded", "begin 3 -", "ack 3"]
    log = [Record(Kind.MARK, 0, data=words.encode()) for words in marks]
    possible = [ledger_at(log, cut).possible() for cut in range(6)]
    assert possible == [{}, {3: {None, ONE}}, {3: {ONE}}, {3: {ONE}}, {3: {ONE, None}}, {3: {None}}]


def test_a_chunk_says_whose_it_is_and_other_words_are_seen() -> None:
    assert versions_in(ONE.text) == {ONE}
    assert fault_in(f"{ONE.title}\n{ONE.text}", ONE.title, {ONE}) is None
    assert "no more" in str(fault_in(ONE.text, ONE.title, {TWO}))
    assert "other words" in str(fault_in(f"{ONE.mark} never said", ONE.title, {ONE}))
    assert "2 notes" in str(fault_in(f"{ONE.text} {TWO.text}", ONE.title, {ONE, TWO}))
