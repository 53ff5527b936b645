"""Does fusing stay as fast over full prefill when everything that is asked is new, for a long time?

    python bench/soak/novelty.py --minutes 30

No prompt comes twice: each question takes passages that never stood together, in a new order, and
every few questions new documents come in and old ones go. Host memory holds a sixth of the chunk
KV, the disk tier two thirds, so both evict all the time. Each question is asked in full and fused
(`weave`, by name), the two taking turns at being first, so that load on the machine hits both. The
knowledge tree is off: this is about KV of passages, not about prefixes that come back.

Reported: median time to the first token of both, and their ratio, for each tenth of the run. Exits
1 if the ratio of the last third is below 0.9 of the first third's.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # bench/ instead of this folder

from common.files import REPO
from common.results import finish, result_header, save_run
from kvweave.app.library.library import Library
from kvweave.app.library.library_kv import KVOptions, LibraryKV
from kvweave.app.library.runtime import ModelRuntime
from kvweave.app.library.stored_kv import KV_FOLDER
from kvweave.app.weave import Sampling, Weave
from kvweave.corpus.embedder import SentenceEmbedder
from kvweave.corpus.knowledge_base import KnowledgeBase
from kvweave.engine.config import EngineConfig
from kvweave.ingest.sources import TextSource
from kvweave.kv.tiers.config import DiskTierConfig, HostTierConfig
from kvweave.model.files.locate import locate
from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer

VALLEY = REPO / "src" / "kvweave" / "demo" / "valley"
PASSAGES = 60  # documents at a time
ASKED = 6  # passages of a prompt
RATIO = 0.15
CODEC = "int8"


class Asked(NamedTuple):
    """One question, both ways."""

    at_s: float
    full_ms: float
    fused_ms: float
    reused: float  # share of the passages' tokens that came from stored KV


class NoveltyWorld:
    """A knowledge base whose documents change, and a Weave over it."""

    def __init__(self, folder: Path, model: str, seed: int) -> None:
        self._rng = random.Random(seed)
        self._sentences = [
            sentence.strip()
            for path in sorted(VALLEY.glob("*.md"))
            for sentence in path.read_text().replace("\n", " ").split(". ")
            if len(sentence) > 30
        ]
        place = locate(model)
        tokenizer = Tokenizer(place)
        self._kb = KnowledgeBase.open(
            folder,
            tokenizer=tokenizer,
            embedder=SentenceEmbedder(locate("minilm"), name="minilm"),
            create=True,
        )
        decoder = load_decoder(place, device="cpu")
        runtime = ModelRuntime(decoder, tokenizer, model, EngineConfig(tree_share=0.0))
        spec = decoder.spec
        all_kv = PASSAGES * 200 * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
        disk = DiskTierConfig(folder / KV_FOLDER, capacity_bytes=all_kv * 2 // 3)
        options = KVOptions("isolated", tiers=(HostTierConfig(all_kv // 6), disk))
        kv = LibraryKV.open(
            self._kb, decoder, tokenizer, options, run_alone=runtime.client.run_alone
        )
        self.weave = Weave(runtime, Library(self._kb, kv, runtime.client, promotion=0))
        self._names: list[str] = []
        self._made = 0
        self.bring(PASSAGES)

    def bring(self, num: int) -> None:
        """New documents, with their KV; the oldest go."""
        sources = []
        for _ in range(num):
            self._made += 1
            name = f"{self._made}"
            text = ". ".join(self._rng.sample(self._sentences, 7)) + "."
            sources.append(TextSource(f"Passage {name}", text, name))
            self._names.append(f"text:{name}")
        self.weave.ingest(*sources, chunk_kv=True, only_new=True)
        while len(self._names) > PASSAGES:
            self.weave.remove(self._names.pop(0))

    def ask(self, began_s: float) -> Asked:
        """A question about several passages at once: what is found differs from any before."""
        words = " ".join(self._rng.sample(self._sentences, 2))[:200]
        question = f"{words} {self._rng.randrange(10**6)}?"
        taken: dict[str, float] = {}
        arms = ["full", "weave"]
        self._rng.shuffle(arms)
        reused = 0.0
        for reuse in arms:
            answer = self.weave.ask(
                question,
                k=ASKED,
                reuse=reuse,
                ratio=RATIO if reuse == "weave" else None,
                sampling=Sampling(max_tokens=1),
            )
            taken[reuse] = answer.ttft_ms
            if reuse == "weave" and answer.explain is not None:
                counts = answer.explain.counts
                reused = counts["reused"] / max(1, sum(counts.values()))
        return Asked(time.monotonic() - began_s, taken["full"], taken["weave"], reused)

    def close(self) -> None:
        self.weave.close()
        self._kb.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--new-every", type=int, default=4, help="questions, then 2 new documents")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="add the run to this result file")
    args = parser.parse_args()
    asked: list[Asked] = []
    with tempfile.TemporaryDirectory() as temporary:
        world = NoveltyWorld(Path(temporary) / "kb", args.model, args.seed)
        for _ in range(3):
            world.ask(time.monotonic())  # warm
        began_s, told_s = time.monotonic(), time.monotonic()
        while time.monotonic() - began_s < args.minutes * 60:
            asked.append(world.ask(began_s))
            if len(asked) % args.new_every == 0:
                world.bring(2)
            if time.monotonic() - told_s > 60 and len(asked) >= 30:
                told_s = time.monotonic()
                result = report(args, asked, (told_s - began_s) / 60)
                print(f"{result['minutes']} min, {len(asked)} questions: {result['speed_up']}")
                if args.out is not None:
                    save_run(__doc__, result, args.out)
        minutes = (time.monotonic() - began_s) / 60
        world.close()
    result = report(args, asked, minutes)
    for row in result["tenths"]:
        print(row)
    finish(__doc__, result, args.out)
    sys.exit(0 if result["ok"] else 1)


def report(args: argparse.Namespace, asked: list[Asked], minutes: float) -> dict[str, Any]:
    last_s = asked[-1].at_s + 1e-6
    tenths = []
    for tenth in range(10):
        part = [a for a in asked if int(10 * a.at_s / last_s) == tenth]
        if part:
            tenths.append({"minute": round((tenth + 1) * last_s / 600, 1), **_figures(part)})
    third = max(1, len(asked) // 3)
    first, last = _figures(asked[:third])["speed_up"], _figures(asked[-third:])["speed_up"]
    return {
        **result_header("novelty", "cpu"),
        "config": {"minutes": args.minutes, "model": args.model, "ratio": RATIO, "k": ASKED,
                   "seed": args.seed},
        "minutes": round(minutes, 1),
        "questions": len(asked),
        "speed_up": _figures(asked)["speed_up"],
        "first_third": first,
        "last_third": last,
        "tenths": tenths,
        "ok": last >= 0.9 * first,
    }  # fmt: skip


def _figures(part: list[Asked]) -> dict[str, float]:
    full = statistics.median(a.full_ms for a in part)
    fused = statistics.median(a.fused_ms for a in part)
    ratios = statistics.median(a.full_ms / a.fused_ms for a in part)
    return {
        "full_ms": round(full, 1),
        "fused_ms": round(fused, 1),
        "speed_up": round(ratios, 3),
        "reused": round(statistics.mean(a.reused for a in part), 3),
    }


if __name__ == "__main__":
    main()
