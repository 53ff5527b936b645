"""The words for where a chunk's KV is, and why it is not."""

from enum import Enum
from typing import NamedTuple


class Residency(Enum):
    """What `peek` found."""

    HERE = "here"  # some tier has it
    ARRIVING = "arriving"  # on its way to host memory for another request
    ABSENT = "absent"


class Peek(NamedTuple):
    """Where a chunk's KV was a moment ago."""

    residency: Residency
    tier: str | None  # fastest tier that has it
    size_bytes: int | None
