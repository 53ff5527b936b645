"""The planner: exact before approximate, cheap before clever, and always with a reason."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.kv.tree import ChunkRef, KnowledgeTree, TreeConfig
from kvweave.kv.tree.tree import TreeBehind
from kvweave.plan.cost import StrategyInfo
from kvweave.plan.ordering import OrderPermission
from kvweave.plan.plan import PlanRequest, PredictionCheck, PromptShape, SpanKind, Stored, Verdict
from kvweave.reasons import Reason
from kvweave.types import ChunkId
from worlds.plan import (
    EPIC,
    FAST,
    TOKEN_BYTES,
    OpenGate,
    ask,
    kinds,
    make_planner,
    on_disk,
    price,
    why,
)
from worlds.tree import PREAMBLE, TensorOwner, World, cost_s, refs


def test_nothing_stored_means_the_preamble_and_the_rest_computed() -> None:
    plan = make_planner().plan(ask("a300", "b300"))
    assert kinds(plan) == ["exact", "computed", "computed", "computed"]
    assert plan.chosen.name == "prefix"
    assert plan.spans[1].reason is Reason.NOT_STORED
    assert why(plan, "fused epic") is Reason.TOO_FEW_HITS


def test_an_exact_path_is_taken_before_anything_approximate() -> None:
    world = World(device_tokens=5000)
    world.ask("a300", "b300")
    planner = make_planner(world, on_disk("a300", "b300"))
    plan = planner.plan(ask("a300", "b300"))
    assert kinds(plan) == ["exact", "exact", "exact", "computed"]
    assert plan.strategy is None
    assert plan.exact_tokens == PREAMBLE.num_tokens + 600


def test_stored_chunks_behind_an_exact_path_are_fused() -> None:
    world = World(device_tokens=5000)
    world.ask("a300")
    planner = make_planner(world, on_disk("b300", "c300"))
    plan = planner.plan(ask("a300", "b300", "c300", "d50"))
    assert kinds(plan) == ["exact", "exact", "fused", "fused", "computed", "computed"]
    assert plan.chosen.name == "mixed epic"
    assert plan.chosen.rows == 60 + 50 + 10
    assert plan.chosen.predicted_s == min(o.predicted_s for o in plan.options if o.predicted_s)


def test_rows_behind_fused_spans_may_not_enter_the_tree() -> None:
    planner = make_planner(stored=on_disk("b300"))
    plan = planner.plan(ask("a50", "b300", "c50"))
    assert [span.exact_after for span in plan.spans] == [True, True, False, False, False]


def test_a_chunk_stored_behind_the_preamble_is_exact_when_it_stands_there() -> None:
    planner = make_planner(stored=on_disk("a300", "b300", first=True))
    plan = planner.plan(ask("a300", "b300"))
    assert plan.spans[1].reason is Reason.FIRST
    assert plan.spans[1].kind is SpanKind.EXACT
    assert plan.spans[2].kind is SpanKind.FUSED
    other = make_planner(stored=on_disk("a300", "b300")).plan(ask("a300", "b300"))
    assert other.spans[1].kind is SpanKind.FUSED  # another encoding context


def test_a_rounded_first_chunk_stands_in_fused_plans_and_in_no_exact_one() -> None:
    stored = {n: c._replace(rounded=True) for n, c in on_disk("a300", "b300", first=True).items()}
    plan = make_planner(stored=stored).plan(ask("a300", "b300"))
    assert (plan.chosen.name, plan.chosen.rows) == ("fused epic", 10 + 30)  # none of the first
    assert plan.spans[1].reason is Reason.FIRST_ROUNDED
    assert [span.exact_after for span in plan.spans] == [True, False, False, False]
    exact = make_planner(stored=stored, gate=OpenGate()).plan(ask("a300", "b300"))
    assert kinds(exact) == ["exact", "computed", "computed", "computed"]
    assert exact.spans[1].reason is Reason.ROUNDED, "it says why a stored first chunk is computed"
    assert exact.spans[2].reason is Reason.NOT_EXACT


def test_a_slow_tier_makes_it_full_prefill_and_the_plan_says_why() -> None:
    stored = on_disk("a300", "b300")
    assert make_planner(stored=stored).plan(ask("a300", "b300")).strategy == "epic"
    slow = make_planner(stored=stored, links={"disk": 1e4})
    plan = slow.plan(ask("a300", "b300"))
    assert plan.strategy is None
    assert why(plan, "fused epic") is Reason.TIER_TOO_SLOW
    assert plan.spans[1].reason is Reason.NOT_EXACT


def test_of_two_tiers_only_the_slow_ones_chunks_are_computed() -> None:
    stored = on_disk("a300", tier="remote") | on_disk("b600", "c600")
    planner = make_planner(stored=stored, links={"disk": FAST, "remote": 1e5})
    plan = planner.plan(ask("a300", "b600", "c600"))
    assert kinds(plan) == ["exact", "computed", "fused", "fused", "computed"]
    assert plan.spans[1].reason is Reason.TIER_TOO_SLOW
    assert plan.spans[1].exact_after


def test_the_slow_tiers_chunk_is_computed_wherever_it_stands() -> None:
    stored = on_disk("a300", tier="remote") | on_disk("b600", "c600")
    planner = make_planner(stored=stored, links={"disk": FAST, "remote": 1e5})
    plan = planner.plan(ask("b600", "c600", "a300"))
    assert kinds(plan) == ["exact", "fused", "fused", "computed", "computed"]
    assert not plan.spans[3].exact_after


def test_a_slow_host_is_not_waited_for_even_for_exact_pages() -> None:
    world = World(device_tokens=400, host_tokens=2000)
    world.ask("a300")
    world.ask("c300")
    assert world.where()[("a300",)] == {"host"}
    fast = make_planner(world).plan(ask("a300"))
    assert (kinds(fast), fast.spans[1].tier) == (["exact", "exact", "computed"], "host")
    slow = make_planner(world, links={"host": 100.0}).plan(ask("a300"))
    assert kinds(slow) == ["exact", "computed", "computed"]
    assert slow.spans[1].reason is Reason.TIER_TOO_SLOW
    unknown = make_planner(world, links={"disk": 1.0}).plan(ask("a300"))
    assert kinds(unknown) == ["exact", "computed", "computed"]


def test_what_lies_beside_the_layers_is_priced_for_strategies_that_read_it() -> None:
    needs = frozenset({"anchors"})
    stored = {n: c._replace(has=needs) for n, c in on_disk("a300", "b300").items()}
    anchored = StrategyInfo("anchored", needs=needs, extra_bytes_per_token=7.5)
    plain_bytes = 600 * TOKEN_BYTES
    for strategies, load_bytes in (
        ((EPIC, anchored), plain_bytes),
        ((anchored,), plain_bytes + 600 * 7.5),
    ):
        gate = OpenGate(epic=0.1, anchored=0.1)
        plan = make_planner(stored=stored, gate=gate).plan(
            ask("a300", "b300", strategies=strategies)
        )
        assert plan.strategy == strategies[0].name
        assert plan.chosen.load_bytes == load_bytes
        assert sum(span.load_bytes for span in plan.spans) == load_bytes


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gate": OpenGate()}, Reason.NOT_CALIBRATED),
        ({"gate": OpenGate(epic=None)}, Reason.BOUND_NOT_MET),
        ({"gate": OpenGate(epic=1.0)}, Reason.BOUND_NOT_MET),
        ({"links": {"host": FAST}}, Reason.TIER_UNKNOWN),
    ],
)
def test_every_refusal_has_its_reason(change: dict[str, object], reason: Reason) -> None:
    planner = make_planner(stored=on_disk("a300", "b300"), **change)  # type: ignore[arg-type]
    plan = planner.plan(ask("a300", "b300"))
    assert plan.strategy is None
    assert why(plan, "fused epic") is reason


@pytest.mark.parametrize(
    "strategy",
    [
        StrategyInfo("epic", needs=frozenset({"anchors"})),
        StrategyInfo("epic", variants=("filler",)),
    ],
)
def test_a_strategy_that_cannot_use_what_is_stored_says_so(strategy: StrategyInfo) -> None:
    planner = make_planner(stored=on_disk("a300", "b300"))
    plan = planner.plan(ask("a300", "b300", strategies=(strategy,)))
    assert plan.strategy is None
    assert why(plan, "fused epic") is Reason.NEEDS_MISSING


def test_a_gain_below_ten_percent_is_left() -> None:
    small = make_planner(stored=on_disk("a300"), gate=OpenGate(epic=0.95)).plan(ask("a300"))
    assert small.strategy is None
    assert why(small, "fused epic") is Reason.GAIN_TOO_SMALL


@pytest.mark.parametrize("times", [1.0, 1e-2, 1e-4])
def test_what_pays_is_fused_however_fast_the_device_is(times: float) -> None:
    links = {"disk": FAST / times}
    planner = make_planner(stored=on_disk("a300", "b300"), links=links)
    planner.costs.profile.prefill.scale(times)  # the grid of recomputing is the same one
    assert planner.plan(ask("a300", "b300")).strategy == "epic"


def test_what_a_fused_answer_takes_on_the_host_can_be_more_than_it_saves() -> None:
    planner = make_planner(stored=on_disk("a300", "b300"), links={"disk": FAST * 1e3})
    profile = planner.costs.profile
    profile.prefill.scale(1e-2)  # 610 tokens in 6 ms; the grid of recomputing is the same one
    for _ in range(12):
        profile.saw_unpriced(0.006, 0.002)
    assert planner.plan(ask("a300", "b300")).strategy is None
    for _ in range(200):  # exact answers alone: the host may be faster by now
        profile.saw_exact(0, 610, 0.0061)
    assert planner.plan(ask("a300", "b300")).strategy == "epic"


def test_a_request_without_strategies_is_planned_exactly() -> None:
    plan = make_planner(stored=on_disk("a300", "b300")).plan(ask("a300", "b300", strategies=()))
    assert plan.strategy is None
    assert kinds(plan) == ["exact", "computed", "computed", "computed"]


def test_the_cheapest_of_several_strategies_is_taken() -> None:
    slow = StrategyInfo("prophet", waits_for_all=True)
    planner = make_planner(
        stored=on_disk("a300", "b300"),
        links={"disk": 5e6},
        gate=OpenGate(epic=0.3, prophet=0.3),
    )
    plan = planner.plan(ask("a300", "b300", strategies=(slow, EPIC)))
    assert plan.strategy == "epic"
    assert why(plan, "fused prophet") in (Reason.DEARER, Reason.GAIN_TOO_SMALL)


def test_a_free_order_may_use_a_stored_path_and_a_kept_one_may_not() -> None:
    world = World(device_tokens=5000)
    world.ask("b300", "a300")
    planner = make_planner(world)
    kept = planner.plan(ask("a300", "b300"))
    free = planner.plan(ask("a300", "b300", order=OrderPermission.FREE))
    assert (kept.ordered_by, kept.exact_tokens) == ("given", 4)
    assert (free.ordered_by, free.exact_tokens) == ("tree", 604)


def test_a_free_order_leaves_in_the_tree_what_came_often_enough() -> None:
    world = World(device_tokens=5000)
    planner = replace(make_planner(world), tree_uses=2)
    free = ask("a300", "b300", "c300", order=OrderPermission.FREE)
    assert planner.plan(free).num_kept == 0, "none was seen before"
    planner.record_answer(ask("a300", "c300"), planner.plan(ask("a300", "c300")))
    plan = planner.plan(free)
    assert [chunk.id for chunk in plan.order] == ["a300", "b300", "c300"]
    assert plan.num_kept == 1, "behind one that is new, none"
    world.ask("a300", "b300")
    assert planner.plan(free).num_kept == 3, "what is there stays, and one behind it is known"
    assert planner.plan(ask("a300", "b300")).num_kept is None, "as found: all"
    assert make_planner(world).plan(free).num_kept is None, "by default: all"


def test_the_chunks_stand_behind_the_history() -> None:
    planner = make_planner(stored=on_disk("b300", "c300"))
    past = tuple(refs(["a300", "h50"]))
    plan = planner.plan(ask("b300", "c300", history=past))
    assert kinds(plan) == ["exact", "computed", "computed", "fused", "fused", "computed"]
    assert [span.in_history for span in plan.spans] == [False, True, True, False, False, False]
    assert plan.spans[1].reason is Reason.HISTORY
    assert [span.start for span in plan.spans] == [0, 4, 304, 354, 654, 954]
    assert plan.num_tokens == 4 + 350 + 600 + 10
    assert plan.chosen.rows == 350 + 60 + 10
    alone = planner.plan(ask("b300", "c300"))
    assert price(plan) > price(alone), "the history is computed and paid for"


def test_the_gate_hears_of_all_that_might_be_fused() -> None:
    shapes: list[PromptShape] = []

    class Listening(OpenGate):
        def min_ratio(self, strategy: str, bound: float, shape: PromptShape) -> Verdict:
            shapes.append(shape)
            return super().min_ratio(strategy, bound, shape)

    planner = make_planner(stored=on_disk("a300", "b300"), gate=Listening(weave=0.1))
    planner.plan(ask("a300", "b300"))
    planner.plan(ask("b300", "c300", history=tuple(refs(["a300", "h50"]))))
    assert shapes[0] == PromptShape(4 + 600 + 10, 2)
    assert shapes[-1] == PromptShape(4 + 950 + 10, 3, True, 50), "a chunk of an earlier turn counts"


def test_behind_a_history_no_chunk_is_exact_from_the_store() -> None:
    planner = make_planner(stored=on_disk("a300", "b300", first=True))
    assert planner.plan(ask("a300", "b300")).spans[1].kind is SpanKind.EXACT
    plan = planner.plan(ask("a300", "b300", history=tuple(refs(["h50"]))))
    assert kinds(plan) == ["exact", "computed", "fused", "fused", "computed"]
    exact = planner.plan(ask("a300", history=tuple(refs(["h50"])), strategies=()))
    assert kinds(exact) == ["exact", "computed", "computed", "computed"]
    free = ask("x50", "a300", history=tuple(refs(["h50"])), order=OrderPermission.FREE)
    assert planner.plan(free).ordered_by == "given"
    twice = planner.plan(ask("a300", "b300", history=tuple(refs(["a300"]))))
    assert kinds(twice) == ["exact", "fused", "fused", "fused", "computed"], (
        "a chunk of an earlier turn is fused like others"
    )


def test_a_history_in_the_tree_is_exact_and_chunks_may_be_ordered_behind_it() -> None:
    world = World(device_tokens=5000)
    world.ask("a300", "h50", "b300", "c200")
    planner = make_planner(world)
    past = tuple(refs(["a300", "h50"]))
    plan = planner.plan(ask("c200", "b300", history=past, order=OrderPermission.FREE))
    assert kinds(plan) == ["exact"] * 5 + ["computed"]
    assert [c.id for c in plan.order] == ["b300", "c200"]
    assert plan.exact_tokens == PREAMBLE.num_tokens + 850
    half = planner.plan(ask("c200", history=(*past, *refs(["i20"]))))
    assert kinds(half) == ["exact", "exact", "exact", "computed", "computed", "computed"]
    assert [span.in_history for span in half.spans] == [False, True, True, True, False, False]


def test_a_longer_path_in_a_slow_tier_does_not_change_the_order() -> None:
    world = World(device_tokens=700, host_tokens=2000)
    world.ask("b300", "c300")
    world.ask("a300", "d300")  # pushes b, c out to host
    assert world.where()[("b300", "c300")] == {"host"}
    request = ask("a300", "b300", "c300", order=OrderPermission.FREE)
    fast = make_planner(world).plan(request)
    assert (fast.ordered_by, fast.exact_tokens) == ("tree", 604)
    slow_planner = make_planner(world, links={"host": 100.0})
    slow, given = slow_planner.plan(request), slow_planner.plan(ask("a300", "b300", "c300"))
    assert slow.ordered_by == "given"
    assert price(slow) == price(given)


def test_bytes_that_others_wait_for_make_a_tier_slow() -> None:
    planner = make_planner(stored=on_disk("a300", "b300"))
    assert planner.plan(ask("a300", "b300")).strategy == "epic"
    planner = replace(planner, pending_bytes=lambda: {"disk": int(10 * FAST)})
    plan = planner.plan(ask("a300", "b300"))
    assert plan.strategy is None
    assert why(plan, "fused epic") is Reason.TIER_TOO_SLOW


def test_bytes_of_each_codec_come_at_their_own_pace() -> None:
    stored = {n: c._replace(codec="int8") for n, c in on_disk("a300", "b300").items()}
    slow = make_planner(stored=stored, links={"disk": FAST, "disk/int8": 1e4})
    assert slow.plan(ask("a300", "b300")).strategy is None
    other = make_planner(stored=stored, links={"disk": FAST, "disk/raw": 1e4})
    assert other.plan(ask("a300", "b300")).strategy == "epic", "the tier's own speed does for all"
    gone = make_planner(stored=stored, links={"disk/raw": FAST}).plan(ask("a300", "b300"))
    assert why(gone, "fused epic") is Reason.TIER_UNKNOWN


def test_a_strategy_that_cannot_run_is_listed_with_its_reason() -> None:
    planner = make_planner(stored=on_disk("a300"))
    planner = replace(planner, unavailable={"qcfuse": Reason.NO_LAYERS})
    assert why(planner.plan(ask("a300")), "fused qcfuse") is Reason.NO_LAYERS


def test_planning_changes_nothing() -> None:
    world = World(device_tokens=1000, host_tokens=1000)
    world.ask("a300")
    planner = make_planner(world, on_disk("b300"))
    before = (world.where(), [n.usage.uses for n in world.tree])
    assert planner.plan(ask("a300", "b300")) == planner.plan(ask("a300", "b300"))
    assert (world.where(), [n.usage.uses for n in world.tree]) == before


def test_a_preamble_that_the_tree_does_not_hold_is_computed() -> None:
    tree = TreeBehind(KnowledgeTree(TreeConfig(1000, 0), TensorOwner(), cost_s), PREAMBLE)
    planner = replace(make_planner(stored=on_disk("a300", first=True)), tree=tree)
    plan = planner.plan(ask("a300"))
    assert plan.spans[0].kind is SpanKind.COMPUTED
    assert plan.num_tokens == 4 + 300 + 10


def test_a_prediction_can_be_judged() -> None:
    assert PredictionCheck("prefix", 1.1, 1.0).error == pytest.approx(0.1)


POOL = ["a300", "b200", "c100", "d64", "e400"]


@settings(max_examples=80, deadline=None)
@given(
    past=st.lists(st.lists(st.sampled_from(POOL), min_size=1, max_size=4, unique=True), max_size=4),
    names=st.lists(st.sampled_from(POOL), max_size=5),
    stored=st.sets(st.sampled_from(POOL)),
    first=st.booleans(),
    speed=st.sampled_from([1e3, 1e5, 1e6, 1e9]),
    ratio=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    strategies=st.sampled_from([(EPIC,), ()]),
    order=st.sampled_from(list(OrderPermission)),
)
def test_a_plan_covers_the_prompt_and_is_never_dearer_than_full_prefill(
    past: list[list[str]],
    names: list[str],
    stored: set[str],
    first: bool,
    speed: float,
    ratio: float,
    strategies: tuple[StrategyInfo, ...],
    order: OrderPermission,
) -> None:
    world = World(device_tokens=700, host_tokens=1500)
    for path in past:
        world.ask(*path)
    planner = make_planner(
        world,
        on_disk(*stored, first=first),
        {"disk": speed, "host": speed * 10},
        gate=OpenGate(epic=ratio),
    )
    plan = planner.plan(ask(*names, strategies=strategies, order=order))
    ends = 0
    for span in plan.spans:
        assert span.start == ends
        ends += span.num_tokens
    assert ends == 4 + sum(chunk.num_tokens for chunk in set(refs(names))) + 10
    assert sorted(plan.order) == sorted(set(refs(names)))
    assert [s.chunk_id for s in plan.spans[1:-1]] == [c.id for c in plan.order]
    full = next(option for option in plan.options if option.name == "full")
    assert plan.chosen.predicted_s is not None
    assert full.predicted_s is not None
    assert plan.chosen.predicted_s <= full.predicted_s
    assert plan.chosen in plan.options
    if not strategies or ratio >= 1.0:
        assert plan.strategy is None
    loaded = sum(span.load_bytes for span in plan.spans)
    assert loaded == plan.chosen.load_bytes
    given = planner.plan(ask(*names, strategies=strategies))
    assert price(plan) <= price(given) + 1e-12, "the given order"
    exact_rows = sum(s.num_tokens for s in plan.spans if s.kind is SpanKind.COMPUTED)
    fused = sum(s.num_tokens for s in plan.spans if s.kind is SpanKind.FUSED)
    assert exact_rows <= plan.chosen.rows <= exact_rows + fused
    frontier = True
    for span in plan.spans:
        frontier = frontier and span.kind is not SpanKind.FUSED
        assert span.exact_after == frontier


def test_a_request_for_nothing_is_a_plan_too() -> None:
    plan = make_planner().plan(PlanRequest((), 10))
    assert kinds(plan) == ["exact", "computed"]
    assert plan.order == ()
    assert ChunkRef(ChunkId("a"), 1) not in plan.in_history


def test_a_path_that_comes_back_is_computed_once_it_pays_and_the_plan_says_so() -> None:
    planner, request = make_planner(stored=on_disk("a300", "b300")), ask("a300", "b300")
    chosen = []
    for _ in range(20):
        plan = planner.plan(request)
        chosen.append(plan.chosen)
        planner.record_answer(request, plan)
        if plan.chosen.reason is Reason.RETURNS:
            break
    fused_s, exact_s = chosen[0].predicted_s, chosen[-1].predicted_s
    assert fused_s is not None
    assert exact_s is not None
    known_s = 0.010  # the question alone
    earned = len(chosen) - 1
    assert earned * (fused_s - known_s) >= exact_s - fused_s > (earned - 1) * (fused_s - known_s)
    assert plan.strategy is None
    assert why(plan, "fused epic") is Reason.DEARER_IN_THE_END
    assert plan.chosen in plan.options
    assert kinds(plan) == ["exact", "computed", "computed", "computed"]
    other = planner.plan(ask("b300", "a300"))
    assert other.strategy == "epic", "the same chunks, another path"


def test_the_chance_of_a_close_call_is_paid_for() -> None:
    """A fused answer that is thrown away costs a second prefill: where that happens often, fusing
    does not pay although its own price is lower."""
    stored, request = on_disk("a300", "b300"), ask("a300", "b300")
    rarely = make_planner(stored=stored, gate=OpenGate(epic=0.5, close=0.05)).plan(request)
    often = make_planner(stored=stored, gate=OpenGate(epic=0.5, close=0.5)).plan(request)
    assert rarely.strategy == "epic"
    exact_s = next(o.expected_s for o in rarely.options if o.name == "prefix")
    assert rarely.chosen.again_s == pytest.approx(0.05 * exact_s)
    assert often.strategy is None
    fused = next(o for o in often.options if o.name == "fused epic")
    assert fused.predicted_s is not None
    assert fused.predicted_s < exact_s < fused.expected_s + 0.1 * exact_s
    assert fused.reason is Reason.GAIN_TOO_SMALL or fused.reason is Reason.DEARER


def test_a_fused_plan_says_what_is_a_close_call_and_an_exact_one_has_none() -> None:
    planner = make_planner(stored=on_disk("a300", "b300"), gate=OpenGate(epic=0.5, close_call=0.25))
    fused, exact = planner.plan(ask("a300", "b300")), planner.plan(ask("c300", "d300"))
    assert (fused.strategy, fused.close_call) == ("epic", 0.25)
    assert (exact.strategy, exact.close_call) == (None, 0.0)


def test_close_calls_that_are_seen_end_fusing_and_it_is_tried_again_later() -> None:
    planner = make_planner(stored=on_disk("a300", "b300"), gate=OpenGate(epic=0.5, close=0.05))
    request = ask("a300", "b300")
    first = planner.plan(request)
    assert first.strategy == "epic"
    for turn in range(40):
        # other paths: what comes back is computed once, which is another reason
        other = ask(f"x{turn}")
        planner.record_answer(other, replace(first, order=other.chunks), was_close=turn % 4 > 0)
    exact = planner.plan(request)
    assert exact.strategy is None
    for turn in range(200):
        other = ask(f"y{turn}")
        planner.record_answer(other, replace(exact, order=other.chunks))
    assert planner.plan(request).strategy == "epic"


def test_a_conversation_is_computed_exactly_as_soon_as_as_many_turns_more_pay_it_back() -> None:
    planner = make_planner(stored=on_disk("a300", "b300"), gate=OpenGate(epic=0.5))
    request = ask("a300", "b300")
    taken = [planner.plan(replace(request, turns=turns)).chosen for turns in range(4)]
    assert taken[0].reason is Reason.CHEAPEST
    assert taken[0].name == "fused epic"
    assert taken[-1].reason is Reason.RETURNS
    fused_s, exact_s, known_s = taken[0].expected_s, taken[-1].expected_s, 0.010
    for turns, chosen in enumerate(taken):
        is_paid_back = turns * (fused_s - known_s) >= exact_s - fused_s
        assert (chosen.reason is Reason.RETURNS) is (turns > 0 and is_paid_back)


def test_what_returned_of_a_fused_path_is_what_should_be_computed_in_idle_time() -> None:
    planner = make_planner(stored=on_disk("a300", "b300", "c300"))
    first, second = ask("a300", "b300"), ask("a300", "c300")
    plan = planner.plan(first)
    assert planner.num_returned(first, plan) == 0
    planner.record_answer(first, plan)
    assert planner.num_returned(second, planner.plan(second)) == 1
    assert planner.num_returned(first, planner.plan(first)) == 2
    exact = make_planner(gate=OpenGate()).plan(first)
    assert planner.num_returned(first, exact) == 0, "it is exact: the tree has it anyway"


def test_of_a_conversation_that_leaves_its_chunks_behind_the_history_alone_comes_back() -> None:
    planner = make_planner(stored=on_disk("a300", "b300"), gate=OpenGate(epic=0.5))
    said = tuple(refs(["h50"]))
    left_behind = replace(ask("a300", "b300"), history=said)
    kept = replace(left_behind, turns=1)
    plan = planner.plan(left_behind)
    assert plan.strategy == "epic"
    assert planner.num_returned(left_behind, plan) == 1
    assert planner.num_returned(kept, plan) == 3


def test_chunks_on_the_device_cost_no_loading_for_who_reads_them_there() -> None:
    """And for who cannot, the copy in a slower tier counts, or none."""
    sharing = StrategyInfo("epic", shares=True)
    there = {name: Stored("isolated", "device", 0) for name in ("a300", "b300")}
    plan = make_planner(stored=there).plan(ask("a300", "b300", strategies=(sharing,)))
    assert plan.strategy == "epic"
    assert [span.tier for span in plan.spans if span.kind is SpanKind.FUSED] == ["device"] * 2
    assert plan.chosen.load_bytes == 0
    assert plan.chosen.load is None
    disk = make_planner(stored=on_disk("a300", "b300"), links={"disk": 1e6})
    slow = disk.plan(ask("a300", "b300", strategies=(sharing,)))
    assert price(plan) < price(slow)
    apart = make_planner(stored=there).plan(ask("a300", "b300"))
    assert apart.strategy is None
    assert why(apart, "fused epic") is Reason.NEEDS_MISSING
