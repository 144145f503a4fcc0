"""Which model this is: one value however it is filed or cast, another as soon as it computes something else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from families import tiny_model, variants
from safetensors.torch import load_file, save_file
from tiny_files import edit_config, save
from transformers import AutoModelForCausalLM

from swiftopt.models.fingerprint import fingerprint


@pytest.mark.parametrize("family", variants())
def test_fingerprint_of_a_bfloat16_model_does_not_depend_on_its_cast(family: str, tmp_path: Path) -> None:
    saved = tiny_model(family, torch.bfloat16)
    saved.save_pretrained(tmp_path)
    loads = [AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    assert {fingerprint(tmp_path), *(fingerprint(model) for model in (saved, *loads))} == {fingerprint(str(tmp_path))}
    assert re.fullmatch(r"v1:[0-9a-f]{16}", fingerprint(tmp_path))


def test_fingerprint_does_not_depend_on_the_files_of_weights(tmp_path: Path) -> None:
    model = tiny_model("llama", torch.float32)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="30KB")
    edit_config(save(tmp_path / "bin"), dtype="bfloat16", transformers_version="4.0", use_cache=False)
    torch.save(load_file(tmp_path / "bin" / "model.safetensors"), tmp_path / "bin" / "pytorch_model.bin")
    (tmp_path / "bin" / "model.safetensors").unlink()
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert len({fingerprint(tmp_path / name) for name in ("one", "sharded", "bin")}) == 1


def test_fingerprint_counts_tied_weights_once(tmp_path: Path) -> None:
    folder = save(tmp_path, "gpt2")
    before = fingerprint(folder)
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = weights["transformer.wte.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(folder) == before


def test_fingerprint_changes_with_weights_and_config(tmp_path: Path) -> None:
    seen = {fingerprint(save(tmp_path / "a")), fingerprint(tiny_model("llama", torch.float32, seed=1))}
    edit_config(tmp_path / "a", rms_norm_eps=0.5)
    seen.add(fingerprint(tmp_path / "a"))
    edit_config(tmp_path / "a", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
    seen.add(fingerprint(tmp_path / "a"))
    model = tiny_model("llama", torch.float32)
    model.model.layers[2].mlp.up_proj.weight.mul_(1.01)
    seen.add(fingerprint(model))
    assert len(seen) == 5
