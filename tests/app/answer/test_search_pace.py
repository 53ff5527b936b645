"""When speculation pays: learnt from searches."""

import math

import pytest

from kvweave.app.answer.guessing import FEWEST_ROWS, MAX_STAGES, TRIED, PrefillPace, SearchPace


def searched(pace: SearchPace, times: int, seconds: float, lists: list[str]) -> SearchPace:
    for _ in range(times):
        pace.note_search(seconds, lists, len(lists))
    return pace


EARLY = ["a"] * 8
LATE = ["a", "b", "c", "d", "e", "f", "g", "h"]


def test_before_the_first_search_nothing_is_staged_or_guessed() -> None:
    pace = SearchPace()
    assert pace.num_stages() == 1
    assert not pace.is_worth(1, 8, 0.0)


def test_a_search_of_a_moment_has_one_stage_and_a_long_one_many() -> None:
    assert searched(SearchPace(), 1, 0.002, ["a"]).num_stages() == 1
    assert searched(SearchPace(), 1, 0.3, ["a"]).num_stages() == MAX_STAGES


def test_lists_that_stand_early_are_worth_a_guess_and_those_that_change_late_are_not() -> None:
    early, late = searched(SearchPace(), 20, 0.3, EARLY), searched(SearchPace(), 20, 0.3, LATE)
    assert early.is_worth(1, 8, 0.2)
    assert not any(late.is_worth(stage, 8, 0.2) for stage in range(1, 9))


def test_the_last_stage_is_never_worth_a_guess() -> None:
    assert not searched(SearchPace(), 20, 9.0, EARLY).is_worth(8, 8, 0.0)


def test_long_steps_forbid_what_short_ones_allow() -> None:
    pace = searched(SearchPace(), 3, 0.1, EARLY)
    assert pace.is_worth(4, 8, 0.01)
    assert not pace.is_worth(4, 8, 5.0)


def test_a_short_prefill_is_guessed_when_the_rest_of_the_search_just_covers_it() -> None:
    pace = searched(SearchPace(), 20, 0.8, EARLY)  # 0.1 s a stage
    worth = [stage for stage in range(1, 9) if pace.is_worth(stage, 8, 0.01, prefill_s=0.25)]
    assert worth == [5, 6, 7], "0.3 s are left after stage 5, 0.2 s after stage 6"
    assert pace.is_worth(1, 8, 0.01, prefill_s=5.0), "one that takes longer begins at once"


def test_what_a_guess_gains_is_no_more_than_its_prefill() -> None:
    pace = searched(SearchPace(), 20, 0.8, ["a"] * 6 + ["b"] * 2)
    assert pace.is_worth(5, 8, 0.012, prefill_s=0.9)
    assert not pace.is_worth(5, 8, 0.012, prefill_s=0.21)


def test_a_wrong_guess_costs_no_more_than_its_prefill() -> None:
    pace = searched(SearchPace(), 20, 0.8, EARLY)
    assert pace.is_worth(7, 8, 60.0, prefill_s=0.15)
    assert not pace.is_worth(7, 8, 60.0, prefill_s=60.0)


def test_what_a_prefill_takes_is_learnt_as_a_whole() -> None:
    pace = PrefillPace()
    assert pace.prefill_s == math.inf
    pace.note_prefill(100, 0.5)
    assert pace.prefill_s == pytest.approx(0.5)
    for _ in range(60):
        pace.note_prefill(400, 0.4)
    assert pace.prefill_s == pytest.approx(0.4, rel=0.01)


def test_what_was_learnt_is_forgotten_when_the_knowledge_base_changes() -> None:
    pace = searched(SearchPace(), 500, 0.3, LATE)
    assert pace.stands(1, 8) < 0.05
    assert searched(pace, 200, 0.3, EARLY).stands(1, 8) > 0.8


def test_a_list_that_comes_back_did_not_stand() -> None:
    pace = searched(SearchPace(), 50, 0.3, ["a", "b", "a", "a"])
    assert pace.stands(1, 4) < 0.1
    assert pace.stands(3, 4) > 0.9


def test_stages_of_searches_cut_otherwise_share_what_was_learnt() -> None:
    pace = searched(SearchPace(), 50, 0.3, EARLY)
    assert pace.stands(1, 4) > 0.9


def test_a_search_that_a_prefill_slows_down_is_left_alone_and_tried_again_later() -> None:
    pace = searched(SearchPace(), 20, 0.3, EARLY)
    assert pace.is_worth(1, 8, 0.1)
    for _ in range(30):
        pace.note_search(0.66, EARLY, 8, guessed=True)
    assert pace._slowdown > 2.0
    assert not pace.is_worth(1, 8, 0.1)
    assert pace.search_s == pytest.approx(0.3)  # by itself it takes what it took
    assert searched(pace, 40, 0.3, EARLY).is_worth(1, 8, 0.1)


def test_searches_in_stages_that_promise_nothing_are_searched_in_one_go() -> None:
    pace = SearchPace()
    for _ in range(TRIED):
        assert pace.pays(8, 0.2), "nothing is known yet"
        searched(pace, 1, 0.3, LATE)
    asked = [pace.pays(8, 0.2) for _ in range(2 * TRIED)]
    assert sum(asked) == 2, "it is looked at again now and then"
    early = searched(SearchPace(), 20, 0.3, EARLY)
    assert all(early.pays(8, 0.2) for _ in range(3 * TRIED))


def test_stages_that_cost_more_than_a_guess_gains_are_left() -> None:
    pace = searched(SearchPace(), 20, 0.1, ["a"])
    searched(pace, 60, 0.3, EARLY)
    assert pace.search_s == pytest.approx(0.1), "in one go it takes what it took"
    assert any(pace.is_worth(stage, 8, 0.01, prefill_s=0.1) for stage in range(1, 8))
    assert [pace.pays(8, 0.01, prefill_s=0.1) for _ in range(2 * TRIED)].count(True) == TRIED + 1
    assert all(pace.pays(8, 0.01, prefill_s=0.9) for _ in range(TRIED))


def test_when_a_stage_comes_is_learnt() -> None:
    pace = SearchPace()
    for _ in range(20):  # both lists come at the end, as of a server that is far away
        pace.note_search(0.1, ["a", "a"], 2, left_s=[0.001, 0.0])
    assert pace.stands(1, 2) > 0.9
    assert not pace.is_worth(1, 2, 0.05)
    assert SearchPace().pays(2, 0.05)
    for _ in range(20):
        pace.note_search(0.1, ["a", "a"], 2, left_s=[0.07, 0.0])
    assert pace.is_worth(1, 2, 0.05)


def test_one_search_that_hung_does_not_stage_those_after_it() -> None:
    pace = searched(SearchPace(), 20, 0.002, ["a"])
    assert searched(pace, 1, 30.0, ["a"]).num_stages() == 1
    assert searched(pace, 20, 0.3, ["a"]).num_stages() == MAX_STAGES, "these are slow indeed"


def test_a_row_takes_what_prefills_of_some_size_took() -> None:
    pace = PrefillPace()
    pace.note_prefill(FEWEST_ROWS - 1, 9.0)
    assert pace.row_s is None
    pace.note_prefill(100, 1.0)
    assert pace.row_s == pytest.approx(0.01)
    for _ in range(50):
        pace.note_prefill(100, 2.0)
    assert pace.row_s == pytest.approx(0.02, rel=0.01)
