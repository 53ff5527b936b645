"""What the bench of figures computes beside a model: interpolation, shares, places, neighbours."""

import numpy as np
import pytest
import torch

from figures.attention import covered, overlap
from figures.deviation import left_by_oracle, mean_by_name
from figures.knowledge import share_together
from figures.lab import packaged_layers
from figures.matching import match_quality, ratio_reaching
from figures.places import lift, place_in_chunk
from figures.stored import match_stored
from figures.ways import sum_up_ways
from kvweave.calibrate.case import Case

RATIOS = (0.05, 0.1, 0.15, 0.3, 0.5)


def test_a_ratio_is_found_between_two_measured_ones() -> None:
    kls = [0.16, 0.08, 0.04, 0.02, 0.01]
    assert ratio_reaching(RATIOS, kls, 0.08) == pytest.approx(0.1)
    assert ratio_reaching(RATIOS, kls, (0.08 * 0.04) ** 0.5) == pytest.approx(0.125)
    assert ratio_reaching(RATIOS, kls, 0.3) == 0.05, "nothing is known below the first"
    assert ratio_reaching(RATIOS, kls, 0.001) is None


def test_a_curve_that_rises_is_taken_as_if_it_stayed() -> None:
    assert ratio_reaching(RATIOS, [0.1, 0.05, 0.07, 0.05, 0.01], 0.05) == pytest.approx(0.1)


def test_at_equal_curves_both_need_the_same_ratio_at_the_same_cost() -> None:
    curve = np.array([[0.16, 0.08, 0.04, 0.02, 0.01], [0.2, 0.1, 0.06, 0.02, 0.01]])
    costs = [0.1, 0.2, 0.3, 0.4, 0.6]
    rows = match_quality(RATIOS, {"a": curve, "b": curve}, {"a": costs, "b": costs})
    assert len(rows) == 8
    for row in rows:
        assert row["needs"] == pytest.approx(row["ratio"])
        assert row["saves"] == pytest.approx(1.0)


def test_a_quality_beyond_the_highest_ratio_has_no_cost() -> None:
    good, bad = np.array([[5, 4, 3, 2, 1.0]]), np.array([[9, 8, 7, 6, 5.0]])
    costs = [0.1, 0.2, 0.3, 0.4, 0.6]
    rows = match_quality(RATIOS, {"good": good, "bad": bad}, {"good": costs, "bad": costs})
    assert [row["saves"] for row in rows if row["by"] == "bad"] == [None] * 4
    assert all(row["saves"] > 1 for row in rows if row["by"] == "good")


def test_an_oracle_leaves_what_it_has_no_rows_for() -> None:
    off = torch.tensor([1.0, 5.0, 1.0, 3.0])
    assert left_by_oracle(off, 0.5) == pytest.approx(0.2)
    assert left_by_oracle(off, 0.0) == 1.0


def test_attention_is_covered_by_the_best_tokens_first() -> None:
    scores = torch.tensor([0.1, 0.6, 0.2, 0.1])
    assert covered(scores, 0.25) == pytest.approx(0.6)
    assert covered(scores, 1.0) == pytest.approx(1.0)
    assert overlap(scores, -scores, 0.25) == 0.0
    assert overlap(scores, scores, 0.5) == 1.0


def test_a_position_is_placed_in_its_chunk() -> None:
    case = Case((1, 2), ((3, 4), (5, 6, 7, 8)), (9,), (0, 1))
    places = place_in_chunk([3, 4, 6], case)
    assert [(p.chunk, p.token, p.share) for p in places] == [(0, 1, 0.5), (1, 0, 0.0), (1, 2, 0.5)]


def test_what_is_chosen_as_often_as_it_is_there_has_a_lift_of_one() -> None:
    assert lift(["a", "b"], ["a", "a", "b", "b"]) == {"a": 1.0, "b": 1.0}
    assert lift(["a"], ["a", "b"]) == {"a": 2.0, "b": 0.0}
    assert mean_by_name([{"a": 1.0}, {"a": 2.0, "b": 4.0}]) == {"a": 1.5, "b": 4.0}


def test_a_passage_is_together_with_its_nearest_if_that_is_retrieved_too() -> None:
    found = share_together([[1, 2], [3, 4]], [[[2, 9], [8, 9]], [[3, 7], [8, 9]]])
    assert found == {"chunks": 0.25, "questions": 0.5}


def test_ways_are_summed_up_with_the_gap_of_plain_reuse() -> None:
    values = [
        {
            "full": 1.0,
            "isolated/reuse@0": [0.2, 1.0, 0.0, 0.1],
            "isolated/x@0.1": [0.1, 0.0, 1.0, 0.2],
            "isolated/x@0.3": [0.0, 0.0, 1.0, 0.4],
        }
    ] * 3
    found = sum_up_ways(values)
    reuse, less, more = found["rows"]
    assert (reuse["recovered"], less["recovered"], more["recovered"]) == (0.0, 50.0, 100.0)
    assert (less["way"], less["ratio"]) == ("isolated/x", 0.1)
    (mean,) = found["over_ratios"]
    assert mean["recovered"] == 75.0
    assert "ratio" not in mean


def test_the_stored_quality_of_both_strategies_is_found() -> None:
    found = match_stored()
    assert found["n"] == 600
    assert len(found["isolated"]["rows"]) == len(found["filler:4"]["rows"]) == 8


def test_layers_come_from_the_packaged_profile() -> None:
    assert packaged_layers("c4e24e8168d5").critical == (23,)
    assert packaged_layers("none") == ((), ())
