"""From logits to the next token.

The order is: repetition penalty, temperature, top-k, top-p, draw. Temperature 0 is greedy and uses
no randomness. A seed makes a draw repeatable whatever else runs beside it, because every request
has a generator of its own. Reported log probabilities are the model's, before any of this.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvweave.errors import RequestError

MAX_TOP_LOGPROBS = 20
SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny  # smaller ones would round to 0


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
        for name in ("temperature", "top_p", "repetition_penalty"):
            check(type(getattr(self, name)) in (int, float), name, "a number")
        check(self.max_tokens >= 1, "max_tokens", "at least 1")
        check(0.0 <= self.temperature <= 100.0, "temperature", "between 0 and 100")
        check(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1")
        check(self.top_k >= 0, "top_k", "0 (off) or more")
        check(
            0.01 <= self.repetition_penalty <= 100.0, "repetition_penalty", "between 0.01 and 100"
        )
        check(self.seed is None or 0 <= self.seed < 2**63, "seed", "between 0 and 2**63 - 1")
        check(all(self.stop), "stop", "made of non-empty strings")
        check(
            self.logprobs is None or 0 <= self.logprobs <= MAX_TOP_LOGPROBS,
            "logprobs",
            f"between 0 and {MAX_TOP_LOGPROBS}",
        )


class Choice(NamedTuple):
    """A chosen token, and what the model thought of it if that was asked for."""

    token_id: int
    logprob: float | None  # natural logarithm; None unless Sampling.logprobs is set
    alternatives: tuple[tuple[int, float], ...] = ()  # likeliest first


class Sampler:
    """Draws the tokens of one request. Belongs to it; not for many threads."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator()  # on the host, so a seed means the same on any device
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def choose(self, logits: Tensor, seen_ids: Sequence[int], forced: int | None = None) -> Choice:
        """The next token for logits [V]; `seen_ids` are the prompt's and answer's so far. A token
        that is `forced` is not drawn, only reported on."""
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
            logits = _penalised(logits, seen_ids, s.repetition_penalty)
        if s.temperature == 0.0:
            return int(logits.argmax())
        # From the likeliest down, so that the smallest temperature gives 0 and -inf, never nan.
        scores = (logits - logits.max()).cpu() / max(s.temperature, SMALLEST_TEMPERATURE)
        if 0 < s.top_k < len(scores):
            kept = scores.topk(s.top_k)
            ids, scores = kept.indices, kept.values  # likeliest first
        else:
            scores, ids = scores.sort(descending=True, stable=True)
        weights = scores.softmax(dim=-1)
        if s.top_p < 1.0:
            ahead = weights.cumsum(dim=-1) - weights  # probability of everything likelier
            cut = ahead >= s.top_p
            cut[0] = False  # the likeliest always stays, also when float32 rounds top_p to 0
            weights = weights.masked_fill(cut, 0.0)
        return int(ids[torch.multinomial(weights, 1, generator=self._generator)])


def _penalised(logits: Tensor, seen_ids: Sequence[int], penalty: float) -> Tensor:
    """Push tokens seen so far down: positive logits are divided, negative ones multiplied."""
    seen = torch.tensor(sorted(set(seen_ids)), dtype=torch.int64, device=logits.device)
    picked = logits[seen]
    return logits.index_put((seen,), torch.where(picked > 0, picked / penalty, picked * penalty))
