"""Tokens of an answer that somebody watches."""

import threading

import pytest

from kvweave.app.answer.engine_target import TokenStream
from kvweave.app.library.runtime import EngineClient
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


def is_closed(client: EngineClient) -> bool:
    try:
        return not client.engine
    except EngineClosed:
        return True
