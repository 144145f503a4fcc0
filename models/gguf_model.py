"""Loads a GGUF file as a model, keeping its weights in the types of the file.

A small folder in the cache has what transformers needs besides weights (config, tokenizer, generation config), and
links to the file and its parts. If our kernels compute, linear maps keep the file's codes; so do embeddings on a CPU.
Otherwise, and in float32 on a CPU, weights are de-quantised.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..core.errors import SwiftoptError, UnsupportedModel
from .block_experts import HALVES, PARTS, UNGATED, BlockExperts, packed_experts, stacked
from .block_maps import BlockEmbedding, BlockLinear, PackedBlocks, packed_blocks
from .cache import gguf_settings_folder, made_once
from .config_layout import HeadLayout, heads_of
from .families import family_of
from .family import Family, GatedDelta
from .gguf_layers import ENCODER_TENSORS, TOKEN_TABLE, unused_keys
from .gguf_mixers import RENAMED, DeltaTensors, numbers_of
from .gguf_packing import forms, packing_of
from .gguf_reader import FileTensor, GgufFile, parts_of
from .gguf_settings import FACTORS, IDS, NEXT_LAYERS, SUPPRESSED, config_of, ends_of, form_of, layer_numbers
from .gguf_tensors import check_shape, halves_of, joined, numbers, row_reader, rows_between, taken_rows
from .gguf_tokenizer import write_tokenizer
from .kernels.build import Kernels, kernels
from .kernels.layout import ROWS
from .mapped_rows import put_mapped
from .saved import GGUF_WEIGHTS, OnStep, ReadShare, WeightStorage, linked_gguf, refuse_missing, supported_type

# Names of a router's correction of scores, a parameter or a buffer: their end in transformers, and in GGUF files.
CORRECTIONS = {"correction_bias": "correction.bias", "expert_bias": "expert_bias.bias"}


def settings_folder(gguf: Path, on_step: OnStep, file: GgufFile | None = None) -> Path:
    """Return the cache folder with the file's config and tokenizer and links to its weights; write it if necessary.

    Args:   file: the file, if it is open already.
    Raises: ModelNotFound: there is no readable GGUF file. UnsupportedModel: its architecture or a setting is not
            supported. OutputError: the cache cannot be written.
    """
    folder = gguf_settings_folder(gguf)

    def write(unfinished: Path) -> None:
        on_step(f"reading the settings of {gguf.name}")
        _write_settings(file or GgufFile(gguf), unfinished)

    return made_once(folder, lambda: _is_current(folder, gguf), write)


def _is_current(folder: Path, gguf: Path) -> bool:
    """Tell whether a folder is complete, and links to the file."""
    link = folder / GGUF_WEIGHTS
    try:
        supported_type(folder)
        return link.samefile(next(parts_of(gguf)))
    except (SwiftoptError, OSError):
        return False


def _write_settings(file: GgufFile, folder: Path) -> None:
    config = config_of(file)
    write_tokenizer(file, folder)
    generation = {name: config[name] for name in IDS} | {"eos_token_id": ends_of(file)}
    if file.settings.get(SUPPRESSED):
        generation["suppress_tokens"] = file.settings[SUPPRESSED]
    for name, values in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    for number, part in enumerate(parts_of(file.path)):
        (folder / (GGUF_WEIGHTS if number == 0 else part.name)).symlink_to(part.absolute())


def load_gguf(
    folder: Path, dtype: str, storage: WeightStorage, share: ReadShare, file: GgufFile | None = None
) -> tuple[Any, int]:
    """Load the model of a `settings_folder` on the CPU.

    Args:    dtype: as for `models.loading.load`; maps keep codes for our kernels on a CPU only with bfloat16.
             share: reports the share of the weights that was read. file: the file, if it is open already.
    Returns: the model, in evaluation mode, and its number of weights.
    Raises:  ModelNotFound: a tensor is missing or has another shape. UnsupportedModel: a tensor has no place in the
             model.
    """
    from .quantised_checkpoints import unquantised_config, without_weights
    from .skeleton import Skeleton, fits

    config, dtype_asked = unquantised_config(folder, dtype)
    keeps = storage.for_device or (storage.coded and dtype_asked == torch.bfloat16)
    chosen = kernels() if keeps else "codes are computed in bfloat16"
    is_bare = not storage.for_device and not isinstance(chosen, str) and fits(config)
    model: Any = Skeleton(config, dtype_asked) if is_bare else without_weights(config, dtype_asked)
    file = file or GgufFile(linked_gguf(folder))
    kept, read = None if isinstance(chosen, str) else chosen, loaded_tensors(file, config)
    share.begin(sum(tensor.data.nbytes for tensor in read if not (storage.maps_rows and tensor.name == TOKEN_TABLE)))
    reading = Reading(file, model, dtype_asked, kept, storage=storage, on_bytes=share.add)
    for name in list(model.state_dict()):
        reading.take(name)
    reading.finish()
    return model.eval().requires_grad_(False), sum(tensor.n_values for tensor in own_tensors(file))


def own_tensors(file: GgufFile) -> list[FileTensor]:
    """Return the tensors of a file, without those of encoders for images and audio."""
    return [tensor for name, tensor in file.tensors.items() if not name.startswith(ENCODER_TENSORS)]


def loaded_tensors(file: GgufFile, config: Any) -> list[FileTensor]:
    """Return the tensors of a file that are loaded into the model of a config.

    The others belong to encoders for images and audio, to multi-token-prediction layers after the model's own, or are
    keys of layers that read another layer's keys.
    """
    n_layers = config.num_hidden_layers
    n_further = int(file.own_settings().get(NEXT_LAYERS) or 0)
    others = tuple(f"blk.{number}." for number in range(n_layers, n_layers + n_further))
    unused = unused_keys(file, n_layers)
    return [tensor for tensor in own_tensors(file) if not tensor.name.startswith(others) and tensor.name not in unused]


def held_bytes(tensor: FileTensor, dtype: torch.dtype, chosen: Kernels | None) -> int:
    """Return the bytes that a tensor takes in memory: packed, if these kernels can read its codes, else in a dtype."""
    form = None if chosen is None or len(tensor.shape) < 2 else forms(chosen).get(tensor.kind)
    if form is None:
        return tensor.n_values * dtype.itemsize
    *experts, n_out, n_in = tensor.shape
    return math.prod(experts) * -(-n_out // ROWS) * (ROWS * n_in * form.bits // 8 + form.scale_bytes(n_in))


class Reading:
    """Reads a file's tensors into a model whose parameters have no memory yet: `take` for each, then `finish`.

    Args: chosen: the kernels that maps keep codes for (None: all weights are de-quantised). first_layer: number in the
          file of the model's first layer. storage: with `for_device`, the embedding keeps no codes. on_bytes: called
          with the number of bytes that were read since the last call.
    """

    def __init__(
        self, file: GgufFile, model: Any, dtype: torch.dtype, chosen: Kernels | None, first_layer: int = 0,
        storage: WeightStorage | None = None, on_bytes: Callable[[int], None] = lambda n_bytes: None,
    ) -> None:  # fmt: skip
        self.file, self.model, self.dtype, self.kernels = file, model, dtype, chosen
        self.first_layer, self._storage, self._on_bytes = first_layer, storage or WeightStorage(), on_bytes
        self.family: Family = family_of(model.config)
        self.form = form_of(file)[1]
        self.heads: HeadLayout = heads_of(model.config)
        mixer = self.family.mixer
        self.delta = DeltaTensors(mixer, self.form, model.config) if isinstance(mixer, GatedDelta) else None
        self._places = names_of(self.form.architecture, first_layer + int(model.config.num_hidden_layers))
        self._values: dict[str, Tensor] = {}
        self._packed: dict[str, PackedBlocks] = {}
        self._experts: dict[str, dict[str, list[PackedBlocks]]] = {}  # Module -> part of `PARTS` -> maps by expert.
        self._experts_module = self.family.experts.experts if self.family.experts is not None else "experts"
        self._halves = HALVES if self.family.gated else UNGATED
        self._read: set[str] = set()

    def take(self, name: str) -> None:
        """Read one parameter, given its name in the model.

        Raises: ModelNotFound: the file was changed since it was mapped, or the tensor has another shape.
        """
        self.file.refuse_changed()
        module_name, _, leaf = name.rpartition(".")
        if leaf.removesuffix("_bias") in self._halves and module_name.endswith(f".{self._experts_module}"):
            self._take_experts(module_name, leaf)
            return
        tensor = self._tensor(name)
        if tensor is None:
            if self._is_of_latents(module_name):
                self._take_map_of_latents(name)
            return
        module = self.model.get_submodule(module_name)
        if self._storage.maps_rows and tensor.name == TOKEN_TABLE:
            check_shape(self.file.path, tensor, tuple(module.weight.shape), tensor.shape)
            put_mapped(self.model, module_name, row_reader(tensor), tensor.shape[0], self.dtype)
            return
        order = self._order(module_name, tensor)
        scale = self._scale(tensor)
        if scale is None and self._keeps_codes(module_name, module, leaf, tensor):
            assert self.kernels is not None
            n_out, n_in = tensor.shape
            parameter = module.weight.T if isinstance(module, Conv1D) else module.weight
            check_shape(self.file.path, tensor, tuple(parameter.shape), (n_out, n_in))
            self._packed[module_name] = self._blocks(tensor, self.kernels, order)
        else:
            values = numbers(tensor)
            if scale is not None:
                values = values * scale
            if order is not None:
                values = values[order]
            if self.form.adds_to_norms and self._is_added_to(module_name, leaf):
                values = values - self.form.adds_to_norms
            values = numbers_of(name, values)
            if self.delta is not None and (columns := self.delta.columns(module_name)) is not None:
                values = values[:, columns]
            if isinstance(module, Conv1D) and leaf == "weight":
                values = values.t()
            expected, is_correction = tuple(getattr(module, leaf).shape), _is_correction(leaf)
            # Some families store a router's correction as a row, and a mixer's parameters with other dimensions.
            has_other_shape = self._is_of_mixer(module_name) and not isinstance(module, nn.Linear)
            if (is_correction or has_other_shape) and values.numel() == math.prod(expected):
                values = values.view(expected)
            check_shape(self.file.path, tensor, expected, tuple(values.shape))
            # A correction is float32 whatever the model's dtype.
            self._values[name] = values if is_correction else values.to(self.dtype).contiguous()
        self._release(tensor)

    def _release(self, part: FileTensor) -> None:
        """Let the system drop the pages of a tensor that was read, and report its bytes as read."""
        self.file.release(part)
        self._on_bytes(part.data.nbytes)

    def _is_of_mixer(self, module_name: str) -> bool:
        mixer = self.family.mixer
        return mixer is not None and f".{mixer.module}." in f"{module_name}."

    def _is_added_to(self, module_name: str, leaf: str) -> bool:
        is_gated = self.delta is not None and self.delta.is_gated_norm(module_name)
        return "norm" in module_name and leaf == "weight" and not is_gated

    def _blocks(self, tensor: FileTensor, kernels: Kernels, order: Tensor | None) -> PackedBlocks:
        packing = packing_of(self.file)
        early = packing.take(tensor) if packing is not None and packing.kernels is kernels and order is None else None
        if early is not None:
            return PackedBlocks.of(early)
        return packed_blocks(tensor, kernels, None if order is None else order.int(), self.file.release)

    def _take_experts(self, module_name: str, leaf: str) -> None:
        """Read the maps or biases of a layer's experts; the file has a tensor (experts, out, in) for each part."""
        number, named = self._place(f"{module_name}.{leaf}")[0], self.family.experts
        assert named is not None
        map_name, kind = leaf.removesuffix("_bias"), "bias" if leaf.endswith("_bias") else "weight"
        part_names = [part for part in PARTS if self.family.gated or part != "gate"]
        tensors = {part: self._found(f"blk.{number}.ffn_{part}_exps.{kind}") for part in part_names}
        if (joint := self._found(f"blk.{number}.ffn_gate_up_exps.{kind}")) is not None:
            tensors |= halves_of(joint)
        if None in tensors.values():
            return
        whole = {part: tensor for part, tensor in tensors.items() if tensor is not None}
        n_experts, *sizes = self.model.get_submodule(module_name).down_proj.shape
        n_inner, n_hidden = sizes if named.by_inputs else reversed(sizes)
        for part, tensor in whole.items():
            shape = (n_experts, n_hidden, n_inner) if part == "down" else (n_experts, n_inner, n_hidden)
            check_shape(self.file.path, tensor, shape if kind == "weight" else shape[:2], tensor.shape)
        keeps = kind == "weight" and self.kernels is not None
        if keeps and self.kernels and all(tensor.kind in forms(self.kernels) for tensor in whole.values()):
            for part in self._halves[map_name]:
                packed = packed_experts(whole[part], self.kernels, self._release)
                self._experts.setdefault(module_name, {})[part] = packed
            return
        values = {part: numbers(whole[part]).to(self.dtype) for part in self._halves[map_name]}
        self._values[f"{module_name}.{leaf}"] = stacked(values, map_name, named)
        for part in values:
            self._release(whole[part])

    def _is_of_latents(self, module_name: str) -> bool:
        return self.family.latents is not None and module_name.endswith(f".{self.family.latents[1]}")

    def _take_map_of_latents(self, name: str) -> None:
        """Read the map from a latent to heads' keys and values; newer files split it into two tensors.

        They are (heads, latent, key) and (heads, value, latent).
        """
        number, sizes = _parts(name, self.family.layers)[0], self.heads.latent
        of_keys, of_values = (self._found(f"blk.{number}.attn_{part}_b.weight") for part in ("k", "v"))
        if of_keys is None or of_values is None or sizes is None:
            return
        for tensor, shape in ((of_keys, (sizes.rank, sizes.kept)), (of_values, (sizes.value_width, sizes.rank))):
            check_shape(self.file.path, tensor, (self.heads.n_heads, *shape), tensor.shape)
        both = torch.cat((numbers(of_keys).transpose(1, 2), numbers(of_values)), dim=1)
        self._values[name] = both.flatten(0, 1).to(self.dtype)
        for tensor in (of_keys, of_values):
            self._release(tensor)

    def _tensor(self, name: str) -> FileTensor | None:
        """Return the tensor of a parameter: one of the file, rows of one, or several joined; None: it has none."""
        number, module, leaf = self._place(name)
        stem, _, index = module.rpartition(".")
        if module in self.form.joined:
            # Layers with experts have other names for the shared MLP.
            tensors = [
                self._found(f"blk.{number}.{part}.{leaf}") or self._found(f"blk.{number}.{part}_shexp.{leaf}")
                for part in self.form.joined[module]
            ]
            parts = [tensor for tensor in tensors if tensor is not None]
            return joined(parts, self.file.path) if len(parts) == len(tensors) else None
        if stem in self.form.stacked:
            stack, row = self._found(f"blk.{number}.{self.form.stacked[stem]}.{leaf}"), int(index)
            if stack is None:
                return None
            n_rows = len(self.model.get_submodule(name.rpartition(".")[0].rpartition(".")[0]))
            check_shape(self.file.path, stack, (n_rows, *stack.shape[1:]), stack.shape)
            return rows_between(stack, row, row + 1, stack.shape[1:])
        if f"{module}.{leaf}" in self.form.parameters:
            return self._found(f"blk.{number}.{self.form.parameters[f'{module}.{leaf}']}")
        place = self._places.get_name(self._stored_name(name), try_suffixes=(".weight", ".bias"))
        tensor = self._found(place or "") or self._found(f"{place}.weight")
        if (
            tensor is None
            and self.delta is not None
            and (rows := self.delta.by_key_head(name.rpartition(".")[0])) is not None
        ):
            whole = self._found(f"blk.{number}.{rows[0]}.{leaf}")
            return whole and taken_rows(whole, rows[1], self.file.path)
        if tensor is None and number and self.family.projection == "split" and module.endswith(self.family.qkv):
            tensor = self._found(f"blk.{number}.attn_qkv.{leaf}")
            if tensor is not None:
                check_shape(self.file.path, tensor, (self._rows_of(2)[1], *tensor.shape[1:]), tensor.shape)
                first, last = self._rows_of(self.family.qkv.index(module.rpartition(".")[2]))
                tensor = rows_between(tensor, first, last, (last - first, *tensor.shape[1:]))
        return tensor

    def _place(self, name: str) -> tuple[str, str, str]:
        """Split a name as `_parts` does; the number is that of the layer in the file."""
        number, module, leaf = _parts(name, self.family.layers)
        return number and str(int(number) + self.first_layer), module, leaf

    def _stored_name(self, name: str) -> str:
        """Return the name of a parameter in checkpoints, from which llama.cpp's converter derives its own."""
        named = self.family.experts
        if (number := self._place(name)[0]) and self.first_layer:
            name = f"{self.family.layers}.{number}.{name.removeprefix(f'{self.family.layers}.').partition('.')[2]}"
        for stored, current in named.renamed.items() if named is not None else ():
            if current in name:
                name = name.replace(current, stored, 1)
                break
        for current, stored in {**CORRECTIONS, **RENAMED}.items():
            name = name.removesuffix(current) + stored if name.endswith(current) else name
        return self.form.root + name.removeprefix("model.") if name.startswith("model.") else name

    def _found(self, name: str) -> FileTensor | None:
        tensor = self.file.tensors.get(name)
        self._read |= set() if tensor is None else {name}
        return tensor

    def _rows_of(self, part: int) -> tuple[int, int]:
        """Return the rows first … last - 1 of queries (0), keys (1) or values (2) in a tensor of all three."""
        counts = ((1 + self.heads.gated) * self.heads.n_heads, self.heads.n_kv_heads, self.heads.n_kv_heads)
        first = sum(counts[:part]) * self.heads.width
        return first, first + counts[part] * self.heads.width

    def _scale(self, tensor: FileTensor) -> Tensor | None:
        """Return the factor of a tensor's values, (1,), which some files have as a separate tensor; None: it is 1."""
        name = f"{tensor.name.removesuffix('.weight')}.scale"
        if name.endswith(tuple(f".{leaf}" for leaf in self.form.parameters.values())):
            return None
        scale = self._found(name)
        if scale is None or not tensor.name.endswith(".weight"):
            return None
        check_shape(self.file.path, scale, (1,), scale.shape)
        return numbers(scale)

    def finish(self) -> None:
        """Put the tensors that were read into the model.

        Raises: as `load_gguf`.
        """
        self.file.refuse_changed()
        factors = FACTORS if self.family.rotary is not None else ()  # `config_of` has read them.
        unread = [name for name in self.to_read() if name not in self._read and name not in factors]
        if unread:
            raise UnsupportedModel(
                f"{self.file.path} has a tensor {sorted(unread)[0]!r}, for which a model of type"
                f" {self.model.config.model_type} has no place: use the model's hub id"
            )
        for leaf, setting in self.form.by_layer.items():
            for number, value in enumerate(layer_numbers(self.file, setting, self.model.config.num_hidden_layers)):
                name = f"{self.family.layers}.{number}.{leaf}"
                module_name, _, last = name.rpartition(".")
                shape = getattr(self.model.get_submodule(module_name), last).shape
                self._values[name] = torch.full(shape, value, dtype=self.dtype)
        self.model.load_state_dict(self._values, strict=False, assign=True)
        head, embed = self.family.head, self.family.embed
        if self.model.config.tie_word_embeddings and embed in self._packed:
            self._packed[head] = self._packed[embed]
            self.model.config.tie_word_embeddings = False
        for module_name, packed in self._packed.items():
            module = self.model.get_submodule(module_name)
            if isinstance(module, nn.Embedding):
                new: nn.Module = BlockEmbedding(packed, self.dtype, getattr(module, "embed_scale", None))
            else:
                new = BlockLinear(packed, getattr(module, "bias", None), self.dtype, self._head_order(module_name))
            self.model.set_submodule(module_name, new)
        for module_name, maps in self._experts.items():
            module, named = self.model.get_submodule(module_name), self.family.experts
            assert named is not None
            self.model.set_submodule(module_name, BlockExperts(maps, named, module, self.dtype))
        self.model.tie_weights()
        missing = [name for name, parameter in self.model.named_parameters() if parameter.is_meta]
        buffers = [name for name, _ in self.model.named_buffers() if _is_correction(name)]
        missing += [name for name in buffers if name not in self._values]
        refuse_missing(missing, self.file.path)

    def to_read(self) -> list[str]:
        """Return the names of the tensors that the model must have a place for."""
        return [tensor.name for tensor in loaded_tensors(self.file, self.model.config)]

    def _keeps_codes(self, module_name: str, module: nn.Module, leaf: str, tensor: FileTensor) -> bool:
        if self.kernels is None or leaf != "weight" or tensor.kind not in forms(self.kernels):
            return False
        named = self.family.experts  # `.whole` in the router's name is our wrapper of transformers' module.
        if named is not None and module_name.endswith(f".{named.router.replace('.whole', '')}"):
            return False  # In some families the router is a subclass of Linear that also chooses experts.
        if self._is_of_latents(module_name):
            return False  # Our kernels read this map head by head, for keys transposed.
        is_embedding = module_name == self.family.embed and not self._storage.for_device
        return isinstance(module, nn.Linear | Conv1D) or is_embedding

    def _head_order(self, module_name: str) -> Tensor | None:
        return None if self.delta is None or self.delta.columns(module_name) is None else self.delta.head_order

    def _order(self, module_name: str, tensor: FileTensor) -> Tensor | None:
        """Return for each output the row of the tensor that has it, int64 (out,); None: they are in order."""
        if self.delta is not None and (rows := self.delta.rows(module_name)) is not None:
            return rows if len(rows) == tensor.shape[0] else None
        last, heads = module_name.rpartition(".")[2], self.heads
        if heads.grouped and last in self.family.qkv:
            rows = torch.arange(tensor.shape[0])
            if len(rows) != (heads.n_heads + 2 * heads.n_kv_heads) * heads.width:
                return None
            parts = [rows[slice(*self._rows_of(part))].view(heads.n_kv_heads, -1) for part in range(3)]
            return torch.cat(parts, dim=1).reshape(-1)
        n_heads = dict(zip(self.family.qkv, (heads.n_heads, heads.n_kv_heads), strict=False)).get(last)
        n_out = tensor.shape[0]
        if not self.form.pairs_halves or n_heads is None or n_out % (2 * n_heads):
            return None
        return torch.arange(n_out).view(n_heads, -1, 2).transpose(1, 2).reshape(-1)


def _parts(name: str, layers: str) -> tuple[str, str, str]:
    """Split a parameter's name into the number of its layer ("": none), the module in the layer, and the leaf."""
    module, _, leaf = name.rpartition(".")
    if not name.startswith(f"{layers}."):
        return "", module, leaf
    number, _, module = module.removeprefix(f"{layers}.").partition(".")
    return number, module, leaf


def _is_correction(name: str) -> bool:
    return any(correction in name for correction in CORRECTIONS)


def names_of(architecture: str, n_layers: int) -> Any:
    """Return the gguf package's map from names in checkpoints to names in GGUF files."""
    import gguf

    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    return gguf.get_tensor_name_map(arch, n_layers)
