"""`kvweave config show` tells what is in force and why; and what it tells is what commands do."""

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvweave.app.weave import Sampling, Weave
from kvweave.cli import ask, ingest, plan, serve
from kvweave.cli.options import ConfigOption
from kvweave.config import LibrarySettings, WeaveConfig, known_keys
from kvweave.model.files.generation import FILE
from kvweave.paths import kb_root
from worlds.running import Run

OPTIONS = {
    option.opts[-1]: option
    for each in (ask, ingest, plan, serve)
    for option in each.command.params
    if isinstance(option, ConfigOption) and not option.is_flag
}
TYPED: dict[str, tuple[str, Any]] = {  # flag → what is typed, and what the key gets
    "--chunks": ("7", 7),
    "--bound": ("0.1", 0.1),
    "--order": ("free", "free"),
    "--speculate": ("off", "off"),
    "--max-tokens": ("9", 9),
    "--temperature": ("0.5", 0.5),
    "--top-p": ("0.5", 0.5),
    "--top-k": ("7", 7),
    "--seed": ("3", 3),
    "--repetition-penalty": ("1.5", 1.5),
    "--presence-penalty": ("0.5", 0.5),
    "--frequency-penalty": ("-0.5", -0.5),
    "--retrieval": ("hybrid", "hybrid"),
    "--min-score": ("0.25", 0.25),
    "--nothing-found": ("answer", "answer"),
    "--alias": ("gpt", ["gpt"]),
    "--log-level": ("debug", "debug"),
    "--port": ("9000", 9000),
    "--log-format": ("json", "json"),
    "--running": ("2", 2),
    "--waiting": ("0", 0),
    "--max-body-mb": ("0.5", 1 << 19),
    "--max-upload-mb": ("1.5", 3 << 19),
    "--timeout": ("0", 0.0),
    "--open-kbs": ("2", 2),
    "--host-gb": ("0.5", 1 << 29),
    "--grace": ("2.5", 2.5),
    "--lame": ("1", 1.0),
    "--redis-url": ("redis://me:hidden@h:1/0", "redis://me:***@h:1/0"),
}


def shown(run: Run, *args: object) -> Any:
    ran = run("config", "show", "--json", *args)
    assert (ran.code, ran.err) == (0, ""), ran
    return json.loads(ran.out)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with no settings in it and none of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVWEAVE_CONFIG")
    monkeypatch.setattr("kvweave.config_keys.config_folder", lambda: tmp_path / "user")
    return tmp_path


def test_people_see_every_setting_its_value_and_its_source(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVWEAVE_QUALITY_BOUND", "0.05")
    monkeypatch.setenv("COLUMNS", "160")
    (here / "kvweave.toml").write_text('[store]\nhost_bytes = "1536MiB"\n')
    ran = run("config", "show", "--device", "cpu", "--encoding", "isolated")
    assert (ran.code, ran.err) == (0, "")
    heading, *lines, last = ran.out.splitlines()
    assert heading.split() == ["setting", "value", "from"]
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines}
    assert list(rows) == list(known_keys())
    assert rows["model.model"] == (
        "(qwen2.5-coder-0.5b, or smollm2 where that cannot be had) default"
    )
    assert rows["model.device"] == "cpu --device"
    assert rows["library.encoding"] == "isolated --encoding"
    assert rows["store.host_bytes"] == "1,536 MiB kvweave.toml"
    assert rows["engine.pool_tokens"] == "(a quarter of the free memory) default"
    assert rows["quality.bound"] == "0.05 KVWEAVE_QUALITY_BOUND"
    assert rows["server.request_s"] == "600 default"
    assert last == f"read {here / 'kvweave.toml'}"


def test_json_is_one_document(run: Run, here: Path) -> None:
    said = shown(run, "--kb-root", here / "kbs")
    assert said["file"] is None
    assert list(said["settings"]) == list(known_keys())
    assert said["settings"]["model.device"] == {"value": "auto", "from": "default"}
    root = {"value": str(here / "kbs"), "from": "--kb-root"}
    assert said["settings"]["server.kb_root"] == root
    assert run("config", "show").out.endswith("no kvweave.toml\n")


@pytest.mark.parametrize("flag", OPTIONS)
def test_every_flag_sets_its_key(run: Run, flag: str) -> None:
    typed, value = TYPED.get(flag, ("x", "x"))
    said = shown(run, flag, typed)["settings"]
    mine = {key for key, told in said.items() if told["from"] not in ("default", FILE)}
    assert mine == {OPTIONS[flag].key}
    assert said[OPTIONS[flag].key] == {"value": value, "from": flag}


