"""`reuse="auto"`: the cheapest way the gate allows on this machine, and it says why."""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvweave import Weave
from kvweave.app.answer.question import FILLED, Question, QuestionDefaults
from kvweave.app.auto.auto_planner import AutoPlanner, PromptPlan
from kvweave.app.auto.facts import (
    CalibratedGate,
    fusing_strategies,
    layer_bytes_per_token,
    strategy_info,
)
from kvweave.app.auto.lessons import STALE_S
from kvweave.app.auto.machine_profile import profile_path
from kvweave.app.library.kv_behind import PreambleKey
from kvweave.app.library.runtime import ModelRuntime
from kvweave.app.weave import Answer
from kvweave.cli.plan_view import plan_document
from kvweave.config import WeaveConfig, known_keys
from kvweave.engine.engine import Engine
from kvweave.errors import RequestError
from kvweave.fuse.prefill import StoredPrompt
from kvweave.fuse.record import FuseRecord
from kvweave.fuse.recordings import recordings_of
from kvweave.fuse.selectors.strategies import ModelFacts, open_strategy
from kvweave.fuse.taper import Taper
from kvweave.kernels.recording import note_first_time
from kvweave.kv.tiers.config import DiskTierConfig
from kvweave.model.decoder import Decoder
from kvweave.plan.loading_cost import UNCHECKED
from kvweave.plan.plan import Plan, PromptShape, SpanKind
from kvweave.plan.profile import Grid, TierLink, load_profile
from kvweave.reasons import Reason
from kvweave.text.tokenizer import Tokenizer
from worlds.auto import (
    GREEDY,
    QUESTION,
    TEXTS,
    TOKEN_S,
    World,
    ask,
    load_links,
    model,
    planning_of,
    probed,
    weave,
    world,
)
from worlds.faulty import FaultPlan, FaultyTierConfig
from worlds.running import Run, run
from worlds.weaves import ingest_with_fronts

__all__ = ["model", "run", "weave", "world"]


def reasons(answer: Answer) -> dict[str, Reason]:
    assert answer.decision is not None
    return why(answer.decision.plan)


def why(plan: Plan) -> dict[str, Reason]:
    """Why each option was taken or not."""
    return {option.name.split()[-1]: option.reason for option in plan.options}


def test_an_open_gate_fuses_with_the_smallest_ratio_within_the_bound(
    world: World, weave: Weave
) -> None:
    world.calibrate(("epic", 0.05, 0.03), ("epic", 0.1, 0.01), ("epic", 0.3, 0.001))
    world.set_machine()
    answer = ask(weave)
    assert answer.decision is not None
    assert answer.explain is not None
    assert answer.decision.plan.chosen.name == "fused epic"
    assert (answer.explain.strategy, answer.explain.ratio) == ("epic", 0.1)
    assert answer.explain.counts["reused"] > 256
    assert answer.text == ask(weave, "epic", ratio=0.1).text
    assert answer.explain.states == ask(weave, "epic", ratio=0.1).explain.states  # type: ignore[union-attr]
    tighter = ask(weave, bound=0.005)
    assert tighter.explain is not None
    assert tighter.explain.ratio == 0.3


def test_a_closed_gate_is_exact_and_equal_to_full(world: World, weave: Weave) -> None:
    world.set_machine()
    answer = ask(weave)
    assert answer.explain is not None
    assert answer.explain.counts["reused"] == answer.explain.counts["recomputed"] == 0
    assert reasons(answer)["weave"] is Reason.NOT_CALIBRATED
    assert answer.text == ask(weave, "full").text
    prompt = weave.build_prompt("x").preamble
    assert answer.explain.counts["exact"] == len(prompt), "int8 rounds: only the preamble is exact"


def test_a_strategy_without_critical_layers_is_one_that_was_not_calibrated(
    world: World, weave: Weave
) -> None:
    world.set_machine()
    assert reasons(ask(weave))["qcfuse"] is Reason.NOT_CALIBRATED


def test_layers_that_a_model_has_not_are_declined_with_the_way_out(world: World) -> None:
    found, unavailable = fusing_strategies(ModelFacts(world.decoder.spec.num_layers, (99,)))
    assert unavailable == {"qcfuse": Reason.NO_LAYERS}
    assert "qcfuse" not in found
    assert "kvweave calibrate layers" in Reason.NO_LAYERS


