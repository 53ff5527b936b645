"""Excel workbooks (.xlsx): a document for each sheet, or for each row where a column is text."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvweave.corpus.parsers.archive import check_unpacked
from kvweave.corpus.parsers.base import (
    ID_FIELDS,
    TEXT_FIELDS,
    TITLE_FIELDS,
    ParsedRecord,
    ParsedRow,
    ParseLimits,
    cell_metadata,
    field,
    keyed_records,
)
from kvweave.errors import CorpusError


def parse(path: Path, data: bytes, limits: ParseLimits) -> list[ParsedRecord]:
    check_unpacked(data, limits, "Excel workbook")
    try:
        import openpyxl
    except ImportError as error:
        raise CorpusError("reading .xlsx needs openpyxl; pip install 'kvweave[rag]'") from error
    try:
        # values as they were last computed, row by row: formulas are not run
        book = openpyxl.load_workbook(io.BytesIO(data), read_only=True, data_only=True)
        rows = [row for sheet in book.worksheets for row in _of_sheet(sheet, path.stem, limits)]
    except (CorpusError, MemoryError):
        raise
    except Exception as error:  # a zip with anything inside can call itself .xlsx
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CorpusError(f"broken Excel workbook ({reason[:120]})") from error
    return keyed_records(rows)


def _of_sheet(sheet: Any, name: str, limits: ParseLimits) -> Iterator[ParsedRow]:
    cells = ([_text(cell) for cell in row] for row in sheet.iter_rows(values_only=True))
    header = next((row for row in cells if any(row)), None)
    if header is None:
        return
    if field(dict.fromkeys(header, ""), TEXT_FIELDS) is not None:
        for row in cells:
            record = dict(zip(header, row, strict=False))
            title = field(record, TITLE_FIELDS) or f"{name}: {sheet.title}"
            text = field(record, TEXT_FIELDS) or ""
            said = cell_metadata(record, f"{sheet.title}, {title!r}")
            yield ParsedRow(field(record, ID_FIELDS), title, text, said)
        return
    lines, num_chars = [], 0
    for row in cells:
        pairs = zip(header, row, strict=False)
        line = "; ".join(f"{key}: {value}" if key else value for key, value in pairs if value)
        if line:
            lines.append(line)
            num_chars += len(line)
            if num_chars > limits.text_chars:
                raise CorpusError(f"more than {limits.text_chars:,} characters of text")
    text = "\n".join(lines) or "; ".join(filter(None, header))
    yield ParsedRow(f"sheet:{sheet.title}", f"{name}: {sheet.title}", text)


def _text(cell: object) -> str:
    return "" if cell is None else str(cell).strip()
