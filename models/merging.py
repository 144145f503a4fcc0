"""Merges LoRA adapters into the weights of their bases, when a model is loaded or into a folder for other engines.

The product of an adapter's matrices is computed in float32 on the CPU, added, and rounded once to the checkpoint's
dtype. So the merged weights do not depend on the dtype or device that the model is loaded to. DoRA (arXiv:2402.09353)
then scales each output by a learned magnitude over its norm.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..core.errors import ModelNotFound, SettingsError, UnsupportedModel
from .adapters import Adapter, check_base, is_adapter, reading_adapter
from .cache import cache_root, made_once
from .checkpoints import read_model
from .fingerprint import fingerprint, fingerprint_with, note_merged
from .mapped_rows import count_values, mapped_in, mapped_table
from .restacked import SMALL_FILES
from .saved import ADAPTER, OnStep, is_multimodal, no_step, quiet, supported_config, weight_files
from .stored_tensors import is_readable
from .text_parts import text_name, whole_names

MERGING = "1"  # Hashed into the names of merged folders; raise it when the merge changes.
Naming = Callable[[str], str | None]
_PREFIX = "base_model.model."  # Prefix of the names of all tensors that peft saves.
_WRAPPED = re.compile(r"\.(base_layer|modules_to_save)(?=\.)")  # Parts of names that peft's wrappers add.
_FORM = re.compile(
    r"(?P<module>.+)\.(lora_(?P<map>[AB])\.weight|lora_embedding_(?P<embedding>[AB])|lora_(?P<dora>magnitude_vector)(\.weight)?)"
)


@dataclass(frozen=True, slots=True)
class Addition:
    """An adapter's tensors for one module: their names by part (A, B, magnitude_vector), and the factor of the product.

    `module` is the module's name in the adapter; for a multimodal base, that is its name in the whole model.
    """

    module: str
    scale: float
    rank: int
    stored: Mapping[str, str]


class AdapterTensors:
    """The tensors of an adapter's file, by their stored names; read one at a time from safetensors."""

    def __init__(self, adapter: Adapter, read: Mapping[str, Callable[[], Tensor]]) -> None:
        self._adapter, self._read = adapter, read

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def read(self, name: str) -> Tensor:
        """Read a tensor. Raises: ModelNotFound: it cannot be read, or has an infinity or NaN."""
        with reading_adapter(self._adapter):
            tensor = self._read[name]()
        if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            what = "numbers that are not finite" if tensor.is_floating_point() else str(tensor.dtype)
            raise ModelNotFound(
                f"{name} in {self._adapter.weights} holds {what}: copy the adapter again, or train it anew"
            )
        return tensor


@contextmanager
def adapter_tensors(adapter: Adapter) -> Iterator[AdapterTensors]:
    """Open an adapter's file. Raises: ModelNotFound: it cannot be read."""
    from safetensors import safe_open

    if adapter.weights.suffix != ".safetensors":
        with reading_adapter(adapter):
            values = torch.load(adapter.weights, map_location="cpu", mmap=True, weights_only=True)
            tensors = {str(name): value for name, value in values.items() if isinstance(value, Tensor)}
        yield AdapterTensors(adapter, {name: partial(_same, tensor) for name, tensor in tensors.items()})
        return
    with reading_adapter(adapter):
        opened = safe_open(adapter.weights, framework="pt")
    with opened as file:
        yield AdapterTensors(adapter, {name: partial(file.get_tensor, name) for name in file.keys()})  # noqa: SIM118


def _same(tensor: Tensor) -> Tensor:
    return tensor


# --- loading


