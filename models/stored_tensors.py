"""Reads a folder's safetensors files: their headers, and tensors one at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from ..core.errors import ModelNotFound, SwiftoptError, first_line
from .saved import naming, supported_type, weight_files

# Plain floating-point types, which need no scale: safetensors' names and torch's.
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class StoredShape:
    """A tensor's entry in a file's header; `sizes` is its shape."""

    type_name: str
    sizes: tuple[int, ...]

    @property
    def n_values(self) -> int:
        return math.prod(self.sizes)

    @property
    def n_bytes(self) -> int:
        return self.n_values * int(re.sub(r"\D", "", self.type_name.partition("_")[0]) or 8) // 8

    @property
    def is_plain(self) -> bool:
        """Whether its values are floating-point numbers without a scale."""
        return self.type_name in FLOATS


class StoredTensors:
    """The tensors of a folder's safetensors files, by their names in the loaded model."""

    def __init__(self, places: Mapping[str, tuple[Any, str]]) -> None:
        self._places = places  # Name -> open file, and the name in it.

    def slices(self) -> dict[str, Any]:
        """Return the tensors as safetensors' slices, which read nothing until they are indexed."""
        return {name: file.get_slice(stored) for name, (file, stored) in self._places.items()}

    def stored_shapes(self) -> dict[str, StoredShape]:
        return {name: StoredShape(part.get_dtype(), tuple(part.get_shape())) for name, part in self.slices().items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape.sizes for name, shape in self.stored_shapes().items()}

    def read(self, name: str) -> Any:
        """Return one tensor as it is stored, on the CPU."""
        file, stored = self._places[name]
        return file.get_tensor(stored)


@contextmanager
def stored_tensors(folder: Path, of_mtp: bool = False) -> Iterator[StoredTensors]:
    """Open a folder's safetensors files, to read their tensors one at a time.

    Args:   of_mtp: the tensors of the multi-token-prediction layer, see `saved.naming`.
    Raises: ModelNotFound: the folder holds no such files, or a damaged one.
    """
    from safetensors import SafetensorError, safe_open

    paths, named = weight_files(folder, of_mtp), naming(folder, of_mtp)
    if not paths or any(path.suffix != ".safetensors" for path in paths):
        raise ModelNotFound(f"{folder} holds no safetensors files: save the model again with transformers")
    with ExitStack() as opened:
        try:
            files = [opened.enter_context(safe_open(path, framework="pt")) for path in paths]
            stored_names = [(file, stored) for file in files for stored in file.keys()]  # noqa: SIM118
            places = {name: place for place in stored_names if (name := named(place[1]))}
        except (OSError, SafetensorError) as error:
            raise ModelNotFound(f"{folder} cannot be read ({first_line(error)}): copy it again") from error
        yield StoredTensors(places)


def dtype_in(shapes: Iterable[StoredShape]) -> torch.dtype:
    """Return the dtype of the first plain tensor; float32 if there is none."""
    return next((getattr(torch, FLOATS[shape.type_name]) for shape in shapes if shape.is_plain), torch.float32)


def dtype_asked(folder: Path, config: Any, dtype: str) -> torch.dtype:
    """Return the requested dtype of `models.loading.load`; for "auto", the config's, or else that of stored tensors."""
    if dtype != "auto":
        return cast(torch.dtype, getattr(torch, dtype))
    with stored_tensors(folder) as tensors:
        return config.dtype or dtype_in(tensors.stored_shapes().values())


def is_readable(folder: Path) -> bool:
    """Tell whether a folder of the cache is complete; a crash may have truncated its weights."""
    try:
        supported_type(folder)
        with stored_tensors(folder):
            return True
    except SwiftoptError:
        return False
