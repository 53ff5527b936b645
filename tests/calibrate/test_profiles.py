"""Profiles: what is written is what is read, and everything else is refused in one line."""

import json
from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest

from kvweave.calibrate import profiles
from kvweave.calibrate.gate import Cell, Table
from kvweave.calibrate.profiles import (
    LayerProfile,
    Profile,
    calibrated_neighbours,
    find_profile,
    load_profile,
    save_profile,
    user_path,
)
from kvweave.errors import ConfigError
from kvweave.fuse.encode.contexts import Variant, variant_name

LAYERS = LayerProfile(
    4, 2000.5, (0.1, 0.3), (0.0, 0.2), (0.2, 0.4), (1, 0), (0.3, 0.31), 0.25, 0.35, (1,)
)
CELL = Cell("weave", 0.15, 0.2, 0.01, 0.008, 0.012, 0.03, 0.2, 0.0, 0.98, -0.01, 0.6, None, 0.5)


def make_table(
    encoding: str = "isolated", revision: str = "r1", kl: float = 0.01, preamble: str = "p1"
) -> Table:
    cell = Cell("reuse", 0.0, 0.05, kl, kl, kl, kl, kl, 0.0, 1.0, 0.0)
    names = ("float32", "q.txt", "cafe", "2026-01-01")
    where = (encoding, encoding, preamble, revision)
    return Table(*where, *names, 24, 3, 9000, 812.25, 1e-8, 0.5, None, (cell, CELL))


FORMAT_5 = {f.name for f in fields(Table) if f.default is MISSING}
PROFILE = Profile("tiny", "abc" * 10, "def" * 10, LAYERS, (make_table(),))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_profile(tmp_path / "p.json", PROFILE)
    return tmp_path / "p.json"


def load(path: Path) -> Profile:
    return load_profile(path, PROFILE.weights, PROFILE.tokenizer)


def test_a_profile_comes_back_as_it_was_and_leaves_no_other_file(path: Path) -> None:
    assert load(path) == PROFILE
    assert [p.name for p in path.parent.iterdir()] == ["p.json"]


def test_a_failed_write_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(ConfigError, match=r"cannot write the profile .*p\.json: No space"):
            save_profile(path, Profile("other", "w", "t"))
    assert load(path) == PROFILE
    assert [p.name for p in path.parent.iterdir()] == ["p.json"]


def change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_another_format_is_refused_with_the_way_out(path: Path) -> None:
    change(path, format=8)
    with pytest.raises(ConfigError, match="has format 8, this kvweave reads 7; make it again with"):
        load(path)


def test_format_6_is_read_as_it_is(path: Path) -> None:
    """Its cells say nothing of their close calls: the table does."""
    stored = json.loads(path.read_text())
    for table in stored["calibration"]:
        for cell in table["cells"]:
            del cell["close_call"]
    path.write_text(json.dumps({**stored, "format": 6}))
    assert load(path) == PROFILE


@pytest.mark.parametrize("version", [2, 3, 4])
def test_tables_of_another_weave_are_not_read(path: Path, version: int) -> None:
    change(path, format=version)
    assert load(path) == profiles.replace(PROFILE, calibration=())


def test_of_format_1_the_layers_are_read_and_the_tables_are_not(path: Path) -> None:
    old = profiles.asdict(make_table())
    for name in ("context", "preamble", "num_chunk_tokens"):
        del old[name]
    change(path, format=1, calibration=[old])
    assert load(path) == profiles.replace(PROFILE, calibration=())


def test_a_profile_of_other_weights_or_tokenizer_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="other weights"):
        load_profile(path, "another", PROFILE.tokenizer)
    with pytest.raises(ConfigError, match="another tokenizer"):
        load_profile(path, PROFILE.weights, "another")


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": {"recall": [0.1]}},
        {"calibration": [{"encoding": "isolated"}]},
        {"calibration": 3},
        {"surprise": 1},
        {"weights": 7},
        {"layers": {**profiles.asdict(LAYERS), "all_layers": "much"}},
        {"layers": {**profiles.asdict(LAYERS), "critical": ["x"]}},
        {"layers": {**profiles.asdict(LAYERS), "critical": [-7]}},
        {"layers": {**profiles.asdict(LAYERS), "critical": [0.5]}},
        {"layers": {**profiles.asdict(LAYERS), "critical": 3}},
        {"layers": {**profiles.asdict(LAYERS), "recall": ["x"]}},
        {"calibration": [{**profiles.asdict(make_table()), "num_questions": "many"}]},
    ],
)
def test_a_damaged_profile_is_refused_in_one_line(path: Path, changes: dict[str, object]) -> None:
    change(path, **changes)
    with pytest.raises(ConfigError, match=r"p\.json is damaged \(") as refused:
        load(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "no json"])
def test_what_is_no_profile_is_refused(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError, match="no profile of kvweave"):
        load(path)


def test_a_fresh_table_replaces_the_one_of_its_decoder_and_encoding() -> None:
    more = PROFILE.with_tables(make_table(kl=0.5), make_table("filler:4:aa"))
    assert [t.encoding for t in more.calibration] == ["isolated", "filler:4:aa"]
    (table,) = more.tables("r1", "isolated", "p1")
    assert table.cells[0].kl == 0.5
    assert more.tables("another decoder", "isolated", "p1") == ()
    assert more.tables("r1", "filler:4:bb", "p1") == ()
    assert more.tables("r1", "isolated", "p2") == (table,), "behind another preamble, if alone"
    both = more.with_tables(make_table(preamble="p2"))
    assert len(both.calibration) == 3
    assert [t.preamble for t in both.tables("r1", "isolated", "p2")] == ["p2"]


