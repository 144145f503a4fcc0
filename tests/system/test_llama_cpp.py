"""GGUF files of models with states, latents or shared keys: llama.cpp's greedy tokens, if `bench peers` has it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from converted import write_gguf
from families import tiny_model
from gguf_models import FILES, IDS, THIRDS, YARN

from swiftopt.engines.packages import PACKAGES, PROGRAM
from swiftopt.models.loading import load
from swiftopt.models.rows import Rows
from swiftopt.models.runtime import Runtime

pytestmark = pytest.mark.slow

N_NEW = 8
PROMPTS = [IDS[:length] for length in range(5, 40, 3)]
# llama.cpp takes keys and values of one width, and a state space twice as wide as the model.
_STATES: dict[str, Any] = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "layer_types": THIRDS}
SIZES: dict[str, dict[str, Any]] = {name: _STATES for name in ("qwen35", "qwen35moe", "qwen3next")}
SIZES |= {name: {"mamba_expand": 2, "mamba_d_head": 16} for name in FILES if name.startswith("granitehybrid")}
SIZES["llama4"] = {"num_experts_per_tok": 1}  # As real ones take.
SIZES["jamba"] = {"mamba_expand": 2, "mamba_d_state": 16}
SIZES["mamba"] = {"expand": 2, "intermediate_size": 64, "state_size": 16}
# llama.cpp knows models without a latent of queries by their number of layers, and takes groups by two experts each.
SIZES["deepseek2, softmax"] = {
    **{"q_lora_rank": 20, "n_group": 1, "topk_group": 1},
    "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
}
SIZES |= {name: {"mamba_head_dim": 16} for name in FILES if name.startswith("nemotron_h")}
# llama.cpp rounds gelu and keys to 16 bits, and scores have no factor below 1: models without near ties.
SIZES |= {"gemma4, 31b": {"scale": 1.0}, "gemma4, 26b": {"scale": 1.0, "seed": 2}}
SIZES["mamba2"] = {"expand": 2, "head_dim": 16}


def theirs(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    monkeypatch.delenv("SWIFTOPT_CACHE_DIR", raising=False)
    python = PACKAGES["llama-cpp"].folder / "bin" / "python"
    if not python.is_file():
        pytest.skip("llama.cpp is not installed: `swiftopt bench peers` does it")
    options = {"model": str(path), "n_ctx": 256, "threads": 1, "device": "cpu"}
    command = [str(python), "-P", str(PROGRAM), "llama-cpp", json.dumps(options)]
    asked = "\n".join(json.dumps({"prompt_ids": ids, "max_new_tokens": N_NEW}) for ids in PROMPTS)
    done = subprocess.run(command, input=f"{asked}\n", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr[:2000]
    return [json.loads(line)["token_ids"] for line in done.stdout.splitlines()[1:]]


def greedy(runtime: Runtime, ids: list[int]) -> list[int]:
    buffer, tokens = runtime.new_buffer(64), list[int]()
    while len(tokens) < N_NEW:
        slot = len(ids) + len(tokens) - 1 if tokens else 0
        buffer.commit(slot)
        logits = runtime.forward(Rows(tokens[-1:] or ids, slot, is_text=not tokens), buffer)[-1].clone()
        logits[runtime.config.eos_token_id] = -torch.inf  # Both decode on behind the end of a text.
        tokens.append(int(logits.argmax()))
    return tokens


@pytest.mark.parametrize(
    "what",
    [
        *("qwen35", "qwen35moe", "qwen3next", "lfm2", "lfm2moe", "granitehybrid", "granitehybrid, with experts"),
        *("nemotron_h", "nemotron_h, with an MLP"),
        *("jamba", "falcon-h1", "falcon-h1, with a norm", "mamba", "mamba2", "llama4"),
        *("deepseek2", "deepseek2, of GLM", "deepseek2, softmax"),
        *("gemma4", "gemma4, 31b", "gemma4, 26b"),
    ],
)
def test_greedy_tokens_are_those_of_llama_cpp(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, changed = FILES[what]
    path = write_gguf(tmp_path / "a.gguf", tiny_model(family, torch.float32, **{**changed, **SIZES.get(what, {})}))
    runtime, expected = load(str(path), "float32", "cpu", speed="eager"), theirs(path, monkeypatch)
    assert [greedy(runtime, ids) for ids in PROMPTS] == expected
    assert len({token for tokens in expected for token in tokens}) > 6, "it should not always say the same"
