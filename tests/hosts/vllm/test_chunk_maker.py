"""Chunk KV is made in turns: at once when idle, for a share of the time when not."""

import threading
import time

import pytest

from kvweave.corpus.chunker import make_chunk_id
from kvweave.hosts.vllm.chunk_maker import ChunkMaker, Turns, as_chunks
from kvweave.hosts.vllm.orders import EncodeOrder
from kvweave.kv.format.keys import ChunkKey


def order(number: int) -> EncodeOrder:
    return EncodeOrder(number, (), "", (), ((1, 2, number),))


def test_a_job_runs_on_the_thread_that_gives_turns() -> None:
    turns, found = Turns(), []
    asker = threading.Thread(target=lambda: found.append(turns.run(threading.get_ident)))
    asker.start()
    while asker.is_alive():
        turns.give(is_idle=True)
    asker.join()
    assert found == [threading.get_ident()]
    assert turns.run(threading.get_ident) == threading.get_ident()


def test_a_job_that_fails_fails_where_it_was_asked_for() -> None:
    turns, found = Turns(), []

    def ask() -> None:
        with pytest.raises(ZeroDivisionError):
            turns.run(lambda: 1 // 0)
        found.append("told")

    asker = threading.Thread(target=ask)
    asker.start()
    while asker.is_alive():
        turns.give(is_idle=True)
    assert found == ["told"]


def test_beside_work_a_turn_is_rare() -> None:
    turns, ran = Turns(), []

    def job() -> None:
        time.sleep(0.01)
        ran.append(None)

    def ask() -> None:
        for _ in range(3):
            turns.run(job)

    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    until_s = time.monotonic() + 0.05
    while not ran and time.monotonic() < until_s + 5:
        turns.give(is_idle=False)
    started_s = time.monotonic()
    while len(ran) < 2:
        turns.give(is_idle=False)
    assert time.monotonic() - started_s > 0.05, "a tenth of the time is theirs"
    while asker.is_alive():
        turns.give(is_idle=True)


def test_orders_are_settled_also_when_one_fails() -> None:
    def make(order: EncodeOrder) -> list[ChunkKey]:
        if order.number == 2:
            raise RuntimeError("no memory")
        return [ChunkKey(bytes([order.number]))]

    maker = ChunkMaker(make)
    for number in (1, 2, 3):
        maker.put(order(number))
    settled: set[int] = set()
    made: list[ChunkKey] = []
    until_s = time.monotonic() + 30
    while len(settled) < 3 and time.monotonic() < until_s:
        numbers, keys = maker.take_settled()
        settled |= numbers
        made += keys
    maker.close()
    assert settled == {1, 2, 3}
    assert made == [b"\x01", b"\x03"]


def test_a_worker_that_ends_leaves_nobody_waiting() -> None:
    turns = Turns()
    maker = ChunkMaker(lambda _order: turns.run(list))
    maker.put(order(1))
    time.sleep(0.1)
    turns.close()
    maker.close()
    thread = maker._thread
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()


def test_chunks_are_named_as_everywhere() -> None:
    (chunk,) = as_chunks(((5, 6, 70_000),))
    assert chunk.id == make_chunk_id((5, 6, 70_000))
