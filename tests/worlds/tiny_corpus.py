"""A tokenizer, an embedder and documents small enough for a test. Deterministic everywhere."""

import hashlib
import random
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from kvweave.corpus.embedder import Vectors
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.text.tokenizer import Tokenizer

WORDS = [
    "node",
    "pod",
    "drain",
    "cordon",
    "evict",
    "kubelet",
    "cluster",
    "volume",
    "claim",
    "secret",
    "ingress",
    "service",
    "label",
    "taint",
    "toleration",
    "schedule",
    "replica",
    "rollout",
    "namespace",
    "controller",
    "image",
    "registry",
    "probe",
    "budget",
    "quota",
]


def make_tokenizer(folder: Path) -> Tokenizer:
    """Byte-level BPE with 300 tokens and chat control tokens, as a model folder has it."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    fast.train_from_iterator([" ".join(WORDS) + ". The " + t for t in WORDS], trainer)
    fast.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    folder.mkdir(parents=True, exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


class WordEmbedder:
    """A bag of words: each word is a direction given by its hash. Near texts share words."""

    name = "words"

    def __init__(self, dim: int = 64, identity: str = "words-1") -> None:
        self.dim = dim
        self.identity = identity
        self.num_embedded = 0

    def embed_passages(self, texts: Sequence[str]) -> Vectors:
        self.num_embedded += len(texts)
        return np.stack([self._embed(text) for text in texts])

    def embed_query(self, text: str) -> Vectors:
        return self._embed(text)

    def num_tokens(self, text: str) -> int:
        return len(text.split())

    def _embed(self, text: str) -> Vectors:
        total = np.zeros(self.dim, np.float32)
        for word in re.findall(r"\w+", text.lower()):
            total += _direction(word, self.dim)
        return total / max(float(np.linalg.norm(total)), 1e-6)


@lru_cache
def _direction(word: str, dim: int) -> Vectors:
    seed = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=4).digest(), "little")
    return np.random.default_rng(seed).standard_normal(dim, np.float32)


def make_text(num_words: int, seed: int) -> str:
    """Sentences and paragraphs of cluster words."""
    rng = random.Random(seed)
    parts: list[str] = []
    for place in range(num_words):
        parts.append(rng.choice(WORDS))
        if place % 9 == 8:
            parts[-1] += "." if rng.random() < 0.7 else ".\n\n"
    return " ".join(parts)


def make_folder(folder: Path, num_files: int, seed: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(num_files):
        text = make_text(60 + 40 * (number % 4), seed + number)
        (folder / f"doc{number:03}.md").write_text(f"# Note {number}\n\n{text}\n")
    return folder


def open_kb(folder: Path, tokenizer: Tokenizer, **options: object) -> KnowledgeBase:
    """A knowledge base with small chunks, created on first use."""
    settings: dict[str, object] = {"embedder": WordEmbedder(), "chunk_tokens": 48, "create": True}
    return KnowledgeBase.open(folder, tokenizer=tokenizer, **(settings | options))  # type: ignore[arg-type]
