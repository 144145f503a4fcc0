"""Laws of adapters: the logits and the fingerprint of a merged model, and the errors of unsupported adapters."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from converted import write_gguf
from families import CONFIGS, DENSE, is_mixture, tiny_model, variants
from native import library
from packed_files import PACKINGS, check_drafts, packed_folder
from safetensors.torch import load_file, save_file
from tiny_files import edit_config, save, save_adapter
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from swiftopt.core.errors import ModelNotFound, SwiftoptError, UnsupportedModel
from swiftopt.core.records import Plan
from swiftopt.models import loading
from swiftopt.models.adapters import read_adapter
from swiftopt.models.families import FAMILIES
from swiftopt.models.fingerprint import fingerprint
from swiftopt.models.runtime import Runtime
from swiftopt.models.sources import model_folder, resolve
from swiftopt.store import Store

IDS = torch.tensor([[1, 5, 9, 2, 7, 33]])
ENDS = {"gpt2": ("attn.c_attn", "mlp.c_proj")}
EXACT = ("llama", "mistral-window", "qwen2", "qwen3", "phi3", "gpt2", "gpt_neox")
LLAMA = ("q_proj", "v_proj", "down_proj")


def load(folder: Path | str, dtype: str = "auto", speed: Any = "eager") -> Runtime:
    return loading.load(str(folder), dtype, "cpu", speed=speed)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        values: Tensor = model(IDS).logits
    return values


def by_hand(model: Any, adapter: Path, scale: Callable[[str], float]) -> Any:
    """Merge W + scale(name) · B A into the model, in float64 and from the adapter's file."""
    model = model.double()
    tensors = {name.removeprefix("base_model.model."): value.double() for name, value in read(adapter).items()}
    for name, module in model.named_modules():
        if f"{name}.lora_A.weight" not in tensors:
            continue
        change = scale(name) * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
        module.weight.data += change if isinstance(module, nn.Linear) else change.T
    return model


def read(adapter: Path) -> dict[str, Tensor]:
    return load_file(adapter / "adapter_model.safetensors")


def write(adapter: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, adapter / "adapter_model.safetensors")


def edit(adapter: Path, **changes: Any) -> None:
    values = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**values, **changes}))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save(tmp_path / "base", dtype=torch.float64)


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return save_adapter(tmp_path / "adapter", "../base", tiny_model("llama"), *LLAMA)


# --- what is computed


# Torch multiplies stacked experts in no float64, which the sum is computed in.
@pytest.mark.parametrize("family", variants((*CONFIGS, *(name for name in DENSE if not is_mixture(name)))))
def test_logits_equal_those_of_the_sum_computed_by_hand(family: str, tmp_path: Path) -> None:
    """All linear maps except the head are adapted; some families compute norms or attention in float32."""
    model = tiny_model(family)
    save(tmp_path / "base", family, torch.float64)
    maps = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    maps.remove(FAMILIES[model.config.model_type].head)
    folder = save_adapter(tmp_path / "adapter", "../base", model, *maps)
    plain, right = logits(model), logits(by_hand(tiny_model(family), folder, lambda name: 8 / 4))
    torch.testing.assert_close(logits(load(folder).hf_model), right, rtol=0, atol=1e-11 if family in EXACT else 1e-5)
    assert not torch.allclose(right, plain, atol=0.01)


