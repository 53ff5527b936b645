"""The settings of kvweave, and where they come from.

    WeaveConfig
    ├── model         which model computes, where and how           ModelChoice
    ├── library       how knowledge bases are made and searched     LibrarySettings
    ├── store         how much chunk KV is kept, and how            StoreSettings
    ├── engine        how much is computed at once                  EngineSettings
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

To add a key, add a line to its section and one to the table in docs/config.md.
"""

# ruff: noqa: RUF009 - `unset` makes a field

import functools
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from kvweave.errors import ConfigError
from kvweave.paths import config_folder

FILE_NAME = "kvweave.toml"
FILE_VARIABLE = "KVWEAVE_CONFIG"  # names another file
# ours, but no keys
OTHER_VARIABLES = {
    *(FILE_VARIABLE, "KVWEAVE_HOME", "KVWEAVE_API_KEYS", "KVWEAVE_NATIVE"),
    *("KVWEAVE_URL", "KVWEAVE_API_KEY"),  # of a server that commands are for
}
MOST = 1e9  # more seconds than any wait has; infinity and NaN are above it or beside it


class Range(NamedTuple):
    """The numbers that a key may have."""

    least: float
    most: float = math.inf
    wants: str = ""  # in words; empty: made of the two numbers

    def holds(self, value: float) -> bool:
        return self.least <= value <= self.most

    def __str__(self) -> str:
        if self.wants:
            return self.wants
        if self.most == math.inf:
            return f"at least {self.least:g}"
        return f"between {self.least:g} and {self.most:.10g}"


SIZE = "size"  # marks a number of bytes, which may be written with a unit: "8GiB"
MASKED = "masked"  # marks a url that may hold a password: shown without it

Url = Annotated[str, MASKED]
Bytes0 = Annotated[int, SIZE, Range(0)]
Bytes = Annotated[int, SIZE, Range(1)]
Count = Annotated[int, Range(1)]
Count0 = Annotated[int, Range(0)]
Seconds = Annotated[float, Range(0, MOST)]
Share = Annotated[float, Range(0, 1)]
Temperature = Annotated[float, Range(0, 100)]
TopP = Annotated[float, Range(math.ulp(0.0), 1, "above 0 and at most 1")]
TopK = Annotated[int, Range(0, wants="0 (off) or more")]
Penalty = Annotated[float, Range(0.01, 100)]
AnswerPenalty = Annotated[float, Range(-2, 2)]
Seed = Annotated[int, Range(0, 2**63 - 1, "between 0 and 2**63 - 1")]


def unset(words: str, *, is_shown: bool = True) -> Any:
    """A key that is None unless it is given; `words` say what happens then."""
    return field(default=None, metadata={"unset": words}, repr=is_shown)


