"""Answers that are compared token for token: what counts as different, and what is said of it."""

import random
from argparse import Namespace
from pathlib import Path

import pytest

from copy_identity import compare
from kvweave.engine.engine import Engine
from kvweave.model.decoder import Decoder
from worlds.engine import SMALL, ids, make_decoder, plain
from worlds.tiny_models import make_model_folder

ASKED = Namespace(control=True, told=3, seconds=1e9)


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Decoder]:
    """Two of the same weights, of which the second's last norm is another."""
    root: Path = tmp_path_factory.mktemp("identity")
    folder = make_model_folder(root, "llama", max_position_embeddings=512)
    one, other = make_decoder(folder), make_decoder(folder)
    other.weights.final_norm[: len(other.weights.final_norm) // 2] *= 1.5
    return one, other


def test_an_engine_answers_as_itself_in_any_order(decoders: tuple[Decoder, Decoder]) -> None:
    rng = random.Random(1)
    asked = [(f"set {i % 2}", plain(ids(rng, 9), max_tokens=12)) for i in range(6)]
    with Engine(decoders[0], SMALL) as one, Engine(decoders[0], SMALL) as other:
        found = compare(one, other, asked, ASKED)
    assert (found["answers"], found["different_answers"], found["otherwise_grouped"]) == (6, 0, 0)
    assert found["answers_and_different_by_set"] == {"set 0": [3, 0], "set 1": [3, 0]}
    assert found["tokens"] == 72


def test_answers_of_another_model_differ_and_are_looked_into(
    decoders: tuple[Decoder, Decoder],
) -> None:
    rng = random.Random(2)
    asked = [("set", plain(ids(rng, 9), max_tokens=12)) for _ in range(8)]
    with Engine(decoders[0], SMALL) as one, Engine(decoders[1], SMALL) as other:
        found = compare(one, other, asked, ASKED)
    assert found["different_answers"] > 3
    told = [each for each in found["differences"] if "lead" in each]
    assert len(told) == 3
    assert all(each["lead"] > 0 and each["moved"] > 0 for each in told)
    assert found["largest_lead"] == max(each["lead"] for each in told)
    assert found["beyond_rounding"] == sum(e["lead"] > found["rounding_moved"] for e in told)


def test_no_more_is_asked_than_there_is_time_for(decoders: tuple[Decoder, Decoder]) -> None:
    asked = [("set", plain((1, 2, 3), max_tokens=2))]
    with Engine(decoders[0], SMALL) as one:
        found = compare(one, one, asked, Namespace(control=False, told=3, seconds=0.0))
    assert found["answers"] == 0
