"""What bench/house.py counts and this house keeps: it may get better, not worse."""

from house import imports, is_participle, num_floors, two_way_pairs


def test_the_engine_has_few_floors() -> None:
    assert num_floors("engine", imports()) <= 9


def test_no_more_folders_import_each_other() -> None:
    assert len(two_way_pairs(imports())) <= 20


def test_a_participle_is_told_from_a_verb() -> None:
    assert all(map(is_participle, ("held", "told", "_laid", "filled")))
    assert not any(map(is_participle, ("hold", "read", "embed", "is_held", "held_back")))
