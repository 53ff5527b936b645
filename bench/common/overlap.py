"""How much a trace of requests has in common, before anything is turned on (after CRAFT).

    prefix   what an unbounded prefix cache would hit
    total    what reordering towards one earlier request could reach
    union    what position-free chunk KV can hit

From prefix to total is the prize of ordering, from total to union that of fusion.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from kvweave.types import ChunkId


class Overlap(NamedTuple):
    """Shares of the chunks of a request, averaged over all requests but the first."""

    prefix: float
    total: float
    union: float


def overlap(requests: Sequence[Sequence[ChunkId]]) -> Overlap:
    """Overlap of each request with those before it. Empty requests are left out."""
    requests = [request for request in requests if request]
    if len(requests) < 2:
        return Overlap(0.0, 0.0, 0.0)
    stored: set[tuple[ChunkId, ...]] = set()
    seen_in: dict[ChunkId, list[int]] = defaultdict(list)
    prefix = total = union = 0.0
    for place, request in enumerate(requests):
        if place:
            shared: dict[int, int] = defaultdict(int)
            for chunk_id in set(request):
                for earlier in seen_in[chunk_id]:
                    shared[earlier] += 1
            depth = 0
            while depth < len(request) and tuple(request[: depth + 1]) in stored:
                depth += 1
            prefix += depth / len(request)
            total += max(shared.values(), default=0) / len(request)
            union += sum(1 for chunk_id in request if seen_in[chunk_id]) / len(request)
        for chunk_id in set(request):
            seen_in[chunk_id].append(place)
        stored.update(tuple(request[: depth + 1]) for depth in range(len(request)))
    num = len(requests) - 1
    return Overlap(prefix / num, total / num, union / num)
