"""The settings of kvweave.

    WeaveConfig
    ├── model         which model computes, where and how           ModelChoice
    ├── library       how knowledge bases are made and searched     LibrarySettings
    ├── store         how much chunk KV is kept, and how            StoreSettings
    ├── engine        how much is computed at once                  EngineSettings
    ├── planner       how far back the planner looks                PlannerSettings
    ├── speculation   computing prompts before the search is over   SpeculationSettings
    ├── sampling      how answers are drawn                         SamplingSettings
    ├── quality       what reuse may cost                           QualitySettings
    ├── server        address and limits of `kvweave serve`         ServerSettings
    └── gateway       upstreams of `kvweave gateway`                GatewaySettings

`Weave.open`, the command line and the server share one `WeaveConfig`. `load_config` fills it:
defaults, then a `kvweave.toml` with a table for each section, then variables named
`KVWEAVE_SECTION_KEY`, then flags; the last one that names a key wins.

The values are plain: app/ makes the settings of engine, store and server out of them. A key that is
None is not set, and the part that reads it does what it always does; so no default of theirs is
written here. Names (of models, devices, strategies) are judged where they are used.

To add a key, add a line to its section (config_keys.py says what may stand there) and one to the
table in docs/config.md.
"""

# ruff: noqa: RUF009 - `setting` and `unset` make fields

import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from kvweave.config_keys import (
    MOST,
    Bytes,
    Bytes0,
    Count,
    Count0,
    Key,
    Kind,
    Range,
    Seconds,
    Share,
    Url,
    find_file,
    read_file,
    read_variables,
    setting,
    unset,
)
from kvweave.errors import ConfigError


