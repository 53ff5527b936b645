"""`kvweave doctor`: what it finds here, with real models, stores and profiles, and its way out."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvweave.calibrate.profiles import load_profile, save_profile, user_path
from kvweave.ingest import ingest
from kvweave.kv.tiers.config import DiskTierConfig
from kvweave.kv.tiers.disk import DiskTier
from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer
from worlds.auto import World
from worlds.kv import make_chunk, make_key
from worlds.running import Run
from worlds.tiny_corpus import open_kb
from worlds.tiny_models import make_chat_model_folder

Findings = dict[str, tuple[str, str, str]]  # name → state, what was found, the way out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model_folder(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def world(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A home of its own, and a model that profiles can be written for."""
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return World(tmp_path / "kb", load_decoder(folder, device="cpu"), Tokenizer(folder))


def look(run: Run, *options: object, code: int = 0) -> Findings:
    ran = run("doctor", *options, "--json")
    assert ran.code == code, ran.err
    told = json.loads(ran.out)
    assert told["ok"] is (code == 0)
    return {f["name"]: (f["state"], f["found"], f["way_out"]) for f in told["findings"]}


def test_a_model_that_was_calibrated_and_measured_is_ok_all_over(
    run: Run, world: World, folder: Path
) -> None:
    world.calibrate(("weave", 0.15, 0.01))
    world.set_machine()
    found = look(run, "--model", folder, "--device", "cpu")
    states = {name: state for name, (state, _, _) in found.items() if name != "compiler"}
    assert set(states.values()) == {"ok"}
    assert found["calibration"][1] == "1 tables, 100 questions, for chunk KV by filler:1"
    assert "weights in float32" in found["model"][1]


def test_what_is_missing_is_a_warning_with_its_way_out(
    run: Run, world: World, folder: Path
) -> None:
    found = look(run, "--model", folder, "--device", "cpu")
    assert found["calibration"][0] == found["prices"][0] == "warn"
    assert "kvweave calibrate quick" in found["calibration"][2]
    assert "kvweave measure" in found["prices"][2]
    said = run("doctor", "--model", folder, "--device", "cpu")
    assert "warn  calibration  this model was never calibrated; kvweave calibrate" in said.out


def test_tables_of_another_precision_are_told_apart(run: Run, world: World, folder: Path) -> None:
    world.calibrate(("weave", 0.15, 0.01))
    weights = world.decoder.weights.fingerprint
    kept = load_profile(user_path(weights), weights, world.tokenizer.fingerprint)
    other = replace(kept.calibration[0], revision="0" * 32, dtype="bfloat16")
    save_profile(user_path(weights), replace(kept, calibration=(other,)))
    state, words, way_out = look(run, "--model", folder, "--device", "cpu")["calibration"]
    assert (state, words) == ("warn", "calibrated as bfloat16 and runs as float32")
    assert way_out.startswith("--dtype bfloat16, or kvweave calibrate")


def test_a_damaged_profile_fails_in_a_line(run: Run, world: World, folder: Path) -> None:
    path = user_path(world.decoder.weights.fingerprint)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    found = look(run, "--model", folder, "--device", "cpu", code=1)
    assert found["calibration"][0] == "fail"
    assert str(path) in found["calibration"][1]


@pytest.mark.usefixtures("world")
def test_a_model_that_is_not_here_is_named_and_not_downloaded(run: Run) -> None:
    found = look(run, "--model", "qwen2.5-coder-1.5b")
    assert found["model"][0] == "warn"
    assert "kvweave models pull qwen2.5-coder-1.5b" in found["model"][2]
    assert "calibration" not in found
    assert look(run, "--model", "./nothing", code=1)["model"][0] == "fail"


def test_random_weights_are_no_model_that_is_missing(run: Run) -> None:
    found = look(run, "--model", "random:llama-3.1-8b", code=0)
    assert found["model"][0] == "warn"
    assert "load tests" in found["model"][1]


@pytest.mark.usefixtures("world")
def test_a_device_and_a_tier_that_are_not_there_fail(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    tiers = ("--redis-url", "redis://:secret@127.0.0.1:1/0")
    found = look(run, "--model", "./nothing", "--device", "cuda:7", *tiers, code=1)
    assert found["device"][0] == "fail"
    assert "leave --device out" in found["device"][2]
    state, words, way_out = found["redis"]
    assert state == "fail"
    assert "secret" not in words
    assert way_out == "start it, or leave store.redis_url out"
    below_file = tmp_path / "file" / "kv"
    found = look(run, "--model", "./nothing", "--disk-folder", below_file, code=1)
    assert found["store"][0] == "fail"


def test_documents_and_stored_kv_are_looked_at(run: Run, world: World, tmp_path: Path) -> None:
    with open_kb(world.folder, world.tokenizer) as kb:
        ingest(kb, [("Drain", "Cordon the node, then evict its pods.")])
    tier = DiskTier(DiskTierConfig(world.folder / "kv"))
    for number in range(3):
        chunk = make_chunk(number)
        tier.write(chunk.key, [chunk.view])
    absent = ("--model", "qwen2.5-coder-1.5b")
    found = look(run, *absent)  # ./kb, by itself
    assert found["documents"][0] == "ok"
    assert found["stored KV"][:2] == ("ok", "kb: headers of 3 objects are whole")
    (path,) = world.folder.rglob(f"{make_key(1).hex()}.kv")
    raw = bytearray(path.read_bytes())
    raw[20] ^= 1
    path.write_bytes(raw)
    state, words, way_out = look(run, *absent, "--kb", world.folder, code=1)["stored KV"]
    assert (state, words.split(": ")[1]) == ("fail", "1 of 3 objects looked at are damaged")
    assert "kvweave cache verify --repair" in way_out
    (world.folder / "catalogue.sqlite").write_bytes(b"no database" * 1000)
    assert look(run, *absent, "--kb", world.folder, code=1)["documents"][0] == "fail"


@pytest.mark.usefixtures("world")
def test_a_missing_extra_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kvweave.cli.doctor.find_spec", lambda name: None if name == "faiss" else object()
    )
    found = look(run, "--model", "qwen2.5-coder-1.5b")
    assert found["rag"] == ("warn", "faiss not found", "pip install 'kvweave[rag]'")
    assert found["serve"][0] == "ok"
