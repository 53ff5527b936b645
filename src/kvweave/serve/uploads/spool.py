"""Where an upload waits: on the disk, whatever its size, so that many who wait fill no memory."""

import asyncio
import errno
import logging
import os
import tempfile

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
