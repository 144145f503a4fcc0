"""Quantised checkpoints of mixtures: the weights of the experts' codes, and equal tokens with drafts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from converted import write_gguf
from families import tiny_model
from native import library
from packed_files import IDS, Packing, check_drafts, logits_of, packed_map
from safetensors.torch import load_file, save_file
from tiny_files import edit_config, save_words
from torch import Tensor
from transformers import AutoModelForCausalLM

from swiftopt.core.errors import ModelNotFound
from swiftopt.models.block_experts import HALVES, BlockExperts, stacked
from swiftopt.models.loading import load
from swiftopt.models.memory import memory_plan
from swiftopt.models.rows import Rows

OF_EXPERT = re.compile(r"\.experts\.\d+\.\w+\.weight$")
OF_MAP = re.compile(r"(_proj|_with_mqa|shared_\w+\.\w+)\.weight$")
WIDE = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
WIDE |= {"intermediate_size_mlp": 64, "q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16}
FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")  # As Llama 4 has the maps of all experts of a layer.
# As GGUF files have Qwen3 MoE: blocks of 32 inputs, and experts in all layers.
WHOLE_BLOCKS: dict[str, Any] = {"moe_intermediate_size": 32, "intermediate_size": 64, "mlp_only_layers": []}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def tiny(family: str) -> Any:
    known = tiny_model(family, torch.float32).config.to_dict()
    return tiny_model(family, torch.float32, **{name: size for name, size in WIDE.items() if name in known})


def apart(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the experts' maps (out, in) one by one, as quantisation tools write them."""
    one_by_one = dict[str, Tensor]()
    for name, value in stored.items():
        match = FUSED.fullmatch(name)
        halves = [] if match is None else value.transpose(1, 2).chunk(2 if match[2] == "gate_up_proj" else 1, dim=1)
        leaves = ("gate_proj", "up_proj") if len(halves) == 2 else ("down_proj",)
        for leaf, half in zip(leaves, halves, strict=False):
            assert match is not None
            one_by_one |= {f"{match[1]}.{expert}.{leaf}.weight": one.contiguous() for expert, one in enumerate(half)}
        if match is None:
            one_by_one[name] = value
    return one_by_one


