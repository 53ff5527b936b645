"""The limits of `kvweave serve` as options, and its knowledge bases by name."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvweave.cli.numbers import Amount
from kvweave.errors import ConfigError

if TYPE_CHECKING:
    from kvweave.app.libraries.libraries import LibraryKey
    from kvweave.serve.limits import Limits

Command = TypeVar("Command", bound=Callable[..., Any])

MIB = 1 << 20

_OPTIONS = (
    click.option(
        "--running", type=click.IntRange(1), default=64, help="Answers computed at once [64]."
    ),
    click.option(
        "--waiting", type=click.IntRange(0), default=128, help="Answers that may queue [128]."
    ),
    click.option("--max-body-mb", type=Amount(0.001), default=8, help="Of a request [8]."),
    click.option("--max-upload-mb", type=Amount(0.001), default=64, help="Of an upload [64]."),
    click.option("--timeout", type=Amount(0), default=600, help="Seconds per answer [600]."),
    click.option(
        "--open-kbs", type=click.IntRange(1), default=4, help="Knowledge bases open at a time [4]."
    ),
    click.option(
        "--host-gb",
        type=Amount(0.001),
        default=8,
        help="Host memory for chunk KV, an equal part for each of them [8].",
    ),
    click.option(
        "--grace",
        type=Amount(0),
        default=10,
        help="Seconds that answers may go on after Ctrl-C or SIGTERM [10].",
    ),
    click.option(
        "--lame",
        type=Amount(0),
        default=0,
        help="Seconds before that, in which /readyz says 503 and new work is refused [0].",
    ),
)


def limit_options(command: Command) -> Command:
    """Add --running, --waiting, --max-body-mb and so on: see `_OPTIONS`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def make_limits(numbers: Mapping[str, float]) -> "Limits":
    from kvweave.serve.limits import Limits

    return Limits(
        running=int(numbers["running"]),
        waiting=int(numbers["waiting"]),
        body_bytes=int(numbers["max_body_mb"] * MIB),
        upload_bytes=int(numbers["max_upload_mb"] * MIB),
        request_s=numbers["timeout"],
    )


def parse_folders(given: Sequence[str]) -> "dict[LibraryKey, Path]":
    """NAME=DIR or TENANT/NAME=DIR. Raises ConfigError."""
    from kvweave.app.libraries.libraries import LibraryKey, check_name, check_tenant
    from kvweave.errors import RequestError

    folders: dict[LibraryKey, Path] = {}
    for text in given:
        name, equals, folder = text.partition("=")
        tenant, slash, rest = name.partition("/")
        place = LibraryKey(tenant, rest) if slash else LibraryKey("", name)
        if not equals or not folder or (slash and not tenant):
            raise ConfigError(f"--kb {text!r} names no folder; write NAME=DIR or TENANT/NAME=DIR")
        try:
            check_name(place.name)
        except RequestError as error:
            raise ConfigError(f"--kb {text!r}: {error}") from error
        check_tenant(place.tenant)
        if place in folders:
            raise ConfigError(f"--kb {name} is there twice; leave one out")
        folders[place] = Path(folder)
    return folders
