"""What bench/ttft/cpu.py says of its turns: each mode beside the full prefill of the same turn."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ttft.cpu import MODES, judge_auto, summarise
from ttft.cpu_world import TEXT_TOKENS, TIERS, texts_of


class Words:
    """A tokenizer whose tokens are words."""

    def encode_text(self, text: str) -> list[str]:
        return text.split()

    def decode(self, ids: list[str]) -> str:
        return " ".join(ids)


def turns(*ttft: float) -> list[dict[str, float]]:
    return [{"ttft": ms, "load": 1.0} for ms in ttft]


def test_the_speedup_is_the_median_of_those_within_a_turn_and_a_tier() -> None:
    took = {
        ("host", "full"): turns(100, 300, 200),
        ("host", "weave 0.15"): turns(25, 50, 100),  # 4, 6, 2: of medians alone also 4
        ("host", "reuse"): turns(10, 60, 50),  # 10, 5, 4
        ("disk warm", "full"): turns(50, 50, 50),
        ("disk warm", "reuse"): turns(10, 10, 25),
    }
    cells = {(c["tier"], c["way"]): c for c in summarise(took)}
    assert cells["host", "weave 0.15"]["speedup"] == 4.0
    assert cells["host", "reuse"]["speedup"] == 5.0
    assert cells["host", "reuse"]["speedups"] == [4.0, 10.0]
    assert cells["host", "reuse"]["ttft_ms"] == 50
    assert cells["host", "reuse"]["best_ms"] == 10
    assert cells["disk warm", "reuse"]["speedup"] == 5.0
    assert cells["host", "full"]["speedup"] == 1.0
    assert MODES[0].strategy == "full", "asked first in every turn"


def test_auto_is_compared_with_what_it_was_allowed_in_the_same_tier() -> None:
    by = {(tier, mode): 100.0 * i for i, tier in enumerate(TIERS, 1) for mode in ("full", "prefix")}
    by |= {("host", "weave 0.15"): 20.0, ("host", "reuse"): 5.0, ("host", "auto"): 30.0}
    by |= {("disk cold", "auto"): 60.0}
    judged: dict[str, Any] = judge_auto(by, {"weave": 0.15})  # not reuse
    assert judged == {
        "auto_over_best": {"host": 1.5, "disk cold": 0.2},
        "auto_over_full": {"host": 0.3, "disk cold": 0.2},
    }


@pytest.mark.parametrize("asked", [2, 9])
def test_only_texts_of_full_length_are_asked_about(tmp_path: Path, asked: int) -> None:
    lengths = [900] * 20 + [900, 100, 599, 600, 5000, 0, 700]  # words; the first 20 are left out
    records = [{"title": f"{i}", "text": "word " * n} for i, n in enumerate(lengths)]
    (tmp_path / "kb_python_peps").mkdir()
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "kb_python_peps" / "docs.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    texts = list(texts_of(tmp_path, Words(), asked))  # type: ignore[arg-type]
    assert [title for title, _ in texts] == ["20", "22", "23", "24", "26"][:asked]
    assert {len(text.split()) for _, text in texts} == {TEXT_TOKENS}
