"""The files of a multipart form, straight into a spool while the form arrives.

A spool is where an upload waits: on the disk, whatever its size, so that many who wait fill no
memory. All files of a form lie in one, one behind the other: a form of many files costs one handle,
and its size in memory is that of a piece of it.
"""

import asyncio
import errno
import logging
import os
import tempfile
from dataclasses import dataclass

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from kvweave.serve.access.errors import ApiError

log = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20  # gathered in memory between two writes


class Spool:
    """One temporary file without a name: it is gone when it is closed, and with the process however
    that ends. Written for the event loop, then read by one thread, then closed by any.

    It lies in the system's folder for such files (`TMPDIR` names another).
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self._gathered = bytearray()
        try:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # `close` does it
        except OSError as error:
            raise _no_room(error) from error

    async def append(self, data: bytes) -> None:
        """Keep `data` behind what is there. Raises a 507 where the disk has no room."""
        self.size_bytes += len(data)
        self._gathered += data
        if len(self._gathered) >= PIECE_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """All of it is in the file when this returns."""
        gathered, self._gathered = self._gathered, bytearray()
        if not gathered:
            return
        try:
            await asyncio.to_thread(self._write, gathered)
        except OSError as error:
            raise _no_room(error) from error

    def read(self, start: int, end: int) -> bytes:
        """Bytes [start, end) of what was flushed. Any thread."""
        data = bytearray()
        while len(data) < end - start:
            piece = os.pread(self._file.fileno(), end - start - len(data), start + len(data))
            assert piece, "only what was written is read"
            data += piece
        return bytes(data)

    def close(self) -> None:
        """Harmless the second time."""
        self._file.close()

    def _write(self, data: bytearray) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]


def _no_room(error: OSError) -> ApiError:
    log.error("an upload cannot be kept in %s: %s", tempfile.gettempdir(), error)
    return ApiError(
        507 if error.errno in (errno.ENOSPC, errno.EDQUOT) else 503,
        f"the server cannot keep an upload ({error.strerror}); its administrator can free some "
        "room or set TMPDIR",
        headers={"Retry-After": "30"},
    )


LONGEST_HEADERS = 16 << 10  # bytes of one part
WANTS = "send a form with files, or JSON with text and title"


@dataclass(slots=True)
class FormFile:
    """Where the bytes of one file are in the spool."""

    name: str  # as the client has it
    start: int
    end: int


# Not Starlette's `request.form()`, which was tried (1.10): it takes a form that was cut off for a
# whole one with fewer files, and keeps files of up to 1 MiB in memory, the others in a handle each,
# which for 64 files and 68 uploads that wait is 4 GiB or 4,352 handles.
class FormFiles:
    """Feed it a form piece by piece, then `finish`. Raises ApiError as soon as one is no upload."""

    def __init__(self, content_type: str, spool: Spool, max_files: int) -> None:
        self._spool = spool
        self._max_files = max_files
        self._files: list[FormFile] = []
        self._data: list[bytes] = []  # of files, from the piece at hand
        self._at = spool.size_bytes  # where the next byte of a file will be
        self._header = [bytearray(), bytearray()]  # name and value of the one at hand
        self._header_bytes = 0
        self._disposition = ""
        self._is_complete = False
        _, options = parse_options_header(content_type)
        if not options.get(b"boundary"):
            raise _bad("its Content-Type names no boundary")
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._on_part,
                    "on_header_field": lambda data, start, end: self._on_header(0, data[start:end]),
                    "on_header_value": lambda data, start, end: self._on_header(1, data[start:end]),
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers,
                    "on_part_data": lambda data, start, end: self._on_data(data[start:end]),
                    "on_end": self._on_end,
                },
            )
        except FormParserError as error:
            raise _bad(str(error)) from error

    async def feed(self, piece: bytes) -> None:
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise _bad(str(error)) from error
        for data in self._data:
            await self._spool.append(data)
        self._data.clear()

    def finish(self) -> list[FormFile]:
        """The files, at least one."""
        if not self._is_complete:
            raise _bad("it ends before its last boundary")
        if not self._files:
            raise ApiError(400, f"the form has no file; {WANTS}")
        return self._files

    def _on_part(self) -> None:
        self._disposition, self._header_bytes = "", 0

    def _on_header(self, which: int, data: bytes) -> None:
        self._header_bytes += len(data)
        if self._header_bytes > LONGEST_HEADERS:
            raise _bad("the headers of a part are too long")
        self._header[which] += data

    def _on_header_end(self) -> None:
        name, value = (bytes(part) for part in self._header)
        self._header = [bytearray(), bytearray()]
        if name.lower() == b"content-disposition":
            self._disposition = value.decode("latin-1")

    def _on_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        field = _text(options.get(b"name", b""))[:60]
        if b"filename" not in options:
            raise ApiError(400, f"'{field}' is no file; {WANTS}", param=field)
        if len(self._files) == self._max_files:
            raise _bad(f"Too many files; it may have {self._max_files}")
        self._files.append(FormFile(_text(options[b"filename"]), self._at, self._at))

    def _on_data(self, data: bytes) -> None:
        self._data.append(data)
        self._at += len(data)
        self._files[-1].end = self._at

    def _on_end(self) -> None:
        self._is_complete = True


def _text(raw: bytes) -> str:
    """Browsers and curl send UTF-8; what is not is shown as it can be."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _bad(why: str) -> ApiError:
    return ApiError(400, f"the form does not parse: {why}")