def test_what_the_model_wants_is_shown_unless_the_user_says_otherwise(run: Run, here: Path) -> None:
    told = {"do_sample": True, "temperature": 0.3, "top_p": 0.9, "repetition_penalty": 1.05}
    (here / "config.json").write_text("{}")
    (here / FILE).write_text(json.dumps(told))

    def drawn(*flags: str) -> dict[str, Any]:
        said = shown(run, "--model", ".", *flags)["settings"]
        return {name: said[f"sampling.{name}"] for name in (*told, "top_k") if name != "do_sample"}

    of_model = {name: {"value": told[name], "from": FILE} for name in list(told)[1:]}
    unset = {"value": None, "from": "default"}
    assert drawn() == {**of_model, "top_k": unset}
    typed = {"top_p": {"value": 0.5, "from": "--top-p"}}
    assert drawn("--top-p", "0.5") == {**of_model, **typed, "top_k": unset}
    greedy = dict.fromkeys(of_model, unset) | {
        "temperature": {"value": 0.0, "from": "--temperature"}
    }
    assert drawn("--temperature", "0") == {**greedy, "top_k": unset}
    (here / FILE).write_text('{"temperature": "hot"}')
    refused = run("config", "show", "--model", ".")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == "kvweave: sampling.temperature must be a number, got 'hot'\n"


@pytest.mark.parametrize(("flag", "value"), [("--stop-loops", True), ("--no-stop-loops", False)])
def test_a_switch_is_shown_as_it_was_typed(run: Run, flag: str, value: bool) -> None:
    said = shown(run, flag)["settings"]
    assert said["sampling.stop_loops"] == {"value": value, "from": flag}


def test_what_cannot_be_is_one_line_and_exit_code_2(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = here / "kvweave.toml"
    for text, says in {
        "[model]\ndevise = 'cpu'": "no key 'devise' in [model]; known: model, device, dtype, quant",
        "[modle]\n": "no section [modle]; known: model, library",
        "[library]\nk = 'five'": "library.k must be a whole number, got 'five' (kvweave.toml)",
        "[model": "kvweave.toml is no TOML",
    }.items():
        file.write_text(text)
        for command in (["config", "show"], ["ask", "q"], ["ingest", "x"], ["serve"]):
            ran = run(*command)
            assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1), ran
            assert says in ran.err
    file.unlink()
    monkeypatch.setenv("KVWEAVE_LIBRARY_K", "five")
    assert "(KVWEAVE_LIBRARY_K)" in run("ask", "q").err
    monkeypatch.delenv("KVWEAVE_LIBRARY_K")
    ran = run("config", "show", "--config", here / "other.toml")
    assert ran.code == 2
    assert ran.err.startswith(
        f"kvweave: cannot read the settings in {here / 'other.toml'}: No such"
    )


