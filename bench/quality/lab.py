"""One question of the quality bench: every encoding, strategy and ratio beside full prefill."""

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from kvweave.calibrate.answer_scores import exact_match, token_f1
from kvweave.calibrate.trials import Trials, judge
from kvweave.fuse.encode.chunk_pass import encode_chunks
from kvweave.fuse.encode.contexts import ISOLATED, Variant, parse_variant
from kvweave.fuse.fuse import fuse
from kvweave.fuse.request import FuseRequest, budget, classify
from kvweave.fuse.selector import Scene, ranked_positions, top_positions
from kvweave.fuse.selectors.cacheblend import CacheBlend, KVShareLike
from kvweave.fuse.selectors.query_attention import QueryAttention
from kvweave.fuse.selectors.strategies import open_strategy
from kvweave.fuse.sources import ComputedChunks
from kvweave.fuse.stitched import Stitched, stitch
from kvweave.fuse.strategy import REUSE, ModelFacts, Strategy
from kvweave.kv.format.codec import LayerKV
from kvweave.kv.format.keys import ChunkKey
from kvweave.model.decoder import Decoder
from kvweave.model.files.locate import locate
from kvweave.model.load import load_decoder
from kvweave.model.rows import Rows
from kvweave.text.tokenizer import Tokenizer
from quality.batch import Cell, batched_pass
from quality.data import Question
from quality.encode import Encoder
from quality.from_full import ORACLE, Oracle, changed, oracle
from quality.stats import FULL, Key

ANSWER_ROOM = 32


class Lab:
    """One model and everything that is computed once for it."""

    def __init__(self, args: argparse.Namespace) -> None:
        folder = locate(args.model)
        self.tokenizer = Tokenizer(folder)
        self.decoder: Decoder = load_decoder(folder, device=args.device, dtype="float32")
        layers = tuple(int(i) for i in args.layers.split(",") if i)
        self.facts = ModelFacts(self.decoder.spec.num_layers, layers)
        self.strategies = [
            oracle() if name == ORACLE else open_strategy(name, self.facts)
            for name in args.strategies.split(",")
        ]
        self.ratios = [float(r) for r in args.ratios.split(",")]
        self.asked = [parse_variant(text) for text in args.encodings.split(",")]
        # recovery counts from plain reuse of isolated chunk KV: always there
        self.variants = list(dict.fromkeys([Variant(ISOLATED), *self.asked]))
        self.encoder = Encoder(self.decoder, self.tokenizer, args.neighbours)

    def ask(self, question: Question, *, check: bool) -> dict[Key, Any]:
        """Every figure of every cell for one question."""
        prompt, decoder = question.prompt, self.decoder
        ids = prompt.token_ids
        isolated = encode_chunks(decoder, self.encoder.prefix(prompt.preamble), prompt.chunks)
        found: dict[Key, Any] = {}
        for variant in self.variants:  # one at a time: the KV of a table is large
            ratios = self.ratios if variant in self.asked else []
            num_cells = len(ratios) * len(self.strategies) + 3
            trials = Trials(decoder, num_cells, len(ids), ANSWER_ROOM)
            logits = [decoder.forward([Rows(ids, range(len(ids)), trials.kv(0), [len(ids) - 1])])]
            names: list[Key] = [FULL]
            works = [1.0]
            request, stitched, chosen = self.prepare(question, variant, isolated, trials)
            groups: list[tuple[float, list[tuple[str, Cell]]]] = [(0.0, [("reuse", Cell(()))])]
            groups += [
                (ratio, [(s.name, chosen(s, ratio)) for s in self.strategies]) for ratio in ratios
            ]
            if variant.kind == ISOLATED:
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
        """Rows through layers, probe included, as a share of full prefill's (calibrate/measure.py).

        The batched pass gives selectors in flight their rows at once; what counts is what `fuse`
        would run, every hit in the layers before they choose.
        """
        num_layers = self.decoder.spec.num_layers
        num_hits = len(request.hits)
        rows = num_layers * (len(cell.chosen) + len(request.must_compute))
        if cell.taper is not None:
            behind = num_layers - cell.taper.layer - 1
            rows -= behind * (len(cell.chosen) - len(cell.stay))
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
        preamble = self.encoder.prefix(prompt.preamble)
        made, prefixes = self.encoder.encode(question, variant, isolated)
        keys = [ChunkKey(bytes([i % 256, i // 256]) * 16) for i in range(len(prompt.chunks))]
        request = classify(
            prompt.preamble,
            list(zip(keys, prompt.chunks, strict=True)),
            prompt.question,
            present=keys,
            first_is_exact=True,
            asked=prompt.asked,
        )
        names = {s.name for s in self.strategies} if variant in self.asked else set()
        beside = self.encoder.beside(question, names, keys, made, prefixes)
        kv = decoder.new_kv(len(request.prompt_ids))
        stitched = stitch(decoder, request, preamble, ComputedChunks(made, beside), kv)
        scene = Scene(stitched, torch.tensor(request.hits))
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
                        else changed(strategy.name, scene, trials)
                    )
                taper = strategy.taper if 0 < count < len(request.hits) else None
                if taper is not None:
                    counts = (count, taper.staying(count))
                    both = ranked_positions(scores[strategy.name], scene.hits, counts)
                    rows, stay = (tuple(each.tolist()) for each in both)
                    return Cell(rows, strategy.drift, taper, stay)
                rows = top_positions(scores[strategy.name], scene.hits, count)
            else:
                if strategy.name == ORACLE:
                    selector = Oracle(trials)
                assert selector is not None
                rows = selector.select(scene, (count,))[0]
            return Cell(tuple(rows.tolist()), strategy.drift, exact_layer_1=in_flight)

        return request, stitched, chosen

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
            if name == ORACLE:
                continue  # `fuse` cannot ask it
            strategy = by_name.get(name)
            kv = self.decoder.new_kv(len(request.prompt_ids))
            again = stitch(
                self.decoder,
                request,
                self.encoder.prefix(question.prompt.preamble),
                _Same(stitched),
                kv,
            )
            want = fuse(again, strategy or REUSE, ratio)
            worst = float((want.logits - logits).abs().max())
            if worst > 0.02:
                raise AssertionError(f"{name} at {ratio}: batched pass is off by {worst:.4f}")
            rows = sum(want.rows_per_layer)
            if strategy is not None and 0 < len(cell.chosen) < len(request.hits):
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

    placer = None

    def __init__(self, stitched: Stitched) -> None:
        self._stitched = stitched

    def layer(self, layer: int) -> LayerKV:
        return self._stitched.layers.unturned_kv(layer)

    def extras(self, name: str) -> Any:
        return self._stitched.layers.extras(name)


def _judged(trials: Trials, logits: torch.Tensor, answer: Sequence[int]) -> list[Any]:
    followed = trials.follow(logits, answer)
    return [judge(followed[0], each, answer) for each in followed]
