"""Opening models and knowledge bases from the command line: names become folders here."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvweave.cli.pulling import with_model
from kvweave.config import WeaveConfig
from kvweave.errors import CorpusError

if TYPE_CHECKING:
    from kvweave.app.model_set import ModelSet
    from kvweave.app.weave import Weave
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
    """As `open_weave`, with the models that a server has besides."""
    others = config.server.models or ()
    if not others:
        return open_weave(config=config)
    from kvweave.app.model_set import ModelSet

    choices = [config.model, *(replace(config.model, model=name) for name in others)]
    named = [with_model(replace(config, model=choice)).model.model for choice in choices]
    return ModelSet.configured(config, [str(name) for name in named])


def _open(config: WeaveConfig, kb: Path | None) -> "Weave":
    from kvweave.app.weave import Weave  # brings torch, which takes a second

    return Weave.configured(config, kb)
