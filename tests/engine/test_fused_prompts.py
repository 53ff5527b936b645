"""When a fused prompt waits for its bytes, and how it is computed: the rules."""

from itertools import product

from kvweave.engine.chunk_loader import waits_outside
from kvweave.engine.fused_prompts import runs_in_slices
from kvweave.engine.request import LoadCost
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.strategy import ModelFacts


def test_who_waits_for_bytes_while_others_are_computed() -> None:
    facts = ModelFacts(3)
    sliced, in_flight = open_strategy("weave", facts), open_strategy("cacheblend", facts)
    slow, quick, there = LoadCost(4.0, 1.0), LoadCost(0.5, 1.0), LoadCost(0.001, 1.0)
    for strategy in (sliced, in_flight):
        assert not waits_outside(strategy, slow, others_ready=False)
        assert waits_outside(strategy, slow, others_ready=True)
        assert waits_outside(strategy, None, others_ready=True)
        assert not waits_outside(strategy, there, others_ready=True)
    assert waits_outside(sliced, quick, others_ready=True), "they would wait for its bytes"
    assert not waits_outside(in_flight, quick, others_ready=True), "its pass overlaps them"


def test_which_prompts_run_in_slices_beside_others() -> None:
    facts = ModelFacts(3)
    sliced, in_flight = open_strategy("weave", facts), open_strategy("cacheblend", facts)
    names = ("is_alone", "is_guess", "has_arrived", "travels")
    for values in product((True, False), repeat=4):
        situation = dict(zip(names, values, strict=True))
        alone, guess, arrived, travels = values
        assert not runs_in_slices(in_flight, **situation), "its pass chooses the rows"
        at_once = alone and (travels or not arrived or not guess)
        assert runs_in_slices(sliced, **situation) is not at_once
