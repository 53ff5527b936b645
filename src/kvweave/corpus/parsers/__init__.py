"""One parser per kind of file, found by its ending. A new kind is a new file and a line here."""

import stat
from importlib import import_module
from pathlib import Path

from kvweave.corpus.parsers.base import ParsedRecord, ParseLimits, Parser
from kvweave.errors import CorpusError

__all__ = ["ENDINGS", "ParseLimits", "ParsedRecord", "parse", "read_bytes"]

# ending → module of this folder with a `parse`; loaded when the first such file comes along
ENDINGS: dict[str, str] = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".markdown": "text",
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
    ".pdf": "pdf",
    ".csv": "table",
    ".tsv": "table",
    ".jsonl": "jsonlines",
    ".ndjson": "jsonlines",
    ".docx": "word",
    ".json": "structured",
    ".yaml": "structured",
    ".yml": "structured",
    ".rst": "restructured",
    ".xlsx": "sheet",
    ".pptx": "slides",
    ".epub": "book",
    **dict.fromkeys((".py", ".js", ".ts", ".go", ".rs", ".java", ".c", ".h", ".cc"), "code"),
    **dict.fromkeys((".cpp", ".hpp", ".cs", ".rb", ".php", ".sh", ".sql", ".kt", ".swift"), "code"),
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
    module = ENDINGS.get(path.suffix.lower())
    if module is None:
        raise CorpusError(
            f"no parser for {path.suffix or 'a file without ending'}; known: {' '.join(ENDINGS)}"
        )
    parser: Parser = import_module(f"kvweave.corpus.parsers.{module}").parse
    return parser(path, data, limits)
