"""The chunk KV of one open knowledge base: its store, its neighbours, what makes it. The only place
where these are wired together.

    <kb>/kv/    chunk KV, how it is prepared, and who its neighbours were; may be deleted any time,
                unless it is noted there that some of it lies elsewhere (`stored_kv.py`)
"""

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Self

from kvweave.app.library.kv_sync import KVSync, SyncJob
from kvweave.app.library.kv_worth import KVWorth
from kvweave.app.library.neighbours import neighbours_of, open_table
from kvweave.app.library.store_tiers import remote_tiers
from kvweave.app.library.stored_kv import KV_FOLDER, KVPlaces, StoredKV
from kvweave.calibrate.gate import USUAL_CHUNKS
from kvweave.calibrate.profiles import calibrated_neighbours, find_profile
from kvweave.config import StoreSettings, WeaveConfig
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.engine.background import BUSY_SHARE
from kvweave.errors import ConfigError, KVWeaveError
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder, RunAlone, run_at_once
from kvweave.fuse.encode.contexts import Variant, context_filler, digest_ids
from kvweave.fuse.encode.neighbour_table import NeighbourTable
from kvweave.fuse.encode.preparation import (
    Preparation,
    Texts,
    check_room,
    choose_preparation,
    write_preparation,
)
from kvweave.kv.format.codec import dtype_name
from kvweave.kv.format.keys import KeyContext
from kvweave.kv.store import KVStore
from kvweave.kv.tiers.config import (
    DiskTierConfig,
    HostTierConfig,
    StoreConfig,
    TierConfig,
)
from kvweave.model.decoder import Decoder
from kvweave.text.prompt import SYSTEM, split_template
from kvweave.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
# 3.7 times smaller than float32 at 3e-5 nats per token (bench/codec_kl.py, SmolLM2, 50 prompts).
CODEC = "int8"
FIRST_RETRY_S, LONGEST_RETRY_S = 5.0, 120.0  # between two attempts: doubled with each that fails


@dataclass(frozen=True, slots=True)
class BackgroundKV:
    """How chunk KV is made in the background."""

    most_bytes: int | None = None  # of chunk KV of one knowledge base; None: what its tiers hold
    share: float = BUSY_SHARE  # of the time, while answers are made; of all over one engine
    # nats: made only where calibration lets something be fused within them; None: in any case
    bound: float | None = None
    # documents are asked about themselves: whether they may be fused, or whether less is enough
    calibrates: bool = False

    @classmethod
    def from_config(cls, config: WeaveConfig) -> "BackgroundKV | None":
        """What a configuration says; None: nothing is made in the background."""
        library, quality = config.library, config.quality
        if library.background_kv == "never":
            return None
        is_named = quality.reuse is not None and not quality.reuse.startswith("auto")
        bound = None if library.background_kv == "always" or is_named else quality.bound
        calibrates = quality.calibrate and bound is not None
        return cls(library.background_bytes, library.background_share, bound, calibrates)


@dataclass(frozen=True, slots=True)
class KVOptions:
    """How chunk KV is made and where it is kept. None is what the knowledge base has, or the
    usual."""

    encoding: str | None = None  # encoding context, such as "filler:4" or "neighbours"
    system: str = SYSTEM  # the system prompt that chunks are computed behind
    tenant_salt: str = ""  # chunk KV is shared with those alone who have the same
    store: StoreSettings = field(default_factory=StoreSettings)  # tiers, codec, what is evicted
    tiers: tuple[TierConfig, ...] | None = None  # None: those of `store`
    background: BackgroundKV | None = None  # made by itself; None: it is not
    num_chunks: int = USUAL_CHUNKS  # that a question finds

    @classmethod
    def from_config(cls, config: WeaveConfig) -> "KVOptions":
        """What a configuration says."""
        library, system = config.library, config.model.system
        return cls(
            library.encoding,
            SYSTEM if system is None else system,
            store=config.store,
            num_chunks=library.k,
        )

    @property
    def codec(self) -> str:
        return CODEC if self.store.codec is None else self.store.codec

    def store_config(self, kb: KnowledgeBase) -> StoreConfig:
        """Configure the store of one knowledge base: its tiers, fastest first."""
        tiers, store = self.tiers, self.store
        if tiers is None:
            host = HostTierConfig()
            if store.host_bytes is not None:
                host = replace(host, capacity_bytes=store.host_bytes)
            disk = DiskTierConfig(kb.folder / KV_FOLDER)
            if store.disk_folder is not None:
                disk = replace(disk, root=store.disk_folder / kb.catalogue.uid())
            if store.disk_bytes is not None:
                disk = replace(disk, capacity_bytes=store.disk_bytes)
            disks = () if store.disk_bytes == 0 else (disk,)
            tiers = (host, *disks, *remote_tiers(store))
        config = StoreConfig(tiers=tiers)
        return config if store.policy is None else replace(config, policy=store.policy)


