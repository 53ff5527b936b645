"""The `run` and `run_alone` fixtures; every command here starts from the default settings."""

import pytest

from worlds.running import run, run_alone, use_default_settings

__all__ = ["run", "run_alone"]


@pytest.fixture(autouse=True)
def default_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that start a process of their own, too."""
    use_default_settings(monkeypatch)
