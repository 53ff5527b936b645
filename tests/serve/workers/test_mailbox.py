"""From a worker thread to asyncio: nothing lost, merged when slow, failures last."""

import asyncio
import threading

import pytest

from kvweave.app.answer.kept_answers import KeptAnswer
from kvweave.app.weave import Answer, AnswerStream, Piece
from kvweave.serve.observe.prometheus import ServerMetrics
from kvweave.serve.observe.tenant_series import TenantSeries
from kvweave.serve.routes.chat import ChatFormat
from kvweave.serve.routes.model_names import ModelRef
from kvweave.serve.routes.reply import chunks_of
from kvweave.serve.wire.chat import ChatRequest
from kvweave.serve.workers.answer_pool import AnswerJob
from kvweave.serve.workers.mailbox import Mailbox
from worlds.serving import user

ANSWER = Answer("abc", "stop", 5, 3, ttft_ms=1.0, total_ms=2.0)


def test_pieces_that_came_meanwhile_leave_together() -> None:
    async def read() -> list[list[Piece]]:
        mailbox = Mailbox()
        for text in "abc":
            mailbox.put(Piece(text))
        first = await mailbox.take()
        mailbox.put(Piece("d"))
        mailbox.end(ANSWER)
        return [first, await mailbox.take(), await mailbox.take(), await mailbox.take()]

    assert asyncio.run(read()) == [[Piece("a"), Piece("b"), Piece("c")], [Piece("d")], [], []]


def test_a_slow_reader_gets_one_chunk_for_many_pieces() -> None:
    async def read() -> list[str]:
        def never_started() -> AnswerStream:
            raise AssertionError("the test writes into its mailbox itself")

        job = AnswerJob(never_started, ServerMetrics(), TenantSeries())
        for text in ["a", "", "bc"]:
            job.mailbox.put(Piece(text))
        job.mailbox.end(ANSWER)
        request = ChatRequest.model_validate({"messages": user("hi")})
        chunks = chunks_of(ChatFormat(ModelRef("m", "m"), request, kept.append), [job])
        return [c["choices"][0]["delta"].get("content") async for c in chunks]

    kept: list[KeptAnswer] = []
    assert asyncio.run(read()) == ["", "abc", None]
    assert [each.answer for each in kept] == [ANSWER]


def test_nothing_is_lost_between_threads() -> None:
    async def read() -> str:
        mailbox = Mailbox()

        def write() -> None:
            mailbox.open()
            for i in range(2000):
                mailbox.put(Piece(f"{i},"))
            mailbox.end(ANSWER)

        worker = threading.Thread(target=write)
        worker.start()
        await mailbox.wait_until_open()
        text = ""
        while pieces := await mailbox.take():
            text += "".join(piece.text for piece in pieces)
        worker.join()
        return text

    assert asyncio.run(read()) == "".join(f"{i}," for i in range(2000))


def test_a_failure_comes_behind_what_was_made_before_it() -> None:
    async def read() -> None:
        mailbox = Mailbox()
        mailbox.open()
        mailbox.put(Piece("a"))
        mailbox.fail(RuntimeError("broken"))
        await mailbox.wait_until_open()
        assert await mailbox.take() == [Piece("a")]
        with pytest.raises(RuntimeError, match="broken"):
            await mailbox.take()
        with pytest.raises(RuntimeError, match="broken"):
            await mailbox.finish()

    asyncio.run(read())


def test_a_failure_before_the_start_is_raised_at_once() -> None:
    async def read() -> None:
        mailbox = Mailbox()
        threading.Timer(0.01, mailbox.fail, [RuntimeError("early")]).start()
        with pytest.raises(RuntimeError, match="early"):
            await mailbox.wait_until_open()

    asyncio.run(read())
