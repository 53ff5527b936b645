"""`kvweave config`: the settings that are in force, and where each comes from."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from kvweave.cli import ask, gateway, ingest, serve
from kvweave.cli.options import ConfigOption, json_option, pass_config
from kvweave.config import EffectiveConfig, Key, known_keys
from kvweave.errors import ModelNotFound
from kvweave.kv.tiers.config import masked_url


@click.group()
def command() -> None:
    """Show the settings that are in force."""


@command.command()
@json_option
@pass_config
def show(as_json: bool, effective: EffectiveConfig) -> None:
    """Show every setting, its value and where that comes from.

    From a default, from the model's generation_config.json, from kvweave.toml, from a variable, or
    from a flag: those of ask, ingest, serve and gateway are taken here too.
    """
    effective = _with_model(effective)
    rows = [(key, _public(key, effective.config.value(name))) for name, key in known_keys().items()]
    if as_json:
        told = {
            str(key): {"value": value, "from": effective.sources[str(key)]} for key, value in rows
        }
        file = None if effective.file is None else str(effective.file.absolute())
        click.echo(json.dumps({"file": file, "settings": told}, indent=2))
        return
    from kvweave.cli.tables import make_table, table_console

    cells = [(str(key), _words(key, value), effective.sources[str(key)]) for key, value in rows]
    set_here = [row for row in cells if row[-1] != "default"]
    console = table_console()
    console.print(make_table(("setting", "value", "from"), cells, prose=("value",), bold=set_here))
    file = "no kvweave.toml" if effective.file is None else f"read {effective.file.absolute()}"
    console.print(file, style="dim", soft_wrap=True)


def _with_model(effective: EffectiveConfig) -> EffectiveConfig:
    """With how the model's makers want answers drawn, where nothing else says it; as it is if the
    model is not on this machine."""
    from kvweave.model.files.default_model import DEFAULT
    from kvweave.model.files.generation import FILE, read_generation, unless_greedy
    from kvweave.model.files.locate import locate

    config = effective.config
    model = config.model.model or DEFAULT
    if model.lower().endswith(".gguf"):
        return effective  # its folder may not be made yet, which takes minutes
    try:
        told = read_generation(locate(model, pull=False))
    except ModelNotFound:
        return effective
    told = {
        name: value
        for name, value in unless_greedy(told, config.sampling.temperature).items()
        if getattr(config.sampling, name) is None
    }
    sampling = replace(config.sampling, **told)
    sources = {**effective.sources, **{f"sampling.{name}": FILE for name in told}}
    return replace(effective, config=replace(config, sampling=sampling), sources=sources)


def _public(key: Key, value: Any) -> Any:
    """As JSON has it, without passwords."""
    if key.kind.is_masked and value is not None:
        return masked_url(value)
    return str(value) if isinstance(value, Path) else value


def _words(key: Key, value: Any) -> str:
    if value is None:
        return f"({key.unset})"
    if key.kind.is_size:
        return _size(value)
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    if isinstance(value, bool):
        return str(value).lower()  # as the file has it
    return f"{value:g}" if isinstance(value, float) else str(value)


def _size(num_bytes: int) -> str:
    """In the largest unit of which it is a whole number."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes % size == 0:
            return f"{num_bytes // size:,} {unit}"
    return f"{num_bytes:,} B"


def _add_flags() -> None:
    """Let `show` take the flags of the other commands, each of them once."""
    taken: set[str] = set()
    for other in (ask.command, ingest.command, serve.command, gateway.command):
        for option in other.params:
            if isinstance(option, ConfigOption) and option.opts[-1] not in taken:
                taken.add(option.opts[-1])
                same = copy.copy(option)
                same.help, same.show_default = f"Sets {option.key}.", False
                show.params.append(same)


_add_flags()
