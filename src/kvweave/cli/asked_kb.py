"""The knowledge base that `kvweave calibrate` asks its questions of."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvweave.errors import CorpusError

if TYPE_CHECKING:
    from kvweave.calibrate.case import Case
    from kvweave.calibrate.neighbour_context import Nearest
    from kvweave.calibrate.questions import QuestionRecord
    from kvweave.corpus.knowledge_base import KnowledgeBase
    from kvweave.fuse.encode.neighbour_table import NeighbourTable
    from kvweave.text.tokenizer import Tokenizer


class AskedKB:
    """What is retrieved for a question, and what stands in front of a chunk behind neighbours.

    Must stay open while it is measured: neighbours are looked up question by question.
    """

    def __init__(
        self, kb: "KnowledgeBase", table: "NeighbourTable | None", tokenizer: "Tokenizer"
    ) -> None:
        """Use `open_asked_kb`. `table` has the neighbours that were noted, if any were."""
        self._kb = kb
        self._table = table
        self._tokenizer = tokenizer

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk at most."""
        return self._kb.settings.chunk_tokens

    def cases(self, records: "Sequence[QuestionRecord]", k: int) -> "list[Case]":
        """Each question over its `k` best chunks; one that finds a single chunk is left out. Raises
        CorpusError if none finds more."""
        from kvweave.calibrate.questions import case_of_chunks

        found = []
        for record in records:
            chunks = [hit.chunk.token_ids for hit in self._kb.search(record.question, k)]
            if len(chunks) > 1:
                found.append(case_of_chunks(self._tokenizer, record, chunks))
        if not found:
            raise CorpusError(
                f"no question finds more than one chunk in {self._kb.folder}, and the first is "
                "always exact: nothing to measure; bring more documents in with `kvweave ingest`"
            )
        return found

    def nearest(self, size: int) -> "Nearest":
        """Who stands in front of a chunk behind `size` neighbours."""
        from kvweave.app.library.neighbours import nearest_by_tokens

        return nearest_by_tokens(self._kb, self._table, size)


@contextmanager
def open_asked_kb(folder: Path | None, tokenizer: "Tokenizer") -> Iterator[AskedKB | None]:
    """The knowledge base in `folder`, to be read; None without one."""
    if folder is None:
        yield None
        return
    from kvweave.app.library.neighbours import open_table
    from kvweave.cli.knowledge_bases import find_embedder
    from kvweave.corpus.knowledge_base import KnowledgeBase

    with KnowledgeBase.open(folder) as listing:
        embedder = find_embedder(listing.settings.embedder)
    with ExitStack() as stack:
        kb = stack.enter_context(KnowledgeBase.open(folder, tokenizer=tokenizer, embedder=embedder))
        table = open_table(folder)
        if table is not None:
            stack.callback(table.close)
        yield AskedKB(kb, table, tokenizer)
