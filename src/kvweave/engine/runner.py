"""One step: a flat batch of rows, one forward pass, one token for each that is through."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvweave.engine.giving_way import StepGivenUp
from kvweave.engine.scheduler import StepSlice
from kvweave.engine.sequence import EngineSequence, is_plainly_greedy
from kvweave.kernels.host import on_device
from kvweave.kernels.recording import Refusals
from kvweave.model.decoder import Decoder
from kvweave.model.recorded_decode import RecordedDecode, StepResult, one_by_one
from kvweave.model.rows import Rows, wanted_rows

log = logging.getLogger(__name__)
NO_NUMBER = -1  # instead of the likeliest token, where the logits are no numbers
SequenceSlice = StepSlice[EngineSequence]
PlayStep = Callable[[Sequence[Rows]], StepResult | None]


class SliceResult(NamedTuple):
    """What a step gave one sequence."""

    slice: SequenceSlice
    logits: Tensor | None  # [V]; None: there is more of it to compute. Valid until the next step
    likeliest: int | None  # set when nothing but the likeliest token matters
    error: BaseException | None


class StepOutput(NamedTuple):
    """What a step gave."""

    results: list[SliceResult]  # in the order of the slices
    seconds: float  # that it took


class Runner:
    """Computes the common steps of one decoder. Called on the engine thread."""

    def __init__(self, decoder: Decoder, recorded: RecordedDecode | None = None) -> None:
        """`recorded` plays steps in which all sequences decode, or ask over chunks that lie ready;
        None: none are played."""
        self.device = decoder.device
        self._decoder = decoder
        self._recorded = recorded
        self.num_parted = 0  # steps that failed and were tried one request at a time. Any thread

    @property
    def refusals(self) -> list[Refusals]:
        """What could not be recorded of decoding. Any thread."""
        return [] if self._recorded is None else self._recorded.refusals

    def record_ahead(self) -> bool:
        """Record a sort of step that was computed before, between two steps. False: none left."""
        return self._recorded is not None and self._recorded.record_ahead()

    def run(self, slices: Sequence[SequenceSlice], *, may_record: bool = True) -> StepOutput:
        """Compute the rows of all slices. An error is in the result of the slice that caused it.
        Raises StepGivenUp where the decoder's `on_layer` does; such a step may not be recorded on
        the way, because what a recording runs into ends it for good."""
        started_s = time.perf_counter()
        play = None if self._recorded is None else partial(_play, self._recorded, may_record)
        results = self._run(slices, play)
        return StepOutput(results, time.perf_counter() - started_s)

    def _run(self, slices: Sequence[SequenceSlice], play: PlayStep | None) -> list[SliceResult]:
        """What fails together is tried one by one, so that the slice to blame fails alone. Rows may
        run twice; they write what they wrote before."""
        try:
            return self._forward(slices, play)
        except StepGivenUp:
            raise
        except Exception as error:
            if len(slices) == 1:
                return [SliceResult(slices[0], None, None, error)]
            self.num_parted += 1
            log.warning("a step of %d requests failed; trying each alone: %s", len(slices), error)
            # not from a recording: its logits would be overwritten by the next one tried
            return [result for each in slices for result in self._run([each], None)]

    @torch.inference_mode()
    def _forward(self, slices: Sequence[SequenceSlice], play: PlayStep | None) -> list[SliceResult]:
        batch = [each.sequence.rows(each.num_rows) for each in slices]
        played = None if play is None else play(batch)
        logits = self._decoder.forward(batch) if played is None else played.logits  # [wanted, V]
        through = [each.sequence for each, rows in zip(slices, batch, strict=True) if rows.wanted]
        likeliest: list[int] = []
        if through and is_plainly_greedy(through):
            found = logits.argmax(-1) if played is None else played.likeliest
            is_number = logits.gather(-1, found[:, None]).squeeze(-1).isfinite()
            # one wait for the device, not one per request
            likeliest = found.where(is_number, NO_NUMBER).tolist()
        results, at = [], 0
        for each, rows in zip(slices, batch, strict=True):
            if not rows.wanted:
                results.append(SliceResult(each, None, None, None))
                continue
            best = likeliest[at] if likeliest and likeliest[at] != NO_NUMBER else None
            results.append(SliceResult(each, logits[at], best, None))
            at += 1
        return results


def _play(recorded: RecordedDecode, may_record: bool, batch: Sequence[Rows]) -> StepResult | None:
    """What a recorded step gives those of its rows that need logits; None: it is not recorded."""
    singles = one_by_one(batch)
    if singles is None or not any(rows.wanted for rows in batch):
        return None
    played = recorded.play(singles, may_record=may_record)
    if played is None or len(singles) == len(batch):
        return played
    at = on_device(wanted_rows(batch), played.logits.device)
    return StepResult(played.logits[at], played.likeliest[at])
