"""Whose turn it is, fairly: tenants share the engine however many requests each of them has.

Every request has a rank, and the smallest goes first. A tenant's requests stand one behind the
other, as far apart as they are long; a tenant that has had nothing for a while begins where the
others are now. So of tenants that always have requests each gets an equal share of the rows, and
the first request of another waits for those under way, not for all that came before it. With one
tenant it is the order of arrival. (Start-time fair queueing.)
"""

MOST = 1024  # tenants that are remembered before those without requests are forgotten


def share_of(namespace: str) -> str:
    """Return the tenant whose share a request counts against.

    A client may name tenants of its own behind the one whose key it has (`acme/x`, see
    `KVTransfer`): those are one, or each name would be another share. A gateway without a tenant
    (`/x`) speaks for tenants that are strangers to each other.
    """
    return namespace.partition("/")[0] or namespace


class FairRanks:
    """For the engine thread."""

    def __init__(self) -> None:
        self._now = 0.0  # the largest rank that began
        self._ends: dict[str, float] = {}  # by tenant: where its next request may stand

    def rank(self, tenant: str, cost: int) -> float:
        """Return the rank of a request that arrives now and takes `cost` rows."""
        start = max(self._now, self._ends.get(tenant, 0.0))
        self._ends[tenant] = start + max(1, cost)
        if len(self._ends) > MOST:
            self._ends = {name: end for name, end in self._ends.items() if end > self._now}
        return start

    def advance_to(self, rank: float) -> None:
        """Note that a request of that rank is computed from now on."""
        self._now = max(self._now, rank)
