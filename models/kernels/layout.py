"""C structures shared by Python and `layout.h`, which documents their fields."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from typing import Any

NO_NORM, RMS, RMS_PLUS_ONE, LAYER, RMS_WIDE = range(5)
SILU, GELU, GELU_TANH, RELU, RELU_SQUARED, XIELU, CLAMPED = range(7)
SCORES = ("softmax", "sigmoid", "sparse_mixer", "late_sigmoid")  # How experts are scored.
BY_HEAD, WHOLE, ROTATED, LATENT = range(4)  # What the norms of queries and keys apply to, and when: see `layout.h`.
ATTENTION, MLP, SAVE, LOGITS, MIXTURE, CONVOLUTION, RECURRENCE, LAYER_END, LAYER_INPUTS = range(9)
GATED_AFTER_NORM, GATED_BEFORE_NORM, GATED_ALONE = range(3)  # How the output of a recurrent state is normed and gated.
# Encodings of the scales and zeros of packed weights: the values of `ScaleType` in `quantised.h`.
ZERO_VALUES, ZERO_CODES_BF16, ZERO_CODES_F16, ZERO_CODES_F32, PAIRS, CENTRED, EXPONENTS = range(7)
SUPER_PAIRS, SUPER_CENTRED = range(7, 9)
NUMBERS, E2M1, IQ4 = range(3)  # Tables that codes index: the values of `Table` in `codes.h`.
ROWS = 16  # Outputs per block of packed weights; the last block is padded with zeros.
WORK = ("maps", "attention", "rest")  # Kinds of work that a pass can time separately.


class Unsupported(Exception):
    """The kernels cannot compute a part of the model; the message names it."""


def _fields(kind: type[Any], names: str) -> list[tuple[str, type[Any]]]:
    """Return consecutive fields of one type, as C declares them."""
    return [(name, kind) for name in names.split()]


class Map(Structure):
    _fields_ = [
        *_fields(c_void_p, "weight bias scales order"),
        *_fields(c_int64, "stride"),
        *_fields(c_int32, "n_in n_out bits group scale_type table"),
    ]


class Norm(Structure):
    _fields_ = [*_fields(c_void_p, "weight bias"), ("eps", c_float), *_fields(c_int32, "kind step")]


class Attention(Structure):
    _fields_ = [
        *_fields(Norm, "before after query_norm key_norm value_norm inner"),
        ("projections", Map * 3),
        ("out", Map),
        ("query_map", Map),
        *_fields(c_void_p, "key_maps value_maps"),
        *_fields(c_int32, "n_projections n_heads n_kv_heads width rotary"),
        *_fields(c_int32, "query_at query_step key_at key_step value_at value_step head_norm gated reads_shared_kv"),
        *_fields(c_float, "scaling softcap clip added_scale"),
        ("sinks", c_void_p),
    ]


class Convolution(Structure):
    _fields_ = [
        *_fields(Norm, "before after"),
        *_fields(Map, "into out"),
        *_fields(c_void_p, "taps bias"),
        ("n_taps", c_int32),
        ("added_scale", c_float),
    ]


class Recurrence(Structure):
    _fields_ = [
        *_fields(Norm, "before after"),
        ("projections", Map * 4),
        *_fields(Map, "out low steps"),
        ("low_norms", Norm * 3),
        *_fields(c_void_p, "runs gates places taps taps_bias decay step_bias skip norm"),
        *_fields(c_float, "norm_eps min_step max_step step_scale gate_scale added_scale"),
        *_fields(c_int32, "n_runs n_projections n_heads n_key_heads key_width value_width n_taps n_numbers"),
        *_fields(c_int32, "convolves_keys n_low gating norm_width"),
    ]


class Mlp(Structure):
    _fields_ = [
        *_fields(Norm, "before after inner"),
        ("into", Map * 2),
        ("out", Map),
        *_fields(c_int32, "n_in_maps gated n_inner activation"),
        ("curve", c_float * 4),
        *_fields(c_float, "gate_scale added_scale"),
    ]


class Routing(Structure):
    _fields_ = [
        *_fields(c_int32, "n_experts n_chosen n_groups n_groups_chosen scores normalised n_best"),
        *_fields(c_float, "min_sum scale jitter"),
    ]


class Mixture(Structure):
    _fields_ = [
        *_fields(Norm, "before after"),
        *_fields(c_void_p, "router correction router_bias"),
        ("widest", Map),
        *_fields(c_void_p, "into out shared_gate"),
        ("routing", Routing),
        *_fields(c_int32, "has_shared wide_router rounded_logits weighs_inputs n_in_maps n_inner n_shared_inner"),
        ("mlp", Mlp),
        *_fields(c_float, "shared_scale added_scale"),
        *_fields(Norm, "router_before shared_before experts_after shared_after"),
        ("expert_scale", c_void_p),
        ("logit_scale", c_float),
    ]


class LayerEnd(Structure):
    _fields_ = [("after", Norm), *_fields(Map, "gate out"), ("mlp", Mlp), ("scale", c_float)]


class LayerInputs(Structure):
    _fields_ = [("norm", Norm), ("map", Map), *_fields(c_float, "map_scale sum_scale"), ("width", c_int32)]


class Step(Structure):
    _fields_ = [("part", c_void_p), *_fields(c_int32, "kind layer window rows rotation from_saved")]


class Rotation(Structure):
    _fields_ = [*_fields(c_void_p, "cos sin query_scale"), *_fields(c_int32, "width pairs wide")]


class RowList(Structure):
    """Row indices of a pass; without a pointer, the first `n` rows."""

    _fields_ = [("rows", c_void_p), ("n", c_int64)]


class Sequence(Structure):
    """Consecutive rows of a pass that belong to one sequence, with its own KV buffer."""

    _fields_ = [
        *_fields(c_void_p, "visible keys values inputs states coded roots"),
        *_fields(c_int64, "capacity n_coded coded_units"),
        *_fields(c_int32, "n_rows first_slot committed n_kept lag is_text"),
    ]


class CountedExperts(Structure):
    """Counts of the experts that a pass's rows took; see `ExpertCounts` in `mixture.h`."""

    _fields_ = _fields(c_int64, "mixtures distinct taken repeated")


class Call(Structure):
    """A pass: its rows, and the memory that they read and write; `Pass` in `layout.h`."""

    _fields_ = [
        *_fields(c_void_p, "hidden positions"),
        ("sequences", POINTER(Sequence)),
        ("lists", POINTER(RowList)),
        ("rotations", POINTER(Rotation)),
        *_fields(c_void_p, "logits inputs"),
        ("norm", POINTER(Norm)),
        ("seconds", POINTER(c_double)),
        ("experts", POINTER(CountedExperts)),
        *_fields(c_int32, "n_rows n_hidden n_inputs n_sequences n_lists n_threads is_bf16"),
    ]


STRUCTURES = (
    *(Map, Norm, Attention, Mlp, Step, Rotation, Sequence, Call, Mixture, Convolution, Recurrence),
    *(LayerEnd, LayerInputs),
)
