"""Computes how much memory a model needs, from its config and the headers of its files, before weights are read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..core.errors import ModelNotFound, SettingsError
from ..core.requests import Speed
from .config_bounds import ADVICE
from .config_layout import HeadLayout, heads_of, slot_shapes
from .expert_checkpoints import BLOCKS
from .families import family_of
from .family import Family, GatedDelta, Selective, SelectiveScan
from .fingerprint import plain_name
from .gguf_layers import TOKEN_TABLE
from .gguf_model import held_bytes, loaded_tensors, own_tensors
from .gguf_reader import GgufFile
from .kernels.build import kernels
from .mapped_rows import mapped_table
from .quantised_checkpoints import NAMES
from .saved import (
    LEFTOVERS,
    is_multimodal,
    linked_gguf,
    supported_config,
    supported_type,
    weight_files,
)
from .schemes import Scheme
from .stored_tensors import StoredShape, dtype_in, stored_tensors

PLANNED_TOKENS = 2048  # Tokens whose keys and values must fit into memory in addition to the weights.
WORKSPACE = 1 << 30  # Bytes reserved on a CUDA device for its context and its libraries' workspaces.
COPIED_BYTES = 0.9  # Maps with fewer bytes per weight (about 7 bits) get no copy in int4 for drafts.
COPY_BYTES = 0.6  # Bytes per weight of an int4 copy for drafts, scales included.
TOLD = 0.01  # Copies are mentioned only if they take at least this share of the weights' memory.
CODES = ("qweight", "weight_packed", "weight")  # Names of the tensors that hold a quantised map's codes.
# Name endings of stored tensors that are not loaded.
UNREAD = tuple(f".{ending.removeprefix('.')}" for ending in LEFTOVERS)
# A config that describes more than this multiple of the values in the files is refused. The estimate may exceed the
# files' values because some families do not use all fields.
MOST_TIMES = 4
SMALL = 1 << 20  # An excess of fewer values is accepted.
EMBEDDING = "token_embd.weight"  # The embedding's name in GGUF files.


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The least memory of a model, in bytes.

    weights, context, workspace: for weights, for keys and values of PLANNED_TOKENS, and for a device's libraries.
    n_copied: number of weights that int4 drafts copy.
    mapped: bytes of an embedding that stays in its file, which do not count as needed.
    is_part: the model also has parts for images or audio, which are not loaded.
    """

    folder: Path
    weights: int
    context: int
    workspace: int
    n_copied: int
    mapped: int = 0
    is_part: bool = False

    @property
    def needed(self) -> int:
        return self.weights + self.context + self.workspace

    @property
    def copies(self) -> float:
        """Additional bytes of int4 copies for drafts."""
        return COPY_BYTES * self.n_copied

    @property
    def words(self) -> str:
        """The memory in words, to complete the sentence "MODEL needs …"."""
        more = f", {_amount(self.workspace)} of workspace" if self.workspace else ""
        return (
            f"{_amount(self.weights)} for its weights, {_amount(self.context)} for keys and values of"
            f" {PLANNED_TOKENS:,} tokens{more}"
        )

    def sentence(self, name: str) -> str:
        drafts = f", and drafts in int4 up to {_amount(self.copies)} more" if self.copies > TOLD * self.weights else ""
        rows = f"; {_amount(self.mapped)} of embeddings by layer stay in the file" if self.mapped else ""
        others = "; its parts for images and audio are left out" if self.is_part else ""
        return f"{name} needs {self.words}{drafts}{rows}{others}"

    def check(self, where: str, free: int) -> None:
        """Raises: SettingsError: fewer than the needed bytes are free."""
        if free >= self.needed:
            return
        raise SettingsError(
            f"{self.folder} needs {self.words}, but {where} ha{'ve' if where.endswith('s') else 's'} {_amount(free)}"
            " free: use a smaller model, a narrower --dtype or another --device"
        )


def _amount(n_bytes: float) -> str:
    if n_bytes >= 1e9:
        return f"{n_bytes / 1e9:.1f} GB"
    return f"{n_bytes / 1e6:.0f} MB" if n_bytes >= 1e6 else f"{n_bytes / 1e3:.0f} kB"


