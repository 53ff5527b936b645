"""The `run` and `run_alone` fixtures."""

from running import run, run_alone

__all__ = ["run", "run_alone"]
