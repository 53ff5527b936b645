"""Documents that come with requests and belong to no knowledge base of this process: the second
time one comes its KV is stored by itself, and from then on it is found in any order and company.
Each tenant has its own.

It is kept in host memory while the process lives, and in the tiers that machines share: so replicas
behind a gateway find what one of them has made.
"""

import logging
import threading
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from kvweave.app.library.kv_behind import ChunkPromotion, KVBehind, KVByPreamble, PreambleKey
from kvweave.app.library.kv_maker import KVMaker
from kvweave.app.library.library_kv import KVOptions, Retries, key_context
from kvweave.app.library.owed_removals import OwedRemovals
from kvweave.app.library.runtime import ModelRuntime
from kvweave.app.library.store_tiers import remote_tiers
from kvweave.app.library.stored_kv import TierTarget
from kvweave.config import StoreSettings
from kvweave.errors import TierError
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
from kvweave.fuse.encode.preparation import Preparation, Texts
from kvweave.kv.format.keys import ChunkKey, ContextId, context_of
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import GIB, HostTierConfig, StoreConfig
from kvweave.plan.ordering import PROMOTION
from kvweave.text.prompt import SYSTEM, split_template
from kvweave.types import ChunkId

log = logging.getLogger(__name__)

MOST_CONTEXTS = 4096  # of a tenant, whose chunk KV a deletion finds: two for each preamble


@dataclass(frozen=True, slots=True)
class DocumentMemoryConfig:
    """How much is remembered."""

    capacity_bytes: int = GIB  # of host memory, taken as it fills; 0: nothing is remembered
    promotion: int = PROMOTION  # requests that bring a document before its KV is stored; 0: never
    # how it is written, and the tiers that machines share; no disk is used
    store: StoreSettings = field(default_factory=StoreSettings)

    @property
    def codec(self) -> str:
        return KVOptions(store=self.store).codec

    @property
    def is_on(self) -> bool:
        return self.capacity_bytes > 0 and self.promotion > 0


class DocumentMemory:
    """Chunk KV of documents without a knowledge base. Any thread. `settle` it while the engine
    still runs, then `close` it; both are harmless the second time."""

    def __init__(self, runtime: ModelRuntime, cfg: DocumentMemoryConfig) -> None:
        self._runtime = runtime
        self._cfg = cfg
        self._lock = threading.Lock()
        self._encoder: ChunkEncoder | None = None  # with the store, made on first use
        self._by_preamble = KVByPreamble(self._make)
        self._contexts: dict[str, dict[ContextId, None]] = {}  # by tenant; guarded by the lock
        self._owed = OwedRemovals()
        self._retries = Retries(self._tell_remotes)
        client = runtime.client
        self.maker = KVMaker(client.pace, client.is_gone, client.read_exact)
        self.promotion = ChunkPromotion(runtime.max_context, cfg.promotion, self.maker)

    def behind(self, key: PreambleKey) -> KVBehind:
        """What is remembered of a tenant's documents behind a preamble."""
        return self._by_preamble.get(key)

    def forget(self, chunk_ids: Collection[ChunkId], tenant: str) -> None:
        """Delete the KV of a tenant's documents that are no more. Others who brought the same keep
        theirs, but for the copy in tiers that machines share, which goes whoever wrote it. Raises
        TierError where such a tier may have kept some of it: it is told again, for as long as this
        process lives. Calling again is harmless. Blocks on IO."""
        if self.opened_store is None and not remote_tiers(self._cfg.store):
            return
        store = self._first_encoder().store
        self._owed.add(chunk_ids, tenant)
        store.forget(chunk_ids, self._own_contexts(tenant))
        self._remove_from_remotes(chunk_ids, tenant)

    def _remove_from_remotes(self, chunk_ids: Collection[ChunkId], tenant: str) -> None:
        """Have shared tiers remove chunks. Raises TierError, behind all of them, for the first that
        did not."""
        store, own = self._first_encoder().store, self._own_contexts(tenant)

        def delete(keys: Collection[ChunkKey]) -> None:
            store.delete([key for key in keys if context_of(key) in own])

        failures = []
        for tier in store.remotes():
            try:
                TierTarget(tier).remove(chunk_ids, (), delete)
            except TierError as error:
                failures.append(error)
        if failures:
            self._owed.add(chunk_ids, tenant)  # another may have struck them just now
            self._retries.start()
            raise failures[0]
        self._owed.strike(chunk_ids, tenant)

    def _tell_remotes(self) -> bool:
        """Tell shared tiers what they could not be told before; whether none is left. On the thread
        of the retries."""
        is_done = True
        for tenant, chunk_ids in self._owed.by_tenant().items():
            try:
                self._remove_from_remotes(chunk_ids, tenant)
            except TierError as error:
                is_done = False
                log.warning("chunk KV of %d deleted chunks may be left: %s", len(chunk_ids), error)
        return is_done

    def _own_contexts(self, tenant: str) -> frozenset[ContextId]:
        with self._lock:
            return frozenset(self._contexts.get(tenant, ()))

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers that it lies in, the fastest first."""
        return (HostTierConfig.kind, *(cfg.kind for cfg in remote_tiers(self._cfg.store)))

    @property
    def opened_store(self) -> KVStore | None:
        """Where it lies; None: nothing was ever to be stored."""
        with self._lock:
            return None if self._encoder is None else self._encoder.store

    def settle(self) -> None:
        """Store no more."""
        self.maker.close()

    def close(self) -> None:
        self._retries.close()
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
        client, promotion = self._runtime.client, self.promotion
        return KVBehind(encoder, client, promotion, self.maker)

    def _first_encoder(self) -> ChunkEncoder:
        with self._lock:
            if self._encoder is None:
                decoder, tokenizer = self._runtime.decoder, self._runtime.tokenizer
                preparation, settings = Preparation.parse(), self._cfg.store
                host = HostTierConfig(capacity_bytes=self._cfg.capacity_bytes)
                cfg = StoreConfig(tiers=(host, *remote_tiers(settings)))
                if settings.policy is not None:
                    cfg = replace(cfg, policy=settings.policy)
                store = KVStore(cfg)
                store.know_by(self._owed.without)  # what every shared tier is rid of
                self._encoder = ChunkEncoder(
                    decoder,
                    store,
                    key_context(decoder, tokenizer, KVOptions(store=settings)),
                    preparation,
                    Texts.for_preparation(
                        tokenizer, preparation, split_template(tokenizer, SYSTEM)[1]
                    ),
                    run_alone=self._runtime.client.run_alone,
                )
            return self._encoder
