"""One step: a flat batch of rows, one forward pass, one token for each that is through."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvweave.engine.scheduler import StepSlice
from kvweave.engine.sequence import EngineSequence, is_plainly_greedy
from kvweave.kernels.host import Returning, on_device
from kvweave.kernels.recording import Refusals
from kvweave.model.decoder import Decoder
from kvweave.model.recorded_decode import RecordedDecode, StepResult, one_by_one
from kvweave.model.rows import Rows, wanted_rows

log = logging.getLogger(__name__)
NO_NUMBER = -1  # instead of the likeliest token, where the logits are no numbers
SequenceSlice = StepSlice[EngineSequence]
PlayStep = Callable[[Sequence[Rows]], StepResult | None]


class StepGivenUp(Exception):
    """A step was stopped: nothing came of it, and nothing has changed."""


class SliceResult(NamedTuple):
    """What a step gave one sequence."""

    slice: SequenceSlice
    # [W, V] of its last known row and of those of its draft; None: there is more of it to compute.
    # Valid until the next step
    logits: Tensor | None
    likeliest: Sequence[int | None]  # [W]; None where more than the likeliest token matters
    error: BaseException | None


class StepOutput(NamedTuple):
    """What a step gave."""

    results: list[SliceResult]  # in the order of the slices
    seconds: float  # that it took


class _Clock:
    """How long a device took for what it was told between two moments of the host."""

    def __init__(self, device: torch.device) -> None:
        self._events = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2 * (device.type == "cuda"))
        ]
        self._from_s = time.perf_counter()
        self._seconds = 0.0
        if self._events:
            self._events[0].record()

    def stop(self) -> None:
        self._seconds = time.perf_counter() - self._from_s
        if self._events:
            self._events[1].record()

    def seconds(self) -> float:
        """Waits for the device."""
        if self._events:
            began, ended = self._events
            ended.synchronize()
            self._seconds = began.elapsed_time(ended) / 1e3
        return self._seconds


class OrderedStep:
    """A step that a device is told of."""

    def __init__(
        self, slices: Sequence[SequenceSlice], batch: Sequence[Rows], logits: Tensor, best: Tensor
    ) -> None:
        """`logits` [wanted, V] and, if all of them take the likeliest token, which one that is in
        `best` [wanted]; empty otherwise."""
        self._slices = slices
        self._batch = batch
        self._logits = logits
        self._best = Returning(best)

    def finish(self) -> list[SliceResult]:
        """One wait for the device, not one per request."""
        likeliest: list[int] = self._best.wait().tolist()
        results, at = [], 0
        for each, rows in zip(self._slices, self._batch, strict=True):
            if not rows.wanted:
                results.append(SliceResult(each, None, (), None))
                continue
            end = at + len(rows.wanted)
            best = [None if i == NO_NUMBER else i for i in likeliest[at:end]]
            best = best or [None] * len(rows.wanted)
            results.append(SliceResult(each, self._logits[at:end], best, None))
            at = end
        return results


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
        results = self._order(slices, self._player(may_record))()
        return StepOutput(results, time.perf_counter() - started_s)

    def order(self, slices: Sequence[SequenceSlice]) -> Callable[[], StepOutput]:
        """Order the rows of all slices as `run` does, up to where the host would wait.

        Returns what waits for the results; call it before another step is ordered. The device may
        be given other work in between. Steps that give way are not ordered.
        """
        clock = _Clock(self.device)
        finish = self._order(slices, self._player(may_record=True))
        clock.stop()
        return lambda: StepOutput(finish(), clock.seconds())

    def _player(self, may_record: bool) -> PlayStep | None:
        return None if self._recorded is None else partial(_play, self._recorded, may_record)

    def _order(
        self, slices: Sequence[SequenceSlice], play: PlayStep | None
    ) -> Callable[[], list[SliceResult]]:
        try:
            step = self._forward(slices, play)
        except StepGivenUp:
            raise
        except Exception as error:
            results = self._part(slices, error)
            return lambda: results

        def finish() -> list[SliceResult]:
            try:
                return step.finish()
            except Exception as error:
                return self._part(slices, error)

        return finish

    def _part(self, slices: Sequence[SequenceSlice], error: Exception) -> list[SliceResult]:
        """What failed together is tried one by one, so that the slice to blame fails alone. Rows
        may run twice; they write what they wrote before."""
        if len(slices) == 1:
            return [SliceResult(slices[0], None, (), error)]
        self.num_parted += 1
        log.warning("a step of %d requests failed; trying each alone: %s", len(slices), error)
        # not from a recording: its logits would be overwritten by the next one tried
        return [result for each in slices for result in self._order([each], None)()]

    @torch.inference_mode()
    def _forward(self, slices: Sequence[SequenceSlice], play: PlayStep | None) -> OrderedStep:
        batch = [each.sequence.rows(each.num_rows) for each in slices]
        played = None if play is None else play(batch)
        logits = self._decoder.forward(batch) if played is None else played.logits  # [wanted, V]
        through = [each.sequence for each, rows in zip(slices, batch, strict=True) if rows.wanted]
        best = torch.empty(0, dtype=torch.int64)
        if through and is_plainly_greedy(through):
            found = logits.argmax(-1) if played is None else played.likeliest
            is_number = logits.gather(-1, found[:, None]).squeeze(-1).isfinite()
            best = found.where(is_number, NO_NUMBER)
        return OrderedStep(slices, batch, logits, best)


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
