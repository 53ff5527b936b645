"""`kvweave measure`: what the machine takes, in words and as JSON; measured where it never was."""

import json
from pathlib import Path

import pytest

from kvweave.app.auto.machine_profile import find_machine, profile_path
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.plan.profile import Grid, MachineProfile, TierLink
from worlds.running import Run
from worlds.tiny_models import make_chat_model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model_folder(tmp_path_factory.mktemp("chat"))


@pytest.fixture(autouse=True)
def decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Decoder:
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("kvweave.app.auto.machine_profile.PREFILL_BUDGET_S", 0.2)
    monkeypatch.setattr("kvweave.app.auto.machine_profile.RECOMPUTE_BUDGET_S", 0.2)
    return load_decoder(folder, device="cpu")


def set_machine(decoder: Decoder, recompute: float = 1.0) -> None:
    """A token takes a millisecond, a row recomputed `recompute` of them."""
    grids = [
        Grid((0, 4096), (1, 1000), [[s * 0.001, s * 1.0] for _ in range(2)])
        for s in (1.0, recompute)
    ]
    links = {"host": TierLink(8e9), "disk/int8": TierLink(5e8)}
    num_layers = decoder.spec.num_layers
    profile = MachineProfile(decoder.revision, "cpu, test", num_layers, *grids, links, 1e-5)
    profile.measured_s = 1.8e9
    profile.heard.exact = 12
    profile.save(profile_path(decoder))


def test_a_profile_is_told_in_plain_words(run: Run, folder: Path, decoder: Decoder) -> None:
    set_machine(decoder)
    ran = run("measure", "--model", folder, "--device", "cpu")
    assert (ran.code, ran.err) == (0, "")
    told = " ".join(ran.out.split())
    assert "prefill of 512 tokens 512 ms 1,000/s" in told
    assert "recomputing 15% of 2,000 tokens" in told
    assert "300 ms + 20 ms 6.2× as fast as prefill" in told
    assert "loading from disk/int8 500 MB/s" in told
    assert "loading from host 8 GB/s" in told
    assert "12 exact and 0 fused answers moved it since" in told
    assert "measured 2027-01-1" in told


def test_json_is_one_document(run: Run, folder: Path, decoder: Decoder) -> None:
    set_machine(decoder, recompute=10.0)
    told = json.loads(run("measure", "--model", folder, "--device", "cpu", "--json").out)
    assert told["prefill"][0] == {"tokens": 128, "seconds": 0.128, "tokens_per_s": 1000.0}
    assert [way["ratio"] for way in told["fused"]] == [0.15, 0.3]
    assert told["fused"][0]["speed_up"] == pytest.approx(2.0 / 3.02, rel=0.01)
    assert told["tiers"]["disk/int8"]["bytes_per_s"] == 500_000_000
    assert told["answers"] == {"exact": 12, "fused": 0}


def test_a_machine_that_never_was_is_measured_and_one_that_was_is_not(
    run: Run, folder: Path, decoder: Decoder
) -> None:
    first = run("measure", "--model", folder, "--device", "cpu", "--json")
    assert first.code == 0
    assert "measuring this machine" in first.err
    kept = find_machine(decoder)
    assert kept is not None
    assert kept.measured_s > 0
    second = run("measure", "--model", folder, "--device", "cpu", "--json")
    assert "measuring this machine" not in second.err
    assert json.loads(second.out) == json.loads(first.out)


def test_renew_measures_anew_and_keeps_what_is_known_of_tiers(
    run: Run, folder: Path, decoder: Decoder
) -> None:
    set_machine(decoder, recompute=10.0)
    kept = find_machine(decoder)
    assert kept is not None
    kept.measured_s = 1e9  # long ago
    kept.save(profile_path(decoder))
    ran = run("measure", "--model", folder, "--device", "cpu", "--renew")
    assert ran.code == 0
    assert "measuring this machine" in ran.err
    new = find_machine(decoder)
    assert new is not None
    assert new.measured_s > 1.7e9
    assert new.links["disk/int8"].bytes_per_s == 5e8
    assert new.prefill.at(0, 512) < 0.5
    assert new.heard.exact == 0


def test_a_model_that_is_not_there_is_one_line_and_exit_code_2(run: Run, tmp_path: Path) -> None:
    ran = run("measure", "--model", tmp_path / "nothing")
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert "nothing" in ran.err
