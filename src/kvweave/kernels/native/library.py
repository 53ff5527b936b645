"""The functions of a compiled rows.c, as Python calls them: other threads run meanwhile.

Structures are given by address or by reference (fields.py).
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvweave.kernels.native.build import BuildError
from kvweave.kernels.native.fields import (
    AttentionFields,
    ChangesFields,
    LayingFields,
    MatrixFields,
    PassFields,
    PlacingFields,
    ShiftingFields,
)

PLAIN = "plain C"  # the kind without instructions of a CPU: KIND of integers.h
_INT, _LONG, _FLOAT, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class CompiledLibrary:
    """A loaded file. Any thread. `threads`: whether several work on one call."""

    def __init__(self, path: Path, *, threads: bool) -> None:
        """Raises BuildError where it cannot be loaded."""
        self.threads = threads
        self.name = path.stem  # another where the source, the flags or the CPU are others
        try:
            held = ctypes.CDLL(str(path))
            kind = _declare(held.kvw_kind, [], ctypes.c_char_p)
            self.padded_channels = _declare(held.kvw_padded_channels, [_LONG], _LONG)
            self.pack = _declare(held.kvw_pack, [_POINTER, _LONG, _LONG, _POINTER, _POINTER], None)
            self.multiply = _declare(
                held.kvw_multiply,
                [_POINTER, _POINTER, _LONG, _POINTER, _LONG, _LONG, _INT, _INT],
                _INT,
            )
            matrix = ctypes.POINTER(MatrixFields)
            self.multiply_floats = _declare(
                held.kvw_multiply_floats,
                [matrix, _POINTER, _LONG, _POINTER, _LONG, _LONG, _INT, _INT],
                _INT,
            )
            self.rms_norm = _declare(
                held.kvw_rms_norm,
                [_POINTER, _LONG, _POINTER, _FLOAT, _POINTER, _LONG, _LONG, _LONG, _INT],
                None,
            )
            self.silu_mul = _declare(held.kvw_silu_mul, [_POINTER, *[_LONG] * 3, _INT], None)
            # rows of heads: an address, from row to row, head to head
            at = [_POINTER, _LONG, _LONG]
            self.rotate = _declare(
                held.kvw_rotate, [*at, _POINTER, *at, *at, *[_LONG] * 4, _INT], None
            )
            fields = ctypes.POINTER(AttentionFields)
            self.attend_rows = _declare(held.kvw_attend_rows, [fields, _INT], _INT)
            # of a head, for attend_rows and layers
            self.most_dim: int = _declare(held.kvw_most_dim, [], _LONG)()
            rows = [_POINTER, _LONG, _POINTER, _LONG, _INT]
            self.begin_layer = _declare(held.kvw_begin_layer, [_POINTER, _POINTER, *rows], _INT)
            self.end_layer = _declare(held.kvw_end_layer, [_POINTER, _POINTER, *rows], _INT)
            of_pass = ctypes.POINTER(PassFields)
            self.run_layers = _declare(held.kvw_run_layers, [of_pass, _LONG, _LONG, _INT], _INT)
            laying, changes = ctypes.POINTER(LayingFields), ctypes.POINTER(ChangesFields)
            self.lay_chunks = _declare(held.kvw_lay_chunks, [laying, _INT], None)
            self.sum_changes = _declare(held.kvw_sum_changes, [changes, _INT], None)
            shifting, placing = ctypes.POINTER(ShiftingFields), ctypes.POINTER(PlacingFields)
            self.shift_runs = _declare(held.kvw_shift_runs, [shifting, _INT], None)
            self.place_rows = _declare(held.kvw_place_rows, [placing, _INT], None)
        except (OSError, AttributeError) as error:
            raise BuildError(f"what was compiled cannot be loaded: {error}") from None
        self.kind: str = kind().decode()  # the instructions it multiplies with

    @property
    def has_integers(self) -> bool:
        """Whether it multiplies 8-bit weights with instructions of this CPU made for integers."""
        return self.kind != PLAIN


def _declare(function: Any, takes: list[type], gives: type | None) -> Callable[..., Any]:
    function.argtypes, function.restype = takes, gives
    called: Callable[..., Any] = function
    return called
