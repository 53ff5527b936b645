"""Text to unit vectors, through sentence-transformers.

Which words a model wants in front of a query or a passage comes from the model's own files; a few
families that leave it to their README are in INSTRUCTIONS.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvweave.errors import ConfigError, ModelNotFound

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Vectors = NDArray[np.float32]  # [N, D], rows of length 1


class Embedder(Protocol):
    """Turns text into vectors. May be called from any thread, one call at a time.

    `identity` changes whenever the same text could give another vector; a knowledge base refuses
    an embedder with another identity than the one it was built with.
    """

    @property
    def name(self) -> str: ...
    @property
    def identity(self) -> str: ...
    @property
    def dim(self) -> int: ...

    def embed_passages(self, texts: Sequence[str]) -> Vectors: ...
    def embed_query(self, text: str) -> Vectors:
        """One vector, [D]."""
        ...


class Instructions(NamedTuple):
    """What a model wants to read in front of the text."""

    query: str = ""
    passage: str = ""


# (part of the model's name, in lower case) → instructions its model card asks for
INSTRUCTIONS: dict[str, Instructions] = {
    "e5-": Instructions("query: ", "passage: "),
    "bge-small-en": Instructions("Represent this sentence for searching relevant passages: "),
    "bge-base-en": Instructions("Represent this sentence for searching relevant passages: "),
    "bge-large-en": Instructions("Represent this sentence for searching relevant passages: "),
    "nomic-embed": Instructions("search_query: ", "search_document: "),
}
PASSAGE_PROMPTS = ("passage", "document", "corpus")  # names under which models file theirs
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
SHAPING_FILES = ("config.json", "modules.json", "tokenizer.json", "*_Pooling/config.json")


class SentenceEmbedder:
    """Any sentence-transformers model: a folder, or a name that the hub knows."""

    def __init__(
        self, model: str | Path, *, name: str | None = None, device: str | None = None
    ) -> None:
        self._where = str(model)
        self.name = name or str(model)
        self._device = device
        self.batch_size = 32  # 16 to 64 are within 10 % of each other: 2-core CPU, MiniLM

    @cached_property
    def identity(self) -> str:
        """A hash of weights, tokenizer and pooling, or name and commit for a model of the hub."""
        folder = Path(self._where)
        if not folder.is_dir():
            config = getattr(self.model[0].auto_model, "config", None)
            commit = getattr(config, "_commit_hash", None)
            return f"{self._where}@{commit or 'unknown'}"
        digest = hashlib.sha256()
        for pattern in (*SHAPING_FILES, *WEIGHT_FILES):
            for path in sorted(folder.glob(pattern)):
                digest.update(path.relative_to(folder).as_posix().encode())
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()[:32]

    @property
    def dim(self) -> int:
        dim = self.model.get_embedding_dimension()
        assert dim is not None, "a sentence-transformers model without a dimension"
        return int(dim)

    @cached_property
    def instructions(self) -> Instructions:
        prompts = {k: v for k, v in self.model.prompts.items() if v}
        if prompts:
            passage = next((prompts[p] for p in PASSAGE_PROMPTS if p in prompts), "")
            return Instructions(prompts.get("query", ""), passage)
        lowered = self.name.lower()
        return next((i for part, i in INSTRUCTIONS.items() if part in lowered), Instructions())

    def embed_passages(self, texts: Sequence[str]) -> Vectors:
        return self._embed(texts, self.instructions.passage)

    def embed_query(self, text: str) -> Vectors:
        vector: Vectors = self.embed_queries([text])[0]
        return vector

    def embed_queries(self, texts: Sequence[str]) -> Vectors:
        return self._embed(texts, self.instructions.query)

    def _embed(self, texts: Sequence[str], instruction: str) -> Vectors:
        if not texts:
            return np.zeros((0, self.dim), dtype=np.float32)
        vectors = self.model.encode(
            list(texts),
            prompt=instruction,
            batch_size=self.batch_size,
            show_progress_bar=False,
            convert_to_numpy=True,
            normalize_embeddings=True,
        )
        return np.ascontiguousarray(vectors, dtype=np.float32)

    @cached_property
    def model(self) -> "SentenceTransformer":
        """The model itself, loaded on first use: listing documents needs no embedder."""
        try:
            from sentence_transformers import SentenceTransformer
            from transformers.utils import logging as transformers_logging
        except ImportError as error:
            raise ConfigError(
                f"embedding needs sentence-transformers ({error}); pip install 'kvweave[rag]'"
            ) from error
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # over ours
        try:
            return SentenceTransformer(self._where, device=self._device)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ModelNotFound(
                f"no embedder {self._where!r}: give a sentence-transformers folder or a hub name "
                f"({reason[:200]})"
            ) from error
