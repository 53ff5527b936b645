"""From logits to the next token.

The order is: penalties, bias, temperature, min-p, top-k, top-p, draw. Temperature 0 is greedy and
uses no randomness. A seed makes a draw repeatable whatever else runs beside it, because every
request has a generator of its own. Reported log probabilities are the model's, before any of this.

A draw goes down from the likeliest token until it has passed as much probability as it drew, so it
mostly ends among the first few: the whole vocabulary is sorted only where it goes on beyond those.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvweave.errors import NoNumbers, RequestError

MAX_TOP_LOGPROBS = 20
SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny  # smaller ones would round to 0
NO_NUMBERS = "the model gave logits that are no numbers; nothing can be drawn"
ANSWER_PENALTIES = ("presence_penalty", "frequency_penalty")
FIRST_LOOK = 256  # of the likeliest tokens, before all are sorted


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one answer is drawn. Bad values raise RequestError when it is made."""

    max_tokens: int = 256  # upper bound; the context may end earlier
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0  # keep the smallest set of tokens with this much probability
    top_k: int = 0  # keep this many tokens; 0 keeps all
    repetition_penalty: float = 1.0  # > 1 makes tokens seen so far less likely
    seed: int | None = None  # None: another answer each time
    stop: tuple[str, ...] = ()  # the answer ends in front of the first of these
    logprobs: int | None = None  # alternatives to report per token; None reports nothing
    stop_loops: bool = True  # end an answer that only repeats itself: see text/detokenizer.py
    # taken off the logit of a token that the answer has: once, and for each time it has it
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # token ids, and what is added to their logits
    json_schema: str | None = None  # the answer is JSON that this schema, itself JSON, describes
    min_p: float = 0.0  # keep tokens with at least this part of the likeliest one's probability

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, wants: str) -> None:
            if not ok:
                raise RequestError(f"{name} must be {wants}, got {getattr(self, name)!r}")

        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))  # one stop string, not its letters
        whole = {"max_tokens": self.max_tokens, "top_k": self.top_k}
        whole |= {n: getattr(self, n) for n in ("seed", "logprobs") if getattr(self, n) is not None}
        for name, value in whole.items():
            check(type(value) is int, name, "a whole number")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", *ANSWER_PENALTIES):
            check(type(getattr(self, name)) in (int, float), name, "a number")
        check(type(self.stop_loops) is bool, "stop_loops", "true or false")
        check(self.max_tokens >= 1, "max_tokens", "at least 1")
        check(0.0 <= self.temperature <= 100.0, "temperature", "between 0 and 100")
        check(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1")
        check(0.0 <= self.min_p <= 1.0, "min_p", "between 0 and 1")
        check(self.top_k >= 0, "top_k", "0 (off) or more")
        check(
            0.01 <= self.repetition_penalty <= 100.0, "repetition_penalty", "between 0.01 and 100"
        )
        for name in ANSWER_PENALTIES:
            check(-2.0 <= getattr(self, name) <= 2.0, name, "between -2 and 2")
        within = all(-100.0 <= bias <= 100.0 for _, bias in self.logit_bias)
        check(within, "logit_bias", "made of numbers between -100 and 100")
        check(self.seed is None or 0 <= self.seed < 2**63, "seed", "between 0 and 2**63 - 1")
        check(all(self.stop), "stop", "made of non-empty strings")
        check(
            self.logprobs is None or 0 <= self.logprobs <= MAX_TOP_LOGPROBS,
            "logprobs",
            f"between 0 and {MAX_TOP_LOGPROBS}",
        )

    @property
    def is_plainly_greedy(self) -> bool:
        """Whether the likeliest token is taken, and nothing else is asked for."""
        is_bent = self.counts_answer or self.logit_bias
        is_unbent = self.repetition_penalty == 1.0 and not is_bent
        is_free = self.logprobs is None and self.json_schema is None
        return self.temperature == 0.0 and is_unbent and is_free

    @property
    def counts_answer(self) -> bool:
        """Whether the tokens of the answer so far bear on the next one."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class Choice(NamedTuple):
    """A chosen token, and what the model thought of it if that was asked for."""

    token_id: int
    logprob: float | None  # natural logarithm; None unless Sampling.logprobs is set
    alternatives: tuple[tuple[int, float], ...] = ()  # likeliest first


class TokenConstraint(Protocol):
    """Says which tokens may come next in one answer. Belongs to its sampler."""

    def take(self, token_ids: Sequence[int]) -> None:
        """Note the tokens that were given out."""

    def mask(self) -> NDArray[np.bool_]:
        """Say for each token of the vocabulary whether it may come. Raises ModelError."""
        ...


class Sampler:
    """Draws the tokens of one request. Belongs to it; not for many threads."""

    def __init__(self, sampling: Sampling, constraint: TokenConstraint | None = None) -> None:
        """`constraint` None: any token may come."""
        self._sampling = sampling
        self._constraint = constraint
        self._shown: int | None = None  # of the ids, to the constraint; None: nothing yet
        self._generator = torch.Generator()  # on the host, so a seed means the same on any device
        self._seen = SeenTokens()
        self._answer = AnswerTokens()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def choose(self, logits: Tensor, seen_ids: Sequence[int], forced: int | None = None) -> Choice:
        """The next token for logits [V]; `seen_ids` are the prompt's and answer's so far: those of
        the last call, and perhaps more; the first call shows the prompt alone. A token that is
        `forced` is not drawn, only reported on."""
        if self._sampling.counts_answer:
            self._answer.grow(seen_ids)
        if self._constraint is not None:
            if self._shown is not None:
                self._constraint.take(seen_ids[self._shown :])
            self._shown = len(seen_ids)
        token_id = self._draw(logits, seen_ids) if forced is None else forced
        if self._sampling.logprobs is None:
            return Choice(token_id, None)
        logprobs = logits.log_softmax(dim=-1)
        top = logprobs.topk(min(self._sampling.logprobs, len(logprobs)))
        alternatives = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        return Choice(token_id, float(logprobs[token_id]), alternatives)

    def _draw(self, logits: Tensor, seen_ids: Sequence[int]) -> int:
        s = self._sampling
        if s.repetition_penalty != 1.0:
            seen = self._seen.distinct_ids(seen_ids, logits)
            logits = _penalise(logits, seen, s.repetition_penalty)
        if s.counts_answer:
            logits = self._answer.lower(logits, s.presence_penalty, s.frequency_penalty)
        if s.logit_bias:
            ids, bias = zip(*s.logit_bias, strict=True)
            added = torch.tensor(bias, dtype=logits.dtype, device=logits.device)
            place = torch.tensor(ids, device=logits.device)
            logits = logits.index_put((place,), added, accumulate=True)
        if self._constraint is not None:
            may_come = torch.from_numpy(self._constraint.mask()).to(logits.device)
            logits = logits.masked_fill(~may_come, -torch.inf)
        if s.temperature == 0.0:
            best = logits.max(dim=-1)  # one that is no number, where there are some
            # one wait for the device, not one for each; float64 has room for any token id
            value, token_id = torch.stack((best.values.double(), best.indices.double())).tolist()
            if not math.isfinite(value):
                raise NoNumbers(NO_NUMBERS)
            return int(token_id)
        drawn = float(torch.rand(1, generator=self._generator, dtype=torch.float64))
        # From the likeliest down, so that the smallest temperature gives 0 and -inf, never nan.
        scores = (logits - logits.max()) / max(s.temperature, SMALLEST_TEMPERATURE)
        if s.min_p > 0.0:
            scores = scores.masked_fill(scores < math.log(s.min_p), -torch.inf)
        is_cut = 0 < s.top_k < len(scores)
        look = s.top_k if is_cut else min(len(scores), FIRST_LOOK)
        found = _walk(scores, look, is_all=is_cut, top_p=s.top_p, drawn=drawn)
        if found is None:
            found = _walk(scores, len(scores), is_all=True, top_p=s.top_p, drawn=drawn)
            assert found is not None, "a draw ends among all tokens"
        return found


class SeenTokens:
    """The different tokens of a prompt and its answer, as they grow: each is taken in once."""

    def __init__(self) -> None:
        self._taken = 0  # of the ids that were shown
        self._known: set[int] = set()
        self._ids: Tensor | None = None

    def distinct_ids(self, seen_ids: Sequence[int], like: Tensor) -> Tensor:
        """Return the distinct tokens of `seen_ids` on the device of `like`. `seen_ids` begins with
        those of the last call."""
        new = list(dict.fromkeys(i for i in seen_ids[self._taken :] if i not in self._known))
        self._taken = len(seen_ids)
        if new or self._ids is None:
            self._known.update(new)
            more = torch.tensor(new, dtype=torch.int64, device=like.device)
            self._ids = more if self._ids is None else torch.cat((self._ids, more))
        return self._ids


class AnswerTokens:
    """How often each token stands in an answer, as it grows: each is counted once."""

    def __init__(self) -> None:
        self._shown: int | None = None  # of the ids; None: nothing yet, the prompt comes first
        self._counts: Counter[int] = Counter()

    def grow(self, seen_ids: Sequence[int]) -> None:
        """Take in what stands behind the ids of the last call."""
        if self._shown is not None:
            self._counts.update(seen_ids[self._shown :])
        self._shown = len(seen_ids)

    def lower(self, logits: Tensor, presence: float, frequency: float) -> Tensor:
        """Return logits [V] less the penalties for the tokens of the answer. The given logits stay
        as they are, as others may own them."""
        if not self._counts:
            return logits
        ids = torch.tensor(list(self._counts), device=logits.device)
        times = torch.tensor(list(self._counts.values()), dtype=logits.dtype, device=logits.device)
        return logits.index_put((ids,), logits[ids] - presence - frequency * times)


def _walk(scores: Tensor, look: int, *, is_all: bool, top_p: float, drawn: float) -> int | None:
    """Where a draw from [0, 1) ends on its way down the `look` likeliest of scores [V]. `is_all`:
    the others do not count. None: it may end beyond them."""
    is_all = is_all or look == len(scores)
    top = scores.topk(look)  # likeliest first
    likely, ids = top.values.exp().double(), top.indices.cpu()
    # summed in float64: a whole vocabulary must not round away what is drawn among
    total = likely.sum() if is_all else scores.exp().sum(dtype=torch.float64)
    weights = (likely / total).cpu()
    passed = weights.cumsum(dim=-1)
    if not passed[-1].isfinite():
        raise NoNumbers(NO_NUMBERS)
    if not is_all and float(passed[-1]) < top_p and (top_p < 1.0 or drawn >= float(passed[-1])):
        return None
    # Those stay in front of which less than top_p lies; the likeliest always.
    num_kept = max(1, int(((passed - weights) < top_p).sum()))
    mass = float(passed[num_kept - 1]) if is_all or top_p < 1.0 else 1.0
    place = int(torch.searchsorted(passed[:num_kept], drawn * mass, right=True))
    return int(ids[min(place, num_kept - 1)])


def _penalise(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Push tokens seen so far down: positive logits are divided, negative ones multiplied. The
    logits themselves are the caller's, or a recording's, and stay as they are."""
    picked = logits[seen]
    return logits.index_put((seen,), torch.where(picked > 0, picked / penalty, picked * penalty))
