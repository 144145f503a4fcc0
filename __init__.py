"""swiftopt: find the sub-layers a language model can skip while drafting, and decode with them, losslessly."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# torch's threads then sleep while they wait, in place of taking the processors from our kernels' threads. OpenMP reads
# it once, when torch is loaded.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Public name -> module that defines it, loaded on first use: importing swiftopt must not import torch.
_EXPORTS = {
    "Client": "client",
    "Completion": "core.types",
    "LayerSet": "core.layer_sets",
    "LayerSetRecord": "core.records",
    "Prompt": "core.types",
    "Sampling": "core.types",
    "SwiftSettings": "core.settings",
    "SwiftoptError": "core.errors",
    "TuneRequest": "core.requests",
    "TuningSettings": "core.settings",
    "Runtime": "models.runtime",
    "model_folder": "models.sources",
    "Store": "store",
    "custom_generate": "decoding.transformers_hook",
    "LiveEngine": "tasks.model",
    "Model": "tasks.model",
    "Ticket": "tasks.model",
    "load": "tasks.model",
    "tune": "tasks.model",
    "TuneResult": "tasks.tune",
}

__all__ = [
    "Client",
    "Completion",
    "LayerSet",
    "LayerSetRecord",
    "LiveEngine",
    "Model",
    "Prompt",
    "Runtime",
    "Sampling",
    "Store",
    "SwiftSettings",
    "SwiftoptError",
    "Ticket",
    "TuneRequest",
    "TuneResult",
    "TuningSettings",
    "__version__",
    "custom_generate",
    "load",
    "model_folder",
    "tune",
]

if TYPE_CHECKING:
    from .client import Client
    from .core.errors import SwiftoptError
    from .core.layer_sets import LayerSet
    from .core.records import LayerSetRecord
    from .core.requests import TuneRequest
    from .core.settings import SwiftSettings, TuningSettings
    from .core.types import Completion, Prompt, Sampling
    from .decoding.transformers_hook import custom_generate
    from .models.runtime import Runtime
    from .models.sources import model_folder
    from .store import Store
    from .tasks.model import LiveEngine, Model, Ticket, load, tune
    from .tasks.tune import TuneResult


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(f"{__name__}."):
            raise
        raise ImportError(f"swiftopt.{name} is not in swiftopt-client: pip install swiftopt, which has it") from error
