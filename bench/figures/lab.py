"""One question of the bench of figures: full prefill, stored chunk KV, and ways to fuse it.

What several parts want of a question is computed once: its full prefill, its chunk KV behind each
encoding context with what strategies need beside it, and the outcome of each way.

Shapes: L layers, T chunk tokens, Hk KV heads, D head dim, A tokens of the answer, V vocabulary.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from importlib.resources import files
from typing import NamedTuple

import torch
from torch import Tensor

from figures.cases import Posed
from kvweave.calibrate.answer_scores import token_f1
from kvweave.calibrate.encodings import ContextPrefixes
from kvweave.calibrate.profiles import SHORT
from kvweave.calibrate.questions import repeat_ids
from kvweave.calibrate.trials import TrialKV, Trials, judge
from kvweave.fuse.encode.chunk_pass import encode_chunks, passes
from kvweave.fuse.encode.contexts import ISOLATED, context_filler, parse_variant
from kvweave.fuse.encode.extras import (
    INTER,
    anchors_of,
    choose_anchors,
    inter_attention,
    knorm_scores,
    kvzip_scores,
    pack_anchors,
    sink_scores,
)
from kvweave.fuse.fuse import Fused, fuse
from kvweave.fuse.protocol import Prefix
from kvweave.fuse.selector import Scene
from kvweave.fuse.selectors.query_attention import usual_critical_layers
from kvweave.fuse.sources import ComputedChunks
from kvweave.fuse.stitched import Stitched, stitch
from kvweave.fuse.strategy import REUSE, ModelFacts, Strategy
from kvweave.kv.format.codec import LayerKV
from kvweave.kv.format.keys import ChunkKey
from kvweave.model.files.locate import locate
from kvweave.model.load import load_decoder
from kvweave.text.tokenizer import Tokenizer
from quality.scores import share_contained

LINE_ENDS = ("\n", "\n\n", ".\n", ".\n\n", " \n", " \n\n")
AT_ONCE = 8  # trials that are judged together


class Way(NamedTuple):
    """One way to fuse a prompt."""

    name: str  # of what chooses the rows
    strategy: Strategy
    ratio: float
    encoding: str = ISOLATED

    def __str__(self) -> str:
        return f"{self.encoding}/{self.name}@{self.ratio:g}"


PLAIN_REUSE = Way("reuse", REUSE, 0.0)


class Outcome(NamedTuple):
    """What one way gives on one question, beside full prefill."""

    kl: float  # nats per token of full prefill's answer
    flips: float  # 1 if the first token is another
    score: float  # F1 of its own answer; share of what was wanted where all of it is
    work: float  # rows through layers, the probe's included, as a share of full prefill's


class FullPrefill(NamedTuple):
    """What full prefill of a prompt leaves behind."""

    kv: TrialKV
    answer: list[int]
    log_probs: Tensor  # [A, V] on its own answer
    score: float


class Lab:
    """A loaded model and what is computed once for it."""

    def __init__(self, args: argparse.Namespace) -> None:
        folder = locate(args.model)
        self.tokenizer = Tokenizer(folder)
        self.decoder = load_decoder(folder, device="cpu", dtype="float32", quant=args.quant)
        self.num_layers = self.decoder.spec.num_layers
        # of the weights before they were rounded: what they search with is the same
        known = packaged_layers(self.decoder.weights.fingerprint[:SHORT])
        usual = usual_critical_layers(self.num_layers)
        self.layer_order = known if known.order else LayerOrder(usual, usual)
        self.facts = ModelFacts(self.num_layers, self.layer_order.critical)
        self.prefixes = ContextPrefixes(self.decoder)
        self.repeat = repeat_ids(self.tokenizer)
        self.ratios = [float(each) for each in args.ratios.split(",")]
        every = [self.tokenizer.encode_text(end) for end in LINE_ENDS]
        self.line_ends = {ids[0] for ids in every if len(ids) == 1}

    def context(self, preamble: Sequence[int], encoding: str) -> Prefix:
        """The KV in front of a chunk under a fixed encoding context."""
        filler = context_filler(self.tokenizer, parse_variant(encoding))
        return self.prefixes.prefix_for((*preamble, *filler))


class LayerOrder(NamedTuple):
    """The layers of a model by how well the question's attention there finds answers."""

    critical: tuple[int, ...]  # that a profile takes
    order: tuple[int, ...]  # all, best first