def memory_plan(
    folder: Path, dtype: str, on_cpu: bool, speed: Speed = "auto", file: GgufFile | None = None
) -> MemoryPlan:
    """Return the memory that a model will need; the arguments are those of `models.loading.load`.

    Quantised weights count as stored if our kernels read their codes, and otherwise as plain weights.

    Args:   file: the GGUF file, if it is open already.
    Raises: as `supported_config`. ModelNotFound: config and files do not describe the same model.
    """
    config, scheme = supported_config(folder), supported_type(folder)[1]
    shapes: Mapping[str, StoredShape] = {}
    stored_bytes = sum(path.stat().st_size for path in weight_files(folder) if path.is_file())
    if scheme is not None and scheme.format == "gguf":
        file = file or GgufFile(linked_gguf(folder))
    elif all(path.suffix == ".safetensors" for path in weight_files(folder)):
        with stored_tensors(folder) as tensors:
            shapes = {plain_name(name): shape for name, shape in tensors.stored_shapes().items()}
        shapes = {name: shape for name, shape in shapes.items() if not f".{name}".endswith(UNREAD)}
    stored = getattr(config, "dtype", None) or (dtype_in(shapes.values()) if scheme is None else torch.float32)
    dtype_asked = stored if dtype == "auto" else getattr(torch, dtype)
    is_kernel_speed = speed in ("auto", "exact")
    if file is not None:
        codes_stay = is_kernel_speed and dtype_asked == torch.bfloat16 if on_cpu else speed == "exact"
        chosen = kernels() if codes_stay else ""
        kept, read = None if isinstance(chosen, str) else chosen, loaded_tensors(file, config)
        without_codes = () if on_cpu else (EMBEDDING, TOKEN_TABLE)
        sizes = {
            # On a device, embeddings are de-quantised.
            tensor.name: (
                held_bytes(tensor, dtype_asked, None if tensor.name in without_codes else kept),
                tensor.n_values,
            )
            for tensor in read
        }
        stored_at = {tensor.name: tensor.data.nbytes for tensor in read}
    elif shapes:
        codes_stay = on_cpu and is_kernel_speed and dtype_asked in (torch.bfloat16, torch.float32)
        by_library = scheme is not None and scheme.kind is not None
        # MXFP4 is packed by our library for CPUs, also for a CUDA device.
        is_packed = scheme is not None and (scheme.format != "mxfp4" or not isinstance(kernels(), str))
        codes_stay = codes_stay or by_library or (is_packed and speed == "exact")
        sizes = {name: _size(name, shape, scheme, codes_stay, dtype_asked) for name, shape in shapes.items()}
        stored_at = {name: shape.n_bytes for name, shape in shapes.items()}
        _refuse_other_shapes(config, shapes, folder)
    else:  # Files in torch's format have no header with shapes.
        n_stored = stored_bytes // stored.itemsize
        sizes, stored_at = {"": (n_stored * dtype_asked.itemsize, n_stored)}, {}
    _refuse_more_values(config, sum(n_values for _, n_values in sizes.values()), folder)
    by_library = scheme is not None and scheme.kind is not None
    table = mapped_table(config, weight_files(folder)) if on_cpu and not by_library else None
    name = TOKEN_TABLE if file is not None else plain_name(f"{table}.weight")
    mapped = stored_at[name] if table is not None and sizes.pop(name, None) is not None else 0
    n_slot_values = sum(shape.n_values for shape in slot_shapes(config) if shape is not None)
    slot_bytes = max(1, n_slot_values * dtype_asked.itemsize)  # As `Runtime.slot_bytes`.
    n_copied = sum(n_values for n_bytes, n_values in sizes.values() if n_bytes >= COPIED_BYTES * n_values)
    weights = sum(n_bytes for n_bytes, _ in sizes.values())
    named = folder if file is None else file.path
    is_part = is_multimodal(folder) if file is None else len(own_tensors(file)) < len(file.tensors)
    return MemoryPlan(
        named, weights, slot_bytes * PLANNED_TOKENS, 0 if on_cpu else WORKSPACE, n_copied, mapped, is_part
    )


def _size(
    name: str, shape: StoredShape, scheme: Scheme | None, codes_stay: bool, dtype: torch.dtype
) -> tuple[int, int]:
    """Return the bytes that a stored tensor takes in memory, and its number of weights."""
    leaf = name.rpartition(".")[2]
    if scheme is not None and scheme.format == "mxfp4" and not shape.is_plain:
        n_values = 2 * shape.n_values if leaf.endswith(f"_{BLOCKS}") else 0
        return shape.n_bytes if codes_stay else n_values * dtype.itemsize, n_values
    if scheme is None or (shape.is_plain and (leaf in CODES or leaf not in NAMES.get(scheme.format, ()))):
        return shape.n_values * dtype.itemsize, shape.n_values
    n_values = 8 * shape.n_bytes // scheme.bits if leaf in CODES and not shape.is_plain else 0
    if scheme.is_float or not codes_stay:
        return n_values * dtype.itemsize, n_values
    return shape.n_bytes, n_values


