"""JSON lines: each line a document, either a string or an object with a text field, and perhaps
`metadata`, an object."""

import json
from collections.abc import Iterator
from pathlib import Path

from kvweave.corpus.parsers.base import (
    ID_FIELDS,
    TEXT_FIELDS,
    TITLE_FIELDS,
    ParsedRecord,
    ParsedRow,
    ParseLimits,
    decode,
    field,
    keyed_records,
    raw_field,
    row_metadata,
)
from kvweave.errors import CorpusError


def parse(path: Path, data: bytes, limits: ParseLimits) -> list[ParsedRecord]:
    return keyed_records(_rows(decode(data), path.stem))


def _rows(text: str, default_title: str) -> Iterator[ParsedRow]:
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
        title, said = field(value, TITLE_FIELDS), row_metadata(value, f"line {number}")
        yield ParsedRow(field(value, ID_FIELDS), title or default_title, body, said)
