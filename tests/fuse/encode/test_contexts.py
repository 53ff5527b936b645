"""Encoding contexts: how they are written, and what stands in front of a chunk."""

from pathlib import Path

import pytest

from kvweave.errors import ConfigError
from kvweave.fuse.encode.chunk_pass import encode_prefix
from kvweave.fuse.encode.contexts import (
    Variant,
    context_filler,
    filler_ids,
    neighbour_prefix,
    parse_variant,
    variant_name,
)
from kvweave.fuse.protocol import Prefix
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer
from worlds.fuse import World
from worlds.tiny_models import CHAT_TEXT


@pytest.fixture(scope="module")
def chat(chat_model_folder: Path) -> tuple[Tokenizer, Decoder]:
    decoder = load_decoder(chat_model_folder, device="cpu", dtype="float32")
    return Tokenizer(chat_model_folder), decoder


@pytest.mark.parametrize(
    ("text", "variant"),
    [
        ("isolated", Variant("isolated")),
        ("filler", Variant("filler", 4)),
        ("filler:64", Variant("filler", 64)),
        ("neighbours", Variant("neighbours", 3)),
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
    with pytest.raises(ConfigError, match="unknown; give isolated, filler:PASSAGES"):
        parse_variant(text)


def test_filler_is_whole_passages_of_one_text(chat: tuple[Tokenizer, Decoder]) -> None:
    tokenizer, _ = chat
    two, three = filler_ids(tokenizer, 2), filler_ids(tokenizer, 3)
    assert three[: len(two)] == two
    assert tokenizer.decode(three).count("\n\n") == 3
    assert tokenizer.decode(three).endswith("\n\n")
    assert not set(three) & tokenizer.special_ids
    with pytest.raises(ConfigError, match=r"filler:1000 is more than there is; at most \d"):
        filler_ids(tokenizer, 1000)


def test_another_filler_has_another_name() -> None:
    names = {
        variant_name(Variant("isolated")),
        *(
            variant_name(Variant(kind, n), ids)
            for kind in ("filler", "neighbours")
            for n in (1, 2)
            for ids in ([1, 2], [12])
        ),
    }
    assert len(names) == 9


def test_neighbours_stand_behind_the_same_filler_whatever_their_number(
    chat: tuple[Tokenizer, Decoder],
) -> None:
    tokenizer, _ = chat
    usual = context_filler(tokenizer, parse_variant("filler"))
    assert context_filler(tokenizer, Variant("neighbours", 1)) == usual
    assert context_filler(tokenizer, Variant("neighbours", 9)) == usual
    assert context_filler(tokenizer, Variant("filler", 2)) == filler_ids(tokenizer, 2)
    assert context_filler(tokenizer, Variant("isolated")) == ()


def test_neighbours_are_stitched_behind_what_stands_in_front(
    chat: tuple[Tokenizer, Decoder],
) -> None:
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
def test_no_neighbours_leave_what_stands_in_front_as_it_is(
    chat: tuple[Tokenizer, Decoder], front: list[int]
) -> None:
    _, decoder = chat
    before: Prefix = encode_prefix(decoder, front)
    alone = neighbour_prefix(decoder, before, [])
    assert alone.token_ids == before.token_ids
    assert len(alone.layers) == len(before.layers)