class ConfigSection:
    """Judges its values when it is made; raises ConfigError."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for key in known_keys().values():
            if key.owner is type(self):
                complaint = key.kind.complaint(getattr(self, key.name))
                if complaint is not None:
                    raise ConfigError(f"{key} {complaint}")


@dataclass(frozen=True, slots=True)
class ModelChoice(ConfigSection):
    """Which model computes, where and how."""

    model: str | None = unset(
        "qwen2.5-coder-0.5b, or smollm2 where that cannot be had",
        "An embedded name (see `kvweave models ls`), a folder, a .gguf file or a hub id",
        "--model",
    )
    device: str = setting("auto", "auto, cpu, cuda or cuda:N", "--device")
    dtype: str = setting("auto", "auto, float32, bfloat16 or float16", "--dtype")
    quant: str = setting(
        "auto",
        "none, int8 (CPU), or auto: int8 where that is faster and under 0.005 nats per token",
        "--quant",
    )
    system: str | None = unset(
        "kvweave's own", "System prompt of all answers; chunk KV belongs to it", "--system"
    )


@dataclass(frozen=True, slots=True)
class LibrarySettings(ConfigSection):
    """How knowledge bases are made and searched."""

    embedder: str = setting(
        "minilm", "Of new knowledge bases: a folder, an embedded model or a hub id", "--embedder"
    )
    # of embedders that kvweave computes itself; auto: in 8 bits on a CPU where that is faster
    embedder_weights: Literal["auto", "float32"] = "auto"
    encoding: str | None = unset(
        "what it has, filler for a new one",
        "Context of chunk KV: isolated, filler:PASSAGES or neighbours:COUNT",
        "--encoding",
    )
    promotion: Count0 = 2  # requests that bring a chunk before its KV is stored; 0: never
    # whether a server makes chunk KV that is missing by itself; auto: where it would be used
    background_kv: Literal["auto", "always", "never"] = "auto"
    background_share: Share = 0.3  # of the time in which answers are told; in idle time all of it
    background_bytes: Bytes0 | None = unset("what its tiers hold")  # of one knowledge base's KV
    remembered_bytes: Bytes0 = 1 << 30  # host memory for documents of no knowledge base; 0: none
    parse_s: Seconds = 60.0  # for parsing one file
    parse_bytes: Bytes = 2 << 30  # of memory, for parsing one file
    k: Annotated[int, Range(1, 100)] = setting(
        5, "How many chunks go in front of the question", "--chunks"
    )
    retrieval: Literal["vector", "words", "hybrid"] = setting(
        "vector", "Find chunks by vector, by words or by both", "--retrieval"
    )
    min_score: Annotated[float, Range(-MOST, MOST)] | None = unset(
        "any", "Leave out chunks with a lower score", "--min-score"
    )
    reranker: str | None = unset(
        "none",
        "A cross-encoder that orders what was found: a folder or a hub id",
        "--reranker MODEL",
    )
    rewrite: bool = setting(
        False, "Search for follow-ups as the model puts them", "--rewrite/--no-rewrite"
    )
    recognise: bool = setting(
        True,
        "Go on with conversations that have no id by what was said in them",
        "--recognise/--no-recognise",
    )
    nothing_found: Literal["say", "answer"] = setting(
        "say", "Where no chunk is found: say so, or answer from nothing", "--nothing-found"
    )
    nothing_text: str | None = unset("a sentence in English")  # what is said then


@dataclass(frozen=True, slots=True)
class StoreSettings(ConfigSection):
    """How much chunk KV is kept, where and how: host memory, a disk, what machines share."""

    host_bytes: Bytes | None = unset(
        "2 GiB; for all of a server a quarter of its memory, 8 GiB at least",
        "Host memory for chunk KV, an equal part for each open knowledge base",
        "--host-gb",
    )
    disk_bytes: Bytes0 | None = unset("64 GiB")  # on disk; beyond it, KV is evicted; 0: no disk
    disk_folder: Path | None = unset(
        "kv in each knowledge base", "Folder of chunk KV", "--disk-folder"
    )
    redis_url: Url | None = unset(
        "no such tier",
        "Share chunk KV on a Valkey or Redis server. KVWEAVE_STORE_REDIS_URL does the same",
        "--redis-url URL",
        is_shown=False,
    )
    redis_ttl_s: Count | None = unset("as the server evicts")  # how long an object stays there
    s3_url: str | None = unset(
        "no such tier", "Share chunk KV in s3://BUCKET/PREFIX", "--s3-url URL"
    )
    s3_endpoint: str | None = unset(
        "Amazon's", "Of an S3-compatible store, http://HOST:PORT", "--s3-endpoint URL"
    )
    s3_region: str | None = unset("as boto3 finds it")
    codec: str | None = unset("int8")  # how chunk KV is written; another codec is other chunk KV
    policy: str | None = unset("pgdsf")  # what stays: lru, lfu, gdsf or pgdsf


@dataclass(frozen=True, slots=True)
class EngineSettings(ConfigSection):
    """How much is computed at once. Keys are fields of engine/config.py's `EngineConfig`."""

    page_tokens: Count | None = unset("what the device likes")  # of one page of KV
    pool_tokens: Count | None = unset("a quarter of the free memory")  # KV of all sequences
    max_running: Count | None = unset("32")  # sequences that are computed at once
    step_rows: Count | None = unset("what the device likes")  # of a step while some decode
    alone_rows: Count | None = unset("what the device likes")  # of a step while none does
    guess_rows: Count | None = unset("what the device likes")  # of a speculation in one step
    background_rows: Count | None = unset("what the device likes")  # of a step in idle time
    tree_share: Share | None = unset("0.5")  # of the pool, for exact KV that no request uses
    # what exact KV and shared chunk KV stay
    tree_policy: Literal["auto", "lru", "lfu", "gdsf", "pgdsf"] | None = unset("auto")
    host_tokens: Count0 | None = unset("four pools beside a GPU, else 0")  # of exact KV in host
    share_chunks: bool | None = unset("on a GPU")  # chunk KV once in the pool for all
    shared_codec: Literal["raw", "int8"] | None = unset("raw")  # how such chunk KV lies there
    prompts_per_step: Count | None = unset("2")  # fused ones between two tokens of an answer
    copy_tokens: Count0 | None = unset("15 on a CPU, else 0")  # guessed from the passages at once
    exact: bool | None = unset("off")  # on a GPU, bits that no other request changes
    recorded_rows: Count0 | None = unset("128")  # decode steps up to this are CUDA graphs; 0: none


