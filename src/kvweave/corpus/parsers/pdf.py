"""The text layer of a PDF, page by page."""

import io
import logging
from pathlib import Path

from kvweave.corpus.parsers.base import (
    ParsedRecord,
    ParseLimits,
    check_length,
    lone_record,
    own_title,
    reading,
)
from kvweave.errors import CorpusError


def parse_pdf(path: Path, data: bytes, limits: ParseLimits) -> list[ParsedRecord]:
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError

    # It logs a line per oddity of a file; what matters comes as an exception.
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    encrypted = CorpusError("encrypted PDF; remove its password first")
    with reading("PDF"):
        try:
            reader = PdfReader(io.BytesIO(data))
            if reader.is_encrypted and not reader.decrypt(""):
                raise encrypted
            pages: list[str] = []
            num_chars = 0
            for page in reader.pages:
                pages.append(page.extract_text())
                num_chars += len(pages[-1])
                if num_chars > limits.text_chars:
                    break
            title = own_title(reader.metadata and reader.metadata.title)
        except (DependencyError, FileNotDecryptedError) as error:
            raise encrypted from error
    text = check_length("\n\n".join(pages), limits)
    if not text.strip():
        raise CorpusError("a PDF without a text layer, perhaps a scan; run OCR over it first")
    return lone_record(title or path.stem, text)
