"""How far the chunk KV of a knowledge base is: by who makes it, or by what lies on its disk.

Without a model it is not known which KV would be served. Every object names its chunk, though, and
the context it was computed in; the context that covers most chunks is taken for the one.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple

from kvweave.app.library.stored_kv import KVPlaces
from kvweave.calibrate.own_evidence import EvidenceState
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.kv.format.keys import ContextId, context_of, make_tag, tag_of
from kvweave.kv.tiers.base import StoredObject
from kvweave.kv.tiers.config import DiskTierConfig
from kvweave.kv.tiers.disk import DiskTier

FOLDER = "kv"  # in the folder of the knowledge base
RECENT_S = 60.0  # an object as new as that: some process is making them
RATE_OF = 32  # objects that the time left is estimated from

# off: nothing is made, and `why` says what to do about it; on_demand: engines behind a gateway make
# it, for chunks that questions bring back; full: no room is left for more; failed: `why` says what
# is in the way; unused: nothing is made because no answer would be fused from it, and `why` says
# why not
KVState = Literal["off", "on_demand", "making", "ready", "full", "failed", "unused"]
NOT_OPEN = (
    "no process makes it: a server does while it has the knowledge base open, which a question or "
    "an upload opens; `kvweave ingest --kb DIR --kv` makes it at once"
)
NEVER = "library.background_kv is never; set it to auto or always"


class KVProgress(NamedTuple):
    """How far the chunk KV of a knowledge base is."""

    state: KVState
    chunks_done: int
    chunks_total: int
    num_bytes: int  # of all chunk KV there, front copies too: on the disk, where there is one
    eta_s: float | None = None  # until the rest is there; None: not known, or nothing is made
    why: str = ""
    chunks_in_front: int = 0  # that have a front copy as well, as far as somebody makes them
    hurried: bool = False  # it is made beside answers, with half of the time
    calibration: EvidenceState | None = None  # its documents were asked about themselves


def progress_on_disk(kb: KnowledgeBase) -> KVProgress:
    """By what lies on the disk. Reads names, no objects; no model is needed."""
    tags = {make_tag(chunk_id) for chunk_id in kb.catalogue.chunk_ids()}
    total = len(tags)
    by_context: dict[ContextId, list[StoredObject]] = defaultdict(list)
    num_bytes = 0
    own = kb.folder / FOLDER
    for folder in (own, *KVPlaces(own).disks()):
        if (folder / "objects").is_dir():
            for each in DiskTier(DiskTierConfig(folder), sweep=False).scan():
                num_bytes += each.size_bytes
                if tag_of(each.key) in tags:
                    by_context[context_of(each.key)].append(each)
    found = max(by_context.values(), key=len, default=[])
    done = len({tag_of(each.key) for each in found})
    if done >= total:
        return KVProgress("ready", done, total, num_bytes)
    last = sorted(each.written_s for each in found)[-RATE_OF:]
    if not last or time.time() - last[-1] > RECENT_S:
        return KVProgress("off", done, total, num_bytes, why=NOT_OPEN)
    return KVProgress("making", done, total, num_bytes, _left_s(last, total - done))


def _left_s(written_s: Sequence[float], num_left: int) -> float | None:
    if len(written_s) < 2:
        return None
    return (written_s[-1] - written_s[0]) / (len(written_s) - 1) * num_left
