"""The body of an upload: a JSON text or files of a form, as sources for ingest.

What a client calls a file is a name to show and never a path: its folders are cut off, and no file
of that name is ever opened.
"""

import json
import re
from typing import Any

from fastapi import Request
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from kvweave.libraries import FileBytes, TextSource
from kvweave.serve.errors import ApiError, describe
from kvweave.serve.limits import Limits
from kvweave.serve.wire_kb import TextIn

LONGEST_NAME = 200
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f]")
WANTS = "send a form with files, or JSON with text and title"


async def read_upload(request: Request, limits: Limits) -> list[TextSource | FileBytes]:
    """Sources, at least one. Raises ApiError."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return await _files(request, limits)
    if kind == "application/json":
        return [_text(await request.body())]
    raise ApiError(415, f"Content-Type {kind[:60]!r} is no upload; {WANTS}")


def _text(body: bytes) -> TextSource:
    try:
        given = TextIn.model_validate(json.loads(body))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ValidationError):
            faults: list[Any] = [{**f, "loc": ("body", *f["loc"])} for f in error.errors()]
            raise describe(faults) from None
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not given.text.strip():
        raise ApiError(400, "'text' is empty; send some", param="text")
    return TextSource(given.title, given.text, given.key)


async def _files(request: Request, limits: Limits) -> list[TextSource | FileBytes]:
    try:
        form = await request.form(max_files=limits.upload_files, max_fields=16)
    except ApiError:  # too large, or too slow
        raise
    except HTTPException as error:  # what the parser found
        raise ApiError(400, f"the form does not parse: {error.detail}") from error
    try:
        parts = list(form.multi_items())
        fields = [name for name, part in parts if not isinstance(part, UploadFile)]
        if fields:
            raise ApiError(400, f"'{fields[0][:60]}' is no file; {WANTS}", param=fields[0][:60])
        files = [part for _, part in parts if isinstance(part, UploadFile)]
        if not files:
            raise ApiError(400, f"the form has no file; {WANTS}")
        return [FileBytes(shown_name(file.filename or ""), await file.read()) for file in files]
    finally:
        await form.close()


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
