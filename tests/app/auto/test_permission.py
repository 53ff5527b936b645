"""Random weights are fused by permission, and nothing else ever is."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvweave import Weave
from kvweave.app.auto.permission import RATIO, STRATEGY, PermittedGate
from kvweave.app.libraries.quality_view import quality_of
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from kvweave.model.shapes import SHAPES, random_decoder
from kvweave.plan.plan import PromptShape
from kvweave.reasons import Reason
from kvweave.text.tokenizer import Tokenizer
from worlds.auto import World, ask, weave, world
from worlds.tiny_models import make_chat_model_folder

__all__ = ["weave", "world"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model_folder(tmp_path_factory.mktemp("chat"), max_position_embeddings=4096)


@pytest.fixture(scope="module")
def model(folder: Path) -> tuple[Decoder, Tokenizer]:
    tokenizer = Tokenizer(folder)
    spec = replace(SHAPES["tiny"], max_context=4096)
    assert spec.vocab_size >= tokenizer.vocab_size
    return random_decoder(spec, torch.device("cpu"), torch.float32), tokenizer


def test_random_weights_are_fused_and_every_place_says_why(world: World, weave: Weave) -> None:
    world.set_machine()
    answer = ask(weave)
    assert answer.decision is not None
    assert (answer.decision.plan.strategy, answer.decision.plan.chosen.ratio) == (STRATEGY, RATIO)
    assert answer.explain.why == Reason.PERMITTED
    assert quality_of(weave, over_library=True).doubt == Reason.PERMITTED
    assert "RANDOM" in weave.weights_words


def test_the_permission_is_of_one_strategy_alone() -> None:
    gate, shape = PermittedGate(), PromptShape(2000, 5)
    assert gate.min_ratio(STRATEGY, 0.02, shape).ratio == RATIO
    assert gate.min_ratio("reuse", 0.02, shape).ratio is None
    assert gate.may_reorder(0.02, shape).ratio is None


def test_no_checkpoint_has_it(folder: Path) -> None:
    assert not load_decoder(folder, device="cpu").weights.is_random


def test_two_processes_draw_the_same_weights_and_two_shapes_have_two_names() -> None:
    def made(name: str) -> Decoder:
        spec = replace(SHAPES["tiny"], inner_dim=64) if name == "thin" else SHAPES["tiny"]
        return random_decoder(spec, torch.device("cpu"), torch.float32)

    first, second = made("tiny"), made("tiny")
    assert torch.equal(first.weights.embedding, second.weights.embedding)
    assert first.revision == second.revision != made("thin").revision
