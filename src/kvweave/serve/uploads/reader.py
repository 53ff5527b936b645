"""How much of a JSON body is not its longest text, counted while it arrives.

What a text is long is read quickly; of everything else a few megabytes take a parser seconds.
"""

import asyncio
import json
import re
from collections import defaultdict
from functools import partial
from typing import Any

from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from kvweave.app.libraries.libraries import FileBytes, Later, TextSource, read_fields
from kvweave.errors import CorpusError
from kvweave.serve.access.api_keys import tenant_of
from kvweave.serve.access.errors import ApiError, describe
from kvweave.serve.access.limits import Limits
from kvweave.serve.uploads.forms import WANTS, FormFile, FormFiles, Spool
from kvweave.serve.wire.kb import TextIn

LONGEST_REST = 256 << 10  # bytes


class JsonScan:
    """Counts the bytes of one body piece by piece. It parses nothing: what is no JSON is counted as
    if it were, and refused by the parser."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._longest = 0  # bytes of a text that has ended
        self._run = 0  # bytes since the last quote
        self._is_inside = False  # of a text
        self._held = b""  # a backslash, whose other half is in the next piece

    def feed(self, piece: bytes) -> None:
        """Count a piece."""
        self._num_bytes += len(piece)
        plain = (self._held + piece).replace(rb"\\", b"..").replace(rb"\"", b"..")
        self._held = b"\\" if plain.endswith(b"\\") else b""
        first, *others = plain.removesuffix(self._held).split(b'"')
        self._run += len(first)
        for part in others:
            if self._is_inside:
                self._longest = max(self._longest, self._run)
            self._is_inside = not self._is_inside
            self._run = len(part)

    @property
    def rest_bytes(self) -> int:
        """Bytes so far outside of the longest text."""
        return self._num_bytes - max(self._longest, self._run if self._is_inside else 0)


LONGEST_NAME = 200
SHORT_BYTES = 256 << 10  # of JSON that is parsed here; a longer one in a process of its own
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f]")


class UploadReader:
    """Reads the uploads of one server. On its event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        # by tenant: a text is in memory while it is judged, and no tenant waits for another's
        self._judging: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def read(self, request: Request, spool: Spool) -> list[Later]:
        """Sources, at least one, whose bytes are in `spool` until the caller closes it. Raises
        ApiError, also for a client that leaves in the middle."""
        content_type = request.headers.get("content-type", "")
        kind = content_type.split(";")[0].strip().lower()
        try:
            if kind == "multipart/form-data":
                return await self._files(request, content_type, spool)
            if kind == "application/json":
                return [await self._text(request, spool)]
        except ClientDisconnect:
            raise ApiError(499, "the client left in the middle of its upload") from None
        raise ApiError(415, f"Content-Type {kind[:60]!r} is no upload; {WANTS}")

    async def _text(self, request: Request, spool: Spool) -> Later:
        scan = JsonScan()
        async for piece in request.stream():
            scan.feed(piece)
            if scan.rest_bytes > LONGEST_REST:
                most = f"{LONGEST_REST:,} bytes"
                raise ApiError(400, f"beside its text the body has more than {most}; send less")
            await spool.append(piece)
        await spool.flush()
        read = partial(_read_text, spool)
        async with self._judging[tenant_of(request.scope)]:
            # a bad one is refused now, not when its turn comes
            size = len((await asyncio.to_thread(read)).text)
        return Later(size, read)

    async def _files(self, request: Request, content_type: str, spool: Spool) -> list[Later]:
        form = FormFiles(content_type, spool, self._limits.upload_files)
        async for piece in request.stream():
            await form.feed(piece)
        await spool.flush()
        return [
            Later(file.end - file.start, partial(_read_file, spool, file, shown_name(file.name)))
            for file in form.finish()
        ]


def _read_file(spool: Spool, file: FormFile, name: str) -> FileBytes:
    return FileBytes(name, spool.read(file.start, file.end))


def _read_text(spool: Spool) -> TextSource:
    data = spool.read(0, spool.size_bytes)
    try:
        # JSON is parsed in one go, in which no other thread does anything
        value = json.loads(data) if len(data) <= SHORT_BYTES else read_fields(data)
        given = TextIn.model_validate(value)
    except CorpusError as error:
        raise ApiError(400, str(error)) from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, ValidationError):
            faults: list[Any] = [{**f, "loc": ("body", *f["loc"])} for f in error.errors()]
            raise describe(faults) from None
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not given.text.strip():
        raise ApiError(400, "'text' is empty; send some", param="text")
    return TextSource(given.title, given.text, given.key, given.metadata)


def shown_name(name: str) -> str:
    """A client's file name without folders and control characters. Raises ApiError if none is left.

    The ending stays whole: it chooses the parser.
    """
    last = UNPRINTABLE.sub("", re.split(r"[/\\]", name)[-1]).strip()
    last = last.encode(errors="replace").decode()
    if last.strip(".") == "":
        raise ApiError(400, f"{name[:60]!r} is no name of a file; call it something like notes.txt")
    if len(last) <= LONGEST_NAME:
        return last
    stem, dot, ending = last.rpartition(".")
    return f"{stem[: LONGEST_NAME - len(dot + ending[:10])]}{dot}{ending[:10]}"
