"""Opens the knowledge base that `kvweave calibrate` asks its questions of."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvweave.calibrate.asked_kb import AskedKB
    from kvweave.text.tokenizer import Tokenizer


@contextmanager
def open_asked_kb(folder: Path | None, tokenizer: "Tokenizer") -> "Iterator[AskedKB | None]":
    """The knowledge base in `folder`, to be read; None without one."""
    if folder is None:
        yield None
        return
    from kvweave.app.library.neighbours import nearest_by_tokens, open_table
    from kvweave.calibrate.asked_kb import AskedKB
    from kvweave.cli.knowledge_bases import find_embedder
    from kvweave.corpus.knowledge_base import KnowledgeBase

    with KnowledgeBase.open(folder) as listing:
        embedder = find_embedder(listing.settings.embedder)
    with ExitStack() as stack:
        kb = stack.enter_context(KnowledgeBase.open(folder, tokenizer=tokenizer, embedder=embedder))
        table = open_table(folder)
        if table is not None:
            stack.callback(table.close)
        yield AskedKB(kb, tokenizer, partial(nearest_by_tokens, kb, table))
