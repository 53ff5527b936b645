"""The last half hour of each tenant, in steps."""

from dataclasses import replace

from kvweave.app.weave import Answer
from kvweave.fuse.record import ChunkRecord, FuseRecord, Stages
from kvweave.fuse.request import State
from kvweave.serve.observe.tenant_series import MOST_TENANTS, STEP_S, STEPS, TenantSeries

PLAIN = Answer("abc", "stop", 5, 3, ttft_ms=1.0, total_ms=2.0)
RECORD = FuseRecord(
    strategy="weave",
    ratio=0.5,
    encoding="",
    token_ids=tuple(range(8)),
    states=(State.EXACT,) * 2 + (State.REUSED,) * 3 + (State.RECOMPUTED,) * 2 + (State.COMPUTED,),
    chunks=(
        ChunkRecord(2, 5, State.REUSED, 2, "disk", None),
        ChunkRecord(7, 1, State.COMPUTED, 0, None, "absent"),
    ),
    work=0.5,
    loaded_bytes={},
    stages=Stages(),
)
FUSED = replace(PLAIN, prompt_tokens=8, explain=RECORD)


class Clock:
    def __init__(self) -> None:
        self.s = 1_000_000.0

    def __call__(self) -> float:
        return self.s


def test_answers_count_in_the_step_they_end_in_and_tokens_as_they_come() -> None:
    clock = Clock()
    series = TenantSeries(clock)
    series.record_token("acme")
    clock.s += STEP_S
    series.record_token("acme")
    series.record_token("acme")
    series.record_answer("acme", FUSED)
    told = series.series("acme")
    assert (told.step_s, len(told.answers)) == (STEP_S, STEPS)
    assert told.t0 == (int(clock.s // STEP_S) - STEPS + 1) * STEP_S
    assert told.tokens_per_s[-2:] == [1 / STEP_S, 2 / STEP_S]
    assert told.answers[-2:] == [0, 1]
    last = (told.exact[-1], told.reused[-1], told.recomputed[-1], told.computed[-1])
    assert last == (2, 3, 2, 1)
    assert told.hit_rate[-2:] == [None, 5 / 8]
    clock.s += STEPS * STEP_S
    assert sum(series.series("acme").answers) == 0, "half an hour ago"
    totals = series.totals("acme")
    assert (totals.answers, totals.made) == (1, 3)
    assert totals.tokens == {"exact": 2, "reused": 3, "recomputed": 2, "computed": 1}
    assert (totals.tiers, totals.whys) == ({"disk": 1, "none": 1}, {"absent": 1})


def test_a_prompt_of_which_nothing_is_known_was_computed() -> None:
    series = TenantSeries(Clock())
    series.record_answer("", PLAIN)
    assert series.totals("").tokens["computed"] == 5
    assert series.series("").hit_rate[-1] == 0.0


def test_tenants_are_apart_and_there_is_a_bound() -> None:
    series = TenantSeries(Clock())
    series.record_answer("acme", FUSED)
    assert series.totals("other").answers == 0
    assert sum(series.series("other").answers) == 0
    for number in range(MOST_TENANTS):
        series.record_token(f"t{number}")
    assert series.totals("acme").answers == 0, "whose last answer is oldest is forgotten"
