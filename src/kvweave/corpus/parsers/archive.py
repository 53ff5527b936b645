"""Files that are zip archives: how much is in one is looked at before anything is unpacked."""

import io
import zipfile

from kvweave.corpus.parsers.base import ParseLimits
from kvweave.errors import CorpusError


def check_unpacked(data: bytes, limits: ParseLimits, what: str) -> None:
    """Raises CorpusError for what is no archive, or one that unpacks to too much."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            unpacked_bytes = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise CorpusError(f"broken {what} ({error})") from error
    if unpacked_bytes > limits.text_chars:
        raise CorpusError(f"unpacks to {unpacked_bytes / 2**20:,.0f} MiB")
