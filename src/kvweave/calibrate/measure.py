"""Measure strategies against full prefill, question by question.

Every strategy and ratio prefills the same prompt; all are then fed full prefill's own greedy answer
(and the known one, where there is one) and compared with it token by token. A row that recomputes
everything goes along in every question: it must come out at rounding noise, or the run is void.

Values are kept per question until the end, because intervals come from resampling questions.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvweave.calibrate.answer_scores import exact_match, token_f1
from kvweave.calibrate.case import Case
from kvweave.calibrate.encodings import ContextPrefixes, Encoding
from kvweave.calibrate.gate import BOUND, ORDER_CELL
from kvweave.calibrate.trials import Trials, TrialScore, judge
from kvweave.errors import ConfigError, ModelError
from kvweave.fuse.encode.chunk_pass import encode_prefix
from kvweave.fuse.fuse import Fused, fuse
from kvweave.fuse.protocol import FusionDecoder
from kvweave.fuse.request import FuseRequest
from kvweave.fuse.selectors.places import Stride
from kvweave.fuse.sources import ComputedChunks
from kvweave.fuse.stitched import stitch
from kvweave.fuse.strategy import Strategy
from kvweave.text.tokenizer import Tokenizer

MAX_ANSWER_TOKENS = 32
BATCH_BYTES = 1 << 30  # KV of trials that are judged together
# Mean KL of one answer when everything is recomputed: beyond this something is wrong. Float32 gives
# 1e-9 to 1e-7 here; the half types round the same numbers in another order where a chunk is taken
# from the store.
NOISE_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
NOISE_SHARE = 0.1  # of the bound that the mean noise over all questions may use up


class Setting(NamedTuple):
    """A strategy at a ratio."""

    strategy: Strategy
    ratio: float


class GoldScores(NamedTuple):
    """Scores against a known answer."""

    nll: float  # nats per token
    f1: float
    em: float


class Outcome(NamedTuple):
    """What came of one setting on one question."""

    judged: TrialScore
    nll_gap: float  # to full prefill, on its own greedy answer
    work: float  # rows through layers as a share of full prefill's
    gold: GoldScores | None


class CaseOutcomes(NamedTuple):
    """What came of one question: full prefill's own scores, and every encoding's outcomes and
    noise."""

    num_tokens: int
    num_chunks: int
    gold: GoldScores | None
    outcomes: dict[str, list[Outcome]]  # encoding → one per setting, in their order
    noise: dict[str, float]  # encoding → mean KL with everything recomputed


# Not a way to fuse: full prefill of the same chunks in another order, against the order found. It
# says whether chunks may be moved, and goes through the same gate as what is fused.
ORDER = Setting(Strategy(ORDER_CELL, None, 0.0, reuses="none"), 0.0)
RECOMPUTE_ALL = Setting(Strategy("recompute all", Stride(), 1.0), 1.0)


def measure(
    decoder: FusionDecoder,
    tokenizer: Tokenizer,
    cases: Iterable[Case],
    encodings: Sequence[Encoding],
    settings: Sequence[Setting],
    *,
    bound: float = BOUND,
    on_case: Callable[[int], None] | None = None,
) -> list[CaseOutcomes]:
    """Try every setting behind every encoding on every case. `on_case` hears how many are done.

    Raises ModelError as soon as recomputing everything is not full prefill: nothing measured on
    such a machine means anything. Raises ConfigError as soon as the rounding of a half type is sure
    to use up more than NOISE_SHARE of `bound`: what is measured then is the rounding.
    """
    prefixes = ContextPrefixes(decoder)
    cases = list(cases)
    answered: list[CaseOutcomes] = []
    for case in cases:
        answered.append(_CaseRun(decoder, tokenizer, prefixes, case).run(encodings, settings))
        _check_precision(answered, len(cases), _dtype_of(decoder), bound)
        if on_case is not None:
            on_case(len(answered))
    return answered


def extras_needed(settings: Iterable[Setting], num_layers: int) -> list[str]:
    """What must lie beside the chunk KV for these settings."""
    return sorted({name for each in settings for name in each.strategy.needs(num_layers).extras})


class _CaseRun:
    """One question, tried with every setting."""

    def __init__(
        self, decoder: FusionDecoder, tokenizer: Tokenizer, prefixes: ContextPrefixes, case: Case
    ) -> None:
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._case = case
        # a history is one case's alone, so its KV is not kept for others
        self._front = (
            encode_prefix(decoder, case.front)
            if case.history
            else prefixes.prefix_for(case.preamble)
        )
        trials = self._trials(1)
        first = self._prefill(trials, 0, case.request((), first_is_exact=False), None, None).logits
        (self._greedy,) = trials.greedy(first[None], tokenizer.eos_ids, MAX_ANSWER_TOKENS)
        self._full = trials.follow(first[None], self._greedy)[0]  # [A, V]
        self._full_nll = judge(self._full, self._full, self._greedy).nll
        known = tokenizer.encode_text(case.answers[0]) if case.answers else []
        self._known = known[:MAX_ANSWER_TOKENS]
        self._gold = self._against_gold(trials, first[None], [self._greedy])[0]

    def run(self, encodings: Sequence[Encoding], settings: Sequence[Setting]) -> CaseOutcomes:
        outcomes, noise = {}, {}
        for encoding in encodings:
            extras = extras_needed(settings, self._decoder.spec.num_layers)
            source = encoding.prepare(self._case, extras)
            check, *rest = self._try(source, [RECOMPUTE_ALL, *settings])
            noise[encoding.name] = self._check_noise(check)
            outcomes[encoding.name] = rest
        case = self._case
        return CaseOutcomes(case.num_tokens, len(case.chunks), self._gold, outcomes, noise)

    def _try(self, source: ComputedChunks, settings: Sequence[Setting]) -> list[Outcome]:
        request = self._case.request(self._case.keys, first_is_exact=True)
        found: list[Outcome] = []
        for batch in _batches(settings, self._batch_size()):
            trials = self._trials(len(batch))
            fused = [
                self._prefill(trials, i, request, source, setting)
                for i, setting in enumerate(batch)
            ]
            first = torch.stack([each.logits for each in fused])
            followed = trials.follow(first, self._greedy)  # [B, A, V]
            judged = [judge(self._full, one, self._greedy) for one in followed]
            gold = self._against_gold(trials, first, None)
            for how, each, known in zip(fused, judged, gold, strict=True):
                found.append(Outcome(each, each.nll - self._full_nll, how.work, known))
        return found

    def _prefill(
        self,
        trials: Trials,
        number: int,
        request: FuseRequest,
        source: ComputedChunks | None,
        setting: Setting | None,
    ) -> Fused:
        """Fill one trial; without a setting that is full prefill."""
        kv, preamble = trials.kv(number), self._front
        if setting == ORDER:
            request = self._case.with_another_order().request((), first_is_exact=False)
            source, setting = None, None
        stitched = stitch(self._decoder, request, preamble, source or ComputedChunks([]), kv)
        if setting is None:
            return fuse(stitched)
        return fuse(stitched, setting.strategy, setting.ratio)

    def _against_gold(
        self, trials: Trials, first: Tensor, answers: list[list[int]] | None
    ) -> list[GoldScores | None]:
        """Scores of each trial against the known answer; `answers` if they are decoded already."""
        if not self._known:
            return [None] * len(first)
        followed = trials.follow(first, self._known)
        nlls = [judge(one, one, self._known).nll for one in followed]
        if answers is None:
            answers = trials.greedy(first, self._tokenizer.eos_ids, MAX_ANSWER_TOKENS)
        scores: list[GoldScores | None] = []
        for nll, ids in zip(nlls, answers, strict=True):
            text = self._tokenizer.decode(ids, skip_special=True)
            golds = self._case.answers
            scores.append(GoldScores(nll, token_f1(text, golds), exact_match(text, golds)))
        return scores

    def _check_noise(self, check: Outcome) -> float:
        limit = NOISE_LIMITS[_dtype_of(self._decoder)]
        kl = check.judged.kl_mean
        if not kl <= limit:  # a NaN is no noise either
            raise ModelError(
                f"calibration is void: with everything recomputed the answer is {kl:.2g} nats per "
                f"token from full prefill, above rounding noise ({limit:g}); report this as a bug"
            )
        return kl

    def _trials(self, count: int) -> Trials:
        return Trials(self._decoder, count, self._case.num_tokens, MAX_ANSWER_TOKENS)

    def _batch_size(self) -> int:
        spec = self._decoder.spec
        tokens = self._case.num_tokens + MAX_ANSWER_TOKENS
        values = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * tokens
        return max(1, BATCH_BYTES // (values * _dtype_of(self._decoder).itemsize))


def _dtype_of(decoder: FusionDecoder) -> torch.dtype:
    return decoder.embed(torch.zeros(1, dtype=torch.int64, device=decoder.device)).dtype


def _check_precision(
    answered: Sequence[CaseOutcomes], num_cases: int, dtype: torch.dtype, bound: float
) -> None:
    """Raise ConfigError if rounding uses up too much of `bound`. Float32 is held to its own limit,
    question by question, which no sane bound comes near."""
    if dtype == torch.float32:
        return
    for encoding in answered[0].noise:
        # those that are to come can only add, so this much is sure already
        noise = sum(each.noise[encoding] for each in answered) / num_cases
        if noise > NOISE_SHARE * bound:
            name = str(dtype).removeprefix("torch.")
            raise ConfigError(
                f"{name} cannot be calibrated to {bound:g} nats per token: rounding alone makes "
                f"{noise:.2g} ({encoding}), more than a tenth; take float32 or a higher bound"
            )


def _batches(settings: Sequence[Setting], size: int) -> Iterator[Sequence[Setting]]:
    for start in range(0, len(settings), size):
        yield settings[start : start + size]


def noise_of(answered: Collection[CaseOutcomes], encoding: str) -> float:
    """Return the highest noise of any question."""
    return max(each.noise[encoding] for each in answered)
