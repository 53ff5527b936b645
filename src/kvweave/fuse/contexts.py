"""Encoding contexts: what stands between the preamble and a chunk while its KV is computed.

    isolated            nothing
    filler:N            N tokens of a fixed generic text, the same for every chunk
    neighbours:n        the n chunks of the knowledge base that are most like it, nearest first

A chunk that has seen some text before has learnt to spread its attention, as it must in the middle
of a prompt; that is most of what it needs to know about what stands in front of it, and any text
teaches it. Neighbours teach more and carry their text into the chunk's KV: see docs/fusion.md.
"""

from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple

import torch

from kvweave.errors import ConfigError
from kvweave.fuse.encode import Prefix
from kvweave.fuse.protocol import Decoder
from kvweave.kernels.rope import rotate
from kvweave.kv.codec import LayerKV
from kvweave.tokenizer import Tokenizer


class Variant(NamedTuple):
    """A kind of encoding context and its size: tokens of filler, or number of neighbours."""

    kind: str  # "isolated", "filler" or "neighbours"
    size: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "isolated" else f"{self.kind}:{self.size}"


KINDS = ("isolated", "filler", "neighbours")
DEFAULT_SIZES = {"isolated": 0, "filler": 512, "neighbours": 10}


def parse_variant(text: str) -> Variant:
    """ "filler:512" and the like; a kind alone takes its default size."""
    kind, colon, size = text.partition(":")
    counts = kind != "isolated" and size.isdecimal() and int(size) > 0
    if kind not in KINDS or (colon and not counts):
        raise ConfigError(
            f"encoding {text!r} is unknown; give isolated, filler:TOKENS or neighbours:COUNT"
        )
    return Variant(kind, int(size) if size else DEFAULT_SIZES[kind])


def filler_ids(tokenizer: Tokenizer, num_tokens: int) -> list[int]:
    """The first `num_tokens` of the generic text, passage by passage as chunks are written."""
    text = files("kvweave.fuse").joinpath("filler.txt").read_text(encoding="utf-8")
    ids: list[int] = []
    for passage in text.strip().split("\n\n"):
        ids += tokenizer.encode_text(passage + "\n\n")
    if num_tokens > len(ids):
        raise ConfigError(f"filler:{num_tokens} is more than the text has; at most {len(ids)}")
    return ids[:num_tokens]


def neighbour_prefix(
    decoder: Decoder,
    preamble: Prefix,
    neighbours: Sequence[tuple[Sequence[int], Sequence[LayerKV]]],
) -> Prefix:
    """The preamble and stitched isolated KV of some chunks, given as (token ids, layers).

    Neighbours bring their isolated KV, not their own neighbours': one chunk's KV never depends on
    chunks it does not name. Without any (the only chunk of a knowledge base) it is the preamble.
    """
    if not neighbours:
        return preamble
    ids = [*preamble.token_ids, *(i for tokens, _ in neighbours for i in tokens)]
    at = torch.arange(len(preamble.token_ids), len(ids), device=decoder.device)
    angles = decoder.angles(at)
    layers = []
    for layer in range(decoder.spec.num_layers):
        keys = rotate(torch.cat([made[layer].k for _, made in neighbours]), angles)
        values = torch.cat([made[layer].v for _, made in neighbours])
        if preamble.layers:
            front = preamble.layers[layer]
            keys, values = torch.cat([front.k, keys]), torch.cat([front.v, values])
        layers.append(LayerKV(keys, values))
    return Prefix(tuple(ids), tuple(layers))
