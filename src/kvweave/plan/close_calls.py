"""How many fused answers turn out close calls, and are computed a second time.

Calibration measured a share on its questions. What people ask may be less clear cut: where every
second answer is a close call, fusing costs more than it saves, and only those who count see it.
"""

# answers that calibration's figure counts as; few, because a close call costs a whole prefill
MEASURED_WEIGHT = 4.0
FADE = 0.98  # of what was seen, with every answer, fused or not: about the last fifty count


class CloseCalls:
    """Fused answers of one planner, and those that were close. Not thread-safe."""

    def __init__(self) -> None:
        self._answers = 0.0
        self._close = 0.0

    def push(self, is_close: bool | None) -> None:
        """An answer got its first token. None: it was not fused. What was seen fades all the same,
        so that fusing is tried again after a while."""
        self._answers = FADE * self._answers + (is_close is not None)
        self._close = FADE * self._close + bool(is_close)

    def share(self, measured: float) -> float:
        """The chance that the next one is close; `measured` by calibration."""
        weight = MEASURED_WEIGHT + self._answers
        return (MEASURED_WEIGHT * measured + self._close) / weight
