"""Tokens of an answer that somebody watches."""

import threading
from threading import get_ident

import pytest

from kvweave.app.answer.answer_stream import CopiedTokens
from kvweave.app.answer.engine_target import TokenStream
from kvweave.app.library.runtime import EngineClient
from kvweave.engine.request import RequestTimeline
from kvweave.errors import EngineClosed
from kvweave.model.decoder import Decoder
from kvweave.text.tokenizer import Tokenizer
from worlds.auto import model
from worlds.engine import SMALL, plain, until

__all__ = ["model"]


def test_one_that_waits_when_all_is_closed_waits_for_nothing(
    model: tuple[Decoder, Tokenizer],
) -> None:
    """Who looks at it writes to a client, which still is to hear of the end."""
    client = EngineClient(model[0], SMALL)
    gate = threading.Event()
    busy = threading.Thread(target=client.run_alone, args=(lambda: gate.wait(30),))
    closing = threading.Thread(target=client.close)
    busy.start()
    until(lambda: client.engine.pulse().step_s > 0)
    stream = TokenStream(client, plain([1, 2, 3]))
    stream.begin()
    assert stream.current_wait() is not None
    closing.start()
    until(lambda: is_closed(client))
    assert stream.current_wait() is None
    gate.set()
    closing.join(30)
    busy.join(30)
    with pytest.raises(EngineClosed):
        next(stream)


def test_listeners_hear_behind_the_first_token_on_the_thread_that_reads(
    model: tuple[Decoder, Tokenizer],
) -> None:
    """Whoever gives it up is an event loop, which must not wait for what they do."""
    heard: list[int] = []
    client = EngineClient(model[0], SMALL)
    try:
        stream = TokenStream(client, plain([1, 2, 3]), (lambda _: heard.append(get_ident()),))
        next(stream)
        assert heard == [], "the reader has its token first"
        other = threading.Thread(target=stream.close)
        other.start()
        other.join(30)
        assert heard == []
        with pytest.raises(StopIteration):
            next(stream)
        assert heard == [get_ident()], "also where another has given it up"
        stream.close()
        assert len(heard) == 1
        stream = TokenStream(client, plain([1, 2, 3]), (lambda _: heard.append(get_ident()),))
        next(stream)
        stream.close()
        assert len(heard) == 2, "one token was enough for its reader"
    finally:
        client.close()


def is_closed(client: EngineClient) -> bool:
    try:
        return not client.engine
    except EngineClosed:
        return True


def test_counts_of_copies_hold_although_the_engine_goes_on() -> None:
    line = RequestTimeline(0.0, drafted=9, copied=7)
    assert CopiedTokens.from_timeline(line, 20) == (9, 7)
    assert CopiedTokens.from_timeline(line, 5) == (9, 5), "no more than the answer has"
    line.drafted = 6  # as if read before both grew
    assert CopiedTokens.from_timeline(line, 20) == (7, 7), "never fewer than were right"
