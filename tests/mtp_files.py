"""Tiny checkpoints with a multi-token-prediction layer, and transformers' own module of the same weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from converted import NORMS_PLUS_ONE, add, architecture_of, tensors_of, write_gguf
from fakes import letter_tokenizer
from families import dense_config, tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from swiftopt.models.families import FAMILIES
from swiftopt.models.loading import at_speed
from swiftopt.models.mtp import MtpRuntime
from swiftopt.models.mtp_names import LAYER, config_of_layer
from swiftopt.models.runtime import Runtime

# Variants of families whose checkpoints have such a layer, and the kind of its MLP.
VARIANTS = {
    "qwen3_5_text": "dense",
    "glm4_moe": "sparse",
    "deepseek_v3": "sparse",
    "glm4_moe_lite": "sparse",
    "exaone_moe": "dense",
    "hy_v3": "sparse",
    "mellum": "sparse",
    "qwen3_next": "sparse",
    "qwen3_5_moe_text": "sparse",
}


@dataclass(frozen=True, slots=True)
class Theirs:
    """A model of transformers, and its generic module for multi-token prediction."""

    model: Any
    mtp: Any

    def states(self, ids: Sequence[int]) -> Tensor:
        """The states (tokens, hidden_size) behind the final norm."""
        return cast(Tensor, self.model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0])

    def layer(self, ids: Sequence[int], states: Tensor, cache: Any, first: int) -> Tensor:
        """The layer's states (rows, hidden_size) behind its norm, for tokens at positions `first`, …."""
        positions = torch.arange(first, first + len(ids))[None]
        return cast(Tensor, self.mtp.forward_layer(0, states[None], positions, cache, input_ids=torch.tensor([ids]))[0])

    def draft(self, ids: Sequence[int], n: int, first: int = 0) -> list[int]:
        """The chain of `n` tokens behind a text, of which the layer sees what begins at position `first`."""
        cache, drafted = MtpCache(config=self.model.config.get_mtp_config()), list[int]()
        states = self.layer(ids[first + 1 :], self.states(ids)[first:-1], cache, 1)[-1:]
        for step in range(n):
            drafted.append(int(self.mtp.shared_head(states)[0].argmax()))
            states = self.layer(drafted[-1:], states, cache, len(ids) - first + step)
        return drafted


