"""Checksums of stored bytes. The algorithm's name stands in each object's header, so a reader
never guesses.

Measured on one core of a 2-core Xeon over 384 KiB blocks (one SmolLM2 layer of 256 tokens):
xxh3 11.1 GB/s, crc32 4.0, adler32 2.8, sha1 1.5, blake2b 0.8; the same core copies 14 GB/s and
reads the page cache at 5.5. Two readers that check with xxh3 keep 0.96 of a plain `readinto`, with
crc32 0.49. Hence xxh3. `xxhash` is a dependency of kvweave, but the core must also run where torch
and numpy are all there is (a GPU machine that nothing can be installed on): there, crc32.
"""

import zlib
from collections.abc import Callable
from functools import cache

from kvweave.errors import TierForeign

Buffer = bytes | bytearray | memoryview
KNOWN = ("xxh3", "crc32")


@cache
def best_algorithm() -> str:
    """What this process writes with."""
    try:
        import xxhash  # noqa: F401
    except ImportError:
        return "crc32"
    return "xxh3"


@cache
def checksum_of(algorithm: str) -> Callable[[Buffer], int]:
    """The function behind a name. It releases the interpreter lock on long buffers."""
    if algorithm == "crc32":
        return zlib.crc32
    if algorithm == "xxh3":
        try:
            from xxhash import xxh3_64_intdigest
        except ImportError:
            raise TierForeign(
                "these objects are checked with xxh3, which this Python lacks; pip install xxhash"
            ) from None
        digest: Callable[[Buffer], int] = xxh3_64_intdigest
        return digest
    raise TierForeign(
        f"unknown checksum {algorithm!r}: written by a newer kvweave; this one knows {KNOWN}"
    )
