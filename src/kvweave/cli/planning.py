"""What a user allows the planner: options that ask and plan share."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])
BOUND = 0.02  # fuse.calibration.BOUND, without importing it for --help; a test holds them equal

_OPTIONS = (
    click.option(
        "--bound",
        type=click.FloatRange(min=0.0),
        default=BOUND,
        help=f"auto: mean KL in nats per token that reuse may cost ({BOUND}).",
    ),
    click.option(
        "--order",
        type=click.Choice(["keep", "free"]),
        default="keep",
        help="auto: free lets chunks move to where more is exact (keep).",
    ),
)


def planning_options(command: Command) -> Command:
    """Add --bound and --order."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