def load_merged(adapter: Adapter, base: Path, dtype: str, placement: str, maps_rows: bool = False) -> tuple[Any, int]:
    """Load a base with its adapter merged; return the model, in evaluation mode, and its number of parameters.

    The base is read in its own dtype, so that nothing is rounded before the adapter is added.

    Args:   dtype: as for `models.loading.load`. placement: as `models.loading.placement` returns it. maps_rows: an
            embedding by layer stays in its file, unless the adapter changes it.
    Raises: ModelNotFound: base or adapter cannot be read, or do not fit each other. UnsupportedModel: the base is
        quantised. SettingsError: it does not fit the memory.
    """
    check_base(adapter, base)
    with _without_adapter(base) as folder:
        if maps_rows:
            table = mapped_table(supported_config(folder), weight_files(folder))
            with adapter_tensors(adapter) as tensors:
                maps_rows = table is not None and not any(f"{table.rpartition('.')[2]}." in name for name in tensors)
        model = read_model(folder, "auto", placement, named=base, maps_rows=maps_rows)
        is_text_part = is_multimodal(folder)
    merge(model, adapter, is_text_part)
    if dtype != "auto":
        for parameter in model.parameters():
            parameter.data = parameter.data.to(getattr(torch, dtype))
        for embedding in mapped_in(model):
            embedding.dtype = getattr(torch, dtype)
        model.config.dtype = getattr(torch, dtype)
    return model, count_values(model)


def merged_folder(adapter: Adapter, base: Path, on_step: OnStep = no_step) -> Path:
    """Return the cache folder with the merged weights, for programs that read folders; write it if necessary.

    Raises: as `load_merged`. OutputError: the cache cannot be written.
    """
    name = re.sub(r"[^a-z0-9.]+", "-", adapter.folder.name.lower())[:60]
    folder = cache_root() / "adapters" / f"{name}-{_content(adapter, base)}"

    def write(unfinished: Path) -> None:
        on_step(f"merging the adapter {adapter.folder} into {adapter.base}")
        with quiet():
            model = load_merged(adapter, base, "auto", "cpu")[0]
            on_step("writing the merged model to the cache")
            model.save_pretrained(unfinished)
        for path in adapter.tokenizer_folder(base).iterdir():
            is_small = path.suffix in SMALL_FILES and not path.name.endswith(".index.json") and path.name != ADAPTER
            if is_small and not (unfinished / path.name).exists():
                shutil.copyfile(path, unfinished / path.name)
        note_merged(unfinished, identity(adapter, base))

    return made_once(folder, lambda: is_readable(folder), write)


