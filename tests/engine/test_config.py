"""The engine's settings: what is checked, and what follows the device."""

import subprocess
import sys

import pytest

from kvweave.engine.config import EngineConfig, for_device
from kvweave.errors import ConfigError

CFG = EngineConfig(page_tokens=4, step_rows=8, alone_rows=32, guess_rows=4)


def test_the_rows_of_a_guess_follow_the_device() -> None:
    cpu = for_device(EngineConfig(), "cpu").guess_rows
    cuda = for_device(EngineConfig(), "cuda").guess_rows
    assert cpu is not None
    assert cuda is not None
    assert cpu < cuda
    assert for_device(CFG, "cuda").guess_rows == CFG.guess_rows
    with pytest.raises(ConfigError, match="guess_rows must be at least 1"):
        EngineConfig(guess_rows=0)


def test_background_steps_are_the_shortest() -> None:
    for device in ("cpu", "cuda"):
        cfg = for_device(EngineConfig(), device)
        assert cfg.background_rows is not None
        assert cfg.guess_rows is not None
        assert cfg.background_rows < cfg.guess_rows
    assert for_device(EngineConfig(), "cpu").background_rows == 32
    with pytest.raises(ConfigError, match="background_rows must be at least 1"):
        EngineConfig(background_rows=0)


def test_pages_follow_the_device_unless_they_are_given() -> None:
    sizes = [for_device(EngineConfig(), d).page_tokens for d in ("cpu", "cuda")]
    assert sizes == [32, 64]
    assert for_device(CFG, "cuda").page_tokens == CFG.page_tokens
    with pytest.raises(ConfigError, match="at least one page"):
        EngineConfig(page_tokens=64, pool_tokens=32)


def test_steps_are_longer_where_a_short_one_leaves_the_device_idle() -> None:
    cpu, cuda = (for_device(EngineConfig(), d) for d in ("cpu", "cuda"))
    for name in ("step_rows", "alone_rows"):
        assert getattr(cuda, name) > getattr(cpu, name)
        assert getattr(for_device(CFG, "cuda"), name) == getattr(CFG, name)


def test_chunks_are_shared_where_kernels_can_read_them_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for found in (None, object()):
        monkeypatch.setattr("kvweave.engine.config.find_spec", lambda name, found=found: found)
        assert for_device(EngineConfig(), "cpu").share_chunks is False
        assert for_device(EngineConfig(), "cuda").share_chunks is (found is not None)
        assert for_device(EngineConfig(share_chunks=False), "cuda").share_chunks is False
        assert for_device(EngineConfig(share_chunks=True), "cpu").share_chunks is True
    assert for_device(EngineConfig(shared_codec="int8"), "cuda").share_chunks is True
    with pytest.raises(ConfigError, match="set share_chunks"):
        for_device(EngineConfig(shared_codec="int8"), "cpu")


def test_a_pool_smaller_than_a_page_of_the_device_is_refused() -> None:
    small = EngineConfig(pool_tokens=48)
    assert for_device(small, "cpu").page_tokens == 32
    with pytest.raises(ConfigError, match="at least one page"):
        for_device(small, "cuda")


def test_settings_scheduling_and_pages_need_no_torch() -> None:
    modules = ("config", "scheduler", "pages", "tombstones")
    imports = "".join(f"import kvweave.engine.{name}\n" for name in modules)
    script = f"import sys\nsys.modules['torch'] = None\n{imports}"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_codes_are_for_chunks_that_are_shared() -> None:
    assert EngineConfig(share_chunks=True, shared_codec="int8").shared_codec == "int8"
    with pytest.raises(ConfigError, match="set share_chunks"):
        EngineConfig(share_chunks=False, shared_codec="int8")
    with pytest.raises(ConfigError, match="one of raw, int8"):
        EngineConfig(share_chunks=True, shared_codec="fp8")  # type: ignore[arg-type]
