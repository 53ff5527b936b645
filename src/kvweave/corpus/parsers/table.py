"""CSV and TSV. With a text column each row is a document, and columns such as `metadata.year` are
metadata of it; otherwise each row is a line."""

import csv
import io
from pathlib import Path

from kvweave.corpus.parsers.base import (
    ID_FIELDS,
    TEXT_FIELDS,
    TITLE_FIELDS,
    ParsedRecord,
    ParsedRow,
    ParseLimits,
    cell_metadata,
    decode,
    field,
    keyed_records,
    lone_record,
)
from kvweave.errors import CorpusError

DELIMITERS = ",;\t|"


def parse(path: Path, data: bytes, limits: ParseLimits) -> list[ParsedRecord]:
    text = decode(data)
    # The limit is the process's, so it only ever grows; a cell may be as long as a file.
    csv.field_size_limit(max(csv.field_size_limit(), limits.file_bytes))
    header, rows = _rows(text, "\t" if path.suffix.lower() == ".tsv" else _delimiter(text))
    has_text = field(dict.fromkeys(header, ""), TEXT_FIELDS) is not None
    if has_text:
        return keyed_records(
            ParsedRow(
                field(row, ID_FIELDS),
                field(row, TITLE_FIELDS) or path.stem,
                field(row, TEXT_FIELDS) or "",
                cell_metadata(row, f"row {number}"),
            )
            for number, row in enumerate(rows, start=1)
        )
    lines = ("; ".join(f"{name}: {value}" for name, value in row.items() if value) for row in rows)
    return lone_record(path.stem, "\n".join(lines))


def _rows(text: str, delimiter: str) -> tuple[list[str], list[dict[str, str]]]:
    """Header and rows. A row of another width means that the file is not what it seems."""
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        header = next(reader, None)
        if not header or not any(header):
            raise CorpusError("no header row")
        header = _distinct(header)
        rows: list[dict[str, str]] = []
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise CorpusError(
                    f"line {reader.line_num} has {len(row)} fields, the header has {len(header)}"
                )
            rows.append(dict(zip(header, row, strict=True)))
    except csv.Error as error:
        raise CorpusError(f"not valid CSV ({error})") from error
    return header, rows


def _distinct(names: list[str]) -> list[str]:
    """Columns of one name get numbers, so that none hides another: "price", "price 2"."""
    distinct: dict[str, None] = {}  # in order
    numbers: dict[str, int] = {}  # by name: the last one that was given
    for name in names:
        number, own = numbers.get(name, 1), name
        while own in distinct:
            number += 1
            own = f"{name} {number}"
        numbers[name] = number
        distinct[own] = None
    return list(distinct)


def _delimiter(text: str) -> str:
    """Whatever splits the header into the most columns."""
    first = text.split("\n", 1)[0]
    return max(DELIMITERS, key=first.count)
