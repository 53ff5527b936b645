"""What does each way of reuse cost in answer quality?

For every question: full prefill gives the greedy answer; every encoding x strategy x ratio is then
judged on that answer (KL of the distributions, full ‖ method) and on the gold answer (NLL), and
writes its own answer (F1, EM). `recovered` is the share of the gap between plain reuse of isolated
chunk KV and full prefill that is closed: 0 is reuse, 100 is full prefill.

    python bench/quality.py --data DATA --questions 200 --device cuda --workers 8 --out RESULT.json

Chunk KV is exact to the dtype here (no codec): bench/codec_kl.py has the codecs.
"""

import argparse
import gzip
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Empty
from typing import Any

import torch
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from common import finish, result_header
from kvweave.fuse.anchors import REPEAT, choose_anchors, extra_name, kvzip_scores, pack_anchors
from kvweave.fuse.answer_scores import exact_match, token_f1
from kvweave.fuse.contexts import Variant, filler_ids, neighbour_prefix, parse_variant
from kvweave.fuse.encode import Prefix, encode_chunks, encode_prefix, passes
from kvweave.fuse.fuse import fuse
from kvweave.fuse.inter_attention import inter_attention
from kvweave.fuse.request import FuseRequest, budget, classify
from kvweave.fuse.selectors.base import Scene, top_positions
from kvweave.fuse.selectors.cacheblend import CacheBlend
from kvweave.fuse.selectors.cachecraft import INTER
from kvweave.fuse.selectors.kvshare import KVShareLike
from kvweave.fuse.selectors.query_attention import QueryAttention
from kvweave.fuse.sources import ComputedChunks
from kvweave.fuse.stitched import Stitched
from kvweave.fuse.strategy import NEEDS_PROFILE, ModelFacts, Strategy, open_strategy
from kvweave.fuse.trials import Trials, judge
from kvweave.kernels.column_scores import causal_column_mass
from kvweave.kernels.rope import rotate
from kvweave.kv.codec import LayerKV
from kvweave.kv.keys import ChunkKey
from kvweave.model.decoder import Decoder, Rows
from kvweave.model.load import load_decoder
from kvweave.model.locate import locate
from kvweave.prompt import Document, chunk_text, split_template
from kvweave.tokenizer import Tokenizer
from quality_batch import Cell, batched_pass
from quality_data import Question, read_questions
from quality_stats import FULL, Key, append_values, open_values, summarise

SETS = ("2wiki", "hotpot", "musique")
RATIOS = (0.05, 0.1, 0.15, 0.3, 0.5)
STRATEGIES = (
    "random", "stride", "epic", "cacheblend", "cacheblend-k", "kvshare", "cachecraft", "fusionrag",
    "fusionrag-code", "prophetkv", "qcfuse", "weave",
)  # fmt: skip
ANSWER_ROOM = 32


