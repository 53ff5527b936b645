"""The world of bench/throughput/run.py: SmolLM2 behind `Weave`, real questions over real passages.

Questions and passages of MTRAG (human conversations in four domains): the first topics of the set,
and for every question the passages that its own retriever ranked highest. They are ingested once
into a knowledge base under bench/cache; each request is then retrieved from it by the real embedder
and answered as a user's would be.
"""

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from common.files import CACHE, REPO, read_jsonl
from kvweave.app.answer.settings import AnswerSettings
from kvweave.app.library.library import Library
from kvweave.app.library.runtime import ModelRuntime
from kvweave.app.weave import Sampling, Weave
from kvweave.calibrate.gate import (
    ENOUGH_QUESTIONS,
    Cell,
    Table,
    deciding_tables,
    is_within,
    worst_cells,
)
from kvweave.calibrate.profiles import Profile, find_profile, load_profile
from kvweave.engine.config import EngineConfig
from kvweave.engine.engine import Engine
from kvweave.fuse.encode.chunk_encoder import ChunkEncoder
from kvweave.fuse.encode.contexts import digest_ids
from kvweave.kv.store import KVStore
from kvweave.model.files.locate import locate
from kvweave.model.load import load_decoder
from kvweave.text.prompt import lay_out
from kvweave.text.tokenizer import Tokenizer

RANKS = 5  # passages of every question that the knowledge base holds
RETRIEVER = ("elser", "rewrite")
ZIPF = 1.0
POOL_TOKENS = 32768  # for about twenty requests at once
OPENED = "gate opened by hand"


