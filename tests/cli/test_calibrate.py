"""`kvweave calibrate` from files to a profile, and every bad input one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvweave import Weave
from kvweave.calibrate.profiles import Profile, find_profile, save_profile, user_path
from kvweave.cli import calibrate
from kvweave.fuse.encode.contexts import digest_ids
from kvweave.fuse.encode.preparation import Preparation, write_preparation
from kvweave.ingest.pipeline import ingest
from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer
from worlds.running import Ran, Run
from worlds.tiny_corpus import WordEmbedder, make_folder, open_kb
from worlds.tiny_models import make_chat_model_folder

SENTENCES = (
    "Drain the node, then restart it.",
    "The quick brown fox jumps over the lazy dog.",
    "Größe, naïve, 東京, and a red house by the sea.",
    "You answer questions from the passages you are given.",
)


@pytest.fixture(scope="module")
def chat_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With room for the filler that chunks are measured behind."""
    return make_chat_model_folder(tmp_path_factory.mktemp("chat"), max_position_embeddings=2048)


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVWEAVE_HOME", str(tmp_path / "home"))


@pytest.fixture
def qa_file(tmp_path: Path) -> Path:
    return write_records(tmp_path / "qa.jsonl")


def write_records(path: Path, *, spans: bool = True) -> Path:
    with path.open("w") as file:
        for i, text in enumerate(SENTENCES):
            word = text.split()[1]
            gold: dict[str, Any] = {"title": f"Note {i}", "text": text}
            if spans:
                gold["answer_spans"] = [[text.index(word), text.index(word) + len(word)]]
            others = [{"title": "", "text": other} for other in SENTENCES if other != text]
            record = {"question": f"what {i}?", "answers": [word], "passages": [*others, gold]}
            file.write(json.dumps(record) + "\n")
    return path


def profile_of(model: Path) -> Profile | None:
    weights = load_decoder(model, device="cpu").weights.fingerprint
    return find_profile(weights, Tokenizer(model).fingerprint)


def refused(ran: Ran) -> str:
    assert ran.code == 2, ran
    assert ran.out == ""
    assert ran.err.count("\n") == 1, ran.err
    assert ran.err.startswith("kvweave: ")
    return ran.err


def test_layers_then_tables_make_one_profile(
    run: Run, chat_model_folder: Path, qa_file: Path
) -> None:
    model = ["--model", chat_model_folder, "--qa", qa_file]
    ran = run("calibrate", "layers", *model, "--context-tokens", 100)
    assert ran.code == 0
    assert "critical layers:" in ran.out
    assert "all, full context" in ran.out
    ran = run("calibrate", *model, "--ratios", "0.2, 0.5", "--encodings", "isolated,filler:2")
    assert ran.code == 0, ran.err
    assert "isolated · 4 questions of qa.jsonl" in ran.out
    assert "filler:2 · 4 questions" in ran.out
    assert "4 questions are few" in ran.out
    profile = profile_of(chat_model_folder)
    assert profile is not None
    cells = [(cell.kl_high, t.encoding) for t in profile.calibration for cell in t.cells]
    lowest = f"exact behind all 2 encodings; {min(cells)[1]} has the lowest KL: "
    assert ran.out.strip().splitlines()[-1].startswith(lowest)
    assert profile.layers is not None
    assert profile.layers.num_samples == 4
    assert [table.encoding for table in profile.calibration] == ["isolated", "filler:2"]
    measured = profile.calibration[0].cells
    assert len(measured) == 2 + 8 * 2  # the order, plain reuse, and the rest at two ratios
    assert {cell.strategy for cell in measured} >= {"reuse", "qcfuse", "weave", "weave-deep"}
    assert all(cell.f1 is not None for cell in measured)


