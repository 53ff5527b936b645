"""The configuration: who wins, what is refused and in which words, and that its defaults and names
are those of the parts that read it."""

import inspect
import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest

from kvweave.config import (
    EffectiveConfig,
    EngineSettings,
    Flag,
    LibrarySettings,
    ModelChoice,
    PlannerSettings,
    QualitySettings,
    SamplingSettings,
    ServerSettings,
    StoreSettings,
    WeaveConfig,
    given_values,
    known_keys,
    load_config,
)
from kvweave.config_keys import Key, parse_size
from kvweave.errors import ConfigError

DOCS = Path(__file__).resolve().parents[1] / "docs"


def toml(folder: Path, text: str, name: str = "kvweave.toml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refusal(file: Path | None = None, env: dict[str, str] | None = None, **flags: Any) -> str:
    """The message of a configuration that cannot be loaded: one line."""
    with pytest.raises(ConfigError) as error:
        load_config(file or Path(os.devnull), env or {}, flags)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder and a user's config folder without a file in them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvweave.config_keys.config_folder", lambda: tmp_path / "user")
    return tmp_path


def test_without_anything_there_are_the_defaults(nowhere: Path) -> None:
    loaded = load_config(env={})
    assert loaded == EffectiveConfig(
        WeaveConfig(), dict.fromkeys(known_keys(), "default"), None, frozenset()
    )
    assert loaded.config.model == ModelChoice(None, "auto", "auto", "auto", None)


def test_flags_beat_variables_beat_the_file_beats_defaults(tmp_path: Path) -> None:
    file = toml(tmp_path, '[model]\ndevice = "cpu"\ndtype = "float16"\nquant = "int8"\n')
    env = {"KVWEAVE_MODEL_DTYPE": "bfloat16", "KVWEAVE_MODEL_QUANT": "none", "OTHER": "x"}
    flags = {"model.quant": Flag("--quant", "int4")}
    loaded = load_config(file, env, flags)
    assert loaded.config.model == ModelChoice(None, "cpu", "bfloat16", "int4")
    sources = [loaded.sources[f"model.{name}"] for name in ("model", "device", "dtype", "quant")]
    assert sources == ["default", "kvweave.toml", "KVWEAVE_MODEL_DTYPE", "--quant"]
    assert (loaded.file, loaded.flags) == (file, {"model.quant"})


def sample(key: Key) -> tuple[Any, str, str]:
    """A value of a key that is not its default, in TOML and as text of a variable."""
    if key.kind.known:
        other = next(name for name in key.kind.known if name != key.default)
        return other, f'"{other}"', other
    plain: dict[type, tuple[Any, str, str]] = {
        str: ("x", '"x"', "x"),
        int: (3, "3", "3"),
        float: (0.25, "0.25", "0.25"),
        bool: (True, "true", "true") if key.default is False else (False, "false", "false"),
        Path: (Path("/x/y"), '"/x/y"', "/x/y"),
        tuple: (("a", "b"), '["a", "b"]', "a, b"),
    }
    if key.kind.type is float and key.kind.range is not None and not key.kind.range.holds(0.5):
        return 2.5, "2.5", "2.5"
    return (3 << 20, '"3MiB"', "3 MiB") if key.kind.is_size else plain[key.kind.type]


@pytest.mark.parametrize("name", known_keys())
def test_every_key_can_come_from_the_file_and_from_its_variable(name: str, tmp_path: Path) -> None:
    key = known_keys()[name]
    value, in_toml, text = sample(key)
    assert value != key.default
    file = toml(tmp_path, f"[{key.section}]\n{key.name} = {in_toml}\n")
    for loaded, source in (
        (load_config(file, {}), "kvweave.toml"),
        (load_config(Path(os.devnull), {key.variable: text}), key.variable),
    ):
        assert loaded.config.value(name) == value
        assert {n for n, s in loaded.sources.items() if s == source} == {name}


def test_variables_are_named_by_section_and_key() -> None:
    variables = [key.variable for key in known_keys().values()]
    assert len(set(variables)) == len(variables)
    assert known_keys()["store.host_bytes"].variable == "KVWEAVE_STORE_HOST_BYTES"
    assert known_keys()["model.model"].variable == "KVWEAVE_MODEL"


def test_a_variable_that_is_empty_sets_nothing() -> None:
    assert load_config(Path(os.devnull), {"KVWEAVE_MODEL": ""}).config == WeaveConfig()


def test_variables_that_are_no_keys_keep_their_meaning() -> None:
    env = {"KVWEAVE_HOME": "/x", "KVWEAVE_API_KEYS": "a,b", "KVWEAVE_CONFIG": os.devnull}
    env["KVWEAVE_NATIVE"] = "0"
    assert load_config(env=env).config == WeaveConfig()


def test_what_kubernetes_says_of_a_service_sets_nothing() -> None:
    env = {
        "KVWEAVE_SERVICE_HOST": "10.0.0.1",
        "KVWEAVE_SERVICE_PORT": "8321",
        "KVWEAVE_SERVICE_PORT_HTTP": "8321",
        "KVWEAVE_PORT": "tcp://10.0.0.1:8321",
        "KVWEAVE_SERVER_PORT": "tcp://10.0.0.1:8321",  # of a service "kvweave-server"
        "KVWEAVE_SERVER_PORT_8321_TCP_ADDR": "10.0.0.1",
    }
    assert load_config(Path(os.devnull), env).config == WeaveConfig()


def test_the_file_is_the_named_one_else_here_else_the_users(nowhere: Path) -> None:
    users = toml(nowhere / "user", '[model]\ndevice = "user"\n')
    assert load_config(env={}).config.model.device == "user"
    assert load_config(env={}).file == users
    toml(nowhere, '[model]\ndevice = "here"\n')
    assert load_config(env={}).config.model.device == "here"
    of_variable = toml(nowhere, '[model]\ndevice = "variable"\n', "a.toml")
    env = {"KVWEAVE_CONFIG": str(of_variable)}
    assert load_config(env=env).config.model.device == "variable"
    named = toml(nowhere, '[model]\ndevice = "named"\n', "b.toml")
    loaded = load_config(named, env)
    assert (loaded.config.model.device, loaded.sources["model.device"]) == ("named", "b.toml")


def test_a_path_in_a_file_starts_at_the_file(tmp_path: Path) -> None:
    file = toml(tmp_path / "etc", '[server]\nkb_root = "kbs"\napi_key_file = "~/keys"\n')
    config = load_config(file, {}).config
    assert config.server.kb_root == tmp_path / "etc" / "kbs"
    assert config.server.api_key_file == Path.home() / "keys"


def test_a_home_that_is_not_there_is_no_crash(nowhere: Path) -> None:
    env = {"KVWEAVE_SERVER_KB_ROOT": "~no-such-user/kv"}
    assert load_config(env=env).config.server.kb_root == Path("~no-such-user/kv")
    with pytest.raises(ConfigError, match="cannot read the settings in ~no-such-user"):
        load_config(env={"KVWEAVE_CONFIG": "~no-such-user/kvweave.toml"})


# what is refused


def test_an_unknown_section_lists_the_known_ones(tmp_path: Path) -> None:
    file = toml(tmp_path, "[stor]\ncodec = 'int8'\n")
    sections = ", ".join(field.name for field in fields(WeaveConfig))
    assert refusal(file) == f"{file}: no section [stor]; known: {sections}"


def test_an_unknown_key_lists_the_known_ones(tmp_path: Path) -> None:
    file = toml(tmp_path, "[model]\ndevise = 'cpu'\n")
    known = "model, device, dtype, quant, system"
    assert refusal(file) == f"{file}: no key 'devise' in [model]; known: {known}"


def test_a_key_outside_of_a_section_is_no_section(tmp_path: Path) -> None:
    assert "no section [device]; known: model, " in refusal(toml(tmp_path, "device = 'cpu'\n"))
    says = refusal(toml(tmp_path, "model = 'smollm2'\n"))
    assert says.endswith("model is a section; write [model] and its keys")


def test_an_unknown_variable_lists_the_known_ones() -> None:
    says = refusal(env={"KVWEAVE_MODEL_DEVISE": "cpu"})
    assert says.startswith(
        "KVWEAVE_MODEL_DEVISE is no setting; known: KVWEAVE_MODEL, KVWEAVE_MODEL_"
    )
    assert "KVWEAVE_STORE" not in says
    says = refusal(env={"KVWEAVE_MODLE": "x"})
    assert all(key.variable in says for key in known_keys().values())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[model]\ndevice = 3", "model.device must be a text, got 3"),
        ("[model]\ndevice = ['cpu']", "model.device must be a text, got ['cpu']"),
        ("[library]\nk = '5'", "library.k must be a whole number, got '5'"),
        ("[library]\nk = 5.0", "library.k must be a whole number, got 5.0"),
        ("[library]\nk = true", "library.k must be a whole number, got True"),
        ("[library]\nk = 0", "library.k must be between 1 and 100, got 0"),
        ("[server]\naliases = 'gpt'", "server.aliases must be a list of texts, got 'gpt'"),
        ("[server]\naliases = [1]", "server.aliases must be a list of texts, got (1,)"),
        ("[store]\nhost_bytes = '8 giga'", "store.host_bytes must be bytes or a size such as"),
        ("[store]\nhost_bytes = 1.5", "store.host_bytes must be bytes or a size such as"),
        ("[store]\nhost_bytes = 0", "store.host_bytes must be at least 1, got 0"),
        ("[server]\nkb_root = 3", "server.kb_root must be a text, got 3"),
        ("[engine]\ntree_share = 1.5", "engine.tree_share must be between 0 and 1, got 1.5"),
        ("[speculation]\nmode = 'never'", "must be one of auto, on, off; got 'never'"),
        ("[quality]\nbound = nan", "quality.bound must be between 0 and 1000000000, got nan"),
        ("[quality]\nbound = -1", "quality.bound must be between 0 and 1000000000, got -1.0"),
        ("[sampling]\ntop_p = 0", "sampling.top_p must be above 0 and at most 1, got 0.0"),
        ("[server]\nport = 70000", "server.port must be between 0 and 65535, got 70000"),
        ("[server]\nrequest_s = inf", "server.request_s must be between 0 and 1000000000, got inf"),
        ("[server]\nlog_format = 'xml'", "must be one of human, json; got 'xml'"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_key_value_and_place(
    tmp_path: Path, text: str, says: str
) -> None:
    message = refusal(toml(tmp_path, text))
    assert says in message
    assert message.endswith(" (kvweave.toml)")


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("KVWEAVE_LIBRARY_K", "many", "library.k must be a whole number, got 'many'"),
        ("KVWEAVE_QUALITY_BOUND", "low", "quality.bound must be a number, got 'low'"),
        (
            "KVWEAVE_QUALITY_ORDER",
            "any",
            "quality.order must be one of as_found, free, auto; got 'any'",
        ),
        ("KVWEAVE_STORE_DISK_BYTES", "-1", "store.disk_bytes must be bytes or a size such as"),
        ("KVWEAVE_SERVER_PORT", "http", "server.port must be a whole number, got 'http'"),
    ],
)
def test_so_is_that_of_a_variable(variable: str, text: str, says: str) -> None:
    message = refusal(env={variable: text})
    assert message.startswith(says)
    assert message.endswith(f" ({variable})")


