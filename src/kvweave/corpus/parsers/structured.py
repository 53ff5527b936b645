"""JSON and YAML. A list whose objects have a text field is a document for each; anything else is
one document with a line for each value, named by the way to it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvweave.corpus.parsers.base import (
    ID_FIELDS,
    TEXT_FIELDS,
    TITLE_FIELDS,
    ParsedRecord,
    ParsedRow,
    ParseLimits,
    check_length,
    decode,
    field,
    keyed_records,
    lone_record,
    raw_field,
    row_metadata,
)
from kvweave.errors import CorpusError

MOST_VALUES = 1_000_000  # of one file: aliases of YAML can make a small file huge
MOST_DEPTH = 200


def parse(path: Path, data: bytes, limits: ParseLimits) -> list[ParsedRecord]:
    text = decode(data)
    values = [_json(text)] if path.suffix.lower() == ".json" else _yaml(text)
    whole = values[0] if len(values) == 1 else values
    if isinstance(whole, list) and whole and all(_has_text(each) for each in whole):
        return keyed_records(
            ParsedRow(
                field(each, ID_FIELDS),
                field(each, TITLE_FIELDS) or path.stem,
                str(raw_field(each, TEXT_FIELDS)),
                row_metadata(each, f"object {number}"),
            )
            for number, each in enumerate(whole, start=1)
        )
    title = field(whole, TITLE_FIELDS) if isinstance(whole, dict) else None
    return lone_record(title or path.stem, check_length("\n".join(_lines(whole)), limits))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"not valid JSON ({error})") from error


def _yaml(text: str) -> list[Any]:
    try:
        import yaml
    except ImportError as error:
        raise CorpusError("reading YAML needs PyYAML; pip install 'kvweave[rag]'") from error
    try:
        return list(yaml.safe_load_all(text))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise CorpusError(f"not valid YAML ({reason[:200]})") from error


def _has_text(value: object) -> bool:
    return isinstance(value, dict) and isinstance(raw_field(value, TEXT_FIELDS), str)


def _lines(whole: object) -> Iterator[str]:
    """A line for each value, with a stack of our own: files nest deeper than Python recurses."""
    count = 0
    stack: list[tuple[tuple[str, ...], object]] = [((), whole)]
    while stack:
        way, value = stack.pop()
        count += 1
        if count > MOST_VALUES:
            raise CorpusError(f"more than {MOST_VALUES:,} values")
        if len(way) > MOST_DEPTH:
            raise CorpusError(f"values nested over {MOST_DEPTH} deep")
        if isinstance(value, dict):
            stack += [((*way, str(key)), each) for key, each in reversed(list(value.items()))]
        elif isinstance(value, list):
            stack += [((*way, str(at)), each) for at, each in reversed(list(enumerate(value, 1)))]
        elif value is not None and str(value).strip():
            yield f"{' › '.join(way)}: {value}" if way else str(value)
