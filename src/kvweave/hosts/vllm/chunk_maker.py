"""Chunk KV made beside vLLM's own work: a thread that encodes, and turns in which it may compute.

The thread packs and saves; whatever needs the model is handed to the worker's thread, which does it
between two steps, a few layers at a time: whenever vLLM has nothing to compute, and for a share of
the time when it has.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from kvweave.corpus.chunker import make_chunk_id
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
from kvweave.hosts.vllm.identity import ChunkNames
from kvweave.hosts.vllm.orders import EncodeOrder, ForgetOrder
from kvweave.kv.format.keys import ChunkKey
from kvweave.types import Chunk

T = TypeVar("T")
log = logging.getLogger(__name__)

BUSY_SHARE = 0.1  # of the time, while vLLM computes
IDLE_WAIT_S = 0.005  # an idle step waits so long for something to compute, and a request for it


class Turns:
    """Lets other threads compute on the worker's thread. `give` is called there alone."""

    def __init__(self) -> None:
        self._owner = threading.get_ident()
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._free_s = 0.0  # when the next busy turn may be had

    def run(self, job: Callable[[], T]) -> T:
        """A `RunAlone`: on the worker's thread at once, on others when a turn is given."""
        if threading.get_ident() == self._owner:
            return job()
        done: Future[T] = Future()
        self._jobs.put((job, done))
        return done.result()

    def give(self, *, is_idle: bool) -> None:
        """A turn. Idle: waits a moment for a job; else only if the share allows it."""
        self._owner = threading.get_ident()
        now_s = time.monotonic()
        if not is_idle and now_s < self._free_s:
            return
        try:
            job, done = self._jobs.get(timeout=IDLE_WAIT_S) if is_idle else self._jobs.get_nowait()
        except queue.Empty:
            return
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(job())
        except BaseException as error:
            done.set_exception(error)
        ended_s = time.monotonic()
        self._free_s = ended_s + (ended_s - now_s) * (1 / BUSY_SHARE - 1)

    def close(self) -> None:
        """Whoever waits for a turn gets none."""
        while not self._jobs.empty():
            _, done = self._jobs.get()
            done.cancel()


def as_chunks(token_ids: Sequence[tuple[int, ...]]) -> list[Chunk]:
    """Chunks of which the tokens are known, and nothing else."""
    return [Chunk(make_chunk_id(ids), "", "", ids) for ids in token_ids]


def encode_order(encoder: ChunkEncoder, names: ChunkNames, order: EncodeOrder) -> list[ChunkKey]:
    """Encode and save what an order names and the store lacks; the keys of all of it."""
    encoder.encode_isolated(as_chunks(order.in_front))
    encoder.encode(as_chunks(order.behind))
    in_front = [names.exact_key(ids) for ids in order.in_front]
    return in_front + [names.key(ids) for ids in order.behind]


class ChunkMaker:
    """Works off orders on a thread of its own, one after the other. All else from the worker's
    thread, which works them off itself where ranks have to do so together."""

    def __init__(
        self,
        make: Callable[[EncodeOrder | ForgetOrder], list[ChunkKey]],
        *,
        has_thread: bool = True,
    ) -> None:
        """`make` does what one order says, on the maker's thread; what it raises is logged."""
        self._make = make
        self._has_thread = has_thread
        self._orders: queue.SimpleQueue[EncodeOrder | ForgetOrder | None] = queue.SimpleQueue()
        self._settled: queue.SimpleQueue[tuple[int, list[ChunkKey]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, order: EncodeOrder | ForgetOrder) -> None:
        if self._thread is None and self._has_thread:
            self._thread = threading.Thread(target=self._run, name="kvweave-maker", daemon=True)
            self._thread.start()
        self._orders.put(order)

    def work_off_next(self) -> None:
        """Work off an order at once, if one waits and there is no thread for it. Raises what that
        raises: other ranks wait for this one then, and cannot go on without it."""
        if not self._has_thread and not self._orders.empty() and (order := self._orders.get()):
            self._settled.put((order.number, self._make(order)))

    def take_settled(self) -> tuple[set[int], list[ChunkKey]]:
        """Orders that are done with, and the keys of what was saved for them."""
        numbers: set[int] = set()
        made: list[ChunkKey] = []
        while not self._settled.empty():
            number, keys = self._settled.get()
            numbers.add(number)
            made += keys
        return numbers, made

    def close(self) -> None:
        self._orders.put(None)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            keys: list[ChunkKey] = []
            try:
                keys = self._make(order)
            except CancelledError:
                return  # the worker ends
            except Exception:
                log.exception("chunks were not encoded; requests compute them")
            self._settled.put((order.number, keys))