class ConfigSection:
    """Judges its values when it is made; raises ConfigError."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for key in known_keys().values():
            if key.of is type(self):
                complaint = key.kind.complaint(getattr(self, key.name))
                if complaint is not None:
                    raise ConfigError(f"{key} {complaint}")


@dataclass(frozen=True, slots=True)
class ModelChoice(ConfigSection):
    """Which model computes, where and how."""

    # an embedded name, a folder, a .gguf file or a hub id
    model: str | None = unset("qwen2.5-coder-0.5b, or smollm2 where that cannot be had")
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    dtype: str = "auto"  # auto, float32, bfloat16 or float16
    quant: str = "auto"  # none; int8 on a CPU; auto: int8 where it is faster and costs little
    system: str | None = unset("kvweave's own")  # system prompt; chunk KV belongs to one


@dataclass(frozen=True, slots=True)
class LibrarySettings(ConfigSection):
    """How knowledge bases are made and searched."""

    embedder: str = "minilm"  # of new knowledge bases; one that is there keeps its own
    # of embedders that kvweave computes itself; auto: in 8 bits on a CPU where that is faster
    embedder_weights: Literal["auto", "float32"] = "auto"
    encoding: str | None = unset("what it has, filler for a new one")  # context of chunk KV
    extras: tuple[str, ...] | None = unset("what it has, none for a new one")  # beside chunk KV
    promotion: Count0 = 2  # requests that bring a chunk before its KV is stored; 0: never
    # whether a server makes chunk KV that is missing by itself; auto: where it would be used
    background_kv: Literal["auto", "always", "never"] = "auto"
    background_share: Share = 0.1  # of the time, while answers are made; the rest in idle time
    background_bytes: Bytes0 | None = unset("what its tiers hold")  # of one knowledge base's KV
    remembered_bytes: Bytes0 = 1 << 30  # host memory for documents of no knowledge base; 0: none
    parse_s: Seconds = 60.0  # for parsing one file
    parse_bytes: Bytes = 2 << 30  # of memory, for parsing one file
    k: Annotated[int, Range(1, 100)] = 5  # chunks that are put in front of a question
    retrieval: Literal["vector", "words", "hybrid"] = "vector"  # how they are found
    min_score: Annotated[float, Range(-MOST, MOST)] | None = unset("any")  # of a chunk that counts
    reranker: str | None = unset("none")  # a cross-encoder that orders them: a folder or a hub id
    rewrite: bool = False  # follow-ups are searched for as the model puts them
    # a conversation goes on where its user said the same before: its chunks stay in the history
    recognise: bool = True
    # where nothing is found: say so, or answer from nothing
    nothing_found: Literal["say", "answer"] = "say"
    nothing_text: str | None = unset("a sentence in English")  # what is said then


@dataclass(frozen=True, slots=True)
class StoreSettings(ConfigSection):
    """How much chunk KV is kept, where and how: host memory, a disk, what machines share."""

    host_bytes: Bytes | None = unset("2 GiB; 8 GiB for all of a server")  # of host memory
    disk_bytes: Bytes0 | None = unset("64 GiB")  # on disk; beyond it, KV is evicted; 0: no disk
    disk_folder: Path | None = unset("kv in each knowledge base")  # a subfolder for each
    redis_url: Url | None = unset("no such tier", is_shown=False)  # Valkey or Redis
    redis_ttl_s: Count | None = unset("as the server evicts")  # how long an object stays there
    s3_url: str | None = unset("no such tier")  # s3://BUCKET/PREFIX
    s3_endpoint: str | None = unset("Amazon's")  # of another S3-compatible store: http://HOST:PORT
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
    host_tokens: Count0 | None = unset("four pools beside a GPU, else 0")  # of exact KV in host
    share_chunks: bool | None = unset("on a GPU")  # chunk KV once in the pool for all
    shared_codec: Literal["raw", "int8"] | None = unset("raw")  # how such chunk KV lies there
    prompts_per_step: Count | None = unset("2")  # fused ones between two tokens of an answer
    recorded_rows: Count0 | None = unset("128")  # decode steps up to this are CUDA graphs; 0: none


@dataclass(frozen=True, slots=True)
class SpeculationSettings(ConfigSection):
    """Whether prompts are computed before the search for their chunks is over."""

    mode: Literal["auto", "on", "off"] = "auto"  # auto: where it is expected to gain time
    max_prefill_bs: Count | None = unset("1 on a CPU, else 4")  # prefills that stop guesses


@dataclass(frozen=True, slots=True)
class SamplingSettings(ConfigSection):
    """How answers are drawn, for questions and requests that do not say it themselves. Keys are
    fields of engine/sampling.py; the model's are in its generation_config.json."""

    max_tokens: Count | None = unset("256")  # of an answer at most
    temperature: Temperature | None = unset("the model's, else 0")  # 0 takes the likeliest token
    # draw among the likeliest tokens with this probability
    top_p: TopP | None = unset("the model's, else 1")
    top_k: TopK | None = unset("the model's, else 0")  # draw among this many of the likeliest
    repetition_penalty: Penalty | None = unset("the model's, else 1")  # above 1: used words, rarer
    # taken off the logit of a token that the answer has: once; for each time it has it
    presence_penalty: AnswerPenalty | None = unset("0")
    frequency_penalty: AnswerPenalty | None = unset("0")
    seed: Seed | None = unset("another each time")  # makes drawn answers repeatable
    stop_loops: bool | None = unset("true")  # end answers that only repeat themselves