def main() -> None:
    args = parse_args()
    skipped = leave_out(args)
    started_s = time.perf_counter()
    tokenizer = Tokenizer(locate(args.model))
    per_set = [read_questions(args.data, tokenizer, s, args.questions, args.first) for s in SETS]
    questions = [q for same in zip(*per_set, strict=False) for q in same]
    same = ("model", "encodings", "strategies", "ratios", "layers")
    values = open_values(args.values, {name: getattr(args, name) for name in same})
    done = {(v["set"], v["number"]) for v in values}
    questions = [q for q in questions if (q.set_name, q.number) not in done]
    for value in run_all(args, questions):
        append_values(args.values, value)
        values.append(value)
    results = summarise(values)
    show(results, args)
    config = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    config["data"] = "2wikimultihopqa, hotpotqa, musique + cacheblend_musique_s"
    for name in ("out", "values", "neighbours", "limit_s", "tf32"):
        config.pop(name)
    config["questions_in_tf32"] = sum(bool(v.get("tf32")) for v in values)
    config["seconds"] = round(time.perf_counter() - started_s)
    header = result_header("quality", args.device)
    finish({**header, "config": config, "skipped": skipped, "cells": results}, args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--questions", type=int, default=200, help="per set")
    parser.add_argument("--first", type=int, default=80, help="0-79 were used to tune `weave`")
    parser.add_argument("--encodings", default="isolated,filler:4")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--ratios", default=",".join(map(str, RATIOS)))
    parser.add_argument("--layers", default="", help="critical layers for qcfuse, best first")
    parser.add_argument("--neighbours", type=Path, help="from bench/quality_neighbours.py")
    parser.add_argument("--values", type=Path, help="keep every question's figures here; go on")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--tf32", action="store_true", help="faster products on a GPU, 10 bits")
    parser.add_argument("--limit-s", type=float, default=1e9, help="stop asking after this long")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def leave_out(args: argparse.Namespace) -> list[str]:
    """Take out of `args.strategies` what cannot run, and say so. Ends a run that cannot work."""
    if "isolated" not in args.encodings.split(","):
        raise SystemExit("recovery counts from reuse of isolated chunk KV; add it to --encodings")
    names = args.strategies.split(",")
    skipped = [name for name in names if name in NEEDS_PROFILE and not args.layers]
    for name in skipped:
        print(f"{name} is left out: it needs the critical layers; give --layers", flush=True)
    args.strategies = ",".join(name for name in names if name not in skipped)
    return skipped


def run_all(args: argparse.Namespace, questions: list[Question]) -> Iterator[dict[Key, Any]]:
    """Values of every question, from as many processes as asked for."""
    if args.workers == 1:
        lab = Lab(args)
        for i, question in enumerate(questions):
            yield lab.ask(question, check=i == 0) | {"tf32": args.tf32}
        return
    context = mp.get_context("spawn")
    queue = context.Queue()
    workers = [
        context.Process(target=work, args=(i, args, questions, queue)) for i in range(args.workers)
    ]
    for worker in workers:
        worker.start()
    done, count = 0, 0
    while done < len(workers):
        try:
            got = queue.get(timeout=10)
        except Empty:
            if any(worker.exitcode for worker in workers):
                raise SystemExit("a worker died") from None
            continue
        if got is None:
            done += 1
        elif isinstance(got, str):
            print(f"a question failed: {got}", flush=True)
        else:
            count += 1
            if count % 50 == 0:
                print(f"{count}/{len(questions)} questions", flush=True)
            yield got
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit("a worker died (see above); --values has what was asked until then")


def work(number: int, args: argparse.Namespace, questions: list[Question], queue: Any) -> None:
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.set_num_threads(1 if args.workers > 1 else 2)
        lab = Lab(args)
        stop_s = time.perf_counter() + args.limit_s
        for i in range(number, len(questions), args.workers):
            if time.perf_counter() > stop_s:
                break
            try:
                figures = lab.ask(questions[i], check=i == number)
                queue.put(figures | {"tf32": args.tf32})
                # on from the second: the first was checked against `fuse`, to more digits
                torch.backends.cuda.matmul.allow_tf32 = args.tf32
            except torch.OutOfMemoryError as error:  # a run over the rest picks it up
                torch.cuda.empty_cache()
                queue.put(f"question {i}: {error}")
    finally:
        queue.put(None)


class Lab:
    """One model and everything that is computed once for it."""

    def __init__(self, args: argparse.Namespace) -> None:
        folder = locate(args.model)
        self.tokenizer = Tokenizer(folder)
        self.decoder: Decoder = load_decoder(folder, device=args.device, dtype="float32")
        layers = tuple(int(i) for i in args.layers.split(",") if i)
        self.facts = ModelFacts(self.decoder.spec.num_layers, layers)
        self.strategies = [open_strategy(name, self.facts) for name in args.strategies.split(",")]
        self.ratios = [float(r) for r in args.ratios.split(",")]
        self.variants = [parse_variant(text) for text in args.encodings.split(",")]
        self.near: dict[str, list[list[tuple[str, str]]]] = {}
        if args.neighbours is not None:
            with gzip.open(args.neighbours, "rt", encoding="utf-8") as file:
                stored = json.load(file)
            texts = {int(i): tuple(p) for i, p in stored["passages"].items()}
            self.near = {
                k: [[texts[i] for i in r] for r in v] for k, v in stored["nearest"].items()
            }
        self.prefixes: dict[tuple[int, ...], Prefix] = {}

    def prefix(self, ids: Sequence[int]) -> Prefix:
        key = tuple(ids)
        if key not in self.prefixes:
            self.prefixes[key] = encode_prefix(self.decoder, key)
        return self.prefixes[key]

    def ask(self, question: Question, *, check: bool) -> dict[Key, Any]:
        """Every figure of every cell for one question."""
        prompt, decoder = question.prompt, self.decoder
        ids = prompt.token_ids
        isolated = encode_chunks(decoder, self.prefix(prompt.preamble), prompt.chunks)
        found: dict[Key, Any] = {}
        for variant in self.variants:  # one at a time: the KV of a table is large
            num_cells = len(self.ratios) * len(self.strategies) + 3
            trials = Trials(decoder, num_cells, len(ids), ANSWER_ROOM)
            logits = [decoder.forward([Rows(ids, range(len(ids)), trials.kv(0), [len(ids) - 1])])]
            names: list[Key] = [FULL]
            works = [1.0]
            request, stitched, chosen = self.prepare(question, variant, isolated, trials)
            groups: list[tuple[float, list[tuple[str, Cell]]]] = [(0.0, [("reuse", Cell(()))])]
            groups += [
                (ratio, [(s.name, chosen(s, ratio)) for s in self.strategies])
                for ratio in self.ratios
            ]
            if variant.kind == "isolated":
                groups.append((1.0, [("any", Cell(tuple(request.hits)))]))
            for ratio, cells in groups:
                first = len(names)
                got = batched_pass(decoder, request, stitched, [c for _, c in cells], trials, first)
                if check and ratio in (0.0, 0.15):
                    self.verify(question, request, stitched, ratio, cells, got)
                logits.append(got)
                names += [(str(variant), name, ratio) for name, _ in cells]
                works += [self.work(request, name, cell) for name, cell in cells]
            figures = self.figures(question, trials, names, torch.cat(logits))
            for key, share in zip(names, works, strict=True):
                figures[key]["work"] = share
            found |= figures
        return {**found, "set": question.set_name, "number": question.number}  # type: ignore[dict-item]

    def work(self, request: FuseRequest, name: str, cell: Cell) -> float:
        """Rows through layers, probe included, as a share of full prefill's (see fuse/measure.py).

        The batched pass gives selectors in flight their rows at once; what counts is what `fuse`
        would run, every hit in the layers before they choose.
        """
        num_layers = self.decoder.spec.num_layers
        num_hits = len(request.hits)
        rows = num_layers * (len(cell.chosen) + len(request.must_compute))
        strategy = next((s for s in self.strategies if s.name == name), None)
        if strategy is not None and 0 < len(cell.chosen) < num_hits:
            needs = strategy.needs(num_layers)
            wide = needs.full_width_layers
            # the layer in which they choose projects every hit before it narrows
            rows += (wide + 1 if wide else 0) * (num_hits - len(cell.chosen))
            rows += self.probed(request, strategy)
        return rows / (num_layers * len(request.prompt_ids))

    def probed(self, request: FuseRequest, strategy: Strategy) -> int:
        """Rows through layers that a probe of the question costs."""
        needs = strategy.needs(self.decoder.spec.num_layers)
        length = len(request.prompt_ids) - request.question_start
        return 0 if needs.probe == "none" else needs.probe_depth * length

    def prepare(
        self, question: Question, variant: Variant, isolated: list[list[LayerKV]], trials: Trials
    ) -> Any:
        """The request, its stitched KV and who chooses rows, under one encoding context."""
        prompt, decoder = question.prompt, self.decoder
        preamble = self.prefix(prompt.preamble)
        made, prefixes = self.encode(question, variant, isolated)
        keys = [ChunkKey(bytes([i % 256, i // 256]) * 16) for i in range(len(prompt.chunks))]
        request = classify(
            prompt.preamble,
            list(zip(keys, prompt.chunks, strict=True)),
            prompt.question,
            present=keys,
            first_is_exact=True,
            asked=prompt.asked,
        )
        beside = self.beside(question, keys, made, prefixes)
        kv = decoder.new_kv(len(request.prompt_ids))
        stitched = Stitched(decoder, request, preamble, ComputedChunks(made, beside), kv)
        scene = Scene(decoder, request, stitched, torch.tensor(request.hits))
        scores: dict[str, torch.Tensor] = {}

        def chosen(strategy: Strategy, ratio: float) -> Cell:
            count = budget(len(request.hits), ratio)
            selector = strategy.selector
            in_flight = isinstance(selector, CacheBlend | KVShareLike)
            if isinstance(selector, QueryAttention) or in_flight:
                if strategy.name not in scores:
                    scores[strategy.name] = (
                        selector.scores(scene)
                        if isinstance(selector, QueryAttention)
                        else self.changed(strategy, scene, trials)
                    )
                rows = top_positions(scores[strategy.name], scene.hits, count)
            else:
                assert selector is not None
                rows = selector.select(scene, count)
            return Cell(tuple(rows.tolist()), strategy.drift, in_flight)

        return request, stitched, chosen

    def encode(
        self, question: Question, variant: Variant, isolated: list[list[LayerKV]]
    ) -> tuple[list[list[LayerKV]], list[Prefix]]:
        """Chunk KV behind its encoding context; the first chunk isolated, where it is exact."""
        prompt, decoder = question.prompt, self.decoder
        bare = self.prefix(prompt.preamble)
        if variant.kind == "isolated":
            return isolated, [bare] * len(isolated)
        if variant.kind == "filler":
            filled = self.prefix([*prompt.preamble, *filler_ids(self.tokenizer, variant.size)])
            made = encode_chunks(decoder, filled, prompt.chunks)
            return [isolated[0], *made[1:]], [bare, *[filled] * (len(made) - 1)]
        rows = self.near[f"{question.set_name}/{question.number}"]
        ids = {
            passage: tuple(self.tokenizer.encode_text(chunk_text(Document(passage[1], passage[0]))))
            for row in rows
            for passage in row[: variant.size]
        }
        alone: dict[tuple[int, ...], list[LayerKV]] = {}
        unique = list(dict.fromkeys(ids.values()))
        for run in passes([len(u) for u in unique], 8192):
            batch = [unique[i] for i in run]
            alone |= dict(zip(batch, encode_chunks(decoder, bare, batch), strict=True))
        prefixes, made = [bare], [isolated[0]]
        for chunk, row in list(zip(prompt.chunks, rows, strict=True))[1:]:
            near = [(ids[p], alone[ids[p]]) for p in row[: variant.size]]
            prefixes.append(neighbour_prefix(decoder, bare, near))
            made += encode_chunks(decoder, prefixes[-1], [chunk])
        return made, prefixes

    def beside(
        self,
        question: Question,
        keys: list[ChunkKey],
        made: list[list[LayerKV]],
        prefixes: list[Prefix],
    ) -> dict[str, dict[ChunkKey, bytes]]:
        """What the strategies need beside the chunk KV."""
        found: dict[str, dict[ChunkKey, bytes]] = {}
        names = {s.name for s in self.strategies}
        chunks = question.prompt.chunks
        if "cachecraft" in names:
            found[INTER] = {
                key: inter_attention(self.decoder, prefix, ids, layers)
                .half()
                .cpu()
                .numpy()
                .tobytes()
                for key, ids, layers, prefix in zip(keys, chunks, made, prefixes, strict=True)
            }
        if "qcfuse" in names:
            _, closing = split_template(self.tokenizer, "")
            repeat = [*self.tokenizer.encode_text(REPEAT), *closing]
            found[extra_name("kvzip")] = {}
            sizes = [len(ids) + len(repeat) for ids in chunks]
            for prefix in dict.fromkeys(map(id, prefixes)):  # chunks behind one prefix run together
                mine = [i for i in range(len(keys)) if id(prefixes[i]) == prefix]
                for run in passes([sizes[i] for i in mine], 8192):
                    batch = [mine[j] for j in run]
                    scores = kvzip_scores(
                        self.decoder,
                        prefixes[batch[0]],
                        [chunks[i] for i in batch],
                        [made[i] for i in batch],
                        repeat,
                    )
                    for i, each in zip(batch, scores, strict=True):
                        packed = pack_anchors(choose_anchors(made[i], each))
                        found[extra_name("kvzip")][keys[i]] = packed
        return found

    def changed(self, strategy: Strategy, scene: Scene, trials: Trials) -> torch.Tensor:
        """What an in-flight selector measures at layer 1, read off full prefill: the same there."""
        count = len(scene.request.prompt_ids)
        fresh_k, fresh_v = trials.keys[1, 0, :count], trials.values[1, 0, :count]
        at = scene.hits.to(fresh_k.device)
        fresh, stored = (
            (fresh_k, scene.stitched.keys(1))
            if strategy.name == "cacheblend-k"
            else (fresh_v, scene.stitched.values(1))
        )
        moved = (fresh[at] - stored[at]).square().sum((1, 2))
        if strategy.name != "kvshare":
            return moved
        ids = torch.tensor(scene.request.prompt_ids, device=at.device)
        positions = torch.arange(scene.request.preamble_len, count)
        angles = self.decoder.angles(positions.to(at.device))
        q = rotate(self.decoder.qkv(0, self.decoder.embed(ids))[0][positions.to(at.device)], angles)
        return moved * causal_column_mass(q, positions, trials.keys[0, 0, :count])[at]

    def verify(
        self,
        question: Question,
        request: FuseRequest,
        stitched: Stitched,
        ratio: float,
        cells: list[tuple[str, Cell]],
        got: torch.Tensor,
    ) -> None:
        """The batched pass is `fuse`: the same rows, the same logits, the same work."""
        by_name = {s.name: s for s in self.strategies}
        for (name, cell), logits in zip(cells, got, strict=True):
            strategy = by_name.get(name)
            kv = self.decoder.new_kv(len(request.prompt_ids))
            again = Stitched(
                self.decoder, request, self.prefix(question.prompt.preamble), _Same(stitched), kv
            )
            selector = None if strategy is None else strategy.selector
            drift = 0.0 if strategy is None else strategy.drift
            want = fuse(self.decoder, request, again, kv, selector, ratio, drift=drift)
            worst = float((want.logits - logits).abs().max())
            if worst > 0.02:
                raise AssertionError(f"{name} at {ratio}: batched pass is off by {worst:.4f}")
            rows = sum(want.rows_per_layer)
            if strategy is not None:
                rows += self.probed(request, strategy)
            full = self.decoder.spec.num_layers * len(request.prompt_ids)
            if abs(rows / full - self.work(request, name, cell)) > 1e-9:
                raise AssertionError(f"{name} at {ratio}: its work is {rows / full:.4f}")

    def figures(
        self, question: Question, trials: Trials, names: list[Key], logits: torch.Tensor
    ) -> dict[Key, Any]:
        decoder, tokenizer = self.decoder, self.tokenizer
        answers = trials.greedy(logits, tokenizer.eos_ids, ANSWER_ROOM)
        gold = [*tokenizer.encode_text(question.answers[0]), min(tokenizer.eos_ids)][:ANSWER_ROOM]
        found: dict[Key, Any] = {}
        own = _judged(trials, logits, answers[0])
        golden = _judged(trials, logits, gold)
        for i, name in enumerate(names):
            ends = [t for t in answers[i] if t not in tokenizer.eos_ids]
            text = tokenizer.decode(ends)
            found[name] = {
                "kl": own[i].kl_mean,
                "flips": float(own[i].first_flips),
                "top1": own[i].top1,
                "nll": golden[i].nll,
                "f1": token_f1(text, question.answers),
                "em": exact_match(text, question.answers),
            }
        if decoder.device.type == "cuda":
            torch.cuda.empty_cache()
        return found


class _Same:
    """Chunk KV as another stitched request has it."""

    def __init__(self, stitched: Stitched) -> None:
        self._stitched = stitched

    def layer(self, layer: int, out: LayerKV | None = None) -> LayerKV:
        return self._stitched.unturned(layer)

    def beside(self, name: str) -> Any:
        return self._stitched.beside(name)


def _judged(trials: Trials, logits: torch.Tensor, answer: Sequence[int]) -> list[Any]:
    followed = trials.follow(logits, answer)
    return [judge(followed[0], each, answer) for each in followed]


def show(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """KL gap recovered, one table per set."""
    for name in SETS:
        rows = [r for r in results if r["set"] == name]
        if not rows:
            continue
        table = Table(title=f"{name}: KL gap recovered, % (95 % interval), n = {rows[0]['n']}")
        for column in (
            "encoding", "strategy", "ratio", "work", "recovered", "KL", "NLL gap %", "F1", "EM"
        ):  # fmt: skip
            table.add_column(
                column, justify="right" if column not in ("encoding", "strategy") else "left"
            )
        for row in rows:
            if row["ratio"] not in (0.0, 0.15, 1.0):
                continue
            low, high = row["recovered_ci"]
            nll = row["nll_recovered"]
            table.add_row(
                row["encoding"], row["strategy"], f"{row['ratio']:g}", f"{row['work']:.0%}",
                f"{row['recovered']:.1f} ({low:.0f} to {high:.0f})", f"{row['kl']:.4f}",
                "–" if nll is None else f"{nll:.0f}", f"{row['f1']:.3f}", f"{row['em']:.3f}",
            )  # fmt: skip
        Console(width=120).print(table)


if __name__ == "__main__":
    main()
