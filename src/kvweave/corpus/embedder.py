"""Text to unit vectors: plain BERT models by our own encoder, others by sentence-transformers.

Which words a model wants in front of a query or a passage comes from the model's own files; a few
families that leave it to their README are in INSTRUCTIONS.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvweave.corpus.bert_encoder import BertEncoder, BertFolder, EncoderWeights
from kvweave.errors import ConfigError, ModelNotFound, error_words

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

log = logging.getLogger(__name__)

Vectors = NDArray[np.float32]  # [N, D], rows of length 1


class Embedder(Protocol):
    """Turns text into vectors. May be called from any thread, one call at a time.

    `identity` changes whenever the same text could give a vector of another space; a knowledge base
    refuses an embedder with another identity than the one it was built with. What rounding does to
    a vector is no such change.
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

    def num_tokens(self, text: str) -> int:
        """Tokens that the model reads of a text; what is longer than its window is cut off."""
        ...


class Instructions(NamedTuple):
    """What a model wants to read in front of the text."""

    query: str = ""
    passage: str = ""


_BGE = Instructions("Represent this sentence for searching relevant passages: ")
# how a model's own name begins, in lower case → instructions its model card asks for
INSTRUCTIONS: dict[str, Instructions] = {
    "e5": Instructions("query: ", "passage: "),
    "multilingual-e5": Instructions("query: ", "passage: "),
    "bge-small-en": _BGE,
    "bge-base-en": _BGE,
    "bge-large-en": _BGE,
    "nomic-embed": Instructions("search_query: ", "search_document: "),
}
PASSAGE_PROMPTS = ("passage", "document", "corpus")  # names under which models file theirs
IDENTITY_VERSION = (
    "v3-"  # begins the identity of a folder; another one when other things are hashed
)
OLD_IDENTITY = re.compile("[0-9a-f]{32}")  # before v3, of a folder: with the time of its download
MANIFEST = "manifest.json"  # of the model cache: when and from where the folder was downloaded
SHAPING_FILES = frozenset((".json", ".txt", ".model", ".safetensors", ".bin", ".pt", ".py"))
WHOLE_BYTES = 8 << 20  # larger files are sampled: two models differ all over, not in one place
SAMPLES, SAMPLE_BYTES = 64, 64 << 10