def packaged_layers(fingerprint: str) -> LayerOrder:
    """The layers of the packaged profile of a model; none for a model without one."""
    for packaged in files("kvweave.calibrate").joinpath("packaged").iterdir():
        if packaged.name.endswith(f"-{fingerprint}.json"):
            layers = json.loads(packaged.read_text("utf-8"))["layers"]
            return LayerOrder(tuple(layers["critical"]), tuple(layers["order"]))
    return LayerOrder((), ())


class Question:
    """One question and what is computed of it, each once."""

    def __init__(self, lab: Lab, posed: Posed) -> None:
        self.lab = lab
        self.posed = posed
        self.case = posed.case
        self._made: dict[str, list[list[LayerKV]]] = {}
        self._behind: dict[str, list[Prefix]] = {}
        self._extras: dict[str, dict[str, dict[ChunkKey, bytes]]] = {}
        self._rules: dict[tuple[str, str], list[Tensor]] = {}
        self._sources: dict[tuple[str, ...], ComputedChunks] = {}
        self._outcomes: dict[Way, Outcome] = {}

    def give(self, encoding: str, made: list[list[LayerKV]], behind: list[Prefix]) -> None:
        """Take chunk KV that was computed elsewhere, each chunk's behind its prefix."""
        self._made[encoding], self._behind[encoding] = made, behind

    def chunk_kv(self, encoding: str) -> list[list[LayerKV]]:
        """Chunk KV behind an encoding context; the first chunk's isolated, where it is exact."""
        if encoding not in self._made:
            lab, case = self.lab, self.case
            bare = lab.context(case.preamble, ISOLATED)
            prefix = lab.context(case.preamble, encoding)
            self._behind[encoding] = [bare, *[prefix] * (len(case.chunks) - 1)]
            self._made[encoding] = encode_behind(lab, case.chunks, self._behind[encoding])
        return self._made[encoding]

    def stitch(
        self, encoding: str, extras: Sequence[str] = (), kv: TrialKV | None = None
    ) -> Stitched:
        """The prompt with its stored chunks in a buffer, nothing recomputed yet."""
        case, lab = self.case, self.lab
        made, wanted = self.chunk_kv(encoding), (encoding, *extras)
        if wanted not in self._sources:
            beside = {name: self._beside(encoding, name) for name in extras}
            self._sources[wanted] = ComputedChunks(made, beside)
        request = case.request(case.keys, first_is_exact=True)
        kv = kv or Trials(lab.decoder, 1, case.num_tokens, 0).kv(0)
        front = lab.prefixes.prefix_for(case.preamble)
        return stitch(lab.decoder, request, front, self._sources[wanted], kv)

    def scene(self, encoding: str, extras: Sequence[str] = ()) -> Scene:
        """What a selector sees of the prompt."""
        stitched = self.stitch(encoding, extras)
        return Scene(stitched, torch.tensor(stitched.request.hits, dtype=torch.int64))

    def try_ways(self, ways: Sequence[Way]) -> dict[str, Outcome]:
        """The outcome of each way, by its name as text."""
        missing = [
            way for way in {_what(w): w for w in ways}.values() if _what(way) not in self._outcomes
        ]
        for i in range(0, len(missing), AT_ONCE):
            self._try(missing[i : i + AT_ONCE])
        return {str(way): self._outcomes[_what(way)] for way in ways}

    def fuse(self, way: Way, kv: TrialKV | None = None) -> Fused:
        """Prefill the prompt by one way."""
        extras = way.strategy.needs(self.lab.num_layers).extras
        return fuse(self.stitch(way.encoding, extras, kv), way.strategy, way.ratio)

    def _try(self, ways: Sequence[Way]) -> None:
        style, lab = self.posed.style, self.lab
        trials = Trials(lab.decoder, len(ways), self.case.num_tokens, style.max_tokens)
        fused = [self.fuse(way, trials.kv(i)) for i, way in enumerate(ways)]
        first = torch.stack([each.logits for each in fused])
        drawn = trials.greedy(first, self._ends(), style.max_tokens)
        followed = trials.follow(first, self.full.answer)
        for way, each, own, mine in zip(ways, fused, followed, drawn, strict=True):
            judged = judge(self.full.log_probs, own, self.full.answer)
            score = self._score(mine)
            self._outcomes[_what(way)] = Outcome(
                judged.kl_mean, float(judged.first_flips), score, each.work
            )

    @cached_property
    def full(self) -> FullPrefill:
        """Full prefill of the prompt, computed on first use."""
        case, lab, style = self.case, self.lab, self.posed.style
        trials = Trials(lab.decoder, 1, case.num_tokens, style.max_tokens)
        front, kv = lab.prefixes.prefix_for(case.preamble), trials.kv(0)
        request = case.request((), first_is_exact=False)
        first = fuse(stitch(lab.decoder, request, front, ComputedChunks([]), kv)).logits
        (answer,) = trials.greedy(first[None], self._ends(), style.max_tokens)
        log_probs = trials.follow(first[None], answer)[0]
        return FullPrefill(kv, answer, log_probs, self._score(answer))

    def _ends(self) -> set[int]:
        """Tokens that end an answer."""
        lines = self.lab.line_ends if self.posed.style.is_line else ()
        return {*self.lab.tokenizer.eos_ids, *lines}

    def _score(self, answer: Sequence[int]) -> float:
        text = self.lab.tokenizer.decode(list(answer), skip_special=True)
        golds = self.case.answers
        if not golds:
            return 0.0
        return share_contained(text, golds) if self.posed.style.needs_all else token_f1(text, golds)

    def _beside(self, encoding: str, name: str) -> dict[ChunkKey, bytes]:
        """The extra `name` of every chunk, as the store would have it."""
        kept = self._extras.setdefault(encoding, {})
        if name not in kept:
            made, behind = self._made[encoding], self._behind[encoding]
            if name == INTER:
                blobs = [
                    inter_attention(self.lab.decoder, prefix, ids, layers).half().numpy().tobytes()
                    for prefix, ids, layers in zip(behind, self.case.chunks, made, strict=True)
                ]
            else:
                rule, share = anchors_of(name)
                scores = self._scores(encoding, rule)
                blobs = [
                    pack_anchors(choose_anchors(layers, each, share))
                    for layers, each in zip(made, scores, strict=True)
                ]
            kept[name] = dict(zip(self.case.keys, blobs, strict=True))
        return kept[name]

    def _scores(self, encoding: str, rule: str) -> list[Tensor]:
        """[L, T] of every chunk: what an anchor rule ranks its tokens by, once for all shares."""
        if (encoding, rule) not in self._rules:
            made, chunks = self._made[encoding], self.case.chunks
            if rule == "sink":
                found = [sink_scores(layers) for layers in made]
            elif rule == "knorm":
                found = [knorm_scores(layers) for layers in made]
            else:
                found = [
                    kvzip_scores(self.lab.decoder, prefix, [ids], [layers], self.lab.repeat)[0]
                    for prefix, ids, layers in zip(
                        self._behind[encoding], chunks, made, strict=True
                    )
                ]
            self._rules[encoding, rule] = found
        return self._rules[encoding, rule]


def _what(way: Way) -> Way:
    """The way without its names: parts that call one by another name share what came of it."""
    return way._replace(name="", strategy=replace(way.strategy, name="", ratio=0.0))


def encode_behind(
    lab: Lab, chunks: Sequence[Sequence[int]], behind: Sequence[Prefix]
) -> list[list[LayerKV]]:
    """The KV of each chunk behind its own prefix, a few chunks at a time."""
    made: list[list[LayerKV]] = []
    for run in passes([len(p.token_ids) + len(c) for p, c in zip(behind, chunks, strict=True)]):
        prefixes = [behind[i] for i in run]
        made += encode_chunks(lab.decoder, prefixes, [tuple(chunks[i]) for i in run])
    return made
