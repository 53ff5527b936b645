"""Getting models on this machine while a person watches."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import click

from kvweave.config import WeaveConfig
from kvweave.model.files.model_cache import Progress, PullStep, no_progress, stages


def with_model(config: WeaveConfig) -> WeaveConfig:
    """The configuration with a model named and on this machine: what nobody named is the default,
    what has to be downloaded or converted is, with a bar. Raises ModelError."""
    from kvweave.model.files.embedded import EMBEDDED, default_model
    from kvweave.model.files.locate import locate

    name = config.model.model
    if name is None:
        name = default_model(watch=pull_bar)
    elif name in EMBEDDED or name.lower().endswith(".gguf"):  # others show their own progress
        with pull_bar(name) as report:
            locate(name, progress=report)
    return replace(config, model=replace(config.model, model=name))


@contextmanager
def pull_bar(name: str) -> Iterator[Progress]:
    """A bar on a terminal, one line per stage elsewhere; nothing where nothing is done, or where a
    server that starts tells of its stages."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        SpinnerColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as RichProgress

    console = Console(stderr=True)
    if stages.isEnabledFor(logging.INFO):
        yield no_progress
        return
    if not console.is_terminal:
        seen: set[str] = set()

        def say(step: PullStep) -> None:
            if step.what not in seen:
                seen.add(step.what)
                size = f" {megabytes(step.total_bytes)}" if step.total_bytes else ""
                parts = f" in {step.num_parts} parts" if step.num_parts > 1 else ""
                click.echo(f"{name}: {step.what}{size}{parts}", err=True)

        yield say
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with RichProgress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=None, visible=False)

        def draw(step: PullStep) -> None:
            parts = f" ({step.done_parts}/{step.num_parts})" if step.num_parts > 1 else ""
            bar.update(
                task,
                description=f"{name}: {step.what}{parts}",
                completed=step.done_bytes,
                total=step.total_bytes or None,
                visible=True,
            )

        yield draw


def megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"
