"""bench/serve_gpu.py: what it says of its pairs, and what it asks."""

import random
from itertools import islice
from typing import Any

import pytest

from product_parts.asking import Reply
from product_parts.pages import Workload, ask_about, read_documents
from serve_gpu import Pair, figures, summary


def make_reply(ttft_ms: float, fused: int = 0, why: str | None = None) -> Reply:
    counts = {"exact": 10, "reused": fused, "recomputed": 0, "computed": 90 - fused}
    stages = {"waiting": 0.0, "searching": 1.0, "loading": None, "computing": ttft_ms - 1}
    explain = {"tokens": counts, "timeline_ms": stages, "why": why}
    return Reply(ttft_ms, ttft_ms + 5, "so", 100, explain)


def test_figures_are_paired_and_say_why_an_answer_was_not_fused() -> None:
    pairs = [
        Pair(make_reply(20, fused=80), make_reply(100)),
        Pair(make_reply(30, fused=80), make_reply(90)),
        Pair(make_reply(100, why="not yet"), make_reply(100)),
    ]
    row = figures(pairs)
    assert row["p50_over_full"] == pytest.approx(0.333)
    assert row["fused_share"] == pytest.approx(0.667)
    assert row["tokens"] == {"exact": 30, "fused": 160, "computed": 110}
    assert row["why_not"] == ["not yet"]
    assert row["prefill_tokens_per_s"] == 1000
    assert row["server_ms"]["default"] == {
        "waiting": 0.0,
        "searching": 1.0,
        "loading": 0.0,
        "computing": 29.0,
    }


def test_the_summary_is_of_the_newest_run_with_the_large_shape() -> None:
    def run(*sizes: tuple[int, float]) -> dict[str, Any]:
        rows = {str(n): {"prompt_tokens": n, "p50_over_full": ratio} for n, ratio in sizes}
        return {"models": {"random:llama-3.1-8b": {"ttft": rows}}}

    runs = [run((8_100, 0.5)), run((8_000, 0.3), (31_000, 0.2)), {"models": {}}]
    assert summary(runs) == {"ttft_8k_over_full": 0.3, "ttft_32k_over_full": 0.2}
    assert summary([run((8_000, 0.3))])["ttft_32k_over_full"] is None
    assert summary([]) == {}


def test_no_question_comes_twice_and_pages_have_no_marks_of_headings() -> None:
    files = read_documents(20_000)
    assert sum(map(len, files.values())) <= 20_000
    assert not any("## " in text for text in files.values())
    asked = list(islice(ask_about(files, random.Random(0)), 200))
    assert len(set(asked)) == 200


def test_a_request_sets_nothing_but_what_it_asks() -> None:
    body = Workload(20, 400).body("Why?", reuse="full")
    assert set(body) == {"messages", "kb", "k", "max_tokens", "temperature", "reuse"}
    assert (body["kb"], body["k"]) == ("chunks-400", 20)
