"""How far one way of answering is from full prefill, measured on the answer at hand.

Both are watched over full prefill's own first tokens: KL(full ‖ way) of the next token, position by
position, as calibration and audit have it. A way that gave other tokens must be asked once more,
with full's put into its mouth (`Question.forced`).
"""

from typing import NamedTuple

import torch

from kvweave.app.answer.answer_stream import WatchedTokens
from kvweave.calibrate.trials import judge

WATCHED = 16  # tokens of an answer at most: each is a float per word of the vocabulary


class MeasuredQuality(NamedTuple):
    """One way against full prefill."""

    kl: float  # nats per token, mean over the positions
    same_first: bool  # both would begin with the same token
    positions: int  # that were compared


def is_comparable(full: WatchedTokens, way: WatchedTokens) -> bool:
    """Whether a way was watched over full prefill's tokens: it gave the same ones, or had to."""
    return len(full.token_ids) > 0 and way.token_ids == full.token_ids


def measure_quality(full: WatchedTokens, way: WatchedTokens) -> MeasuredQuality:
    """Of a way that `is_comparable`."""
    assert is_comparable(full, way), "both are watched over the same tokens"
    exact, other = torch.stack(full.distributions), torch.stack(way.distributions)
    score = judge(exact, other, full.token_ids)
    return MeasuredQuality(score.kl_mean, not score.first_flips, len(full.token_ids))