def test_so_is_that_of_a_flag() -> None:
    says = refusal(**{"quality.bound": Flag("--bound", -1.0)})
    assert says == "quality.bound must be between 0 and 1000000000, got -1.0 (--bound)"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ModelChoice(device=3), "model.device must be a text, got 3"),  # type: ignore[arg-type]
        (lambda: ModelChoice(device=None), "model.device cannot be None"),  # type: ignore[arg-type]
        (lambda: StoreSettings(host_bytes=0), "store.host_bytes must be at least 1, got 0"),
        (lambda: replace(QualitySettings(), bound=-0.1), "quality.bound must be between"),
        (lambda: EngineSettings(pool_tokens=True), "engine.pool_tokens must be a whole number"),
    ],
)
def test_values_are_judged_when_a_section_is_made(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        make()


@pytest.mark.parametrize(
    "content", [b"[model", b"[model]\ndevice = cpu", b"\xff\xfe", b"a = " + b"[" * 20_000]
)
def test_a_file_that_is_no_toml_is_one_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(content)
    assert refusal(file).startswith(f"{file} is no TOML: ")


def test_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    says = f"cannot read the settings in {missing}: No such file or directory"
    assert refusal(missing) == says
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_config(env={"KVWEAVE_CONFIG": str(missing)})
    assert "Is a directory" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("1.5MiB", 3 << 19),
        ("64MB", 64_000_000),
        ("2 TB", 2 * 10**12),
        ("512", 512),
        ("512B", 512),
        ("8G", "8G"),
        ("GiB", "GiB"),
        ("-1GiB", "-1GiB"),
        ("1e9", "1e9"),
        ("inf", "inf"),
        ("9" * 5000, "9" * 5000),
        ("", ""),
    ],
)
def test_sizes(text: str, size: int | str) -> None:
    assert parse_size(text) == size


