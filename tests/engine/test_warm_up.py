"""What is compiled and recorded in idle time, without a device: who holds which pages, and when."""

import logging
from functools import partial

import pytest
import torch
from torch import Tensor

from kvweave.engine import warm_up as warm_up_module
from kvweave.engine.config import for_device
from kvweave.engine.engine import Engine
from kvweave.engine.page_manager import make_pool
from kvweave.engine.pages import PageAllocator
from kvweave.engine.runner import Runner
from kvweave.engine.warm_up import MANY_KEYS, REST_S, ROWS, WarmUp
from kvweave.model.decoder import Decoder
from worlds.engine import SMALL


def make_warm_up(decoder: Decoder) -> tuple[WarmUp, PageAllocator]:
    """As on a GPU."""
    pool = make_pool(for_device(SMALL, "cpu"), decoder)
    allocator = PageAllocator(pool.num_pages)
    warm_up = WarmUp(decoder, pool, allocator, Runner(decoder), shares=True)
    assert warm_up.is_over, "off a GPU there is nothing to compile"
    assert warm_up.due_s is None
    sorts = [(rows, 0) for rows in ROWS] + [(rows, 200 - rows) for rows in ROWS]
    warm_up._left = [partial(warm_up._compile, *sort) for sort in sorts]
    warm_up._left += [partial(warm_up._compile_shared, shifted=each) for each in (False, True)]
    warm_up._at_rest = False
    return warm_up, allocator


def test_tables_of_every_word_length_are_sent_ahead(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel of its own fetches each."""
    sent: list[int] = []

    def heard(x: Tensor, device: torch.device) -> Tensor:
        sent.append(x.nbytes)
        return x.to(device)

    monkeypatch.setattr(warm_up_module, "on_device", heard)
    warm_up, _ = make_warm_up(decoder)
    assert warm_up.step()
    assert sorted(sent) == [1, 4, 8]


def test_passes_take_pages_that_nobody_has_and_give_them_back(decoder: Decoder) -> None:
    warm_up, allocator = make_warm_up(decoder)
    taken = allocator.take(3)
    assert taken is not None
    steps = 0
    while not warm_up.is_over:
        assert warm_up.step()
        steps += 1
    assert steps == 2 * len(ROWS) + 2
    assert not warm_up.step(), "nothing is recorded on a CPU"
    assert allocator.num_used == 3
    allocator.check_integrity()


def test_nothing_is_made_right_behind_a_request(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(warm_up_module.time, "monotonic", lambda: now_s)
    warm_up, _ = make_warm_up(decoder)
    assert warm_up.due_s == 0.0, "no request was there yet"
    warm_up.note_request_ended()
    assert warm_up.due_s == REST_S
    assert not warm_up.step()
    now_s += REST_S
    assert warm_up.step()


def test_what_is_at_rest_is_looked_at_again_behind_a_request(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up, _ = make_warm_up(decoder)
    while warm_up.step():
        pass
    assert warm_up.due_s is None
    warm_up.note_request_ended()
    assert warm_up.due_s is None, "on a CPU nothing is ever recorded"
    monkeypatch.setattr(Decoder, "can_record", True)
    warm_up.note_request_ended()
    assert warm_up.due_s is not None


def test_a_pool_without_free_pages_is_left_alone(decoder: Decoder) -> None:
    warm_up, allocator = make_warm_up(decoder)
    assert allocator.take(allocator.num_pages) is not None
    while warm_up.step():
        pass
    assert warm_up.is_over


def test_what_fails_is_said_and_tried_by_no_later_pass(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no such kernel")

    warm_up, allocator = make_warm_up(decoder)
    monkeypatch.setattr(Decoder, "forward", fails)
    with caplog.at_level(logging.WARNING):
        assert warm_up.step()
    assert warm_up.is_over
    assert allocator.num_used == 0
    assert caplog.text.count("no such kernel") == 1


def test_an_engine_on_a_cpu_is_warm_at_once(decoder: Decoder) -> None:
    assert max(ROWS) < MANY_KEYS
    with Engine(decoder, SMALL) as engine:
        assert engine.is_warm
        assert engine._worker._thread is None, "an idle engine costs nothing"
