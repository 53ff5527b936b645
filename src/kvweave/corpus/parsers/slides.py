"""PowerPoint presentations (.pptx): slide by slide, titles as headings, tables and notes too."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvweave.corpus.parsers.archive import check_unpacked
from kvweave.corpus.parsers.base import (
    ParsedRecord,
    ParseLimits,
    check_length,
    lone_record,
    own_title,
)
from kvweave.errors import CorpusError


def parse(path: Path, data: bytes, limits: ParseLimits) -> list[ParsedRecord]:
    check_unpacked(data, limits, "PowerPoint presentation")
    try:
        import pptx
    except ImportError as error:
        message = "reading .pptx needs python-pptx; pip install 'kvweave[rag]'"
        raise CorpusError(message) from error
    try:
        deck = pptx.Presentation(io.BytesIO(data))
        parts = [part for n, slide in enumerate(deck.slides, 1) for part in _slide(slide, n)]
        title = own_title(deck.core_properties.title)
    except (CorpusError, MemoryError):
        raise
    except Exception as error:  # a zip with anything inside can call itself .pptx
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CorpusError(f"broken PowerPoint presentation ({reason[:120]})") from error
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
            rows = shape.table.rows
            yield "\n".join(" | ".join(c.text.strip() for c in row.cells) for row in rows)
    if slide.has_notes_slide:
        yield slide.notes_slide.notes_text_frame.text
