"""A device that fails now and then: it costs time or one answer, never another's, and no page.

The whole matrix is `python bench/fault_matrix.py --parts device`; here is what it found.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvweave.engine import drawing
from kvweave.engine.bad_pages import has_bad_rows, is_bad_chunk
from kvweave.engine.config import EngineConfig, for_device
from kvweave.engine.engine import Engine
from kvweave.engine.page_manager import make_pool
from kvweave.engine.prefixes import ExactPrefixes
from kvweave.errors import ConfigError, NoDeviceMemory, NoNumbers
from kvweave.fuse.encode.chunk_pass import encode_prefix
from kvweave.model.decoder import Decoder
from kvweave.model.paged_kv import KVPool
from worlds.engine import SMALL, alone, ids, plain, tokens, until, with_chunks
from worlds.fused import CHUNKS, World, answer, at_rest

RNG = random.Random(3)
PREAMBLE = ids(RNG, 6)  # of pages of 4: it ends inside one
CHUNK = ids(RNG, 9)
SHARED = replace(SMALL, share_chunks=True)
LOST = "CUDA error: unspecified launch failure"


def failing_once(real: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    left = [error]

    def call(*args: Any, **how: Any) -> Any:
        if left:
            raise left.pop()
        return real(*args, **how)

    return call


def expected(decoder: Decoder, request: Any) -> list[int]:
    return [choice.token_id for choice in alone(decoder, request)]


# ── a page that cannot be copied when a request is let in ────────────────────


def test_rows_that_cannot_be_copied_are_computed_again(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to end every request, and to keep the pages and the leases of the one let in."""
    first = with_chunks(PREAMBLE, [CHUNK], ids(RNG, 4))
    second = with_chunks(PREAMBLE, [CHUNK], ids(RNG, 5))
    beside = plain(ids(RNG, 7), max_tokens=60)
    with Engine(decoder, SMALL) as engine:
        tokens(engine.submit(first))
        other = engine.submit(beside)
        next(other)
        broken = failing_once(KVPool.copy_rows, RuntimeError(LOST))
        monkeypatch.setattr(KVPool, "copy_rows", broken)
        assert tokens(engine.submit(second)) == expected(decoder, second)
        assert len(tokens(other)) == 59
        engine.run_alone(engine.check_integrity)
        stats = engine.stats()
        assert (stats["tree_copies_failed"], stats["requests_failed"]) == (1, 0)
        assert tokens(engine.submit(second)) == expected(decoder, second)


@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_over_shared_chunks_too(
    world: World, monkeypatch: pytest.MonkeyPatch, ratio: float
) -> None:
    request = world.request(CHUNKS[2:], "weave" if ratio else "reuse", ratio)
    request = replace(request, use_tree=True)
    with Engine(world.decoder, SHARED) as engine:
        want = answer(engine.submit(request))
        with monkeypatch.context() as patched:
            broken = failing_once(KVPool.copy_rows, RuntimeError(LOST))
            patched.setattr(KVPool, "copy_rows", broken)
            assert answer(engine.submit(request)) == want
        assert engine.stats()["tree_copies_failed"] == 1
        at_rest(engine, world)
        assert answer(engine.submit(request)) == want


# ── pages that hold what is no number ────────────────────────────────────────


def watched(decoder: Decoder, cfg: EngineConfig) -> tuple[Engine, KVPool]:
    """An engine whose pool the test can reach."""
    pool = make_pool(for_device(cfg, "cpu"), decoder)
    return Engine(decoder, cfg, pool=pool), pool


def test_exact_kv_that_went_bad_is_read_once(decoder: Decoder) -> None:
    """It used to fail everybody who read it, for as long as it lay there."""
    request = with_chunks(PREAMBLE, [CHUNK], ids(RNG, 4))
    engine, pool = watched(decoder, SMALL)
    with engine:
        want = tokens(engine.submit(request))
        engine.run_alone(lambda: pool.values[1].fill_(torch.nan))
        with pytest.raises(NoNumbers):
            tokens(engine.submit(request))
        assert tokens(engine.submit(request)) == want == expected(decoder, request)
        assert engine.stats()["kv_distrusted"] == 2  # the preamble, and the chunk behind it
        engine.run_alone(engine.check_integrity)


def test_a_pinned_preamble_that_went_bad_is_pinned_again(decoder: Decoder) -> None:
    request = with_chunks(PREAMBLE, [CHUNK], ids(RNG, 4))
    engine, pool = watched(decoder, SMALL)
    preamble = encode_prefix(Decoder(decoder.spec, decoder.weights), PREAMBLE)
    with engine:
        assert engine.run_alone(lambda: engine.pin_preamble(preamble))
        want = tokens(engine.submit(request))
        engine.run_alone(lambda: pool.keys[0].fill_(torch.nan))
        with pytest.raises(NoNumbers):
            tokens(engine.submit(request))
        engine.run_alone(engine.check_integrity)
        assert engine.run_alone(lambda: engine.pin_preamble(preamble))
        assert tokens(engine.submit(request)) == want
        engine.run_alone(engine.check_integrity)


