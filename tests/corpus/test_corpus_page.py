"""What docs/corpus.md says about endings, limits and defaults is what the code does."""

from pathlib import Path

from kvweave.corpus.chunker import Chunker
from kvweave.corpus.index import FLAT_LIMIT, HNSW_LIMIT
from kvweave.corpus.parsers import ENDINGS, ParseLimits
from kvweave.corpus.search import RETRIEVALS
from kvweave.corpus.settings import CHUNK_TOKENS

PAGE = (Path(__file__).parents[2] / "docs" / "corpus.md").read_text()


def test_the_page_names_every_ending_and_mode() -> None:
    missing = [name for name in (*ENDINGS, *RETRIEVALS) if f"{name}`" not in PAGE]
    assert missing == []


def test_the_page_quotes_the_defaults() -> None:
    assert f"at most {CHUNK_TOKENS} tokens" in PAGE
    assert Chunker.__dataclass_fields__["max_tokens"].default == CHUNK_TOKENS
    assert f"`--max-file-mb` ({ParseLimits().file_bytes >> 20})" in PAGE
    assert f"up to {FLAT_LIMIT:,} chunks" in PAGE
    assert HNSW_LIMIT == 2_000_000
    assert "up to two million" in PAGE
