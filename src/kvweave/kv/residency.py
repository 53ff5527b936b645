"""The words for where a chunk's KV is, and why it is not."""

from enum import Enum, StrEnum
from typing import NamedTuple


class Residency(Enum):
    """What `peek` found."""

    HERE = "here"  # some tier has it
    ARRIVING = "arriving"  # on its way to host memory for another request
    ABSENT = "absent"


class Miss(StrEnum):
    """Why a chunk's KV cannot be had: goes into counters and explain records."""

    ABSENT = "absent"  # no tier has it
    CORRUPT = "corrupt"  # its bytes did not match their checksum; put into quarantine
    FOREIGN = "foreign"  # written by another version; left alone
    TIER_FAILED = "tier failed"  # the tier that has it raised an error
    TOO_SLOW = "too slow"  # the tier did not answer before its deadline


class Peek(NamedTuple):
    """Where a chunk's KV was a moment ago."""

    residency: Residency
    tier: str | None  # fastest tier that has it
    size_bytes: int | None
