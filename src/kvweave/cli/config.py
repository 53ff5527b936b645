"""`kvweave config`: the settings that are in force, and where each comes from."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from kvweave.cli.options import all_of, config_option, json_option, key_words, pass_config
from kvweave.config import EffectiveConfig, known_keys
from kvweave.config_keys import Key
from kvweave.errors import ModelNotFound
from kvweave.kv.tiers.config import masked_url


@click.group()
def command() -> None:
    """Show the settings that are in force."""


@command.command()
@json_option
@all_of(*(config_option(str(k), help=f"Sets {k}.") for k in known_keys().values() if k.flag))
@pass_config
def show(as_json: bool, effective: EffectiveConfig) -> None:
    """Show every setting, its value and where that comes from.

    From a default, from the model's generation_config.json, from kvweave.toml, from a variable, or
    from a flag: those of ask, ingest, serve and gateway are taken here too.
    """
    effective = _with_model(effective)
    rows = [
        (key, _json_value(key, effective.config.value(name))) for name, key in known_keys().items()
    ]
    if as_json:
        told = {
            str(key): {"value": value, "from": effective.sources[str(key)]} for key, value in rows
        }
        file = None if effective.file is None else str(effective.file.absolute())
        click.echo(json.dumps({"file": file, "settings": told}, indent=2))
        return
    from kvweave.cli.tables import make_table, table_console

    cells = [
        (
            str(key),
            f"({key.unset})" if value is None else key_words(key, value),
            effective.sources[str(key)],
        )
        for key, value in rows
    ]
    set_here = [row for row in cells if row[-1] != "default"]
    console = table_console()
    console.print(make_table(("setting", "value", "from"), cells, prose=("value",), bold=set_here))
    file = "no kvweave.toml" if effective.file is None else f"read {effective.file.absolute()}"
    console.print(file, style="dim", soft_wrap=True)


def _with_model(effective: EffectiveConfig) -> EffectiveConfig:
    """With how the model's makers want answers drawn, where nothing else says it; as it is if the
    model is not on this machine."""
    from kvweave.model.files.embedded import DEFAULT
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


def _json_value(key: Key, value: Any) -> Any:
    """Return the value for JSON, without passwords."""
    if key.kind.is_masked and value is not None:
        return masked_url(value)
    return str(value) if isinstance(value, Path) else value
