"""From a name to a runtime."""

from __future__ import annotations

from collections.abc import Callable

from .runtime import Runtime
from .sources import load_pretrained


def load(name: str, dtype: str = "auto", device: str = "auto", on_step: Callable[[str], None] | None = None) -> Runtime:
    """Load a target model by alias, hub id, local folder or GGUF file.

    Args:   dtype: "auto" (as stored), "float32", "bfloat16" or "float16".
            device: "auto", "cpu", "cuda", "cuda:N", or "auto-map" for a model that needs several devices.
            on_step: told in a few words what is being done.
    Raises: ModelNotFound: nothing of that name can be loaded.
            UnsupportedModel: sub-layers cannot be skipped in its architecture.
            SettingsError: no such dtype or device here.
    """
    loaded = load_pretrained(name, dtype, device, on_step)
    return Runtime(loaded.hf_model, loaded.tokenizer, loaded.info)