def test_each_kind_of_questions_has_its_table() -> None:
    hops, talk = (replace(make_table(), kind=kind) for kind in ("multi-hop", "conversation"))
    more = PROFILE.with_tables(hops, talk, replace(hops, date="2026-02-02"))
    assert [t.kind for t in more.tables("r1", "isolated", "p1")][:2] == ["own", "multi-hop"]
    behind = more.with_tables(replace(hops, preamble="p2")).tables("r1", "isolated", "p2")
    assert {(t.kind, t.preamble) for t in behind} == {("multi-hop", "p2"), ("conversation", "p1")}


def test_tables_of_format_5_are_the_users_own_but_for_the_one_that_came_with_the_model(
    path: Path,
) -> None:
    stored = json.loads(path.read_text())
    table = {k: v for k, v in stored["calibration"][0].items() if k in FORMAT_5}
    table["cells"] = [{k: v for k, v in c.items() if k != "close"} for c in table["cells"]]
    replaced = {**table, "data_hash": profiles.REPLACED[0]}
    change(path, format=5, calibration=[table, replaced])
    (kept,) = load(path).calibration
    assert (kept.kind, kept.data_hash, kept.has_history) == ("own", "cafe", False)
    assert load(path).layers == LAYERS


def test_quantised_weights_of_an_embedded_model_are_not_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path))
    (packaged,) = (Path(profiles.__file__).parent / "packaged").glob("smollm2*.json")
    stored = json.loads(packaged.read_text())
    assert find_profile(f"{stored['weights']}-int8", stored["tokenizer"]) is None


def test_a_users_profile_keeps_its_own_tables_beside_those_that_come_with_the_model() -> None:
    hops = replace(make_table(), kind="multi-hop")
    old, fresh = (replace(hops, date=day) for day in ("2025-01-01", "2026-03-03"))
    users = replace(PROFILE, layers=None, calibration=(make_table(), old))
    both = users.beside(replace(PROFILE, calibration=(fresh,)))
    assert both.layers == LAYERS
    assert both.calibration == (make_table(), fresh)
    assert users.beside(None) == users


def test_the_users_profile_wins_over_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path))
    assert find_profile(PROFILE.weights, PROFILE.tokenizer) is None
    save_profile(user_path(PROFILE.weights), PROFILE)
    assert find_profile(PROFILE.weights, PROFILE.tokenizer) == PROFILE


def test_facts_carry_the_critical_layers() -> None:
    assert PROFILE.facts(2).critical_layers == (1,)
    assert Profile("tiny", "w", "t").facts(2).critical_layers == ()


def test_embedded_models_come_with_a_profile_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path))
    packaged = sorted((Path(profiles.__file__).parent / "packaged").glob("*.json"))
    names = []
    for path in packaged:
        stored = json.loads(path.read_text())
        profile = find_profile(stored["weights"], stored["tokenizer"])
        assert profile is not None
        assert path.name == f"{profile.model}-{profile.weights[: profiles.SHORT]}.json"
        assert profile.layers is not None
        assert profile.facts(30).critical_layers
        kinds = {table.kind for table in profile.calibration}
        assert kinds == {"single-hop", "multi-hop", "document", "conversation"}
        subjects = [table.subject for table in profile.calibration]
        assert len(set(subjects)) == len(subjects) >= 6, "several numbers of chunks"
        assert stored["format"] == profiles.FORMAT
        names.append(profile.model)
    assert names == ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "smollm2"]


FILLER = (5, 6, 7)


def neighbour_cell(work: float, kl: float = 0.01, flips: float = 0.0) -> Cell:
    return Cell("weave", 0.15, work, kl, kl, kl, kl, kl, flips, 1.0, 0.0)


def neighbour_table(
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
        neighbour_table(1, neighbour_cell(0.3, kl=0.001)),
        neighbour_table(
            10, neighbour_cell(0.1, kl=0.1), neighbour_cell(0.4)
        ),  # its cheapest cell is not chosen
        neighbour_table(4, neighbour_cell(0.2, kl=0.019), neighbour_cell(0.5)),
    )
    assert found(*tables) == 4


def test_of_two_that_are_alike_the_smaller_number_wins() -> None:
    assert (
        found(neighbour_table(10, neighbour_cell(0.2)), neighbour_table(2, neighbour_cell(0.2)))
        == 2
    )


@pytest.mark.parametrize(
    "cell",
    [neighbour_cell(0.1, kl=0.021), neighbour_cell(0.1, flips=0.03), neighbour_cell(1.0)],
    ids=["KL", "flips", "work"],
)
def test_no_number_is_better_than_one_without_a_choice(cell: Cell) -> None:
    assert found(neighbour_table(1, cell)) is None
    assert found(neighbour_table(1, cell), neighbour_table(7, neighbour_cell(0.9))) == 7


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
    table = neighbour_table(1, neighbour_cell(0.1), **other)  # type: ignore[arg-type]
    assert found(table) is None
    assert found(table, neighbour_table(7, neighbour_cell(0.9))) == 7


@pytest.mark.parametrize("size", ["0", "01", "x", "1" * 5000])
def test_a_context_that_kvweave_never_wrote_does_not_count(size: str) -> None:
    table = neighbour_table(1, neighbour_cell(0.1))
    assert found(replace(table, context=table.context.replace(":1:", f":{size}:"))) is None


def test_few_questions_speak_only_where_many_have_no_choice() -> None:
    few = neighbour_table(1, neighbour_cell(0.1), num_questions=99)
    assert found(few, neighbour_table(7, neighbour_cell(0.9))) == 7
    assert found(few, neighbour_table(7, neighbour_cell(0.9, kl=0.1))) == 1


def test_an_empty_profile_has_no_number() -> None:
    assert found() is None
