"""bench/host_time.py: it times the code that is there, part by part."""

from dataclasses import replace

import pytest
import torch

import host_time
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import HostTierConfig, StoreConfig


@pytest.mark.parametrize(("name", "ratio"), host_time.MODES)
def test_every_way_runs_and_its_parts_are_timed(
    monkeypatch: pytest.MonkeyPatch, name: str, ratio: float
) -> None:
    monkeypatch.setattr(host_time, "CHUNK_TOKENS", 20)
    monkeypatch.setattr(host_time, "SPEC", replace(host_time.SPEC, num_layers=3))
    decoder = host_time.random_decoder(host_time.SPEC, host_time.META, torch.float32)
    with KVStore(StoreConfig((HostTierConfig(8 << 20, pinned=False),))) as store:
        found = host_time.mode_ms(host_time.long_prompt(decoder, store, 2), name, ratio, 1)
    idle = {"reuse": {"drift", "selector"}, "epic": {"drift", "selector"}, "weave": set()}[name]
    assert {part for part, ms in found.items() if not ms} == idle


def test_the_drift_behind_a_taper_is_made_while_the_device_is_busy() -> None:
    clock = host_time.Clock()
    for part in ("head of the pass", "layers"):
        clock.enter(part)
        clock.timed("drift", lambda: None)()
        clock.leave()
        assert ("drift" in clock.seconds) == (part != "layers")
        clock.seconds.clear()
