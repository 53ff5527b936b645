"""Encoding contexts: how they are written, and what stands in front of a chunk."""

from pathlib import Path

import pytest

from fuseworld import World
from kvweave.errors import ConfigError
from kvweave.fuse.contexts import Variant, filler_ids, neighbour_prefix, parse_variant
from kvweave.fuse.encode import Prefix, encode_prefix
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.tokenizer import Tokenizer
from tiny_models import CHAT_TEXT


@pytest.fixture(scope="module")
def chat(chat_model_folder: Path) -> tuple[Tokenizer, Decoder]:
    decoder = load_decoder(chat_model_folder, device="cpu", dtype="float32")
    return Tokenizer(chat_model_folder), decoder


@pytest.mark.parametrize(
    ("text", "variant"),
    [
        ("isolated", Variant("isolated")),
        ("filler", Variant("filler", 512)),
        ("filler:64", Variant("filler", 64)),
        ("neighbours", Variant("neighbours", 10)),
        ("neighbours:3", Variant("neighbours", 3)),
    ],
)
def test_encodings_are_read_as_they_are_written(text: str, variant: Variant) -> None:
    assert parse_variant(text) == variant
    assert parse_variant(str(variant)) == variant


@pytest.mark.parametrize(
    "text",
    ["", "alone", "isolated:3", "filler:0", "filler:00", "filler:-1", "filler:x", "filler:²",
     "neighbours:1.5", "neighbours:0", "Filler", "filler:"],
)  # fmt: skip
def test_other_encodings_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="unknown; give isolated, filler:TOKENS"):
        parse_variant(text)


def test_filler_is_the_same_text_cut_anywhere(chat: tuple[Tokenizer, Decoder]) -> None:
    tokenizer, _ = chat
    assert filler_ids(tokenizer, 100)[:40] == filler_ids(tokenizer, 40)
    assert len(filler_ids(tokenizer, 100)) == 100
    assert not set(filler_ids(tokenizer, 100)) & tokenizer.special_ids
    with pytest.raises(ConfigError, match=r"filler:10000000 is more than the text has; at most \d"):
        filler_ids(tokenizer, 10_000_000)


def test_neighbours_are_stitched_behind_the_preamble(chat: tuple[Tokenizer, Decoder]) -> None:
    tokenizer, decoder = chat
    preamble, first, second = (tokenizer.encode_text(t) for t in CHAT_TEXT.split(". ")[:3])
    for front in (preamble, []):
        world = World(decoder, front, [first, second], [1])
        neighbours = [(first, world.made[0]), (second, world.made[1])]
        prefix = neighbour_prefix(decoder, world.prefix, neighbours)
        assert prefix.token_ids == world.request.prompt_ids[:-1]
        laid = world.laid_by_hand()
        for layer, kv in enumerate(prefix.layers):
            assert kv.k.allclose(laid.keys(layer)[:-1], atol=1e-5)
            assert kv.v.allclose(laid.values(layer)[:-1], atol=1e-5)


@pytest.mark.parametrize("front", [[5, 6, 7], []])
def test_a_chunk_without_neighbours_stands_behind_the_preamble(
    chat: tuple[Tokenizer, Decoder], front: list[int]
) -> None:
    _, decoder = chat
    preamble: Prefix = encode_prefix(decoder, front)
    alone = neighbour_prefix(decoder, preamble, [])
    assert alone.token_ids == preamble.token_ids
    assert len(alone.layers) == len(preamble.layers)
