"""The fields of a row in the table of GGUF forms; `models/gguf_forms.py` has the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

RMS_EPSILON = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}


@dataclass(frozen=True, slots=True)
class GgufForm:
    """How llama.cpp stores a family: its architecture, and in what settings and tensors differ from transformers'.

    Queries, keys and values may be in one tensor, in this order, or in three; both are read.

    Which family a file has:
        architecture: value of general.architecture.
        also: further architectures with the same form, for models with images or without experts.
        when: settings that tell families of one architecture apart. The family of a file is the one with the most
            such settings that are all in the file; of equal ones, the first row.
        model_type: type as which a file is loaded, if it is not the row's own.

    Tensors:
        root: how names in checkpoints begin if transformers' names begin with "model.".
        pairs_halves: the two values of a rotary pair are neighbours.
        adds_to_norms: constant that the converter adds to the weights of norms.
        joined: module in a layer -> the tensors that are concatenated to its weight, if gguf does not map the name.
        stacked: list of modules in a layer -> the tensor with a row for each.
        by_layer: parameter in a layer -> the setting, by full name, with its values in all layers.
        parameters: parameter in a layer -> its tensor's full name in the layer, if gguf does not map the name.
        tiled_heads: heads of a gated delta rule are ordered by their index within a key head first, then by key head.

    Settings, by name without the architecture's prefix:
        fields: setting -> field of the config, for numbers, besides those of all architectures; 0 counts as absent.
        sizes: the same, for settings that all files have.
        quotients: field -> two such settings whose quotient it is.
        choices: setting -> its field, and the field's values by those of the setting (None: the setting is absent).
        flags: tensor in a layer -> a field, its value if a layer has the tensor, and its value otherwise.
        periods: tensor in a layer -> the fields for the period of layers with it, and for the first such layer.
        constants: fields that files do not have.
        ignored: settings without effect: with these values, or with any (None).

    Config:
        has_head_dim, rotates_in_part: the config has a field for the size of a head, and for the part that is rotated.
        scalings: the scalings of rotary positions that it supports. With "proportional", a file's factors are 1 for
            pairs that are rotated, and infinite for the others.
        window: the window of files that name none; 0: they have none.
        window_period: if a file has no pattern of windows, each layer of this period sees all slots; None: a file must
            have a pattern.
        window_flag: field that switches windows on.
        window_base: base of rotary frequencies in layers with a window, if a file names none; None: that of the others.
        by_type: heads, keys and MLPs depend on a layer's type; see `gguf_layers`.
        lists_layers: the config needs the type of each layer.
        mixed_by: the layers with the family's other mixer: those without key heads ("kv_heads"); of layers with a
            single sub-layer, those with neither key heads nor MLP ("sub_layers"); or all but each n-th ("interval").
        score_scale: field for the factor of scores.
        wide_scores: number of layers of the one model that scales scores by the width of the embedding per head.
        unnormed: number of experts of the one model without norms of queries and keys.

    Export:
        pre_tokenizer: llama.cpp's name for the splitting of texts into words, for files that we write; None: we write
            none.
    """

    architecture: str
    also: tuple[str, ...] = ()
    model_type: str | None = None
    pre_tokenizer: str | None = None
    root: str = "model."
    when: tuple[str, ...] = ()
    pairs_halves: bool = False
    adds_to_norms: float = 0.0
    tiled_heads: bool = False
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stacked: Mapping[str, str] = field(default_factory=dict)
    by_layer: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=lambda: dict(RMS_EPSILON))
    sizes: Mapping[str, str] = field(default_factory=dict)
    quotients: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    choices: Mapping[str, tuple[str, Mapping[Any, Any]]] = field(default_factory=dict)
    flags: Mapping[str, tuple[str, Any, Any]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    ignored: Mapping[str, tuple[Any, ...] | None] = field(default_factory=dict)
    has_head_dim: bool = False
    rotates_in_part: bool = False
    scalings: tuple[str, ...] = ("linear", "yarn", "longrope")
    window: int = 0
    window_period: int | None = None
    window_flag: str | None = None
    window_base: float | None = None
    by_type: bool = False
    lists_layers: bool = False
    mixed_by: Literal["kv_heads", "sub_layers", "interval"] | None = None
    periods: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    score_scale: str | None = None
    wide_scores: int | None = None
    unnormed: int | None = None

    @property
    def architectures(self) -> tuple[str, ...]:
        return self.architecture, *self.also
