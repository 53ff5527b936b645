"""Options that several commands share; and how options set keys of the configuration."""

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from kvweave.config import (
    MOST,
    EffectiveConfig,
    Flag,
    QualitySettings,
    WeaveConfig,
    known_keys,
    load_config,
)

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]


class Amount(click.FloatRange):
    """A number from `least` to MOST. Infinity and what is no number at all are refused: click's
    own range lets both through."""

    def __init__(self, least: float) -> None:
        super().__init__(min=least, max=MOST)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


class ConfigOption(click.Option):
    """An option that sets a key of the configuration; `pass_config` hands the result over.

    `to_key` makes the key's value out of the option's, where the two have other units; `also` does
    so for further keys, and leaves one alone that it gives None for. The default is the key's own,
    and only `--help` shows it.
    """

    def __init__(
        self,
        names: list[str],
        *,
        key: str,
        to_key: Callable[[Any], Any] = lambda value: value,
        also: Mapping[str, Callable[[Any], Any]] | None = None,
        **attributes: Any,
    ) -> None:
        default = known_keys()[key].default if attributes.get("show_default") else None
        super().__init__(names, default=default, **attributes)
        self.key = key
        self.to_keys = {key: to_key, **(also or {})}


def config_option(key: str, *names: str, **attributes: Any) -> Decorator:
    """As `click.option`, for a key of the configuration."""
    return click.option(*names, cls=ConfigOption, key=key, **attributes)


def pass_config(command: Command) -> Command:
    """Give a command `effective`, an EffectiveConfig made of file, variables and its own
    `config_option`s, which it gets in no other shape; and add --config. Stands last, right above
    the function."""

    @functools.wraps(command)
    def run(*args: Any, config_file: Path | None, **values: Any) -> Any:
        ctx = click.get_current_context()
        flags: dict[str, Flag] = {}
        for option in ctx.command.params:
            if isinstance(option, ConfigOption):
                assert option.name is not None, "every option has a name"
                value = values.pop(option.name)
                if ctx.get_parameter_source(option.name) is ParameterSource.COMMANDLINE:
                    typed = option.secondary_opts if value is False else option.opts
                    made = {key: to_key(value) for key, to_key in option.to_keys.items()}
                    flags |= {k: Flag(typed[-1], v) for k, v in made.items() if v is not None}
        return command(*args, effective=load_config(config_file, flags=flags), **values)

    option = click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Settings, in place of kvweave.toml.",
    )
    return option(run)


def pass_model(command: Command) -> Command:
    """As `pass_config`, for a command that needs the model alone: gives it `model`, `device`,
    `dtype` and `quant`."""

    @functools.wraps(command)
    def run(*args: Any, effective: EffectiveConfig, **values: Any) -> Any:
        return command(*args, **model_of(effective), **values)

    return pass_config(run)


def model_of(effective: EffectiveConfig) -> dict[str, str]:
    """`model`, `device`, `dtype` and `quant` that a configuration names."""
    choice = effective.config.model
    return {name: getattr(choice, name) for name in ("model", "device", "dtype", "quant")}


def _all_of(*options: Decorator) -> Decorator:
    """Several options as one decorator, in this order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


url_option = click.option(
    "--url",
    envvar="KVWEAVE_URL",
    metavar="URL",
    help="Of a running server that does it; --kb is a name there. KVWEAVE_API_KEY is its key.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document.")
kb_option = click.option(
    "--kb",
    "kb_folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("kb"),
    show_default=True,
    help="Folder of the knowledge base.",
)
api_key_option = click.option(
    "--qdrant-api-key", envvar="QDRANT_API_KEY", help="For an index on a Qdrant server."
)
chunks_option = config_option(
    "library.k", "--chunks", type=click.IntRange(1, 100), help="How many to take (5)."
)
search_options = _all_of(  # how chunks are found
    config_option(
        "library.retrieval",
        "--retrieval",
        type=click.Choice(["vector", "words", "hybrid"]),
        help="Find chunks by vector, by words or by both (vector).",
    ),
    config_option(
        "library.min_score",
        "--min-score",
        type=float,
        help="Leave out chunks with a lower score (any).",
    ),
    config_option(
        "library.reranker",
        "--reranker",
        metavar="MODEL",
        help="A cross-encoder that orders what was found: a folder or a hub id (none).",
    ),
)
filter_option = click.option(
    "--filter",
    "filters",
    multiple=True,
    metavar="KEY=VALUE",
    help="Only documents with this metadata. Repeatable.",
)
speculate_option = config_option(
    "speculation.mode",
    "--speculate",
    type=click.Choice(["auto", "on", "off"]),
    help="Compute prompts while their chunks are searched for: where it pays, always, never.",
)
# their values are judged where they are used
_NAMING = (
    "An embedded name (see `kvweave models ls`), a folder, a .gguf file or a hub id.  "
    f"[default: {known_keys()['model.model'].unset}]"
)
_computing_options = _all_of(
    config_option("model.device", "--device", help="auto, cpu, cuda or cuda:N."),
    config_option("model.dtype", "--dtype", help="auto, float32, bfloat16 or float16."),
    config_option(
        "model.quant",
        "--quant",
        help="none, int8 (CPU), or auto: int8 where that is faster and under 0.005 nats per token.",
    ),
)
model_options = _all_of(config_option("model.model", "--model", help=_NAMING), _computing_options)
models_options = _all_of(  # of a server, which may have several
    config_option(
        "model.model",
        "--model",
        multiple=True,
        to_key=lambda names: names[0],
        also={"server.models": lambda names: names[1:] or None},
        help=f"{_NAMING} Repeatable: the first answers those who name none.",
    ),
    _computing_options,
)
system_option = config_option(
    "model.system",
    "--system",
    help="Instructions in place of kvweave's own; chunk KV belongs to them.",
)
reuse_option = config_option(
    "quality.reuse",
    "--reuse",
    metavar="STRATEGY[:RATIO]",
    help="auto, full, prefix, reuse, weave:0.15, qcfuse, … (auto where KV is stored, else prefix).",
)


def configured_options(config: WeaveConfig) -> dict[str, Any]:
    """The options of a question that a configuration has, by their names."""
    from kvweave.app.answer.question import CONFIGURED

    return {name: config.value(key) for name, key in CONFIGURED.items()}


planning_options = _all_of(  # what a user allows the planner
    config_option(
        "quality.bound",
        "--bound",
        type=click.FloatRange(min=0.0),
        help="How far auto may let answers drift: mean KL to full prefill, nats per token "
        f"({QualitySettings().bound:g}).",
    ),
    config_option(
        "quality.order",
        "--order",
        type=click.Choice(["as_found", "free", "auto"]),
        help="May chunks move to where more is exact? auto: if calibration found it harmless.",
    ),
)
store_options = _all_of(  # where chunk KV is kept besides host memory
    config_option(
        "store.disk_folder",
        "--disk-folder",
        type=click.Path(path_type=Path, file_okay=False),
        help="Folder of chunk KV (kv in each knowledge base).",
    ),
    config_option(
        "store.redis_url",
        "--redis-url",
        metavar="URL",
        help="Share chunk KV on a Valkey or Redis server. KVWEAVE_STORE_REDIS_URL does the same.",
    ),
    config_option(
        "store.s3_url", "--s3-url", metavar="URL", help="Share chunk KV in s3://BUCKET/PREFIX."
    ),
    config_option(
        "store.s3_endpoint",
        "--s3-endpoint",
        metavar="URL",
        help="Of an S3-compatible store (Amazon's).",
    ),
)
