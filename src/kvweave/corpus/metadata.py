"""What a document's owner says about it, and questions that are asked of such documents alone.

    metadata    {"product": "zorb", "year": 2024}
    filter      {"product": "zorb"}                     equal
                {"product": ["zorb", "blint"]}          one of these
                {"year": {"gte": 2023, "lt": 2025}}     within a range; of texts by the alphabet

All conditions of a filter must hold. Texts and numbers are never equal to each other.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvweave.errors import RequestError

MetadataValue = str | int | float
Metadata = Mapping[str, MetadataValue]

KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
KEYS = "letters, digits, _, . and -, at most 64, a letter or _ first"
MOST_KEYS = 32  # of one document, or of one filter
LONGEST_VALUE = 1024  # characters
MOST_VALUES = 256  # that one condition may list
COMPARISONS = {"eq": "=", "gt": ">", "gte": ">=", "lt": "<", "lte": "<="}


def check_metadata(metadata: Mapping[str, Any]) -> dict[str, MetadataValue]:
    """A copy. Raises RequestError for what cannot be metadata."""
    if len(metadata) > MOST_KEYS:
        raise RequestError(f"metadata has {len(metadata)} keys; it may have {MOST_KEYS}")
    return {_key(key): _value(key, value) for key, value in metadata.items()}


def digest_text(metadata: Metadata) -> str:
    """One text for equal metadata; empty for none."""
    return json.dumps(dict(sorted(metadata.items()))) if metadata else ""


class FilterCondition(NamedTuple):
    """One thing that must be so."""

    key: str
    operator: str  # of SQL
    values: tuple[MetadataValue, ...]  # any of them


@dataclass(frozen=True, slots=True)
class MetadataFilter:
    """Which documents count. `parse` makes it."""

    conditions: tuple[FilterCondition, ...] = ()

    @classmethod
    def parse(cls, given: Mapping[str, Any] | None) -> "MetadataFilter":
        """Read plain values. Raises RequestError for what cannot be meant."""
        given = given or {}
        if len(given) > MOST_KEYS:
            raise RequestError(f"filter has {len(given)} keys; it may have {MOST_KEYS}")
        return cls(tuple(c for key, wanted in given.items() for c in _conditions(key, wanted)))

    def __bool__(self) -> bool:
        return bool(self.conditions)

    def documents_query(self) -> tuple[str, list[MetadataValue]]:
        """SQL that selects the ids of documents it holds for, and its parameters."""
        parts: list[str] = []
        parameters: list[MetadataValue] = []
        for key, operator, values in self.conditions:
            # numbers stand in front of all texts in SQLite's order: compare like with like
            any_of = " OR ".join(
                f"(value {operator} ? AND (typeof(value) = 'text') = {isinstance(v, str):d})"
                for v in values
            )
            parts.append(f"SELECT document_id FROM metadata WHERE key = ? AND ({any_of})")
            parameters += [key, *values]
        return " INTERSECT ".join(parts), parameters


def parse_pairs(pairs: Sequence[str], option: str) -> dict[str, MetadataValue]:
    """KEY=VALUE as people type it: what reads as a number is one. Raises RequestError."""
    found: dict[str, MetadataValue] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise RequestError(f"{option} {pair!r} has no value; write KEY=VALUE")
        found[_key(key.strip())] = _number(text) if _is_number(text) else text
    return check_metadata(found)


def _conditions(key: str, wanted: Any) -> list[FilterCondition]:
    _key(key)
    if isinstance(wanted, list | tuple):
        if not 1 <= len(wanted) <= MOST_VALUES:
            raise RequestError(
                f"filter {key!r} lists {len(wanted)} values; list 1 to {MOST_VALUES}"
            )
        return [FilterCondition(key, "=", tuple(_value(key, each) for each in wanted))]
    if isinstance(wanted, Mapping):
        unknown = [name for name in wanted if name not in COMPARISONS]
        if unknown or not wanted:
            named = repr(unknown[0]) if unknown else "nothing"
            known = ", ".join(COMPARISONS)
            raise RequestError(f"filter {key!r} compares by {named}; known: {known}")
        return [
            FilterCondition(key, COMPARISONS[name], (_value(key, value),))
            for name, value in wanted.items()
        ]
    return [FilterCondition(key, "=", (_value(key, wanted),))]


def _key(key: object) -> str:
    if not isinstance(key, str) or not KEY.fullmatch(key):
        raise RequestError(f"{str(key)[:64]!r} is no key of metadata; use {KEYS}")
    return key


def _value(key: object, value: object) -> MetadataValue:
    is_plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    if not is_plain or (isinstance(value, float) and not math.isfinite(value)):
        raise RequestError(f"metadata {key!r} must be a text or a number, got {str(value)[:40]!r}")
    assert isinstance(value, str | int | float), "looked at above"
    if isinstance(value, int) and abs(value) >= 2**63:
        raise RequestError(f"metadata {key!r} is beyond 64 bits; make it a text")
    if isinstance(value, str):
        if len(value) > LONGEST_VALUE:
            raise RequestError(f"metadata {key!r} is longer than {LONGEST_VALUE} characters")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise RequestError(f"metadata {key!r} is no valid Unicode text") from None
    return value


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)