class SentenceEmbedder:
    """Any sentence-transformers model: a folder, or a name that the hub knows.

    Vectors of a plain BERT folder do not depend on whether sentence-transformers made them, so
    `identity` does not say it; nor does it say whether products are computed in 8 bits, which
    recall does not tell apart (docs/cpu.md).
    """

    def __init__(
        self,
        model: str | Path,
        *,
        name: str | None = None,
        device: str | None = None,
        weights: EncoderWeights = "auto",
    ) -> None:
        """`weights`: of a plain BERT folder. "auto" multiplies in 8 bits on a CPU that does so
        faster, "float32" never does."""
        self._where = str(model)
        self.name = name or str(model)
        self._device = device
        self._weights: EncoderWeights = weights
        self.batch_size = 32  # 16 to 64 are within 10 % of each other: 2-core CPU, MiniLM

    @cached_property
    def identity(self) -> str:
        """A hash of the model's files and of its instructions, or hub name and commit with them.
        Nothing of when and where the model was downloaded is in it: a knowledge base moves.

        A model of the hub is loaded for it. Raises ModelNotFound where there is none.
        """
        folder = Path(self._where)
        digest = hashlib.sha256(repr((2, tuple(self.instructions))).encode())
        if not folder.is_dir():
            config = getattr(self.model[0].auto_model, "config", None)
            commit = getattr(config, "_commit_hash", None)
            return f"{self._where}@{commit or 'unknown'}+{digest.hexdigest()[:8]}"
        for path in sorted(folder.rglob("*")):
            relative = path.relative_to(folder)
            is_left_out = path.name == MANIFEST or any(p.startswith(".") for p in relative.parts)
            if path.suffix in SHAPING_FILES and not is_left_out and path.is_file():
                digest.update(f"{relative.as_posix()}\0{path.stat().st_size}\0".encode())
                _hash_file(path, digest)
        return IDENTITY_VERSION + digest.hexdigest()[:32]

    @property
    def dim(self) -> int:
        if self._bert is not None:
            return self._bert.dim
        dim = self.model.get_embedding_dimension()
        assert dim is not None, "a sentence-transformers model without a dimension"
        return int(dim)

    @cached_property
    def instructions(self) -> Instructions:
        prompts = {k: v for k, v in self._prompts().items() if v}
        if prompts:
            passage = next((prompts[p] for p in PASSAGE_PROMPTS if p in prompts), "")
            return Instructions(prompts.get("query", ""), passage)
        name = Path(self.name).name.lower()
        return next(
            (i for family, i in INSTRUCTIONS.items() if f"{name}-".startswith(f"{family}-")),
            Instructions(),
        )

    def _prompts(self) -> dict[str, str | None]:
        """The model's own prompts, read from a folder without loading the model: an identity should
        cost little."""
        folder = Path(self._where)
        if not folder.is_dir():
            return dict(self.model.prompts)
        path = folder / "config_sentence_transformers.json"
        try:
            found = json.loads(path.read_text()).get("prompts") if path.is_file() else None
        except (ValueError, AttributeError) as error:
            raise ModelNotFound(
                f"{path} does not parse ({error}); fetch the model again"
            ) from error
        return dict(found or {})

    def embed_passages(self, texts: Sequence[str]) -> Vectors:
        return self._embed(texts, self.instructions.passage)

    def embed_query(self, text: str) -> Vectors:
        vector: Vectors = self.embed_queries([text])[0]
        return vector

    def embed_queries(self, texts: Sequence[str]) -> Vectors:
        return self._embed(texts, self.instructions.query)

    def num_tokens(self, text: str) -> int:
        if self._bert is not None:
            return self._bert.num_tokens(text)
        return len(self.model.tokenize([text])["input_ids"][0])

    def _embed(self, texts: Sequence[str], instruction: str) -> Vectors:
        if not texts:
            return np.zeros((0, self.dim), dtype=np.float32)
        if self._bert is not None:
            return self._bert.encode([instruction + text for text in texts], self.batch_size)
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
    def _bert(self) -> BertEncoder | None:
        """Our own encoder, if the model is one for it; loaded on first use as `model` is."""
        folder = BertFolder.read(Path(self._where))
        if folder is None:
            return None
        encoder = BertEncoder(folder, self._device, weights=self._weights)
        log.info("embedder %s: %s", self.name, encoder.weights_words)
        return encoder

    @cached_property
    def model(self) -> "SentenceTransformer":
        """The model by sentence-transformers, loaded on first use: listing documents needs no
        embedder, and models that `_bert` computes need no library."""
        with loading_model("embedder", self._where, "a sentence-transformers folder"):
            from sentence_transformers import SentenceTransformer

            return SentenceTransformer(self._where, device=self._device)


@contextmanager
def loading_model(what: str, name: str, folder: str) -> Iterator[None]:
    """Load a model of sentence-transformers inside, without its progress bars. Raises ConfigError
    where the library is not installed, ModelNotFound where `name` is no such model."""
    try:
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # over ours
        yield
    except ImportError as error:
        other = ", or take minilm" if what == "embedder" else ""
        raise ConfigError(
            f"the {what} {name!r} needs sentence-transformers ({error}); "
            f"pip install 'kvweave[embedders]'{other}"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelNotFound(
            f"no {what} {name!r}: give {folder} or a hub name ({error_words(error, 200)})"
        ) from error


def _hash_file(path: Path, digest: "hashlib._Hash") -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            digest.update(file.read())
            return
        for sample in range(SAMPLES):
            file.seek((size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
