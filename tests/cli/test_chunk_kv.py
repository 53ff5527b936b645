"""Chunk KV from the command line: what ingest stores, ask finds, and what is not found is said."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from kvweave.app.library.kv_progress import KVProgress
from kvweave.app.library.library_kv import KVOptions
from kvweave.cli.explain_view import missing_line
from kvweave.cli.ingest_display import announcement, bar_words, measure_of
from kvweave.cli.tables import progress_text, size_text, time_text
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.fuse.encode.preparation import read_preparation
from kvweave.fuse.record import ChunkRecord, FuseRecord, Stages
from kvweave.fuse.request import State
from kvweave.ingest.report import IngestProgress
from kvweave.kv.tiers.config import DiskTierConfig, HostTierConfig, StoreConfig
from kvweave.kv.tiers.disk_files import DurableFiles
from kvweave.reasons import Reason
from worlds.faulty import FaultPlan, FaultyTierConfig
from worlds.running import Ran, Run
from worlds.tiny_corpus import WordEmbedder
from worlds.tiny_models import make_chat_model_folder

TEXTS = {
    "drain": "To drain a node, cordon the node and evict each pod on the node.",
    "volume": "A volume claim binds a volume of its size.",
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model_folder(tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


class World:
    """A folder of documents, a knowledge base and a tiny model."""

    def __init__(self, run: Run, folder: Path, model_folder: Path) -> None:
        self._run = run
        self.kb = folder / "kb"
        self._docs = folder / "docs"
        self._model = ["--kb", self.kb, "--model", model_folder]
        self._docs.mkdir()
        for name, text in TEXTS.items():
            (self._docs / f"{name}.txt").write_text(text)

    def ingest(self, *options: str) -> Ran:
        return self._run("ingest", self._docs, *self._model, "--chunk-tokens", 64, *options)

    def stored(self, *options: str) -> Ran:
        ran = self.ingest("--kv", *options)
        assert ran.code == 0, ran.err
        return ran

    def ask(self, *options: str) -> Ran:
        return self._run("ask", "How do I drain a node?", *self._model, "--max-tokens", 2, *options)

    def states(self, *options: str) -> list[str]:
        ran = self.ask("--reuse", "reuse", "--json", *options)
        assert ran.code == 0, ran.err
        return [chunk["state"] for chunk in json.loads(ran.out)["explain"]["chunks"]]


@pytest.fixture
def world(run: Run, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr("kvweave.cli.ingest.find_embedder", lambda *_: WordEmbedder())
    monkeypatch.setattr(
        "kvweave.app.library.library.SentenceEmbedder", lambda *_, **__: WordEmbedder()
    )
    monkeypatch.setattr("kvweave.app.library.library.locate", Path)
    return World(run, tmp_path, model_folder)


def refused(ran: Ran) -> str:
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1), ran
    return ran.err


@pytest.mark.parametrize("settings", [("--dtype", "bfloat16"), ("--quant", "int8")])
def test_kv_is_found_by_who_asks_with_the_same_settings(
    world: World, settings: tuple[str, str]
) -> None:
    world.stored("--encoding", "isolated", *settings)
    assert world.states(*settings) == ["reused", "reused"]
    assert world.states() == ["computed", "computed"]


def test_what_is_not_given_stays_as_it_was_prepared(world: World) -> None:
    def prepared() -> str:
        found = read_preparation(world.kb / "kv")
        assert found is not None
        return str(found.variant)

    world.stored("--encoding", "filler:1")
    world.stored()
    assert prepared() == "filler:1"
    world.stored("--encoding", "isolated")
    world.stored()
    assert prepared() == "isolated"


def test_a_refused_refresh_leaves_the_preparation_alone(world: World) -> None:
    world.stored("--encoding", "isolated")
    ran = world.ingest("--kv", "--encoding", "filler:1", "--refresh-neighbours")
    assert "only chunk KV behind neighbours can be refreshed" in refused(ran)
    found = read_preparation(world.kb / "kv")
    assert found is not None
    assert str(found.variant) == "isolated"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--encoding", "isolated"], "--encoding is for computing chunk KV; add --kv"),
        (["--encoding", "magic"], "add --kv"),
        (["--dtype", "bfloat16", "--quant", "int8"], "--dtype, --quant are for"),
        (["--kv", "--encoding", "magic"], "encoding 'magic' is unknown"),
        (["--kv", "--encoding", ""], "encoding '' is unknown"),
    ],
)
def test_options_for_chunk_kv_are_judged_before_anything_is_made(
    world: World, options: list[str], says: str
) -> None:
    assert says in refused(world.ingest(*options))
    assert not world.kb.exists()


@pytest.mark.parametrize("command", ["ask", "plan"])
def test_a_folder_without_a_knowledge_base_is_refused_and_left_alone(
    run: Run, tmp_path: Path, command: str
) -> None:
    said = refused(run(command, "how?", "--kb", tmp_path, "--model", "no-such"))
    assert f"no knowledge base in {tmp_path}; make one: kvweave ingest PATH --kb" in said
    assert not any(tmp_path.iterdir())


INGEST = "kvweave ingest PATH --kv --kb kb"


def record_of(*whys: str | None) -> FuseRecord:
    """A record of chunks that were computed for these reasons; None was not computed."""
    chunks = tuple(
        ChunkRecord(4 * i, 4, State.COMPUTED if why else State.REUSED, 0, None, why)
        for i, why in enumerate(whys)
    )
    return FuseRecord("weave", 0.1, "filler:4", (), (), chunks, 1.0, {}, Stages())


@pytest.mark.parametrize(
    ("whys", "says"),
    [
        ((), None),
        ((None, None), None),
        (("not asked for", None), None),
        ((str(Reason.FULL_IS_FASTER), str(Reason.TIER_TOO_SLOW)), None),
        (
            ("absent",) * 5,
            f"5 of 5 chunks had no stored KV (absent) and were computed; `{INGEST}` stores it",
        ),
        (
            ("absent", None, "corrupt", "absent"),
            "3 of 4 chunks had no stored KV (2 absent, 1 corrupt) and were computed; "
            f"`{INGEST}` stores it",
        ),
        (
            ("absent",),
            f"1 of 1 chunk had no stored KV (absent) and was computed; `{INGEST}` stores it",
        ),
        (("tier failed", None), "1 of 2 chunks had no stored KV (tier failed) and was computed"),
    ],
)
def test_the_line_on_missing_kv_counts_what_was_wanted_and_not_there(
    whys: tuple[str | None, ...], says: str | None
) -> None:
    assert missing_line(record_of(*whys), INGEST) == says


@pytest.mark.parametrize("reuse", ["reuse", "weave"])
def test_reuse_of_nothing_is_said(world: World, reuse: str) -> None:
    assert world.ingest().code == 0  # no chunk KV
    ran = world.ask("--reuse", reuse)
    assert ran.code == 0, ran.err
    said, stats = ran.err.splitlines()
    assert said.startswith("2 of 2 chunks had no stored KV (absent) and ")
    assert f"`kvweave ingest PATH --kv --kb {world.kb} --model " in said
    assert "prompt + 2 answer tokens" in stats
    assert world.ask("--reuse", reuse, "--no-stats").err == ""
    assert world.ask("--reuse", reuse, "--json").err == said + "\n"


def test_left_open_ask_reuses_where_that_is_known_to_be_good_and_says_why_not(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))
    world.stored("--encoding", "isolated")

    def explained(*options: str) -> dict[str, Any]:
        ran = world.ask("--json", *options)
        assert ran.code == 0, ran.err
        return dict(json.loads(ran.out)["explain"])

    for profile in (tmp_path / "home" / "profiles").glob("machine-*"):
        profile.unlink()  # `ingest --kv` measured it
    first = explained()
    assert first["strategy"] == "prefix"
    assert "never measured" in first["why"]
    assert f"no more is reused: {first['why']}" in world.ask("--explain").err
    assert explained("--ratio", "0.3")["strategy"] == "weave"
    assert "plan" not in explained()
    assert "plan" in explained("--reuse", "auto")
    known = explained()
    assert "plan" in known, "measured by now"
    assert "kvweave calibrate quick" in known["why"]


def test_kv_of_another_dtype_is_said_with_the_command_that_stores_it(world: World) -> None:
    world.stored("--encoding", "isolated")
    ran = world.ask("--reuse", "reuse", "--dtype", "bfloat16")
    assert " --dtype bfloat16` stores it" in ran.err.splitlines()[0]
    assert "stored KV" not in world.ask("--reuse", "reuse").err


def test_chunk_kv_that_was_saved_is_counted(world: World) -> None:
    ran = world.stored("--encoding", "filler:1", "--json")
    assert ran.err.startswith("chunk KV of 2 chunks: about "), "and no word of what was lost"
    assert json.loads(ran.out)["chunk_kv"] == {"saved": 2, "dropped": 0, "reasons": []}
    ran = world.stored("--json")
    assert json.loads(ran.out)["chunk_kv"]["saved"] == 0  # it was there
    assert json.loads(world.ingest("--json").out)["chunk_kv"] is None


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (FaultPlan(fail=1.0), "tier cannot be listed"),
        (FaultPlan(drop=1.0), "no room"),
    ],
)
def test_chunk_kv_that_could_not_be_saved_is_said(
    world: World, monkeypatch: pytest.MonkeyPatch, plan: FaultPlan, why: str
) -> None:
    def broken_store(_: KVOptions, kb: KnowledgeBase) -> StoreConfig:
        disk = FaultyTierConfig(DiskTierConfig(kb.folder / "kv"), plan)
        return StoreConfig(tiers=(HostTierConfig(), disk))

    monkeypatch.setattr(KVOptions, "store_config", broken_store)
    ran = world.stored("--encoding", "isolated", "--json")
    chunk_kv = json.loads(ran.out)["chunk_kv"]
    assert (chunk_kv["saved"], chunk_kv["dropped"]) == (0, 2)
    assert why in chunk_kv["reasons"]
    (said,) = [line for line in ran.err.splitlines() if "could not be saved" in line]
    assert said.startswith("2 of 2 chunk KV could not be saved (")
    assert why in said


def test_chunk_kv_that_a_disk_refuses_is_said(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(DurableFiles, "write", refuse)
    ran = world.stored("--encoding", "isolated")
    assert "2 of 2 chunk KV could not be saved (a write failed)" in ran.err


def test_chunk_kv_in_memory_alone_is_not_saved(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    tiers = (HostTierConfig(), DiskTierConfig(tmp_path / "file"))
    monkeypatch.setattr(KVOptions, "store_config", lambda *_: StoreConfig(tiers=tiers))
    ran = world.stored("--encoding", "isolated")
    assert "2 of 2 chunk KV could not be saved (tier cannot be listed)" in ran.err


def test_chunk_kv_that_the_codec_cannot_hold_is_said(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("a value is not finite")

    monkeypatch.setattr("kvweave.fuse.encode.chunk_encoder.pack_chunk", refuse)
    ran = world.stored("--encoding", "isolated")
    assert "2 of 2 chunk KV could not be saved (not representable); questions" in ran.err


def test_the_bytes_of_kv_are_announced_and_stated_and_without_kv_it_says_who_makes_it(
    world: World, run: Run
) -> None:
    plain = world.ingest()
    assert plain.code == 0, plain.err
    assert plain.err == "", "nothing is computed that would have to be announced"
    offered = plain.out.splitlines()[-1]
    assert offered == (
        "KV 0 of 2 chunks: a server makes the rest in the background where answers would use it; "
        "to make it now, run this with --kv"
    )
    made = world.ingest("--kv", "--encoding", "filler:1")
    assert made.code == 0, made.err
    files = [path.stat().st_size for path in (world.kb / "kv/objects").rglob("*.kv")]
    assert len(files) == 2, "behind the filler; none has stood in front"
    assert made.err.startswith(f"chunk KV of 2 chunks: about {size_text(sum(files))}")
    assert made.err.count("\n") == 1
    assert made.out.splitlines()[-1] == f"2 chunks, {size_text(sum(files))} of chunk KV"
    again = world.ingest("--kv", "--json")
    assert (again.code, again.err) == (0, "")
    assert json.loads(again.out)["kv_chunks"] == 0
    status = run("docs", "status", "--kb", world.kb)
    assert status.out.splitlines()[-1] == f"KV 2 of 2 chunks, {size_text(sum(files))}"
    told = json.loads(run("docs", "status", "--kb", world.kb, "--json").out)
    assert told["kv"]["state"] == "ready"
    assert (told["kv"]["chunks_done"], told["kv"]["num_bytes"]) == (2, sum(files))


def test_the_bar_of_each_phase_counts_what_that_phase_has_left() -> None:
    text = IngestProgress("embed", 50, 100, 2, 40, "")
    assert measure_of(text) == ("text", 50, 100)
    assert bar_words(text, 10.0) == "40 chunks · 4/s · 10 s left"
    index = IngestProgress("index", 100, 100, 2, 80, "")
    assert measure_of(index) == ("index", 0, None), "no 100 % before the end"
    kv = IngestProgress(
        "encode", 100, 100, 2, 60, "", 170, 150_000_000, 412_000_000, 15_000, 42_000, 360.0
    )
    assert measure_of(kv) == ("KV", 60, 170)
    assert bar_words(kv, 200.0) == (
        "60 of 170 chunks · 75 tokens/s · 150 MB of 412 MB · 6 min left"
    )
    first = kv._replace(num_chunks=0, kv_bytes=0, num_tokens=0, eta_s=None)
    assert announcement(first, lambda tokens: tokens / 233) == (
        "chunk KV of 170 chunks: about 412 MB, about 3 min"
    )
    assert announcement(first, lambda _: None) == "chunk KV of 170 chunks: about 412 MB"
    assert announcement(kv, lambda _: 1.0) is None, "once, before it begins"


def test_progress_is_said_as_people_say_it() -> None:
    making = KVProgress("making", 120, 170, 412_000_000, 171.0)
    assert progress_text(making) == "KV 120 of 170 chunks, 412 MB, about 3 min left"
    assert progress_text(KVProgress("off", 0, 170, 0)) == "KV 0 of 170 chunks"
    full = KVProgress("full", 120, 170, 1_300_000_000)
    assert progress_text(full) == "KV 120 of 170 chunks, 1.3 GB, full"
    assert [time_text(s) for s in (0.2, 59, 100, 7800)] == ["1 s", "59 s", "2 min", "2 h 10 min"]
