"""Documents that come with requests and belong to no knowledge base, remembered while the process
lives: the second time a document comes its KV is stored by itself, and from then on it is found in
any order and company. Each tenant has its own.
"""

import threading
from collections.abc import Collection
from dataclasses import dataclass, replace

from kvweave.app.library.kv_behind import ChunkPromotion, KVBehind, KVByPreamble, PreambleKey
from kvweave.app.library.kv_maker import KVMaker
from kvweave.app.library.library_kv import CODEC, KVOptions, key_context
from kvweave.app.library.runtime import ModelRuntime
from kvweave.config import StoreSettings
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
from kvweave.fuse.encode.preparation import Preparation, Texts
from kvweave.kv.format.keys import ContextId, context_of
from kvweave.kv.provenance import carries
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import GIB, HostTierConfig, StoreConfig
from kvweave.plan.ordering import PROMOTION
from kvweave.text.prompt import SYSTEM, split_template
from kvweave.types import ChunkId

MOST_CONTEXTS = 4096  # of a tenant, whose chunk KV a deletion finds: two for each preamble


@dataclass(frozen=True, slots=True)
class DocumentMemoryConfig:
    """How much is remembered."""

    capacity_bytes: int = GIB  # of host memory, taken as it fills; 0: nothing is remembered
    promotion: int = PROMOTION  # requests that bring a document before its KV is stored; 0: never
    codec: str = CODEC  # how it is written

    @property
    def is_on(self) -> bool:
        return self.capacity_bytes > 0 and self.promotion > 0


class DocumentMemory:
    """Chunk KV of documents without a knowledge base. Any thread. `settle` it while the engine
    still runs, then `close` it; both are harmless the second time."""

    def __init__(self, runtime: ModelRuntime, cfg: DocumentMemoryConfig) -> None:
        self._runtime = runtime
        self._cfg = cfg
        self._options = KVOptions(store=StoreSettings(codec=cfg.codec))
        self._lock = threading.Lock()
        self._encoder: ChunkEncoder | None = None  # with the store, made on first use
        self._by_preamble = KVByPreamble(self._make)
        self._contexts: dict[str, dict[ContextId, None]] = {}  # by tenant; guarded by the lock
        self.maker = KVMaker(runtime.client.pace, _never_deleted)
        self.promotion = ChunkPromotion(runtime.max_context, cfg.promotion, self.maker)

    def behind(self, key: PreambleKey) -> KVBehind:
        """What is remembered of a tenant's documents behind a preamble."""
        return self._by_preamble.get(key)

    def forget(self, chunk_ids: Collection[ChunkId], tenant: str) -> int:
        """A tenant's documents are no more: delete their KV; returns how many there were. Others
        who brought the same keep theirs."""
        with self._lock:
            encoder, own = self._encoder, set(self._contexts.get(tenant, ()))
        if encoder is None:
            return 0
        found = encoder.store.keys_at_hand(carries(chunk_ids))
        return encoder.store.delete([key for key in found if context_of(key) in own])

    def num_pinned(self) -> int:
        """Chunk KV that some lease holds."""
        with self._lock:
            return 0 if self._encoder is None else self._encoder.store.num_pinned()

    def settle(self) -> None:
        """Store no more."""
        self.maker.close()

    def close(self) -> None:
        with self._lock:
            encoder, self._encoder = self._encoder, None
        if encoder is not None:
            encoder.store.close()

    def _make(self, key: PreambleKey) -> KVBehind:
        encoder = self._first_encoder().behind(key.preamble, key.tenant)
        with self._lock:
            own = self._contexts.setdefault(key.tenant, {})
            own.update({context_of(name(())): None for name in (encoder.key, encoder.exact_key)})
            while len(own) > MOST_CONTEXTS:
                del own[next(iter(own))]
        return KVBehind(encoder, self._runtime.client, self.promotion, is_own=False)

    def _first_encoder(self) -> ChunkEncoder:
        with self._lock:
            if self._encoder is None:
                decoder, tokenizer = self._runtime.decoder, self._runtime.tokenizer
                preparation = Preparation.parse()
                host = HostTierConfig(capacity_bytes=self._cfg.capacity_bytes)
                self._encoder = ChunkEncoder(
                    decoder,
                    KVStore(replace(StoreConfig(), tiers=(host,))),
                    key_context(decoder, tokenizer, self._options),
                    preparation,
                    Texts.for_preparation(
                        tokenizer, preparation, split_template(tokenizer, SYSTEM)[1]
                    ),
                    run_alone=self._runtime.client.run_alone,
                )
            return self._encoder


def _never_deleted(chunk_id: ChunkId, as_of: int) -> bool:
    """No knowledge base has these documents: none is deleted."""
    return False
