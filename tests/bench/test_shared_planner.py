"""The planner against full prefill over shared chunks, with a model small enough for a CPU."""

import argparse

import pytest

from gpu import shared_planner
from gpu.shared_planner import Asked, Kind, measure
from gpu.shared_world import SharedWorld
from kvweave.app.auto import machine_profile
from kvweave.engine.engine import Engine

KINDS = (Kind("on the device", 8, 0, 0), Kind("anywhere", 4, 2, 2), Kind("nowhere", 0, 0, 1))


def test_every_kind_is_asked_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_planner, "KINDS", KINDS)
    monkeypatch.setattr(shared_planner, "WARM_UP", 1)
    for budget in ("PREFILL_BUDGET_S", "RECOMPUTE_BUDGET_S"):
        monkeypatch.setattr(machine_profile, budget, 0.1)
    args = argparse.Namespace(
        device="cpu", shape="tiny", chunks=110, chunk_tokens=16, k=32, zipf=1.0, codec="int8",
        pages="raw", pool_gib=0.01,
    )  # fmt: skip
    world = SharedWorld(args)
    said: list[str] = []
    with Engine(world.decoder, world.engine_config(shares=True)) as engine:
        engine.run_alone(lambda: engine.pin_preamble(world.preamble))
        found = measure(world, engine, 2, said.append)
    world.store.close()
    rows = found["planner"]
    assert [(row["kind"], row["prompts"]) for row in rows] == [(kind.name, 2) for kind in KINDS]
    assert found["planner_over_full"] == max(row["over_full"] for row in rows) > 0
    assert found["planner_over_full_worst_prompt"] == max(row["worst"] for row in rows)
    assert all(sum(row["choices"].values()) == 2 for row in rows)
    nowhere = rows[-1]["choices"]
    assert not any("weave" in choice for choice in nowhere), "nothing is stored of it"
    assert len(said) == 1 + 2 * len(KINDS)


def test_a_ratio_is_the_planners_time_over_full_prefills() -> None:
    assert Asked("any", "full", 30.0, 20.0).over_full == 1.5
