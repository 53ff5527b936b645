"""What makes chunk KV for a knowledge base: its store, the names of the bytes, the encoder.

Also for ingest without a Weave, which computes chunk KV or keeps what is there in step. Part of the
composition root: `library.py` and the command line use it.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from kvweave.app.library.kv_sync import KVSync, remove_documents
from kvweave.app.library.neighbours import neighbours_of, open_table
from kvweave.app.library.stored_kv import KV_FOLDER as KV_FOLDER
from kvweave.calibrate.profiles import calibrated_neighbours, find_profile
from kvweave.corpus.catalogue import Written
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.errors import ConfigError
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder, Texts
from kvweave.fuse.encode.context_room import check_room
from kvweave.fuse.encode.contexts import Variant, context_filler, digest_ids
from kvweave.fuse.encode.neighbour_table import NeighbourTable
from kvweave.fuse.encode.preparation import Preparation, choose_preparation, write_preparation
from kvweave.kv.config import DiskTierConfig, HostTierConfig, StoreConfig
from kvweave.kv.format.codec import dtype_name
from kvweave.kv.keys import KeyContext
from kvweave.kv.store import KVStore
from kvweave.model.decoder import Decoder
from kvweave.model.files.locate import locate
from kvweave.model.load import load_decoder
from kvweave.text.prompt import SYSTEM, split_template
from kvweave.text.tokenizer import Tokenizer
from kvweave.types import DocumentId

log = logging.getLogger(__name__)

# 3.7 times smaller than float32 at 3e-5 nats per token (bench/codec_kl.py, SmolLM2, 50 prompts).
CODEC = "int8"


def open_store(folder: Path, host_bytes: int | None = None) -> KVStore:
    """The chunk KV of the knowledge base in `folder`: host memory (None: the usual) over its
    disk."""
    host = HostTierConfig() if host_bytes is None else HostTierConfig(host_bytes)
    return KVStore(StoreConfig(tiers=(host, DiskTierConfig(folder / KV_FOLDER))))


def key_context(
    decoder: Decoder, tokenizer: Tokenizer, system: str = SYSTEM, tenant_salt: str = ""
) -> KeyContext:
    """What this model's chunk KV depends on, besides the chunk."""
    preamble_ids, _ = split_template(tokenizer, system)
    return KeyContext(
        model=decoder.revision,
        dtype=dtype_name(decoder.dtype),
        codec=CODEC,
        tokenizer=tokenizer.fingerprint,
        preamble_ids=tuple(preamble_ids),
        rope=repr(decoder.spec.rope),
        tenant_salt=tenant_salt,
    )


def make_encoder(
    decoder: Decoder,
    tokenizer: Tokenizer,
    store: KVStore,
    preparation: Preparation,
    system: str,
    kb: KnowledgeBase,
    table: NeighbourTable | None,
    tenant_salt: str = "",
) -> ChunkEncoder:
    """An encoder for the chunks of `kb` behind `system`. `table` as `open_table` gives it."""
    _, closing = split_template(tokenizer, system)
    return ChunkEncoder(
        decoder,
        store,
        key_context(decoder, tokenizer, system, tenant_salt),
        preparation,
        Texts.of(tokenizer, preparation, closing),
        neighbours_of=(
            None if table is None else neighbours_of(kb, table, preparation.variant.size)
        ),
    )


def calibrated(
    preparation: Preparation,
    encoding: str | None,
    decoder: Decoder,
    tokenizer: Tokenizer,
    system: str = SYSTEM,
    say: Callable[[str], None] = log.info,
) -> Preparation:
    """`preparation`, chosen by `encoding` as typed; where that is neighbours without a number, with
    the number that calibration found for this model, if it found one. `say` hears of it.

    A profile that cannot be used is said in a line and not used.
    """
    if encoding != "neighbours":
        return preparation
    filler = context_filler(tokenizer, preparation.variant)
    preamble_ids, _ = split_template(tokenizer, system)
    try:
        profile = find_profile(decoder.weights.fingerprint, tokenizer.fingerprint)
    except ConfigError as error:
        log.warning("%s; until then %s is taken", error, preparation.variant)
        return preparation
    if profile is None:
        return preparation
    size = calibrated_neighbours(profile, decoder.revision, digest_ids(preamble_ids), filler)
    if size is None:
        return preparation
    say(f"neighbours:{size}, as calibrated")
    return replace(preparation, variant=Variant("neighbours", size))


class IngestEncoding(NamedTuple):
    """What ingest needs to make chunk KV and to keep it in step with the documents."""

    encoder: ChunkEncoder
    upkeep: KVSync


@contextmanager
def chunk_encoder(
    kb: KnowledgeBase,
    model: str,
    encoding: str | None = None,
    extras: Sequence[str] | None = None,
    *,
    refresh: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    quant: str = "none",
    say: Callable[[str], None] = log.info,
) -> Iterator[IngestEncoding]:
    """An encoder for ingest without a Weave: loads the model, closes the store behind it.

    `encoding` and `extras` None are what the knowledge base has. `say` hears of a number of
    neighbours that nobody typed.
    """
    preparation = choose_preparation(kb.folder / KV_FOLDER, encoding, extras)
    model_folder = locate(model)
    decoder = load_decoder(model_folder, device=device, dtype=dtype, quant=quant)
    tokenizer = Tokenizer(model_folder)
    preparation = calibrated(preparation, encoding, decoder, tokenizer, say=say)
    with ExitStack() as stack:
        store = stack.enter_context(open_store(kb.folder))
        table = open_table(kb.folder, preparation)
        if table is not None:
            stack.callback(table.close)
        encoder = make_encoder(decoder, tokenizer, store, preparation, SYSTEM, kb, table)
        check_room(encoder, decoder.spec.max_context, kb.settings.chunk_tokens)
        upkeep = KVSync(kb, table, store, encoder, encodes=True, refresh=refresh)
        write_preparation(kb.folder / KV_FOLDER, preparation)
        yield IngestEncoding(encoder, upkeep)


@contextmanager
def upkeep_without_model(kb: KnowledgeBase) -> Iterator[tuple[None, KVSync]]:
    """Keeps the chunk KV that is there in step with the documents; computes none."""
    table = open_table(kb.folder)
    try:
        yield None, KVSync(kb, table)
    finally:
        if table is not None:
            table.close()


def remove_with_kv(kb: KnowledgeBase, ids: Sequence[DocumentId]) -> Written:
    """Remove documents and their chunk KV where no store is open."""
    with upkeep_without_model(kb) as (_, upkeep):
        return remove_documents(kb, ids, upkeep)
