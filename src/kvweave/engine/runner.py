"""One step: a flat batch of rows, one forward pass, one token for everybody who is through."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvweave.engine.live import Live, is_plainly_greedy
from kvweave.engine.scheduler import Work
from kvweave.model.decoder import Decoder

log = logging.getLogger(__name__)


class Ran(NamedTuple):
    """What a step gave one sequence."""

    work: Work[Live]
    logits: Tensor | None  # [V]; None: there is more of it to compute
    likeliest: int | None  # set when nothing but the likeliest token matters
    error: BaseException | None


def run(decoder: Decoder, works: Sequence[Work[Live]]) -> list[Ran]:
    """Compute the rows of all works. What fails together is tried one by one: whoever is to blame
    fails alone. Rows may run twice; they write what they wrote before."""
    try:
        return _run(decoder, works)
    except Exception as error:
        if len(works) == 1:
            return [Ran(works[0], None, None, error)]
        log.warning("a step of %d requests failed; trying each alone: %s", len(works), error)
        return [ran for work in works for ran in run(decoder, [work])]


@torch.inference_mode()
def _run(decoder: Decoder, works: Sequence[Work[Live]]) -> list[Ran]:
    batch = [work.seq.rows(work.num_rows) for work in works]
    logits = decoder.forward(batch)  # [wanted, V]
    through = [work.seq for work, rows in zip(works, batch, strict=True) if rows.wanted]
    likeliest: list[int] = []
    if through and is_plainly_greedy(through):
        likeliest = logits.argmax(-1).tolist()  # one wait for the device, not one per request
    ran, at = [], 0
    for work, rows in zip(works, batch, strict=True):
        if not rows.wanted:
            ran.append(Ran(work, None, None, None))
            continue
        ran.append(Ran(work, logits[at], likeliest[at] if likeliest else None, None))
        at += 1
    return ran
