"""JSON, YAML and JSON lines.

A list whose objects have a text field is a document for each; anything else is one document with a
line for each value, named by the way to it. Each JSON line is a document: a string, or an object
with a text field.
"""

import json
from collections.abc import Iterator, Mapping
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
from kvweave.errors import CorpusError, error_words

MOST_VALUES = 1_000_000  # of one file: aliases of YAML can make a small file huge
MOST_DEPTH = 200


def parse_objects(path: Path, data: bytes, limits: ParseLimits) -> list[ParsedRecord]:
    text = decode(data)
    values = [_json(text)] if path.suffix.lower() == ".json" else _yaml(text)
    whole = values[0] if len(values) == 1 else values
    if isinstance(whole, list) and whole and all(_has_text(each) for each in whole):
        return keyed_records(
            _row(each, path.stem, f"object {number}") for number, each in enumerate(whole, start=1)
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
        raise CorpusError(f"not valid YAML ({error_words(error, 200)})") from error


def _has_text(value: object) -> bool:
    return isinstance(value, dict) and isinstance(raw_field(value, TEXT_FIELDS), str)


def _row(value: Mapping[str, object], title: str, place: str) -> ParsedRow:
    """The document of an object; `title` is for one that has none."""
    return ParsedRow(
        field(value, ID_FIELDS),
        field(value, TITLE_FIELDS) or title,
        str(raw_field(value, TEXT_FIELDS)),
        row_metadata(value, place),
    )


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


def parse_json_lines(path: Path, data: bytes, limits: ParseLimits) -> list[ParsedRecord]:
    return keyed_records(_line_rows(decode(data), path.stem))


def _line_rows(text: str, default_title: str) -> Iterator[ParsedRow]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"line {number} is not JSON ({error})") from error
        if isinstance(value, str):
            yield ParsedRow(None, default_title, value)
            continue
        body = raw_field(value, TEXT_FIELDS) if isinstance(value, dict) else None
        if body is None:
            raise CorpusError(f"line {number} has no text; name the field one of {TEXT_FIELDS}")
        if not isinstance(body, str):
            raise CorpusError(f"line {number}: the text is not a string ({type(body).__name__})")
        yield _row(value, default_title, f"line {number}")
