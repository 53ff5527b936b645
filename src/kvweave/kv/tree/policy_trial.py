"""Which policy would keep more: two are tried side by side on the books of some of the paths.

PGDSF remembers for hours what is asked for. Where the subject of questions changes, that keeps what
is over, and GDSF, which forgets as it evicts, finds more. Neither is told which stream it serves,
so both keep the books of a cache without contents, and every access says who would have had it.
"""

from collections.abc import Iterable
from typing import NamedTuple

from kvweave.kv.policies import ItemUsage, RankHeap, open_policy

AUTO = "auto"  # the name of going by the better one
TRIED = ("pgdsf", "gdsf")  # the first one until another is surely ahead
SAMPLED = 4  # one path in so many is tried, in a cache so much smaller
LARGE = 1 << 17  # tokens; in a smaller cache every path is tried, or a few would decide
MEMORY = 0.999  # share of what was seen that is left one tried access later
SURE = 3.0  # standard deviations by which one is ahead
LEAST_SEEN = 5.0  # accesses that only one of them would have had


def first_policy(name: str) -> str:
    """The policy to begin with, for one that was named or is to be found out."""
    return TRIED[0] if name == AUTO else name


class Access(NamedTuple):
    """A path that was asked for, there or not."""

    key: bytes  # see path_key
    usage: ItemUsage  # this access counted


class PolicyTrial:
    """Accesses come in, the name of the better policy is read. One thread."""

    def __init__(self, capacity_tokens: float) -> None:
        """The cache it speaks for holds so many tokens."""
        self.best = TRIED[0]
        self._every = SAMPLED if capacity_tokens > LARGE else 1
        self._capacity = capacity_tokens / self._every
        self._books = [_Books(name) for name in TRIED]
        self._alone = [0.0, 0.0]  # accesses that only this one would have had, old ones fading

    def record(self, accesses: Iterable[Access]) -> bool:
        """Count accesses. True: the other policy is the better one from now on."""
        for access in accesses:
            if access.key[0] % self._every == 0:
                first, second = (each.access(access, self._capacity) for each in self._books)
                self._alone = [MEMORY * seen for seen in self._alone]
                if first != second:
                    self._alone[second] += 1.0
        first_seen, second_seen = self._alone
        seen, lead = first_seen + second_seen, second_seen - first_seen
        if seen < LEAST_SEEN or lead * lead <= SURE * SURE * seen:
            return False
        before, self.best = self.best, TRIED[lead > 0]
        return self.best != before


class _Books:
    """What a cache would hold under one policy."""

    def __init__(self, policy: str) -> None:
        self._policy = open_policy(policy)
        self._sizes: dict[bytes, int] = {}
        self._used = 0
        self._order: RankHeap[bytes] = RankHeap()

    def access(self, access: Access, capacity: float) -> bool:
        """Take a path in, and say whether it was there."""
        key, usage = access
        is_there = key in self._sizes
        if not is_there:
            self._sizes[key] = usage.size
            self._used += usage.size
        self._order.set(key, self._policy.rank(usage), usage.last_access_s)
        while self._used > capacity:
            gone, rank = self._order.pop_lowest()
            self._policy.record_eviction(rank)
            self._used -= self._sizes.pop(gone)
        return is_there
