"""What a row of the table of GGUF forms says; `models/gguf_forms.py` has the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

RMS_EPSILON = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}


@dataclass(frozen=True, slots=True)
class GgufForm:
    """How llama.cpp keeps a family: its architecture, and how its settings and tensors differ from transformers'.

    Of several families of one `architecture`, that of a file is the one of most settings `when` of which the file has
    all, and of these the first. Files of the architectures `also` are the same but for what images need, or
    have no experts. A file is loaded as the type `model_type`, if this is not the row's own. `pre_tokenizer`: its words
    for how texts become words, for files that are written; None: none are. `root`: how names begin in checkpoints, by
    which the converter goes, where those of transformers' modules begin with "model.".

    Tensors. `pairs_halves`: the two halves of a rotary pair lie side by side. `adds_to_norms`: so much was added to the
    weights of norms. `joined`: by the names of modules in a layer, the tensors they are made of, one after the other,
    where gguf does not map the name. `stacked`: by the names of lists of modules, the tensor with a row for each.
    `by_layer`: by the names of parameters in a layer, the setting, by its full name, with their values for all layers.
    Queries, keys and values are in this order in one tensor, or in three: whichever the file has. `tiled_heads`: of the
    heads of a gated delta rule the first of all key heads come first, then the second, and so on. `parameters`: by the
    names of parameters in a layer, the tensor of each, by its full name in the layer, where gguf does not map it.

    Settings, by name without the architecture's prefix. `fields` of the config by settings that are numbers, beside
    those of all architectures; 0 means none. `sizes` likewise, of settings that all files have. `quotients`: fields of
    which a value is one such setting by another. `choices`: a setting's field, and the field's values by those of the
    setting, with None for a file without the setting. `flags`: a field's values where a layer has a tensor, and
    where none has. `periods`: by the name of a tensor, the fields for every how many layers have it, and for the first
    that has. `constants`: fields of files that say nothing of them. `ignored`: settings that change nothing: with these
    values, or any (None).

    `has_head_dim`: the config has a field for the size of a head. `rotates_in_part`: it has one for how much of a head
    is rotated. `scalings` of rotary positions that it takes; with "proportional" a file's factors are 1 for pairs that
    are rotated, and without a bound for the others. `window` of files that name none; 0: they have none.
    `window_period`: where a file has no pattern of its window, each such layer sees everything; None: it must have one.
    `window_flag`: a field that switches windows on. `window_base`: of the rotary frequencies in windows where a file
    names none; None: that of the other layers. `by_type`: heads, keys and MLPs differ by a layer's type; see
    `gguf_layers`.
    `lists_layers`: the config needs the type of each layer. `mixed_by`: the family's other mixer is in the layers
    without key heads ("kv_heads"), of layers that are one sub-layer each in those that have no MLP either
    ("sub_layers"), or in all but each n-th ("interval"). `score_scale`: the field for what scores are multiplied by.
    `wide_scores`: the number of layers of the one model that scales scores by the width of the embedding per head.
    `unnormed`: the number of experts of the one model that has no norms of queries and keys.
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
