"""Models whose weights are rounded while they are loaded: what it costs, what must still hold."""

import json
import logging
from pathlib import Path

import pytest
import torch

from kvweave.kernels.native import loading
from kvweave.kernels.native.library import PLAIN, CompiledLibrary
from kvweave.kernels.native.loading import native_kernels
from kvweave.model import load
from kvweave.model.decoder import SMALL_KL, Decoder
from kvweave.model.load import AUTO_KL, load_decoder
from kvweave.model.rounding import RoundingNotes, load_notes, notes_path, save_notes
from kvweave.model.rows import Rows
from kvweave.model.weights import ROUNDED
from worlds.tiny_models import make_model_folder

SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4, "head_dim": 32}
IDS = list(range(3, 60))


@pytest.fixture(autouse=True)
def library() -> CompiledLibrary:
    library, words = native_kernels()
    if library is None:
        pytest.skip(words)
    return library


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module", params=["llama-tied", "qwen2", "qwen3_moe-mixed"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"), request.param, **SIZES)


def rounded(folder: Path) -> Decoder:
    return load_decoder(folder, device="cpu", quant="int8")


def logits(decoder: Decoder, ids: list[int], step: int | None = None) -> torch.Tensor:
    kv, parts = decoder.new_kv(len(ids)), []
    for start in range(0, len(ids), step or len(ids)):
        at = range(start, min(start + (step or len(ids)), len(ids)))
        part = [Rows(ids[at.start : at.stop], at, kv, range(len(at)))]
        parts.append(decoder.forward(part))
    return torch.cat(parts)


def assert_within_rounding(gap: torch.Tensor, found: torch.Tensor, folder: Path) -> None:
    exact = logits(load_decoder(folder, device="cpu", quant="none"), IDS)
    cost = (found - exact).square().mean(1)
    assert gap.square().mean() <= cost.mean()
    assert gap[0].square().mean() <= 0.5 * cost.mean()  # it sees nobody: its own edges alone


def test_a_rounded_model_is_near_the_exact_one_and_says_how_near(folder: Path, home: Path) -> None:
    exact, rough = load_decoder(folder, device="cpu", quant="none"), rounded(folder)
    expected, found = (logits(d, IDS).log_softmax(-1) for d in (exact, rough))
    kl = float((expected.exp() * (expected - found)).sum(-1).mean())
    assert not torch.equal(expected, found)
    cost = rough.weights.rounding
    assert cost is not None
    assert 0 < kl < 0.05
    assert 0 < cost.kl_nats < 0.05


def test_token_by_token_or_in_one_go_is_the_same(folder: Path, home: Path) -> None:
    """A row has a scale of its own, so its products are the same. What float32's order of sums
    leaves may move a value across the edge between two integers, and rows behind it see that: no
    more than rounding itself changes."""
    decoder = rounded(folder)
    whole = logits(decoder, IDS)
    for step in (1, 7):
        gap = logits(decoder, IDS, step) - whole
        assert_within_rounding(gap, whole, folder)


def test_sequences_of_a_batch_do_not_change_each_other(folder: Path, home: Path) -> None:
    decoder = rounded(folder)
    alone = logits(decoder, IDS)
    others = [[9] * 30, list(range(80, 20, -1))]
    batch = [
        Rows(ids, range(len(ids)), decoder.new_kv(len(ids)), range(len(ids)))
        for ids in (others[0], IDS, others[1])
    ]
    beside = decoder.forward(batch)[30 : 30 + len(IDS)]
    assert_within_rounding(beside - alone, alone, folder)


def test_what_was_found_is_kept_and_gives_the_same_weights(folder: Path, home: Path) -> None:
    first = rounded(folder)
    assert load_notes(first.weights.rounding.exact_fingerprint) is not None  # type: ignore[union-attr]
    second = rounded(folder)
    assert torch.equal(logits(first, IDS), logits(second, IDS))
    assert second.weights.rounding == first.weights.rounding


def test_notes_of_other_weights_are_not_read(home: Path) -> None:
    notes = RoundingNotes(0.004, {"1.qkv": [(3, 2)]}, {"1.qkv": "mnl"})
    save_notes("a" * 32, notes)
    assert load_notes("a" * 32) == notes
    assert load_notes("a" * 16 + "b" * 16) is None  # the same file name
    kept = json.loads(notes_path("a" * 32).read_text())
    notes_path("a" * 32).write_text(json.dumps({**kept, "format": 0}))
    assert load_notes("a" * 32) is None


