"""What a tenant may have in all: knowledge bases, and bytes of documents.

Uploads that are under way count as if they were done, so that several at once cannot pass a quota
that each of them alone would keep. An upload that was let in is taken in whole: the last one may
exceed the bytes, by no more than one upload may have. Bytes that were read and refused count for a
while: they cost as much to read.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvweave.app.libraries.libraries import Libraries
from kvweave.serve.access.errors import ApiError
from kvweave.serve.access.limits import Limits

REFUSED_S = 600.0  # for which refused bytes count


class _Upload(NamedTuple):
    """One that is under way."""

    tenant: str
    name: str  # of its knowledge base
    num_bytes: int
    mark: object  # two alike are two


class _Refused(NamedTuple):
    """Bytes of an upload that was refused."""

    tenant: str
    num_bytes: int
    until_s: float  # when they no longer count, by the monotonic clock


class TenantQuotas:
    """Watches what the tenants of one server take up. Any thread."""

    def __init__(self, limits: Limits, libraries: Libraries) -> None:
        self._limits = limits
        self._libraries = libraries
        self._lock = threading.Lock()  # held while the disk is looked at: uploads take turns here
        self._under_way: set[_Upload] = set()
        self._refused: deque[_Refused] = deque()  # the oldest first

    def hold(self, tenant: str, name: str, num_bytes: int) -> Callable[[], None]:
        """Let an upload in, which counts until what this returns is called; twice is harmless.
        Raises a 403 for a tenant that has all it may have. Blocks on IO."""
        upload = _Upload(tenant, name, num_bytes, object())
        with self._lock:
            others = [each for each in self._under_way if each.tenant == tenant]
            self._refuse_names(tenant, name, others)
            self._refuse_bytes(tenant, others)
            self._under_way.add(upload)

        def let_go() -> None:
            with self._lock:
                self._under_way.discard(upload)

        return let_go

    def count_refused(self, tenant: str, num_bytes: int) -> None:
        """Count bytes that were read of an upload and refused. Waits as `hold` does."""
        if num_bytes and self._limits.tenant_bytes is not None:
            with self._lock:
                self._refused.append(_Refused(tenant, num_bytes, time.monotonic() + REFUSED_S))

    def _refuse_names(self, tenant: str, name: str, others: list[_Upload]) -> None:
        most = self._limits.tenant_kbs
        if most is None:
            return
        names = {*self._libraries.folders.names(tenant), *(each.name for each in others)}
        if name not in names and len(names) >= most:
            raise _over_quota(f"you may have {most} knowledge bases, and have them")

    def _refuse_bytes(self, tenant: str, others: list[_Upload]) -> None:
        most = self._limits.tenant_bytes
        if most is None:
            return
        while self._refused and self._refused[0].until_s < time.monotonic():
            self._refused.popleft()
        refused = sum(each.num_bytes for each in self._refused if each.tenant == tenant)
        used = self._libraries.folders.document_bytes(tenant) + sum(
            each.num_bytes for each in others
        )
        if used + refused >= most:
            used_text, most_text = (f"{n / 2**20:,.1f} MiB" for n in (used + refused, most))
            has = f"your documents take {used_text} of {most_text}, uploads under way counted"
            if refused:
                has += f" and {refused / 2**20:,.1f} MiB that were refused in the last minutes"
            raise _over_quota(has)


def _over_quota(what: str) -> ApiError:
    return ApiError(403, f"{what}; delete some first", code="quota_exceeded")
