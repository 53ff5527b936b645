"""On a GPU with `engine.exact` a row gets the same bits whatever is computed beside it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvweave.kernels import fixed_order
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.model.shapes import SHAPES, random_decoder
from worlds.bits import count_different, count_different_answers
from worlds.engine import SMALL
from worlds.tiny_models import make_model_folder

pytestmark = pytest.mark.gpu
EXACT = replace(SMALL, page_tokens=16, pool_tokens=256, step_rows=23, exact=True)


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_order, "_fixed", [True])


@pytest.fixture(scope="module", params=["llama-float32", "qwen2-yarn-bfloat16", "wide-bfloat16"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    name, _, dtype = request.param.rpartition("-")
    if name == "wide":
        spec = replace(SHAPES["qwen2.5-7b"], num_layers=3)
        return random_decoder(spec, torch.device("cuda"), torch.bfloat16)
    folder: Path = make_model_folder(tmp_path_factory.mktemp("models"), name)
    return load_decoder(folder, device="cuda", dtype=dtype)


@pytest.mark.usefixtures("fixed")
def test_slices_neighbours_pages_and_preemption_change_no_bit(decoder: Decoder) -> None:
    assert count_different(decoder, 60, seed=1) == 0


@pytest.mark.usefixtures("fixed")
def test_a_crowded_engine_answers_with_the_same_bits(decoder: Decoder) -> None:
    found = [count_different_answers(decoder, EXACT, seed) for seed in range(3)]
    assert sum(different for different, _ in found) == 0
    assert sum(preemptions for _, preemptions in found) > 0, "nobody was preempted"


def test_without_it_some_bits_do_change(decoder: Decoder) -> None:
    """Else the two tests above would show nothing."""
    if decoder.dtype == torch.bfloat16 and decoder.spec.hidden_dim > 512:
        assert count_different(decoder, 60, seed=1) > 0
