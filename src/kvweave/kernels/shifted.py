"""Chunks that all sequences share, shifted for one of them: what attention makes of that.

A shift moves the keys of a chunk by one vector b before they are turned, and its values by another
(`shift.py`). Read-only pages stay as they are. A query q that was turned back by the chunk's start
would get q · R(j) b more of key j. Within a chunk that hardly depends on j: most of a shift lies in
channels that turn slowly. So all keys of a chunk get the mean, one more product with a row:

    q · b',  b' = 1/n Σ_j R(j) b,  j = 0 .. n-1

The row is b' with the values' shift, one for each chunk of a sequence, made once. What falls on the
chunk falls on its values' shift, too. (`bench/shared_drift.py` compares it with shifted copies.)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvweave.kernels.host import on_device
from kvweave.kernels.rope import Angles, Turn, rotate


def mean_turned(by: Tensor, num_tokens: Sequence[int], turn: Turn) -> Tensor:
    """What shifts `by` [..., S, Hk, D] of keys become on the mean over the places of chunks of
    `num_tokens` [S]."""
    turned = rotate(by.flatten(0, -3), _mean_angles(num_tokens, turn, by))
    return turned.view(by.shape)


def _mean_angles(num_tokens: Sequence[int], turn: Turn, like: Tensor) -> Angles:
    """Means of cosine and sine over the places of each chunk: those of the place in its middle,
    times sin(nθ/2) / (n sin(θ/2)). As many as `like` [..., S, Hk, D] has rows."""
    num, chunks = torch.tensor(num_tokens, dtype=torch.float32), len(num_tokens)
    places = torch.cat([(num - 1) / 2, num / 2, torch.tensor([0.5])])
    places = on_device(places, like.device)
    cos, sin = turn(places)
    whole, step = sin[chunks:-1], sin[-1]
    less = whole / (2 * places[chunks:-1, None, None] * step)
    less = torch.where(step == 0, 1.0, less)  # a channel that does not turn
    times = like.shape[:-3].numel()
    each = ((x[:chunks] * less).to(like.dtype).repeat(times, 1, 1) for x in (cos, sin))
    return Angles(*each)
