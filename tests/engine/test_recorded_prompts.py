"""Fused prompts over shared chunks, played from recordings: through the engine, as on a GPU.

What CUDA does is left out: here a recording is the work itself.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvweave.engine import engine as engine_module
from kvweave.engine import warm_up
from kvweave.engine.engine import Engine
from kvweave.engine.request import EngineRequest
from kvweave.fuse import probe, recorded_probe
from kvweave.fuse import recordings as recordings_module
from kvweave.fuse.recorded_layers import LayerRecordings, Play, StepBuffers
from kvweave.fuse.recorded_probe import Found, ProbeKind, ProbeRecordings, _question
from kvweave.fuse.recordings import Recordings
from kvweave.kv.format.codec import LayerKV
from kvweave.model.decoder import Decoder
from worlds.engine import SMALL, until
from worlds.fused import CHUNKS, World, answer, at_rest

SHARED = replace(SMALL, share_chunks=True)


class Again:
    """Plays a layer by doing its work again."""

    def __init__(self, decoder: Decoder, buffers: StepBuffers) -> None:
        assert torch.is_inference_mode_enabled()

    def record(self, decoder: Decoder, work: Play) -> Play:
        assert torch.is_inference_mode_enabled()
        return work


class ProbedAgain:
    """Plays a question by computing it again."""

    plays: list[int] = []  # threads  # noqa: RUF012

    def __init__(self, decoder: Decoder, kind: ProbeKind) -> None:
        assert torch.is_inference_mode_enabled()
        self._decoder, self._kind = decoder, kind

    def play(self, ids: Sequence[int], first: int, front: Sequence[LayerKV]) -> Found:
        assert torch.is_inference_mode_enabled(), "memory of recordings is written inside alone"
        self.plays.append(threading.get_ident())
        decoder, kind = self._decoder, self._kind
        spec = decoder.spec
        shape = (max(kind.layers), 2, kind.in_front, spec.num_kv_heads, spec.head_dim)
        shown = torch.zeros(shape, dtype=decoder.dtype)
        for layer, kv in enumerate(front[: max(kind.layers)]):
            shown[layer, 0], shown[layer, 1] = kv.k, kv.v
        inputs = torch.zeros(2, kind.num_rows, dtype=torch.int64)
        inputs[0, : len(ids)] = torch.tensor(ids)
        inputs[1] = torch.arange(first, first + kind.num_rows)
        found = _question(decoder, inputs, kind.layers, shown)
        return {at: (q[: len(ids)], k[: len(ids)]) for at, (q, k) in found.items()}


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> Recordings:
    """Decoders take recorded steps from here on."""
    made = Recordings(LayerRecordings(Again), ProbeRecordings(ProbedAgain))  # type: ignore[arg-type]
    for module in (recordings_module, probe, warm_up, engine_module):
        monkeypatch.setattr(module, "recordings_of", lambda _: made)
    monkeypatch.setattr(Decoder, "can_record", property(lambda _: True))
    monkeypatch.setattr(ProbedAgain, "plays", [])
    return made


def requests_of(world: World) -> list[EngineRequest]:
    orders = ([2, 0, 3], [0, 2, 3], [3, 1, 2, 0], [2, 3, 0])
    return [world.request([CHUNKS[i] for i in order], "weave", 0.3) for order in orders]


@pytest.fixture
def wanted(world: World) -> list[list[int]]:
    with Engine(world.decoder, SHARED) as engine:
        return [answer(engine.submit(request)) for request in requests_of(world)]


def test_prompts_over_recordings_are_answered_as_without(
    world: World,
    wanted: list[list[int]],
    recordings: Recordings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[bool] = []
    is_of = recorded_probe._ProbeUnderWay.is_of

    def heard(under_way: Any, *asked: Any) -> bool:
        taken.append(is_of(under_way, *asked))
        return taken[-1]

    monkeypatch.setattr(recorded_probe._ProbeUnderWay, "is_of", heard)
    with Engine(world.decoder, SHARED) as engine:
        for _ in range(3):
            assert [answer(engine.submit(each)) for each in requests_of(world)] == wanted
        at_rest(engine, world)
    assert sum(recordings.layers.kept.values()) > 0, "layers were played"
    # each but the first of its kind is played once, whether it was ordered ahead or not
    assert 9 <= len(ProbedAgain.plays) < 12
    assert len(taken) >= 8, "and most were ordered ahead"
    assert all(taken), "for the question that then asked"


def test_what_requests_needed_once_is_recorded_while_nobody_asks(
    world: World, wanted: list[list[int]], recordings: Recordings
) -> None:
    num_layers = world.decoder.spec.num_layers
    with Engine(world.decoder, SHARED) as engine:
        assert answer(engine.submit(requests_of(world)[0])) == wanted[0]
        until(lambda: set(recordings.layers.kept.values()) == {num_layers})
        until(lambda: all(recordings.probes.kept.values()))
        assert answer(engine.submit(requests_of(world)[0])) == wanted[0]
        at_rest(engine, world)
    assert recordings.probes.refusals.num_failed == 0
