"""bench/vllm_gpu.py: the prompts that both vLLMs get, and what is said of all runs."""

import vllm_gpu
from kvweave.fuse.strategy import ModelFacts
from vllm_parts.drawn import spread
from vllm_parts.prompts import POOL, PREAMBLE, QUESTION, Prompts, Size

SIZE = Size.parse("8k=20x12")


def prompts() -> Prompts:
    return Prompts(SIZE, 512, seed=3)


def test_every_process_draws_the_same_prompts_and_no_two_are_alike() -> None:
    one, other = prompts(), prompts()
    assert [one.known(i) for i in range(30)] == [other.known(i) for i in range(30)]
    assert len({tuple(one.known(i).ids) for i in range(30)}) == 30
    assert one.fresh(4) == other.fresh(4) != one.fresh(5)


def test_a_prompt_is_as_long_as_its_size_says_and_its_spans_are_chunks_of_the_pool() -> None:
    made = prompts()
    for prompt in (made.known(1), made.pages()[0]):
        assert len(prompt.ids) == SIZE.tokens
        assert prompt.spans[0][0] == PREAMBLE
        assert prompt.spans[-1][1] == SIZE.tokens - QUESTION
        chunks = [prompt.ids[start:end] for start, end in prompt.spans]
        assert all(chunk in made.pool for chunk in chunks)
        assert len({tuple(chunk) for chunk in chunks}) == SIZE.chunks
    fresh = made.fresh(1)
    assert not any(fresh.ids[start:end] in made.pool for start, end in fresh.spans)


def test_some_chunks_are_asked_for_far_more_often_than_others() -> None:
    made, counts = prompts(), [0] * POOL
    for number in range(100):
        prompt = made.known(number)
        for start, end in prompt.spans:
            counts[made.pool.index(prompt.ids[start:end])] += 1
    assert min(counts[:3]) > 2 * max(counts[-10:])


def test_all_chunks_of_the_pool_are_made_before_anything_is_timed() -> None:
    made = prompts()
    seen = {tuple(p.ids[start:end]) for p in made.pages() for start, end in p.spans}
    assert seen == {tuple(chunk) for chunk in made.pool}


def test_spread_is_weave_that_does_not_mind_where_a_row_stands() -> None:
    strategy = spread(ModelFacts(12))
    assert strategy.selector.late == 0.0
    assert strategy.drift
    assert strategy.taper is not None


def test_the_summary_takes_the_last_run_that_has_both() -> None:
    def alone(**rows: float) -> dict[str, object]:
        return {"alone": {name: {"p50_ms": value} for name, value in rows.items()}}

    def load(name: str, rate: float) -> dict[str, object]:
        return {"load": {name: {"rate": rate}}}

    first = {"stock": alone(prefix_8k=200.0), "connector": alone(connector_15_8k=100.0)}
    second = {
        "stock": alone(prefix_8k=200.0, nothing_8k=200.0, prefix_32k=1500.0),
        "connector": alone(connector_15_8k=40.0, nothing_8k=204.0),
    }
    third = {"stock": load("prefix_8k", 4.0), "connector": load("connector_15_8k", 13.0)}
    runs = [{"systems": systems} for systems in (first, second, third)]
    assert vllm_gpu.summary(runs) == {
        "connector_15_8k_over_prefix": 5.0,
        "nothing_8k_share": 1.02,
        "connector_throughput_over_prefix": 3.25,
    }
