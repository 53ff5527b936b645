"""Exact KV that an engine leaves to the next is found there, or is computed again: never wrong."""

import io
import random
from dataclasses import replace

import pytest

from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.left_prefixes import MOST_BYTES
from kvweave.engine.request import EngineRequest
from kvweave.kv.tree.node import DEVICE, HOST
from kvweave.model.decoder import Decoder
from worlds.engine import SMALL, alone, ids, with_chunks

ROOMY = replace(SMALL, host_tokens=400, tree_share=1.0)


def requests() -> list[EngineRequest]:
    """Paths that share their beginnings; chunks end inside pages."""
    rng = random.Random(7)
    preamble, a, b, c = (ids(rng, count) for count in (9, 7, 11, 6))
    paths = ([a, b], [a, c], [b, a, c], [])
    return [with_chunks(preamble, path, ids(rng, 3)) for path in paths]


def leave(decoder: Decoder, *, in_host: bool = False) -> io.BytesIO:
    """A file of an engine that was lost when it had answered."""
    file = io.BytesIO()
    with Engine(Decoder(decoder.spec, decoder.weights), ROOMY) as engine:
        for request in requests():
            list(engine.submit(request))
        while in_host and engine.run_alone(engine.tree.shrink):
            pass
        num_nodes = len(engine.tree)
        assert engine.tree.used_bytes(HOST if in_host else DEVICE) > 0
        engine.abandon("lost")
        assert engine.leave_exact(file, MOST_BYTES) == num_nodes
    file.seek(0)
    return file


@pytest.fixture(params=[False, True], ids=["in the pool", "in host memory"])
def left(decoder: Decoder, request: pytest.FixtureRequest) -> io.BytesIO:
    return leave(decoder, in_host=request.param)


def check_answers(engine: Engine, decoder: Decoder) -> None:
    for request in requests():
        assert list(engine.submit(request)) == alone(decoder, request)
    engine.run_alone(engine.check_integrity)


def test_what_was_left_is_found_and_the_answers_are_right(
    decoder: Decoder, left: io.BytesIO
) -> None:
    with Engine(decoder, ROOMY) as engine:
        assert engine.take_exact(left) == 7
        for request in requests():
            ticket = engine.submit(request)
            assert list(ticket) == alone(decoder, request)
            assert ticket.record is not None
            assert ticket.record.counts["exact"] == len(request.prompt_ids) - 3
        engine.run_alone(engine.check_integrity)


@pytest.mark.parametrize(
    "cfg",
    [replace(ROOMY, pool_tokens=4 * 24, tree_share=0.4), replace(ROOMY, page_tokens=8)],
    ids=["a small pool", "other pages"],
)
def test_what_finds_no_room_or_does_not_fit_is_left_out(
    decoder: Decoder, left: io.BytesIO, cfg: EngineConfig
) -> None:
    with Engine(decoder, cfg) as engine:
        assert engine.take_exact(left) < 7
        assert left.read() == b"", "the next model's part begins there"
        check_answers(engine, decoder)


def test_a_file_that_is_not_whole_is_an_error_and_harms_nothing(
    decoder: Decoder, left: io.BytesIO
) -> None:
    content = left.getvalue()
    with Engine(decoder, ROOMY) as engine:
        with pytest.raises(ValueError, match="ends within a node"):
            engine.take_exact(io.BytesIO(content[:-40]))
        check_answers(engine, decoder)


def test_what_is_no_number_is_not_taken(decoder: Decoder) -> None:
    file = io.BytesIO()
    with Engine(Decoder(decoder.spec, decoder.weights), ROOMY) as engine:
        request = requests()[0]
        list(engine.submit(request))
        engine.run_alone(lambda: engine._pool.values.fill_(float("nan")))
        engine.abandon("lost")
        assert engine.leave_exact(file, MOST_BYTES) > 0
    file.seek(0)
    with Engine(decoder, ROOMY) as engine:
        assert engine.take_exact(file) <= 1, "at most the empty beginning of a path"
        check_answers(engine, decoder)
