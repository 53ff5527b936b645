"""Host memory: page-aligned, used again, and never lost because it cannot be locked."""

import gc
import logging
import mmap
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

from kvweave.errors import TierError
from kvweave.kv.format import memory as memory_module
from kvweave.kv.format.memory import Arena, BufferPool, new_memory
from kvweave.kv.tiers import open_tier
from kvweave.kv.tiers.config import HostTierConfig
from worlds.kv_checks import check_arena


class Runtime:
    """CUDA's runtime as far as locking goes: fails so many times first."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.locked: set[int] = set()
        self.threads: set[str] = set()
        self.unlocks = True

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.threads.add(threading.current_thread().name)
        if self.failures:
            self.failures -= 1
            return 304
        self.locked.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.threads.add(threading.current_thread().name)
        if not self.unlocks:
            return 900  # as while a graph is recorded
        self.locked.remove(address)
        return 0


def use(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(memory_module, "_unlocked_said", False)


def becomes_true(holds: Callable[[], bool]) -> bool:
    give_up_s = time.monotonic() + 5
    while not holds() and time.monotonic() < give_up_s:
        time.sleep(0.001)
    return holds()


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
    assert becomes_true(lambda: not runtime.locked)


def test_memory_that_cannot_be_locked_is_used_unlocked_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Runtime(failures=99)
    use(runtime, monkeypatch)
    monkeypatch.setattr(memory_module, "_allocate_locked", lambda size: None)
    with caplog.at_level(logging.WARNING):
        memory = BufferPool(0, pinned=True).take(100)
    memory.view[:4] = b"kvw!"
    assert bytes(memory.tensor[:4].numpy()) == b"kvw!"
    assert not runtime.locked
    assert "cannot be page-locked (CUDA error 304)" in caplog.text
    assert BufferPool(0, pinned=True).take(100).view
    assert caplog.text.count("page-locked") == 1, "said once, not for every load"


def test_memory_that_cannot_be_registered_is_allocated_locked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(Runtime(failures=99), monkeypatch)
    asked: list[int] = []

    def allocated(size: int) -> torch.Tensor:
        asked.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    monkeypatch.setattr(memory_module, "_allocate_locked", allocated)
    memory = new_memory(5 << 20, pinned=True)
    memory.view[:4] = b"kvw!"
    assert bytes(memory.tensor[:4].numpy()) == b"kvw!"
    assert asked == [5 << 20]
    assert not caplog.text


def test_locking_and_unlocking_leave_other_threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's last CUDA error, and a graph it records, are its own business."""
    runtime = Runtime(failures=1)
    use(runtime, monkeypatch)
    memory = new_memory(5 << 20, pinned=True)
    del memory
    assert becomes_true(lambda: not runtime.locked)
    assert runtime.threads == {"kv-locker"}


def test_memory_that_cannot_be_unlocked_is_never_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other memory at that address would be copied to a GPU from the old pages."""
    runtime = Runtime(failures=0)
    use(runtime, monkeypatch)
    runtime.unlocks = False
    stuck: list[mmap.mmap] = []
    monkeypatch.setattr(memory_module._LOCKER, "_stuck", stuck)
    memory = new_memory(5 << 20, pinned=True)
    memory.view[:4] = b"kvw!"
    del memory
    gc.collect()
    assert becomes_true(lambda: len(stuck) == 1)
    assert stuck[0][:4] == b"kvw!"


def test_a_runtime_that_raises_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(failures=0)
    use(runtime, monkeypatch)
    monkeypatch.setattr(memory_module._LOCKER, "_stuck", [])
    monkeypatch.setattr(memory_module, "_allocate_locked", lambda size: None)
    memory = new_memory(1 << 20, pinned=True)
    monkeypatch.setattr(runtime, "cudaHostUnregister", None)  # calling it is a TypeError
    del memory
    monkeypatch.setattr(runtime, "cudaHostRegister", None)
    assert len(new_memory(1 << 20, pinned=True).view) == 1 << 20


def test_a_host_tier_larger_than_any_memory_is_refused_in_one_line() -> None:
    with pytest.raises(
        TierError, match=r"^cannot take 1,000,000,000\.0 GiB of host memory: .*less$"
    ):
        open_tier(HostTierConfig(10**9 << 30, pinned=False))


def test_an_arena_takes_the_best_hole_and_joins_neighbours() -> None:
    arena = Arena(10 * 16, align=16)
    starts = [arena.take(n * 16) for n in (2, 1, 3, 4)]
    assert starts == [0, 32, 48, 96]
    assert arena.take(1) is None
    arena.give_back(48)
    arena.give_back(0)
    assert arena.take(17) == 0  # two units: the small hole, not the large one
    arena.give_back(32)
    assert arena.take(4 * 16) == 32
    check_arena(arena)


def test_an_arena_survives_random_use() -> None:
    rng = random.Random(1)
    arena = Arena(64 * 16, align=16)
    taken: list[int] = []
    for _ in range(2000):
        if taken and rng.random() < 0.5:
            arena.give_back(taken.pop(rng.randrange(len(taken))))
        else:
            start = arena.take(rng.randint(1, 200))
            if start is not None:
                taken.append(start)
        check_arena(arena)
    for start in taken:
        arena.give_back(start)
    assert arena.take(64 * 16) == 0


def test_giving_back_twice_is_a_bug_that_shows() -> None:
    arena = Arena(160, align=16)
    start = arena.take(16)
    assert start is not None
    arena.give_back(start)
    with pytest.raises(KeyError):
        arena.give_back(start)


def test_the_locker_ends_when_it_is_told_and_waits_for_what_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = Runtime(failures=0)
    use(runtime, monkeypatch)
    begun, slow, unlocked = threading.Event(), threading.Event(), threading.Event()

    def unregister(address: int) -> int:
        begun.set()
        slow.wait(5)
        unlocked.set()
        return 0

    monkeypatch.setattr(runtime, "cudaHostUnregister", unregister)
    locker = memory_module._Locker()
    locker.close()  # nothing was locked: there is no thread
    assert locker.register(4096, 64)
    for _ in range(2):
        locker.bury(4096, mmap.mmap(-1, 4096))
    assert begun.wait(5)
    closing = threading.Thread(target=locker.close)
    closing.start()
    assert becomes_true(lambda: locker._closed)
    assert not locker.register(4096, 64), "nothing is locked any more"
    assert closing.is_alive(), "it waits"
    slow.set()
    closing.join(5)
    assert not closing.is_alive()
    assert unlocked.is_set()
    locker.close()


def test_an_interpreter_ends_its_locker() -> None:
    """Memory that goes with the interpreter is still being unlocked then: a thread that comes back
    from CUDA to no interpreter would abort the process."""
    code = (
        "import time, torch\n"
        "from kvweave.kv.format.memory import new_memory\n"
        "class Runtime:\n"
        "    def cudaHostRegister(self, *_): return 0\n"
        "    def cudaHostUnregister(self, _):\n"
        "        time.sleep(0.2)\n"
        "        print('unlocked', flush=True)\n"
        "        return 0\n"
        "torch.cuda.cudart = Runtime\n"
        "torch.cuda.current_stream = lambda: None\n"
        "kept = [new_memory(1 << 20, pinned=True) for _ in range(3)]\n"
        "del kept[0]\n"
        "time.sleep(0.05)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "unlocked\n", "what was under way"
