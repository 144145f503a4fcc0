"""Writes a layer set as a checkpoint with fewer layers, for engines that cannot skip sub-layers.

A sub-layer has its own norm and adds to the residual stream, so layer i's attention followed by layer j's MLP is an
ordinary decoder layer. If the kept sub-layers alternate (attention, MLP, attention, MLP, …), they form a complete
model. The checkpoint reads its own keys and values; in swiftopt's drafts, a set reads the target's. Engines that
support layers with only one half (vLLM's DeciLM: `no_op`) can load any set.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import Tensor

from ..core.errors import LayerSetError, UnsupportedModel
from ..core.layer_sets import KINDS, LayerSet, SubLayer
from .coded import PackedForm, packed_form
from .families import FAMILIES
from .family import Family
from .saved import config_values, is_multimodal, supported_config, supported_type
from .stored_tensors import StoredTensors, stored_tensors

# Source layers of a new layer's attention and MLP; None: the new layer lacks that half.
Pair = tuple[int | None, int | None]
MOST_NEAREST = 16  # Maximum number of equally near layer sets returned.
SHARD_BYTES = 4 << 30  # Maximum size of a weight file, and so of the tensors held in memory at once.
# States of the search for alternating sets: no new layer begun, inside a new layer, after a complete layer.
STATES = ("nothing", "mlp next", "attn next")
SMALL_FILES = (".json", ".jinja", ".txt", ".model")  # Suffixes of settings and tokenizer files, copied unchanged.
# Config class copied into checkpoints whose layers may lack attention or MLP.
NO_OPS_CODE = Path(__file__).with_name("configuration_no_ops.py")
NO_OPS_MAP = {"AutoConfig": f"{NO_OPS_CODE.stem}.NoOpsConfig"}
NO_OPS_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "hidden_act", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings"),
    *("attention_bias", "mlp_bias", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "quantization_config"),
)  # Config fields that have the same meaning in DeciLM.


def pairs_of(layer_set: LayerSet, parallel: bool = False, no_ops: bool = False) -> tuple[Pair, ...]:
    """Return the layers of the new checkpoint, in order, made of the sub-layers that the set keeps.

    Args:   parallel: a layer's attention and MLP read the same residual, so they must stay together.
            no_ops: a layer may lack one half; but the first must have attention, because DeciLM requires it.
    Raises: LayerSetError: the set keeps nothing, or its sub-layers do not alternate, or it splits a layer of a parallel
            model. With `no_ops`: it keeps nothing, or begins with an MLP.
    """
    if parallel:
        split = sorted(layer_set.skip_attn ^ layer_set.skip_mlp)
        if split:
            raise LayerSetError(
                f"the layer set leaves out one half of layers {split}, but in this model attention and MLP read the"
                " same values: only sets of whole layers can be written as a checkpoint"
            )
    subs = [sub for sub in _sub_layers(layer_set.n_layers) if not layer_set.skips(*sub)]
    for place, (kind, layer) in enumerate(subs[:1] if no_ops else subs):
        if kind != tuple(KINDS)[place % 2]:
            last_kind, last_layer = subs[place - 1]
            before = f"follows the {KINDS[last_kind]} of layer {last_layer}" if place else "comes first"
            raise LayerSetError(
                "the sub-layers that the layer set keeps do not alternate attention and MLP: the"
                f" {KINDS[kind]} of layer {layer} {before}; use the nearest set that alternates"
            )
    if len(subs) % 2 and not no_ops:
        raise LayerSetError(
            f"the layer set ends with the attention of layer {subs[-1][1]}, and a decoder layer ends with an MLP: use"
            " the nearest set that alternates"
        )
    if not subs:
        raise LayerSetError("the layer set skips the whole model: use one that keeps at least one layer")
    pairs: list[Pair] = []
    for kind, layer in subs:
        if kind == "attn":
            pairs.append((layer, None))
        elif pairs[-1][1] is None:
            pairs[-1] = (pairs[-1][0], layer)
        else:
            pairs.append((None, layer))
    return tuple(pairs)


def nearest(layer_set: LayerSet, parallel: bool = False, most: int = MOST_NEAREST) -> tuple[LayerSet, ...]:
    """Return up to `most` sets that `pairs_of` accepts, with the fewest changes from a set.

    A change skips one more sub-layer, or keeps one that was skipped. Among sets of equal distance, those that keep the
    earliest sub-layer in which they differ come first. An alternating set is its own nearest.
    """
    steps: list[tuple[SubLayer, ...]] = [(sub,) for sub in _sub_layers(layer_set.n_layers)]
    if parallel:
        steps = [(("attn", layer), ("mlp", layer)) for layer in range(layer_set.n_layers)]

    def choices(step: int, state: str) -> Iterator[tuple[bool, str, int]]:
        """Yield for each choice whether it keeps the step's sub-layers, the next state, and the number of changes."""
        subs = steps[step]
        kind, n_kept = subs[0][0], sum(not layer_set.skips(*sub) for sub in subs)
        if parallel:
            yield True, "attn next", len(subs) - n_kept
        elif kind == ("mlp" if state == "mlp next" else "attn"):
            yield True, "mlp next" if kind == "attn" else "attn next", 1 - n_kept
        yield False, state, n_kept

    # By step and state: the fewest changes from that step to the end.
    fewest: list[dict[str, float]] = [{"attn next": 0.0}]
    for step in reversed(range(len(steps))):
        later = fewest[0]
        costs = {state: min(n + later.get(after, inf) for _, after, n in choices(step, state)) for state in STATES}
        fewest.insert(0, costs)

    def walk(step: int, state: str, skipped: tuple[SubLayer, ...]) -> Iterator[LayerSet]:
        """Yield the sets that reach the end from a state with the fewest changes. Args: skipped: in earlier steps."""
        if step == len(steps):
            yield layer_set.skipping(skipped)
            return
        for keeps, after, n_changes in choices(step, state):
            if n_changes + fewest[step + 1].get(after, inf) == fewest[step][state]:
                yield from walk(step + 1, after, skipped if keeps else skipped + steps[step])

    return tuple(islice(walk(0, "nothing", ()), most))