def test_a_rounded_first_chunk_is_computed_and_the_plan_says_so(world: World, weave: Weave) -> None:
    world.set_machine()
    assert weave.plan(QUESTION).spans[1].reason is Reason.ROUNDED


def test_a_bound_that_no_ratio_meets_closes_the_gate(world: World, weave: Weave) -> None:
    world.calibrate(("epic", 0.1, 0.01))
    world.set_machine()
    answer = ask(weave, bound=0.001)
    assert reasons(answer)["epic"] is Reason.BOUND_NOT_MET
    assert answer.text == ask(weave, "full").text


def test_a_table_measured_behind_another_filler_opens_no_gate(world: World, weave: Weave) -> None:
    world.set_machine()
    world.calibrate(("epic", 0.1, 0.01), filler=(1, 2))
    assert reasons(ask(weave))["epic"] is Reason.NOT_CALIBRATED


def test_a_table_measured_behind_another_preamble_is_held_to_half_the_bound(
    world: World, weave: Weave
) -> None:
    world.set_machine()
    world.calibrate(("epic", 0.1, 0.01), preamble=(1, 2))
    assert reasons(ask(weave, bound=0.019))["epic"] is Reason.HALF_BOUND_NOT_MET
    passed = reasons(ask(weave, bound=0.02))["epic"]  # whose exact path the tree has by now
    assert passed is Reason.TOO_FEW_HITS


def test_a_table_of_few_questions_opens_no_gate(world: World, weave: Weave) -> None:
    world.calibrate(("epic", 0.1, 0.01), num_questions=19)
    world.set_machine()
    answer = ask(weave)
    assert reasons(answer)["epic"] is Reason.NOT_CALIBRATED
    assert answer.text == ask(weave, "full").text


def test_a_machine_whose_prefill_takes_a_millisecond_fuses_what_pays(
    world: World, weave: Weave
) -> None:
    world.calibrate(("epic", 0.1, 0.01))
    world.set_machine(token_s=1e-6)
    assert reasons(ask(weave))["epic"] is Reason.CHEAPEST


def test_a_tier_slower_than_compute_is_left_and_the_record_says_why(
    world: World, tmp_path: Path
) -> None:
    disk = DiskTierConfig(tmp_path / "slow")
    world.tier = FaultyTierConfig(disk, FaultPlan())
    world.calibrate(("reuse", 0.0, 0.0))
    with world.open() as weave:
        ingest_with_fronts(weave, *TEXTS)
        assert weave.library.store.flush()
        world.set_machine()
        quick = ask(weave)
        assert quick.explain is not None
        assert quick.explain.counts["reused"] > 256
        assert "faulty disk/int8" in load_links(weave)
    world.tier = FaultyTierConfig(disk, FaultPlan(delay=1.0, delay_s=0.3))
    world.set_machine(token_s=1e-5)  # a token takes no time, a read takes long
    with world.open() as weave:
        started_s = time.monotonic()
        first = why(weave.plan(QUESTION))
        assert first["reuse"] is Reason.TIER_UNKNOWN, "nobody waits for a slow tier"
        assert time.monotonic() - started_s < 2
        plan_until(weave, lambda plan: why(plan)["reuse"] is not Reason.TIER_UNKNOWN)
        slow = ask(weave)
        assert slow.explain is not None
        assert slow.explain.counts["reused"] == 0
        assert not slow.explain.loaded_bytes
        assert reasons(slow)["reuse"] is Reason.TIER_TOO_SLOW
        assert slow.text == ask(weave, "full").text


def test_a_tier_that_recovered_is_found_again_after_a_while(world: World, tmp_path: Path) -> None:
    world.tier = DiskTierConfig(tmp_path / "disk")
    world.calibrate(("reuse", 0.0, 0.0))
    with world.open() as weave:
        ingest_with_fronts(weave, *TEXTS)
        assert weave.library.store.flush()
        world.set_machine()
        weave.plan(QUESTION)
        load_links(weave)["disk/int8"] = TierLink(1.0, seen_s=time.time())  # a byte per second
        assert why(weave.plan(QUESTION))["reuse"] is Reason.TIER_TOO_SLOW
        load_links(weave)["disk/int8"].seen_s -= STALE_S
        plan_until(weave, lambda plan: plan.strategy == "reuse")


