"""Reads saved models by transformers: whole, as their configs say, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..core.errors import ModelNotFound, SettingsError, SwiftoptError, first_line
from .costs import is_out_of_memory
from .saved import is_multimodal, naming, refuse_mismatched, refuse_missing, refuse_unread, supported_config
from .stored_tensors import dtype_asked, stored_tensors


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


def read_model(folder: Path, dtype: str, placement: str, by_library: bool = False, named: Path | None = None) -> Any:
    """Return a folder's model, in evaluation mode.

    Args:   dtype, placement: as `models.loading.load` and `placement` have them. by_library: its maps are quantised and
            computed by a library. named: what errors call the folder.
    Raises: ModelNotFound: it cannot be read, lacks weights, or has more. SettingsError: it does not fit the memory.
    """
    where = named or folder
    on_cpu = {"": "cpu"} if by_library else None  # Without a map, the quantisation library would choose a GPU.
    device_map = {"cpu": on_cpu, "auto-map": "auto"}.get(placement, {"": placement})
    with reading(str(where), where, placement), _source(folder, dtype) as (auto, source):
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
    return model.eval().requires_grad_(False)


@contextmanager
def _source(folder: Path, dtype: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield transformers' class for a folder, and what to give it: the folder, or the tensors of a text part alone."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if not is_multimodal(folder):
        yield AutoModelForCausalLM, {"pretrained_model_name_or_path": folder, "dtype": dtype}
        return
    config = supported_config(folder)
    with stored_tensors(folder) as tensors:
        state = {name: _by_outputs(name, part, config) for name, part in tensors.slices().items()}
        source = {"pretrained_model_name_or_path": None, "config": config, "state_dict": state}
        yield MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], {**source, "dtype": dtype_asked(folder, config, dtype)}


def _by_outputs(name: str, stored: Any, config: Any) -> Any:
    """Return a stored tensor; maps of experts by outputs: Qwen3-VL's checkpoints have them by inputs."""
    leaf, hidden, inner = name.rpartition(".")[2], config.hidden_size, getattr(config, "moe_intermediate_size", 0) or 0
    shape = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}.get(leaf)
    if ".experts." not in name or shape is None or tuple(stored.get_shape()[:0:-1]) != shape:
        return stored
    return stored if tuple(stored.get_shape()[1:]) == shape else stored[:].transpose(1, 2).contiguous()
