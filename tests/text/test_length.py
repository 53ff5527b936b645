"""A prompt that no context holds is refused before it is tokenised; no other is."""

from pathlib import Path

import pytest

from kvweave.errors import RequestError
from kvweave.text.prompt import MOST_CHARS, PIECE_CHARS, SURE_CHARS, refuse_long
from kvweave.text.tokenizer import Tokenizer


class CountingTokenizer(Tokenizer):
    """Counts the characters that it is given."""

    num_chars = 0

    def encode_text(self, text: str) -> list[int]:
        self.num_chars += len(text)
        return super().encode_text(text)


@pytest.fixture
def tokenizer(chat_model_folder: Path) -> CountingTokenizer:
    return CountingTokenizer(chat_model_folder)


def test_what_fits_by_its_characters_costs_nothing(tokenizer: CountingTokenizer) -> None:
    refuse_long(tokenizer, ["a" * (SURE_CHARS * 100)], 100)
    assert tokenizer.num_chars == 0


def test_what_has_far_too_many_characters_costs_nothing(tokenizer: CountingTokenizer) -> None:
    with pytest.raises(RequestError, match=r"7,000,000 characters, .* holds 8192 tokens"):
        refuse_long(tokenizer, ["a" * 7_000_000], 8192)
    assert tokenizer.num_chars == 0


def test_more_parts_than_tokens_cost_nothing(tokenizer: CountingTokenizer) -> None:
    with pytest.raises(RequestError, match="20,000 parts"):
        refuse_long(tokenizer, ["hi"] * 20_000, 8192)
    assert tokenizer.num_chars == 0


def test_between_the_two_no_more_is_counted_than_the_context_holds(
    tokenizer: CountingTokenizer,
) -> None:
    text = "the node is drained. " * 12_000
    context = len(text) // MOST_CHARS + 1
    with pytest.raises(RequestError, match=r"more than [\d,]+ tokens"):
        refuse_long(tokenizer, [text], context)
    num_tokens = len(Tokenizer.encode_text(tokenizer, text))
    needed = len(text) * context / num_tokens
    assert needed <= tokenizer.num_chars <= needed + 2 * PIECE_CHARS


@pytest.mark.parametrize("text", ["the node is drained. ", "ab", " ", "é漢字", "x\n\n"])
def test_a_text_that_fits_is_never_refused(tokenizer: CountingTokenizer, text: str) -> None:
    """However its tokens fall at the seams of the pieces."""
    long = text * (4 * PIECE_CHARS // len(text))
    num_tokens = len(Tokenizer.encode_text(tokenizer, long))
    if len(long) <= MOST_CHARS * (num_tokens + 1):
        refuse_long(tokenizer, [long], num_tokens + 1)
