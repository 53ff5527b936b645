"""Tables: CSV, TSV and Excel workbooks (.xlsx). With a text column each row is a document, and
columns such as `metadata.year` are metadata of it; otherwise each row is a line of one document, or
of one for each sheet."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvweave.corpus.parsers.base import (
    ID_FIELDS,
    TEXT_FIELDS,
    TITLE_FIELDS,
    ParsedRecord,
    ParsedRow,
    ParseLimits,
    cell_metadata,
    check_unpacked,
    decode,
    field,
    keyed_records,
    lone_record,
    reading,
)
from kvweave.errors import CorpusError

DELIMITERS = ",;\t|"


def parse_table(path: Path, data: bytes, limits: ParseLimits) -> list[ParsedRecord]:
    text = decode(data)
    # The limit is the process's, so it only ever grows; a cell may be as long as a file.
    csv.field_size_limit(max(csv.field_size_limit(), limits.file_bytes))
    header, rows = _read_rows(text, "\t" if path.suffix.lower() == ".tsv" else _delimiter(text))
    if _has_text(header):
        return keyed_records(
            _row(cells, path.stem, f"row {number}") for number, cells in enumerate(rows, start=1)
        )
    lines = ("; ".join(f"{name}: {value}" for name, value in row.items() if value) for row in rows)
    return lone_record(path.stem, "\n".join(lines))


def _read_rows(text: str, delimiter: str) -> tuple[list[str], list[dict[str, str]]]:
    """Header and rows. A row of another width means that the file is not what it seems."""
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        header = next(reader, None)
        if not header or not any(header):
            raise CorpusError("no header row")
        header = _number_twins(header)
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


def _number_twins(names: list[str]) -> list[str]:
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


def parse_workbook(path: Path, data: bytes, limits: ParseLimits) -> list[ParsedRecord]:
    check_unpacked(data, limits, "Excel workbook")
    try:
        import openpyxl
    except ImportError as error:
        raise CorpusError("reading .xlsx needs openpyxl; pip install 'kvweave[rag]'") from error
    with reading("Excel workbook"):
        # values as they were last computed, row by row: formulas are not run
        book = openpyxl.load_workbook(io.BytesIO(data), read_only=True, data_only=True)
        rows = [row for sheet in book.worksheets for row in _sheet_rows(sheet, path.stem, limits)]
    return keyed_records(rows)


def _sheet_rows(sheet: Any, name: str, limits: ParseLimits) -> Iterator[ParsedRow]:
    rows = ([_cell_text(cell) for cell in row] for row in sheet.iter_rows(values_only=True))
    header = next((row for row in rows if any(row)), None)
    if header is None:
        return
    title = f"{name}: {sheet.title}"
    if _has_text(header):
        for row in rows:
            cells = dict(zip(header, row, strict=False))
            own_title = field(cells, TITLE_FIELDS) or title
            yield _row(cells, title, f"{sheet.title}, {own_title!r}")
        return
    lines = filter(None, (_line(header, row) for row in rows))
    text = "\n".join(_check_size(lines, limits)) or "; ".join(filter(None, header))
    yield ParsedRow(f"sheet:{sheet.title}", title, text)


def _line(header: Sequence[str], row: Sequence[str]) -> str:
    pairs = zip(header, row, strict=False)
    return "; ".join(f"{key}: {value}" if key else value for key, value in pairs if value)


def _check_size(lines: Iterable[str], limits: ParseLimits) -> Iterator[str]:
    num_chars = 0
    for line in lines:
        num_chars += len(line)
        if num_chars > limits.text_chars:
            raise CorpusError(f"more than {limits.text_chars:,} characters of text")
        yield line


def _cell_text(cell: object) -> str:
    return "" if cell is None else str(cell).strip()


def _has_text(header: Sequence[str]) -> bool:
    """Whether a column is text: then each row is a document."""
    return field(dict.fromkeys(header, ""), TEXT_FIELDS) is not None


def _row(cells: Mapping[str, str], title: str, place: str) -> ParsedRow:
    """The document of a row; `title` is for one that has none."""
    return ParsedRow(
        field(cells, ID_FIELDS),
        field(cells, TITLE_FIELDS) or title,
        field(cells, TEXT_FIELDS) or "",
        cell_metadata(cells, place),
    )