def test_a_generous_bound_takes_plain_reuse_and_json_is_one_document(
    run: Run, chat_model_folder: Path, qa_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "here.json"
    names = ["reuse", "epic", "epic:16", "cachecraft-like"]
    options = ["--ratios", "0.3", "--limit", 2, "--profile", path, "--strategies", ",".join(names)]
    ran = run(
        "calibrate", "--qa", qa_file, "--model", chat_model_folder, *options, "--bound", 0, "--json"
    )
    assert (ran.code, ran.err) == (0, "")
    said = json.loads(ran.out)
    assert said["chosen"] == {"filler:4": None}  # what ingest prepares unless told otherwise
    assert said["profile"] == str(path)
    assert [cell["strategy"] for cell in said["tables"][0]["cells"]] == ["order", *names]
    assert said["tables"][0]["num_questions"] == 2
    assert path.is_file()
    assert profile_of(chat_model_folder) is None  # written there and not to the user's folder


def test_a_bound_that_is_not_given_is_that_of_the_configuration(
    run: Run,
    chat_model_folder: Path,
    qa_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVWEAVE_QUALITY_BOUND", "50")
    options = ["--strategies", "reuse", "--ratios", "0.3", "--limit", 2, "--json"]
    options += ["--profile", tmp_path / "here.json"]
    said = {
        given: json.loads(
            run("calibrate", "--qa", qa_file, "--model", chat_model_folder, *options, *given).out
        )
        for given in [(), ("--bound", "0")]
    }
    assert [each["bound"] for each in said.values()] == [50.0, 0.0]
    assert said[()]["chosen"]["filler:4"]["strategy"] == "reuse"


@pytest.mark.parametrize(
    ("given", "known", "taken"), [([], "7", 7), ([], "1", 2), (["--chunks", "3"], "7", 3)]
)
def test_as_many_chunks_are_taken_as_the_configuration_says(
    given: list[str],
    known: str,
    taken: int,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    monkeypatch.setenv("KVWEAVE_LIBRARY_K", known)
    monkeypatch.setattr(calibrate, "_calibrate", lambda options, *_: asked.append(options))
    assert run("calibrate", "quick", "--kb", tmp_path, *given).code == 0
    assert [options.k for options in asked] == [taken]


def test_questions_are_asked_of_a_knowledge_base(
    run: Run, chat_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvweave.cli.knowledge_bases.find_embedder", lambda *_: WordEmbedder())
    with open_kb(tmp_path / "kb", Tokenizer(chat_model_folder)) as kb:
        ingest(kb, [make_folder(tmp_path / "docs", 3)], None)
    (tmp_path / "q.txt").write_text("how do I drain a node?\nwhat is a taint?\n")
    options = ["--kb", tmp_path / "kb", "--chunks", 3, "--strategies", "reuse,weave"]
    ran = run(
        "calibrate", "--questions", tmp_path / "q.txt", *options, "--model", chat_model_folder
    )
    assert ran.code == 0, ran.err
    assert "2 questions of q.txt" in ran.out
    assert "F1" not in ran.out  # nobody knows the answers
    profile = profile_of(chat_model_folder)
    assert profile is not None
    (table,) = profile.calibration
    assert table.num_chunk_tokens > 0
    with Weave.open(tmp_path / "other", model=str(chat_model_folder), device="cpu") as weave:
        encoder = weave.library.encoder  # of another knowledge base, prepared as by default
        preamble = digest_ids(encoder.preamble_ids)
        assert profile.tables(table.revision, encoder.encoding_context, preamble) == (table,)


def test_a_quick_calibration_makes_its_own_questions_and_says_how_sure_it_is(
    run: Run, chat_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvweave.cli.knowledge_bases.find_embedder", lambda *_: WordEmbedder())
    with open_kb(tmp_path / "kb", Tokenizer(chat_model_folder)) as kb:
        ingest(kb, [make_folder(tmp_path / "docs", 30)], None)
    asked = ["calibrate", "quick", "--kb", tmp_path / "kb", "--chunks", 3, "--limit", 20]
    ran = run(*asked, "--model", chat_model_folder)
    assert ran.code == 0, ran.err
    assert "20 are made from headings and sentences of kb" in ran.err
    assert "20 questions of made from the documents" in ran.out
    assert "2.2 times as wide" in ran.out
    profile = profile_of(chat_model_folder)
    assert profile is not None
    (table,) = profile.calibration
    assert (table.kind, table.num_questions, table.has_history) == ("own", 20, False)
    assert {cell.strategy for cell in table.cells} == {
        "order", "weave", "weave-deep", "weave-through"
    }  # fmt: skip
    assert table.most_prompt_tokens >= table.mean_prompt_tokens > 0
    assert table.close_call > 0


def test_of_several_encodings_the_one_with_the_cheapest_choice_is_named(
    run: Run, chat_model_folder: Path, qa_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvweave.calibrate.gate.MAX_FLIPS", 1.0)  # a tiny model changes its mind
    monkeypatch.setattr("kvweave.calibrate.tabulate.CLOSE_CALLS", (0.0,))  # and is never sure
    options = ["--strategies", "reuse,epic", "--ratios", "0.3", "--limit", 2, "--bound", 100]
    asked = ["calibrate", "--qa", qa_file, "--model", chat_model_folder, *options, "--encodings"]
    said = json.loads(run(*asked, "isolated, filler:1", "--json").out)
    kl = {table["encoding"]: table["cells"][0]["kl"] for table in said["tables"]}
    better = min(kl, key=lambda name: kl[name])  # plain reuse is the cheapest in both
    assert said["cheapest"] == better
    last = run(*asked, "isolated, filler:1").out.strip().splitlines()[-1]
    assert last.startswith(f"{better} is the cheapest of 2 encodings within 100 nats: reuse at 0, ")
    assert "encodings" not in run(*asked, "isolated").out
    twice = run(*asked, "filler,filler:4")  # one and the same
    assert (twice.code, "encodings" in twice.out) == (0, False)


def encodings_of(model: Path) -> list[str]:
    profile = profile_of(model)
    return [] if profile is None else [table.encoding for table in profile.calibration]


def test_the_encoding_that_is_measured_is_the_one_the_knowledge_base_is_prepared_with(
    run: Run, chat_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvweave.cli.knowledge_bases.find_embedder", lambda *_: WordEmbedder())
    kb_folder = tmp_path / "kb"
    with open_kb(kb_folder, Tokenizer(chat_model_folder)) as kb:
        ingest(kb, [make_folder(tmp_path / "docs", 3)], None)
    (tmp_path / "q.txt").write_text("how do I drain a node?\n")
    options = ["--kb", kb_folder, "--chunks", 3, "--strategies", "reuse"]
    asked = ["calibrate", "--questions", tmp_path / "q.txt", *options, "--model", chat_model_folder]
    for encoding in ("isolated", "filler:2"):
        write_preparation(kb_folder / "kv", Preparation.parse(encoding))
        assert run(*asked).code == 0
    assert encodings_of(chat_model_folder) == ["isolated", "filler:2"]
    assert run(*asked, "--encodings", "filler:1").code == 0
    assert encodings_of(chat_model_folder)[-1] == "filler:1"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "give --qa FILE, or --questions FILE with --kb DIR"),
        (["--questions", "QA"], "give --kb DIR with them"),
        (["--qa", "QA", "--ratios", "0.1,2"], "give shares between 0 and 1"),
        (["--qa", "QA", "--ratios", "many"], "give shares between 0 and 1"),
        (["--qa", "QA", "--ratios", ","], "a list is empty"),
        (["--qa", "QA", "--strategies", "best"], "strategy 'best' is unknown; known: full"),
        (["--qa", "QA", "--strategies", "cachecraft"], "is called 'cachecraft-like' now"),
        (["--qa", "QA", "--strategies", "full"], "strategy 'full' is exact"),
        (["--qa", "QA", "--encodings", "alone"], "encoding 'alone' is unknown"),
        (
            ["--qa", "QA", "--encodings", "filler,neighbours:3"],
            "neighbours:3 are chunks of a knowledge base, and --qa has none; "
            "give --questions FILE with --kb DIR",
        ),
        (["--qa", "QA", "--bound", "-1"], "--bound -1 is no KL"),
        (["--qa", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_bad_options_are_refused_before_the_model_loads(
    run: Run, qa_file: Path, options: list[str], says: str
) -> None:
    given = [str(qa_file) if option == "QA" else option for option in options]
    assert says in refused(run("calibrate", *given, "--model", "no-such-model"))


@pytest.mark.parametrize("name", ["qcfuse", "qcfuse:sink"])
def test_critical_layers_are_found_before_they_are_measured(
    run: Run, chat_model_folder: Path, qa_file: Path, name: str
) -> None:
    ran = run("calibrate", "--qa", qa_file, "--model", chat_model_folder, "--strategies", name)
    assert "find them with `kvweave calibrate layers`" in refused(ran)


def test_layers_want_marked_answers(run: Run, chat_model_folder: Path, tmp_path: Path) -> None:
    unmarked = write_records(tmp_path / "plain.jsonl", spans=False)
    ran = run("calibrate", "layers", "--qa", unmarked, "--model", chat_model_folder)
    assert "plain.jsonl marks no answers" in refused(ran)
    assert "give --qa FILE" in refused(run("calibrate", "layers"))


def test_prompts_beyond_the_context_are_refused(
    run: Run, chat_model_folder: Path, qa_file: Path
) -> None:
    with qa_file.open("a") as file:
        passages = [{"title": "", "text": "node " * 2048}, {"title": "", "text": "x"}]
        file.write(json.dumps({"question": "q?", "answers": ["a"], "passages": passages}) + "\n")
    options = ["--strategies", "reuse", "--model", chat_model_folder]
    ran = run("calibrate", "--qa", qa_file, *options)
    assert ran.code == 0
    assert "1 prompts of more than 2,016 tokens are left out" in ran.err
    lines = qa_file.read_text().splitlines()
    qa_file.write_text(lines[-1] + "\n")
    assert "no prompt fits" in refused(run("calibrate", "--qa", qa_file, *options))


@pytest.mark.parametrize("num_documents", [0, 1])
def test_a_knowledge_base_of_one_chunk_leaves_nothing_to_measure(
    run: Run,
    chat_model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_documents: int,
) -> None:
    monkeypatch.setattr("kvweave.cli.knowledge_bases.find_embedder", lambda *_: WordEmbedder())
    with open_kb(tmp_path / "kb", Tokenizer(chat_model_folder), chunk_tokens=480) as kb:
        ingest(kb, [make_folder(tmp_path / "docs", num_documents)], None)
    (tmp_path / "q.txt").write_text("How is a node drained?\n")
    options = ["--kb", tmp_path / "kb", "--model", chat_model_folder, "--strategies", "reuse"]
    said = refused(run("calibrate", "--questions", tmp_path / "q.txt", *options))
    assert f"no question finds more than one chunk in {tmp_path / 'kb'}" in said
    assert "bring more documents in with `kvweave ingest`" in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is no profile of kvweave"),
        ('{"format": 99}', "has format 99"),
        (None, "was measured with another tokenizer"),
    ],
)
def test_a_profile_that_cannot_be_used_is_replaced_and_kept_beside(
    run: Run, chat_model_folder: Path, qa_file: Path, text: str | None, says: str
) -> None:
    weights = load_decoder(chat_model_folder, device="cpu").weights.fingerprint
    path = user_path(weights)
    save_profile(path, Profile("tiny", weights, "another"))
    if text is not None:
        path.write_text(text)
    before = path.read_text()
    options = ["--strategies", "reuse", "--limit", 1, "--model", chat_model_folder]
    ran = run("calibrate", "--qa", qa_file, *options)
    assert ran.code == 0, ran.err
    warning, _, _ = ran.err.partition("\n")
    assert str(path) in warning
    assert says in warning
    assert warning.endswith(f"measured anew, it is kept as {path.name}.old")
    assert path.with_name(f"{path.name}.old").read_text() == before
    profile = profile_of(chat_model_folder)
    assert profile is not None
    assert len(profile.calibration) == 1


def test_another_profiles_damage_is_left_alone(
    run: Run, chat_model_folder: Path, qa_file: Path, tmp_path: Path
) -> None:
    path = user_path(load_decoder(chat_model_folder, device="cpu").weights.fingerprint)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    options = ["--strategies", "reuse", "--limit", 1, "--profile", tmp_path / "p.json"]
    ran = run("calibrate", "--qa", qa_file, "--model", chat_model_folder, *options)
    assert ran.code == 0, ran.err
    assert "it is left alone" in ran.err
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert (tmp_path / "p.json").is_file()
