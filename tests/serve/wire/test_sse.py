"""Events on the wire: a comment where there is silence, and all chunks in their order."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from kvweave.serve.wire.sse import DONE, HEARTBEAT, as_events


async def chunks(pause_s: float, *, fails: bool = False) -> AsyncIterator[dict[str, Any]]:
    yield {"n": 1}
    await asyncio.sleep(pause_s)
    if fails:
        raise ValueError("half-way")
    yield {"n": 2}


def sent(pause_s: float, heartbeat_s: float | None, *, fails: bool = False) -> list[str]:
    async def all_of() -> list[str]:
        return [event async for event in as_events(chunks(pause_s, fails=fails), heartbeat_s)]

    return asyncio.run(all_of())


def test_a_comment_goes_out_while_nothing_else_does() -> None:
    events = sent(0.5, 0.1)
    assert events[0] == 'data: {"n":1}\n\n'
    assert 1 <= events.count(HEARTBEAT) <= 5
    assert events[-1] == 'data: {"n":2}\n\n' + DONE
    assert HEARTBEAT.startswith(":"), "or clients would read it as an event"


def test_without_silence_there_is_no_comment() -> None:
    all_of = 'data: {"n":1}\n\ndata: {"n":2}\n\n' + DONE
    assert "".join(sent(0.0, 10.0)) == "".join(sent(0.0, None)) == all_of


def test_what_is_there_at_once_goes_out_together_and_waits_for_nothing() -> None:
    async def some() -> AsyncIterator[dict[str, Any]]:
        yield {"n": 1}
        yield {"n": 2}
        await asyncio.sleep(0.2)
        yield {"n": 3}

    async def all_of() -> list[tuple[str, float]]:
        began_s = time.perf_counter()
        return [(event, time.perf_counter() - began_s) async for event in as_events(some())]

    (first, first_s), (last, last_s) = asyncio.run(all_of())
    assert first == 'data: {"n":1}\n\ndata: {"n":2}\n\n'
    assert last == 'data: {"n":3}\n\n' + DONE
    assert first_s < 0.2 <= last_s + 0.01, "the first did not wait for the last"


def test_a_failure_is_the_last_event_with_and_without_comments() -> None:
    for heartbeat_s in (None, 10.0):
        *_, last = "".join(sent(0.0, heartbeat_s, fails=True)).strip().split("\n\n")
        assert "error" in last


def test_who_leaves_in_the_middle_ends_the_chunks_too() -> None:
    ended: list[bool] = []

    async def endless() -> AsyncIterator[dict[str, Any]]:
        try:
            yield {}
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def leave() -> None:
        events = as_events(endless(), 0.01)
        assert await anext(events)
        assert await anext(events) == HEARTBEAT
        await events.aclose()  # type: ignore[attr-defined]
        await asyncio.sleep(0.05)

    asyncio.run(leave())
    assert ended == [True]