def distance(one: LayerSet, other: LayerSet) -> int:
    """Return the number of sub-layers that only one of two sets skips."""
    return len(one.skip_attn ^ other.skip_attn) + len(one.skip_mlp ^ other.skip_mlp)


def check_restackable(config: Any) -> None:
    """Raises: UnsupportedModel: a layer's computation depends on its index, according to the config."""
    kinds = set(getattr(config, "layer_types", None) or ())
    family = FAMILIES[config.model_type]
    if len(kinds) > 1 or family.rotary_by_type or family.unrotated == "listed":
        raise UnsupportedModel(
            f"the layers of this {config.model_type} model differ in their attention, so its sub-layers cannot be"
            " combined into new layers: only models whose layers are all of one kind can be exported as a draft"
        )
    if getattr(config, "scale_attn_by_inverse_layer_idx", False):
        raise UnsupportedModel(
            "this model scales attention by the layer's index, so its sub-layers cannot be combined into new layers:"
            " only models whose layers are all of one kind can be exported as a draft"
        )


def takes_no_ops(folder: Path) -> bool:
    """Return whether vLLM's DeciLM can compute a saved model's layers.

    False for a model that has its own code: --trust-remote-code, which the draft needs, would also run that code.

    Raises: as `supported_config`.
    """
    config = supported_config(folder)
    settings = [path for name in ("config.json", "tokenizer_config.json") if (path := folder / name).is_file()]
    return (
        FAMILIES[config.model_type].decilm_bias is not None
        and config.hidden_act == "silu"
        and getattr(config, "sliding_window", None) is None
        and not any('"auto_map"' in path.read_text(encoding="utf-8") for path in settings)
    )


