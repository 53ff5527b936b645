"""Options that several commands share; and how options set keys of the configuration."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from kvweave.config import EffectiveConfig, Flag, known_keys, load_config
from kvweave.config_keys import MOST, Key
from kvweave.corpus.metadata import parse_pairs

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]
UNITS = {"-mb": 1 << 20, "-gb": 1 << 30}  # of a size, by how its flag ends


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

    `to_key` makes the key's value of what was typed, where the two differ; `also` does so for
    further keys, and leaves one alone that it gives None for.
    """

    def __init__(
        self,
        names: list[str],
        *,
        key: str,
        to_key: Callable[[Any], Any],
        also: Mapping[str, Callable[[Any], Any]] | None = None,
        **attributes: Any,
    ) -> None:
        super().__init__(names, **attributes)
        self.key = key
        self.to_keys = {key: to_key, **(also or {})}


def config_option(name: str, **attributes: Any) -> Decorator:
    """An option for a key of the configuration, whose `setting` says what `click.option` wants."""
    return _option(known_keys()[name], attributes)


def _option(key: Key, attributes: dict[str, Any]) -> Decorator:
    """An option that sets `key`; a key of no section is an argument of the command itself."""
    flag, _, metavar = key.flag.partition(" ")
    unit = UNITS.get(flag[-3:], 1) if key.kind.is_size else 1
    usual = _default_words(key, unit)
    is_repeatable = key.kind.type in (tuple, Mapping)
    words = f"{key.help} ({usual})" if usual else key.help
    made: dict[str, Any] = {
        "help": f"{words}. Repeatable." if is_repeatable else f"{words}.",
        "type": _type_of(key),
        "metavar": metavar or None,
        "multiple": is_repeatable,
    }
    to_key = _to_key(key, unit)
    if key.section:
        made |= {"cls": ConfigOption, "key": str(key), "to_key": to_key}
    else:
        made |= {"is_flag": key.kind.type is bool, "callback": lambda *given: to_key(given[-1])}
    return click.option(flag, **(made | attributes))


def _default_words(key: Key, unit: int) -> str:
    if isinstance(key.default, bool):
        return ("off", "on")[key.default] if key.section else ""
    return key_words(key, key.default, unit)


def question_options(
    *names: str, without: Sequence[str] = (), question: type | None = None
) -> Decorator:
    """The options of a question called `names`, or all that have a flag but those left out."""
    from kvweave.app.answer import question as questions

    known = questions.question_options(question or questions.Question)
    chosen = names or [n for n, each in known.items() if each.key.flag and n not in without]
    return all_of(*(_option(known[name].key, {}) for name in chosen))


def config_options(*names: str) -> Decorator:
    """Several of `config_option`, in this order."""
    return all_of(*map(config_option, names))


def typed_options(
    effective: EffectiveConfig, arguments: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The options of a question that were typed, by the names of its fields. Takes those that are
    no settings out of a command's `arguments`."""
    from kvweave.app.answer.question import question_options as options_of

    typed = {}
    for name, each in options_of().items():
        if str(each.key) in effective.flags:
            typed[name] = effective.config.value(str(each.key))
        elif arguments is not None and (value := arguments.pop(name, None)):
            typed[name] = value
    return typed


def key_words(key: Key, value: Any, unit: int = 1) -> str:
    """A value of a key as people read it; a size in units of so many bytes, or in its own."""
    if value is None:
        return key.unset
    if key.kind.is_size:
        return f"{value // unit:,}" if unit > 1 else _size_words(value)
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    if isinstance(value, bool):
        return str(value).lower()  # as the file has it
    return f"{value:g}" if isinstance(value, float) else str(value)


def _size_words(num_bytes: int) -> str:
    """The number in the largest unit of which it is a whole one."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes % size == 0:
            return f"{num_bytes // size:,} {unit}"
    return f"{num_bytes:,} B"


def _type_of(key: Key) -> Any:
    kind, bounds = key.kind, key.kind.range
    if kind.known:
        return click.Choice(kind.known)
    if kind.is_size:
        return Amount(0.001)
    if kind.type is Path:
        is_file = key.name.endswith("_file")
        return click.Path(path_type=Path, file_okay=is_file, dir_okay=not is_file)
    if kind.type in (tuple, Mapping):
        return str
    if bounds is None or key.default is None:  # the configuration judges those
        return kind.type
    if kind.type is int:
        most = None if bounds.most == math.inf else int(bounds.most)
        return click.IntRange(int(bounds.least), most)
    return Amount(bounds.least)


def _to_key(key: Key, unit: int) -> Callable[[Any], Any]:
    if key.kind.is_size:
        return lambda amount: int(amount * unit)
    if key.kind.type is Mapping:
        return lambda pairs: parse_pairs(pairs, key.flag.partition(" ")[0])
    if key.kind.type is tuple:
        return lambda names: () if names == ("none",) else names
    return lambda value: value


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
    """Give a command the model alone of what `pass_config` gives: `model`, `device`, `dtype` and
    `quant`."""

    @functools.wraps(command)
    def run(*args: Any, effective: EffectiveConfig, **values: Any) -> Any:
        return command(*args, **model_of(effective), **values)

    return pass_config(run)


def model_of(effective: EffectiveConfig) -> dict[str, str]:
    """`model`, `device`, `dtype` and `quant` that a configuration names."""
    choice = effective.config.model
    return {name: getattr(choice, name) for name in ("model", "device", "dtype", "quant")}


def all_of(*options: Decorator) -> Decorator:
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


def kb_folder_option(words: str, *, exists: bool = False, **attributes: Any) -> Decorator:
    """The folder of a knowledge base, as --kb, which a command gets as `kb_folder`."""
    folder = click.Path(path_type=Path, file_okay=False, exists=exists)
    return click.option("--kb", "kb_folder", type=folder, help=words, **attributes)


kb_option = kb_folder_option("Folder of the knowledge base.", default=Path("kb"), show_default=True)
api_key_option = click.option(
    "--qdrant-api-key", envvar="QDRANT_API_KEY", help="For an index on a Qdrant server."
)
model_options = config_options("model.model", "model.device", "model.dtype", "model.quant")
# where chunk KV is kept besides host memory
REMOTE_KEYS = ("store.redis_url", "store.s3_url", "store.s3_endpoint")
store_options = config_options("store.disk_folder", *REMOTE_KEYS)
sampling_options = config_options(*(k for k in known_keys() if k.startswith("sampling.")))