def test_a_tier_that_takes_longer_than_its_price_is_left_after_a_few_answers(
    world: World, tmp_path: Path
) -> None:
    disk = DiskTierConfig(tmp_path / "slow")
    world.tier = disk
    world.calibrate(("reuse", 0.0, 0.0))
    with world.open() as weave:
        ingest_with_fronts(weave, *TEXTS)
        assert weave.library.store.flush()
    world.tier = FaultyTierConfig(disk, FaultPlan(delay=1.0, delay_s=0.1))
    world.set_machine(token_s=2e-4)
    with world.open() as weave:
        link = "faulty disk/int8"
        links = probed(weave, link)
        links[link] = TierLink(1e9, seen_s=time.time())  # what the first plans believe
        first = weave.plan(QUESTION)
        assert first.chosen.load is not None
        assert (first.chosen.load.link, first.chosen.load.share) == (link, UNCHECKED)
        links[link] = TierLink(first.chosen.load_bytes / 0.02, seen_s=time.time())
        used = [ask(weave).explain for _ in range(6)]
        reused = [record is not None and record.counts["reused"] > 0 for record in used]
        assert reused[0], "it is taken until it is known to be slow"
        assert not reused[-1]
        assert reused == sorted(reused, reverse=True)
        assert len(links[link].paid.shares) == sum(reused)
        assert min(links[link].paid.shares) > UNCHECKED
    kept = load_profile(profile_path(world.decoder)).links[link].paid
    assert len(kept.shares) == sum(reused), "the next process knows too"


