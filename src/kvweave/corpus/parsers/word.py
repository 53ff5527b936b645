"""Word documents (.docx): paragraphs, headings and tables in their order."""

import io
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from kvweave.corpus.parsers.base import (
    ParsedRecord,
    ParseLimits,
    check_length,
    lone_record,
    own_title,
)
from kvweave.errors import CorpusError

if TYPE_CHECKING:
    from docx.table import Table
    from docx.text.paragraph import Paragraph


def parse(path: Path, data: bytes, limits: ParseLimits) -> list[ParsedRecord]:
    import docx
    from docx.text.paragraph import Paragraph

    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            unpacked_bytes = sum(entry.file_size for entry in archive.infolist())
        if unpacked_bytes > limits.text_chars:
            raise CorpusError(f"unpacks to {unpacked_bytes / 2**20:,.0f} MiB")
        document = docx.Document(io.BytesIO(data))
        parts = [
            _paragraph(block) if isinstance(block, Paragraph) else _table(block)
            for block in document.iter_inner_content()
        ]
        title = own_title(document.core_properties.title)
    except (CorpusError, MemoryError):  # the second is said where the limit is known
        raise
    # A zip with anything inside can call itself .docx: KeyError, ValueError, lxml errors, …
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CorpusError(f"broken Word document ({reason[:120]})") from error
    text = "\n\n".join(part for part in parts if part.strip())
    first = next((p.lstrip("# ") for p in parts if p.startswith("# ")), "")
    return lone_record(title or first or path.stem, check_length(text, limits))


def _paragraph(paragraph: "Paragraph") -> str:
    style = (paragraph.style.name if paragraph.style is not None else "") or ""
    if style == "Title":
        return f"# {paragraph.text}"
    kind, _, level = style.partition(" ")
    if kind == "Heading" and level.isdigit():
        return f"{'#' * min(6, int(level))} {paragraph.text}"
    return f"- {paragraph.text}" if style.startswith("List") else paragraph.text


def _table(table: "Table") -> str:
    return "\n".join(" | ".join(cell.text.strip() for cell in row.cells) for row in table.rows)
