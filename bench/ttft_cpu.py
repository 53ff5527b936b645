"""How long until the first token on a CPU, and where does the time go?

A knowledge base of chunks of about 300 tokens, ten of them in every prompt; questions asked through
`Weave` as a user would, one after another, every way in turn. Each way is measured with its chunk
KV in host memory, on disk with a warm page cache, and on disk with the cache dropped.

    python bench/ttft.py --data ../shared/data --out bench/results/ttft-cpu.json

`speedup_15` and `speedup_0` are full prefill's time over that of `weave` at 15 % and of `reuse`,
medians, host tier. `auto` is the planner's choice among the ways that the model's calibration
allows within --bound; `auto_over_best` is its time over that of the best of them, full and prefix
included, and `auto_over_full` over full prefill's, by tier.
"""

import argparse
import os
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from common import finish, read_jsonl, result_header
from kvweave.app import AUTO, Sampling, Weave
from kvweave.corpus.embedder import SentenceEmbedder
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.encoders import KV_FOLDER, make_encoder
from kvweave.engine.config import EngineConfig
from kvweave.errors import ConfigError
from kvweave.fuse.calibration import BOUND
from kvweave.fuse.contexts import digest_ids
from kvweave.fuse.preparation import Preparation
from kvweave.fuse.profiles import load_profile
from kvweave.fuse.strategy import NAMES, open_strategy
from kvweave.kv.config import DiskTierConfig, HostTierConfig, StoreConfig
from kvweave.kv.store import KVStore
from kvweave.library import Library
from kvweave.model.load import load_decoder
from kvweave.model.locate import locate
from kvweave.planning_facts import CalibratedGate
from kvweave.prompt import SYSTEM
from kvweave.tokenizer import Tokenizer

CHUNK_TOKENS = 320
TIERS = ("host", "disk warm", "disk cold")
STAGES = ("retrieve", "load", "select", "compute", "rest")


class Way(NamedTuple):
    """A strategy at a ratio."""

    strategy: str
    ratio: float | None

    def __str__(self) -> str:
        return self.strategy if self.ratio is None else f"{self.strategy} {self.ratio:g}"


