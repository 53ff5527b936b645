"""Host memory: page-aligned, used again, and never lost because it cannot be locked."""

import logging

import pytest
import torch

from kvweave.kv.memory import BufferPool, new_memory


class Runtime:
    """CUDA's runtime as far as locking goes: fails so many times first."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.locked: set[int] = set()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        if self.failures:
            self.failures -= 1
            return 304
        self.locked.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.locked.remove(address)
        return 0


def use(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)


def test_memory_is_locked_while_somebody_looks_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(failures=1)  # the kernel was busy moving pages
    use(runtime, monkeypatch)
    memory = new_memory(5 << 20, pinned=True)
    memory.view[:4] = b"kvw!"
    part = memory.tensor[2:4]
    assert runtime.locked == {memory.tensor.data_ptr()}
    del memory
    assert bytes(part.numpy()) == b"w!"
    assert len(runtime.locked) == 1
    del part
    assert not runtime.locked


def test_memory_that_cannot_be_locked_is_used_unlocked_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Runtime(failures=99)
    use(runtime, monkeypatch)
    with caplog.at_level(logging.WARNING):
        memory = BufferPool(0, pinned=True).take(100)
    memory.view[:4] = b"kvw!"
    assert bytes(memory.tensor[:4].numpy()) == b"kvw!"
    assert not runtime.locked
    assert "cannot be page-locked (CUDA error 304)" in caplog.text
