"""From a name to a runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, get_args

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..core.errors import SettingsError
from ..core.processors import n_threads
from ..core.requests import Speed
from .runtime import Runtime
from .sources import load_pretrained

if TYPE_CHECKING:
    from .graphs import GraphPasses


def load(
    name: str,
    dtype: str = "auto",
    device: str = "auto",
    on_step: Callable[[str], None] | None = None,
    speed: Speed = "auto",
) -> Runtime:
    """Load a target model by alias, hub id, local folder or GGUF file.

    Args:   dtype: "auto" (as stored), "float32", "bfloat16" or "float16".
            device: "auto", "cpu", "cuda", "cuda:N", or "auto-map" for a model that needs several devices.
            on_step: told in a few words what is being done.
            speed: see `at_speed`.
    torch and our kernels then compute with one thread per usable core, or as many as SWIFTOPT_THREADS says.

    Raises: ModelNotFound: nothing of that name can be loaded.
            UnsupportedModel: sub-layers cannot be skipped in its architecture.
            SettingsError: no such dtype, device or speed here.
    """
    torch.set_num_threads(n_threads())
    loaded = load_pretrained(name, dtype, device, on_step)
    runtime = Runtime(loaded.hf_model, loaded.tokenizer, loaded.info)
    if speed != "eager" and on_step is not None:
        on_step("preparing the kernels")
    at_speed(runtime, speed)
    return runtime


def at_speed(runtime: Runtime, speed: Speed, lay_out: bool = True) -> None:
    """Let a runtime compute the same in another way, before its first buffer is made.

    "auto": "native" where that can be, else "eager". "native": by our own kernels (`models.kernels`), for a CPU.
    "eager": torch's own operations one by one, as a runtime begins. "onednn": eager, its linear maps by oneDNN over
    weights in its own order, in place of the plain ones. "compiled": all but attention by `torch.compile`, which wants
    a C++ compiler on a CPU. "graphs": passes of up to 32 rows replayed as CUDA graphs. "compiled+graphs": both.

    Args:   lay_out: GPT-2's weights may be laid out anew, which other holders of the model see as strides.
    Raises: SettingsError: there is no such speed, or not on this machine; nothing has changed then.
    """
    if speed not in get_args(Speed):
        raise SettingsError(f"speed {speed!r} does not exist: use {', '.join(get_args(Speed))}")
    if speed in ("auto", "native"):
        reason = _by_native(runtime, lay_out)
        if reason is not None and speed == "native":
            raise SettingsError(f"our kernels cannot be used: {reason}")
        return
    graphs: GraphPasses | None = None
    if "graphs" in speed:
        from .graphs import GraphPasses

        graphs = GraphPasses(runtime)
    if speed == "onednn":
        from .kernels import onednn

        onednn.pack(runtime)
    if "compiled" in speed:
        from .compiled import compile_pieces

        compile_pieces(runtime)
    runtime.graphs, runtime.speed, runtime.native = graphs, speed, None
    runtime.copies.lay_out(packed=False)


def _by_native(runtime: Runtime, lay_out: bool) -> str | None:
    """Let our kernels compute the passes; else why they cannot."""
    if runtime.device.type != "cpu":
        return f"they are for a CPU, and the model lies on {runtime.device}"
    from .kernels.build import kernels
    from .kernels.native import NativePasses, Unsupported

    found = kernels()
    if isinstance(found, str):
        return found
    turned = outputs_first(runtime.hf_model) if lay_out else []
    try:
        runtime.native = NativePasses(runtime, found)
    except Unsupported as error:
        for module in turned:
            module.weight.data = module.weight.data.contiguous()
        return str(error)
    runtime.speed = "native"
    runtime.copies.lay_out(packed=True)
    return None


def outputs_first(model: nn.Module) -> list[Conv1D]:
    """Lay the weights of GPT-2's maps, which hold an input's weights together, out as all others: by outputs.

    Returns: the maps that were laid out anew.
    """
    turned = [module for module in model.modules() if isinstance(module, Conv1D) and module.weight.is_contiguous()]
    for module in turned:
        module.weight.data = module.weight.data.t().contiguous().t()
    return turned
