"""Many prefills of one prompt, judged side by side on the same answer.

Each trial fills its own KV; then one answer is fed behind all of them at once (teacher forcing) and
the distributions are compared with those of full prefill, KL(full ‖ trial). All trials of a prompt
have its length, so their KV is one dense batch and a step costs little more than a single one.

Shapes: B trials, T tokens of the prompt, A tokens of the answer, V vocabulary, L layers, Hk KV
heads, D head dim.
"""

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvweave.fuse.protocol import FusionDecoder
from kvweave.kernels.attention import attend_grouped
from kvweave.kernels.rope import Angles, rotate


class TrialScore(NamedTuple):
    """One trial against full prefill, on one answer."""

    kl_mean: float  # nats per token
    kl_first: float  # at the first token
    kl_max: float
    nll: float  # of the answer under the trial, nats per token
    top1: float  # share of tokens where both would choose the same
    first_flips: bool  # the first token would be another
    regret: float = 0.0  # nats by which full prefill prefers its own first token to the trial's
    margin: float = math.inf  # nats between the trial's first token and its second choice


class TrialKV:
    """One trial's part of the batch: a KVBuffer of fixed size."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys = keys  # [L, room, Hk, D]
        self._values = values
        self._tokens = 0

    def reserve(self, num_tokens: int) -> None:
        assert num_tokens <= self._keys.shape[1], "a trial's room is fixed"
        self._tokens = max(self._tokens, num_tokens)

    def keys(self, layer: int) -> Tensor:
        return self._keys[layer, : self._tokens]

    def values(self, layer: int) -> Tensor:
        return self._values[layer, : self._tokens]


class Trials:
    """Room for `num_trials` prefills of a prompt of `num_tokens`. One thread."""

    def __init__(
        self, decoder: FusionDecoder, num_trials: int, num_tokens: int, answer_room: int
    ) -> None:
        spec = decoder.spec
        room = num_tokens + answer_room
        shape = (spec.num_layers, num_trials, room, spec.num_kv_heads, spec.head_dim)
        like = decoder.embed(torch.zeros(1, dtype=torch.int64, device=decoder.device))
        self._decoder = decoder
        self._num_tokens = num_tokens
        # [L, B, T + A, Hk, D], keys turned
        self.keys = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.values = torch.empty_like(self.keys)

    def kv(self, trial: int) -> TrialKV:
        """The buffer that trial number `trial` prefills into."""
        return TrialKV(self.keys[:, trial], self.values[:, trial])

    @torch.inference_mode()
    def follow(self, first_logits: Tensor, answer: Sequence[int]) -> Tensor:
        """Log probabilities [B, A, V] when every trial is fed `answer`.

        `first_logits` [B, V] are those of the prompt's last token.
        """
        num_trials = len(first_logits)
        if len(answer) > 1:
            fed = torch.tensor(answer[:-1], device=self._decoder.device)
            logits = self._step(fed.expand(num_trials, -1), self._num_tokens)
            first_logits = torch.cat([first_logits[:, None], logits], dim=1)
        else:
            first_logits = first_logits[:, None]
        return first_logits.float().log_softmax(-1)

    @torch.inference_mode()
    def greedy(
        self, first_logits: Tensor, eos_ids: Collection[int], max_tokens: int
    ) -> list[list[int]]:
        """The likeliest continuation of every trial, up to and including an end token."""
        token = first_logits.argmax(-1)  # [B]
        drawn = [token]
        ends = torch.tensor(sorted(eos_ids), dtype=torch.int64, device=token.device)
        ended = torch.isin(token, ends)
        for i in range(max_tokens - 1):
            if bool(ended.all()):  # short answers are common, and a step waits for nothing else
                break
            token = self._step(token[:, None], self._num_tokens + i)[:, 0].argmax(-1)
            drawn.append(token)
            ended |= torch.isin(token, ends)
        return [_until(row, eos_ids) for row in torch.stack(drawn, dim=1).tolist()]

    def _step(self, ids: Tensor, start: int) -> Tensor:
        """Feed ids [B, n] at positions start.. behind every trial: logits [B, n, V]."""
        decoder, (num_trials, count) = self._decoder, ids.shape
        positions = torch.arange(start, start + count, device=decoder.device)
        one = decoder.angles(positions)
        angles = Angles(one.cos.repeat(num_trials, 1, 1), one.sin.repeat(num_trials, 1, 1))
        seen = torch.arange(start + count, device=decoder.device) <= positions[:, None]
        h = decoder.embed(ids.flatten())
        for layer in range(decoder.spec.num_layers):
            projected = decoder.qkv(layer, h)
            keys = self.keys[layer, :num_trials, : start + count]  # [B, N, Hk, D]
            values = self.values[layer, :num_trials, : start + count]
            shape = (num_trials, count, *keys.shape[2:])
            keys[:, start:] = rotate(projected.k, angles).view(shape)
            values[:, start:] = projected.v.reshape(shape)
            q = rotate(projected.q, angles).view(num_trials, count, -1, keys.shape[-1])
            o = attend_grouped(q, keys, values, seen if count > 1 else None)
            h = decoder.finish(layer, h, o.flatten(0, 1))
        return decoder.logits(h).view(num_trials, count, -1)


def judge(full: Tensor, trial: Tensor, answer: Sequence[int]) -> TrialScore:
    """Compare log probabilities [A, V] of a trial with those of full prefill."""
    kl = (full.exp() * (full - trial)).sum(-1).clamp_min(0.0)  # below 0 is rounding
    at = torch.tensor(answer, device=trial.device)
    nll = -trial.gather(1, at[:, None]).mean()
    same = full.argmax(-1) == trial.argmax(-1)
    regret = full[0].max() - full[0, trial[0].argmax()]
    best, second = trial[0].topk(2).values
    means = [kl.mean(), kl[0], kl.max(), nll, same.float().mean()]
    figures = torch.stack([*means, regret, best - second])
    kl_mean, kl_first, kl_max, nats, top1, lost, ahead = figures.tolist()
    return TrialScore(kl_mean, kl_first, kl_max, nats, top1, not bool(same[0]), lost, ahead)


def _until(tokens: list[int], ends: Collection[int]) -> list[int]:
    for i, token in enumerate(tokens):
        if token in ends:
            return tokens[: i + 1]
    return tokens
