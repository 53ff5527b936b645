"""What a parser gives, and how bytes become text."""

import codecs
import hashlib
import io
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvweave.corpus.metadata import check_metadata, digest_text, parse_pairs
from kvweave.errors import CorpusError, RequestError, error_words

LONGEST_TITLE = 1000  # characters; a chunk shows the first few dozen words of it
PARSERS_VERSION = 4  # raise it when a parser would give something else for the same file


class ParsedRecord(NamedTuple):
    """One document inside a file. Most files hold one; tables and JSON lines may hold many."""

    key: str  # tells records of a file apart and stays when others come and go; "" for a lone one
    title: str
    text: str
    metadata: str = ""  # of this one alone, a JSON object; "": it says nothing of itself


class ParsedRow(NamedTuple):
    """A record that has no key yet."""

    id: str | None
    title: str
    text: str
    metadata: str = ""  # as in ParsedRecord


@dataclass(frozen=True, slots=True)
class ParseLimits:
    """Above these a file is reported and skipped."""

    file_bytes: int = 64 << 20  # size on disk
    text_chars: int = 256 << 20  # after unpacking: a small archive can hold a huge text
    seconds: float = 60.0  # for parsing it
    memory_bytes: int = 2 << 30  # that parsing may take

    @property
    def document_chars(self) -> int:
        """Characters of one document: cutting a million of them into chunks takes seconds, in which
        the knowledge base takes nothing else in."""
        return max(8 << 20, self.file_bytes // 8)


# Gives all records of a file or raises CorpusError with the reason; never some of them.
Parser = Callable[[Path, bytes, ParseLimits], list[ParsedRecord]]

CLEANED_CHARS = 1 << 20  # at a time
CONTROLS = re.compile(r"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f]")
BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16: its mark begins with that one's
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
TEXT_FIELDS = ("text", "content", "contents", "body", "passage")
TITLE_FIELDS = ("title", "heading", "name")
METADATA_FIELD = "metadata"
# what programs write into the title of a file that was given none
FILLER_TITLE = re.compile(
    r"(\(?(untitled|anonymous|unnamed|unknown|no title|none)\)?|title|document|dokument|"
    r"(word|pdf) document|(powerpoint )?presentation|slide)[ _-]?\d{0,9}(\.\w{1,5})?"
    r"|microsoft (word|powerpoint|excel) - .*",
    re.IGNORECASE | re.DOTALL,
)
ID_FIELDS = ("id", "_id", "doc_id", "pid", "key")


def decode(data: bytes) -> str:
    """UTF-8, or what a byte order mark says. Never a guess: wrong characters look like text."""
    mark, encoding = next((bom for bom in BOMS if data.startswith(bom[0])), (b"", "utf-8"))
    data = data.removeprefix(mark)
    if encoding == "utf-8" and b"\0" in data:
        raise CorpusError("binary data, not text")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"not valid {encoding.upper()} (byte {error.start}); convert it first, for example "
            "with iconv"
        ) from error
    sample = text[:4096]
    if sum(c.isprintable() or c.isspace() for c in sample) < 0.9 * len(sample):
        raise CorpusError("binary data, not text")
    return text


def clean(text: str) -> str:
    """One kind of newline, no control characters. Positions in the result are the ones kept."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "")
    # in pieces: other threads have their turn in between
    pieces = (text[at : at + CLEANED_CHARS] for at in range(0, len(text), CLEANED_CHARS))
    text = "".join(CONTROLS.sub("", piece) for piece in pieces)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CorpusError(f"half a surrogate pair at character {error.start}") from error
    return text


def clean_title(title: str) -> str:
    """The beginning of a title, cleaned: what a file calls its title may be as long as the file."""
    return clean(title[:LONGEST_TITLE])


def lone_record(title: str, text: str) -> list[ParsedRecord]:
    text = clean(text)
    if not text.strip():
        raise CorpusError("no text in it")
    return [ParsedRecord("", clean_title(title), text)]


def own_title(found: object) -> str:
    """The title that a file gives itself; empty where it is a program's filler."""
    title = str(found or "").strip()
    is_named = any(map(str.isalnum, title)) and not FILLER_TITLE.fullmatch(title)
    return title if is_named else ""