@dataclass(frozen=True, slots=True)
class PlannerSettings(ConfigSection):
    """How far back the planner looks, and what a prompt in a free order leaves for the next."""

    # last requests whose chunks and paths count; fewer are noisy, all stale
    window: Annotated[int, Range(1, 1_000_000)] = 1000
    # of them that brought a chunk before such a prompt leaves it in the knowledge tree; 1: at once
    tree_uses: Count = 1

    def __post_init__(self) -> None:
        ConfigSection.__post_init__(self)
        if self.tree_uses > self.window:
            raise ConfigError(
                f"planner.tree_uses is {self.tree_uses}, of {self.window} requests that are "
                "counted (planner.window): no chunk would ever enter the knowledge tree"
            )


@dataclass(frozen=True, slots=True)
class SpeculationSettings(ConfigSection):
    """Whether prompts are computed before the search for their chunks is over."""

    mode: Literal["auto", "on", "off"] = setting(
        "auto",
        "Compute prompts while their chunks are searched for: where it pays, always, never",
        "--speculate",
    )
    max_prefill_bs: Count | None = unset("1 on a CPU, else 4")  # prefills that stop guesses


@dataclass(frozen=True, slots=True)
class SamplingSettings(ConfigSection):
    """How answers are drawn, for questions and requests that do not say it themselves. Keys are
    fields of engine/sampling.py; the model's are in its generation_config.json."""

    max_tokens: Count | None = unset(
        "256, over HTTP 1024", "Length of the answer at most", "--max-tokens"
    )
    temperature: Annotated[float, Range(0, 100)] | None = unset(
        "the model's, else 0", "0 takes the likeliest token each time", "--temperature"
    )
    top_p: Annotated[float, Range(math.ulp(0.0), 1, "above 0 and at most 1")] | None = unset(
        "the model's, else 1", "Keep the likeliest tokens with this probability", "--top-p"
    )
    top_k: Annotated[int, Range(0, wants="0 (off) or more")] | None = unset(
        "the model's, else 0", "Keep this many of the likeliest tokens; 0: all", "--top-k"
    )
    repetition_penalty: Annotated[float, Range(0.01, 100)] | None = unset(
        "the model's, else 1", "Above 1, used words become rarer", "--repetition-penalty"
    )
    # taken off the logit of a token that the answer has: once; for each time it has it
    presence_penalty: Annotated[float, Range(-2, 2)] | None = unset(
        "0", "Above 0, words that the answer has become rarer", "--presence-penalty"
    )
    frequency_penalty: Annotated[float, Range(-2, 2)] | None = unset(
        "0", "Above 0, words become rarer each time the answer has them", "--frequency-penalty"
    )
    seed: Annotated[int, Range(0, 2**63 - 1, "between 0 and 2**63 - 1")] | None = unset(
        "another each time", "Makes drawn answers repeatable", "--seed"
    )
    stop_loops: bool | None = unset(
        "true", "End answers that only repeat themselves", "--stop-loops/--no-stop-loops"
    )


@dataclass(frozen=True, slots=True)
class QualitySettings(ConfigSection):
    """What reuse may cost, for questions and requests that do not say it themselves."""

    reuse: str | None = unset(
        "auto where KV is stored, else what is exact",
        "auto, full, prefix, reuse, weave:0.15, qcfuse, …",
        "--reuse STRATEGY[:RATIO]",
    )
    bound: Annotated[float, Range(0, MOST)] = setting(
        0.02,
        "How far auto may let answers drift: mean KL to full prefill, nats per token",
        "--bound",
    )
    order: Literal["as_found", "free", "auto"] = setting(
        "auto",
        "May chunks move to where more is exact? auto: if calibration found it harmless",
        "--order",
    )
    audit_share: Share = 0.05  # of fused answers, computed exactly in idle time; 0: none
    audit_per_minute: Count0 = 30  # audits at most, of each knowledge base
    # a server asks documents in idle time whether they may be fused, or whether less is enough
    calibrate: bool = True


