"""The config of a draft without some sub-layers. `swiftopt export` copies this file next to the weights.

vLLM imports it with --trust-remote-code. Its DeciLMForCausalLM reads the attribute
`config.block_configs[i].attention.no_op`, and no config class of vLLM or transformers has it. This file defines two
classes and does nothing else.
"""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig


class NoOpBlock(dict[str, Any]):
    """A JSON object whose keys are also attributes, so that config.json is read and written as usual."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class NoOpsConfig(LlamaConfig):  # type: ignore[no-untyped-call]
    """A Llama config with `block_configs`: for each layer `attention` and `ffn`, each with `no_op`."""

    model_type = "nemotron-nas"

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "block_configs":
            value = [NoOpBlock({half: NoOpBlock(about) for half, about in block.items()}) for block in value]
        super().__setattr__(name, value)  # type: ignore[no-untyped-call]
