"""The gate and its numbers: who is chosen, and what an interval claims."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvweave.app.auto.facts import CalibratedGate
from kvweave.app.auto.growing_gate import EvidencedGate
from kvweave.calibrate import gate as gate_module
from kvweave.calibrate.gate import (
    ENOUGH_QUESTIONS,
    Cell,
    Table,
    cheapest,
    choose,
    deciding_tables,
    tables_for_size,
    worst_cells,
)
from kvweave.calibrate.profiles import load_profile
from kvweave.plan.plan import PromptShape, Verdict
from kvweave.reasons import Reason

PACKAGED = Path(gate_module.__file__).parent / "packaged"
SHAPE = PromptShape(1000, 5)
TALK = PromptShape(1000, 5, has_history=True)


def make_cell(strategy: str = "weave", **changes: float) -> Cell:
    cell = Cell(
        strategy,
        ratio=0.15,
        work=0.2,
        kl=0.01,
        kl_low=0.008,
        kl_high=0.012,
        kl_p95=0.03,
        kl_max=0.2,
        flips=0.0,
        top1=0.98,
        nll_gap=0.01,
    )
    return replace(cell, **changes)  # type: ignore[arg-type]


def test_the_cheapest_within_the_bound_is_chosen() -> None:
    cells = [
        make_cell("dear", work=0.5),
        make_cell("cheap", work=0.1),
        make_cell("bad", work=0.01, kl=0.1, kl_high=0.2),
    ]
    chosen = choose(cells, 0.02)
    assert chosen is not None
    assert chosen.strategy == "cheap"


def test_the_upper_end_of_the_interval_decides_not_the_mean() -> None:
    assert choose([make_cell(kl=0.019, kl_high=0.021)], 0.02) is None
    assert choose([make_cell(kl=0.019, kl_high=0.02)], 0.02) is not None


def test_flipping_first_tokens_is_out_whatever_the_mean() -> None:
    assert choose([make_cell(flips=0.03)], 0.02) is None
    assert choose([make_cell(flips=0.02)], 0.02) is not None


def test_what_costs_as_much_as_full_prefill_is_no_shortcut() -> None:
    assert choose([make_cell(work=1.0)], 0.02) is None


def test_of_several_encodings_the_least_work_wins_then_the_lower_kl() -> None:
    dear, near, far = make_cell(work=0.3, kl=0.0), make_cell(kl=0.004), make_cell(kl=0.009)
    assert cheapest({"isolated": dear, "filler:4": far, "neighbours:3": near}) == "neighbours:3"
    assert cheapest({"isolated": dear, "filler:4": None}) == "isolated"
    assert cheapest({"isolated": None, "filler:4": None}) is None


def test_equal_prices_go_to_the_lower_kl() -> None:
    chosen = choose([make_cell("a", kl=0.011), make_cell("b", kl=0.009)], 0.02)
    assert chosen is not None
    assert chosen.strategy == "b"


def test_nothing_measured_means_exact() -> None:
    assert choose([], 0.02) is None


def make_table(kind: str, *cells: Cell, num_questions: int = 150, preamble: str = "p") -> Table:
    where = ("filler:4", "filler:4:aa", preamble, "r")
    names = ("float32", "q.txt", "cafe", "2026-01-01")
    counts = (num_questions, 0, 9000, 800.0, 0.0)
    return Table(*where, *names, *counts, None, None, cells, kind, 5.0, 2000, kind == "talk")


def ratios(*highs: float, **changes: float) -> list[Cell]:
    """A cell per ratio 0.1, 0.2, …"""
    return [
        make_cell(ratio=round(0.1 * (i + 1), 1), kl=high / 2, kl_high=high, **changes)
        for i, high in enumerate(highs)
    ]


def verdict(*tables: Table, bound: float = 0.02, shape: PromptShape = SHAPE) -> float | None:
    return CalibratedGate(tables, "p").min_ratio("weave", bound, shape).ratio


def test_the_worst_kind_decides() -> None:
    easy, hard = make_table("easy", *ratios(0.01, 0.01)), make_table("hard", *ratios(0.03, 0.015))
    assert verdict(easy) == 0.1
    assert verdict(easy, hard) == 0.2
    chosen = choose(worst_cells([easy, hard]))
    assert chosen is not None
    assert chosen.ratio == 0.2
    flipping = make_table("flips", *ratios(0.001, 0.001, flips=0.03))
    assert verdict(easy, flipping) is None
    other = make_table("other", make_cell("epic"))
    shut = CalibratedGate((easy, other), "p").min_ratio("weave", 1.0, SHAPE)
    assert shut.reason is Reason.NOT_CALIBRATED, "one kind was never tried with it"


def test_enough_questions_of_the_user_decide_alone() -> None:
    hard = make_table("hard", *ratios(0.03, 0.015))
    mine = make_table("own", *ratios(0.01, 0.01), num_questions=ENOUGH_QUESTIONS)
    assert verdict(hard, mine) == 0.1
    few = make_table("own", *ratios(0.001, 0.001), num_questions=ENOUGH_QUESTIONS - 1)
    assert verdict(hard, few) == 0.2
    assert deciding_tables([hard, few]) == (hard, few)


def test_own_questions_decide_alone_on_prompts_like_theirs_and_have_a_say_on_others() -> None:
    hard = replace(make_table("hard", *ratios(0.03, 0.015)), mean_chunks=20.0)
    mine = make_table("own", *ratios(0.01, 0.01), num_questions=ENOUGH_QUESTIONS)
    assert verdict(hard, mine, shape=PromptShape(1000, 5)) == 0.1
    assert verdict(hard, mine, shape=PromptShape(1000, 10)) == 0.2, "ten chunks were never asked"
    assert verdict(hard, mine, shape=PromptShape(3001, 5)) == 0.2, "nor was so long a prompt"
    bad = replace(mine, cells=tuple(ratios(0.03, 0.03)))
    assert verdict(hard, bad, shape=PromptShape(1000, 10)) is None, "what failed with fewer fails"
    assert verdict(mine, shape=PromptShape(1000, 10)) == 0.1, "nothing else is known"


def evidenced(*made: Table, shape: PromptShape, bound: float = 0.02) -> Verdict:
    """The gate of a model whose tables let 0.2 through, beside what was `made` of documents."""
    hard = replace(make_table("hard", *ratios(0.03, 0.015)), mean_chunks=20.0)
    talk = make_table("talk", *ratios(0.03, 0.015))
    return EvidencedGate((hard, talk), made, "p").min_ratio("weave", bound, shape)


def test_documents_asked_about_themselves_lower_the_ratio_of_prompts_like_theirs() -> None:
    made = make_table("own", *ratios(0.005), num_questions=ENOUGH_QUESTIONS)
    found = evidenced(made, shape=SHAPE)
    assert (found.ratio, found.evidence) == (0.1, "100 questions of your own (q.txt)")
    for other in (PromptShape(1000, 10), PromptShape(3001, 5), TALK):
        assert evidenced(made, shape=other) == evidenced(shape=other), "they say nothing of it"
    over = replace(made, cells=tuple(ratios(0.006)))
    assert evidenced(over, shape=SHAPE).ratio == 0.2, "a quarter of the bound is theirs"
    few = replace(made, num_questions=ENOUGH_QUESTIONS - 1)
    assert evidenced(few, shape=SHAPE).ratio == 0.2
    assert evidenced(made, shape=SHAPE, bound=0.001) == evidenced(shape=SHAPE, bound=0.001)
    bad = replace(made, cells=tuple(ratios(0.03)))
    assert evidenced(bad, shape=SHAPE).ratio == 0.2, "what was proven stays"


def test_the_evidence_is_that_of_the_kind_that_decides() -> None:
    easy = make_table("easy", *ratios(0.01), num_questions=250)
    hard = make_table("hard", *ratios(0.015), num_questions=120)
    gate = CalibratedGate((easy, hard), "p")
    assert gate.min_ratio("weave", 0.02, SHAPE).evidence == "120 hard questions, 5 chunks"


def test_few_questions_open_the_gate_only_where_they_are_clearly_inside() -> None:
    few = make_table("own", *ratios(0.016, 0.012), num_questions=25)
    assert [cell.kl_high for cell in few.widen_intervals()] == pytest.approx([0.024, 0.018])
    assert verdict(few) == 0.2
    assert verdict(make_table("own", *ratios(0.001), num_questions=19)) is None


def test_behind_another_system_prompt_half_the_bound_holds() -> None:
    there = make_table("hops", *ratios(0.015, 0.0099), preamble="another")
    assert verdict(there) == 0.2
    shut = CalibratedGate((there,), "p").min_ratio("weave", 0.01, SHAPE)
    assert shut.reason is Reason.HALF_BOUND_NOT_MET
    assert verdict(make_table("hops", *ratios(0.015, 0.0099))) == 0.1


def test_a_history_asks_for_a_table_that_has_one_or_half_the_bound() -> None:
    hops, talk = make_table("hops", *ratios(0.012, 0.009)), make_table("talk", *ratios(0.1, 0.019))
    assert verdict(hops, shape=TALK) == 0.2
    assert verdict(hops, talk, shape=TALK) == 0.2
    assert verdict(hops, talk) == 0.1, "without a history conversations have no say"
    mine = make_table("own", *ratios(0.012, 0.012))
    assert verdict(mine, talk, shape=TALK) == 0.2


def test_a_long_prompt_beyond_all_that_were_measured_does_not_pass() -> None:
    gate = CalibratedGate([make_table("hops", *ratios(0.01))], "p")
    assert gate.min_ratio("weave", 0.02, PromptShape(4096, 9)).ratio == 0.1
    beyond = gate.min_ratio("weave", 0.02, PromptShape(4097, 9))
    assert (beyond.ratio, beyond.reason) == (None, Reason.BEYOND_MEASURED)
    longer = replace(make_table("hops", *ratios(0.01)), most_prompt_tokens=5000)
    assert verdict(longer, shape=PromptShape(5000, 20)) == 0.1
    assert verdict(longer, shape=PromptShape(5001, 20)) is None


def test_another_order_passes_the_same_gate() -> None:
    moved = make_cell("order", ratio=0.0, work=0.97, kl_high=0.05)
    gate = CalibratedGate([make_table("hops", moved, *ratios(0.01))], "p")
    assert gate.may_reorder(0.02, SHAPE).ratio is None
    assert gate.may_reorder(0.05, SHAPE).ratio == 0.0
    chosen = choose([replace(moved, kl_high=0.0)])
    assert chosen is None, "it is no way to fuse"


def sized(kind: str, mean_chunks: float, *cells: Cell, most_tokens: int = 2000) -> Table:
    return replace(
        make_table(kind, *cells), mean_chunks=mean_chunks, most_prompt_tokens=most_tokens
    )


def test_of_a_kind_the_smallest_number_of_chunks_that_covers_the_prompt_speaks() -> None:
    few, many = sized("hops", 5.3, *ratios(0.01, 0.005)), sized("hops", 10.7, *ratios(0.03, 0.015))
    other = sized("one", 6.4, *ratios(0.01, 0.005))
    assert tables_for_size([many, other, few], 5) == (few, other)
    assert tables_for_size([many, other, few], 6) == (few, many, other), "5.3 is not 6"
    assert tables_for_size([many, few], 50) == (few, many), "all there are"
    assert tables_for_size([many, few], 5, 3001) == (few, many), "1.5 times 2,000 tokens, no more"
    assert tables_for_size([many, few], 5, 3000) == (few,)
    gate = CalibratedGate([many, other, few], "p")

    def ratio(num_chunks: int, *, told: bool = False) -> float | None:
        return gate.min_ratio("weave", 0.02, PromptShape(900, num_chunks, told)).ratio

    for _ in range(2):  # the second time remembered
        assert [ratio(n) for n in (1, 5, 6, 10, 99)] == [0.1, 0.1, 0.2, 0.2, 0.2]
    assert ratio(5, told=True) is None, "no table has a history: all of them, and half the bound"


def test_what_was_said_does_not_make_a_prompt_larger() -> None:
    few = sized("hops", 5.0, *ratios(0.01, 0.01, 0.01))
    many = sized("hops", 24.0, *ratios(0.1, 0.1, 0.01), most_tokens=5500)
    talk = sized("talk", 4.6, *ratios(0.1, 0.01, 0.01), most_tokens=3200)
    gate = CalibratedGate([few, many, talk], "p")

    def ratio(num_tokens: int, num_chunks: int, said: int) -> float | None:
        shape = PromptShape(num_tokens, num_chunks, True, said)
        return gate.min_ratio("weave", 0.02, shape).ratio

    for _ in range(2):  # the second time remembered
        assert ratio(900, 5, 300) == 0.2, "conversations speak, tables of many chunks do not"
        assert ratio(4096, 5, 1096) == 0.2
        assert ratio(4096, 5, 1095) == 0.3, "its chunks are longer than what `few` had"
        assert ratio(4097, 5, 1097) == 0.3, "longer than where length does not matter"
        assert ratio(900, 6, 300) == 0.3
        assert ratio(5501, 5, 5000) is None


def test_few_chunks_that_are_long_are_for_a_table_of_more_too() -> None:
    few = sized("hops", 5.0, *ratios(0.01, 0.01))
    many = sized("hops", 24.0, *ratios(0.03, 0.01), most_tokens=5500)
    assert verdict(few, many, shape=PromptShape(3000, 5)) == 0.1
    assert verdict(few, many, shape=PromptShape(3001, 5)) == 0.2
    assert verdict(few, many, shape=PromptShape(5501, 5)) is None


def test_what_failed_with_fewer_chunks_has_its_say_with_more() -> None:
    """Few questions: by chance the larger set looks better."""
    few = sized("hops", 5.0, *ratios(0.03, 0.01))
    many = sized("hops", 24.0, *ratios(0.01, 0.01))
    assert verdict(few, many, shape=PromptShape(2000, 20)) == 0.2


@pytest.mark.parametrize("path", sorted(PACKAGED.glob("*.json")), ids=lambda path: path.stem)
def test_packaged_tables_open_no_wider_for_more_chunks(path: Path) -> None:
    """`tables_for_size` takes that for granted: more chunks never get by with fewer rows."""
    stored = json.loads(path.read_text())
    profile = load_profile(path, stored["weights"], stored["tokenizer"])
    gate = CalibratedGate(profile.calibration, profile.calibration[0].preamble)
    strategies = {cell.strategy for table in profile.calibration for cell in table.cells}
    for strategy in strategies - {"order"}:
        for num_tokens in (500, 1500, 3000):
            for has_history in (False, True):
                shapes = [PromptShape(num_tokens, n, has_history) for n in range(1, 30)]
                found = [gate.min_ratio(strategy, 0.02, shape).ratio or 1.0 for shape in shapes]
                assert found == sorted(found), (strategy, num_tokens, has_history)


def test_users_own_questions_speak_for_any_number_of_chunks() -> None:
    mine = replace(make_table("own", *ratios(0.01)), mean_chunks=3.0)
    assert mine.subject == ("own", 0)
    assert verdict(mine, shape=PromptShape(900, 30)) == 0.1


def test_the_widest_lead_of_those_that_decide_is_served() -> None:
    usual = replace(make_table("hops", *ratios(0.03, 0.01)), close_call=0.2)
    unsure = make_cell(ratio=0.2, kl_high=0.01, close_call=0.3)
    wide = replace(make_table("one", make_cell(), unsure), close_call=0.2)
    gate = CalibratedGate([usual, wide], "p")
    assert gate.min_ratio("weave", 0.02, SHAPE)[::4] == (0.2, 0.3)
    alone = CalibratedGate([usual], "p").min_ratio("weave", 0.02, SHAPE)
    assert (alone.ratio, alone.close_call) == (0.2, 0.2)
