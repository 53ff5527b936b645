"""What drift has moved is seen in answers over shared chunks, on the mean over each chunk."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.request import EngineRequest
from kvweave.fuse.shared_chunks import SharedLayers
from worlds.engine import SMALL
from worlds.fused import World, answer, shuffled

SHARED = replace(SMALL, share_chunks=True)


def thoughts(world: World, cfg: EngineConfig, requests: list[EngineRequest]) -> list[Tensor]:
    """Log-probabilities of the tokens of every answer."""
    with Engine(world.decoder, cfg) as engine:
        tickets = [engine.submit(request) for request in requests]
        for ticket in tickets:
            answer(ticket)
    return [torch.stack(ticket.distributions) for ticket in tickets]


def test_answers_are_nearer_to_those_over_copies_than_without(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token is that of a copy: scratch memory is moved as a copy is."""
    rng = random.Random(3)
    requests = [
        replace(world.request(shuffled(rng), "weave", 0.4), forced=tuple(range(3, 9)), watched=6)
        for _ in range(8)
    ]
    copied = thoughts(world, replace(SMALL, share_chunks=False), requests)
    seen = thoughts(world, SHARED, requests)
    monkeypatch.setattr(SharedLayers, "keep_shifts", lambda *_: None)
    unseen = thoughts(world, SHARED, requests)

    def apart(found: list[Tensor]) -> float:
        nats = [p.exp() * (p - q) for p, q in zip(copied, found, strict=True)]
        return float(torch.stack(nats)[:, 1:].sum(-1).mean())

    for want, got in zip(copied, seen, strict=True):
        torch.testing.assert_close(got[0], want[0], atol=1e-5, rtol=0)
    assert 0 < apart(seen) < 0.7 * apart(unseen)
