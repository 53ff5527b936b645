"""What the bench of figures computes beside a model: interpolation, shares, places, neighbours."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from figures import neighbours
from figures.attention import covered, measure_attention, overlap, sum_up_attention
from figures.cases import Posed
from figures.deviation import left_by_oracle, mean_by_name, measure_deviation, sum_up_deviation
from figures.knowledge import share_together
from figures.lab import Lab, Question, packaged_layers
from figures.matching import match_quality, ratio_reaching
from figures.places import count, count_places, lift, place_in_chunk, sum_up_places
from figures.recall import measure_recall, sum_up_recall
from figures.stored import match_stored
from figures.timing import sum_up_times, time_ways
from figures.ways import (
    anchor_ways,
    layer_ways,
    matched_ways,
    needle_ways,
    sum_up_matched,
    sum_up_ways,
    try_ways,
)
from kvweave.calibrate.case import Case
from kvweave.calibrate.questions import Passage, QuestionRecord, make_case
from quality.asked import Style

WORDS = Style("", 4, True)
PASSAGES = (
    Passage("Anna lives in a red house.", "Anna"),
    Passage("Ben sails to the sea each day.", "Ben", ((13, 20),)),
    Passage("Carl has a boat.", "Carl"),
)
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
    assert lift([count(["a", "b"], ["a", "a", "b", "b"])]) == {"a": 1.0, "b": 1.0}
    few, many = count(["a"], ["a", "b"]), count(["b", "b"], ["b"] * 8)
    assert lift([few]) == {"a": 2.0, "b": 0.0}
    pooled = lift([few, many])
    assert pooled == {"a": 1 / (3 / 10), "b": (2 / 9) / (3 / 10)}, "counts, not means of lifts"
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


def test_the_stored_quality_of_all_strategies_is_found() -> None:
    found = match_stored()
    assert found["n"] == 600
    assert len(found["isolated"]["rows"]) == len(found["filler:4"]["rows"]) == 5 * 8


def test_layers_come_from_the_packaged_profile() -> None:
    assert packaged_layers("c4e24e8168d5").critical == (23,)
    assert packaged_layers("none") == ((), ())


@pytest.fixture
def lab(chat_model_folder: Path) -> Lab:
    return Lab(Namespace(model=str(chat_model_folder), quant="none", ratios="0.5"))


def ask(lab: Lab) -> Question:
    record = QuestionRecord("Where?", ("the sea",), PASSAGES)
    return Question(lab, Posed("x", 0, WORDS, make_case(lab.tokenizer, record), PASSAGES))


def test_every_part_of_a_question_gives_numbers_that_can_be_written(lab: Lab) -> None:
    question = ask(lab)
    found: dict[str, Any] = {
        "deviation": sum_up_deviation([measure_deviation(lab, question)]),
        "attention": sum_up_attention([measure_attention(lab, question)]),
        "places": sum_up_places([count_places(lab, question)]),
        "recall": sum_up_recall([measure_recall(lab, question)]),
        "matched": sum_up_matched([try_ways(question, matched_ways(lab))]),
        "time": sum_up_times([time_ways(question, matched_ways(lab)[:2])]),
    }
    for ways_of in (anchor_ways, layer_ways, needle_ways):
        found[ways_of.__name__] = sum_up_ways([try_ways(question, ways_of(lab))])
    json.dumps(found, allow_nan=False)
    assert found["places"]["cacheblend"]["by_chunk"].keys() == {"2", "3"}
    assert found["attention"]["covered"]["0.5"] <= 1.0


def test_full_recomputation_is_full_prefill_and_names_do_not_matter(lab: Lab) -> None:
    question = ask(lab)
    one = matched_ways(lab)[1]
    everything = one._replace(ratio=1.0)
    renamed = everything._replace(name="another")
    found = question.try_ways([one, everything, renamed])
    assert found[str(everything)].kl < 1e-6 < found[str(one)].kl
    assert found[str(everything)] is found[str(renamed)]


def test_chunks_are_encoded_behind_their_neighbours(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "FILLER", "filler:1")
    monkeypatch.setattr(neighbours, "COUNTS", (1, 2))
    monkeypatch.setattr(neighbours, "MANY", "neighbours:2")
    encodings = ("isolated", "filler:1", "neighbours:1", "neighbours:2")
    monkeypatch.setattr(neighbours, "ENCODINGS", encodings)
    question, ways = ask(lab), neighbours.neighbour_ways(lab)
    line = neighbours.measure_neighbours(
        lab, question, ways, lambda passage, count: [p for p in PASSAGES if p != passage][:count]
    )
    found = neighbours.sum_up_neighbours([line])
    assert found["deviation_over_isolated"]["isolated"] == 1.0
    assert len(set(found["deviation_over_isolated"].values())) == 4, "each context is another one"
    assert {row["way"] for row in found["rows"]} >= {"neighbours:2/cachecraft-like"}
