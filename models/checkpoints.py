"""Reads saved models by transformers, and refuses a checkpoint whose tensors do not match its config exactly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..core.errors import ModelNotFound, SettingsError, SwiftoptError, first_line
from .costs import is_out_of_memory
from .fingerprint import plain_name
from .mapped_rows import mapped_table, put_mapped
from .saved import (
    is_multimodal,
    naming,
    refuse_mismatched,
    refuse_missing,
    refuse_unread,
    supported_config,
    weight_files,
)
from .stored_tensors import StoredTensors, dtype_asked, stored_tensors


@contextmanager
def reading(what: str, folder: Path, placement: str) -> Iterator[None]:
    """Turn any exception of a weight reader into an error that names what cannot be loaded."""
    try:
        yield
    except SwiftoptError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise SettingsError(
                f"{folder} does not fit the memory of {placement}: use a smaller model, a narrower --dtype or another"
                " --device"
            ) from error
        raise ModelNotFound(f"{what} cannot be loaded ({first_line(error)}): copy or download it again") from error


def read_model(
    folder: Path,
    dtype: str,
    placement: str,
    by_library: bool = False,
    named: Path | None = None,
    maps_rows: bool = False,
) -> Any:
    """Return a folder's model, in evaluation mode.

    Args:   dtype: as for `models.loading.load`. placement: as `models.loading.placement` returns it. by_library: its
            maps are quantised, and a library computes them. named: the folder's name in messages (None: its path).
            maps_rows: an embedding by layer stays in its file; only on the CPU.
    Raises: ModelNotFound: it cannot be read, lacks tensors, or has unexpected ones. SettingsError: it does not fit the
            memory.
    """
    where = named or folder
    on_cpu = {"": "cpu"} if by_library else None  # Without a map, the quantisation library would choose a GPU.
    device_map = {"cpu": on_cpu, "auto-map": "auto"}.get(placement, {"": placement})
    is_part = is_multimodal(folder)
    config = supported_config(folder) if is_part or maps_rows else None
    table = mapped_table(config, weight_files(folder)) if maps_rows else None
    n_rows = 0 if table is None or config is None else config.vocab_size_per_layer_input
    tensors_of = config if is_part or table is not None else None
    with reading(str(where), where, placement), _source(folder, dtype, tensors_of, table) as (auto, source):
        model, loading_info = auto.from_pretrained(
            **source,
            device_map=device_map,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # Reported below: transformers' own error names no tensor.
        )
    refuse_mismatched(loading_info["mismatched_keys"], where, "its config.json")
    refuse_missing(loading_info["missing_keys"], where)
    model_name = naming(folder)
    refuse_unread((name for name in loading_info["unexpected_keys"] if model_name(name) is not None), where)
    if table is not None:
        _put_stored(model, table, n_rows, folder, where)
    return model.eval().requires_grad_(False)


def _put_stored(model: Any, table: str, n_rows: int, folder: Path, where: Path) -> None:
    """Give a model its embedding by layer, which stays in the folder's file (`mapped_rows`).

    Args:   n_rows: the embedding's number of rows, from the config.
    Raises: ModelNotFound: the embedding has another shape than the config says.
    """
    model.config.vocab_size_per_layer_input = n_rows
    with stored_tensors(folder) as tensors:
        stored = tensors.read(str(_stored_name(table, tensors)))
    expected = n_rows, model.get_submodule(table).embedding_dim
    if tuple(stored.shape) != expected:
        refuse_mismatched([(f"{table}.weight", stored.shape, expected)], where, "its config.json")
    put_mapped(model, table, stored.__getitem__, len(stored), model.dtype)


def _stored_name(table: str, tensors: StoredTensors) -> str | None:
    """Return the name of an embedding's tensor; names in checkpoints of a base model are shorter."""
    return next((name for name in tensors.shapes() if plain_name(name) == plain_name(f"{table}.weight")), None)


@contextmanager
def _source(folder: Path, dtype: str, config: Any, table: str | None) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield transformers' class for a folder, and its arguments: the folder, or a config and tensors.

    Args: config: that of the loaded part, which is changed; None: transformers reads the folder itself.
          table: the embedding by layer; transformers gets a few rows of zeros in its place.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if config is None:
        yield AutoModelForCausalLM, {"pretrained_model_name_or_path": folder, "dtype": dtype}
        return
    with stored_tensors(folder) as tensors:
        state = {name: _by_outputs(name, part, config) for name, part in tensors.slices().items()}
        if table is not None:
            name = _stored_name(table, tensors)
            if name is not None:
                n_rows, width = state[name].get_shape()
                # transformers' class needs the row of the padding token.
                config.vocab_size_per_layer_input = min(n_rows, 1 + max(0, config.pad_token_id or 0))
                state[name] = torch.zeros(1, width).expand(config.vocab_size_per_layer_input, width)
        source = {"pretrained_model_name_or_path": None, "config": config, "state_dict": state}
        yield MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], {**source, "dtype": dtype_asked(folder, config, dtype)}


def _by_outputs(name: str, stored: Any, config: Any) -> Any:
    """Return a stored tensor; experts' maps stored as (experts, in, out), as in Qwen3-VL, are transposed."""
    leaf, hidden, inner = name.rpartition(".")[2], config.hidden_size, getattr(config, "moe_intermediate_size", 0) or 0
    shape = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}.get(leaf)
    if ".experts." not in name or shape is None or tuple(stored.get_shape()[:0:-1]) != shape:
        return stored
    return stored if tuple(stored.get_shape()[1:]) == shape else stored[:].transpose(1, 2).contiguous()
