"""When a fused prompt waits for its bytes, and how it is computed: the rules."""

from dataclasses import replace
from itertools import product

from kvweave.engine.fused_step import PrefillMode, prefill_mode_of, waits_outside
from kvweave.engine.request import LoadCost
from kvweave.fuse.strategy import ModelFacts, open_strategy


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


def test_how_a_fused_prompt_is_computed() -> None:
    facts = ModelFacts(3)
    sliced, in_flight = open_strategy("weave", facts), open_strategy("cacheblend", facts)
    for lonely, held, arrived, copies in product((True, False), repeat=4):
        facts_of_it = {"alone": lonely, "held": held, "arrived": arrived, "copies": copies}
        assert prefill_mode_of(in_flight, **facts_of_it) is PrefillMode.WHOLE
        streams = lonely and (copies or not arrived or not held)
        assert prefill_mode_of(sliced, **facts_of_it) is (
            PrefillMode.STREAMED if streams else PrefillMode.JOINED
        )
    masked = replace(sliced, mask="bottom_right")
    assert (
        prefill_mode_of(masked, alone=False, held=False, arrived=True, copies=False)
        is PrefillMode.WHOLE
    )
