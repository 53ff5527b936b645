"""Recordings that fail: for want of memory one size for a while, for any other reason for good."""

import logging

import pytest
import torch

from kvweave.kernels import recording
from kvweave.kernels.recording import Refusals, count_refusals, is_out_of_memory

SHORT = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nAnd a hint.")
BROKEN = RuntimeError("operation not permitted when stream is capturing")


def test_want_of_memory_is_known_by_any_of_its_names() -> None:
    assert is_out_of_memory(SHORT)
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"))
    assert not is_out_of_memory(BROKEN)
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access"))


def test_want_of_memory_is_known_behind_the_error_that_ending_a_recording_raised() -> None:
    def record() -> None:
        try:
            raise SHORT
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error")

    with pytest.raises(RuntimeError, match="previous") as found:
        record()
    assert is_out_of_memory(found.value)


def test_a_size_without_memory_pauses_and_no_other_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recording, "PAUSE", 3)
    refusals = Refusals("decoding", "steps take longer")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert refusals.may_record(8)
            refusals.note_failure(8, SHORT)
            assert refusals.may_record(4)
            assert [refusals.may_record(8) for _ in range(3)] == [False] * 3
    (line,) = caplog.messages
    assert line.startswith("decoding of 8 rows cannot be recorded for want of memory (CUDA out of")
    assert "hint" not in line
    assert count_refusals([refusals, refusals]) == {
        "recordings_failed": 0,
        "recordings_without_memory": 4,
    }


def test_any_other_failure_ends_a_kind_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    layers, decoding = Refusals("layers", "prefills take longer"), Refusals("decoding", "")
    with caplog.at_level(logging.WARNING):
        layers.note_failure(64, BROKEN)
    assert not any(layers.may_record(rows) for rows in (64, 16) * 2000)
    assert decoding.may_record(64)
    assert caplog.messages == [
        "layers cannot be recorded (operation not permitted when stream is capturing): "
        "prefills take longer"
    ]
    assert count_refusals([layers, decoding])["recordings_failed"] == 1
