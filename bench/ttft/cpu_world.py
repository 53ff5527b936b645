"""What bench/ttft/cpu.py asks: one knowledge base, one model, and a Weave for each place of the KV.

Each is asked as a user would, through `Weave`; what comes back is the time by stage.
"""

import argparse
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from common.files import read_jsonl
from kvweave.app.auto.facts import CalibratedGate
from kvweave.app.library.library import Library
from kvweave.app.library.library_kv import KVOptions, LibraryKV
from kvweave.app.library.runtime import ModelRuntime
from kvweave.app.library.stored_kv import KV_FOLDER
from kvweave.app.weave import AUTO, Sampling, Weave
from kvweave.calibrate.profiles import user_path
from kvweave.corpus.embedder import SentenceEmbedder
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.engine.config import EngineConfig
from kvweave.errors import ConfigError
from kvweave.fuse.encode.contexts import digest_ids
from kvweave.fuse.selectors.strategies import NAMES, open_strategy
from kvweave.kv.tiers.config import DiskTierConfig, HostTierConfig, TierConfig
from kvweave.model.files.locate import locate
from kvweave.model.load import load_decoder
from kvweave.plan.plan import PromptShape
from kvweave.text.tokenizer import Tokenizer

CHUNK_TOKENS = 320
TEXT_TOKENS = 300
TIERS = ("host", "disk warm", "disk cold")
STAGES = ("retrieve", "load", "select", "compute", "rest")


class Mode(NamedTuple):
    """A strategy at a ratio."""

    strategy: str
    ratio: float | None

    def __str__(self) -> str:
        return self.strategy if self.ratio is None else f"{self.strategy} {self.ratio:g}"


