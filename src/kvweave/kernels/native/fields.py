"""The structures of the C source, as ctypes fills them.

They hold addresses alone: who makes one keeps the memory that it speaks of.
"""

import ctypes

_LONG, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class ProductFields(ctypes.Structure):
    """`Product` of product.h."""

    _fields_ = (
        ("packed", _POINTER),
        ("start", _POINTER),
        ("scale", _POINTER),
        ("bias", _POINTER),
        ("share", _POINTER),
        ("more", _POINTER),
        ("offset", _POINTER),
        ("in_dim", _LONG),
        ("columns", _LONG),
        ("out_dim", _LONG),
    )


class HeldFields(ctypes.Structure):
    """`Held` of one_row.h."""

    _fields_ = (
        ("keys", _POINTER),
        ("values", _POINTER),
        ("key_row", _LONG),
        ("key_head", _LONG),
        ("value_row", _LONG),
        ("value_head", _LONG),
        ("pieces", _POINTER),
        ("num_pieces", _LONG),
    )


class AttentionFields(ctypes.Structure):
    """`Attention` of many_rows.h."""

    _fields_ = (
        ("q", _POINTER),
        ("q_row", _LONG),
        ("q_head", _LONG),
        ("positions", _POINTER),
        ("held", HeldFields),
        ("out", _POINTER),
        ("rows", _LONG),
        ("kv_heads", _LONG),
        ("group", _LONG),
        ("dim", _LONG),
        ("scale", _FLOAT),
    )


class MatrixFields(ctypes.Structure):
    """`Matrix` of layers.h."""

    _fields_ = (
        ("rounded", _POINTER),
        ("weight", _POINTER),
        ("bias", _POINTER),
        ("in_dim", _LONG),
        ("out_dim", _LONG),
    )


class LayerFields(ctypes.Structure):
    """`Layer` of layers.h."""

    _fields_ = (
        ("input_norm", _POINTER),
        ("mlp_norm", _POINTER),
        ("q_norm", _POINTER),
        ("k_norm", _POINTER),
        ("qkv", MatrixFields),
        ("out", MatrixFields),
        ("gate_up", MatrixFields),
        ("down", MatrixFields),
    )


class ShapeFields(ctypes.Structure):
    """`Shape` of layers.h."""

    _fields_ = (
        ("hidden", _LONG),
        ("inner", _LONG),
        ("heads", _LONG),
        ("kv_heads", _LONG),
        ("dim", _LONG),
        ("half", _LONG),
        ("eps", _FLOAT),
        ("scale", _FLOAT),
    )


class SequenceFields(ctypes.Structure):
    """`SequenceRows` of layers.h."""

    _fields_ = (
        ("first", _LONG),
        ("count", _LONG),
        ("keys", _POINTER),
        ("values", _POINTER),
        ("layer_stride", _LONG),
        ("pieces", _POINTER),
        ("num_pieces", _LONG),
    )


class PassFields(ctypes.Structure):
    """`Pass` of layers.h."""

    _fields_ = (
        ("shape", _POINTER),
        ("layers", _POINTER),
        ("h", _POINTER),
        ("rows", _LONG),
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("positions", _POINTER),
        ("slots", _POINTER),
        ("sequences", _POINTER),
        ("num_sequences", _LONG),
    )


class StoredFields(ctypes.Structure):
    """`StoredChunk` of stored.h."""

    _fields_ = (("data", _POINTER), ("tokens", _LONG), ("row", _LONG), ("nth", _LONG))


class LayingFields(ctypes.Structure):
    """`Laying` of stored.h."""

    _fields_ = (
        ("chunks", _POINTER),
        ("num_chunks", _LONG),
        ("group", _LONG),
        ("heads", _LONG),
        ("dim", _LONG),
        ("half", _LONG),
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("keys", _POINTER),
        ("values", _POINTER),
        ("key_row", _LONG),
        ("value_row", _LONG),
    )


class ChangesFields(ctypes.Structure):
    """`Changes` of stored.h."""

    _fields_ = (
        ("fresh_k", _POINTER),
        ("fresh_v", _POINTER),
        ("fresh_k_row", _LONG),
        ("fresh_k_head", _LONG),
        ("fresh_v_row", _LONG),
        ("fresh_v_head", _LONG),
        ("rows", _POINTER),
        ("at", _POINTER),
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("keys", _POINTER),
        ("values", _POINTER),
        ("key_row", _LONG),
        ("value_row", _LONG),
        ("bounds", _POINTER),
        ("weights", _POINTER),
        ("by", _POINTER),
        ("chunks", _LONG),
        ("heads", _LONG),
        ("dim", _LONG),
        ("half", _LONG),
    )


class ShiftingFields(ctypes.Structure):
    """`Shifting` of stored.h."""

    _fields_ = (
        ("runs", _POINTER),
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("keys", _POINTER),
        ("values", _POINTER),
        ("key_row", _LONG),
        ("value_row", _LONG),
        ("by_k", _POINTER),
        ("by_v", _POINTER),
        ("chunks", _LONG),
        ("heads", _LONG),
        ("dim", _LONG),
        ("half", _LONG),
    )


class PlacingFields(ctypes.Structure):
    """`Placing` of stored.h."""

    _fields_ = (
        ("q", _POINTER),
        ("k", _POINTER),
        ("v", _POINTER),
        ("q_row", _LONG),
        ("q_head", _LONG),
        ("k_row", _LONG),
        ("k_head", _LONG),
        ("v_row", _LONG),
        ("v_head", _LONG),
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("at", _POINTER),
        ("turned", _POINTER),
        ("keys", _POINTER),
        ("values", _POINTER),
        ("key_row", _LONG),
        ("value_row", _LONG),
        ("rows", _LONG),
        ("q_heads", _LONG),
        ("kv_heads", _LONG),
        ("dim", _LONG),
        ("half", _LONG),
    )
