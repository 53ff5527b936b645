"""kb.json: what a knowledge base was made with, checked at every opening, and its usual order."""

import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from kvweave.corpus.disk_files import as_corpus_error, atomic_file
from kvweave.corpus.index import AUTO
from kvweave.errors import CorpusDamaged, CorpusError, CorpusMismatch

VERSION = 1
FILE = "kb.json"
CHUNK_TOKENS = 256
LARGEST = 1 << 20  # of sizes
UID = re.compile("[0-9a-f]{0,32}")


@dataclass(frozen=True, slots=True)
class KnowledgeBaseSettings:
    """All of it fixes bytes that are stored, so none of it changes later, except `index` and
    `order`."""

    tokenizer: str  # fingerprint of the serving model's tokenizer
    embedder: str  # the name to load the embedder by
    embedder_identity: str  # what that name meant when the vectors were made
    dim: int  # of the vectors
    chunk_tokens: int = CHUNK_TOKENS  # at most so many tokens per chunk, title line included
    index: str = AUTO  # auto, flat, ivf, hnsw, or the URL of a Qdrant server
    uid: str = ""  # tells collections of a shared server apart
    order: str | None = None  # of chunks, for questions that do not say it; None: as configured
    version: int = VERSION


def write_settings(folder: Path, settings: KnowledgeBaseSettings) -> None:
    with atomic_file(folder / FILE) as file:
        kept = asdict(settings)
        if settings.order is None:  # an older kvweave, which does not know it, reads the rest
            del kept["order"]
        file.write(json.dumps(kept, indent=1).encode() + b"\n")


def read_settings(folder: Path) -> KnowledgeBaseSettings | None:
    """None when there is no knowledge base in the folder."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        stored = json.loads(path.read_text())
        known = {f.name for f in fields(KnowledgeBaseSettings)}
        if stored["version"] != VERSION:
            raise CorpusError(
                f"{path} has version {stored['version']}, this kvweave reads version {VERSION}; "
                "use the kvweave that wrote it, or ingest into a new folder"
            )
        unknown = sorted(set(stored) - known)
        if unknown:
            raise CorpusError(f"{path} has unknown settings: {', '.join(unknown)}")
        settings = KnowledgeBaseSettings(**stored)
        _check_values(settings)
        return settings
    except (ValueError, KeyError, TypeError) as error:
        raise CorpusDamaged(
            f"{path} does not parse ({error!r}); restore it or ingest into a new folder"
        ) from error
    except OSError as error:
        raise as_corpus_error(error, f"cannot read {path}") from error


def _check_values(settings: KnowledgeBaseSettings) -> None:
    """Raise ValueError for what no kvweave wrote: the file may come from anybody."""
    names = (settings.tokenizer, settings.embedder, settings.embedder_identity, settings.index)
    sizes = (settings.dim, settings.chunk_tokens)
    if not all(isinstance(name, str) for name in (*names, settings.uid)):
        raise ValueError("a name that is no text")
    if not all(type(size) is int and 0 < size <= LARGEST for size in sizes):
        raise ValueError(f"a size that is not between 1 and {LARGEST}")
    if not UID.fullmatch(settings.uid):
        raise ValueError("a uid that is none")


def check_settings(
    folder: Path,
    stored: KnowledgeBaseSettings,
    *,
    tokenizer: str | None = None,
    embedder_identity: str | None = None,
    chunk_tokens: int | None = None,
) -> None:
    """Refuse what does not fit the bytes in the folder. None means the caller does not mind."""
    way_out = "ingest into a new folder"
    if tokenizer is not None and tokenizer != stored.tokenizer:
        raise CorpusMismatch(
            f"{folder} was cut with another tokenizer ({stored.tokenizer[:8]}…, this model has "
            f"{tokenizer[:8]}…); name the model it was made for (--model smollm2 if that was "
            f"the default then), or {way_out}"
        )
    if embedder_identity is not None and embedder_identity != stored.embedder_identity:
        raise CorpusMismatch(
            f"{folder} was embedded with {stored.embedder!r} ({stored.embedder_identity[:11]}…), "
            f"not with {embedder_identity[:11]}…; use that embedder, or {way_out}"
        )
    if chunk_tokens is not None and chunk_tokens != stored.chunk_tokens:
        raise CorpusMismatch(
            f"{folder} has chunks of at most {stored.chunk_tokens} tokens, not {chunk_tokens}; "
            f"leave the size away, or {way_out}"
        )
