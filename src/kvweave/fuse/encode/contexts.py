"""Encoding contexts: what stands between the preamble and a chunk while its KV is computed.

    isolated            nothing
    filler:N            N passages of a fixed generic text, the same for every chunk
    neighbours:N        the default filler, then the N chunks of the knowledge base that are most
                        like it, nearest first, with the KV they have behind that filler

A chunk that has seen some text before has learnt to spread its attention, as it must in the middle
of a prompt; that is most of what it needs to know about what stands in front of it, and any text
teaches it. The text must end where a chunk would: behind half a sentence a chunk learns the wrong
thing. Neighbours teach more, and carry their text into the chunk's KV: see docs/fusion.md.

The first place of a prompt is special: there the isolated KV is exact. It is therefore stored as
well, whatever the variant.
"""

import hashlib
from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple

import torch

from kvweave.errors import ConfigError
from kvweave.fuse.protocol import FusionDecoder, Prefix
from kvweave.kernels.rope import rotate
from kvweave.kv.format.codec import LayerKV
from kvweave.text.tokenizer import Tokenizer

ISOLATED = "isolated"
# Filler: about half of a prompt of 1,000 tokens. Neighbours: FusionRAG takes 10; how many are good
# depends on the documents, and calibration says (`calibrate.profiles`).
DEFAULT_SIZES = {ISOLATED: 0, "filler": 4, "neighbours": 3}


class Variant(NamedTuple):
    """A kind of encoding context and its size: passages of filler, or number of neighbours."""

    kind: str  # "isolated", "filler" or "neighbours"
    size: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == ISOLATED else f"{self.kind}:{self.size}"


def parse_variant(text: str) -> Variant:
    """Read "filler:4" and the like; a kind alone takes its default size. A model's profile may know
    a better number of neighbours: `calibrate.profiles.calibrated_neighbours`."""
    kind, colon, size = text.partition(":")
    if kind not in DEFAULT_SIZES or (
        colon and (kind == ISOLATED or not size.isdecimal() or int(size) == 0)
    ):
        raise ConfigError(
            f"encoding {text!r} is unknown; give isolated, filler:PASSAGES or neighbours:COUNT"
        )
    return Variant(kind, int(size) if size else DEFAULT_SIZES[kind])


def filler_passages() -> list[str]:
    """The generic text, passage by passage as chunks are written."""
    text = files("kvweave.fuse.encode").joinpath("filler.txt").read_text(encoding="utf-8")
    return [passage + "\n\n" for passage in text.strip().split("\n\n")]


def filler_ids(tokenizer: Tokenizer, num_passages: int) -> tuple[int, ...]:
    """Token ids of the first passages of the generic text."""
    passages = filler_passages()
    if num_passages > len(passages):
        raise ConfigError(f"filler:{num_passages} is more than there is; at most {len(passages)}")
    return tuple(i for passage in passages[:num_passages] for i in tokenizer.encode_text(passage))


def context_filler(tokenizer: Tokenizer, variant: Variant) -> tuple[int, ...]:
    """Token ids of the filler in front of chunks; nothing if they are isolated."""
    return () if variant.kind == ISOLATED else filler_ids(tokenizer, filler_of(variant).size)


def filler_of(variant: Variant) -> Variant:
    """The filler that a context begins with, as a variant of its own: that of neighbours is fixed,
    so that whatever their number they bring the same KV."""
    return Variant("filler", DEFAULT_SIZES["filler"]) if variant.kind == "neighbours" else variant


def variant_name(variant: Variant, ids: Sequence[int] = ()) -> str:
    """What a key says of an encoding context: kind, size and a digest of the filler's tokens."""
    return str(variant) if variant.kind == ISOLATED else f"{variant}:{digest_ids(ids)}"


def digest_ids(ids: Sequence[int]) -> str:
    """A short name for some token ids."""
    return hashlib.blake2b(",".join(map(str, ids)).encode(), digest_size=6).hexdigest()


def neighbour_prefix(
    decoder: FusionDecoder,
    front: Prefix,
    neighbours: Sequence[tuple[Sequence[int], Sequence[LayerKV]]],
) -> Prefix:
    """`front` (preamble and filler) and the KV of some chunks behind it, as (token ids, layers).

    Neighbours bring the KV they have behind `front`, not behind their own neighbours: one chunk's
    KV never depends on chunks it does not name. Without any it is `front`.
    """
    if not neighbours:
        return front
    ids = [*front.token_ids, *(i for tokens, _ in neighbours for i in tokens)]
    at = torch.arange(len(front.token_ids), len(ids), device=decoder.device)
    angles = decoder.angles(at)
    layers = []
    for layer in range(decoder.spec.num_layers):
        keys = rotate(torch.cat([made[layer].k for _, made in neighbours]), angles)
        values = torch.cat([made[layer].v for _, made in neighbours])
        if front.layers:
            first = front.layers[layer]
            keys, values = torch.cat([first.k, keys]), torch.cat([first.v, values])
        layers.append(LayerKV(keys, values))
    return Prefix(tuple(ids), tuple(layers))