def test_tables_of_the_exact_weights_hold_while_rounding_costs_little(
    folder: Path, home: Path
) -> None:
    exact = load_decoder(folder, device="cpu", quant="none")
    assert exact.calibrated_as == (exact.weights.fingerprint, exact.revision)
    fingerprint = exact.weights.fingerprint
    for kl, holds in ((0.5 * SMALL_KL, True), (SMALL_KL, False)):
        save_notes(fingerprint, RoundingNotes(kl, {}, {}))
        rough = rounded(folder)
        assert rough.weights.fingerprint == fingerprint + ROUNDED
        assert rough.revision != exact.revision
        assert rough.calibrated_as == (exact if holds else rough).calibrated_as
        assert (rough.calibrated_as.revision == exact.revision) is holds


@pytest.mark.parametrize("kl", [0.5 * AUTO_KL, 2 * AUTO_KL])
def test_auto_takes_rounded_weights_only_where_they_cost_little(
    folder: Path, home: Path, kl: float, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    exact = load_decoder(folder, device="cpu", quant="none")
    save_notes(exact.weights.fingerprint, RoundingNotes(kl, {}, {}))
    small = load_decoder(folder, device="cpu", quant="auto")
    assert small.weights.rounding is None, "a small model is quick anyway"
    monkeypatch.setattr(load, "SMALLEST_ROUNDED", 0)
    with caplog.at_level(logging.INFO):
        auto = load_decoder(folder, device="cpu", quant="auto")
    assert (auto.weights.rounding is not None) is (kl < AUTO_KL)
    assert (auto.revision == exact.revision) is (kl >= AUTO_KL)
    assert f"{kl:.4f} nats" in caplog.text
    named = load_decoder(folder, device="cpu", quant="int8")
    assert named.weights.rounding is not None, "what is asked for by name is done"


def test_without_compiled_kernels_weights_stay_in_float32(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(load, "SMALLEST_ROUNDED", 0)
    monkeypatch.setenv(loading.VARIABLE, "0")
    exact = load_decoder(folder, device="cpu", quant="none")
    for quant in ("auto", "int8"):
        found = load_decoder(folder, device="cpu", quant=quant)
        assert found.weights.rounding is None
        assert found.revision == exact.revision
        assert torch.equal(logits(found, IDS), logits(exact, IDS))
    assert [r.message for r in caplog.records if r.levelno == logging.WARNING] == [
        f"quant: int8 → none, no compiled kernels: {loading.VARIABLE} is 0"
    ], "what was asked for by name and cannot be had is said"
    assert load_notes(exact.weights.fingerprint) is None, "nothing was rounded: no cost is known"


def test_auto_stays_exact_on_a_cpu_without_integer_instructions(
    folder: Path, home: Path, library: CompiledLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "SMALLEST_ROUNDED", 0)
    monkeypatch.setattr(library, "kind", PLAIN)
    assert load_decoder(folder, device="cpu", quant="auto").weights.rounding is None
    assert load_decoder(folder, device="cpu", quant="int8").weights.rounding is not None


def test_nothing_is_timed_to_choose_between_8_bits_and_float32(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy first start must not decide for good how a model is multiplied."""
    monkeypatch.setattr(load, "SMALLEST_ROUNDED", 0)
    monkeypatch.setattr(load, "AUTO_KL", 1.0)
    assert load_decoder(folder, device="cpu", quant="auto").weights.rounding is not None
    assert [path.name[:9] for path in (home / "profiles").iterdir()] == ["rounding-"]


def test_auto_is_exact_in_other_dtypes(folder: Path, home: Path) -> None:
    auto = load_decoder(folder, device="cpu", dtype="float16", quant="auto")
    assert auto.weights.rounding is None


def test_a_model_of_some_size_says_what_computes_it(
    folder: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = load_decoder(folder, device="cpu", quant="none")
    monkeypatch.setattr(loading, "_loaded", None)
    assert small.weights_words == "weights in float32", "nobody asked for kernels"
    monkeypatch.setattr(load, "SMALLEST_ROUNDED", 0)
    monkeypatch.setenv("PATH", str(tmp_path))  # no compiler
    monkeypatch.delenv(loading.VARIABLE)  # and nothing that was compiled before
    large = load_decoder(folder, device="cpu", quant="none")
    assert "no C compiler here; install one" in large.weights_words
    assert torch.isfinite(logits(large, IDS)).all()
    monkeypatch.setenv(loading.VARIABLE, "0")
    assert f"{loading.VARIABLE} is 0" in load_decoder(folder, device="cpu").weights_words


def test_what_rounding_costs_is_told_to_those_who_measure_alone(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rough = load_decoder(folder, device="cpu", quant="int8")
    assert "nats per token" in rough.weights_detail
    assert "compiled kernels: " in rough.weights_detail
    assert rough.weights_words.partition(";")[0] == "weights in 8 bits, for speed"