@dataclass(frozen=True, slots=True)
class ServerSettings(ConfigSection):
    """Address and limits of `kvweave serve`."""

    host: str = setting("127.0.0.1", "Address to listen on", "--host")
    port: Annotated[int, Range(0, 65535)] = setting(8321, "0 takes a free one", "--port")
    kb_root: Path | None = unset(
        "in the user's data folder; with --kb, only those",
        "Folder of knowledge bases, one per subfolder, made on first upload",
        "--kb-root",
    )
    api_key_file: Path | None = unset(
        "KVWEAVE_API_KEYS alone", "Lines of key or key:tenant", "--api-key-file"
    )
    # names that a server without API keys goes by, besides addresses and names without a dot
    allowed_hosts: tuple[str, ...] | None = unset("its address alone")
    allowed_origins: tuple[str, ...] | None = unset("its own pages alone")  # pages that may use it
    aliases: tuple[str, ...] | None = unset(
        "its own name alone",
        "Another name that requests may call the model by",
        "--alias NAME",
    )
    models: tuple[str, ...] | None = unset("none")  # served beside `model.model`
    log_format: Literal["human", "json"] | None = unset(
        "warnings alone", "Log every request, as text or as JSON lines", "--log-format"
    )
    log_level: Literal["debug", "info", "warning", "error"] | None = unset(
        "warning; info with a log_format",
        "From which level on lines are written",
        "--log-level",
    )
    slow_s: Seconds | None = unset("none is")  # a request that takes longer is logged as slow
    running: Count = setting(64, "Answers computed at once", "--running")
    waiting: Count0 = setting(128, "Answers that may queue behind them", "--waiting")
    body_bytes: Bytes = setting(8 << 20, "Size of a request at most", "--max-body-mb")
    upload_bytes: Bytes = setting(64 << 20, "Size of an upload at most", "--max-upload-mb")
    request_s: Seconds = setting(600.0, "Seconds per answer", "--timeout")
    connections: Count = 1024  # open at once
    tenant_answers: Count | None = unset("as many as fit")  # of one tenant, running or waiting
    tenant_kbs: Count | None = unset("any number")  # knowledge bases of one tenant
    tenant_bytes: Bytes | None = unset("any number")  # of one tenant's documents on the disk
    engine_s: Seconds = 120.0  # for one step of the engine; one that takes longer hangs; 0: none
    restarts: Count0 = 5  # within ten minutes, of a server that was lost; 0: none, one process
    open_kbs: Count = setting(4, "Knowledge bases open at a time", "--open-kbs")
    kept_answers: Count0 = 64  # of each tenant, whose details the web page can show; 0: none
    grace_s: Seconds = setting(
        10.0, "Seconds that answers may go on after Ctrl-C or SIGTERM", "--grace"
    )
    lame_s: Seconds = setting(
        0.0, "Seconds before that, in which /readyz says 503 and new work is refused", "--lame"
    )


@dataclass(frozen=True, slots=True)
class GatewaySettings(ConfigSection):
    """Upstreams of `kvweave gateway`, and how requests are spread over them. Address and limits are
    the server's."""

    upstreams: tuple[str, ...] | None = unset(
        "none: name one",
        "An OpenAI-compatible engine, http://HOST:PORT",
        "--upstream URL",
    )
    tokenizer: str | None = unset(
        "the upstreams' model's where it is here; else prompts are text",
        "Whose tokenizer makes the prompts: a name, a folder or a hub id",
        "--tokenizer MODEL",
    )
    key_file: Path | None = unset(
        "no key is sent", "One line: the API key that upstreams want", "--upstream-key-file"
    )
    connector: Literal["auto", "on", "off"] = setting(
        "auto", "Do vLLM upstreams have kvweave's connector? auto asks them", "--connector"
    )
    routing: Literal["cache", "least_loaded", "round_robin"] = setting(
        "cache", "Where requests go (cache: where most of the prompt lies)", "--routing"
    )
    load_factor: Annotated[float, Range(1, MOST)] = setting(
        1.25, "No replica gets more than so many times the mean load", "--load-factor"
    )
    mirror_tokens: Count = 1_000_000  # that a replica's cache is believed to hold
    retries: Count0 = setting(2, "Of one request at most, each elsewhere", "--retries")
    retry_share: Share = 0.2  # of all requests, over time
    retry_reserve: Count0 = 64  # retries at once; comes back within ten seconds
    connect_s: Seconds = 2.0  # for a connection
    silence_s: Seconds = 300.0  # in which nothing of a reply comes, or only comments
    health_s: Seconds = 2.0  # between two looks at a replica, and for the look itself
    wait_s: Seconds = 10.0  # for a replica, where none takes requests
    breaker_failures: Count = 5  # in a row, at which a replica rests
    breaker_rest_s: Seconds = 1.0  # at first; doubles up to a minute


