"""The structures that Python and `pass.cpp` share; the comments stand there."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p

NO_NORM, RMS, RMS_PLUS_ONE, LAYER = range(4)
SILU, GELU, GELU_TANH, RELU = range(4)
ATTENTION, MLP, KEEP, LOGITS = range(4)
WORK = ("maps", "attention", "rest")  # kinds of work whose seconds a pass can note


class Map(Structure):
    """A linear map."""

    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("stride", c_int64),
        ("n_in", c_int32),
        ("n_out", c_int32),
        ("bits", c_int32),
        ("group", c_int32),
    ]


class Norm(Structure):
    """A norm over the last dimension."""

    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("eps", c_float), ("kind", c_int32)]


class Attention(Structure):
    """An attention sub-layer with its norms."""

    _fields_ = [
        ("before", Norm),
        ("after", Norm),
        ("query_norm", Norm),
        ("key_norm", Norm),
        ("projections", Map * 3),
        ("out", Map),
        ("n_projections", c_int32),
        ("n_heads", c_int32),
        ("n_kv_heads", c_int32),
        ("width", c_int32),
        ("query_at", c_int32),
        ("query_step", c_int32),
        ("key_at", c_int32),
        ("key_step", c_int32),
        ("value_at", c_int32),
        ("value_step", c_int32),
        ("scaling", c_float),
    ]


class Mlp(Structure):
    """An MLP sub-layer with its norms."""

    _fields_ = [
        ("before", Norm),
        ("after", Norm),
        ("into", Map * 2),
        ("out", Map),
        ("n_in_maps", c_int32),
        ("gated", c_int32),
        ("n_inner", c_int32),
        ("activation", c_int32),
    ]


class Step(Structure):
    """One thing that a pass does."""

    _fields_ = [
        ("part", c_void_p),
        ("kind", c_int32),
        ("layer", c_int32),
        ("window", c_int32),
        ("rows", c_int32),
        ("rotation", c_int32),
        ("from_kept", c_int32),
    ]


class Rotation(Structure):
    """Tables of a rotary embedding."""

    _fields_ = [("cos", c_void_p), ("sin", c_void_p), ("width", c_int64)]


class RowList(Structure):
    """Rows of a pass; no pointer: the first `n`."""

    _fields_ = [("rows", c_void_p), ("n", c_int64)]


class Sequence(Structure):
    """Consecutive rows of a pass that have keys and values of their own."""

    _fields_ = [
        ("visible", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("head_stride", c_int64),
        ("n_rows", c_int32),
        ("first_slot", c_int32),
    ]


class Call(Structure):
    """The rows of a pass and what they work on."""

    _fields_ = [
        ("hidden", c_void_p),
        ("positions", c_void_p),
        ("sequences", POINTER(Sequence)),
        ("lists", POINTER(RowList)),
        ("rotations", POINTER(Rotation)),
        ("logits", c_void_p),
        ("norm", POINTER(Norm)),
        ("seconds", POINTER(c_double)),
        ("n_rows", c_int32),
        ("n_hidden", c_int32),
        ("n_sequences", c_int32),
        ("n_lists", c_int32),
        ("n_threads", c_int32),
        ("is_bf16", c_int32),
    ]


STRUCTURES = (Map, Norm, Attention, Mlp, Step, Sequence, Call)
