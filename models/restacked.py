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
STATES = (
    "nothing",
    "mlp next",
    "attn next",
)  # States while walking through the sub-layers: no layer begun, inside a new layer, after a complete layer.
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
                " same values: only sets of whole layers are a checkpoint of their own"
            )
    left = [sub for sub in _sub_layers(layer_set.n_layers) if not layer_set.skips(*sub)]
    for place, (kind, layer) in enumerate(left[:1] if no_ops else left):
        if kind != tuple(KINDS)[place % 2]:
            behind = f"follows the {KINDS[left[place - 1][0]]} of layer {left[place - 1][1]}" if place else "begins"
            raise LayerSetError(
                f"what the layer set leaves does not alternate attention and MLP: the {KINDS[kind]} of layer {layer}"
                f" {behind}; take the nearest set that does"
            )
    if len(left) % 2 and not no_ops:
        raise LayerSetError(
            f"the layer set ends with the attention of layer {left[-1][1]}, and a decoder layer ends with an MLP: take"
            " the nearest set that alternates"
        )
    if not left:
        raise LayerSetError("the layer set leaves nothing of the model: take one that keeps at least one layer")
    pairs: list[Pair] = []
    for kind, layer in left:
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
        """Yield for each choice whether the step's sub-layers are kept, the state after it, and its changes."""
        here = steps[step]
        n_kept = sum(not layer_set.skips(*sub) for sub in here)
        if parallel:
            yield True, "attn next", len(here) - n_kept
        elif here[0][0] == ("mlp" if state == "mlp next" else "attn"):
            yield True, "mlp next" if here[0][0] == "attn" else "attn next", 1 - n_kept
        yield False, state, n_kept

    # For each step, by state: the fewest changes from there to the end.
    least: list[dict[str, float]] = [{"attn next": 0.0}]
    for step in reversed(range(len(steps))):
        behind = least[0]
        costs = {s: min(n + behind.get(after, inf) for _, after, n in choices(step, s)) for s in STATES}
        least.insert(0, costs)

    def walk(step: int, state: str, skipped: tuple[SubLayer, ...]) -> Iterator[LayerSet]:
        if step == len(steps):
            yield layer_set.skipping(skipped)
            return
        for kept, after, cost in choices(step, state):
            if cost + least[step + 1].get(after, inf) == least[step][state]:
                yield from walk(step + 1, after, skipped if kept else skipped + steps[step])

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
            f"this {config.model_type} model has attention types by layer, so its sub-layers cannot be put together"
            " again: only models whose layers are all of one kind can be exported as a draft"
        )
    if getattr(config, "scale_attn_by_inverse_layer_idx", False):
        raise UnsupportedModel(
            "this model scales attention by the layer's index, so its sub-layers cannot be put together again: only"
            " models whose layers are all of one kind can be exported as a draft"
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
    stored = _text_settings(config) if is_multimodal(folder) else config_values(folder)
    if any(None in pair for pair in pairs):
        shutil.copyfile(NO_OPS_CODE, out / NO_OPS_CODE.name)
        changed = _with_no_ops(config, pairs)
    else:
        changed = _shortened(stored, len(pairs))
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
        few = set[str]()
        if form is not None and formats is not None:
            few = {tensor.new for tensor in maps if tensor.sub and formats.format_of(*tensor.sub)}
            whole = {tensor.new.removesuffix(".weight") for tensor in maps} - {
                name.removesuffix(".weight") for name in few
            }
            changed["quantization_config"] = form.config(whole)
        (out / "config.json").write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")
        _write_tensors(_values(tensors, placed, few, form), out)
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
    inner = family.layers.partition(".")[2]  # Checkpoints of a base model lack the first name component.
    layered = re.compile(rf"((?:{re.escape(family.layers)}|{re.escape(inner)})\.)(\d+)\.(.+)")
    sources = {"attn": [pair[0] for pair in pairs], "mlp": [pair[1] for pair in pairs]}
    placed_tensors = []
    for name in names:
        match = layered.fullmatch(name)
        if match is None:
            placed_tensors.append(_Placed(name, name, None))
            continue
        stem, layer, rest = match[1], int(match[2]), match[3]
        kind = next((k for k in KINDS if any(rest.startswith(f"{name}.") for name in family.modules_of(k))), None)
        if kind is None:
            raise UnsupportedModel(
                f"{folder} has a tensor {name!r} that belongs neither to attention nor to the MLP of its layer: its"
                " layers cannot be put together again"
            )
        new = (f"{stem}{at}.{rest}" for at, source in enumerate(sources[kind]) if source == layer)
        placed_tensors += [_Placed(new_name, name, (kind, layer)) for new_name in new]
    return sorted(
        placed_tensors, key=lambda tensor: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", tensor.new)]
    )


def _values(
    tensors: StoredTensors, placed: Sequence[_Placed], few: Collection[str], form: PackedForm | None
) -> Iterator[tuple[str, Tensor]]:
    for tensor in placed:
        value = tensors.read(tensor.stored)
        if form is not None and tensor.new in few:
            yield from form.tensors(tensor.new.removesuffix(".weight"), value).items()
        else:
            yield tensor.new, value


def _write_tensors(values: Iterator[tuple[str, Tensor]], out: Path) -> None:
    """Write tensors to one file, or, if they exceed SHARD_BYTES, to several files with an index."""
    from safetensors.torch import save_file

    files: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = n_held = 0

    def flush() -> None:
        save_file(held, out / f"model-{len(files)}.safetensors", metadata={"format": "pt"})
        files.append(list(held))
        held.clear()

    for name, value in values:
        if held and n_held + value.nbytes > SHARD_BYTES:
            flush()
            n_held = 0
        held[name] = value.contiguous()
        n_held, total = n_held + value.nbytes, total + value.nbytes
    flush()
    index = {}
    for number, names in enumerate(files):
        whole = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        file = whole if len(files) > 1 else "model.safetensors"
        (out / f"model-{number}.safetensors").rename(out / file)
        index.update(dict.fromkeys(names, file))
    if len(files) > 1:
        described = {"metadata": {"total_size": total}, "weight_map": index}
        (out / "model.safetensors.index.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