def test_an_answer_that_recorded_something_says_nothing_of_what_loading_costs(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second prompt of a size records its layers: with the first, which compiles, two slow
    ones would keep a new server from loading."""
    world.tier = DiskTierConfig(tmp_path / "disk")
    world.calibrate(("reuse", 0.0, 0.0))
    with world.open() as weave:
        ingest_with_fronts(weave, *TEXTS)
        assert weave.library.store.flush()
        world.set_machine()
        weave.plan(QUESTION)  # opens the planning
        links, link = load_links(weave), "disk/int8"
        links[link] = TierLink(1e9, seen_s=time.time())
        # so slow that its load is seen beside the work, and taken all the same
        links[link] = TierLink(weave.plan(QUESTION).chosen.load_bytes / 1.0, seen_s=time.time())
        record = StoredPrompt._record
        refusals = recordings_of(world.decoder).layers.refusals

        def recording(*args: Any) -> FuseRecord:
            assert refusals.may_record(64)
            return record(*args)

        with monkeypatch.context() as patched:
            patched.setattr(StoredPrompt, "_record", recording)
            assert ask(weave).explain.counts["reused"]  # type: ignore[union-attr]
        assert links[link].paid.shares == []
        assert ask(weave).explain.counts["reused"]  # type: ignore[union-attr]
        assert len(links[link].paid.shares) == 1


def test_an_answer_for_which_a_kernel_was_launched_in_a_new_way_teaches_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been compiled: seconds that were taken for the price of every later prompt."""
    world.calibrate(("reuse", 0.0, 0.0))
    with world.open() as weave:
        ingest_with_fronts(weave, *TEXTS)
        world.set_machine()
        machine = planning_of(weave).machine
        record = StoredPrompt._record

        def launching(*args: Any) -> FuseRecord:
            note_first_time("a kernel")
            return record(*args)

        with monkeypatch.context() as patched:
            patched.setattr(StoredPrompt, "_record", launching)
            assert ask(weave).explain.counts["reused"]  # type: ignore[union-attr]
        assert machine.heard.fused == 0
        assert ask(weave).explain.counts["reused"]  # type: ignore[union-attr]
        assert machine.heard.fused == 1


def test_what_others_should_wait_for_is_expected_by_codec(world: World, tmp_path: Path) -> None:
    world.tier = DiskTierConfig(tmp_path / "disk")
    world.calibrate(("reuse", 0.0, 0.0))
    with world.open() as weave:
        ingest_with_fronts(weave, *TEXTS)
        assert weave.library.store.flush()
        world.set_machine()
        weave.plan(QUESTION)
        links = load_links(weave)
        links.clear()
        links["disk/int8"] = TierLink(1e6, seen_s=time.time())
        plan = weave.plan(QUESTION)
        assert planning_of(weave).estimate_cost(plan).load_s == pytest.approx(
            plan.chosen.load_bytes / 1e6
        )


def plan_until(weave: Weave, is_so: Callable[[Plan], bool]) -> None:
    """Plan until something found out beside the plans shows."""
    give_up_s = time.monotonic() + 20
    while not is_so(weave.plan(QUESTION)):
        assert time.monotonic() < give_up_s, "it never came"
        time.sleep(0.05)


def test_single_chunks_of_a_slow_tier_are_computed_and_not_loaded(
    world: World, weave: Weave
) -> None:
    world.calibrate(("reuse", 0.0, 0.0))
    world.set_machine()
    weave.plan(QUESTION)  # opens the planning
    encoder, store = weave.library.encoder, weave.library.store
    assert store.flush()
    links = load_links(weave)
    links["host"] = TierLink(
        2e4
    )  # bytes per second: about a third of the chunks in the compute time
    mixed = ask(weave)
    assert mixed.decision is not None
    assert mixed.explain is not None
    spans = [s for s in mixed.decision.plan.spans if s.chunk_id is not None]
    kinds = {span.kind for span in spans}
    assert kinds == {SpanKind.FUSED, SpanKind.COMPUTED}, mixed.decision.plan.options
    for span, chunk in zip(spans, mixed.explain.chunks, strict=True):
        assert (chunk.why is not None) == (span.kind is SpanKind.COMPUTED)
        if span.kind is SpanKind.COMPUTED:
            assert chunk.why == Reason.TIER_TOO_SLOW
            assert chunk.tier is None
    assert encoder.preparation.variant.kind == "filler"


def test_the_answer_carries_predicted_and_actual_seconds(world: World, weave: Weave) -> None:
    world.set_machine()
    answer = ask(weave)
    assert answer.decision is not None
    judged, plan = answer.decision.judged, answer.decision.plan
    assert judged.option == plan.chosen.name == "prefix"
    assert judged.predicted_s == pytest.approx(plan.chosen.rows * TOKEN_S, rel=0.01)
    assert 0 < judged.actual_s < answer.ttft_ms / 1e3
    assert ask(weave, "full").decision is None


def test_the_machine_is_measured_once_kept_and_moved_by_answers(
    world: World, weave: Weave, capsys: pytest.CaptureFixture[str]
) -> None:
    path = profile_path(world.decoder)
    ask(weave, "reuse")
    assert not path.exists(), "measured for a request that did not ask for auto"
    first = ask(weave)
    assert "measuring this machine" in capsys.readouterr().err
    measured = load_profile(path)
    assert measured.model == world.decoder.revision
    assert min(s for row in measured.prefill.seconds for s in row) > 0
    assert measured.links["host"].bytes_per_s > 0
    assert measured.stitch_s > 0
    weave.close()
    moved = load_profile(path)
    assert moved.prefill.seconds != measured.prefill.seconds
    with world.open() as again:
        assert ask(again).text == first.text
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("damage", ["cut", "nan", "links"])
def test_a_damaged_machine_profile_is_measured_again_with_one_log_line(
    world: World, weave: Weave, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    path = world.set_machine()
    saved = json.loads(path.read_text())
    if damage == "nan":
        saved["prefill"]["seconds"][0][0] = float("nan")
    if damage == "links":
        saved["links"] = []
    path.write_text("{" if damage == "cut" else json.dumps(saved))
    with caplog.at_level(logging.WARNING):
        ask(weave)
    assert len([record for record in caplog.records if str(path) in record.message]) == 1
    assert load_profile(path).device != "test"


def test_left_open_auto_answers_where_kv_is_stored_and_prices_are_known(
    world: World, weave: Weave
) -> None:
    world.calibrate(("epic", 0.1, 0.01))
    world.set_machine()
    answer = weave.ask(QUESTION, sampling=GREEDY)
    assert answer.decision is not None
    assert answer.decision.plan.chosen.name == "fused epic"
    assert answer.explain is not None
    assert answer.explain.why is None


def test_left_open_nobody_waits_for_a_measurement_and_explain_says_so(
    world: World, weave: Weave, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = weave.ask(QUESTION, sampling=GREEDY)
    assert answer.decision is None
    assert answer.explain is not None
    assert (answer.explain.strategy, answer.explain.why) == ("prefix", Reason.NOT_MEASURED)
    assert not profile_path(world.decoder).exists()
    assert "measuring" not in capsys.readouterr().err
    ask(weave)  # who says "auto" has it measured
    again = weave.ask(QUESTION, sampling=GREEDY)
    assert again.decision is not None
    assert again.text == answer.text, "nothing was calibrated: exact"


def test_left_open_what_cannot_be_reused_is_computed(world: World) -> None:
    world.set_machine()
    with world.open() as weave:
        weave.ingest(*TEXTS)
        none = weave.ask(QUESTION, sampling=GREEDY).explain
        ingest_with_fronts(weave, *TEXTS)
        other = weave.ask(QUESTION, sampling=GREEDY, system="Be kind.").explain
        named = weave.ask(QUESTION, sampling=GREEDY, reuse="full").explain
    assert none is not None
    assert (none.strategy, none.why) == ("prefix", Reason.NOTHING_STORED)
    assert other is not None
    assert (other.strategy, other.why) == ("prefix", Reason.NOTHING_STORED)
    assert named is not None
    assert named.why is None, "the caller said so"


def test_a_ratio_alone_means_weave(world: World, weave: Weave) -> None:
    world.set_machine()
    answer = weave.ask(QUESTION, sampling=GREEDY, ratio=0.2)
    assert answer.explain is not None
    assert (answer.explain.strategy, answer.explain.ratio) == ("weave", 0.2)
    assert answer.text == ask(weave, "weave", ratio=0.2).text


def test_the_knowledge_tree_is_priced_by_the_measured_machine(
    world: World, weave: Weave, monkeypatch: pytest.MonkeyPatch
) -> None:
    prices: list[Callable[[int, int], float]] = []
    monkeypatch.setattr(Engine, "price", lambda _, cost_s: prices.append(cost_s))
    world.set_machine()
    ask(weave)
    assert [price(0, 1000) for price in prices] == [pytest.approx(1000 * TOKEN_S, rel=0.5)]
    ask(weave)
    assert len(prices) == 1, "once, when the profile is opened; it moves by itself"


def test_an_option_that_is_configured_has_the_type_of_its_key() -> None:
    assert len(FILLED) > 5
    for name, key in FILLED.items():
        value = WeaveConfig().value(key)
        assert getattr(Question("q").fill_in(QuestionDefaults()), name) == value
        assert known_keys()[key].kind.complaint(value) is None, name


def test_a_free_order_is_a_permutation_and_keep_keeps(world: World, weave: Weave) -> None:
    world.set_machine()
    kept = weave.plan(QUESTION)
    free = weave.plan(QUESTION, order="free")
    assert kept.ordered_by == "given"
    assert kept.order_kept == Reason.NOT_CALIBRATED, "auto may not, and says why"
    assert free.order_kept is None
    assert sorted(free.order) == sorted(kept.order)
    assert len(kept.order) == len(TEXTS)


def test_a_chunk_given_twice_stays_in_the_prompt_twice(world: World, weave: Weave) -> None:
    world.set_machine()
    documents = ["Drain the node.", "Cordon it.", "Drain the node."]
    auto = ask(weave, documents=documents)
    full = ask(weave, "full", documents=documents)
    assert (auto.prompt_tokens, auto.text) == (full.prompt_tokens, full.text)


def test_what_auto_cannot_take_is_refused(weave: Weave) -> None:
    with pytest.raises(RequestError, match="chooses the ratio itself"):
        ask(weave, ratio=0.1)
    with pytest.raises(RequestError, match="bound -1 is no number"):
        ask(weave, bound=-1.0)
    with pytest.raises(RequestError, match="order 'any' is unknown; known: as_found, free, auto"):
        ask(weave, order="any")


def test_behind_another_system_prompt_auto_is_exact_until_its_chunks_come_back(
    world: World, weave: Weave
) -> None:
    world.calibrate(("epic", 0.1, 0.01))
    world.set_machine()
    first, second = ask(weave, system="Rhyme."), ask(weave, system="Rhyme.", k=2)
    for answer in (first, second):
        assert answer.decision is not None
        assert answer.decision.plan.strategy is None, "nothing is stored behind it"
    assert weave.library.promotion is not None
    assert weave.library.promotion.wait(60)
    kv = weave.library.behind(
        PreambleKey("", weave.build_prompt("x", [], system="Rhyme.").preamble)
    )
    chunks = [hit.chunk.token_ids for hit in weave.search(QUESTION, 2)]
    assert kv.has_kv(chunks), "what came back is stored behind this prompt as well"
    named = ask(weave, reuse="reuse", system="Rhyme.", k=2)
    assert named.explain is not None
    assert {chunk.tier for chunk in named.explain.chunks} <= {"host", "tree"}


def test_without_a_knowledge_base_auto_reuses_what_is_exact(
    model: tuple[Decoder, Tokenizer],
) -> None:
    with Weave(ModelRuntime(*model, "tiny")) as weave:
        first, again = (ask(weave, documents=[text for _, text in TEXTS]) for _ in range(2))
    assert first.text == again.text
    assert again.explain is not None
    assert again.explain.counts["computed"] < 0.2 * again.prompt_tokens
    with Weave(ModelRuntime(*model, "tiny")) as weave:
        assert ask(weave).text, "a question without chunks is one, too"


def test_the_time_of_a_plan_is_not_called_retrieval(
    world: World, weave: Weave, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.set_machine()
    plan = AutoPlanner.plan

    def slow(*arguments: Any) -> PromptPlan:
        time.sleep(0.5)
        return plan(*arguments)

    monkeypatch.setattr(AutoPlanner, "plan", slow)
    answer = ask(weave)
    assert answer.explain is not None
    assert 0.0 < answer.explain.stages.retrieve < answer.ttft_ms - 490


def test_prices_are_kept_apart_by_codec(world: World) -> None:
    paths = {profile_path(world.decoder, codec) for codec in ("int8", "raw", "fp16")}
    assert len(paths) == 3
    assert profile_path(world.decoder) == profile_path(world.decoder, "int8")


def test_the_gate_knows_strategies_that_were_measured_and_no_others() -> None:
    shut = CalibratedGate((), "p").min_ratio("epic", 1.0, PromptShape(1000, 5))
    assert (shut.ratio, shut.reason) == (None, Reason.NOT_CALIBRATED)


def test_strategies_are_priced_by_what_their_selectors_need(weave: Weave) -> None:
    encoder = weave.library.encoder
    facts = ModelFacts(encoder.decoder.spec.num_layers, (1, 2))
    infos = {
        name: strategy_info(open_strategy(name, facts), encoder)
        for name in ("epic", "cacheblend", "prophetkv", "qcfuse", "reuse")
    }
    assert infos["epic"].selection_bytes_per_token == infos["epic"].probe_layers == 0
    assert infos["cacheblend"].full_width_layers == 1
    assert infos["prophetkv"].waits_for_all
    assert {info.depth for info in infos.values()} == {1.0}
    tapered = replace(open_strategy("weave", facts), taper=Taper(1, 0.25))
    assert strategy_info(tapered, encoder).depth == tapered.depth(facts.num_layers) < 1
    assert infos["qcfuse"].needs == {"anchors:kvzip"}
    assert infos["qcfuse"].extra_bytes_per_token > 0
    layer_bytes = layer_bytes_per_token(encoder)
    selection = infos["qcfuse"].selection_bytes_per_token
    assert selection == pytest.approx(2 * layer_bytes + infos["qcfuse"].extra_bytes_per_token)
    assert {infos[name].extra_bytes_per_token for name in ("epic", "prophetkv", "reuse")} == {0}
    assert {info.variants for info in infos.values()} == {("filler:1",)}


def test_a_chunk_is_priced_by_what_a_load_of_its_layers_reads(weave: Weave) -> None:
    library = weave.library
    record = ask(weave, "reuse").explain
    assert record is not None
    lengths = [chunk.num_tokens for chunk in record.chunks if chunk.tier is not None]
    priced = sum(library.encoder.plain_bytes(num_tokens) for num_tokens in lengths)
    assert record.loaded_bytes == {"host": priced}


def test_waiting_for_what_host_copies_lack_is_not_taken_for_laying(
    world: World, weave: Weave
) -> None:
    world.set_machine()
    weave.plan(QUESTION)
    planning = planning_of(weave)
    record = ask(weave, "reuse").explain
    assert record is not None
    before_s = planning.machine.stitch_s
    strategy = open_strategy("reuse", ModelFacts(world.decoder.spec.num_layers))
    planning._lessons.move_prices(strategy, replace(record, arrived_s={"disk": 5.0}), 5.0)
    assert planning.machine.stitch_s == before_s
    planning._lessons.move_prices(strategy, replace(record, arrived_s={}), 5.0)
    assert planning.machine.stitch_s != before_s


def test_rows_that_leave_early_teach_as_the_parts_of_rows_they_are_priced_as(
    world: World, weave: Weave, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.set_machine()
    weave.plan(QUESTION)
    planning = planning_of(weave)
    record = ask(weave, "epic").explain
    assert record is not None
    counts = record.counts
    assert counts["recomputed"] > 1
    taught: list[int] = []
    monkeypatch.setattr(Grid, "observe", lambda _, total, rows, *__: taught.append(rows))
    plain = open_strategy("epic", ModelFacts(world.decoder.spec.num_layers))
    half = replace(plain, taper=Taper(0, 0.5))  # half of the rows behind the first layer's keys
    for strategy in (plain, half):
        planning._lessons.move_prices(strategy, record, 1.0)
    computed, recomputed = counts["computed"], counts["recomputed"]
    assert taught == [computed + recomputed, computed + round(0.5 * recomputed)]


def test_plan_prints_every_option_and_computes_no_answer(
    world: World, weave: Weave, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.calibrate(("epic", 0.1, 0.01))
    world.set_machine()
    monkeypatch.setattr("kvweave.cli.plan.open_weave", lambda **_: weave)
    monkeypatch.setattr("kvweave.engine.engine.Engine.submit", None)
    monkeypatch.setenv("COLUMNS", "160")
    world.folder.mkdir(exist_ok=True)
    ran = run("plan", QUESTION, "--kb", world.folder)
    assert ran.code == 0, ran.err
    for words in ("→ fused epic at 0.1", "full", "prefix", "not calibrated", "chunk 5", "question"):
        assert words in ran.out, ran.out
    assert "s × 0.00" in ran.out, "what of the load the price holds: from host memory nothing"


def test_plan_as_json_has_what_people_see(
    world: World, weave: Weave, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.calibrate(("epic", 0.1, 0.01))
    world.set_machine()
    monkeypatch.setattr("kvweave.cli.plan.open_weave", lambda **_: weave)
    ran = run("plan", QUESTION, "--kb", world.folder, "--json", "--bound", 0.001)
    plan = json.loads(ran.out)
    assert (plan["bound"], plan["order"], plan["chosen"]) == (0.001, "auto", "prefix")
    options = {option["name"]: option for option in plan["options"]}
    assert options["full"]["predicted_s"] > plan["predicted_s"] > 0
    assert options["fused epic"]["reason"] == Reason.BOUND_NOT_MET
    assert sum(span["tokens"] for span in plan["spans"]) == options["full"]["rows"]
    assert [span["kind"] for span in plan["spans"]] == ["exact", *["computed"] * 6]


def test_plan_as_json_names_the_order_of_the_knowledge_base(
    world: World, weave: Weave, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.set_machine()
    weave.kb.set_order("free")
    monkeypatch.setattr("kvweave.cli.plan.open_weave", lambda **_: weave)
    plan = json.loads(run("plan", QUESTION, "--kb", world.folder, "--json").out)
    assert plan["order"] == "free"


def test_an_option_says_what_of_its_price_is_loading(world: World, weave: Weave) -> None:
    world.calibrate(("epic", 0.1, 0.01))
    world.set_machine()
    options = plan_document(weave.plan(QUESTION))["options"]
    loads = {option["name"]: option["load"] for option in options}
    assert loads["full"] is None
    assert (loads["fused epic"]["link"], loads["fused epic"]["share"]) == ("host/int8", 0.0)
    assert loads["fused epic"]["seconds"] > 0


def test_ask_explains_what_auto_did(
    world: World, weave: Weave, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.set_machine()
    monkeypatch.setattr("kvweave.cli.ask.open_weave", lambda **_: weave)
    ran = run("ask", QUESTION, "--kb", world.folder, "--reuse", "auto", "--json", "--max-tokens", 2)
    plan = json.loads(ran.out)["explain"]["plan"]
    assert plan["chosen"] == "prefix"
    assert plan["actual_s"] > 0
    assert plan["predicted_s"] > 0
