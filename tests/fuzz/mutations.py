"""Changes to bytes that readers of foreign files tend to miss."""

import random
import struct
from collections.abc import Sequence

NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1)
TOKENS = (
    *(b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\n", b"\r\n", b'"', b"\\", b"{", b"}", b"[", b"]"),
    *(b"{{", b"}}", b"{%", b"%}", b"<", b">", b"&#0;", b"<!--", b"%s", b"../", b"1e999", b"-1"),
    *(b"NaN", b"null", b"true", b'"\\ud800"', "é".encode(), "\u202e".encode(), "😀".encode()),
)
MOST_BYTES = 64 << 10


def mutate(rng: random.Random, corpus: Sequence[bytes]) -> bytes:
    """One of the corpus with one to six changes."""
    data = bytearray(rng.choice(corpus))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        _change(rng, data, corpus)
    return bytes(data[:MOST_BYTES])


def _change(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    match rng.randrange(9):
        case 0 if data:  # a bit
            data[at % len(data)] ^= 1 << rng.randrange(8)
        case 1 if data:  # a byte
            data[at % len(data)] = rng.randrange(256)
        case 2:  # cut off
            del data[at:]
        case 3:  # a part goes
            del data[at : at + rng.choice((1, 2, 8, 100))]
        case 4:  # a part comes twice, or very often
            part = bytes(data[at : at + rng.choice((1, 4, 30))])
            data[at:at] = part * rng.choice((1, 2, 50, 2000))
        case 5:  # a number that is on some edge
            code = rng.choice(("<B", "<H", "<I", "<Q"))
            size = struct.calcsize(code)
            number = rng.choice(NUMBERS) % (1 << 8 * size)
            data[at : at + size] = struct.pack(code, number)
        case 6:  # a word with a meaning
            data[at:at] = rng.choice(TOKENS)
        case 7:  # the rest of another one
            other = rng.choice(corpus)
            data[at:] = other[rng.randrange(len(other) + 1) :]
        case _:  # a few bytes of noise
            data[at:at] = rng.randbytes(rng.choice((1, 3, 16)))