def test_ask_goes_by_file_variable_and_flag(
    run: Run, chat_model_folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = "[sampling]\nmax_tokens = 3\ntemperature = 0.8\nseed = 3\n"
    (here / "kvweave.toml").write_text(
        f'[model]\nmodel = "{chat_model_folder}"\nsystem = "Be odd."\n{odd}'
        '[quality]\nreuse = "auto"\n'  # for knowledge bases: no complaint without one
    )
    monkeypatch.setenv("KVWEAVE_SAMPLING_MAX_TOKENS", "5")
    with Weave.open(model=str(chat_model_folder), system="Be odd.") as weave:
        for flags, length in (([], 5), (["--max-tokens", 7], 7)):
            answer = weave.ask("how?", sampling=Sampling(length, temperature=0.8, seed=3))
            ran = run("ask", "how?", "--no-stats", *flags)
            assert ran == (0, answer.text + "\n", "")


def test_an_encoding_in_the_file_asks_for_no_kv(
    run: Run, chat_model_folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--encoding without --kv is refused; a file is not only for this command."""
    from worlds.tiny_corpus import WordEmbedder

    named: list[str] = []

    def find_embedder(name: str, _weights: str) -> WordEmbedder:
        named.append(name)
        return WordEmbedder()

    monkeypatch.setattr("kvweave.cli.ingest.find_embedder", find_embedder)
    (here / "a.txt").write_text("Drain the node.")
    (here / "kvweave.toml").write_text(
        f'[model]\nmodel = "{chat_model_folder}"\ndevice = "cpu"\n'
        '[library]\nencoding = "isolated"\nembedder = "mine"\n'
    )
    assert run("ingest", "a.txt", "--kb", "kb", "--encoding", "isolated").code == 2
    ran = run("ingest", "a.txt", "--kb", "kb", "--json")
    assert (ran.code, json.loads(ran.out)["added"]) == (0, 1), ran
    (here / "kvweave.toml").write_text(
        f'[model]\nmodel = "{chat_model_folder}"\n'
        '[library]\nencoding = "isolated"\nembedder = "another"\n'
    )
    assert run("ingest", "a.txt", "--kb", "kb").code == 0
    assert named == ["mine", WordEmbedder().name], "a knowledge base keeps its own"
    ran = run("ingest", "a.txt", "--kb", "kb", "--kv")
    assert ran.code == 0, ran
    assert (here / "kb" / "kv" / "objects").is_dir()


def test_a_bad_encoding_in_the_file_is_refused_before_a_knowledge_base_is_made(
    run: Run, here: Path
) -> None:
    (here / "a.txt").write_text("Drain the node.")
    (here / "kvweave.toml").write_text('[library]\nencoding = "sideways"\n')
    ran = run("ingest", "a.txt", "--kb", "kb", "--kv")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "sideways" in ran.err
    assert not (here / "kb").exists()


def test_serve_goes_by_the_file(run: Run, here: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (here / "kvweave.toml").write_text(f"[server]\nport = {port}\n")
        assert f"cannot listen on 127.0.0.1 port {port}" in run("serve").err
        (here / "kvweave.toml").write_text("[server]\napi_key_file = 'no-such'\n")
        assert "cannot read the API keys in no-such" in run("serve").err


def test_limits_and_places_of_the_server_are_the_files(here: Path) -> None:
    from kvweave.app.answer.question import QuestionDefaults
    from kvweave.app.libraries.libraries import LibrariesConfig, LibraryKey
    from kvweave.app.library.library_kv import BackgroundKV, KVOptions
    from kvweave.config import PlannerSettings, load_config
    from kvweave.serve.access.limits import Limits

    (here / "kvweave.toml").write_text(
        "[server]\nrunning = 2\nwaiting = 0\nbody_bytes = '1MiB'\nupload_bytes = 5\n"
        "request_s = 7\nopen_kbs = 3\nkb_root = 'kbs'\n"
        "[store]\nhost_bytes = '1GiB'\n[library]\nembedder = 'e'\nencoding = 'isolated'\n"
        "background_share = 0.25\nbackground_bytes = 9\n[planner]\nwindow = 50\ntree_uses = 3\n"
    )
    config = load_config(env={}).config
    limits = Limits(running=2, waiting=0, body_bytes=1 << 20, upload_bytes=5, request_s=7.0)
    assert serve.make_limits(config.server) == limits
    folders = {LibraryKey("", "a"): Path("x")}
    kv = replace(
        KVOptions.from_config(config), background=BackgroundKV(9, 0.25, bound=0.02, calibrates=True)
    )
    usual = QuestionDefaults.from_config(config)
    places = LibrariesConfig(
        *(Path("kbs"), folders, "e", kv),
        planner=PlannerSettings(50, 3),
        open_most=3,
        host_bytes=1 << 30,
        usual=usual,
    )
    assert serve.make_places(config, ["a=x"]) == places
    assert serve.make_limits(WeaveConfig().server) == Limits()
    background = BackgroundKV(bound=0.02, calibrates=True)
    plain = LibrariesConfig(kb_root(), kv=KVOptions(background=background))
    assert serve.make_places(WeaveConfig(), []) == plain, "by default KV is made by itself"
    without = WeaveConfig(library=LibrarySettings(background_kv="never"))
    usual = QuestionDefaults.from_config(without)
    assert serve.make_places(without, []) == LibrariesConfig(kb_root(), usual=usual)


@pytest.mark.parametrize("below", [[], ["layers"]], ids=["calibrate", "calibrate layers"])
def test_calibrate_goes_by_the_file(run: Run, here: Path, below: list[str]) -> None:
    marked = {"text": "Drain it.", "answer_spans": [[0, 5]]}
    record = {"question": "q", "answers": ["a"], "passages": [marked, {"text": "Wait."}]}
    (here / "qa.jsonl").write_text(json.dumps(record) + "\n")
    (here / "kvweave.toml").write_text('[model]\nmodel = "no-such"\n')
    assert "no model 'no-such'" in run("calibrate", *below, "--qa", "qa.jsonl").err
