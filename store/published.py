"""Layer sets from files: swiftopt's own export, and the `skip_layers.json` that SWIFT and Self-SD publish."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.errors import LayerSetError, NotFound
from ..core.types import LayerSet, LayerSetRecord, check_task


def import_file(path: str | Path, n_layers_of: Callable[[str], int | None]) -> list[LayerSetRecord]:
    """Read one exported layer set, or all of a published file: {"MODEL_TASK": {"attention": [..], "mlp": [..]}}.

    Args:   n_layers_of: number of layers of a model by its name, which a published file does not say; None: unknown.
    Raises: NotFound: no such file. LayerSetError: it cannot be read, a layer is out of range, or a depth is unknown.
    """
    path = Path(path)
    values = _read(path)
    if "schema" in values:
        return [LayerSetRecord.unstored(values, str(path))]
    if not values:
        raise LayerSetError(f"{path} holds no layer set: expected an exported one or SWIFT's skip_layers.json")
    return [_published(path, key, value, n_layers_of) for key, value in values.items()]


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise NotFound(f"no file {path} to import a layer set from: check the path") from error
    except OSError as error:
        raise LayerSetError(
            f"{path} cannot be read ({error.strerror}): check that it is a file you may read"
        ) from error
    except UnicodeDecodeError as error:
        raise LayerSetError(f"{path} is not UTF-8 text: expected one JSON object with a layer set") from error
    except (ValueError, RecursionError) as error:
        raise LayerSetError(f"{path} is not JSON ({error}): expected one object with a layer set") from error
    if not isinstance(values, dict):
        raise LayerSetError(f"{path} holds a {type(values).__name__}: expected one JSON object with a layer set")
    return values


def _published(path: Path, key: str, value: Any, n_layers_of: Callable[[str], int | None]) -> LayerSetRecord:
    model, _, task = key.rpartition("_")
    model = model.replace("_", "-")  # "llama-2-13b_chat_cnndm" is model llama-2-13b-chat
    if not model or not task:
        raise LayerSetError(f"{path}: key {key!r} is no MODEL_TASK: name the model and the task in it")
    if not isinstance(value, dict) or set(value) != {"attention", "mlp"}:
        raise LayerSetError(f'{path}: key {key!r} is no layer set: expected {{"attention": [..], "mlp": [..]}}')
    n_layers = n_layers_of(model)
    if n_layers is None:
        raise LayerSetError(f"{path}: the number of layers of {model!r} is unknown: pass --n-layers")
    try:
        layer_set = LayerSet(n_layers, _layers(value["attention"]), _layers(value["mlp"]))
    except LayerSetError as error:
        raise LayerSetError(f"{path}: key {key!r}: {error}") from error
    check_task(task, str(path))
    return LayerSetRecord(model, task, layer_set)


def _layers(value: Any) -> frozenset[int]:
    if not isinstance(value, list) or not all(type(layer) is int for layer in value):  # bool is an int, too
        raise LayerSetError(f"layers must be a list of whole numbers, not {value!r}")
    return frozenset(value)
