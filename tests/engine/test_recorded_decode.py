"""Recorded decode steps: which steps are played, what fills them up, and where that writes.

What CUDA does is left out here, and attention runs in plain PyTorch: tests/gpu has the rest.
"""

import logging
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.page_manager import make_pool as make_engine_pool
from kvweave.engine.pages import PageAllocator
from kvweave.engine.runner import Runner
from kvweave.errors import ConfigError
from kvweave.kernels import recording
from kvweave.kernels.recording import count_refusals
from kvweave.kernels.types import SharedChunk
from kvweave.model import recorded_decode
from kvweave.model.decoder import Decoder
from kvweave.model.paged_kv import KVPool, PagedKV
from kvweave.model.recorded_decode import (
    RecordedDecode,
    StepKind,
    StepResult,
    kind_of,
    one_by_one,
    open_recorded,
    padded_rows,
)
from kvweave.model.rows import Rows
from kvweave.model.step_attention import CHUNKS, SPARE_CHUNKS, PageArrays
from worlds.engine import SMALL, alone, ids, plain, tokens
from worlds.recordings import without_kernels

TINY = replace(SMALL, pool_tokens=4 * 24)  # pages run out


def make_pool(decoder: Decoder, num_pages: int = 12, page_tokens: int = 4) -> KVPool:
    return KVPool(decoder.spec, num_pages, page_tokens, decoder.dtype, decoder.device)


def decoding(pool: KVPool, pages: Sequence[int], position: int, token: int = 5) -> Rows:
    return Rows([token], [position], PagedKV(pool, pages), [0])


class Watched(RecordedDecode):
    """Remembers the steps it was asked for, and which of them it played."""

    def __init__(self, decoder: Decoder, pool: KVPool, most_rows: int = 64) -> None:
        super().__init__(decoder, pool, most_rows)
        self.asked: list[list[int]] = []  # rows of each sequence, by step

    def play(self, batch: Sequence[Rows], *, may_record: bool = True) -> StepResult | None:
        self.asked.append([len(rows.token_ids) for rows in batch])
        return super().play(batch, may_record=may_record)


def watched_engine(decoder: Decoder, cfg: EngineConfig = SMALL) -> tuple[Engine, Watched]:
    """An engine, and what plays its decode steps."""
    pool = make_engine_pool(cfg, decoder)
    recorded = Watched(decoder, pool)
    return Engine(decoder, cfg, pool=pool, runner=Runner(decoder, recorded)), recorded


def test_batches_are_filled_up_to_a_few_sizes() -> None:
    sizes = [padded_rows(n) for n in range(1, 65)]
    assert sorted(set(sizes)) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert all(n <= size < n + 8 for n, size in enumerate(sizes, 1))
    assert [padded_rows(size) for size in sizes] == sizes


class Still:
    """Something that moves what stands there; what, does not matter."""

    def move(self, layer: int, fresh: object, kv: object) -> None:
        raise AssertionError("nothing is computed here")


def test_nothing_is_recorded_without_a_gpu_or_its_kernels(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(decoder)
    monkeypatch.setattr(recorded_decode, "has_triton", lambda: True)
    assert open_recorded(decoder, pool, 64) is None, "a CPU"
    monkeypatch.setattr(Decoder, "can_record", True)
    assert open_recorded(decoder, pool, 64) is None, "float64 has no kernel"
    monkeypatch.setattr(decoder, "dtype", torch.float32)
    assert open_recorded(decoder, pool, 64) is not None
    assert open_recorded(decoder, pool, 0) is None, "it was switched off"
    monkeypatch.setattr(recorded_decode, "has_triton", lambda: False)
    assert open_recorded(decoder, pool, 64) is None, "no Triton"


def test_a_negative_number_of_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="recorded_rows"):
        EngineConfig(recorded_rows=-1)


def test_no_sequence_is_given_the_scratch_page(decoder: Decoder) -> None:
    pool = make_pool(decoder, num_pages=12)
    pages = PageAllocator(pool.num_pages)
    assert pages.take(12) == list(range(12))
    assert pages.take(1) is None
    assert pool.scratch_page not in range(12)
    assert pool.keys.shape[1] == pool.values.shape[1] == 13, "but there is memory behind it"
    spec = decoder.spec
    token_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 8
    assert pool.page_bytes == 4 * token_bytes