def _refuse_other_shapes(config: Any, shapes: Mapping[str, StoredShape], folder: Path) -> None:
    """Raises: ModelNotFound: embeddings have other sizes than the config says, or the files have fewer layers.

    Other shapes are compared when tensors are read, but by then the model already takes memory.
    """
    family = family_of(config)
    embed, positions = (shapes.get(plain_name(f"{name}.weight")) for name in (family.embed, family.positions))
    if embed is not None and embed.sizes != (config.vocab_size, config.hidden_size):
        raise ModelNotFound(
            f"{family.embed}.weight in {folder} has the shape {list(embed.sizes)}, and a model of its config.json has"
            f" {[config.vocab_size, config.hidden_size]} there: {ADVICE}"
        )
    if positions is not None and positions.sizes[0] < config.max_position_embeddings:
        raise ModelNotFound(
            f"{folder} holds {positions.sizes[0]} positions, and its config.json says"
            f" {config.max_position_embeddings}: {ADVICE}"
        )
    layer = re.compile(rf"{re.escape(plain_name(family.layers + '.'))}(\d+)\.")
    layers = {int(match[1]) for name in shapes if (match := layer.match(name))}
    if len(layers) < config.num_hidden_layers:
        raise ModelNotFound(
            f"{folder} holds {len(layers)} layers, and its config.json says {config.num_hidden_layers}: {ADVICE}"
        )


def _values_beside(config: Any, family: Family) -> int:
    """Return the least number of values of experts, per-layer inputs and recurrences in all layers."""
    n_layers, hidden = config.num_hidden_layers, config.hidden_size
    n_experts, inner = (getattr(config, name, None) or 0 for name in ("num_experts", "moe_intermediate_size"))
    n_sparse = n_layers // 2 if family.experts else 0  # A lower bound: configs name the layers in several ways.
    n_values = 3 * n_sparse * n_experts * hidden * inner
    if family.layer_inputs is not None:
        n_values += n_layers * family.layer_inputs.width(config) * config.vocab_size
    if isinstance(family.mixer, GatedDelta):
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
    elif isinstance(family.mixer, SelectiveScan):
        keys, values = 0, int(getattr(config, family.mixer.expand)) * hidden
    elif isinstance(family.mixer, Selective):
        heads, width, key_heads, key_width = (int(getattr(config, name)) for name in family.mixer.sizes)
        keys, values = key_heads * key_width, heads * width
    else:
        return int(n_values)
    n_mixers = sum(family.mixer_of(config, layer) is not None for layer in range(n_layers))
    return int(n_values + n_mixers * (2 * keys + 3 * values) * hidden)


def _attention_values(hidden: int, heads: HeadLayout) -> int:
    """Return the number of values in the maps of a layer's attention."""
    if heads.latent is None:
        return (2 * heads.n_heads + (heads.projected - 1) * heads.n_kv_heads) * heads.width * hidden
    sizes = heads.latent
    of_heads = sizes.query_rank * (sizes.rotary + sizes.kept) + sizes.rank * (sizes.kept + sizes.value_width)
    of_heads += sizes.value_width * hidden
    return hidden * sum(sizes.projected(heads)) + heads.n_heads * of_heads


def _refuse_more_values(config: Any, n_stored: int, folder: Path) -> None:
    """Raises: ModelNotFound: a model of the config is much larger than what the files hold."""
    family, hidden = family_of(config), config.hidden_size
    inner = family.setting(config, "intermediate_size") or 4 * hidden
    n_rows = config.vocab_size + (config.max_position_embeddings if family.positions else 0)
    n_values = hidden * n_rows + _values_beside(config, family)
    for layer in range(config.num_hidden_layers):
        heads = heads_of(config, layer)
        by_kind = {"attn": _attention_values(hidden, heads), "mlp": (2 + family.gated) * inner * hidden}
        n_values += sum(by_kind[kind] for kind in family.kinds_of(config, layer))
    if n_values > MOST_TIMES * n_stored + SMALL:
        raise ModelNotFound(
            f"{folder / 'config.json'} describes a model of {n_values:,} parameters, and its files hold {n_stored:,}:"
            f" {ADVICE}"
        )
