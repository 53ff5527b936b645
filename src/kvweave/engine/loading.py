"""Requests whose chunk KV is on its way: they wait here while others are computed.

Two ways to overlap loading with computing (FusionRAG, 7.3 of the algorithms reference):

    request by request   all bytes first, while other requests run; then the pass
    layer by layer       the pass starts at once and waits for each layer as it gets there

The first leaves the device to those who can use it; the second is faster for a request that is
alone. `waits_outside` is the rule between them.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvweave.engine.request import FusedPart, LoadCost
from kvweave.errors import EngineClosed
from kvweave.fuse.prefill import StoredPrompt

THREADS = 8  # they only wait: the store's own pools read
SLOW_LOAD = 4.0  # a layer's bytes take so many times its computing: the pass would stand still


def waits_outside(cost: LoadCost | None, others_ready: bool) -> bool:
    """Whether a request should get all its bytes before it takes a step.

    Alone it never should. With others to compute, a pass that waits for most of its layers holds
    them up; one whose bytes come faster than it computes does not.
    """
    if not others_ready:
        return False
    return cost is None or cost.load_s >= SLOW_LOAD * cost.compute_s


Loaded = StoredPrompt | BaseException


class Loading:
    """Waits for bytes on threads of its own. `post` brings a call to the engine thread."""

    def __init__(self, num_layers: int, post: Callable[[Callable[[], None]], None]) -> None:
        self._num_layers = num_layers
        self._post = post
        self._threads: ThreadPoolExecutor | None = None

    def open(self, part: FusedPart) -> StoredPrompt:
        """Take the lease and start loading. May wait for a tier to say what it has."""
        return StoredPrompt(self._num_layers, part.chunks, part.store, part.strategy, part.computed)

    def start(self, part: FusedPart, then: Callable[[Loaded], None]) -> None:
        """Get all bytes of a request; `then` hears on the engine thread, with the leased bytes or
        with what failed. Whoever hears it closes them."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="engine-load")
        self._threads.submit(self._load, part, then)

    def close(self) -> None:
        """Wait for what is under way: nothing that arrives later keeps a lease."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _load(self, part: FusedPart, then: Callable[[Loaded], None]) -> None:
        stored: StoredPrompt | None = None
        loaded: Loaded
        try:
            stored = self.open(part)
            stored.arrive()
            loaded = stored
        except Exception as error:  # whoever waits must hear of it
            if stored is not None:
                stored.close()
            loaded = error
        try:
            self._post(lambda: then(loaded))
        except EngineClosed:
            if stored is not None:
                stored.close()
