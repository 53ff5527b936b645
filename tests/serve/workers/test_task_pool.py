"""Blocking work: who waits for whom, and what is left when a server stops."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from kvweave.serve.access.limits import Limits
from kvweave.serve.workers.task_pool import TaskPool


class Gate:
    """Work that says that it began, and ends when it is let."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name
        self.began, self.let = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self._log.append(self._name)
        self.began.set()
        assert self.let.wait(20)
        return self._name


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(400):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not come about")


def test_many_writers_of_one_leave_the_threads_to_writers_of_another() -> None:
    async def act() -> None:
        pool, log = TaskPool(Limits(tasks=2), "uploads"), list[str]()
        first = Gate(log, "a1")
        running = asyncio.create_task(pool.run(first, turn="a"))
        await until(first.began.is_set)
        behind = [asyncio.create_task(pool.run(lambda: log.append("a"), turn="a")) for _ in "wxyz"]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(pool.run(lambda: "b1", turn="b"), 10) == "b1"
        assert log == ["a1"], "those of the same turn still wait"
        first.let.set()
        assert await running == "a1"
        await asyncio.gather(*behind)
        assert log == ["a1", "a", "a", "a", "a"]
        assert pool._num_admitted == 0
        await pool.close()

    asyncio.run(act())


def test_a_turn_that_failed_lets_the_next_one_begin() -> None:
    async def act() -> None:
        pool = TaskPool(Limits(tasks=1), "uploads")

        def fails() -> None:
            raise ValueError("no")

        tasks = [asyncio.create_task(pool.run(w, turn="a")) for w in (fails, lambda: 7)]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(found[0], ValueError)
        assert found[1] == 7
        await pool.close()

    asyncio.run(act())


def test_closing_drops_what_waits_for_a_turn_or_a_thread_and_says_so() -> None:
    async def act() -> None:
        pool, log, over = TaskPool(Limits(tasks=1), "uploads"), list[str](), list[str]()
        first = Gate(log, "first")
        running = pool.admit().begin(first, lambda: over.append("first"), "a")
        await until(first.began.is_set)
        turn = pool.admit().begin(lambda: log.append("turn"), lambda: over.append("turn"), "a")
        thread = pool.admit().begin(lambda: log.append("t"), lambda: over.append("thread"), "b")
        closing = asyncio.create_task(pool.close())
        for dropped in (turn, thread):
            with pytest.raises(asyncio.CancelledError):
                await dropped
        first.let.set()
        assert await running == "first"
        await closing
        await until(lambda: pool._num_admitted == 0)
        assert log == ["first"]
        assert sorted(over) == ["first", "thread", "turn"]

    asyncio.run(act())


def test_one_client_that_has_all_threads_leaves_another_its_first_task() -> None:
    async def act() -> None:
        pool, log = TaskPool(Limits(tasks=2), "uploads"), list[str]()
        gates = [Gate(log, f"one{n}") for n in range(4)]
        running = [
            asyncio.create_task(pool.run(gate, turn=n, client="one"))
            for n, gate in enumerate(gates)
        ]
        await until(lambda: len(log) == 2)
        assert await asyncio.wait_for(pool.run(lambda: "two", client="two"), 10) == "two"
        assert log == ["one0", "one1"], "its others wait for their turn"
        for gate in gates:
            gate.let.set()
        assert await asyncio.gather(*running) == ["one0", "one1", "one2", "one3"]
        await pool.close()

    asyncio.run(act())
