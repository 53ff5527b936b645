"""Tells an engine of chunks that are no more: it keeps chunk KV in tiers of its own.

There is no route for it in OpenAI's API, and a vLLM with our connector has no other ear. So it goes
with a request of one token: `kv_transfer_params` with a list `forget` of chunk ids. What an engine
could not be told is noted beside the knowledge base (`app/library/kv_places.py`) and told later.
"""

from collections.abc import Collection, Mapping
from typing import Any

from kvweave.app.library.kv_places import Delete
from kvweave.errors import TierError
from kvweave.gateway.connections import UpstreamFailed
from kvweave.gateway.prompts import COMPLETIONS
from kvweave.gateway.refusals import error_of
from kvweave.gateway.replica import Replica
from kvweave.types import ChunkId

MOST_AT_ONCE = 1000  # chunk ids in one request
PATIENCE_S = 60.0  # for its reply: the engine may be busy, and its disk slow


class EngineMemory:
    """A `RemovalTarget`: what one replica keeps for one tenant. Any thread."""

    def __init__(self, replica: Replica, tenant: str) -> None:
        self._replica = replica
        self._tenant = tenant

    @property
    def place(self) -> str:
        return f"upstream {self._replica.name}"

    @property
    def name(self) -> str:
        return self._replica.name

    def remove(
        self, gone: Collection[ChunkId], behind: Collection[ChunkId], delete: Delete
    ) -> None:
        """No engine behind a gateway computes chunks behind others: `behind` is of no matter."""
        card = self._replica.card
        if card is None:
            raise TierError(self._replica.words)
        if not card.fuses:
            return  # it keeps no chunk KV
        ids = sorted(gone)
        for at in range(0, len(ids), MOST_AT_ONCE):
            self._tell(card.model, ids[at : at + MOST_AT_ONCE])

    def _tell(self, model: str, chunk_ids: list[ChunkId]) -> None:
        """Raises TierError."""
        said: dict[str, Any] = {"forget": chunk_ids}
        if self._tenant:
            said["tenant"] = self._tenant
        body = {
            "model": model,
            "prompt": [1],
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": {"kvweave": said},
        }
        try:
            status, reply = self._replica.connections.post(COMPLETIONS, body, PATIENCE_S)
        except UpstreamFailed as failure:
            raise TierError(str(failure)) from failure
        told = reply.get("kv_transfer_params") if isinstance(reply, Mapping) else None
        told = told.get("kvweave") if isinstance(told, Mapping) else None
        if status == 200 and isinstance(told, Mapping) and told.get("forgotten") == len(chunk_ids):
            return
        error = error_of(reply)
        why = error.message if error is not None else str((told or {}).get("why", status))
        raise TierError(f"{self._replica.name} did not forget chunks: {why}")