# what the parts that read it have


def test_it_stands_on_the_ground_floor() -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import kvweave.config\n"
        "ours = {name for name in sys.modules if name.startswith('kvweave.')}\n"
        "names = ('config', 'config_keys', 'errors', 'paths')\n"
        "assert ours == {f'kvweave.{name}' for name in names}, ours\n"
    )
    env = {"PYTHONPATH": str(DOCS.parent / "src")}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


def test_only_what_is_set_is_given_on() -> None:
    assert given_values(EngineSettings()) == {}
    assert given_values(EngineSettings(page_tokens=16, host_tokens=0)) == {
        "page_tokens": 16,
        "host_tokens": 0,
    }


def test_the_keys_of_engine_and_sampling_are_fields_of_theirs() -> None:
    from kvweave.engine.config import EngineConfig
    from kvweave.engine.sampling import Sampling

    theirs = {EngineSettings: EngineConfig, SamplingSettings: Sampling}
    for ours, other in theirs.items():
        assert {f.name for f in fields(ours)} <= {f.name for f in fields(other)}


def test_the_defaults_are_those_of_the_parts() -> None:
    from kvweave.app.answer.question import BOUND, TOP_K, Question
    from kvweave.app.answer.settings import AnswerSettings
    from kvweave.app.libraries.libraries import LibrariesConfig
    from kvweave.app.library.library import DEFAULT_EMBEDDER
    from kvweave.plan.ordering import PROMOTION, WINDOW
    from kvweave.serve.access.limits import Limits

    library, quality, server = LibrarySettings(), QualitySettings(), ServerSettings()
    assert (library.embedder, library.promotion, library.k) == (DEFAULT_EMBEDDER, PROMOTION, TOP_K)
    assert (quality.bound, quality.order) == (BOUND, Question("q").permission)
    assert PlannerSettings() == AnswerSettings().planner == LibrariesConfig().planner
    assert PlannerSettings().window == WINDOW
    assert server.open_kbs == LibrariesConfig().open_most
    for name in ("running", "waiting", "body_bytes", "upload_bytes", "request_s"):
        assert getattr(server, name) == getattr(Limits(), name)


