"""Whether chunks fit into a model's context while their KV is computed.

preamble ‖ encoding context ‖ chunk                       every variant
preamble ‖ encoding context ‖ chunk ‖ repeat ‖ chunk      with kvzip's anchors
"""

from typing import NamedTuple

from kvweave.errors import ConfigError
from kvweave.fuse.encode.anchors import extra_name
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder, Texts
from kvweave.fuse.encode.contexts import ISOLATED, Variant

KVZIP = extra_name("kvzip")


class Shortage(NamedTuple):
    """What does not fit, and what would."""

    says: str  # the beginning of a line for the user
    chunk_tokens: int | None  # chunks of so many fit; None: it is the encoding context
    encoding: str  # fits, and so does a smaller one of that kind; empty: none of that kind does
    less: str  # the encoding context to take then


def find_shortage(
    variant: Variant,
    texts: Texts,
    preamble_len: int,
    chunk_tokens: int,
    max_context: int,
    *,
    repeats: bool,
) -> Shortage | None:
    """What would run past the model's last position, for chunks of at most `chunk_tokens`. None:
    all fits. `repeats`: with kvzip's anchors."""
    what, number, taken = "", 1, preamble_len  # of chunks, and tokens besides
    if repeats:
        what, number, taken = f" with {KVZIP}, which repeats them,", 2, taken + len(texts.repeat)
    room = max_context - taken - number * chunk_tokens  # for the encoding context
    chunks = f"chunks of {chunk_tokens} tokens{what}"
    where = f"do not fit into the {max_context:,} positions of this model"
    if room < 0:
        return Shortage(f"{chunks} {where}", max(0, max_context - taken) // number, "", ISOLATED)
    needed, less = len(texts.filler), ISOLATED  # which is filler of no passages
    if variant.kind == "neighbours":
        less = "filler" if needed <= room else less
        largest = max(0, room - needed) // chunk_tokens
        needed += variant.size * chunk_tokens
    else:
        largest = sum(end <= room for end in texts.passage_ends)
    if needed <= room:
        return None
    fits = f"{variant.kind}:{largest}" if largest else ""
    return Shortage(f"{variant} and {chunks} {where}", None, fits, less)


def check_room(encoder: ChunkEncoder, max_context: int, chunk_tokens: int) -> None:
    """Refuse what would run past the model's last position, for chunks of at most `chunk_tokens`.

    Raises ConfigError with the largest size that fits. Computes nothing.
    """
    variant, repeats = encoder.preparation.variant, KVZIP in encoder.preparation.extras
    preamble_len = len(encoder.preamble_ids)
    short = find_shortage(
        variant, encoder.texts, preamble_len, chunk_tokens, max_context, repeats=repeats
    )
    if short is None:
        return
    if short.chunk_tokens is not None:
        advice = "give --extras without it, or" if repeats else "make"
        advice += f" a new knowledge base with --chunk-tokens {short.chunk_tokens} or fewer"
    else:
        advice = "give " + (
            f"{short.encoding} or less" if short.encoding else f"--encoding {short.less}"
        )
    raise ConfigError(f"{short.says}; {advice}")
