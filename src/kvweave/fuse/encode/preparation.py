"""What a knowledge base's chunk KV is prepared with: the encoding context and what lies beside.

Written once into the folder of the chunk KV, so that asking finds what ingest has made.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvweave.errors import ConfigError
from kvweave.fuse.encode.contexts import Variant, parse_variant
from kvweave.fuse.encode.extras import EXTRAS

FILE = "preparation.json"
DEFAULT_ENCODING = "filler"


@dataclass(frozen=True, slots=True)
class Preparation:
    """How chunks are encoded."""

    variant: Variant
    extras: tuple[str, ...] = ()  # of EXTRAS

    @classmethod
    def parse(cls, encoding: str = DEFAULT_ENCODING, extras: Sequence[str] = ()) -> "Preparation":
        """Read what the user typed. Raises ConfigError."""
        for name in extras:
            if name not in EXTRAS:
                raise ConfigError(f"extra {name!r} is unknown; known: {', '.join(EXTRAS)}")
        return cls(parse_variant(encoding), tuple(sorted(set(extras))))


def read_preparation(folder: Path) -> Preparation | None:
    """What the chunk KV in `folder` was prepared with; None if nothing was yet."""
    try:
        return _parse_stored(json.loads((folder / FILE).read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ConfigError) as error:
        raise ConfigError(f"{folder / FILE} cannot be read ({error}); delete it") from error


def choose_preparation(
    folder: Path, encoding: str | None = None, extras: Sequence[str] | None = None
) -> Preparation:
    """How to prepare chunk KV in `folder`: each part as given, else as stored, else as usual.

    Raises ConfigError for what was typed before it looks at what is stored.
    """
    wanted = Preparation.parse(DEFAULT_ENCODING if encoding is None else encoding, extras or ())
    stored = read_preparation(folder) if encoding is None or extras is None else None
    if stored is None:
        return wanted
    return Preparation(
        stored.variant if encoding is None else wanted.variant,
        stored.extras if extras is None else wanted.extras,
    )


def write_preparation(folder: Path, preparation: Preparation) -> None:
    """Write how the chunk KV in `folder` is prepared. An upload and what makes KV in the background
    may both do so at once."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {"encoding": str(preparation.variant), "extras": list(preparation.extras)}
    temporary = folder / f"{FILE}.{os.urandom(6).hex()}.tmp"  # nobody else's
    temporary.write_text(json.dumps(stored) + "\n")
    temporary.replace(folder / FILE)


def _parse_stored(stored: object) -> Preparation:
    match stored:
        case {"encoding": str(encoding), "extras": list(extras)}:
            return Preparation.parse(encoding, extras)
    raise ValueError("it is no object with an encoding and a list of extras")