@pytest.mark.parametrize("ratio", [0.0, 0.3])
def test_shared_chunks_that_went_bad_are_read_once(world: World, ratio: float) -> None:
    request = world.request(CHUNKS[2:], "weave" if ratio else "reuse", ratio)
    engine, pool = watched(world.decoder, SHARED)
    with engine:
        want = answer(engine.submit(request))
        engine.run_alone(lambda: pool.values[0].fill_(torch.nan))
        with pytest.raises(NoNumbers):
            answer(engine.submit(request))
        assert engine.stats()["kv_distrusted"] == 2
        assert answer(engine.submit(request)) == want
        at_rest(engine, world)


def test_a_model_that_gives_no_numbers_costs_nobody_what_is_sound(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = with_chunks(PREAMBLE, [CHUNK], ids(RNG, 4))
    with Engine(decoder, SMALL) as engine:
        tokens(engine.submit(request))
        nodes = engine.stats()["tree_nodes"]
        with monkeypatch.context() as patched:
            real = Decoder.forward
            patched.setattr(Decoder, "forward", lambda self, batch: real(self, batch) * torch.nan)
            with pytest.raises(NoNumbers):
                tokens(engine.submit(request))
        stats = engine.stats()
        assert (stats["tree_nodes"], stats["kv_distrusted"]) == (nodes, 0)


def test_rows_that_nobody_wrote_may_be_anything(decoder: Decoder) -> None:
    pool = make_pool(for_device(SMALL, "cpu"), decoder)
    pool.keys.zero_()
    pool.values.zero_()
    pool.keys[0, 7, 2:] = torch.nan
    assert not has_bad_rows(pool, [3, 7], 6)
    assert has_bad_rows(pool, [3, 7], 7)
    pool.values[-1, 3, 0, 0, 0] = torch.inf
    assert has_bad_rows(pool, [3, 7], 6)


def test_a_coded_chunk_is_told_by_its_scales(decoder: Decoder) -> None:
    """Its codes, read as floats, are often what is no number, and sound."""
    pool = KVPool(decoder.spec, 8, 4, torch.float32, torch.device("cpu"), codes_chunks=True)
    pool.keys.view(torch.int32).fill_(-1)  # codes of -1: as floats, no numbers
    tokens_of_page = pool.chunk_page_tokens
    assert not is_bad_chunk(pool, [3, 7], tokens_of_page + 2)
    coded = pool.codes(1)
    assert coded is not None
    coded.scales[7, 0, 2, 1] = torch.nan
    assert not is_bad_chunk(pool, [3, 7], tokens_of_page + 2), "it ends before"
    assert is_bad_chunk(pool, [3, 7], tokens_of_page + 3)


# ── a failure while a token is handed out ────────────────────────────────────


def test_a_device_that_fails_when_a_token_is_drawn_fails_one_request(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to be taken for a failure of the whole step, and to end all of them."""
    beside, bad = plain(ids(RNG, 7), max_tokens=60), plain(ids(RNG, 5), max_tokens=3)
    with Engine(decoder, SMALL) as engine:
        other = engine.submit(beside)
        next(other)
        broken = failing_once(drawing.is_close_call, RuntimeError(LOST))
        monkeypatch.setattr(drawing, "is_close_call", broken)
        with pytest.raises(RuntimeError, match="launch failure"):
            tokens(engine.submit(bad))
        assert len(tokens(other)) == 59
        engine.run_alone(engine.check_integrity)
        assert tokens(engine.submit(bad)) == expected(decoder, bad)


# ── want of memory ───────────────────────────────────────────────────────────


def test_want_of_memory_is_told_by_its_name(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = plain(ids(RNG, 5), max_tokens=3)
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    with Engine(decoder, SMALL) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(Decoder, "forward", failing_once(Decoder.forward, full))
            with pytest.raises(NoDeviceMemory, match="send less text") as told:
                tokens(engine.submit(request))
        assert told.value.__cause__ is full
        assert tokens(engine.submit(request)) == expected(decoder, request)


def test_a_pool_that_no_memory_holds_is_refused_in_a_line(decoder: Decoder) -> None:
    with pytest.raises(ConfigError, match="fewer pool_tokens") as told:
        Engine(decoder, EngineConfig(pool_tokens=1 << 36))
    assert "\n" not in str(told.value)


def test_a_preamble_that_cannot_be_written_keeps_no_page(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    preamble = encode_prefix(Decoder(decoder.spec, decoder.weights), PREAMBLE)
    with Engine(decoder, SMALL) as engine:
        broken = failing_once(ExactPrefixes._write, RuntimeError(LOST))
        monkeypatch.setattr(ExactPrefixes, "_write", broken)
        with pytest.raises(RuntimeError, match="launch failure"):
            engine.run_alone(lambda: engine.pin_preamble(preamble))
        engine.run_alone(engine.check_integrity)
        until(lambda: engine.stats()["pages_used"] == 0)
        assert engine.run_alone(lambda: engine.pin_preamble(preamble))