@dataclass(frozen=True, slots=True)
class QualitySettings(ConfigSection):
    """What reuse may cost, for questions and requests that do not say it themselves."""

    # auto, full or a strategy, with a ratio if one is wanted: weave:0.15
    reuse: str | None = unset("auto where KV is stored, else what is exact")
    bound: Annotated[float, Range(0, MOST)] = 0.02  # auto: mean KL in nats per token it may cost
    # may chunks move to where more is exact? auto: where calibration measured that it costs little
    order: Literal["as_found", "free", "auto"] = "auto"
    audit_share: Share = 0.05  # of fused answers, computed exactly in idle time; 0: none
    audit_per_minute: Count0 = 30  # audits at most, of each knowledge base


@dataclass(frozen=True, slots=True)
class ServerSettings(ConfigSection):
    """Address and limits of `kvweave serve`."""

    host: str = "127.0.0.1"  # address to listen on
    port: Annotated[int, Range(0, 65535)] = 8321  # 0 takes a free one
    # folder of knowledge bases
    kb_root: Path | None = unset("in the user's data folder; with --kb, only those")
    api_key_file: Path | None = unset("KVWEAVE_API_KEYS alone")  # lines of key or key:tenant
    # names that a server without API keys goes by, besides addresses and names without a dot
    allowed_hosts: tuple[str, ...] | None = unset("its address alone")
    allowed_origins: tuple[str, ...] | None = unset("its own pages alone")  # pages that may use it
    aliases: tuple[str, ...] | None = unset("its own name alone")  # other names of the model
    models: tuple[str, ...] | None = unset("none")  # served beside `model.model`
    log_format: Literal["human", "json"] | None = unset("warnings alone")  # log every request
    # from which level on lines are written
    log_level: Literal["debug", "info", "warning", "error"] | None = unset(
        "warning; info with a log_format"
    )
    slow_s: Seconds | None = unset("none is")  # a request that takes longer is logged as slow
    running: Count = 64  # answers computed at once
    waiting: Count0 = 128  # answers that may queue behind them
    body_bytes: Bytes = 8 << 20  # of a request
    upload_bytes: Bytes = 64 << 20  # of an upload
    request_s: Seconds = 600.0  # for an answer
    connections: Count = 1024  # open at once
    tenant_answers: Count | None = unset("as many as fit")  # of one tenant, running or waiting
    tenant_kbs: Count | None = unset("any number")  # knowledge bases of one tenant
    tenant_bytes: Bytes | None = unset("any number")  # of one tenant's documents on the disk
    engine_s: Seconds = 120.0  # for one step of the engine; one that takes longer hangs; 0: none
    open_kbs: Count = 4  # knowledge bases open at a time
    kept_answers: Count0 = 64  # of each tenant, whose details the web page can show; 0: none
    grace_s: Seconds = 10.0  # that answers may go on after Ctrl-C or SIGTERM
    lame_s: Seconds = 0.0  # before that, in which /readyz says 503 and new work is refused


@dataclass(frozen=True, slots=True)
class GatewaySettings(ConfigSection):
    """Upstreams of `kvweave gateway`, and how requests are spread over them. Address and limits are
    the server's."""

    upstreams: tuple[str, ...] | None = unset("none: name one")  # http://HOST:PORT, …
    # whose tokenizer makes the prompts: a name, a folder or a hub id
    tokenizer: str | None = unset("the upstreams' model's where it is here; else prompts are text")
    key_file: Path | None = unset("no key is sent")  # one line: what upstreams want as API key
    connector: Literal["auto", "on", "off"] = "auto"  # do vLLM upstreams fuse? auto asks them
    routing: Literal["cache", "least_loaded", "round_robin"] = "cache"  # where requests go
    # no replica has more than so many times the mean load
    load_factor: Annotated[float, Range(1, MOST)] = 1.25
    mirror_tokens: Count = 1_000_000  # that a replica's cache is believed to hold
    retries: Count0 = 2  # of one request, each at another replica
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
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    quality: QualitySettings = field(default_factory=QualitySettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)

    def value(self, key: str) -> Any:
        """Of a key by its dotted name, such as "model.device"."""
        section, _, name = key.partition(".")
        return getattr(getattr(self, section), name)


