"""Paths that come back are computed exactly in idle time, so that the next request finds them."""

import threading
from dataclasses import replace

from kvweave.app.auto.requests import exact_request
from kvweave.engine.engine import Engine
from kvweave.engine.request import Ticket
from kvweave.engine.sampling import Sampling
from kvweave.errors import EngineClosed
from kvweave.text.prompt import Prompt

MOST = 4  # paths that wait for idle time; more are left for the next time they are seen


class PathFeeder:
    """Feeds the knowledge tree of one engine. Any thread; nothing here waits. What is under way
    ends with the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._under_way: dict[tuple[tuple[int, ...], ...], Ticket] = {}

    def feed(self, prompt: Prompt, num_parts: int) -> bool:
        """Have the first so many parts of a prompt computed, history first. False: they are under
        way already, or too many are."""
        history = prompt.history[:num_parts]
        chunks = prompt.chunks[: num_parts - len(history)]
        parts = (prompt.preamble, *history, *chunks)
        # a request needs something to compute: the first token of the question, which is not kept
        begun = replace(prompt, history=history, chunks=chunks, question=prompt.question[:1])
        request = exact_request(begun, Sampling(max_tokens=1), (), use_tree=True)
        with self._lock:
            self._under_way = {k: t for k, t in self._under_way.items() if not t.is_done}
            if parts in self._under_way or len(self._under_way) >= MOST:
                return False
            try:
                self._under_way[parts] = self._engine.submit(replace(request, background=True))
            except EngineClosed:
                return False
            return True
