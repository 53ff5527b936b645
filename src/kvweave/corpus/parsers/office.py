"""Office documents: Word (.docx), its paragraphs, headings and tables in their order; PowerPoint
(.pptx), slide by slide, titles as headings, tables and notes too."""

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvweave.corpus.parsers.base import (
    ParsedRecord,
    ParseLimits,
    check_length,
    check_unpacked,
    lone_record,
    own_title,
    reading,
)
from kvweave.errors import CorpusError

if TYPE_CHECKING:
    from docx.text.paragraph import Paragraph


def parse_word(path: Path, data: bytes, limits: ParseLimits) -> list[ParsedRecord]:
    import docx
    from docx.text.paragraph import Paragraph

    check_unpacked(data, limits, "Word document")
    with reading("Word document"):
        document = docx.Document(io.BytesIO(data))
        parts = [
            _paragraph(block) if isinstance(block, Paragraph) else _table(block.rows)
            for block in document.iter_inner_content()
        ]
        title = own_title(document.core_properties.title)
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


def _table(rows: Iterable[Any]) -> str:
    return "\n".join(" | ".join(cell.text.strip() for cell in row.cells) for row in rows)


def parse_slides(path: Path, data: bytes, limits: ParseLimits) -> list[ParsedRecord]:
    check_unpacked(data, limits, "PowerPoint presentation")
    try:
        import pptx
    except ImportError as error:
        message = "reading .pptx needs python-pptx; pip install 'kvweave[rag]'"
        raise CorpusError(message) from error
    with reading("PowerPoint presentation"):
        deck = pptx.Presentation(io.BytesIO(data))
        parts = [part for n, slide in enumerate(deck.slides, 1) for part in _slide(slide, n)]
        title = own_title(deck.core_properties.title)
    text = "\n\n".join(part for part in parts if part.strip())
    return lone_record(title or path.stem, check_length(text, limits))


def _slide(slide: Any, number: int) -> Iterator[str]:
    heading = slide.shapes.title
    named = " ".join(heading.text_frame.text.split()) if heading is not None else ""
    yield f"# {named or f'Slide {number}'}"
    for shape in slide.shapes:
        if heading is not None and shape.shape_id == heading.shape_id:
            continue
        if shape.has_text_frame:
            yield shape.text_frame.text.replace("\v", "\n")
        elif getattr(shape, "has_table", False) and shape.has_table:
            yield _table(shape.table.rows)
    if slide.has_notes_slide:
        yield slide.notes_slide.notes_text_frame.text
