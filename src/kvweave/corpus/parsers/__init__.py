"""One parser per kind of file, found by its ending. A new kind is a function and a line here."""

import stat
from importlib import import_module
from pathlib import Path

from kvweave.corpus.parsers.base import ParsedRecord, ParseLimits, Parser
from kvweave.errors import CorpusError

__all__ = ["ENDINGS", "ParseLimits", "ParsedRecord", "parse", "read_bytes"]

# ending → module of this folder and its function, loaded when the first such file comes along
ENDINGS: dict[str, str] = {
    **dict.fromkeys((".txt", ".text", ".md", ".markdown"), "text.parse_text"),
    **dict.fromkeys((".html", ".htm", ".xhtml"), "html.parse_html"),
    ".pdf": "pdf.parse_pdf",
    ".csv": "tables.parse_table",
    ".tsv": "tables.parse_table",
    ".jsonl": "objects.parse_json_lines",
    ".ndjson": "objects.parse_json_lines",
    ".docx": "office.parse_word",
    ".json": "objects.parse_objects",
    ".yaml": "objects.parse_objects",
    ".yml": "objects.parse_objects",
    ".rst": "text.parse_restructured",
    ".xlsx": "tables.parse_workbook",
    ".pptx": "office.parse_slides",
    ".epub": "book.parse_book",
    **dict.fromkeys((".py", ".js", ".ts", ".go", ".rs", ".java", ".c", ".h"), "text.parse_code"),
    **dict.fromkeys((".cc", ".cpp", ".hpp", ".cs", ".rb", ".php", ".sh"), "text.parse_code"),
    **dict.fromkeys((".sql", ".kt", ".swift"), "text.parse_code"),
}


def read_bytes(path: Path, limits: ParseLimits) -> bytes:
    """The file's bytes, if it is a plain file of reasonable size. Raises CorpusError or OSError."""
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        raise CorpusError("not a regular file")
    if info.st_size > limits.file_bytes:
        size, limit = (f"{n / 2**20:,.0f} MiB" for n in (info.st_size, limits.file_bytes))
        raise CorpusError(
            f"{size} is over the limit of {limit}; raise it with --max-file-mb or split the file"
        )
    if info.st_size == 0:
        raise CorpusError("the file is empty")
    return path.read_bytes()


def parse(path: Path, data: bytes, limits: ParseLimits) -> list[ParsedRecord]:
    """All records of a file, or CorpusError with the reason why there are none."""
    name = ENDINGS.get(path.suffix.lower())
    if name is None:
        raise CorpusError(
            f"no parser for {path.suffix or 'a file without ending'}; known: {' '.join(ENDINGS)}"
        )
    module, _, function = name.partition(".")
    parser: Parser = getattr(import_module(f"kvweave.corpus.parsers.{module}"), function)
    return parser(path, data, limits)
