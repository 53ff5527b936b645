"""Whether texts can be a prompt at all, said before they are tokenised.

Tokenising takes about a second and 200 MB per megabyte. A text that no context could hold must not
cost that: it is refused by its characters, or, where those leave it open, by the tokens of its
pieces, of which one is in memory at a time and no more are looked at than the context holds.
"""

from collections.abc import Sequence

from kvweave.errors import PromptTooLong
from kvweave.text.tokenizer import Tokenizer

SURE_CHARS = 8  # per token of the context: texts up to there are just tokenised, it costs little
MOST_CHARS = 32  # per token of the context: no text that people write has so many
PIECE_CHARS = 16 << 10  # counted at a time
SEAM_TOKENS = 16  # by which a cut between two pieces may change their count


def refuse_long(tokenizer: Tokenizer, texts: Sequence[str], max_context: int) -> None:
    """Raise PromptTooLong for texts that certainly have more tokens than the context holds. Others
    may still turn out too long once they are tokenised."""
    if len(texts) > max_context:  # the template's words alone are a token for each
        raise _too_long(f"{len(texts):,} parts", max_context)
    num_chars = sum(map(len, texts))
    if num_chars <= SURE_CHARS * max_context:
        return
    if num_chars > MOST_CHARS * max_context:
        raise _too_long(f"{num_chars:,} characters", max_context)
    least = 0
    for text in texts:
        for start in range(0, len(text), PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS]
            least += max(0, len(tokenizer.encode_text(piece)) - SEAM_TOKENS)
            if least >= max_context:
                raise _too_long(f"more than {least:,} tokens", max_context)


def _too_long(what: str, max_context: int) -> PromptTooLong:
    return PromptTooLong(
        f"the prompt has {what}, the model's context holds {max_context} tokens with the answer; "
        "send less text or fewer documents"
    )