WAYS = (
    Way("full", None),
    Way("prefix", None),
    Way("reuse", None),
    Way("epic", 0.15),
    Way("cacheblend", 0.15),
    Way("fusionrag", 0.15),
    Way("qcfuse", 0.15),
    Way("prophetkv", 0.15),
    Way("weave", 0.05),
    Way("weave", 0.15),
    Way("weave", 0.3),
    Way(AUTO, None),
)


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    took: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    prompt_tokens: list[int] = []
    with tempfile.TemporaryDirectory() as folder, Progress(transient=True) as progress:
        world = World(args, Path(folder))
        ways, skipped = world.possible(
            [w for w in WAYS if not args.only or w.strategy in args.only]
        )
        world.warm()
        task = progress.add_task("asking", total=(args.rounds + 1) * len(TIERS) * len(ways))
        for turn in range(-1, args.rounds):  # the first round warms up
            for tier in TIERS:
                for way in ways:
                    if tier != "host" and way.strategy == "full":
                        progress.advance(task)
                        continue
                    measured, tokens = world.ask(tier, way, turn)
                    progress.advance(task)
                    if turn >= 0:
                        took[tier, str(way)].append(measured)
                        prompt_tokens.append(tokens)
        world.close()
    cells = summarise(took)
    show(cells)
    by = {(c["tier"], c["way"]): c["ttft_ms"] for c in cells}
    full = by["host", "full"]
    config = {
        "model": args.model, "chunks": args.chunks, "rounds": args.rounds, "threads": args.threads,
        "encoding": args.encoding, "prompt_tokens": round(statistics.fmean(prompt_tokens)),
        "bound": args.bound, "profile": "packaged" if args.profile is None else args.profile.name,
        "codec": "int8", "cold": "page cache of the chunk KV files dropped before each question",
    }  # fmt: skip
    results = {
        "speedup_15": ratio_of(full, by.get(("host", "weave 0.15"))),
        "speedup_0": ratio_of(full, by.get(("host", "reuse"))),
        **judge_auto(by, full, world.allowed),
        "auto_took": {f"{tier}: {took}": count for (tier, took), count in world.took.items()},
        "skipped": skipped,
        "cells": cells,
    }
    finish({**result_header("ttft", "cpu"), "config": config, **results}, args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with kb_python_peps/")
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--encoding", default="filler")
    parser.add_argument("--chunks", type=int, default=10, help="in every prompt")
    parser.add_argument("--documents", type=int, default=14)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bound", type=float, default=BOUND, help="of auto, in nats per token")
    parser.add_argument("--profile", type=Path, help="of the model, in place of the packaged one")
    parser.add_argument("--only", nargs="*", help="strategies to measure; all by default")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


class World:
    """One knowledge base, one model, and a Weave per tier."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._chunks = args.chunks
        model = locate(args.model)
        self._decoder, self._tokenizer = load_decoder(model, device="cpu"), Tokenizer(model)
        self._folder = folder
        self._preparation = Preparation.parse(args.encoding, ["anchors:kvzip"])
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
        with self._library((disk,)) as library:
            library.ingest(texts, chunk_kv=True)
        self._stores = {
            "host": KVStore(StoreConfig(tiers=(HostTierConfig(), disk))),
            "disk warm": KVStore(StoreConfig(tiers=(disk,))),
            "disk cold": KVStore(StoreConfig(tiers=(disk,))),
        }
        self._weaves = {
            tier: Weave(
                self._decoder,
                self._tokenizer,
                args.model,
                SYSTEM,
                self._over(store),
                EngineConfig(tree_share=0.0),  # or a second run would find the first one's prefix
                promotion=0,
            )
            for tier, store in self._stores.items()
        }
        self._bound = args.bound
        self.took: Counter[tuple[str, str]] = Counter()  # what auto chose, by tier
        os.environ["KVWEAVE_HOME"] = str(folder / "home")  # this run's own machine profile
        if args.profile is not None:
            weights, tokens = self._decoder.weights.fingerprint, self._tokenizer.fingerprint
            for weave in self._weaves.values():
                weave.profile = load_profile(args.profile, weights, tokens)
        self.allowed = self._allowed()

    def _allowed(self) -> dict[str, float]:
        """Strategies that the gate lets through, each with its ratio."""
        weave = self._weaves["host"]
        encoder = weave.library.encoder
        table = weave.profile and weave.profile.table(
            self._decoder.revision, encoder.encoding_context, digest_ids(encoder.preamble_ids)
        )
        gate = CalibratedGate(table)
        verdicts = {name: gate.min_ratio(name, self._bound).ratio for name in NAMES}
        return {name: ratio for name, ratio in verdicts.items() if ratio is not None}

    @contextmanager
    def _library(self, tiers: Any) -> Iterator[Library]:
        with KVStore(StoreConfig(tiers=tiers)) as store:
            yield self._over(store)

    def _over(self, store: KVStore) -> Library:
        encoder = make_encoder(
            self._decoder, self._tokenizer, store, self._preparation, SYSTEM, self._kb, None
        )
        return Library(self._kb, store, self._decoder, encoder)

    def warm(self) -> None:
        """Bring what the questions need into host memory."""
        for turn in range(len(self.questions)):
            self.ask("host", Way("reuse", None), -1 - turn)

    def possible(self, ways: Sequence[Way]) -> tuple[list[Way], dict[str, str]]:
        """Ways this model can go, and why not the others."""
        found, skipped = [], {}
        for way in ways:
            if way.strategy == AUTO:
                found.append(way)
                continue
            try:
                open_strategy(way.strategy, self._weaves["host"].facts)
                found.append(way)
            except ConfigError as error:
                skipped[str(way)] = str(error)
                print(f"{way} is left out: {error}")
        return found, skipped

    def ask(self, tier: str, way: Way, turn: int) -> tuple[dict[str, float], int]:
        """Milliseconds to the first token, by stage, and the prompt's length."""
        if tier == "disk cold":
            drop_page_cache(self._folder / KV_FOLDER)
        answer = self._weaves[tier].ask(
            self.questions[turn % len(self.questions)],
            k=self._chunks,
            reuse=way.strategy,
            ratio=way.ratio,
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
            if way.strategy not in ("full", "prefix", AUTO) and turn >= 0:
                assert found == [wanted] * self._chunks, f"chunk KV came from {found}"
        return measured, answer.prompt_tokens

    def close(self) -> None:
        for store in self._stores.values():
            store.close()
        self._kb.close()


def ratio_of(time_ms: float, of_ms: float | None) -> float | None:
    return None if of_ms is None else round(time_ms / of_ms, 2)


def judge_auto(
    by: dict[tuple[str, str], float], full: float, allowed: dict[str, float]
) -> dict[str, dict[str, float]]:
    """Auto beside the best way it was allowed, and beside full prefill, by tier."""
    names = {f"{name} {ratio:g}" if ratio else name for name, ratio in allowed.items()}
    over_best, over_full = {}, {}
    for tier in TIERS:
        auto = by.get((tier, AUTO))
        if auto is None:
            continue
        singles = [ms for (t, way), ms in by.items() if t == tier and way in {*names, "prefix"}]
        over_best[tier] = round(auto / min([full, *singles]), 3)
        over_full[tier] = round(auto / full, 3)
    return {"auto_over_best": over_best, "auto_over_full": over_full}


def texts_of(data: Path, tokenizer: Tokenizer, count: int) -> Iterator[tuple[str, str]]:
    """Texts of about 300 tokens, one per document, as (title, text)."""
    records = read_jsonl(data / "kb_python_peps" / "docs.jsonl.gz")
    for record in islice(records, 20, 20 + count):
        words = record["text"].split()
        start = min(400, len(words) // 2)
        text = " ".join(words[start : start + 400])
        ids = tokenizer.encode_text(text)[:292]
        yield record["title"], tokenizer.decode(ids).strip()


def _words(text: str) -> str:
    return " ".join(text.split()[5:12])


def drop_page_cache(folder: Path) -> None:
    """Tell the kernel to forget the files' pages (they were synced when written)."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def summarise(
    took: dict[tuple[str, str], list[dict[str, float]]],
) -> list[dict[str, Any]]:
    full = statistics.median(m["ttft"] for m in took["host", "full"])
    cells = []
    for (tier, way), measured in took.items():
        ttft = statistics.median(m["ttft"] for m in measured)
        stages = {
            stage: round(statistics.median(m[stage] for m in measured), 1)
            for stage in STAGES
            if all(stage in m for m in measured)
        }
        cells.append(
            {
                "tier": "none" if way == "full" else tier,
                "way": way,
                "ttft_ms": round(ttft, 1),
                "best_ms": round(min(m["ttft"] for m in measured), 1),
                "speedup": round(full / ttft, 2),
                "stages_ms": stages,
            }
        )
    for cell in cells:
        if cell["way"] == "full":
            cell["tier"] = "host"
    return cells


def show(cells: Sequence[dict[str, Any]]) -> None:
    table = Table(title="time to the first token, medians, ms")
    for column in ("chunk KV", "way", "TTFT", "x full", *STAGES):
        table.add_column(column, justify="left" if column in ("chunk KV", "way") else "right")
    for cell in cells:
        stages = [f"{cell['stages_ms'][s]:.0f}" if s in cell["stages_ms"] else "" for s in STAGES]
        table.add_row(
            cell["tier"], cell["way"], f"{cell['ttft_ms']:.0f}", f"{cell['speedup']:.2f}", *stages
        )
    Console(width=110).print(table)