class WeaveWorld:
    """One model and one knowledge base; a fresh Weave for every mode."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(args.threads)
        self._args = args
        folder = locate(args.model)
        self._decoder, self._tokenizer = load_decoder(folder, device="cpu"), Tokenizer(folder)
        self.questions, texts = questions_of(args.data, args.topics)
        self._folder = CACHE / "throughput" / f"{Path(args.model).name}-{args.topics}"
        self._weave: Weave | None = None
        pool_tokens = args.pool_tokens or POOL_TOKENS
        self._cfg = EngineConfig(pool_tokens=pool_tokens, tree_share=args.tree_share)
        with self.serving():
            report = self.weave.ingest(*texts, chunk_kv=True)
            print(f"{len(self.questions)} questions over {len(texts)} passages; {report}")
            self._gate = self._describe_gate()
            print(self._gate)
        self._texts = len(texts)

    @property
    def weave(self) -> Weave:
        assert self._weave is not None, "nothing is open"
        return self._weave

    def config(self) -> dict[str, Any]:
        args = self._args
        return {
            "model": args.model, "threads": args.threads, "questions": len(self.questions),
            "passages": self._texts, "zipf": ZIPF, "k": args.k, "gate": self._gate,
            "engine": asdict(self._cfg), "bound_nats": args.bound,
        }  # fmt: skip

    @contextmanager
    def serving(self) -> Iterator[None]:
        """A server that has just been started."""
        runtime = ModelRuntime(self._decoder, self._tokenizer, self._args.model, self._cfg)
        library = Library.open(self._folder, runtime)
        settings = AnswerSettings(profile=self._profile(library.encoder))
        with Weave(runtime, library, settings) as self._weave:
            yield
        self._weave = None

    def stream(self, count: int, seed: int) -> list[int]:
        """Questions by number, popular ones more often (Zipf)."""
        drawn = random.Random(seed)
        ranks = list(range(len(self.questions)))
        random.Random(0).shuffle(ranks)  # who is popular is no matter of who comes first in a file
        weights = [1 / (rank + 1) ** ZIPF for rank in ranks]
        return drawn.choices(range(len(self.questions)), weights, k=count)

    def serve(self, mode: str, number: int) -> Iterator[str]:
        args = self._args
        answering = self.weave.stream(
            self.questions[number],
            k=args.k,
            reuse=mode,
            sampling=Sampling(max_tokens=args.answer),
            bound=args.bound if mode == "auto" else 0.0,
        )
        for piece in answering:
            yield piece.text

    def reference(self, number: int) -> str:
        """The answer of the plain loop, one request alone."""
        sys.path.insert(0, str(REPO / "tests"))
        from worlds.plain_loop import generate

        question = self.questions[number]
        chunks = [hit.chunk.token_ids for hit in self.weave.search(question, self._args.k)]
        ids = lay_out(self._tokenizer, question, chunks).token_ids
        eos = self._tokenizer.eos_ids
        sampling = Sampling(max_tokens=self._args.answer)
        choices = generate(self._decoder, ids, sampling, eos)
        return "".join(self.weave.texts_of([c.token_id for c in choices if c.token_id not in eos]))

    def answer(self, tokens: Sequence[str]) -> str:
        return "".join(tokens)

    def prompt_tokens(self, number: int) -> int:
        question = self.questions[number]
        chunks = [hit.chunk.token_ids for hit in self.weave.search(question, self._args.k)]
        return len(lay_out(self._tokenizer, question, chunks).token_ids)

    @property
    def engine(self) -> Engine:
        return self.weave.engine

    @property
    def store(self) -> KVStore:
        return self.weave.library.store

    def _profile(self, encoder: ChunkEncoder) -> Profile | None:
        """The calibration that `auto` goes by, if another than the model's own was given."""
        args, tokenizer = self._args, self._tokenizer
        weights, profile = self._decoder.weights.fingerprint, None
        if args.profile is not None:
            profile = load_profile(args.profile, weights, tokenizer.fingerprint)
        if args.allow is not None:
            profile = profile or find_profile(weights, tokenizer.fingerprint)
            profile = profile or Profile(args.model, weights, tokenizer.fingerprint)
            profile = profile.with_tables(self._opened(encoder, args.allow))
        return profile

    def _opened(self, encoder: ChunkEncoder, allowed: str) -> Table:
        """A table that lets one cell through. It measures nothing, and the result says so."""
        strategy, ratio = allowed.split(":")
        numbers: dict[str, Any] = {f.name: 0.0 for f in fields(Cell) if f.default is MISSING}
        cell = Cell(**{**numbers, "strategy": strategy, "ratio": float(ratio)})
        return Table(
            encoding=str(encoder.preparation.variant), context=encoder.encoding_context,
            preamble=digest_ids(encoder.preamble_ids), revision=self._decoder.revision,
            dtype=str(self._decoder.dtype), data=OPENED, data_hash="", date="",
            num_questions=ENOUGH_QUESTIONS, num_with_answers=0, num_chunk_tokens=0,
            mean_prompt_tokens=0.0, noise=0.0, full_f1=None, full_em=None, cells=(cell,),
        )  # fmt: skip

    def _describe_gate(self) -> str:
        """Which calibration lets `auto` take stored chunk KV."""
        args, profile = self._args, self.weave.profile
        if args.allow is not None:
            return f"{OPENED}: {args.allow} is allowed, whatever it was measured to cost"
        whose = "shipped profile" if args.profile is None else f"profile {args.profile.name}"
        encoder = self.weave.library.encoder
        tables: tuple[Table, ...] = ()
        if profile is not None:
            preamble = digest_ids(encoder.preamble_ids)
            found = profile.tables(self._decoder.revision, encoder.encoding_context, preamble)
            tables = deciding_tables(found)
        if not tables:
            return f"{whose}: no table; auto is exact"
        within = [
            f"{c.strategy}:{c.ratio:g}" for c in worst_cells(tables) if is_within(c, args.bound)
        ]
        measured = ", ".join(f"{t.num_questions} questions of {t.data}" for t in tables)
        return f"{whose}: {measured}, bound {args.bound:g} nats allows {within or 'nothing'}"


def questions_of(data: Path, topics: int) -> tuple[list[str], list[tuple[str, str]]]:
    """Questions of the first topics, and the passages ranked highest for them as (title, text)."""
    asked = {}
    for record in read_jsonl(data / "mtrag" / "retrieval_queries_qrels.jsonl.gz"):
        asked[record["task_id"]] = record["rewrite"].removeprefix("|user|:").strip()
    conversations: dict[str, list[dict[str, Any]]] = {}
    for record in read_jsonl(data / "mtrag" / "retrieval_traces.jsonl.gz"):
        if (record["retriever"], record["query_mode"]) == RETRIEVER:
            topic = record["task_id"].split("<::>")[0]
            conversations.setdefault(topic, []).append(record)
    turns = [t for topic in islice(conversations.values(), topics) for t in topic]
    wanted = {(t["domain"], doc_id) for t in turns for doc_id, _ in t["ranked"][:RANKS]}
    texts = {}
    for passage in read_jsonl(data / "mtrag" / "passages.jsonl.gz"):
        if (passage["domain"], passage["doc_id"]) in wanted:
            texts[passage["text"]] = passage["title"]
    return [asked[t["task_id"]] for t in turns], [(title, text) for text, title in texts.items()]
