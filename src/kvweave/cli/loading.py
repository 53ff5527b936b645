"""Opening a model from the command line: the options for it and a spinner meanwhile."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from kvweave.app.weave import Weave

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--model",
        default="smollm2",
        show_default=True,
        help="An embedded name, a folder, a .gguf file or a hub id.",
    ),
    click.option("--device", default="auto", help="auto, cpu, cuda or cuda:N."),
    click.option("--dtype", default="auto", help="auto, float32, bfloat16 or float16."),
    click.option("--quant", default="none", help="none, or int8 (CPU: faster, nearly as good)."),
)


def model_options(command: Command) -> Command:
    """Add --model, --device, --dtype and --quant. Their values are judged where they are used."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def open_weave(*, model: str, **settings: Any) -> "Weave":
    """Load the model, with a spinner if a person is watching."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    if not console.is_terminal:
        return _open(model, settings)
    with console.status(f"loading {escape(model)} …"):
        return _open(model, settings)


def _open(model: str, settings: dict[str, Any]) -> "Weave":
    from kvweave.app.weave import Weave  # brings torch, which takes a second

    return Weave.open(model=model, **settings)
