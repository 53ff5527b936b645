"""How much of a JSON body is not its longest text, counted while it arrives.

What a text is long is read quickly; of everything else a few megabytes take a parser seconds.
"""

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
