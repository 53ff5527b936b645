"""How far the chunk KV of a gateway's knowledge base is. Its upstreams make it, for chunks that
questions bring back; what they say of it with their answers is counted."""

from kvweave.app.library.kv_progress import KVProgress
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.gateway.cards import UpstreamCard
from kvweave.gateway.target import Upstreams
from kvweave.kv.tiers.config import HostTierConfig
from kvweave.types import ChunkId

AS_TEXT = (
    "prompts go to upstreams as text, in which they find no chunks; give --tokenizer, the name of "
    "their model"
)
NONE_FUSES = (
    "no upstream reuses chunk KV; let `kvweave serve` be one, or a vLLM with kvweave's connector"
)
NONE_KEPT = (
    "upstreams keep no chunk KV of prompts; raise library.remembered_bytes and library.promotion "
    "there"
)
NOT_SHARED = (
    "each upstream makes and keeps its own; set store.redis_url or store.s3_url on all of them to "
    "share it"
)
HOW = (
    "upstreams make it for chunks that questions bring back; counted are chunks whose KV answers "
    "have loaded since this gateway started"
)


def peek_progress(kb: KnowledgeBase, upstreams: Upstreams, tenant: str) -> KVProgress:
    """Say how far it is, by the books of this gateway: no upstream is asked."""
    total, replicas = kb.catalogue.num_chunks(), upstreams.fleet.replicas
    if upstreams.prompts.needs_texts:
        return KVProgress("off", 0, total, 0, why=AS_TEXT)
    seen = [each.card for each in replicas if each.has(upstreams.model)]
    cards = [card for card in seen if card is not None]
    why_off = _why_off(cards, upstreams.fleet.why_unready() or "no upstream was seen yet")
    if why_off is not None:
        return KVProgress("off", 0, total, 0, why=why_off)
    loaded = set[ChunkId]().union(*(each.loaded.chunks_for(tenant) for each in replicas))
    num_done = len(kb.catalogue.existing(list(loaded)))
    why = NOT_SHARED if _is_apart(cards) else HOW
    return KVProgress("on_demand", num_done, total, 0, why=why)


def _why_off(cards: list[UpstreamCard], unready: str) -> str | None:
    if not cards:
        return unready
    fusing = [card for card in cards if card.fuses]
    if not fusing:
        return NONE_FUSES
    return None if any(card.kv_tiers != () for card in fusing) else NONE_KEPT


def _is_apart(cards: list[UpstreamCard]) -> bool:
    """Whether one of several upstreams says that nobody shares what it keeps."""
    own = [card for card in cards if card.kv_tiers == (HostTierConfig.kind,)]
    return len(cards) > 1 and bool(own)