def test_a_threshold_that_no_chunk_can_reach_is_refused() -> None:
    with pytest.raises(ConfigError, match="no chunk would ever enter the knowledge tree"):
        PlannerSettings(window=10, tree_uses=11)
    assert PlannerSettings(window=10, tree_uses=10).tree_uses == 10


def test_the_only_values_there_are_are_those_of_the_parts() -> None:
    from kvweave.app.answer.question import NothingMode, SpeculationMode
    from kvweave.corpus.bert_encoder import EncoderWeights
    from kvweave.corpus.search import RETRIEVALS
    from kvweave.engine.config import SharedCodec
    from kvweave.kv.policies import POLICIES
    from kvweave.plan.ordering import OrderPermission
    from kvweave.serve.observe.logs import Format, Level

    known = {name: key.kind.known for name, key in known_keys().items() if key.kind.known}
    assert known == {
        "library.embedder_weights": get_args(EncoderWeights),
        "library.background_kv": ("auto", "always", "never"),
        "library.retrieval": RETRIEVALS,
        "library.nothing_found": get_args(NothingMode),
        "engine.shared_codec": get_args(SharedCodec),
        "engine.tree_policy": ("auto", *POLICIES),
        "speculation.mode": get_args(SpeculationMode),
        "quality.order": tuple(OrderPermission),
        "server.log_format": get_args(Format),
        "server.log_level": get_args(Level),
        "gateway.connector": ("auto", "on", "off"),
        "gateway.routing": ("cache", "least_loaded", "round_robin"),
    }