@dataclass(frozen=True, slots=True)
class WeaveConfig:
    """All settings, judged. `dataclasses.replace` makes another."""

    model: ModelChoice = field(default_factory=ModelChoice)
    library: LibrarySettings = field(default_factory=LibrarySettings)
    store: StoreSettings = field(default_factory=StoreSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    planner: PlannerSettings = field(default_factory=PlannerSettings)
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    quality: QualitySettings = field(default_factory=QualitySettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)

    def value(self, key: str) -> Any:
        """Return the value of a key by its dotted name, such as "model.device"."""
        section, _, name = key.partition(".")
        return getattr(getattr(self, section), name)


def given_values(section: ConfigSection) -> dict[str, Any]:
    """The keys of a section that are set, by name: keyword arguments for the part that reads them,
    whose own defaults stand in for the others."""
    names = [key.name for key in known_keys().values() if key.owner is type(section)]
    return {n: value for n in names if (value := getattr(section, n)) is not None}


@functools.cache
def known_keys() -> dict[str, Key]:
    """Every key by its dotted name, in the order in which they are shown."""
    found = {}
    for section, owner in get_type_hints(WeaveConfig).items():
        hints = get_type_hints(owner, include_extras=True)
        for each in fields(owner):
            kind = Kind.from_hint(hints[each.name])
            words = [each.metadata.get(name, "") for name in ("unset", "help", "flag")]
            key = Key(section, each.name, owner, kind, each.default, *words)
            found[str(key)] = key
    return found


class Flag(NamedTuple):
    """A key that was given on the command line."""

    name: str  # as typed: --device
    value: Any


@dataclass(frozen=True, slots=True)
class EffectiveConfig:
    """A configuration, and where each of its values comes from."""

    config: WeaveConfig
    sources: Mapping[str, str]  # by key: default, name of the file, KVWEAVE_…, --flag
    file: Path | None  # that was read; None: there was none
    flags: frozenset[str] = frozenset()  # keys that were given on the command line


def load_config(
    file: Path | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Flag] | None = None,
) -> EffectiveConfig:
    """Defaults, then a file, then variables, then `flags` by key.

    `file` None: the one that KVWEAVE_CONFIG names, else kvweave.toml in the current folder, else
    the one in the user's config folder, else none. `env` None is that of the process. Raises
    ConfigError, which names the key, the value and where it stands.
    """
    env = os.environ if env is None else env
    keys, path = known_keys(), find_file(file, env)
    values: dict[str, Any] = {}
    sources = dict.fromkeys(keys, "default")
    layers = [
        [] if path is None else read_file(path, keys),
        read_variables(env, keys),
        [(keys[name], flag.value, flag.name) for name, flag in (flags or {}).items()],
    ]
    for key, value, source in (each for layer in layers for each in layer):
        complaint = key.kind.complaint(value)
        if complaint is not None:
            raise ConfigError(f"{key} {complaint} ({source})")
        values[str(key)], sources[str(key)] = value, source
    sections = {
        section: owner(
            **{keys[name].name: v for name, v in values.items() if keys[name].owner is owner}
        )
        for section, owner in get_type_hints(WeaveConfig).items()
    }
    return EffectiveConfig(WeaveConfig(**sections), sources, path, frozenset(flags or ()))