def _content(adapter: Adapter, base: Path) -> str:
    """Hash what determines a merged folder: the whole adapter, its tokenizer's files, and the base's fingerprint."""
    digest = hashlib.sha256(f"{MERGING} {fingerprint(base)}".encode())
    for path in sorted(adapter.folder.iterdir()):
        if path == adapter.weights or path.suffix in SMALL_FILES:
            digest.update(path.name.encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


@contextmanager
def _without_adapter(folder: Path) -> Iterator[Path]:
    """Yield the folder without an adapter in it, which transformers would also merge if peft is installed."""
    if not is_adapter(folder):
        yield folder
        return
    with TemporaryDirectory(prefix="swiftopt-base-") as view:
        for path in folder.iterdir():
            if not path.name.startswith("adapter_"):
                os.symlink(path.resolve(), Path(view, path.name))
        yield Path(view)


# --- the modules of an adapter's tensors


def additions_of(adapter: Adapter, stored: Iterable[str], named: Naming = str) -> dict[str, Addition]:
    """Return the additions of an adapter by module.

    Args: named: gives a module's name in the loaded model; None: the module is in a part that is not loaded.
    """
    names: dict[str, dict[str, str]] = {}
    for name in stored:
        if match := _FORM.fullmatch(_plain(name)):
            part = match["map"] or match["embedding"] or match["dora"]
            names.setdefault(match["module"], {})[part] = name
    return {
        parameter: Addition(module, adapter.scale(module), adapter.rank(module), parts)
        for module, parts in sorted(names.items())
        if (parameter := named(module)) is not None
    }


def replacements_of(stored: Iterable[str], named: Naming = str) -> dict[str, str]:
    """Return the stored names of tensors that replace parameters, by parameter. Args: named: as for `additions_of`."""
    names = {_plain(name): name for name in stored if not _FORM.fullmatch(_plain(name))}
    return {parameter: stored_name for name, stored_name in names.items() if (parameter := named(name)) is not None}


def identity(adapter: Adapter, base: Path) -> str:
    """Return the fingerprint of a merged model, from its base's and from the adapter's tensors and factors."""
    with adapter_tensors(adapter) as tensors:
        additions = additions_of(adapter, tensors)
        factors = {name: addition.scale for addition in additions.values() for name in addition.stored.values()}
        parts = ((f"{_plain(name)} {factors.get(name)}", tensors.read(name)) for name in sorted(tensors, key=_plain))
        return fingerprint_with(fingerprint(base), parts)


def _plain(name: str) -> str:
    return _WRAPPED.sub("", name.removeprefix(_PREFIX))


# --- the merge


@torch.no_grad()
def merge(model: Any, adapter: Adapter, is_text_part: bool = False) -> None:
    """Add an adapter to a model of transformers, whose weights have the checkpoint's dtype.

    Args:   is_text_part: the model is the text part of a multimodal base; tensors for other parts are ignored.
    Raises: ModelNotFound: the adapter's tensors are not those of its config, or do not fit the model.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise SettingsError(
            f"{adapter.base} does not fit the devices of --device auto-map, and the adapter {adapter.folder} cannot be"
            " merged into weights on disk: use --device cpu"
        )
    with adapter_tensors(adapter) as tensors:
        named: Naming = text_name if is_text_part else str
        additions, replacements = additions_of(adapter, tensors, named), replacements_of(tensors, named)
        _check_replacements(model, adapter, replacements)
        _check_additions(model, adapter, additions, whole_names if is_text_part else lambda name: (name,))
        _untie(model, {*additions, *(name.rpartition(".")[0] for name in replacements)})
        for name, stored in replacements.items():
            _put(adapter, name, model.get_parameter(name), tensors.read(stored))
        for name, addition in additions.items():
            module = model.get_submodule(name)
            parts = {part: tensors.read(stored) for part, stored in addition.stored.items()}
            _put(adapter, f"{name}.weight", module.weight, _merged(adapter, name, module, addition, parts))


def _check_replacements(model: Any, adapter: Adapter, replacements: Mapping[str, str]) -> None:
    """Raises: ModelNotFound: the tensors that replace parameters are not those that the adapter's config names."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    ends = _ends(model)
    for name, stored in replacements.items():
        module, _, kind = name.rpartition(".")
        is_named = adapter.saves(module) or module in ends or (kind == "bias" and adapter.bias != "none")
        if name not in parameters:
            raise _no_place(adapter, stored, "is no part of its base")
        if not is_named:
            raise _no_place(adapter, stored, f"is not named by its {ADAPTER}")
    replaced_modules = {name.rpartition(".")[0] for name in replacements}
    for name, _ in model.named_modules():
        is_saved = name.endswith(adapter.modules_to_save)
        if is_saved and not any(f"{module}.".startswith(f"{name}.") for module in replaced_modules):
            raise ModelNotFound(
                f"{adapter.weights} lacks the weights of {name}, which modules_to_save of its {ADAPTER} names: copy the"
                " adapter again"
            )


def _check_additions(
    model: Any,
    adapter: Adapter,
    additions: Mapping[str, Addition],
    names_of: Callable[[str], tuple[str, ...]],
) -> None:
    """Check that the adapter has the additions that its config names, and no others.

    Args:   names_of: returns the names that a module may have in the model that the adapter was trained on.
    Raises: ModelNotFound: it has not. UnsupportedModel: it adapts an embedding by DoRA.
    """
    maps = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D | nn.Embedding)}
    head = model.get_output_embeddings()
    targets = {name for name in maps if any(map(adapter.targets, names_of(name)))}
    if adapter.target_modules == "all-linear":  # Neither the head nor an embedding counts as linear.
        targets = {name for name in targets if maps[name] is not head and not isinstance(maps[name], nn.Embedding)}
    for name, addition in additions.items():
        if name not in maps:
            raise _no_place(adapter, next(iter(addition.stored.values())), "is for no linear map of its base")
        if name not in targets:
            raise _no_place(adapter, next(iter(addition.stored.values())), f"is not named by its {ADAPTER}")
    for name in sorted(targets):
        expected = {"A", "B", *(("magnitude_vector",) if adapter.use_dora else ())}
        missing = sorted(expected - set(additions[name].stored if name in additions else ()))
        if missing:
            raise ModelNotFound(
                f"{adapter.weights} lacks lora_{missing[0]} of {name}, which its {ADAPTER} adapts: copy the adapter"
                " again"
            )
        if not adapter.use_dora and "magnitude_vector" in additions[name].stored:
            raise _no_place(adapter, additions[name].stored["magnitude_vector"], f"is of DoRA, unlike its {ADAPTER}")
        if adapter.use_dora and isinstance(maps[name], nn.Embedding):
            raise UnsupportedModel(
                f"{adapter.config} adapts the embedding {name} by DoRA, which is not supported: merge the adapter with"
                " peft's merge_and_unload, save the model and name its folder"
            )
    if not additions:
        raise ModelNotFound(f"{adapter.weights} adapts nothing of its base {adapter.base}: copy the adapter again")