def test_the_second_step_of_a_size_is_played_and_fills_up_into_the_scratch_page(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a padded step computes and writes is what the plain one does, nothing else."""
    without_kernels(monkeypatch)
    torch.manual_seed(0)
    plainly, pool = make_pool(decoder), make_pool(decoder)
    for part in (plainly.keys, plainly.values):
        part.normal_()
    pool.keys.copy_(plainly.keys)
    pool.values.copy_(plainly.values)
    recorded = RecordedDecode(decoder, pool, 64)
    tables, positions = [[3, 0], [11], [5, 6, 2]], [7, 2, 8]

    def batch(where: KVPool) -> list[Rows]:
        pairs = zip(tables, positions, strict=True)
        return [decoding(where, table, at, 40 + at) for table, at in pairs]

    assert recorded.play(batch(pool)) is None, "the first of its size"
    assert recorded.sizes == []
    played = recorded.play(batch(pool))
    assert played is not None
    assert recorded.sizes == [4]
    wanted = decoder.forward(batch(plainly))
    torch.testing.assert_close(played.logits, wanted)
    assert played.likeliest.tolist() == wanted.argmax(-1).tolist()
    owned = slice(0, pool.scratch_page)
    torch.testing.assert_close(pool.keys[:, owned], plainly.keys[:, owned])
    torch.testing.assert_close(pool.values[:, owned], plainly.values[:, owned])
    assert not torch.equal(pool.keys[:, -1], plainly.keys[:, -1]), "padding wrote somewhere else"


def test_a_size_that_was_seen_once_is_recorded_in_idle_time(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_kernels(monkeypatch)
    pool = make_pool(decoder)
    recorded = RecordedDecode(decoder, pool, 64)
    assert not recorded.record_ahead(), "nothing was asked for"
    assert recorded.play([decoding(pool, [3], 2, 41)]) is None
    assert recorded.record_ahead()
    assert recorded.sizes == [1]
    assert not recorded.record_ahead(), "all of it is recorded"
    assert recorded.play([decoding(pool, [3], 2, 41)]) is not None


def test_a_step_of_more_rows_than_allowed_is_not_recorded(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_kernels(monkeypatch)
    pool = make_pool(decoder)
    recorded = RecordedDecode(decoder, pool, 8)
    for count in [9, 8, 7, 9, 3, 2, 1] * 3:
        batch = [decoding(pool, [page], 1) for page in range(count)]
        assert (recorded.play(batch) is None) == (padded_rows(count) not in recorded.sizes)
    assert recorded.sizes == [1, 2, 4, 8]


@pytest.mark.parametrize("error", [RuntimeError, Exception])  # torch's, and Triton's own
def test_what_cannot_be_recorded_is_named_once_and_costs_no_answer(
    decoder: Decoder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: type[Exception],
) -> None:
    def fails(*_: object) -> None:
        raise error("operation not permitted when stream is capturing")

    monkeypatch.setattr(recorded_decode, "RecordedStep", fails)
    request = plain(ids(random.Random(0), 9), max_tokens=8)
    engine, recorded = watched_engine(decoder)
    with caplog.at_level(logging.WARNING), engine:
        both = [engine.submit(request), engine.submit(request)]
        wanted = [choice.token_id for choice in alone(decoder, request)]
        assert [tokens(ticket) for ticket in both] == [wanted, wanted]
        stats = engine.stats()
    assert len(recorded.asked) > 3
    assert recorded.num_played == 0
    assert caplog.text.count("cannot be recorded") == 1
    assert (stats["recordings_failed"], stats["recordings_without_memory"]) == (1, 0)


def test_a_size_without_memory_is_tried_again_later_and_the_others_are_recorded(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_kernels(monkeypatch)
    monkeypatch.setattr(recording, "PAUSE", 3)
    records, tries = recorded_decode.RecordedStep, 0

    class Short(records):  # type: ignore[misc, valid-type]
        def __init__(self, decoder: Decoder, pool: KVPool, num_rows: int, *rest: object) -> None:
            nonlocal tries
            tries += num_rows == 4
            if num_rows == 4 and tries < 3:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
            super().__init__(decoder, pool, num_rows, *rest)

    monkeypatch.setattr(recorded_decode, "RecordedStep", Short)
    pool = make_pool(decoder)
    recorded = RecordedDecode(decoder, pool, 8)

    def play(count: int) -> bool:
        return recorded.play([decoding(pool, [page], 1) for page in range(count)]) is not None

    assert [play(4), play(4)] == [False, False]
    assert [play(2), play(2), play(8), play(8)] == [False, True, False, True]
    assert [play(4) for _ in range(8)] == [False] * 7 + [True]
    assert (tries, recorded.sizes) == (3, [2, 4, 8])
    assert count_refusals(recorded.refusals) == {
        "recordings_failed": 0,
        "recordings_without_memory": 2,
    }
    assert caplog.text.count("decoding of 4 rows cannot be recorded for want of memory") == 1


def sharing(decoder: Decoder, pool: KVPool, own: int, chunks: Sequence[SharedChunk]) -> Rows:
    """A sequence of 3 own rows, chunks of 6 tokens, and the row that decodes; pages `own` on."""
    kv = PagedKV(pool, [own, own + 1])
    end = 3 + 6 * len(chunks)
    gone = [
        c.start + int(j) for c in chunks if c.replaced is not None for j in c.replaced.nonzero()
    ]
    kv.lay_out(np.array([0, 1, 2, *gone]), chunks, end)
    return Rows([5 + own], [end], kv, [0])


@pytest.mark.parametrize("shift", [None, 47])
def test_steps_over_shared_chunks_are_recorded_beside_plain_ones(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, shift: int | None
) -> None:
    """A chunk at two places, one with a replaced row, where it may be shifted, and a sequence that
    shares nothing."""
    without_kernels(monkeypatch)
    torch.manual_seed(0)
    pool = make_pool(decoder)
    pool.keys.normal_()
    pool.values.normal_()
    gone = torch.tensor([False, True, False, False, False, False])
    first = SharedChunk([0, 1], 6, 3)
    second = SharedChunk([2, 3], 6, 9, gone, shift)
    batch = [
        sharing(decoder, pool, 4, [first, second]),
        sharing(decoder, pool, 6, [second._replace(start=3, replaced=None, shift=None)]),
        decoding(pool, [8, 9], 6),
    ]
    recorded = RecordedDecode(decoder, pool, 8)
    apart = [batch[2], decoding(pool, [10], 2), decoding(pool, [11], 1)]
    for each in (batch, apart):
        assert recorded.play(each) is None, "the first of its kind is computed plainly"
    for each in (batch, apart, batch):
        wanted = decoder.forward(each)
        played = recorded.play(each)
        assert played is not None
        torch.testing.assert_close(played.logits, wanted)
    assert recorded.sizes == [4]
    assert recorded.num_played == 3


def test_rows_of_one_prompt_over_whole_chunks_are_a_kind_of_their_own(decoder: Decoder) -> None:
    pool = make_pool(decoder)
    chunk = SharedChunk([0, 1], 6, 3)
    gone = torch.tensor([False, True, False, False, False, False])
    whole, holed = (
        sharing(decoder, pool, 4, [each]) for each in (chunk, chunk._replace(replaced=gone))
    )

    def rows(of: Rows, count: int) -> list[Rows]:
        return [replace(of, positions=[of.positions[0] + i]) for i in range(count)]

    def kind(batch: Sequence[Rows], *, turns_whole: bool = True) -> StepKind:
        return kind_of(batch, turns_whole=turns_whole)

    assert kind(rows(whole, 3)) is StepKind.PROMPT
    assert kind(rows(whole, 3), turns_whole=False) is StepKind.SHARED
    assert kind(rows(whole, 1)) is StepKind.SHARED, "it decodes"
    assert kind(rows(holed, 3)) is StepKind.SHARED
    moved = sharing(decoder, pool, 6, [chunk._replace(replaced=gone, shift=40)])
    unholed = sharing(decoder, pool, 6, [chunk._replace(shift=40)])
    assert kind(rows(unholed, 3)) is StepKind.SHIFTED
    assert kind([whole, moved]) is kind([moved]) is StepKind.SHIFTED
    assert kind([*rows(whole, 2), sharing(decoder, pool, 6, [chunk])]) is StepKind.SHARED
    assert kind([*rows(whole, 2), decoding(pool, [8], 2)]) is StepKind.SHARED
    assert kind([decoding(pool, [8], 2), decoding(pool, [9], 2)]) is StepKind.OWN


def test_a_question_over_whole_chunks_is_played_as_it_is_computed(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_kernels(monkeypatch)
    torch.manual_seed(0)
    pool = make_pool(decoder)
    pool.keys.normal_()
    pool.values.normal_()
    one = sharing(decoder, pool, 4, [SharedChunk([0, 1], 6, 3), SharedChunk([2, 3], 6, 9)])
    start = one.positions[0]
    asked = Rows([5, 6, 7], range(start, start + 3), one.kv, [2])
    singles = one_by_one([asked])
    assert singles is not None
    recorded = RecordedDecode(decoder, pool, 8)
    assert recorded.play(singles) is None, "the first of its kind is computed plainly"
    wanted = decoder.forward([asked])
    played = recorded.play(singles)
    assert played is not None
    torch.testing.assert_close(played.logits[2:], wanted)
    assert count_refusals(recorded.refusals)["recordings_failed"] == 0


def test_the_rows_of_a_draft_are_played(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    without_kernels(monkeypatch)
    request = plain(ids(random.Random(9), 30), max_tokens=60)
    wanted = [choice.token_id for choice in alone(decoder, request)]
    engine, recorded = watched_engine(decoder, replace(SMALL, copy_tokens=7))
    with engine:
        for _ in range(3):
            assert tokens(engine.submit(request)) == wanted
        stats = engine.stats()
    assert stats["tokens_copied"] > 0, "a random model repeats itself"
    assert {2, 4, 8} & set(recorded.sizes), "sizes that one request has with a draft alone"
    assert recorded.num_played > len(wanted)


def test_many_rows_of_one_sequence_are_not_taken_for_a_draft(decoder: Decoder) -> None:
    pool = make_pool(decoder)
    for num_rows, is_single in ((8, True), (9, False)):
        prompt = Rows(range(num_rows), range(num_rows), PagedKV(pool, [0, 1, 2]), [num_rows - 1])
        assert (one_by_one([prompt]) is not None) is is_single


def test_more_chunks_than_a_recording_has_room_for_are_decoded_plainly(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_kernels(monkeypatch)
    pool = make_pool(decoder)
    recorded = RecordedDecode(decoder, pool, 8)
    chunk = SharedChunk([0, 1], 6, 3)
    few, many = (
        sharing(decoder, pool, 4, [chunk._replace(start=3 + 6 * i) for i in range(n)])
        for n in (2, CHUNKS + SPARE_CHUNKS + 1)
    )
    assert [recorded.play([each]) is None for each in (few, few, many, few)] == [
        *(True, False, True, False)
    ]


def test_page_tables_are_followed_as_they_grow(decoder: Decoder) -> None:
    kv, arrays = PagedKV(make_pool(decoder), [4, 2]), PageArrays()
    first = arrays.table(kv)
    assert arrays.table(kv) is first
    kv.append([7])
    assert arrays.table(kv).tolist() == [4, 2, 7]


@pytest.mark.parametrize("seed", range(6))
def test_the_engine_answers_the_same_when_it_plays_decode_steps(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Sequences that grow, leave, join and are preempted; prompts are computed plainly."""
    without_kernels(monkeypatch)
    rng = random.Random(seed)
    cfg = replace(rng.choice([SMALL, TINY]), step_rows=rng.choice([4, 8, 50]))
    requests = [
        plain(
            ids(rng, rng.randint(1, 30)),
            max_tokens=rng.randint(1, 30),
            **({"temperature": 0.9, "seed": seed} if rng.random() < 0.3 else {}),
        )
        for _ in range(9)
    ]
    engine, recorded = watched_engine(decoder, cfg)
    with engine:
        tickets = [engine.submit(request) for request in requests]
        for ticket, request in zip(tickets, requests, strict=True):
            assert list(ticket) == alone(decoder, request)
        engine.run_alone(engine.check_integrity)
    assert recorded.num_played > 5
    assert len(recorded.sizes) > 1
    assert all(rows == 1 for step in recorded.asked for rows in step)


def test_a_held_prompt_keeps_its_logits_through_later_steps(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of a recording are overwritten by the next step."""
    without_kernels(monkeypatch)
    overwriting = RecordedDecode.play
    last: list[StepResult] = []

    def play(
        self: RecordedDecode, batch: Sequence[Rows], *, may_record: bool = True
    ) -> StepResult | None:
        for found in last:
            found.logits.fill_(float("nan"))
        last[:] = filter(None, [overwriting(self, batch)])
        return last[0] if last else None

    monkeypatch.setattr(Watched, "play", play)
    short, longer = plain([7], max_tokens=4), plain([9], max_tokens=40)
    with watched_engine(decoder)[0] as engine:
        warm = [engine.submit(plain([3], max_tokens=3)) for _ in range(2)]
        assert all(len(tokens(ticket)) == 3 for ticket in warm)
        held, other = engine.submit(short, held=True), engine.submit(longer)
        assert list(other) == alone(decoder, longer)
        held.release()
        assert list(held) == alone(decoder, short)


def test_sequences_tried_one_by_one_do_not_get_each_others_logits(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that fails is tried again alone, and one recording of one row would serve them all."""
    without_kernels(monkeypatch)
    plays = RecordedDecode.play
    results: list[torch.Tensor] = []  # where the recording leaves its logits

    def play(
        self: RecordedDecode, batch: Sequence[Rows], *, may_record: bool = True
    ) -> StepResult | None:
        if len(batch) > 1:
            raise RuntimeError("this batch fails")
        played = plays(self, batch)
        if played is None:
            return None
        if not results:
            results.append(torch.empty_like(played.logits))
        return StepResult(results[0].copy_(played.logits), played.likeliest)

    monkeypatch.setattr(Watched, "play", play)
    requests = [plain([n], max_tokens=12, temperature=0.9, seed=n) for n in (7, 9, 11)]
    with watched_engine(decoder)[0] as engine:
        assert len(tokens(engine.submit(plain([3], max_tokens=5)))) == 5
        assert results, "a step of one row was recorded"
        tickets = [engine.submit(request) for request in requests]
        assert [list(t) for t in tickets] == [alone(decoder, request) for request in requests]
