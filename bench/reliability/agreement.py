"""Opens a knowledge base as the next process would, and holds it against what clients were told.

Catalogue, index and chunk KV are looked at through the product's own code: what it lists, finds and
would serve. Writes what any writer does first: chunk KV of removed documents is cleaned up. What a
maker of chunk KV wrote in the moment in which its chunk was removed is left to the next start of a
server, which looks for it by name (`CorpusKV._sweep`): counted, and no fault as long as that finds
it.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from kvweave.app.library.kv_sync import sync_without_model
from kvweave.app.library.stored_kv import KV_FOLDER
from kvweave.corpus.embedder import SentenceEmbedder
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.corpus.search import SearchOptions
from kvweave.errors import KVWeaveError, TierError
from kvweave.kv.format.objects import verify_object
from kvweave.kv.provenance import find_keys, find_tagged
from kvweave.kv.tiers.config import DiskTierConfig
from kvweave.kv.tiers.disk import DiskTier
from reliability.ledger import Ledger
from reliability.notes import Version, fault_in, versions_in

BY_WORDS = SearchOptions(retrieval="words")


@dataclass(slots=True)
class Findings:
    """What is wrong, in words."""

    lost: list[str] = field(default_factory=list)  # acknowledged and not there
    back: list[str] = field(default_factory=list)  # deleted and there
    wrong: list[str] = field(default_factory=list)  # served and not what was stored
    apart: list[str] = field(default_factory=list)  # catalogue, index and chunk KV disagree
    kv_for_next_start: int = 0  # chunk KV of removed chunks that the next start deletes

    def all(self) -> list[str]:
        return [*self.lost, *self.back, *self.wrong, *self.apart]

    def add(self, other: "Findings") -> None:
        self.lost += other.lost
        self.back += other.back
        self.wrong += other.wrong
        self.apart += other.apart
        self.kv_for_next_start += other.kv_for_next_start


def check_folder(folder: Path, ledger: Ledger, embedder: Path) -> tuple[Findings, int]:
    """Findings, and how many documents there are. A folder without a knowledge base is right where
    nothing was acknowledged."""
    findings = Findings()
    if not (folder / "kb.json").is_file():
        findings.lost, findings.back = ledger.faults({})
        return findings, 0
    try:
        with KnowledgeBase.open(folder, embedder=open_embedder(embedder)) as kb:
            seen = _documents(kb, findings)
            findings.lost, findings.back = ledger.faults(seen)
            problems = kb.check()
            findings.apart += [p for p in problems if "left behind" not in p]
            _search(kb, seen, ledger, findings)
            _chunk_kv(kb, findings)
    except KVWeaveError as error:
        findings.apart.append(f"does not open: {error}")
        return findings, 0
    return findings, len(seen)


@cache
def open_embedder(folder: Path) -> SentenceEmbedder:
    """Loaded once, however many folders are looked at."""
    return SentenceEmbedder(folder)


def _documents(kb: KnowledgeBase, findings: Findings) -> dict[int, Version]:
    """The version of each note that is there, its chunks compared with what was sent."""
    seen: dict[int, Version] = {}
    for document in kb.documents():
        version = next(iter(versions_in(document.title)), None)
        if version is None or version.key in seen:
            findings.wrong.append(f"document {document.title!r} is there twice or is no note")
            continue
        seen[version.key] = version
        placed = kb.catalogue.document_chunks(document.id)
        for chunk, _, _ in placed:
            if fault := fault_in(chunk.text, chunk.title, {version}):
                findings.wrong.append(fault)
        if sum(p.end - p.start for p in placed) < len(version.text.strip()):
            findings.wrong.append(f"{version.mark} has lost a part of its text")
    return seen


def _search(
    kb: KnowledgeBase, seen: dict[int, Version], ledger: Ledger, findings: Findings
) -> None:
    there = set(seen.values())
    for version in there:
        hits = kb.search(version.mark, 3, BY_WORDS)
        if not hits or version not in versions_in(hits[0].chunk.text):
            findings.apart.append(f"a search by words does not find {version.mark}")
            continue
        nearest = kb.search(hits[0].chunk.text, 1)
        if not nearest or nearest[0].score < 0.999:
            findings.apart.append(f"a search by vector does not find {version.mark}")
        for hit in (*hits, *nearest):
            if fault := fault_in(hit.chunk.text, hit.chunk.title, there):
                findings.wrong.append(fault)
    for version in sorted(ledger.gone() - there)[-40:]:
        if kb.search(version.mark, 1, BY_WORDS):
            findings.back.append(f"a search by words finds {version.mark}, which was deleted")


def _chunk_kv(kb: KnowledgeBase, findings: Findings) -> None:
    """After what any writer and the next start do, no chunk KV is of a document that is no more,
    and all of it is whole."""
    if not (kb.folder / KV_FOLDER).is_dir():
        return
    with kb.writing(), sync_without_model(kb) as sync:
        sync.before()
    alive = set(kb.catalogue.chunk_ids())
    tier = DiskTier(DiskTierConfig(kb.folder / KV_FOLDER), sweep=False)
    strays = set(find_keys(tier, lambda of: not alive.issuperset((of.chunk, *of.behind))))
    for each in list(tier.scan()):
        try:
            reader = tier.open(each.key)
            assert reader is not None, "nobody else is here"
            verify_object(reader, each.key)
            reader.close()
        except TierError as error:
            findings.apart.append(f"chunk KV is damaged: {error}")
            strays.discard(each.key)
    swept = set(find_tagged(tier, kb.catalogue.removals.chunk_ids())) & strays
    findings.kv_for_next_start += len(swept)
    strays -= swept
    findings.back += [f"chunk KV {key.hex()[-12:]} is of a chunk that is no more" for key in strays]
