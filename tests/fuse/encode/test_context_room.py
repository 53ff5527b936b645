"""Chunks fit into the model's context while their KV is computed, or are refused by name."""

import re
from pathlib import Path

import pytest

from kvweave.app.library.library_kv import key_context
from kvweave.errors import ConfigError
from kvweave.fuse.encode.contexts import filler_ids
from kvweave.fuse.encode.preparation import Preparation, Texts, check_room
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer

CHUNK = 50


class World:
    def __init__(self, folder: Path) -> None:
        self.decoder: Decoder = load_decoder(folder, device="cpu")
        self.tokenizer = Tokenizer(folder)
        self.context = key_context(self.decoder, self.tokenizer)
        self.preamble_len = len(self.context.preamble_ids)

    def check(self, max_context: int, encoding: str) -> None:
        preparation = Preparation.parse(encoding)
        texts = Texts.for_preparation(self.tokenizer, preparation, (1, 2))
        check_room(preparation, texts, self.preamble_len, max_context, CHUNK)

    def fillers(self, num_passages: int) -> int:
        return len(filler_ids(self.tokenizer, num_passages))


@pytest.fixture(scope="module")
def world(chat_model_folder: Path) -> World:
    return World(chat_model_folder)


@pytest.mark.parametrize("encoding", ["isolated", "filler:3", "neighbours:3"])
def test_what_just_fits_is_let_through_and_one_position_less_is_refused(
    world: World, encoding: str
) -> None:
    behind = {"filler:3": world.fillers(3), "neighbours:3": world.fillers(4) + 3 * CHUNK}
    context = behind.get(encoding, 0)
    needed = world.preamble_len + context + CHUNK
    world.check(needed, encoding)
    with pytest.raises(ConfigError, match=f"do not fit into the {needed - 1:,} positions"):
        world.check(needed - 1, encoding)


@pytest.mark.parametrize("kind", ["filler", "neighbours"])
def test_the_size_it_names_fits_and_the_next_does_not(world: World, kind: str) -> None:
    context = world.fillers(2) if kind == "filler" else world.fillers(4) + 2 * CHUNK
    room = world.preamble_len + context + CHUNK + 5
    with pytest.raises(ConfigError, match=f"give {kind}:2 or less"):
        world.check(room, f"{kind}:7")
    world.check(room, f"{kind}:2")
    with pytest.raises(ConfigError):
        world.check(room, f"{kind}:3")


def test_where_no_context_fits_isolated_is_named(world: World) -> None:
    room = world.preamble_len + CHUNK
    with pytest.raises(ConfigError, match="give --encoding isolated"):
        world.check(room, "filler:1")
    with pytest.raises(ConfigError, match="give --encoding isolated"):
        world.check(room, "neighbours:1")
    with pytest.raises(ConfigError, match="give --encoding filler"):
        world.check(room + world.fillers(4), "neighbours:1")


def test_where_not_even_the_chunk_fits_a_smaller_one_is_named(world: World) -> None:
    with pytest.raises(ConfigError, match=re.escape("--chunk-tokens 30 or fewer")):
        world.check(world.preamble_len + 30, "filler:1")
