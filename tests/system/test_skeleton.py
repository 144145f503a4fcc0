"""Models as bare modules have transformers' names, and compute its bits, in torch's way and in our kernels'."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from converted import write_gguf
from families import tiny_model
from transformers import AutoModelForCausalLM

from swiftopt.core.records import ModelInfo
from swiftopt.models.loading import at_speed, load
from swiftopt.models.rows import Rows
from swiftopt.models.runtime import Runtime
from swiftopt.models.skeleton import BIASES, Skeleton, fits

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
_LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
_LOCAL = {"rope_type": "default", "rope_theta": 1e4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3": ("llama", {"rope_parameters": {**_LLAMA3, "original_max_position_embeddings": 64}}),
    "mistral": ("mistral-window", {"head_dim": 16}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, yarn": ("qwen2-window", {"rope_parameters": _YARN}),
    "qwen3": ("qwen3", {"attention_bias": True}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 24}),
    "gemma3, scaled": (
        "gemma3-softcap",
        {"rope_parameters": {"full_attention": _LINEAR, "sliding_attention": _LOCAL}},
    ),
}


def runtime_of(model: Any) -> Runtime:
    n_parameters = sum(each.numel() for each in model.parameters())
    info = ModelInfo("bare", model.config.model_type, model.config.num_hidden_layers, n_parameters)
    return Runtime(model.eval().requires_grad_(False), None, info)


def model_of(what: str, dtype: torch.dtype) -> Any:
    """A model as it is loaded: `to` would round the frequencies of rotary positions, too."""
    family, changed = MODELS[what]
    tiny, auto = tiny_model(family, dtype, **changed), AutoModelForCausalLM
    model = auto.from_config(tiny.config, dtype=dtype)
    model.load_state_dict(tiny.state_dict())
    return model


def bare_of(model: Any) -> Skeleton:
    assert fits(model.config)
    bare = Skeleton(model.config, model.dtype)
    found, expected = bare.state_dict(), model.state_dict()
    assert {name: each.shape for name, each in found.items()} == {name: each.shape for name, each in expected.items()}
    assert [name for name, _ in bare.named_parameters()] == [name for name, _ in model.named_parameters()]
    bare.load_state_dict({name: each.clone() for name, each in expected.items()}, assign=True)
    return bare


def logits_of(runtime: Runtime) -> torch.Tensor:
    return runtime.forward(Rows(IDS, 0), runtime.new_buffer(64))


@pytest.mark.parametrize("what", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_bare_model_computes_the_bits_of_transformers(what: str, dtype: torch.dtype) -> None:
    model = model_of(what, dtype)
    runtimes = [runtime_of(bare_of(model)), runtime_of(model)]
    assert torch.equal(*map(logits_of, runtimes))
    for runtime in runtimes:
        at_speed(runtime, "exact")
    assert torch.equal(*map(logits_of, runtimes))


def test_each_type_of_the_table_is_tested() -> None:
    assert {tiny_model(family, torch.float32).config.model_type for family, _ in MODELS.values()} == {*BIASES}


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("gpt2", {}),
        ("phi3", {}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    ],
)
def test_models_of_other_types_use_transformers_code(family: str, changed: dict[str, Any]) -> None:
    assert not fits(tiny_model(family, torch.float32, **changed).config)


def test_file_is_loaded_without_modeling_code_until_the_whole_model_is_needed(tmp_path: Path, new_cache: Path) -> None:
    model = tiny_model("qwen2", torch.float32, hidden_size=256, intermediate_size=256)
    file = write_gguf(tmp_path / "a.gguf", model, "Q8_0")
    unwanted = ("transformers.modeling_utils", "torch._dynamo", "sympy", "accelerate", "scipy", "sqlalchemy")
    options = ["generate", "--model", str(file), "--method", "plain", "--prompt", "abc", "--max-new-tokens", "2"]
    program = (
        "from swiftopt.cli.main import run\n"
        f"run({options!r})\n"
        f"import sys; print('imported:', [name for name in {unwanted!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "imported: []", done.stderr
    loaded: Any = load(str(file), device="cpu")
    bare = loaded.hf_model
    assert isinstance(bare, Skeleton)
    found = bare(torch.tensor([IDS])).logits[0]
    assert torch.equal(found.argmax(-1)[-1:], logits_of(loaded).argmax(-1)[-1:])
    assert bare.generate(torch.tensor([IDS]), max_new_tokens=3, do_sample=False, eos_token_id=None).shape == (1, 21)
    assert bare.get_output_embeddings() is bare.lm_head
