"""Embeds a list of texts once and keeps the vectors in shards, so that a killed run goes on."""

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from common.files import CACHE
from kvweave.corpus.embedder import Embedder, Vectors

SHARD = 512  # texts per file: a kill costs about ten seconds of work


def cached_vectors(
    name: str, embedder: Embedder, texts: Sequence[str], embed: Callable[[Sequence[str]], Vectors]
) -> Vectors:
    """Vectors of all `texts`. A shard is keyed by its texts, the embedder and what rounds its
    products: never stale."""
    folder = CACHE / "vectors" / name
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[Vectors] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as progress:
        for start in progress.track(range(0, len(texts), SHARD), description=f"embed {name}"):
            batch = texts[start : start + SHARD]
            parts.append(_shard(folder, embedder, batch, embed))
    return np.concatenate(parts)


def _shard(
    folder: Path,
    embedder: Embedder,
    texts: Sequence[str],
    embed: Callable[[Sequence[str]], Vectors],
) -> Vectors:
    words = getattr(embedder, "weights_words", "float32")
    rounded = () if words == "float32" else (words,)  # no part of the identity
    made = "\0".join([embedder.identity, *rounded, *texts])
    key = hashlib.sha256(made.encode()).hexdigest()[:24]
    path = folder / f"{key}.npy"
    if not path.is_file():
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        with temporary.open("wb") as file:
            np.save(file, embed(texts))
        temporary.replace(path)
    vectors: Vectors = np.load(path)
    return vectors