def field(row: Mapping[str, object], names: Iterable[str]) -> str | None:
    """The first of `names` that the row has, whatever its case, as text."""
    value = raw_field(row, names)
    return value if value is None or isinstance(value, str) else str(value)


def raw_field(row: Mapping[str, object], names: Iterable[str]) -> object | None:
    lowered = {str(key).strip().lower(): value for key, value in row.items()}
    return next((lowered[name] for name in names if lowered.get(name) is not None), None)


def row_metadata(row: Mapping[str, object], place: str) -> str:
    """What an object says of itself in its field `metadata`. Raises CorpusError, which names the
    object by its `place`."""
    own = raw_field(row, (METADATA_FIELD,))
    if own is None:
        return ""
    if not isinstance(own, Mapping):
        raise CorpusError(f"{place}: {METADATA_FIELD} is no object of keys and values")
    return _checked_metadata({str(key): value for key, value in own.items()}, place)


def cell_metadata(row: Mapping[str, str], place: str) -> str:
    """What a row of a table says of itself, in columns such as `metadata.year`: what reads as a
    number is one. Raises CorpusError."""
    start = f"{METADATA_FIELD}."
    named = ((name.strip(), value.strip()) for name, value in row.items())
    cells = {
        name[len(start) :]: value
        for name, value in named
        if name.lower().startswith(start) and value
    }
    return _checked_metadata(cells, place, is_text=True) if cells else ""


def _checked_metadata(found: Mapping[str, object], place: str, *, is_text: bool = False) -> str:
    try:
        if is_text:
            return digest_text(parse_pairs([f"{k}={v}" for k, v in found.items()], place))
        return digest_text(check_metadata(found))
    except RequestError as error:
        raise CorpusError(f"{place}: {error}") from error


def keyed_records(rows: Iterable[ParsedRow]) -> list[ParsedRecord]:
    """Records of rows. Without a unique id the content is the key.

    Rows that come, go or move then leave the keys of the other rows alone.
    """
    records: list[ParsedRecord] = []
    used: set[str] = set()
    copies: dict[str, int] = {}  # by content: the last number that was given
    for row_id, title, text, metadata in rows:
        title, text = clean_title(title), clean(text)
        if not text.strip():
            continue
        content = hashlib.blake2b(f"{title}\0{text}".encode(), digest_size=8).hexdigest()
        # The key is hashed, not shown: half a surrogate pair in it is no reason to refuse the row.
        key = f"id:{row_id.encode(errors='backslashreplace').decode()}" if row_id else content
        if key in used:
            key = f"{key}:{content}"
        copy = copies.get(content, 1)
        while key in used:
            copy += 1
            key = f"{content}:{copy}"
            copies[content] = copy
        used.add(key)
        records.append(ParsedRecord(key, title, text, metadata))
    if not records:
        raise CorpusError("no text in it")
    return records


def check_length(text: str, limits: ParseLimits) -> str:
    if len(text) > limits.text_chars:
        raise CorpusError(f"more than {limits.text_chars:,} characters of text")
    return text


def check_unpacked(data: bytes, limits: ParseLimits, what: str) -> None:
    """Raise CorpusError for what is no zip archive, or one that unpacks to too much."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            unpacked_bytes = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise CorpusError(f"broken {what} ({error})") from error
    if unpacked_bytes > limits.text_chars:
        raise CorpusError(f"unpacks to {unpacked_bytes / 2**20:,.0f} MiB")


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise whatever goes wrong inside as a CorpusError that calls the file a broken `what`: bytes
    that call themselves one can fail anywhere in its library. MemoryError is left to those who know
    the limit."""
    try:
        yield
    except (CorpusError, MemoryError):
        raise
    except Exception as error:
        raise CorpusError(f"broken {what} ({error_words(error, 120)})") from error
