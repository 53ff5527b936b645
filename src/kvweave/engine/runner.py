"""One step: a flat batch of rows, one forward pass, one token for everybody who is through."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvweave.engine.scheduler import Work
from kvweave.engine.sequence import EngineSequence, is_plainly_greedy
from kvweave.model.decoder import Decoder
from kvweave.model.recorded_decode import RecordedDecode, is_decode

log = logging.getLogger(__name__)


class Ran(NamedTuple):
    """What a step gave one sequence."""

    work: Work[EngineSequence]
    logits: Tensor | None  # [V]; None: there is more of it to compute
    likeliest: int | None  # set when nothing but the likeliest token matters
    error: BaseException | None


def run(
    decoder: Decoder, works: Sequence[Work[EngineSequence]], recorded: RecordedDecode | None = None
) -> list[Ran]:
    """Compute the rows of all works. What fails together is tried one by one: whoever is to blame
    fails alone. Rows may run twice; they write what they wrote before.

    Logits of a step that was `recorded` are valid until the next step."""
    try:
        return _run(decoder, works, recorded)
    except Exception as error:
        if len(works) == 1:
            return [Ran(works[0], None, None, error)]
        log.warning("a step of %d requests failed; trying each alone: %s", len(works), error)
        # not from a recording: its logits would be overwritten by the next one tried
        return [ran for work in works for ran in run(decoder, [work])]


@torch.inference_mode()
def _run(
    decoder: Decoder, works: Sequence[Work[EngineSequence]], recorded: RecordedDecode | None
) -> list[Ran]:
    batch = [work.seq.rows(work.num_rows) for work in works]
    played = recorded.play(batch) if recorded is not None and is_decode(batch) else None
    logits = decoder.forward(batch) if played is None else played.logits  # [wanted, V]
    through = [work.seq for work, rows in zip(works, batch, strict=True) if rows.wanted]
    likeliest: list[int] = []
    if through and is_plainly_greedy(through):
        found = logits.argmax(-1) if played is None else played.likeliest
        likeliest = found.tolist()  # one wait for the device, not one per request
    ran, at = [], 0
    for work, rows in zip(works, batch, strict=True):
        if not rows.wanted:
            ran.append(Ran(work, None, None, None))
            continue
        ran.append(Ran(work, logits[at], likeliest[at] if likeliest else None, None))
        at += 1
    return ran