def given(section: ConfigSection) -> dict[str, Any]:
    """The keys of a section that are set, by name: keyword arguments for the part that reads them,
    whose own defaults stand in for the others."""
    names = [key.name for key in known_keys().values() if key.of is type(section)]
    return {n: value for n in names if (value := getattr(section, n)) is not None}


class Kind(NamedTuple):
    """What values a key takes."""

    type: type  # str, int, float, bool, Path or tuple (of str)
    is_optional: bool
    known: tuple[str, ...]  # the only values there are; empty: any
    range: Range | None  # of a number
    is_size: bool  # a number of bytes
    is_masked: bool = False  # a url that may hold a password

    @classmethod
    def of(cls, hint: Any) -> "Kind":
        """Of a field by its annotation."""
        is_optional = False
        marks: list[object] = []
        if get_origin(hint) in (Union, UnionType):
            (hint,) = (part for part in get_args(hint) if part is not NoneType)
            is_optional = True
        if get_origin(hint) is Annotated:
            hint, *marks = get_args(hint)
        known = get_args(hint) if get_origin(hint) is Literal else ()
        plain = str if known else get_origin(hint) or hint
        bounds = next((mark for mark in marks if isinstance(mark, Range)), None)
        return cls(plain, is_optional, known, bounds, SIZE in marks, MASKED in marks)

    def complaint(self, value: object) -> str | None:
        """What is wrong with a value, and which are right; None if nothing is."""
        if value is None:
            return None if self.is_optional else "cannot be None; leave it out"
        types = (int, float) if self.type is float else (self.type,)
        is_right = isinstance(value, types) and (self.type is bool or not isinstance(value, bool))
        if self.type is tuple and isinstance(value, tuple):
            is_right = all(isinstance(each, str) for each in value)
        if not is_right:
            return f"must be {self._words()}, got {value!r}"
        if self.known and value not in self.known:
            return f"must be one of {', '.join(self.known)}; got {value!r}"
        if isinstance(value, int | float) and self.range and not self.range.holds(value):
            return f"must be {self.range}, got {value!r}"
        return None

    def from_toml(self, raw: object, folder: Path) -> object:
        """The value of what a file says; a path is taken from the file's own folder. What cannot be
        turned into one stays as it is, and `complaint` tells."""
        if isinstance(raw, str) and (self.is_size or self.type is Path):
            return parse_size(raw) if self.is_size else folder / _expanded(raw)
        if isinstance(raw, list) and self.type is tuple:
            return tuple(raw)
        return float(raw) if self.type is float and type(raw) is int else raw

    def from_text(self, text: str) -> object:
        """The value of what a variable says. As `from_toml` if it cannot be one."""
        if self.is_size:
            return parse_size(text)
        if self.type is tuple:
            return () if text == "none" else tuple(part.strip() for part in text.split(","))
        if self.type is bool:
            return {"true": True, "false": False}.get(text.lower(), text)
        try:
            return _expanded(text) if self.type is Path else self.type(text)
        except ValueError:
            return text

    def _words(self) -> str:
        if self.is_size:
            return 'bytes or a size such as "8GiB"'
        return {
            bool: "true or false",
            int: "a whole number",
            float: "a number",
            tuple: "a list of texts",
        }.get(self.type, "a text")


