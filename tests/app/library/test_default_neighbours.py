"""`neighbours` without a number: as many as calibration found for this model, else as ever."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from kvweave import Weave
from kvweave.calibrate.gate import Cell, Table
from kvweave.calibrate.profiles import Profile, save_profile, user_path
from kvweave.fuse.encode.contexts import Variant, context_filler, digest_ids, variant_name
from kvweave.fuse.encode.preparation import Preparation, read_preparation, write_preparation
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.text.prompt import SYSTEM, split_template
from kvweave.text.tokenizer import Tokenizer
from worlds.running import Ran, Run, run
from worlds.tiny_corpus import WordEmbedder
from worlds.tiny_models import make_chat_model_folder

__all__ = ["run"]

TEXTS = (
    "To drain a node, cordon the node and evict each pod on the node.",
    "A volume claim binds a volume of its size.",
)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model_folder(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


@pytest.fixture(scope="module")
def decoder(model_folder: Path) -> Decoder:
    return load_decoder(model_folder, device="cpu")


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("kvweave.cli.ingest.find_embedder", lambda *_: WordEmbedder())
    monkeypatch.setattr(
        "kvweave.app.library.library.SentenceEmbedder", lambda *_, **__: WordEmbedder()
    )
    monkeypatch.setattr("kvweave.app.library.library.locate", Path)


@pytest.fixture
def calibrate(model_folder: Path, decoder: Decoder) -> Callable[..., Path]:
    """Writes the model's profile: for each number of neighbours the work of its choice."""
    tokenizer = Tokenizer(model_folder)

    def calibrate(**work: float) -> Path:
        filler = context_filler(tokenizer, Variant("neighbours", 1))
        preamble = digest_ids(split_template(tokenizer, SYSTEM)[0])
        tables = []
        for name, share in work.items():
            variant = Variant("neighbours", int(name.removeprefix("n")))
            cell = Cell("weave", 0.1, share, 0.01, 0.01, 0.01, 0.01, 0.01, 0.0, 1.0, 0.0)
            where = (str(variant), variant_name(variant, filler), preamble, decoder.revision)
            names = ("float32", "q.txt", "cafe", "2026-01-01")
            tables.append(Table(*where, *names, 100, 0, 9000, 800.0, 0.0, None, None, (cell,)))
        weights = decoder.weights.fingerprint
        profile = Profile("tiny", weights, tokenizer.fingerprint, None, tuple(tables))
        save_profile(user_path(weights), profile)
        return user_path(weights)

    return calibrate


Ingest = Callable[..., Ran]


@pytest.fixture
def ingest(run: Run, tmp_path: Path, model_folder: Path) -> Ingest:
    (tmp_path / "docs").mkdir()
    for place, text in enumerate(TEXTS):
        (tmp_path / "docs" / f"{place}.txt").write_text(text)
    where = ["--kb", tmp_path / "kb", "--model", model_folder, "--chunk-tokens", 64, "--kv"]

    def ingest(*options: str) -> Ran:
        ran = run("ingest", tmp_path / "docs", *where, *options)
        assert ran.code == 0, ran.err
        told = (line for line in ran.err.splitlines(keepends=True) if "measur" not in line)
        return ran._replace(err="".join(told))  # of the machine it tells once

    return ingest


def prepared(folder: Path) -> str:
    found = read_preparation(folder / "kb" / "kv")
    assert found is not None
    return str(found.variant)


def test_ingest_takes_the_number_that_calibration_found_and_says_so(
    ingest: Ingest, calibrate: Callable[..., Path], tmp_path: Path
) -> None:
    calibrate(n1=0.2, n5=0.1)
    ran = ingest("--encoding", "neighbours")
    assert prepared(tmp_path) == "neighbours:5"
    assert ran.err == "neighbours:5, as calibrated\n"
    assert ingest().err == ""  # nobody typed anything: nothing new to say
    assert prepared(tmp_path) == "neighbours:5"


def test_without_a_calibration_it_is_three_as_ever(ingest: Ingest, tmp_path: Path) -> None:
    assert ingest("--encoding", "neighbours").err == ""
    assert prepared(tmp_path) == "neighbours:3"


def test_what_was_typed_stands_and_what_was_not_stays(
    ingest: Ingest, calibrate: Callable[..., Path], tmp_path: Path
) -> None:
    calibrate(n5=0.1)
    assert ingest("--encoding", "neighbours:2").err == ""
    assert prepared(tmp_path) == "neighbours:2"
    assert ingest().err == ""
    assert prepared(tmp_path) == "neighbours:2"
    ingest("--encoding", "neighbours")
    assert prepared(tmp_path) == "neighbours:5"
    ingest("--encoding", "filler")
    assert prepared(tmp_path) == "filler:4"


def opened_with(folder: Path, model_folder: Path, **settings: str) -> Preparation:
    with Weave.open(folder / "kb", model=str(model_folder), device="cpu", **settings) as weave:  # type: ignore[arg-type]
        return weave.library.encoder.preparation


def test_a_weave_takes_the_number_that_calibration_found(
    calibrate: Callable[..., Path], tmp_path: Path, model_folder: Path
) -> None:
    calibrate(n1=0.2, n5=0.1)
    assert str(opened_with(tmp_path, model_folder).variant) == "filler:4"  # made
    write_preparation(tmp_path / "kb" / "kv", Preparation.parse("neighbours:2"))
    found = opened_with(tmp_path, model_folder, encoding="neighbours")
    assert found == Preparation.parse("neighbours:5")
    assert str(opened_with(tmp_path, model_folder).variant) == "neighbours:2"
    other = opened_with(tmp_path, model_folder, encoding="neighbours", system="Answer in verse.")
    assert str(other.variant) == "neighbours:3", "measured behind another preamble"


def test_a_profile_that_cannot_be_read_is_said_in_a_line_and_not_used(
    ingest: Ingest,
    calibrate: Callable[..., Path],
    tmp_path: Path,
    model_folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = calibrate(n5=0.1)
    path.write_text("{")
    with caplog.at_level(logging.WARNING):
        ingest("--encoding", "neighbours")
        assert prepared(tmp_path) == "neighbours:3"
        found = opened_with(tmp_path, model_folder, encoding="neighbours")
        assert str(found.variant) == "neighbours:3"
    line = (
        f"{path} is no profile of kvweave; delete it, then make it again with `kvweave calibrate`"
    )
    want = [f"{line}; until then neighbours:3 is taken"] * 2
    said = [each.getMessage() for each in caplog.records]
    assert [each for each in said if "no profile" in each] == want  # a busy machine says that, too
    caplog.clear()
    ingest("--encoding", "neighbours:2")
    assert "no profile" not in caplog.text, "no trouble of who does not use it"
