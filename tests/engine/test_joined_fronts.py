"""Fused prompts whose first chunks are exact in the knowledge tree: slices answer as one pass."""

import random
from dataclasses import replace

import pytest

from kvweave.engine import lifecycle as desk
from kvweave.engine.engine import Engine
from kvweave.engine.fused_step import PrefillMode
from worlds.engine import SMALL, plain, with_chunks
from worlds.fused import CHUNKS, PREAMBLE, QUESTION, World, answer, at_rest


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
    for way in (PrefillMode.STREAMED, PrefillMode.JOINED):
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
    assert answers[PrefillMode.JOINED] == answers[PrefillMode.STREAMED]