class Key(NamedTuple):
    """One setting."""

    section: str
    name: str
    of: type  # class of the section
    kind: Kind
    default: Any
    unset: str  # what None means, in words

    def __str__(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def variable(self) -> str:
        """KVWEAVE_SECTION_KEY; KVWEAVE_MODEL for the key that is named like its section."""
        parts = dict.fromkeys(("KVWEAVE", self.section.upper(), self.name.upper()))
        return "_".join(parts)


@functools.cache
def known_keys() -> dict[str, Key]:
    """Every key by its dotted name, in the order in which they are shown."""
    found = {}
    for section, of in get_type_hints(WeaveConfig).items():
        hints = get_type_hints(of, include_extras=True)
        for each in fields(of):
            words = each.metadata.get("unset", "")
            kind = Kind.of(hints[each.name])
            key = Key(section, each.name, of, kind, each.default, words)
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
    path = _find_file(file, env)
    values: dict[str, Any] = {}
    sources = dict.fromkeys(known_keys(), "default")
    layers = [
        [] if path is None else _from_file(path),
        _from_variables(env),
        [(known_keys()[key], flag.value, flag.name) for key, flag in (flags or {}).items()],
    ]
    for key, value, source in (each for layer in layers for each in layer):
        complaint = key.kind.complaint(value)
        if complaint is not None:
            raise ConfigError(f"{key} {complaint} ({source})")
        values[str(key)], sources[str(key)] = value, source
    sections = {
        section: of(
            **{k.name: values[n] for n, k in known_keys().items() if k.of is of and n in values}
        )
        for section, of in get_type_hints(WeaveConfig).items()
    }
    return EffectiveConfig(WeaveConfig(**sections), sources, path, frozenset(flags or ()))


Given = tuple[Key, Any, str]  # key, value, where it comes from


def _find_file(named: Path | None, env: Mapping[str, str]) -> Path | None:
    """The file to read. One that is named and not there is an error when it is read."""
    if named is not None or env.get(FILE_VARIABLE):
        return named or _expanded(env[FILE_VARIABLE])
    usual = (Path(FILE_NAME), config_folder() / FILE_NAME)
    # os.path: a folder that may not be looked into has no file, Path.is_file would raise
    return next((path for path in usual if os.path.isfile(path)), None)


def _expanded(text: str) -> Path:
    """With ~ as the home folder, where that is known."""
    return Path(os.path.expanduser(text))


def _from_file(path: Path) -> Iterator[Given]:
    try:
        document = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"cannot read the settings in {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, or no TOML
        raise ConfigError(f"{path} is no TOML: {error}") from error
    sections = list(dict.fromkeys(key.section for key in known_keys().values()))
    for section, table in document.items():
        if section not in sections:
            raise ConfigError(f"{path}: no section [{section}]; known: {', '.join(sections)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {section} is a section; write [{section}] and its keys")
        for name, raw in table.items():
            key = known_keys().get(f"{section}.{name}")
            if key is None:
                known = [k.name for k in known_keys().values() if k.section == section]
                raise ConfigError(
                    f"{path}: no key {name!r} in [{section}]; known: {', '.join(known)}"
                )
            yield key, key.kind.from_toml(raw, path.parent), path.name


def _from_variables(env: Mapping[str, str]) -> Iterator[Given]:
    known = {key.variable: key for key in known_keys().values()}
    for name in sorted(env):
        text = env[name]
        if not name.startswith("KVWEAVE_") or name in OTHER_VARIABLES or not text:
            continue
        if _is_service_link(name, text):
            continue
        if name not in known:
            near = [
                v for v, key in known.items() if name.startswith(f"KVWEAVE_{key.section.upper()}_")
            ]
            raise ConfigError(f"{name} is no setting; known: {', '.join(near or known)}")
        yield known[name], known[name].kind.from_text(text), name


def _is_service_link(name: str, text: str) -> bool:
    """Kubernetes tells every container of a service "kvweave" or "kvweave-…" where it is, in
    variables that look like ours: KVWEAVE_SERVICE_HOST, KVWEAVE_PORT=tcp://…"""
    of_service = r"KVWEAVE_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)"
    return (
        re.fullmatch(of_service, name) is not None
        or re.match("(tcp|udp|sctp)://", text) is not None
    )


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def parse_size(text: str) -> int | str:
    """Bytes of "8GiB", "64 MB" or "1024"; the text itself if it is no size."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?) *([a-z]*)", text.strip().lower())
    if found is None or found[2] not in _UNITS:
        return text
    return (
        int(float(found[1]) * _UNITS[found[2]])
        if "." in found[1]
        else int(found[1]) * _UNITS[found[2]]
    )
