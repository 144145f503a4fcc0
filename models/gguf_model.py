"""Loads a GGUF file as a model, keeping its weights in the types of the file.

What transformers needs beside weights (config, tokenizer, generation config) is kept in a small folder of the cache,
with links to the file and its parts. Where our kernels compute, a linear map or an embedding keeps the file's codes;
elsewhere, and in float32, weights are de-quantised.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..core.errors import ModelNotFound, SwiftoptError, UnsupportedModel
from .block_maps import BlockEmbedding, BlockLinear, PackedBlocks, forms, packed_blocks
from .coded import ROWS
from .families import family_of
from .family import Family, GgufForm
from .gguf_reader import FileTensor, GgufFile, parts_of
from .gguf_settings import FACTORS, IDS, config_of, ends_of
from .gguf_tokenizer import write_tokenizer
from .kernels.build import Kernels, kernels
from .saved import (
    GGUF_WEIGHTS,
    REPORT_S,
    OnStep,
    gguf_settings_folder,
    linked_gguf,
    made_once,
    refuse_missing,
    supported_type,
)

FLOATS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}


def settings_folder(gguf: Path, on_step: OnStep, file: GgufFile | None = None) -> Path:
    """Return the folder with the file's config and tokenizer and links to its weights, made the first time.

    Args:   file: what was read of the file already.
    Raises: ModelNotFound: no readable GGUF file. UnsupportedModel: its architecture, or what would be lost of it.
            OutputError: the cache cannot be written.
    """
    folder = gguf_settings_folder(gguf)

    def write(unfinished: Path) -> None:
        on_step(f"reading the settings of {gguf.name}")
        _write_settings(file or GgufFile(gguf), unfinished)

    return made_once(folder, lambda: _is_current(folder, gguf), write)


def _is_current(folder: Path, gguf: Path) -> bool:
    """Tell whether a folder is complete, and its first link leads to the file."""
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
    for name, values in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    for number, part in enumerate(parts_of(file.path)):
        (folder / (GGUF_WEIGHTS if number == 0 else part.name)).symlink_to(part.absolute())


def load_gguf(
    folder: Path, dtype: str, doing: str, on_step: OnStep, coded: bool = True, file: GgufFile | None = None
) -> tuple[Any, int]:
    """Load the model of a `settings_folder` on the CPU.

    Args:    dtype: as `models.loading.load`; in bfloat16 the file's codes are kept where our kernels compute. coded:
             False: they are de-quantised in any case. file: what was read of the file already.
    Returns: the model, in evaluation mode, and how many parameters it stands for.
    Raises:  ModelNotFound: tensors are missing or of other shapes. UnsupportedModel: one has no place in the model.
    """
    from .quantised_checkpoints import empty_model

    model, dtype_asked = empty_model(folder, dtype)
    chosen = kernels() if coded and dtype_asked == torch.bfloat16 else "codes are computed in bfloat16"
    file = file or GgufFile(linked_gguf(folder))
    reading = _Reading(file, model, dtype_asked, None if isinstance(chosen, str) else chosen)
    reported = time.monotonic()
    names = [name for name, _ in model.named_parameters()]
    for number, name in enumerate(names):
        if time.monotonic() - reported > REPORT_S:
            reported = time.monotonic()
            on_step(f"{doing}, {100 * number // len(names)} % of the weights")
        reading.take(name)
    reading.finish()
    return model.eval().requires_grad_(False), file.n_values


def held_bytes(tensor: FileTensor, dtype: torch.dtype, chosen: Kernels | None) -> int:
    """Return the memory of a tensor: packed where these kernels read its codes, None: de-quantised in a dtype."""
    form = None if chosen is None or len(tensor.shape) != 2 else forms(chosen).get(tensor.kind)
    if form is None:
        return tensor.n_values * dtype.itemsize
    n_out, n_in = tensor.shape
    return -(-n_out // ROWS) * (ROWS * n_in * form.bits // 8 + form.scale_bytes(n_in))


class _Reading:
    """The state of reading a file into a model without memory."""

    def __init__(self, file: GgufFile, model: Any, dtype: torch.dtype, chosen: Kernels | None) -> None:
        self.file, self.model, self.dtype, self.kernels = file, model, dtype, chosen
        self.family: Family = family_of(model.config)
        form = self.family.gguf
        if form is None or form.architecture != file.architecture:
            raise UnsupportedModel(f"{file.path} is of the architecture {file.architecture!r}, which is not supported")
        self.form: GgufForm = form
        self._places = names_of(file.architecture, model.config)
        self._values: dict[str, Tensor] = {}
        self._packed: dict[str, PackedBlocks] = {}
        self._read: set[str] = set()

    def take(self, name: str) -> None:
        """Read one parameter of the model, by its name there.

        Raises: ModelNotFound: the file was changed since it was mapped, or the parameter is of another shape.
        """
        self.file.refuse_changed()
        tensor = self.file.tensors.get(self._places.get_name(name, try_suffixes=(".weight", ".bias")) or "")
        if tensor is None:
            return
        self._read.add(tensor.name)
        module_name, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(module_name)
        order = self._order(module_name, tensor)
        if self._keeps_codes(module_name, module, leaf, tensor):
            assert self.kernels is not None
            n_out, n_in = tensor.shape
            parameter = module.weight.T if isinstance(module, Conv1D) else module.weight
            _check_shape(self.file.path, tensor, tuple(parameter.shape), (n_out, n_in))
            rows = None if order is None else order.int()
            self._packed[module_name] = packed_blocks(tensor, self.kernels, rows, self.file.release)
        else:
            values = numbers(tensor)
            if order is not None:
                values = values[order]
            if self.form.adds_to_norms and "norm" in module_name and leaf == "weight":
                values = values - self.form.adds_to_norms
            if isinstance(module, Conv1D) and leaf == "weight":
                values = values.t()
            _check_shape(self.file.path, tensor, tuple(getattr(module, leaf).shape), tuple(values.shape))
            self._values[name] = values.to(self.dtype).contiguous()
        self.file.release(tensor)

    def finish(self) -> None:
        """Put what was read into the model.

        Raises: as `load_gguf`.
        """
        self.file.refuse_changed()
        factors = FACTORS if self.family.rotary is not None else ()  # The config has them.
        unread = [name for name in self.file.tensors if name not in self._read and name not in factors]
        if unread:
            raise UnsupportedModel(
                f"{self.file.path} has a tensor {sorted(unread)[0]!r}, for which a model of type"
                f" {self.model.config.model_type} has no place: use the model's hub id"
            )
        self.model.load_state_dict(self._values, strict=False, assign=True)
        head, embed = self.family.head, self.family.embed
        if self.model.config.tie_word_embeddings and embed in self._packed:
            self._packed[head] = self._packed[embed]
            self.model.config.tie_word_embeddings = False
        for module_name, packed in self._packed.items():
            module = self.model.get_submodule(module_name)
            if isinstance(module, nn.Embedding):
                made: nn.Module = BlockEmbedding(packed, self.dtype, getattr(module, "embed_scale", None))
            else:
                made = BlockLinear(packed, getattr(module, "bias", None), self.dtype)
            self.model.set_submodule(module_name, made)
        self.model.tie_weights()
        refuse_missing([name for name, one in self.model.named_parameters() if one.is_meta], self.file.path)

    def _keeps_codes(self, module_name: str, module: nn.Module, leaf: str, tensor: FileTensor) -> bool:
        if self.kernels is None or leaf != "weight" or tensor.kind not in forms(self.kernels):
            return False
        return isinstance(module, nn.Linear | Conv1D) or module_name == self.family.embed

    def _order(self, module_name: str, tensor: FileTensor) -> Tensor | None:
        """Return int64 (out,), which row of the file each output is; None where they are in order."""
        config = self.model.config
        n_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        heads = {"q_proj": config.num_attention_heads, "k_proj": n_kv_heads}
        n_heads = heads.get(module_name.rpartition(".")[2])
        if not self.form.pairs_halves or n_heads is None:
            return None
        n_out = tensor.shape[0]
        if n_out % (2 * n_heads):
            return None
        return torch.arange(n_out).view(n_heads, -1, 2).transpose(1, 2).reshape(-1)


def names_of(architecture: str, config: Any) -> Any:
    """Return gguf's map from transformers' names of tensors to those of a file."""
    import gguf

    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    return gguf.get_tensor_name_map(arch, config.num_hidden_layers)


def _check_shape(path: Path, tensor: FileTensor, expected: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if shape != expected:
        raise ModelNotFound(
            f"{tensor.name} in {path} has the shape {list(shape)}, and a model of its settings has {list(expected)}"
            " there: download it again"
        )


def numbers(tensor: FileTensor) -> Tensor:
    """Return the values of a tensor as the file means them: float32, of its shape."""
    import gguf

    name = tensor.type_name
    if name in FLOATS:
        return torch.from_numpy(tensor.data.view(FLOATS[name]).astype(np.float32).reshape(tensor.shape))
    values = gguf.quants.dequantize(tensor.data.reshape(tensor.shape[0], -1), gguf.GGMLQuantizationType(tensor.kind))
    return torch.from_numpy(np.ascontiguousarray(values, np.float32).reshape(tensor.shape))