def _no_place(adapter: Adapter, stored: str, why: str) -> ModelNotFound:
    return ModelNotFound(
        f"{stored} in {adapter.weights} {why} ({adapter.base}): copy the adapter again, or name the base that it was"
        " trained on"
    )


def _ends(model: Any) -> set[str]:
    """Return the names of the embedding and the head."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    return {name for name, module in model.named_modules() if any(module is end for end in ends)}


def _untie(model: Any, changed: set[str]) -> None:
    """Untie head and embedding if the adapter changes one of them, because peft then changes only that one."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head.weight is embedding.weight and changed & _ends(model):
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        for config in (model.config, model.config.get_text_config()):  # They may be the same one.
            config.tie_word_embeddings = False


def _merged(adapter: Adapter, name: str, module: Any, addition: Addition, parts: Mapping[str, Tensor]) -> Tensor:
    """Return a module's weight plus the adapter's product, in the weight's layout, in float32 or wider."""
    n_out, n_in = _shape(module)
    _check_shape(adapter, addition, parts, "A", (addition.rank, n_in))
    _check_shape(adapter, addition, parts, "B", (n_out, addition.rank))
    stored = module.weight.detach().cpu()
    wide = torch.promote_types(stored.dtype, torch.float32)
    is_transposed = isinstance(module, Conv1D | nn.Embedding)
    weight = (stored.T if is_transposed else stored).to(wide)  # (out, in)
    merged = torch.addmm(weight, parts["B"].to(wide), parts["A"].to(wide), alpha=addition.scale)
    if "magnitude_vector" in parts:
        _check_shape(adapter, addition, parts, "magnitude_vector", (n_out,))
        magnitudes = parts["magnitude_vector"].to(wide)
        merged *= (magnitudes / torch.linalg.vector_norm(merged, dim=1))[:, None]
    return merged.T if is_transposed else merged


def _shape(module: Any) -> tuple[int, int]:
    """Return the numbers of outputs and inputs of a map; an embedding's inputs are tokens."""
    rows, columns = module.weight.shape
    return (columns, rows) if isinstance(module, Conv1D | nn.Embedding) else (rows, columns)


def _check_shape(
    adapter: Adapter, addition: Addition, parts: Mapping[str, Tensor], part: str, expected: tuple[int, ...]
) -> None:
    if tuple(parts[part].shape) != expected:
        raise _wrong_shape(adapter, addition.stored[part], parts[part], expected)


def _wrong_shape(adapter: Adapter, stored: str, tensor: Tensor, expected: tuple[int, ...]) -> ModelNotFound:
    return ModelNotFound(
        f"{stored} in {adapter.weights} has the shape {list(tensor.shape)}, but by its {ADAPTER} the base"
        f" {adapter.base} needs {list(expected)} there: name the base that it was trained on, with its vocabulary"
    )


def _put(adapter: Adapter, name: str, parameter: nn.Parameter, value: Tensor) -> None:
    """Replace a parameter's values, in its dtype."""
    if value.shape != parameter.shape:
        raise _wrong_shape(adapter, name, value, tuple(parameter.shape))
    rounded = value.to(parameter.dtype)
    if not bool(rounded.isfinite().all()):
        raise ModelNotFound(
            f"{name} of {adapter.base} merged with {adapter.weights} has numbers too large for {parameter.dtype}: use"
            " a base in bfloat16 or float32"
        )
    parameter.data = rounded.contiguous().to(parameter.device)
