"""Parameters of paths and queries that several routes have."""

from typing import Any

from fastapi import Path

from kvweave.serve.errors import ApiError
from kvweave.serve.wire.base import NAME_PATTERN

Name: Any = Path(
    description="A knowledge base: letters, digits, - and _",
    json_schema_extra={"pattern": NAME_PATTERN},
)


def check_limit(limit: int, most: int) -> int:
    """Raise a 400 unless a `limit` of a query can be meant."""
    if not 1 <= limit <= most:
        message = f"'limit' must be between 1 and {most}, got {limit}"
        raise ApiError(400, message, param="limit")
    return limit
