"""Whether chunks fit into a model's context while their KV is computed.

preamble ‖ encoding context ‖ chunk                       every variant
preamble ‖ encoding context ‖ chunk ‖ repeat ‖ chunk      with kvzip's anchors
"""

from kvweave.errors import ConfigError
from kvweave.fuse.anchors import extra_name
from kvweave.fuse.chunk_encoder import ChunkEncoder

KVZIP = extra_name("kvzip")


def check_room(encoder: ChunkEncoder, max_context: int, chunk_tokens: int) -> None:
    """Refuse what would run past the model's last position, for chunks of at most `chunk_tokens`.

    Raises ConfigError with the largest size that fits. Computes nothing.
    """
    preparation, texts = encoder.preparation, encoder.texts
    variant = preparation.variant
    what, number, taken = "", 1, len(encoder.preamble_ids)  # of chunks, and tokens besides
    if KVZIP in preparation.extras:
        what, number, taken = f" with {KVZIP}, which repeats them,", 2, taken + len(texts.repeat)
    room = max_context - taken - number * chunk_tokens  # for the encoding context
    where = f"do not fit into the {max_context:,} positions of this model"
    if room < 0:
        largest = max(0, max_context - taken) // number
        way_out = "give --extras without it, or" if number > 1 else "make"
        raise ConfigError(
            f"chunks of {chunk_tokens} tokens{what} {where}; {way_out} a new knowledge base with "
            f"--chunk-tokens {largest} or fewer"
        )
    needed, less = len(texts.filler), "isolated"  # which is filler of no passages
    if variant.kind == "neighbours":
        less = "filler" if needed <= room else less
        largest = max(0, room - needed) // chunk_tokens
        needed += variant.size * chunk_tokens
    else:
        largest = sum(end <= room for end in texts.passage_ends)
    if needed > room:
        way_out = f"{variant.kind}:{largest} or less" if largest else f"--encoding {less}"
        raise ConfigError(
            f"{variant} and chunks of {chunk_tokens} tokens{what} {where}; give {way_out}"
        )