def has_no_ops(checkpoint: Path) -> bool:
    """Return whether a checkpoint has layers without attention or MLP, and exactly swiftopt's config code."""
    try:
        code, config = (checkpoint / NO_OPS_CODE.name).read_bytes(), (checkpoint / "config.json").read_bytes()
        return code == NO_OPS_CODE.read_bytes() and json.loads(config)["auto_map"] == NO_OPS_MAP
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write_restacked(folder: Path, pairs: Sequence[Pair], out: Path, formats: LayerSet | None = None) -> str | None:
    """Write a checkpoint of some layers of a saved model: config, weights in safetensors, and the tokenizer's files.

    Tensors are copied bit by bit in their stored dtype. Linear maps of sub-layers that are quantised in `formats` are
    written as compressed-tensors instead (`models/coded.py`).

    Args:    folder: of a saved model. pairs: as `pairs_of` returns them; a half may be None only if `takes_no_ops`.
             out: an empty folder.
    Returns: the form of the quantised maps in words; None: no map is quantised.
    Raises: UnsupportedModel: something in the model depends on a layer's index, or a tensor is of neither sub-layer.
            ModelNotFound: the folder cannot be read. OSError: `out` cannot be written.
    """
    config = supported_config(folder)
    check_restackable(config)
    for path in sorted(folder.iterdir()):
        if path.suffix in SMALL_FILES and path.name != "config.json" and not path.name.endswith(".index.json"):
            shutil.copyfile(path, out / path.name)
    if any(None in pair for pair in pairs):
        shutil.copyfile(NO_OPS_CODE, out / NO_OPS_CODE.name)
        settings = _with_no_ops(config, pairs)
    else:
        stored = _text_settings(config) if is_multimodal(folder) else config_values(folder)
        settings = _shortened(stored, len(pairs))
    with stored_tensors(folder) as tensors:
        shapes = tensors.shapes()
        placed = _placed(shapes, FAMILIES[config.model_type], pairs, folder)
        maps = [
            tensor
            for tensor in placed
            if tensor.sub and tensor.new.endswith(".weight") and len(shapes[tensor.stored]) == 2
        ]
        form = None
        if formats is not None and takes_fewer_bits(folder):
            subs = [sub for pair in pairs for sub in zip(KINDS, pair, strict=True) if sub[1] is not None]
            form = packed_form(formats, cast("list[SubLayer]", subs), {shapes[tensor.stored][1] for tensor in maps})
        quantised = set[str]()
        if form is not None and formats is not None:
            quantised = {tensor.new for tensor in maps if tensor.sub and formats.format_of(*tensor.sub)}
            others = {tensor.new for tensor in maps} - quantised
            settings["quantization_config"] = form.config({name.removesuffix(".weight") for name in others})
        (out / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        _write_tensors(_values(tensors, placed, quantised, form), out)
    return None if form is None else form.words


def takes_fewer_bits(folder: Path) -> bool:
    """Whether the model's linear maps can be quantised: they are stored as (out, in), and not quantised already."""
    model_type, scheme = supported_type(folder)
    return scheme is None and not FAMILIES[model_type].transposed


def _text_settings(config: Any) -> dict[str, Any]:
    """Return the content of a config.json for a text part alone."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    return {**json.loads(config.to_json_string(use_diff=False)), "architectures": [name]}


def _sub_layers(n_layers: int) -> list[SubLayer]:
    return [(kind, layer) for layer in range(n_layers) for kind in KINDS]


def _shortened(config: Mapping[str, Any], n_layers: int) -> dict[str, Any]:
    """Return a config with fewer layers."""
    changed: dict[str, Any] = {key: n_layers for key in ("num_hidden_layers", "n_layer") if key in config}
    if isinstance(config.get("layer_types"), list):
        changed["layer_types"] = config["layer_types"][:n_layers]
    if isinstance(config.get("max_window_layers"), int):
        changed["max_window_layers"] = min(config["max_window_layers"], n_layers)
    return {**config, **changed}


def _with_no_ops(config: Any, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return the config of vLLM's DeciLM with these layers.

    It has every value that DeciLM reads, because defaults differ between model types.
    """
    settings, group = config.to_dict(), config.num_attention_heads // config.num_key_value_heads
    bias = FAMILIES[config.model_type].decilm_bias
    biases = {"qkv_bias": bias == "qkv", "attention_bias": False, "mlp_bias": False}
    return {
        **{key: settings[key] for key in NO_OPS_FIELDS if key in settings},
        **({} if bias == "configured" else biases),
        "model_type": "nemotron-nas",
        "architectures": ["DeciLMForCausalLM"],
        "auto_map": NO_OPS_MAP,
        "num_hidden_layers": len(pairs),
        "block_configs": [
            {
                "attention": {"no_op": attn is None, "n_heads_in_group": group},
                "ffn": {"no_op": mlp is None, "intermediate_size": config.intermediate_size},
            }
            for attn, mlp in pairs
        ],
    }


class _Placed(NamedTuple):
    """A tensor of the new checkpoint: its new name, its stored name, and its sub-layer."""

    new: str
    stored: str
    sub: SubLayer | None


def _placed(names: Mapping[str, object], family: Family, pairs: Sequence[Pair], folder: Path) -> list[_Placed]:
    """Return the tensors of the new checkpoint, in the order of their names. Args: names: those of stored tensors."""
    inner = family.layers.partition(".")[2]  # Checkpoints of a base model lack the first name component.
    layered = re.compile(rf"((?:{re.escape(family.layers)}|{re.escape(inner)})\.)(\d+)\.(.+)")
    sources = {"attn": [pair[0] for pair in pairs], "mlp": [pair[1] for pair in pairs]}
    placed = []
    for name in names:
        match = layered.fullmatch(name)
        if match is None:
            placed.append(_Placed(name, name, None))
            continue
        stem, layer, rest = match[1], int(match[2]), match[3]
        kind = next((k for k in KINDS if any(rest.startswith(f"{name}.") for name in family.modules_of(k))), None)
        if kind is None:
            raise UnsupportedModel(
                f"{folder} has a tensor {name!r} that belongs neither to attention nor to the MLP of its layer: its"
                " sub-layers cannot be combined into new layers"
            )
        new = (f"{stem}{at}.{rest}" for at, source in enumerate(sources[kind]) if source == layer)
        placed += [_Placed(new_name, name, (kind, layer)) for new_name in new]
    return sorted(placed, key=lambda tensor: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", tensor.new)])


def _values(
    tensors: StoredTensors, placed: Sequence[_Placed], quantised: Collection[str], form: PackedForm | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the new checkpoint's tensors by name; maps in `quantised` are written in `form`."""
    for tensor in placed:
        value = tensors.read(tensor.stored)
        if form is not None and tensor.new in quantised:
            yield from form.tensors(tensor.new.removesuffix(".weight"), value).items()
        else:
            yield tensor.new, value


def _write_tensors(values: Iterator[tuple[str, Tensor]], out: Path) -> None:
    """Write tensors to one file, or, if they exceed SHARD_BYTES, to several files with an index."""
    from safetensors.torch import save_file

    shards: list[list[str]] = []  # Names of the tensors in each file.
    pending: dict[str, Tensor] = {}
    n_bytes = n_pending = 0

    def flush() -> None:
        save_file(pending, out / f"model-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, value in values:
        if pending and n_pending + value.nbytes > SHARD_BYTES:
            flush()
            n_pending = 0
        pending[name] = value.contiguous()
        n_pending, n_bytes = n_pending + value.nbytes, n_bytes + value.nbytes
    flush()
    weight_map = {}
    for number, names in enumerate(shards):
        shard = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        file = shard if len(shards) > 1 else "model.safetensors"
        (out / f"model-{number}.safetensors").rename(out / file)
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        index = {"metadata": {"total_size": n_bytes}, "weight_map": weight_map}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
