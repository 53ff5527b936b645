"""How many neighbours a profile speaks for: of what was measured alike, the cheapest choice."""

from dataclasses import replace

import pytest

from kvweave.calibrate.gate import Cell, Table
from kvweave.calibrate.profiles import Profile, calibrated_neighbours
from kvweave.fuse.encode.contexts import Variant, variant_name

FILLER = (5, 6, 7)


def make_cell(work: float, kl: float = 0.01, flips: float = 0.0) -> Cell:
    return Cell("weave", 0.15, work, kl, kl, kl, kl, kl, flips, 1.0, 0.0)


def make_table(
    size: int,
    *cells: Cell,
    kind: str = "neighbours",
    filler: tuple[int, ...] = FILLER,
    num_questions: int = 100,
    preamble: str = "p1",
    revision: str = "r1",
) -> Table:
    variant = Variant(kind, size)
    where = (str(variant), variant_name(variant, filler), preamble, revision)
    names = ("float32", "q.txt", "cafe", "2026-01-01")
    return Table(*where, *names, num_questions, 0, 9000, 800.0, 0.0, None, None, cells)


def found(*tables: Table) -> int | None:
    return calibrated_neighbours(Profile("tiny", "w", "t", None, tables), "r1", "p1", FILLER)


def test_the_number_whose_choice_costs_the_least_work_wins() -> None:
    tables = (
        make_table(1, make_cell(0.3, kl=0.001)),
        make_table(10, make_cell(0.1, kl=0.1), make_cell(0.4)),  # its cheapest cell is not chosen
        make_table(4, make_cell(0.2, kl=0.019), make_cell(0.5)),
    )
    assert found(*tables) == 4


def test_of_two_that_are_alike_the_smaller_number_wins() -> None:
    assert found(make_table(10, make_cell(0.2)), make_table(2, make_cell(0.2))) == 2


@pytest.mark.parametrize(
    "cell",
    [make_cell(0.1, kl=0.021), make_cell(0.1, flips=0.03), make_cell(1.0)],
    ids=["KL", "flips", "work"],
)
def test_no_number_is_better_than_one_without_a_choice(cell: Cell) -> None:
    assert found(make_table(1, cell)) is None
    assert found(make_table(1, cell), make_table(7, make_cell(0.9))) == 7


@pytest.mark.parametrize(
    "other",
    [
        {"revision": "r2"},
        {"preamble": "p2"},
        {"filler": (5, 6)},
        {"kind": "filler"},
    ],
    ids=str,
)
def test_what_was_measured_otherwise_does_not_count(other: dict[str, str]) -> None:
    table = make_table(1, make_cell(0.1), **other)  # type: ignore[arg-type]
    assert found(table) is None
    assert found(table, make_table(7, make_cell(0.9))) == 7


@pytest.mark.parametrize("size", ["0", "01", "x", "1" * 5000])
def test_a_context_that_kvweave_never_wrote_does_not_count(size: str) -> None:
    table = make_table(1, make_cell(0.1))
    assert found(replace(table, context=table.context.replace(":1:", f":{size}:"))) is None


def test_few_questions_speak_only_where_many_have_no_choice() -> None:
    few = make_table(1, make_cell(0.1), num_questions=99)
    assert found(few, make_table(7, make_cell(0.9))) == 7
    assert found(few, make_table(7, make_cell(0.9, kl=0.1))) == 1


def test_an_empty_profile_has_no_number() -> None:
    assert found() is None
