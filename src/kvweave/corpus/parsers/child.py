"""The process that parses: reads a file from its standard input, writes its records to its standard
output, and waits for the next. `parser_process.py` starts it, and kills it where it takes too long.

    request   head length u32, data length u64, head (JSON), data
    reply     b"r", count u64, then the fields of each record: lengths u64 × 4 × count, bytes in
              UTF-8
              b"e", length u64, the reason in UTF-8

It holds itself to the limits of the request: memory by the operating system's own limit, time by an
alarm that ends it even where its parent is gone. It leaves by itself, with code 0, when it was idle
for a while or has become large.
"""

import json
import os
import resource
import select
import signal
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvweave.corpus.parsers import parse
from kvweave.corpus.parsers.base import ParsedRecord, ParseLimits
from kvweave.errors import CorpusError, KVWeaveError

HEAD = struct.Struct("<IQ")
SIZE = struct.Struct("<Q")
RECORDS, REASON = b"r", b"e"
FIELDS = "fields"  # instead of a file's name: a JSON object, of which the fields are wanted
IDLE_S = 30.0
LARGE_KIB = 256 << 10  # of memory at its height, from which on another process is better
LATE_S = 5  # that the parent has to end it, before the alarm does
LONGEST_VALUE = 1 << 16  # characters of JSON of a field that is no text, such as metadata


def main() -> None:
    source, target = os.fdopen(0, "rb", 0), os.fdopen(1, "wb", 0)
    sys.stdout = sys.stderr  # a parser that prints must not write into a reply
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while _has_request():
        head = _read_exactly(source, HEAD.size)
        if not head:
            return
        head_bytes, data_bytes = HEAD.unpack(head)
        request = json.loads(_read_exactly(source, head_bytes))
        reply = _reply(request, _read_exactly(source, data_bytes))
        while reply:
            reply = reply[target.write(reply) :]
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > LARGE_KIB:
            return


def _has_request() -> bool:
    poll = select.poll()
    poll.register(0, select.POLLIN)
    return bool(poll.poll(IDLE_S * 1000))


def _read_exactly(source: Any, num_bytes: int) -> bytes:
    """Empty where the parent is gone."""
    data = bytearray()
    while len(data) < num_bytes:
        piece = source.read(min(num_bytes - len(data), 1 << 20))
        if not piece:
            sys.exit(0)
        data += piece
    return bytes(data)


def _reply(request: dict[str, Any], data: bytes) -> memoryview:
    limits = ParseLimits(**request["limits"])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, hard))
    signal.alarm(int(limits.seconds) + LATE_S)
    try:
        if request["name"] == FIELDS:
            records = _fields(data)
        else:
            records = parse(Path(request["name"]), data, limits)
        return memoryview(_pack(records))
    except MemoryError:
        words = (
            f"reading it takes more than {limits.memory_bytes / 2**20:,.0f} MiB of memory; "
            "split it, or raise library.parse_bytes"
        )
    except KVWeaveError as error:
        words = str(error)
    except Exception as error:  # whatever a parser trips over, the other files can do without
        shown = " ".join(str(error).split())[:200]
        words = f"{type(error).__name__}: {shown}" if shown else type(error).__name__
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, hard))
    reason = words.encode(errors="replace")
    return memoryview(REASON + SIZE.pack(len(reason)) + reason)


def _pack(records: Sequence[ParsedRecord]) -> bytes:
    parts = [part.encode() for record in records for part in record]
    lengths = struct.pack(f"<{len(parts)}Q", *map(len, parts))
    return b"".join([RECORDS, SIZE.pack(len(records)), lengths, *parts])


def _fields(data: bytes) -> list[ParsedRecord]:
    """The fields of a JSON object as (name, "text", value); of what is no text as (name, "json",
    its beginning)."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CorpusError("the body must be a JSON object")
    return [
        ParsedRecord(_valid(name), "text", _valid(each))
        if isinstance(each, str)
        else ParsedRecord(_valid(name), "json", json.dumps(each)[:LONGEST_VALUE])
        for name, each in value.items()
    ]


def _valid(text: str) -> str:
    """JSON can name halves of a surrogate pair, which no text has."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise CorpusError("the body must be valid Unicode text") from None
    return text


if __name__ == "__main__":
    main()
