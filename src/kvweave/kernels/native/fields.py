"""The structures of the C source, as ctypes fills them.

They hold addresses alone: who makes one keeps the memory that it speaks of.
"""

import ctypes

Fields = tuple[tuple[str, type], ...]


def _addresses(names: str) -> Fields:
    return tuple((name, ctypes.c_void_p) for name in names.split())


def _longs(names: str) -> Fields:
    return tuple((name, ctypes.c_int64) for name in names.split())


def _floats(names: str) -> Fields:
    return tuple((name, ctypes.c_float) for name in names.split())


class ProductFields(ctypes.Structure):
    """`Product` of product.h."""

    _fields_ = (
        *_addresses("packed start scale bias share more offset"),
        *_longs("in_dim columns out_dim"),
    )


class HeldFields(ctypes.Structure):
    """`Held` of one_row.h."""

    _fields_ = (
        *_addresses("keys values"),
        *_longs("key_row key_head value_row value_head"),
        *_addresses("pieces"),
        *_longs("num_pieces"),
    )


class AttentionFields(ctypes.Structure):
    """`Attention` of many_rows.h."""

    _fields_ = (
        *_addresses("q"),
        *_longs("q_row q_head"),
        *_addresses("positions"),
        ("held", HeldFields),
        *_addresses("out"),
        *_longs("out_row rows kv_heads group dim"),
        *_floats("scale"),
    )


class MatrixFields(ctypes.Structure):
    """`Matrix` of floats.h."""

    _fields_ = (*_addresses("rounded weight bias"), *_longs("in_dim out_dim"))


class LayerFields(ctypes.Structure):
    """`Layer` of layers.h."""

    _fields_ = (
        *_addresses("input_norm mlp_norm q_norm k_norm"),
        ("qkv", MatrixFields),
        ("out", MatrixFields),
        ("gate_up", MatrixFields),
        ("down", MatrixFields),
    )


class ShapeFields(ctypes.Structure):
    """`Shape` of layers.h."""

    _fields_ = (*_longs("hidden inner heads kv_heads dim half"), *_floats("eps scale"))


class SequenceFields(ctypes.Structure):
    """`SequenceRows` of layers.h."""

    _fields_ = (
        *_longs("first count"),
        *_addresses("keys values"),
        *_longs("layer_stride"),
        *_addresses("pieces"),
        *_longs("num_pieces"),
    )


class PassFields(ctypes.Structure):
    """`Pass` of layers.h."""

    _fields_ = (
        *_addresses("shape layers h"),
        *_longs("rows"),
        *_addresses("cos sin positions slots sequences"),
        *_longs("num_sequences"),
    )


class StoredFields(ctypes.Structure):
    """`StoredChunk` of stored.h."""

    _fields_ = (*_addresses("data"), *_longs("tokens row nth"))


class LayingFields(ctypes.Structure):
    """`Laying` of stored.h."""

    _fields_ = (
        *_addresses("chunks"),
        *_longs("num_chunks group heads dim half"),
        *_addresses("cos sin keys values"),
        *_longs("key_row value_row"),
    )


class ChangesFields(ctypes.Structure):
    """`Changes` of stored.h."""

    _fields_ = (
        *_addresses("fresh_k fresh_v"),
        *_longs("fresh_k_row fresh_k_head fresh_v_row fresh_v_head"),
        *_addresses("rows at cos sin keys values"),
        *_longs("key_row value_row"),
        *_addresses("bounds weights by"),
        *_longs("chunks heads dim half"),
    )


class ShiftingFields(ctypes.Structure):
    """`Shifting` of stored.h."""

    _fields_ = (
        *_addresses("runs cos sin keys values"),
        *_longs("key_row value_row"),
        *_addresses("by_k by_v"),
        *_longs("chunks heads dim half"),
    )


class PlacingFields(ctypes.Structure):
    """`Placing` of stored.h."""

    _fields_ = (
        *_addresses("q k v"),
        *_longs("q_row q_head k_row k_head v_row v_head"),
        *_addresses("cos sin at turned keys values"),
        *_longs("key_row value_row rows q_heads kv_heads dim half"),
    )