class World:
    """One knowledge base, one model, and a Weave per tier."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._chunks = args.chunks
        model = locate(args.model)
        self._decoder, self._tokenizer = load_decoder(model, device="cpu"), Tokenizer(model)
        self._folder = folder
        self._encoding, self._model = args.encoding, args.model
        self._kb = KnowledgeBase.open(
            folder,
            tokenizer=self._tokenizer,
            embedder=SentenceEmbedder(locate("minilm"), name="minilm"),
            chunk_tokens=CHUNK_TOKENS,
            create=True,
        )
        texts = list(texts_of(args.data, self._tokenizer, args.documents))
        self.questions = [f"What does it say about {_words(text)}?" for _, text in texts[:5]]
        disk = DiskTierConfig(folder / KV_FOLDER)
        weave = self._over((disk,))
        weave.library.ingest(texts, chunk_kv=True)
        for question in self.questions:  # what it wants beside the layers is made by the first one
            weave.ask(question, k=self._chunks, reuse="qcfuse", sampling=Sampling(max_tokens=1))
        weave.library.store.flush()
        weave.runtime.close()
        weave.library.kv.close()
        stores = {
            "host": (HostTierConfig(), disk),
            "disk warm": (disk,),
            "disk cold": (disk,),
        }
        self._weaves = {name: self._over(tiers) for name, tiers in stores.items()}
        self._bound = args.bound
        self.took: Counter[tuple[str, str]] = Counter()  # what auto chose, by tier
        os.environ["KVWEAVE_HOME"] = str(folder / "home")  # this run's own machine profile
        if args.profile is not None:
            mine = user_path(self._decoder.weights.fingerprint)
            mine.parent.mkdir(parents=True)
            shutil.copyfile(args.profile, mine)
        self.allowed = self._allowed()

    def _allowed(self) -> dict[str, float]:
        """Strategies that the gate lets through, each with its ratio."""
        weave = self._weaves["host"]
        encoder = weave.library.encoder
        preamble, profile = digest_ids(encoder.preamble_ids), weave.profile
        tables = (
            profile.tables(self._decoder.revision, encoder.encoding_context, preamble)
            if profile is not None
            else ()
        )
        gate, shape = CalibratedGate(tables, preamble), PromptShape(1000, 5)
        verdicts = {name: gate.min_ratio(name, self._bound, shape).ratio for name in NAMES}
        return {name: ratio for name, ratio in verdicts.items() if ratio is not None}

    def _over(self, tiers: tuple[TierConfig, ...]) -> Weave:
        """A Weave with an engine of its own over the one knowledge base and its files."""
        cfg = EngineConfig(tree_share=0.0)  # or a second run would find the first one's prefix
        runtime = ModelRuntime(self._decoder, self._tokenizer, self._model, cfg)
        options = KVOptions(self._encoding, tiers=tiers)
        run_alone = runtime.client.run_alone
        kv = LibraryKV.open(
            self._kb, runtime.decoder, runtime.tokenizer, options, run_alone=run_alone
        )
        return Weave(runtime, Library(self._kb, kv, runtime.client, promotion=0))

    def warm(self) -> None:
        """Bring what the questions need into host memory."""
        for turn in range(len(self.questions)):
            self.ask("host", Mode("reuse", None), -1 - turn)

    def possible(self, modes: Sequence[Mode]) -> tuple[list[Mode], dict[str, str]]:
        """Modes that this model can run, and why not the others."""
        found, skipped = [], {}
        for mode in modes:
            if mode.strategy == AUTO:
                found.append(mode)
                continue
            try:
                open_strategy(mode.strategy, self._weaves["host"].facts)
                found.append(mode)
            except ConfigError as error:
                skipped[str(mode)] = str(error)
                print(f"{mode} is left out: {error}")
        return found, skipped

    def ask(self, tier: str, mode: Mode, turn: int) -> tuple[dict[str, float], int]:
        """Milliseconds to the first token, by stage, and the prompt's length."""
        if tier == "disk cold":
            drop_page_cache(self._folder / KV_FOLDER)
        answer = self._weaves[tier].ask(
            self.questions[turn % len(self.questions)],
            k=self._chunks,
            reuse=mode.strategy,
            ratio=mode.ratio,
            bound=self._bound,
            sampling=Sampling(max_tokens=1),
        )
        if answer.decision is not None and turn >= 0:
            self.took[tier, answer.decision.plan.chosen.name] += 1
        measured = {"ttft": answer.ttft_ms}
        if answer.explain is not None:
            stages = answer.explain.stages
            measured |= {
                "retrieve": stages.retrieve, "load": stages.load, "select": stages.select,
                "compute": stages.compute,
            }  # fmt: skip
            measured["rest"] = answer.ttft_ms - sum(measured[s] for s in STAGES[:-1])
            found = [c.tier for c in answer.explain.chunks if c.tier]
            wanted = "host" if tier == "host" else "disk"
            if mode.strategy not in ("full", "prefix", AUTO) and turn >= 0:
                assert found == [wanted] * self._chunks, f"chunk KV came from {found}"
        return measured, answer.prompt_tokens

    def close(self) -> None:
        for weave in self._weaves.values():
            weave.runtime.close()
            weave.library.kv.close()
        self._kb.close()


def texts_of(data: Path, tokenizer: Tokenizer, count: int) -> Iterator[tuple[str, str]]:
    """Texts of about 300 tokens, one per document long enough, as (title, text)."""
    found = 0
    for record in islice(read_jsonl(data / "kb_python_peps" / "docs.jsonl.gz"), 20, None):
        words = record["text"].split()
        start = min(400, len(words) // 2)
        ids = tokenizer.encode_text(" ".join(words[start : start + 400]))[:TEXT_TOKENS]
        if len(ids) == TEXT_TOKENS:
            yield record["title"], tokenizer.decode(ids).strip()
            found += 1
        if found == count:
            return


def _words(text: str) -> str:
    return " ".join(text.split()[5:12])


def drop_page_cache(folder: Path) -> None:
    """Tell the kernel to forget the files' pages (they were synced when written)."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
