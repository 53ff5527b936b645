"""bench/codec_kl.py: rounding alone, and on top of reuse."""

import pytest

from codec_kl import score
from kvweave.kv.format.codec import CODECS
from kvweave.model.load import load_decoder
from kvweave.text.prompt import Prompt
from worlds.fuse import make_ids
from worlds.tiny_models import make_model_folder


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], float]:
    decoder = load_decoder(make_model_folder(tmp_path_factory.mktemp("models"), "llama"))
    preamble, first, twice, last, question = map(tuple, make_ids(5, 6, 30, 20, 11, 9))
    # the same passage in two places: two exact KVs
    prompt = Prompt(preamble, (first, twice, last, twice), question, (1, 5))
    return score(decoder, prompt, num_tokens=6)


def test_what_is_kept_as_it_is_changes_no_exact_answer(
    found: dict[tuple[str, str], float],
) -> None:
    assert abs(found["quantised", "raw"]) < 1e-6


def test_fewer_bits_cost_more(found: dict[tuple[str, str], float]) -> None:
    cost = {codec: found["quantised", codec] for codec in CODECS}
    assert cost["raw"] < cost["int8"] < cost["int4"]


def test_reuse_costs_something_whatever_the_codec(found: dict[tuple[str, str], float]) -> None:
    assert all(found["reused", codec] > 10 * found["quantised", "int8"] for codec in CODECS)
