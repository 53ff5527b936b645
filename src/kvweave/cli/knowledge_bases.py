"""Opening a knowledge base from the command line: names become folders here, and only here."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvweave.errors import CorpusError

if TYPE_CHECKING:
    from kvweave.corpus.embedder import Embedder
    from kvweave.text.tokenizer import Tokenizer

kb_option = click.option(
    "--kb",
    "kb_folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("kb"),
    show_default=True,
    help="Folder of the knowledge base.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON document.")
api_key_option = click.option(
    "--qdrant-api-key", envvar="QDRANT_API_KEY", help="For an index on a Qdrant server."
)


def check_knowledge_base(folder: Path) -> None:
    """Refuse a folder that holds no knowledge base: who asks does not want an empty one made."""
    from kvweave.corpus.settings import read_settings

    if read_settings(folder) is None:
        raise CorpusError(
            f"no knowledge base in {folder}; make one: kvweave ingest PATH --kb {folder}"
        )


def find_tokenizer(model: str) -> "Tokenizer":
    """The tokenizer of a model folder, an embedded model or a hub id."""
    from kvweave.text.tokenizer import Tokenizer

    if Path(model).is_dir():
        return Tokenizer(Path(model))
    from kvweave.model.files.locate import locate

    return Tokenizer(locate(model))


def find_embedder(name: str) -> "Embedder":
    """A sentence-transformers folder, an embedded model, or a hub id (org/name)."""
    from kvweave.corpus.embedder import SentenceEmbedder

    if Path(name).is_dir():
        return SentenceEmbedder(Path(name).resolve())
    if "/" in name:
        return SentenceEmbedder(name)
    from kvweave.model.files.locate import locate

    return SentenceEmbedder(locate(name), name=name)
