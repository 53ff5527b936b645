"""Critical layers: a planted needle is found at the layer that looks for it, and only there."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvweave.calibrate.case import Case
from kvweave.calibrate.layer_profile import profile_layers, recall_at, worth_taking
from kvweave.errors import RequestError
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from worlds.tiny_models import make_model_folder

NEEDLE = (90, 91, 92, 93, 94)
LOOKING = 2  # the layer that matches equal tokens


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Hidden states stay embeddings; one layer attends to equal tokens, the others to all alike."""
    rope = {"rope_type": "default", "rope_theta": 1e6}
    folder = make_model_folder(
        tmp_path_factory.mktemp("needle"), "llama", head_dim=32, rope_parameters=rope
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(1)
    match = torch.randn(32, 32, generator=generator)
    for fast in (slice(0, 8), slice(16, 24)):  # those turn with distance; the rest hardly does
        match[fast] = 0.0
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
            layer.self_attn.k_proj.weight.copy_(match.repeat(2, 1))
            layer.self_attn.q_proj.weight.copy_(match.repeat(4, 1) * (number == LOOKING))
    model.save_pretrained(folder)
    return load_decoder(folder, device="cpu", dtype="float32")


def make_case(seed: int) -> Case:
    rng = random.Random(seed)
    chunks = [[rng.randrange(80) for _ in range(40)] for _ in range(4)]
    place, at = rng.randrange(4), rng.randrange(30)
    chunks[place][at : at + len(NEEDLE)] = NEEDLE
    start = 3 + 40 * place + at
    gold = tuple(range(start, start + len(NEEDLE)))
    question = (80, *NEEDLE, 81)
    return Case((1, 2, 3), tuple(map(tuple, chunks)), question, (1, 6), gold)


def test_a_planted_needle_is_found_at_the_layer_that_looks_for_it(decoder: Decoder) -> None:
    seen: list[int] = []
    cases = [make_case(seed) for seed in range(8)]
    profile = profile_layers(decoder, cases, (85, 86), on_sample=seen.append)
    assert profile.recall[LOOKING] == 1.0
    assert max(profile.recall[:LOOKING]) < 0.5  # ties: the first tenth of the context
    assert profile.order[0] == LOOKING
    assert profile.critical == (LOOKING,)
    assert profile.curve[0] == 1.0
    assert profile.full_context == 1.0
    assert (profile.num_samples, profile.mean_context_tokens) == (8, 160.0)
    assert seen == list(range(1, 9))
    assert all(
        low <= mean <= high
        for low, mean, high in zip(
            profile.recall_low, profile.recall, profile.recall_high, strict=True
        )
    )


def test_no_samples_are_refused_in_words(decoder: Decoder) -> None:
    with pytest.raises(RequestError, match="marked answers"):
        profile_layers(decoder, [], (85,))


def test_recall_counts_the_gold_in_the_best_tenth() -> None:
    scores = torch.arange(40.0)
    gold = torch.zeros(40, dtype=torch.bool)
    gold[[39, 36, 35, 0]] = True  # the best four are 36..39
    assert recall_at(scores, gold) == 0.5
    assert recall_at(torch.zeros(40), gold) == 0.25  # ties go to the first


@pytest.mark.parametrize(
    ("curve", "count"),
    [((0.5,), 1), ((0.5, 0.504, 0.9), 1), ((0.5, 0.51, 0.52, 0.524), 3), ((0.1, 0.2, 0.3), 3)],
)
def test_one_more_layer_must_be_worth_it(curve: tuple[float, ...], count: int) -> None:
    assert worth_taking(curve) == count