def test_what_is_said_of_a_key_that_is_not_set_is_so() -> None:
    from kvweave.app.libraries.libraries import LEAST_HOST_BYTES
    from kvweave.app.library.library_kv import CODEC
    from kvweave.engine.config import EngineConfig
    from kvweave.engine.sampling import Sampling
    from kvweave.kv.tiers.config import DiskTierConfig, HostTierConfig, StoreConfig
    from kvweave.serve.routes.chat import DEFAULT_MAX_TOKENS

    engine, drawn = EngineConfig(), Sampling()
    gib = 1 << 30
    host = HostTierConfig().capacity_bytes // gib
    hosts = f"for all of a server a quarter of its memory, {LEAST_HOST_BYTES // gib} GiB at least"
    said = {
        "store.host_bytes": f"{host} GiB; {hosts}",
        "store.disk_bytes": f"{DiskTierConfig(Path()).capacity_bytes // gib} GiB",
        "store.codec": CODEC,
        "store.policy": StoreConfig().policy,
        "engine.max_running": f"{engine.max_running}",
        "engine.tree_share": f"{engine.tree_share:g}",
        "engine.share_chunks": "on a GPU",
        "engine.shared_codec": engine.shared_codec,
        "engine.recorded_rows": f"{engine.recorded_rows}",
        "sampling.stop_loops": str(drawn.stop_loops).lower(),
        "sampling.max_tokens": f"{drawn.max_tokens}, over HTTP {DEFAULT_MAX_TOKENS}",
        "sampling.temperature": f"the model's, else {drawn.temperature:g}",
        "sampling.top_p": f"the model's, else {drawn.top_p:g}",
        "sampling.top_k": f"the model's, else {drawn.top_k}",
        "sampling.repetition_penalty": f"the model's, else {drawn.repetition_penalty:g}",
        "sampling.presence_penalty": f"{drawn.presence_penalty:g}",
        "sampling.frequency_penalty": f"{drawn.frequency_penalty:g}",
    }
    assert {name: known_keys()[name].unset for name in said} == said


def test_a_key_without_a_default_says_what_happens() -> None:
    for key in known_keys().values():
        assert (key.default is None) == bool(key.unset) == key.kind.is_optional, str(key)


def test_weave_open_has_the_keys_of_the_model() -> None:
    from kvweave.app.weave import Weave

    assert {f.name for f in fields(ModelChoice)} <= set(inspect.signature(Weave.open).parameters)


def test_the_page_has_every_key_with_its_default_and_its_flag() -> None:
    from kvweave.cli import ask, gateway, ingest, plan, serve
    from kvweave.cli.options import ConfigOption

    flags = {
        option.key: option.opts[-1]
        for each in (ask, ingest, plan, serve, gateway)
        for option in each.command.params
        if isinstance(option, ConfigOption)
    }
    rows = re.findall(
        r"^\| `([a-z]+\.[a-z0-9_]+)` \| ([^|]*) \| `(KVWEAVE_\w+)` \| ([^|]*) \| [^|]+ \|$",
        (DOCS / "config.md").read_text(),
        re.MULTILINE,
    )
    assert rows == [
        (
            name,
            key.unset if key.default is None else f"`{_shown(key)}`",
            key.variable,
            f"`{flags[name]}`" if name in flags else "–",
        )
        for name, key in known_keys().items()
    ]


def _shown(key: Key) -> str:
    if key.kind.is_size:
        return f"{key.default >> 20}MiB"
    if isinstance(key.default, bool):
        return str(key.default).lower()
    return f"{key.default:g}" if isinstance(key.default, float) else str(key.default)
