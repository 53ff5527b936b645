"""Opening models and knowledge bases from the command line: names become folders here."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvweave.config import WeaveConfig
from kvweave.errors import CorpusError
from kvweave.model.files.model_cache import Progress, PullStep, no_progress, stages

if TYPE_CHECKING:
    from kvweave.app.model_set import ModelSet
    from kvweave.app.weave import Weave
    from kvweave.calibrate.asked_kb import AskedKB
    from kvweave.corpus.bert_encoder import EncoderWeights
    from kvweave.corpus.embedder import Embedder
    from kvweave.text.tokenizer import Tokenizer


def check_knowledge_base(folder: Path) -> None:
    """Refuse a folder that holds no knowledge base: a question must not make an empty one."""
    from kvweave.corpus.settings import read_settings

    if read_settings(folder) is None:
        raise CorpusError(
            f"no knowledge base in {folder}; make one: kvweave ingest PATH --kb {folder}"
        )


def find_tokenizer(model: str | None) -> "Tokenizer":
    """The tokenizer of a model folder, an embedded model or a hub id."""
    from kvweave.text.tokenizer import Tokenizer

    assert model is not None, "with_model named one"
    if Path(model).is_dir():
        return Tokenizer(Path(model))
    from kvweave.model.files.locate import locate

    return Tokenizer(locate(model))


def find_embedder(name: str, weights: "EncoderWeights" = "auto") -> "Embedder":
    """A sentence-transformers folder, an embedded model, or a hub id (org/name). `weights`: as
    `library.embedder_weights`."""
    from kvweave.corpus.embedder import SentenceEmbedder

    if Path(name).is_dir():
        return SentenceEmbedder(Path(name).resolve(), weights=weights)
    if "/" in name:
        return SentenceEmbedder(name, weights=weights)
    from kvweave.model.files.locate import locate

    return SentenceEmbedder(locate(name), name=name, weights=weights)


def open_weave(*, config: WeaveConfig, kb: Path | None = None) -> "Weave":
    """Load the model, and the knowledge base if there is one; with a spinner if a person is
    watching."""
    from rich.console import Console
    from rich.markup import escape

    config = with_model(config)
    console = Console(stderr=True)
    if not console.is_terminal:
        return _open(config, kb)
    with console.status(f"loading {escape(str(config.model.model))} …"):
        return _open(config, kb)


def open_models(config: WeaveConfig) -> "Weave | ModelSet":
    """Load all models of a server: the one that `open_weave` loads, and the others."""
    others = config.server.models or ()
    if not others:
        return open_weave(config=config)
    from kvweave.app.model_set import ModelSet

    choices = [config.model, *(replace(config.model, model=name) for name in others)]
    named = [with_model(replace(config, model=choice)).model.model for choice in choices]
    return ModelSet.from_config(config, [str(name) for name in named])


def _open(config: WeaveConfig, kb: Path | None) -> "Weave":
    from kvweave.app.weave import Weave  # brings torch, which takes a second

    return Weave.from_config(config, kb)


@contextmanager
def open_asked_kb(folder: Path | None, tokenizer: "Tokenizer") -> "Iterator[AskedKB | None]":
    """The knowledge base in `folder`, to be read; None without one."""
    if folder is None:
        yield None
        return
    from kvweave.app.library.neighbours import nearest_by_tokens, open_table
    from kvweave.calibrate.asked_kb import AskedKB
    from kvweave.corpus.knowledge_base import KnowledgeBase

    with KnowledgeBase.open(folder) as listing:
        embedder = find_embedder(listing.settings.embedder)
    with ExitStack() as stack:
        kb = stack.enter_context(KnowledgeBase.open(folder, tokenizer=tokenizer, embedder=embedder))
        table = open_table(folder)
        if table is not None:
            stack.callback(table.close)
        yield AskedKB(kb, tokenizer, partial(nearest_by_tokens, kb, table))


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
