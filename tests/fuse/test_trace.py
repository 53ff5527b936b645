"""What a fused prefill leaves for those who look closer."""

import time

import pytest
import torch

from kvweave.fuse.prepared import prepare
from kvweave.model.decoder import Decoder
from worlds.engine import make_decoder
from worlds.fuse import SELECTING, World
from worlds.tiny_models import make_model_folder

SCORELESS = {"random", "stride", "epic"}  # chosen by position


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return make_decoder(make_model_folder(tmp_path_factory.mktemp("models"), "llama-yarn"))


@pytest.mark.parametrize("name", SELECTING)
def test_every_token_that_was_up_for_it_has_the_score_it_was_chosen_by(
    decoder: Decoder, name: str
) -> None:
    world = World(decoder)
    fused, _ = world.fuse(name, 0.3)
    if name in SCORELESS:
        assert fused.trace.scored == ()
        return
    scores: dict[int, float] = {}
    for scored in fused.trace.scored:
        assert len(scored.positions) == len(scored.scores)
        scores |= dict(zip(scored.positions.tolist(), scored.scores.tolist(), strict=True))
    assert sorted(scores) == world.request.hits
    last = dict(
        zip(
            fused.trace.scored[-1].positions.tolist(),
            fused.trace.scored[-1].scores.tolist(),
            strict=True,
        )
    )
    chosen = [last[position] for position in fused.recomputed]
    others = [score for position, score in last.items() if position not in fused.recomputed]
    assert not others or min(chosen) >= max(others), "the highest were recomputed"


def test_layers_follow_each_other_and_their_rows_are_the_pass_s(decoder: Decoder) -> None:
    began_s = time.perf_counter()
    fused, _ = World(decoder).fuse("weave", 0.4)
    trace = fused.trace
    assert trace.rows_per_layer == fused.rows_per_layer
    assert len(trace.layers) == decoder.spec.num_layers
    at_s = began_s
    for layer in trace.layers:
        assert at_s <= layer.started_s <= layer.laid_s <= layer.ended_s
        at_s = layer.ended_s
    assert trace.started_s <= trace.chosen_s <= trace.layers[0].started_s
    assert at_s <= trace.ended_s <= time.perf_counter()
    assert trace.scored_layers, "it looks at stored keys"


def test_a_prepared_prompt_has_rows_and_scores_and_no_times_of_layers(decoder: Decoder) -> None:
    world = World(decoder)
    prepared = prepare(world.stitched(), world.strategy("weave"), 0.4)
    assert prepared.trace is not None
    fused, _ = world.fuse("weave", 0.4)
    assert prepared.trace.layers == ()
    assert prepared.trace.rows_per_layer == fused.rows_per_layer
    mine, theirs = prepared.trace.scored[0], fused.trace.scored[0]
    assert torch.equal(mine.positions, theirs.positions)
    torch.testing.assert_close(mine.scores, theirs.scores)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_where_nothing_is_to_choose_there_are_no_scores(decoder: Decoder, ratio: float) -> None:
    fused, _ = World(decoder).fuse("weave", ratio)
    assert fused.trace.scored == ()
