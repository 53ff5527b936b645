"""The `run` and `run_alone` fixtures."""

from worlds.running import run, run_alone

__all__ = ["run", "run_alone"]