@dataclass(eq=False)
class LibraryKV:
    """Store, encoder and neighbours of one knowledge base. `close` it, or use it with `with`: that
    closes the store and the table, not the knowledge base."""

    _kb: KnowledgeBase
    store: KVStore
    encoder: ChunkEncoder
    table: NeighbourTable | None  # that the encoder was made with
    max_context: int  # of the model
    worth: KVWorth  # what was measured of this KV
    background: BackgroundKV | None = None  # how what is missing is made by itself

    def __post_init__(self) -> None:
        if barred := KVPlaces(self._kb.folder / KV_FOLDER).find_barred():
            self.store.bar(barred)
        self._retries = Retries(self._tell_remotes)
        if self.sync().is_owing:
            self._retries.start()

    @classmethod
    def open(
        cls,
        kb: KnowledgeBase,
        decoder: Decoder,
        tokenizer: Tokenizer,
        options: KVOptions | None = None,
        *,
        run_alone: RunAlone = run_at_once,
        say: Callable[[str], None] = log.info,
    ) -> Self:
        """`run_alone` runs what needs the decoder while nothing else uses it. `say` hears of a
        number of neighbours that calibration chose."""
        options = options or KVOptions()
        preparation = choose_preparation(kb.folder / KV_FOLDER, options.encoding)
        if options.encoding == "neighbours":  # without a number
            preparation = _calibrate_neighbours(
                preparation, decoder, tokenizer, options.system, say
            )
        with ExitStack() as stack:  # a part that does not open leaves no other part open
            store = stack.enter_context(KVStore(_note_places(kb, options.store_config(kb))))
            table = open_table(kb.folder, preparation)
            if table is not None:
                stack.callback(table.close)
            neighbours = None
            if table is not None:
                neighbours = neighbours_of(kb, table, preparation.variant.size)
            _, closing = split_template(tokenizer, options.system)
            encoder = ChunkEncoder(
                decoder,
                store,
                key_context(decoder, tokenizer, options),
                preparation,
                Texts.for_preparation(tokenizer, preparation, closing),
                neighbours_of=neighbours,
                run_alone=run_alone,
            )
            stack.pop_all()
        background, k = options.background, options.num_chunks
        bound = None if background is None else background.bound
        worth = KVWorth(kb, decoder, tokenizer, encoder, k, bound)
        if background is not None and background.calibrates:
            worth.begin_asking()
        return cls(kb, store, encoder, table, decoder.spec.max_context, worth, background)

    def prepare_to_encode(self) -> None:
        """Raise ConfigError unless every chunk fits behind its context; note how KV is prepared."""
        encoder, chunk_tokens = self.encoder, self._kb.settings.chunk_tokens
        preamble_len = len(encoder.preamble_ids)
        check_room(encoder.preparation, encoder.texts, preamble_len, self.max_context, chunk_tokens)
        write_preparation(self._kb.folder / KV_FOLDER, self.encoder.preparation)

    def sync(self, job: SyncJob | None = None) -> KVSync:
        """Keeps this KV in step with the documents. For the holder of the writer lock."""
        kept = StoredKV(self._kb.folder, self.store, on_owing=self._retries.start)
        return KVSync(self._kb, self.table, kept, self.encoder, job)

    def _tell_remotes(self) -> bool:
        """Tell remote tiers that missed a removal. False: one still does not answer."""
        sync = self.sync()
        with self._kb.writing_if_free() as is_free:
            if is_free:
                sync.before()
        return not sync.is_owing

    def close(self) -> None:
        self._retries.close()
        self.store.close()
        if self.table is not None:
            self.table.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _note_places(kb: KnowledgeBase, config: StoreConfig) -> StoreConfig:
    """A store's settings, once it is noted where the chunk KV of `kb` lies from now on."""
    own = kb.folder / KV_FOLDER
    remotes = [cfg.place for cfg in config.tiers if cfg.place is not None]
    disks = [cfg.root for cfg in config.tiers if isinstance(cfg, DiskTierConfig)]
    elsewhere = next((root for root in disks if root.absolute() != own.absolute()), None)
    KVPlaces(own).add(elsewhere, remotes)
    return config


def key_context(
    decoder: Decoder, tokenizer: Tokenizer, options: KVOptions | None = None
) -> KeyContext:
    """What this model's chunk KV depends on, besides the chunk."""
    options = options or KVOptions()
    preamble_ids, _ = split_template(tokenizer, options.system)
    return KeyContext(
        model=decoder.revision,
        dtype=dtype_name(decoder.dtype),
        codec=options.codec,
        tokenizer=tokenizer.fingerprint,
        preamble_ids=tuple(preamble_ids),
        rope=repr(decoder.spec.rope),
        tenant_salt=options.tenant_salt,
    )


def _calibrate_neighbours(
    preparation: Preparation,
    decoder: Decoder,
    tokenizer: Tokenizer,
    system: str,
    say: Callable[[str], None],
) -> Preparation:
    """`preparation` with the number of neighbours that calibration found for this model, if it
    found one. A profile that cannot be used is said in a line and not used."""
    filler = context_filler(tokenizer, preparation.variant)
    preamble_ids, _ = split_template(tokenizer, system)
    try:
        profile = find_profile(decoder.calibrated_as.fingerprint, tokenizer.fingerprint)
    except ConfigError as error:
        log.warning("%s; until then %s is taken", error, preparation.variant)
        return preparation
    if profile is None:
        return preparation
    size = calibrated_neighbours(
        profile, decoder.calibrated_as.revision, digest_ids(preamble_ids), filler
    )
    if size is None:
        return preparation
    say(f"neighbours:{size}, as calibrated")
    return replace(preparation, variant=Variant("neighbours", size))


class Retries:
    """Runs one job on its own thread while there is something to do. Any thread; `close` it."""

    def __init__(self, attempt: Callable[[], bool], first_s: float = FIRST_RETRY_S) -> None:
        """`attempt` says whether it is done for now."""
        self._attempt = attempt
        self._first_s = first_s
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def start(self) -> None:
        """There is something to do, before long. Harmless while it is under way."""
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="retries", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Try no more; an attempt under way is waited for."""
        self._closed.set()
        with self._lock:
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        rest_s = self._first_s
        while not self._closed.wait(rest_s):
            try:
                is_done = self._attempt()
            except KVWeaveError as error:
                log.warning("%s", error)
                is_done = False
            rest_s = min(2 * rest_s, LONGEST_RETRY_S)
            if is_done:
                break
        with self._lock:
            self._thread = None
