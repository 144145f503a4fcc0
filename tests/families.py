"""Random tiny models of every supported family: four layers, float64, a vocabulary of 97 words."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from swiftopt.core.records import ModelInfo
from swiftopt.models.runtime import Runtime

VOCAB = 97
WINDOW = 12  # tokens; shorter than what the tests decode, so that windows are crossed
_SIZE: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
)
_GROUPED: dict[str, Any] = {**_SIZE, "num_key_value_heads": 2}
_BY_LAYER = ["sliding_attention", "full_attention"] * 2

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_GROUPED),
    "mistral": MistralConfig(**_GROUPED, sliding_window=None),
    "mistral-window": MistralConfig(**_GROUPED, sliding_window=WINDOW),
    "qwen2": Qwen2Config(**_GROUPED),
    "qwen2-window": Qwen2Config(
        **_GROUPED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2, layer_types=_BY_LAYER
    ),
    "qwen3": Qwen3Config(**_GROUPED, head_dim=16),
    "gemma3": Gemma3TextConfig(**_GROUPED, head_dim=16, sliding_window=WINDOW, layer_types=_BY_LAYER),
    "gemma3-softcap": Gemma3TextConfig(
        **_GROUPED, head_dim=16, sliding_window=WINDOW, layer_types=_BY_LAYER, final_logit_softcapping=3.0
    ),
    "phi3": Phi3Config(**_GROUPED, sliding_window=None),
    "phi3-window": Phi3Config(**_GROUPED, sliding_window=WINDOW),
    "gpt2": GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=4,
        n_head=4,
        n_positions=256,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    ),
    "gpt_neox": GPTNeoXConfig(**_SIZE, rotary_pct=0.25),
    "gpt_neox-serial": GPTNeoXConfig(**_SIZE, rotary_pct=0.5, use_parallel_residual=False),
}
# One variant of each family, with the mechanisms of its others, for the default suite; `make families` runs the rest.
ONE_EACH = ("llama", "mistral-window", "qwen2", "qwen3", "gemma3-softcap", "phi3", "gpt2", "gpt_neox")


def variants(rows: Iterable[Any] = CONFIGS) -> list[Any]:
    """Parameters that are a family, or rows that begin with one; those beyond `ONE_EACH` are marked `families`."""
    marked = []
    for row in rows:
        family, *others = (row,) if isinstance(row, str) else row
        marked.append(pytest.param(family, *others, marks=() if family in ONE_EACH else pytest.mark.families))
    return marked


def taken_in_turns(rows: Iterable[str], columns: Iterable[str], n: int) -> list[tuple[str, tuple[str, ...]]]:
    """Each row with `n` columns, and each column with about as many rows as every other.

    For laws that hold of rows and of columns, and need not be tested with every pair. Row i has the columns i, i + 1,
    i + 3, i + 6, …, round and round.
    """
    names = list(columns)
    places = list(accumulate(range(n)))
    return [(row, tuple(names[(i + place) % len(names)] for place in places)) for i, row in enumerate(rows)]


def tiny_model(
    family: str, dtype: torch.dtype = torch.float64, seed: int = 0, scale: float = 4.0, **changed: Any
) -> Any:
    """A random model whose residual stream is large enough that skipping a sub-layer changes few argmaxes.

    Args: scale: of its weights; the larger, the more do texts differ. changed: settings of its configuration that are
          not as in `CONFIGS`; fewer layers are the first of those there.
    """
    torch.manual_seed(seed)
    settings = {**CONFIGS[family].to_dict(), **changed}
    if settings.get("layer_types") is not None:
        settings["layer_types"] = settings["layer_types"][: settings["num_hidden_layers"]]
    config = type(CONFIGS[family])(**settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name and "wte" not in name:
                parameter.mul_(scale)
    return model.to(dtype).eval().requires_grad_(False)


def tiny_runtime(family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **changed: Any) -> Runtime:
    """The runtime of a random tiny model, without a tokenizer."""
    model = tiny_model(family, dtype, seed, **changed)
    n_layers, n_parameters = model.config.num_hidden_layers, sum(p.numel() for p in model.parameters())
    return Runtime(model, None, ModelInfo(f"tiny-{family}", family, n_layers, n_parameters))