def together(one_by_one: dict[str, Tensor], stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of `stored` with joined maps."""
    fused = {name: value for name, value in one_by_one.items() if name in stored}
    for name in stored:
        if (match := FUSED.fullmatch(name)) is not None:
            leaves = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
            experts = range(len(stored[name]))
            maps = (torch.cat([one_by_one[f"{match[1]}.{e}.{leaf}.weight"] for leaf in leaves]).t() for e in experts)
            fused[name] = torch.stack(list(maps))
    return fused


def quantised_folder(folder: Path, family: str, packing: Packing) -> Path:
    """Write a tiny mixture with maps quantised one by one, and a folder with the de-quantised weights."""
    save_words(folder)
    tiny(family).save_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    whole = apart(saved)
    stored, meant, rng = dict[str, Tensor](), dict[str, Tensor](), np.random.default_rng(4)
    for name, value in whole.items():
        if OF_EXPERT.search(name) or OF_MAP.search(name):
            tensors, meant[name] = packed_map(value.numpy(), packing, rng)
            stored |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in tensors.items()}
        else:
            stored[name] = value.half()
            meant[name] = stored[name].float()
    assert sum(bool(OF_EXPERT.search(name)) for name in whole) >= 3 * 3 * 6
    return _written(folder, stored, together(meant, saved), packing.config)


def _written(folder: Path, stored: dict[str, Tensor], meant: dict[str, Tensor], scheme: dict[str, Any]) -> Path:
    right = folder / "meant"
    right.mkdir()
    (right / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(meant, right / "model.safetensors", {"format": "pt"})
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, quantization_config=scheme, dtype="float16")
    return right


def mxfp4_folder(folder: Path) -> Path:
    """Write a model like gpt-oss: codes of 32 inputs, two in a byte, and the exponents of their scales."""
    save_words(folder)
    tiny("gpt_oss").save_pretrained(folder)
    stored = {name: value.bfloat16() for name, value in load_file(folder / "model.safetensors").items()}
    meant, generator = {name: value.float() for name, value in stored.items()}, torch.Generator().manual_seed(3)
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        n_experts, n_in, n_out = stored.pop(name).shape
        blocks = torch.randint(0, 256, (n_experts, n_out, n_in // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 124, blocks.shape[:-1], dtype=torch.uint8, generator=generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
        weights = table[codes.long()] * 2.0 ** (scales.float()[..., None] - 127)
        meant[name] = weights.flatten(-2).transpose(1, 2).contiguous()
    return _written(folder, stored, meant, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def check(folder: Path, right: Path, keeps: bool = True) -> None:
    """Check logits against de-quantised weights, that the native kernels keep the codes, and the reported memory."""
    model = AutoModelForCausalLM.from_pretrained(right, dtype=torch.float32).eval().requires_grad_(False)
    expected = model(torch.tensor([IDS])).logits[0]
    eager = logits_of(load(str(folder), "float32", "cpu", speed="eager"))
    torch.testing.assert_close(eager, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    library()
    for dtype in ("float32", "bfloat16"):
        runtime = load(str(folder), dtype, "cpu", speed="exact")
        experts = {name: one for name, one in runtime.hf_model.named_modules() if isinstance(one, BlockExperts)}
        named = runtime.family.experts
        assert named is not None
        assert len(experts) == (sum(block.experts is not None for block in runtime.blocks) if keeps else 0)
        for name, one in experts.items() if dtype == "float32" else ():
            numbers = {part: torch.stack([own.numbers() for own in maps]) for part, maps in one.maps.items()}
            for leaf in HALVES:
                assert torch.equal(stacked(numbers, leaf, named), getattr(model.get_submodule(name), leaf))
        together = logits_of(runtime)
        errors = (together.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
        # Rounding makes some rows take another expert, which later rows read.
        assert float(errors.quantile(0.1)) < (0.05 if dtype == "float32" else 0.15)
        buffer = runtime.new_buffer(16)
        alone = torch.cat([runtime.forward(Rows([token], at), buffer) for at, token in enumerate(IDS)])
        assert torch.equal(alone, together)
        check_drafts(runtime)
    plans = [memory_plan(folder, "bfloat16", True, speed).weights for speed in ("exact", "eager")]
    assert plans[0] < 0.7 * plans[1] if keeps else plans[0] <= plans[1]
    assert memory_plan(folder, "bfloat16", False, "exact").weights == plans[0 if keeps else 1]
    assert memory_plan(folder, "bfloat16", False, "graphs").weights == plans[1]


def further(*row: Any) -> Any:
    return pytest.param(*row, marks=pytest.mark.families)


@pytest.mark.parametrize(
    ("family", "packing", "keeps"),
    [
        ("qwen3_moe", Packing("gptq", 4, 32), True),
        ("mixtral", Packing("awq", 4, 32, symmetric=False), True),
        further("glm4_moe", Packing("pack-quantized", 4, 32, scale_dtype=torch.bfloat16), True),
        further("phimoe", Packing("int-quantized", 8, -1, scale_dtype=torch.float32), True),
        ("qwen2_moe", Packing("fp8", 8, 32, rows=32, scale_dtype=torch.float32), False),
        further("deepseek_v3", Packing("awq", 4, 32, symmetric=False), True),
        further("glm4_moe_lite", Packing("fp8", 8, 32, rows=32, scale_dtype=torch.float32), False),
        further("ernie4_5_moe", Packing("gptq", 8, 32), True),
        further("llama4_text", Packing("pack-quantized", 4, 32, scale_dtype=torch.bfloat16), True),
        further("hy_v3", Packing("awq", 4, 32, symmetric=False), True),
        further("exaone_moe", Packing("gptq_v2", 4, 32), True),
        further("minimax_m2", Packing("fp8", 8, 32, rows=32, scale_dtype=torch.float32), False),
    ],
)
def test_experts_of_a_checkpoint_are_what_its_format_defines(
    family: str, packing: Packing, keeps: bool, tmp_path: Path
) -> None:
    check(tmp_path, quantised_folder(tmp_path, family, packing), keeps)


def test_experts_in_mxfp4_keep_their_codes(tmp_path: Path) -> None:
    check(tmp_path, mxfp4_folder(tmp_path))


@pytest.mark.parametrize("stored", ["mxfp4", "gptq", "gguf"])
def test_a_mixture_says_which_share_of_its_bytes_was_read(
    stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are most of the bytes, so the share grows while they are read, and reaches 100 %."""
    monkeypatch.setattr("swiftopt.models.saved.REPORT_S", -1.0)
    library()
    path = tmp_path
    if stored == "mxfp4":
        mxfp4_folder(tmp_path)
    elif stored == "gptq":
        quantised_folder(tmp_path, "qwen3_moe", Packing("gptq", 4, 32))
    else:
        path = write_gguf(tmp_path / "tiny.gguf", tiny_model("qwen3_moe", torch.float32, **WHOLE_BLOCKS), "Q8_0")
    steps: list[str] = []
    load(str(path), "bfloat16", "cpu", steps.append)
    shares = [int(step.rpartition(", ")[2].split(" %")[0]) for step in steps if step.endswith("% of the weights")]
    assert shares == sorted(shares) and len(set(shares)) > 5 and shares[0] < 40 and 95 <= shares[-1] <= 100


def test_experts_of_other_shapes_are_one_sentence(tmp_path: Path) -> None:
    mxfp4_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.2.mlp.experts.down_proj_blocks"
    tensors[name] = tensors[name][:, :, :1].contiguous()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelNotFound, match=r"layers\.2\.mlp\.experts in .* is not what its config\.json says \(mxfp4"):
        load(str(tmp_path), "bfloat16", "cpu")