def theirs(variant: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Theirs:
    """A random tiny model with a layer for multi-token prediction."""
    changed: dict[str, Any] = {}
    if "linear_attention" in (getattr(dense_config(variant), "layer_types", None) or ()):
        # Transformers' module takes its kind of norm from the last layer's first one.
        changed["layer_types"] = [*["linear_attention"] * 3, "full_attention"]
    model = tiny_model(variant, dtype, seed, **changed)
    config = model.config
    config.num_mtp_layers = 1
    config.mtp_layer_types = [cast(Any, FAMILIES[config.model_type].mtp).attention]
    config.mtp_mlp_layer_types = [VARIANTS[variant]]
    torch.manual_seed(seed + 1)
    mtp = MtpModel(model, 1)
    with torch.no_grad():
        for name, parameter in mtp.layers.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
            else:
                parameter.normal_(std=0.1 if "gate.weight" not in name else 1.0)
    return Theirs(model, mtp.to(dtype).eval().requires_grad_(False))


def saved(made: Theirs, folder: Path) -> Path:
    """A folder with the model, its layer under the family's names, and a tokenizer."""
    family, n_layers = FAMILIES[made.model.config.model_type], made.model.config.num_hidden_layers
    assert family.mtp is not None
    layer = made.mtp.layers[0]
    alone_of(made).save_pretrained(folder / "alone")
    beside = {"embed_norm": layer.enorm, "hidden_norm": layer.hnorm, "projection": layer.eh_proj}
    tensors = {f"{name}.weight": deepcopy(part.weight.data) for name, part in beside.items()}
    tensors |= load_file(folder / "alone" / "model.safetensors")
    made.model.save_pretrained(folder)
    stored_names = {after: before.format(n=n_layers) for before, after in family.mtp.names.items() if after}
    stored = {}
    for name, tensor in tensors.items():
        for after, before in stored_names.items():
            if name.startswith(after):
                stored[before + name.removeprefix(after)] = tensor
    # DeepSeek's checkpoints have copies of the embedding and of the head in the layer.
    copies = [before.format(n=n_layers) for before, after in family.mtp.names.items() if not after]
    stored |= {f"{copy}weight": made.model.lm_head.weight.data.clone() for copy in copies if copy != "mtp."}
    for path in (folder / "alone").iterdir():
        path.unlink()
    (folder / "alone").rmdir()
    save_file(load_file(folder / "model.safetensors") | stored, folder / "model.safetensors", {"format": "pt"})
    letter_tokenizer().save_pretrained(folder)
    return folder


def alone_of(made: Theirs) -> Any:
    """A model of the layer alone."""
    family, layer = FAMILIES[made.model.config.model_type], made.mtp.layers[0]
    assert family.mtp is not None
    has_experts = f"{LAYER}mlp.experts." if hasattr(layer.mtp_block.mlp, "experts") else ""
    alone = type(made.model)(config_of_layer(made.model.config, family.mtp, [has_experts])).to(made.model.dtype)
    alone.model.layers[0].load_state_dict(layer.mtp_block.state_dict())
    alone.model.norm.load_state_dict(layer.post_norm.state_dict())
    return alone


def written(made: Theirs, path: Path, kinds: Mapping[str, str] = MappingProxyType({})) -> Path:
    """A GGUF file of the model with its layer, as llama.cpp's converter writes them. Args: kinds: as `write_gguf`."""
    architecture, n_layers = architecture_of(made.model), made.model.config.num_hidden_layers
    layer, added = made.mtp.layers[0], float(architecture in NORMS_PLUS_ONE)

    def edit(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors_of(alone_of(made), architecture):
            if name.startswith("blk.0."):
                tensors[f"blk.{n_layers}.{name.removeprefix('blk.0.')}"] = tensor
        norms = {"enorm": layer.enorm, "hnorm": layer.hnorm, "shared_head_norm": layer.post_norm}
        beside = {name: norm.weight + added for name, norm in norms.items()} | {"eh_proj": layer.eh_proj.weight}
        tensors |= {f"blk.{n_layers}.nextn.{name}.weight": tensor for name, tensor in beside.items()}

    def more(writer: Any) -> None:
        add(writer, f"{writer.arch}.block_count", n_layers + 1)
        add(writer, f"{writer.arch}.nextn_predict_layers", 1)

    return write_gguf(path, made.model, more=more, edit=edit, kinds=kinds)


def with_layer(runtime: Runtime) -> Runtime:
    """The runtime of a model of any family, with a layer for multi-token prediction made of its own last one."""
    if runtime.mtp is None:
        family, model = runtime.family, deepcopy(runtime.hf_model)
        layers = cast(nn.ModuleList, model.get_submodule(family.layers))
        model.set_submodule(family.layers, layers[-1:])
        for name in (family.embed, family.head):
            model.set_submodule(name, runtime.hf_model.get_submodule(name))
        config = cast(Any, model.config)
        config.num_hidden_layers = 1
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = config.layer_types[-1:]
        size, norm = int(config.hidden_size), model.get_submodule(family.norm)
        projection = nn.Linear(2 * size, size, bias=False, dtype=runtime.dtype)
        projection.weight.data.copy_(torch.eye(size).repeat(1, 2))
        parts = {"embed_norm": deepcopy(norm), "hidden_norm": deepcopy(norm), "projection": projection}
        layer = MtpRuntime(model, runtime, nn.ModuleDict(parts).requires_grad_(False))
        at_speed(layer, "eager" if runtime.native is None else "auto")
        runtime.mtp = layer
    return runtime
