"""What bench/serve_gpu.py asks about: this repository's pages, in chunks of the sizes it names."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common.files import REPO
from kvweave.app.library.runtime import RANDOM
from kvweave.corpus.embedder import SentenceEmbedder
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.model.files.embedded import DEFAULT, EMBEDDED, FALLBACK, peek
from kvweave.model.files.locate import locate
from kvweave.model.files.model_cache import ModelCache
from kvweave.text.tokenizer import Tokenizer

MAX_TOKENS = 8
WORDINGS = ("What is said about {}?", "Explain {} in one sentence.", "What should I know of {}?")


class Workload(NamedTuple):
    """Prompts of so many chunks of so many tokens at most."""

    k: int
    chunk_tokens: int

    @property
    def name(self) -> str:
        return f"{self.k}x{self.chunk_tokens}"

    @property
    def kb(self) -> str:
        return f"chunks-{self.chunk_tokens}"

    def body(self, question: str, **more: Any) -> dict[str, Any]:
        """A request that sets nothing but what it asks."""
        messages = [{"role": "user", "content": question}]
        made = {"messages": messages, "kb": self.kb, "k": self.k, "max_tokens": MAX_TOKENS}
        return {**made, "temperature": 0, **more}


def read_documents(most_chars: int) -> dict[str, str]:
    """This repository's pages as plain text: a heading is a sentence, so that chunks get long."""
    found: dict[str, str] = {}
    chars = 0
    for path in sorted([*REPO.glob("docs/*.md"), *REPO.glob("*.md"), *REPO.glob("bench/*.md")]):
        lines = [line.lstrip("#|> ").rstrip() for line in path.read_text().splitlines()]
        text = " ".join(line for line in lines if line.strip("-| "))
        if chars < most_chars:
            found[f"{path.stem}.txt"] = text[: most_chars - chars]
            chars += len(found[f"{path.stem}.txt"])
    return found


def ask_about(files: dict[str, str], rng: random.Random) -> Iterator[str]:
    """Questions about words of the documents, some words together: none comes twice."""
    words = [each.split() for each in files.values()]
    seen: set[str] = set()
    while True:
        page = rng.choice(words)
        at = rng.randrange(max(1, len(page) - 6))
        question = rng.choice(WORDINGS).format(" ".join(page[at : at + rng.randint(3, 6)]))
        if question not in seen:
            seen.add(question)
            yield question


def make_bases(model: str, root: Path, sizes: set[int]) -> None:
    """Empty knowledge bases with chunks of these sizes: a server makes them with its own alone."""
    names = (DEFAULT, FALLBACK) if model.startswith(RANDOM) else (model,)
    folder = next(
        locate(name) for name in names if name not in EMBEDDED or peek(EMBEDDED[name], ModelCache())
    )
    tokenizer = Tokenizer(folder)
    embedder = SentenceEmbedder(locate("minilm"), name="minilm")
    for size in sizes:
        place = root / Workload(0, size).kb
        opened = KnowledgeBase.open(
            place, tokenizer=tokenizer, embedder=embedder, chunk_tokens=size, create=True
        )
        opened.close()
