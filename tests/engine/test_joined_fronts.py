"""Fused prompts whose first chunks are exact in the knowledge tree: slices answer as one pass."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engineworld import SMALL, make_decoder, plain, with_chunks
from fusedworld import CHUNKS, PREAMBLE, QUESTION, World, answer, at_rest
from kvweave.engine import desk
from kvweave.engine.engine import Engine
from kvweave.engine.loading import Way
from kvweave.model.decoder import Decoder
from kvweave.model.load import load_decoder
from tiny_models import make_model_folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Decoder]:
    """In float64, where no two logits are close, and in float32, which can be stored."""
    root = tmp_path_factory.mktemp("fronts")
    folder = make_model_folder(root, "llama", max_position_embeddings=512)
    return make_decoder(folder), load_decoder(folder, device="cpu")


@pytest.fixture
def world(models: tuple[Decoder, Decoder], tmp_path: Path) -> Iterator[World]:
    world = World(models[0], tmp_path, models[1])
    yield world
    world.store.close()


@pytest.mark.parametrize("front", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["weave", "fusionrag", "epic", "reuse"])
def test_slices_behind_an_exact_front_are_answered_as_one_pass(
    world: World, strategy: str, front: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = random.Random(front).sample(CHUNKS, 4)
    request = world.request(chunks, strategy, 0.0 if strategy == "reuse" else 0.4)
    request = replace(request, use_tree=True)
    cfg = replace(SMALL, step_rows=3, alone_rows=3, pool_tokens=4 * 60)
    answers = {}
    for way in (Way.STREAMED, Way.JOINED):
        monkeypatch.setattr(desk, "way_of", lambda *_, way=way, **__: way)
        with Engine(world.decoder, cfg) as engine:
            list(engine.submit(with_chunks(PREAMBLE, chunks[:front], QUESTION, max_tokens=1)))
            beside = [engine.submit(plain([1, 2, 3 + i], max_tokens=60)) for i in range(2)]
            ticket = engine.submit(request)
            answers[way] = answer(ticket)
            assert ticket.record is not None
            assert ticket.record.way == str(way)
            exact = [chunk.state.value for chunk in ticket.record.chunks].count("exact")
            assert exact >= front, "the tree had them"
            for other in beside:
                other.cancel()
                assert other.wait(30)
            at_rest(engine, world)
    assert answers[Way.JOINED] == answers[Way.STREAMED]
