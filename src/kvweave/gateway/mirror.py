"""What a replica probably holds, judged by what was sent to it.

A replica does not say what its caches hold, and asking would cost more than it brings. But all that
it computes went through here, and its caches forget what was not used for longest. So the gateway
keeps the same books with the same rule: paths of parts, as an exact prefix cache has them, and
chunks by themselves, as a store of chunk KV has them. Each up to a number of tokens.

A wrong entry costs a prefill at worst: nobody answers from these books. Beside them is kept what a
replica does say, with its answers: which stored chunks it has loaded.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvweave.types import ChunkId

MAX_VISITS = 256  # paths that a search for an order may look at
MOST_LOADED = 100_000  # chunks that a replica said it has loaded


class PromptPart(NamedTuple):
    """A piece of a prompt that comes back as a whole: preamble, message, chunk, question."""

    key: bytes  # names its content
    num_tokens: int
    is_chunk: bool = False


class MirrorMatch(NamedTuple):
    """Tokens of a prompt that a replica probably holds."""

    exact: int = 0  # from the begin of the prompt
    chunks: int = 0  # of chunks behind that, wherever they stood before


def path_keys(root: bytes, parts: Sequence[PromptPart]) -> list[bytes]:
    """A name for each beginning of the prompt that ends with a part. `root`: whose it is."""
    keys, at = [], root
    for part in parts:
        at = step(at, part)
        keys.append(at)
    return keys


def step(path: bytes, part: PromptPart) -> bytes:
    """The path one part longer."""
    return hashlib.blake2b(part.key, key=path[:64], digest_size=16).digest()


class Mirror:
    """The books of one replica. Not thread-safe: the fleet's lock is held."""

    def __init__(self, max_tokens: int) -> None:
        self._paths = _Recent(max_tokens)
        self._chunks = _Recent(max_tokens)

    def match(self, paths: Sequence[bytes], parts: Sequence[PromptPart]) -> MirrorMatch:
        """What of a prompt it holds. Changes nothing."""
        num_exact = 0
        for path in paths:
            if path not in self._paths:
                break
            num_exact += 1
        exact = sum(part.num_tokens for part in parts[:num_exact])
        chunks = sum(
            part.num_tokens
            for part in parts[num_exact:]
            if part.is_chunk and part.key in self._chunks
        )
        return MirrorMatch(exact, chunks)

    def has(self, path: bytes) -> bool:
        return path in self._paths

    def record(self, paths: Sequence[bytes], parts: Sequence[PromptPart]) -> None:
        """A prompt goes there: from now on it holds it."""
        # the last part first: it is then the first to be forgotten, as leaves of a cache are
        for path, part in zip(reversed(paths), reversed(parts), strict=True):
            self._paths.use(path, part.num_tokens)
        for part in parts:
            if part.is_chunk:
                self._chunks.use(part.key, part.num_tokens)

    def forget(self) -> None:
        """It is another process by now."""
        self._paths.clear()
        self._chunks.clear()

    def order(self, path: bytes, parts: Sequence[PromptPart]) -> list[int]:
        """Places of `parts` in the order of the longest path behind `path` that it holds; those
        that are not on it are left out."""
        best: list[int] = []
        best_tokens = visits = 0
        walked: list[int] = []

        def walk(at: bytes, num_tokens: int) -> None:
            nonlocal best, best_tokens, visits
            for place, part in enumerate(parts):
                if place in walked or visits >= MAX_VISITS:
                    continue
                visits += 1
                longer = step(at, part)
                if longer not in self._paths:
                    continue
                walked.append(place)
                tokens = num_tokens + part.num_tokens
                if tokens > best_tokens:
                    best, best_tokens = list(walked), tokens
                walk(longer, tokens)
                walked.pop()

        walk(path, 0)
        return best

    @property
    def num_tokens(self) -> int:
        """Tokens of all paths in the books."""
        return self._paths.num_tokens


class LoadedChunks:
    """Chunks whose KV a replica says it has loaded for answers, by tenant; those that were not for
    longest go where there are too many. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[tuple[str, ChunkId], None] = OrderedDict()

    def note(self, tenant: str, chunk_ids: Iterable[ChunkId]) -> None:
        with self._lock:
            for chunk_id in chunk_ids:
                self._found[tenant, chunk_id] = None
                self._found.move_to_end((tenant, chunk_id))
            while len(self._found) > MOST_LOADED:
                self._found.popitem(last=False)

    def drop(self, tenant: str, chunk_ids: Iterable[ChunkId]) -> None:
        """They were deleted."""
        with self._lock:
            for chunk_id in chunk_ids:
                self._found.pop((tenant, chunk_id), None)

    def chunks_for(self, tenant: str) -> set[ChunkId]:
        """Return the chunks of a tenant that are there."""
        with self._lock:
            return {chunk_id for owner, chunk_id in self._found if owner == tenant}


class _Recent:
    """Keys with a number of tokens each; those not used for longest go where there are too many."""

    def __init__(self, max_tokens: int) -> None:
        self._max = max_tokens
        self._tokens: OrderedDict[bytes, int] = OrderedDict()
        self.num_tokens = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._tokens

    def use(self, key: bytes, num_tokens: int) -> None:
        self.num_tokens += num_tokens - self._tokens.pop(key, 0)
        self._tokens[key] = num_tokens
        while self.num_tokens > self._max:
            _, gone = self._tokens.popitem(last=False)
            self.num_tokens -= gone

    def clear(self) -> None:
        self._tokens.clear()
        self.num_tokens = 0