PATTERNS: dict[str, tuple[dict[str, Any], Callable[[str], float]]] = {
    "rank-stabilised": ({"use_rslora": True}, lambda name: 8 / math.sqrt(4)),
    "ranks by module": ({"rank_pattern": {"v_proj": 2}}, lambda name: 8 / (2 if name.endswith("v_proj") else 4)),
    "alphas by module": (
        {"alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 3}},
        lambda name: (3 if name == "model.layers.1.self_attn.q_proj" else 8) / 4,
    ),
    "targets by expression": ({"target_modules": r".*\.(q_proj|v_proj|down_proj)"}, lambda name: 8 / 4),
}


@pytest.mark.parametrize("kind", PATTERNS)
def test_factors_are_those_of_the_config(kind: str, base: Path, tmp_path: Path) -> None:
    config, scale = PATTERNS[kind]
    folder = save_adapter(tmp_path / "adapter", base, tiny_model("llama"), *LLAMA, **config)
    right = logits(by_hand(tiny_model("llama"), folder, scale))
    torch.testing.assert_close(logits(load(folder).hf_model), right, rtol=0, atol=1e-11)


def test_adapter_may_change_only_some_layers(base: Path, tmp_path: Path) -> None:
    ends = "model.layers.1.mlp.up_proj", "model.layers.3.mlp.up_proj"
    config = {"target_modules": ["up_proj"], "layers_to_transform": [1, 3]}
    folder = save_adapter(tmp_path / "adapter", base, tiny_model("llama"), *ends, **config)
    right = logits(by_hand(tiny_model("llama"), folder, lambda name: 2.0))
    torch.testing.assert_close(logits(load(folder).hf_model), right, rtol=0, atol=1e-11)
    edit(folder, layers_to_transform=[1, 2, 3])
    with pytest.raises(ModelNotFound, match=r"lacks lora_A of model\.layers\.2\.mlp\.up_proj"):
        load(folder)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_dora_scales_each_output_by_its_norm(family: str, tmp_path: Path) -> None:
    save(tmp_path / "base", family, torch.float64)
    ends = ENDS.get(family, LLAMA)
    folder = save_adapter(tmp_path / "adapter", "../base", tiny_model(family), *ends, use_dora=True)
    model, tensors = by_hand(tiny_model(family), folder, lambda name: 2.0), read(folder)
    for name, module in model.named_modules():
        magnitude = tensors.get(f"base_model.model.{name}.lora_magnitude_vector")
        if magnitude is not None:
            weight = module.weight.data if family == "llama" else module.weight.data.T
            weight *= (magnitude.double() / (weight**2).sum(1).sqrt())[:, None]
    torch.testing.assert_close(logits(load(folder).hf_model), logits(model), rtol=0, atol=1e-11)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_embedding_and_head_are_adapted_separately(family: str, is_tied: bool, tmp_path: Path) -> None:
    """Tied weights are untied, because peft adds to the embedding's output and not to the head."""
    model = tiny_model(family, tie_word_embeddings=is_tied)
    save(tmp_path / "base", family, torch.float64)
    model.save_pretrained(tmp_path / "base")
    before = model.lm_head.weight.clone()
    for end in ("embed_tokens", "lm_head"):
        folder = save_adapter(tmp_path / end, "../base", model, end)
        tensors = {name.rpartition("lora_")[2][-1:]: value.double() for name, value in read(folder).items()}
        if end == "lm_head":
            tensors = {name.split(".")[-2][-1]: value.double() for name, value in read(folder).items()}
        change = 2.0 * tensors["B"] @ tensors["A"]
        merged = load(folder).hf_model
        changed = merged.model.embed_tokens.weight if end == "embed_tokens" else merged.lm_head.weight
        kept = merged.lm_head.weight if end == "embed_tokens" else merged.model.embed_tokens.weight
        was = model.model.embed_tokens.weight if end == "embed_tokens" else before
        torch.testing.assert_close(changed, was + (change.T if end == "embed_tokens" else change), rtol=0, atol=1e-12)
        assert torch.equal(kept, before if end == "embed_tokens" else model.model.embed_tokens.weight)


def test_saved_modules_and_biases_replace_those_of_the_base(tmp_path: Path) -> None:
    save(tmp_path / "base", "qwen2", torch.float64)
    model = tiny_model("qwen2")
    folder = save_adapter(
        tmp_path / "adapter", "../base", model, "q_proj", bias="all", modules_to_save=["lm_head", "model.norm"]
    )
    own = {
        "lm_head.weight": torch.randn(97, 32),
        "model.norm.modules_to_save.weight": torch.randn(32),
        "model.layers.2.self_attn.q_proj.base_layer.bias": torch.randn(32),
    }
    write(folder, read(folder) | {f"base_model.model.{name}": value for name, value in own.items()})
    right = by_hand(model, folder, lambda name: 2.0)
    right.lm_head.weight.data, right.model.norm.weight.data = (value.double() for value in list(own.values())[:2])
    right.model.layers[2].self_attn.q_proj.bias.data = own["model.layers.2.self_attn.q_proj.base_layer.bias"].double()
    torch.testing.assert_close(logits(load(folder).hf_model), logits(right), rtol=0, atol=1e-11)


def test_sum_is_rounded_once_to_the_checkpoints_dtype(tmp_path: Path) -> None:
    save(tmp_path / "base", dtype=torch.bfloat16)
    folder = save_adapter(tmp_path / "adapter", "../base", tiny_model("llama"), *LLAMA)
    exact = by_hand(tiny_model("llama", torch.bfloat16), folder, lambda name: 2.0).state_dict()
    weights = load(folder).hf_model.state_dict()
    for name, value in weights.items():
        right = exact[name].to(torch.bfloat16)
        # float32's own rounding may decide a near tie in another way.
        assert (value != right).float().mean() < 1e-3
        torch.testing.assert_close(value, right, rtol=2**-7, atol=0)
    wide = load(folder, "float32")
    assert wide.dtype_name == "float32"
    assert all(torch.equal(value, weights[name].float()) for name, value in wide.hf_model.state_dict().items())


def test_a_narrower_dtype_rounds_the_merged_weights(adapter: Path) -> None:
    whole = load(adapter).hf_model.state_dict()
    narrow = load(adapter, "bfloat16")
    assert narrow.dtype_name == "bfloat16"
    assert all(torch.equal(value, whole[name].bfloat16()) for name, value in narrow.hf_model.state_dict().items())


def test_drafts_of_a_merged_model_change_no_token(tmp_path: Path) -> None:
    library()
    save(tmp_path / "base")
    folder = save_adapter(tmp_path / "adapter", "../base", tiny_model("llama"), *LLAMA)
    runtime = load(folder, speed="exact")
    assert runtime.speed == "native"
    check_drafts(runtime)


def test_pickled_adapter_gives_the_same_model(adapter: Path) -> None:
    first = load(adapter)
    torch.save(read(adapter), adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    second = load(adapter)
    assert second.info == first.info and torch.equal(logits(second.hf_model), logits(first.hf_model))


# --- where its parts are


def test_adapter_beside_a_model_is_merged_into_it(base: Path, tmp_path: Path) -> None:
    """transformers does the same if peft is installed, whatever base the config names."""
    folder = save_adapter(tmp_path / "adapter", "theirs/elsewhere", tiny_model("llama"), *LLAMA)
    right = logits(by_hand(tiny_model("llama"), folder, lambda name: 2.0))
    for path in folder.iterdir():
        path.rename(base / path.name)
    torch.testing.assert_close(logits(load(base).hf_model), right, rtol=0, atol=1e-11)


def test_relative_base_is_resolved_from_the_adapters_folder(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere" / "base")
    source = resolve("../../adapter")
    assert source.base is not None and source.base.location == str(tmp_path / "base")
    edit(adapter, base_model_name_or_path="ours/tiny")
    hub = resolve(str(adapter)).base
    assert hub is not None and (hub.kind, hub.location) == ("hub", "ours/tiny")


def test_tokenizer_is_the_adapters_or_the_bases(adapter: Path, base: Path, tmp_path: Path) -> None:
    assert load(adapter).tokenizer("w3 w4")["input_ids"] == [3, 4]
    for path in save(tmp_path / "other", chat_template="{{ messages[0].content }}").glob("*"):
        if "token" in path.name or path.suffix == ".jinja":
            path.rename(adapter / path.name)
    assert load(adapter).tokenizer.chat_template == "{{ messages[0].content }}"
    tokenizer = json.loads((adapter / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["w97"] = 97
    (adapter / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelNotFound, match=r"has the token 97, and the base \.\./base has tokens up to 96"):
        load(adapter)


def test_other_programs_get_a_folder_with_the_merged_weights(adapter: Path, new_cache: Path) -> None:
    folder = model_folder(adapter)
    assert folder.is_relative_to(new_cache)
    merged, runtime = load(folder), load(adapter)
    assert torch.equal(logits(merged.hf_model), logits(runtime.hf_model))
    assert merged.info.fingerprint == runtime.info.fingerprint == fingerprint(folder)
    assert merged.tokenizer("w3")["input_ids"] == [3]
    write(adapter, {name: value + 1 for name, value in read(adapter).items()})
    assert model_folder(adapter) != folder


def test_merged_folder_with_its_own_head_is_not_tied(tmp_path: Path, new_cache: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    save(tmp_path / "base", dtype=torch.float64)
    model.save_pretrained(tmp_path / "base")
    folder = save_adapter(tmp_path / "adapter", "../base", model, "embed_tokens")
    merged = load(model_folder(folder)).hf_model
    assert torch.equal(merged.lm_head.weight, model.lm_head.weight)
    assert torch.equal(merged.model.embed_tokens.weight, load(folder).hf_model.model.embed_tokens.weight)


# --- which model it is


def test_adapter_has_its_own_fingerprint_in_any_folder(adapter: Path, base: Path, tmp_path: Path) -> None:
    other = save_adapter(tmp_path / "other", "../base", tiny_model("llama"), *LLAMA, seed=1)
    louder = save_adapter(tmp_path / "louder", "../base", tiny_model("llama"), *LLAMA, lora_alpha=16)
    infos = [load(folder).info for folder in (base, adapter, other, louder)]
    assert len({info.fingerprint for info in infos}) == 4
    edit(adapter, base_model_name_or_path=str(base), lora_dropout=0.0)
    moved = load(adapter.rename(tmp_path / "moved")).info
    assert moved.fingerprint == infos[1].fingerprint and moved.names == (str(tmp_path / "moved"),)


def test_two_adapters_of_one_base_share_no_plan(adapter: Path, base: Path, tmp_path: Path) -> None:
    other = save_adapter(tmp_path / "other", "../base", tiny_model("llama"), *LLAMA, seed=1)
    plan = Plan("spd", settings={"draft_length": 5}, verdict="use", device="here", dtype="float64")
    with Store.open(str(tmp_path / "plans.db")) as store:
        infos = [load(folder).info for folder in (adapter, other, base)]
        for info in infos:
            store.remember_model(info)
        found = store.add_plan(infos[0].fingerprint, "code", plan)
        assert store.lookup(str(adapter), "code") == found
        for info in infos[1:]:
            with pytest.raises(SwiftoptError, match="tune"):
                store.lookup(info.fingerprint, "code")


# --- what is refused


def _without(*ends: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        write(folder, {name: value for name, value in read(folder).items() if not name.endswith(ends)})

    return damage


def _with(**more: Tensor) -> Callable[[Path], None]:
    """Add tensors by name, in which __ stands for a dot."""
    named = {f"base_model.model.{name.replace('__', '.')}": value for name, value in more.items()}
    return lambda folder: write(folder, read(folder) | named)


def _edited(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder, **changes)


def _nan(folder: Path) -> None:
    tensors = read(folder)
    next(iter(tensors.values()))[0, 0] = math.nan
    write(folder, tensors)


def _truncate(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def _quantise(folder: Path) -> None:
    base = folder.parent / "base"
    for path in base.iterdir():
        path.unlink()
    packed_folder(base, "llama", PACKINGS[0])


def _file_base(folder: Path) -> None:
    write_gguf(folder.parent / "tiny.gguf", tiny_model("llama", torch.float32))
    edit(folder, base_model_name_or_path="../tiny.gguf")


def _adapt_an_adapter(folder: Path) -> None:
    save_adapter(folder.parent / "first", "../base", tiny_model("llama"), *LLAMA)
    edit(folder, base_model_name_or_path="../first")


def _other_architecture(folder: Path) -> None:
    for path in (folder.parent / "base").iterdir():
        path.unlink()
    save(folder.parent / "base", "gpt2")


Q = "model__layers__0__self_attn__q_proj"
REFUSED: dict[str, tuple[Callable[[Path], object], type[SwiftoptError], str]] = {
    "another method": (_edited(peft_type="IA3"), UnsupportedModel, "peft_type 'IA3', and only LORA can be merged"),
    "no method": (_edited(peft_type=None), UnsupportedModel, "has the peft_type None"),
    "repeated layers": (_edited(layer_replication=[[0, 4]]), UnsupportedModel, "layer_replication.*repeats layers"),
    "trained tokens": (_edited(trainable_token_indices=[1]), UnsupportedModel, "trainable_token_indices"),
    "a changed base": (_edited(init_lora_weights="pissa"), UnsupportedModel, "init_lora_weights 'pissa'.*save the"),
    "a revision": (_edited(revision="v2"), UnsupportedModel, "the revision 'v2' of its base"),
    "an unknown field": (_edited(use_magic=True), UnsupportedModel, "the field use_magic, which is not known here"),
    "no rank": (_edited(r="4"), ModelNotFound, "has r '4' .*it must be a whole number from 1 up"),
    "no expression": (_edited(target_modules="("), ModelNotFound, r"has target_modules '\('"),
    "no base": (_edited(base_model_name_or_path=None), ModelNotFound, "has the base_model_name_or_path None: write"),
    "a missing base": (
        _edited(base_model_name_or_path="../gone"),
        ModelNotFound,
        r"names the base \.\./gone, but there is no folder \.\./gone",
    ),
    "itself": (_edited(base_model_name_or_path="."), UnsupportedModel, "names itself as its base"),
    "an adapter of an adapter": (_adapt_an_adapter, UnsupportedModel, "names the adapter .*first as its base"),
    "a quantised base": (_quantise, UnsupportedModel, r"the base \.\./base of .* is quantised .*write the unquantised"),
    "a GGUF file": (_file_base, UnsupportedModel, r"the base \.\./tiny\.gguf of .* is quantised \(GGUF\)"),
    "another architecture": (_other_architecture, ModelNotFound, "is for no linear map of its base"),
    "another shape": (
        lambda folder: edit_config(folder.parent / "base", intermediate_size=40) and _resave(folder.parent / "base"),
        ModelNotFound,
        r"down_proj\.lora_A\.weight in .* has the shape \[4, 48\], but .* needs \[4, 40\]",
    ),
    "another rank": (_edited(r=5), ModelNotFound, r"has the shape \[4, 48\], but .* needs \[5, 48\]"),
    "no A": (_without("layers.2.mlp.down_proj.lora_A.weight"), ModelNotFound, r"lacks lora_A of model\.layers\.2\.mlp"),
    "no B": (_without("layers.2.mlp.down_proj.lora_B.weight"), ModelNotFound, r"lacks lora_B of model\.layers\.2\.mlp"),
    "a missing module": (
        _without("0.mlp.down_proj.lora_A.weight", "0.mlp.down_proj.lora_B.weight"),
        ModelNotFound,
        "lacks lora_A",
    ),
    "a stray module": (
        _with(model__layers__9__mlp__up_proj__lora_A__weight=torch.ones(4, 32)),
        ModelNotFound,
        r"layers\.9\.mlp\.up_proj\.lora_A\.weight in .* is for no linear map",
    ),
    "a module that is not named": (
        _with(model__layers__0__mlp__up_proj__lora_A__weight=torch.ones(4, 32)),
        ModelNotFound,
        r"up_proj\.lora_A\.weight in .* is not named by its adapter_config\.json",
    ),
    "a norm that is not named": (
        _with(model__norm__weight=torch.ones(32)),
        ModelNotFound,
        r"norm\.weight in .* is not named by its adapter_config\.json",
    ),
    "a stray tensor": (_with(score__weight=torch.ones(2, 32)), ModelNotFound, "score.weight in .* is no part of its"),
    "a part of LoRA that is not known": (
        _with(**{f"{Q}__lora_C__weight": torch.ones(4)}),
        ModelNotFound,
        "lora_C.weight in .* is no part of its base",
    ),
    "DoRA that its config denies": (
        _with(**{f"{Q}__lora_magnitude_vector": torch.ones(32)}),
        ModelNotFound,
        "lora_magnitude_vector in .* is of DoRA, unlike its",
    ),
    "DoRA without magnitudes": (_edited(use_dora=True), ModelNotFound, "lacks lora_magnitude_vector of"),
    "a saved module that is not there": (
        _edited(modules_to_save=["lm_head"]),
        ModelNotFound,
        "lacks the weights of lm",
    ),
    "a head of more words": (
        _with(lm_head__weight=torch.ones(99, 32)),
        ModelNotFound,
        r"lm_head\.weight in .* has the shape \[99, 32\], but .* needs \[97, 32\]",
    ),
    "no numbers": (_nan, ModelNotFound, "holds numbers that are not finite"),
    "whole numbers": (_with(lm_head__weight=torch.ones(97, 32).int()), ModelNotFound, "holds torch.int32"),
    "a cut file": (_truncate, ModelNotFound, "the adapter's tensors .* cannot be read .*: copy them again"),
    "no file": (
        lambda folder: (folder / "adapter_model.safetensors").unlink(),
        ModelNotFound,
        r"lacks its adapter's tensors \(adapter_model\.safetensors or",
    ),
    "a config that is no JSON": (
        lambda folder: (folder / "adapter_config.json").write_text("{"),
        ModelNotFound,
        "is no adapter's config",
    ),
    "a reward model's head": (
        lambda folder: (folder / "value_head.safetensors").write_text(""),
        UnsupportedModel,
        "head of a reward model",
    ),
    "no tokenizer": (
        lambda folder: [path.unlink() for path in (folder.parent / "base").glob("tokenizer*")],
        ModelNotFound,
        "base has no tokenizer",
    ),
}


def _resave(base: Path) -> None:
    tiny_model("llama", intermediate_size=40).save_pretrained(base)


@pytest.mark.parametrize("kind", REFUSED)
def test_adapter_that_cannot_be_merged_exactly_is_refused_in_one_sentence(kind: str, adapter: Path) -> None:
    damage, error, words = REFUSED[kind]
    damage(adapter)
    with pytest.raises(error, match=words) as refused:
        load(adapter)
    assert "\n" not in str(refused.value)


def test_half_precision_that_overflows_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "base", dtype=torch.float16)
    folder = save_adapter(tmp_path / "adapter", "../base", tiny_model("llama"), *LLAMA, lora_alpha=1e6)
    with pytest.raises(ModelNotFound, match=r"has numbers too large for torch\.float16: use a base in bfloat16"):
        load(folder)


def test_all_linear_excludes_the_head(base: Path, tmp_path: Path) -> None:
    ends = ("_proj",)
    folder = save_adapter(tmp_path / "adapter", base, tiny_model("llama"), *ends, target_modules="all-linear")
    right = logits(by_hand(tiny_model("llama"), folder, lambda name: 2.0))
    torch.testing.assert_close(logits(load(folder).hf_model), right, rtol=0, atol=1e-11)


def test_layers_pattern_selects_the_numbers_of_layers(base: Path, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "adapter", base, tiny_model("llama"), "q_proj")
    edit(folder, layers_to_transform=2, layers_pattern="layers", exclude_modules=["k_proj"])
    read_config = read_adapter(folder, "base")
    assert read_config.targets("model.layers.2.self_attn.q_proj")
    assert not read_config.targets("model.layers.1.self_attn.q_proj")
    edit(folder, layers_pattern="blocks")
    assert not read_adapter(folder, "base").targets("model.layers.2.self_attn.q_proj")
