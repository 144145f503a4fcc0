"""Plans for other engines: restacked layers give the layer set's logits, and the files are complete and run."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from families import CONFIGS, tiny_model, variants
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny_files import edit_config, save
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from swiftopt.cli.main import main, run
from swiftopt.core.costs import CostProfile
from swiftopt.core.errors import InvalidInput, LayerSetError, OutputError, SwiftoptError, UnsupportedModel
from swiftopt.core.layer_sets import LayerSet, searchable
from swiftopt.core.records import FoundPlan, LayerSetRecord, ModelInfo, Plan
from swiftopt.core.settings import ENGINES as ENGINE_WORDS
from swiftopt.core.settings import SwiftSettings
from swiftopt.core.types import Prompt, Sampling, Trial
from swiftopt.decoding.methods import Resources, build
from swiftopt.decoding.methods.chains import SpdSettings
from swiftopt.decoding.session import Session
from swiftopt.engines.drafts import alternating_sets, lengths_by_load, measured_acceptance
from swiftopt.engines.export import ENGINES, export
from swiftopt.models import restacked
from swiftopt.models.coded import rounded
from swiftopt.models.configuration_no_ops import NoOpsConfig
from swiftopt.models.loading import load
from swiftopt.models.restacked import (
    NO_OPS_CODE,
    distance,
    has_no_ops,
    nearest,
    pairs_of,
    takes_no_ops,
    write_restacked,
)
from swiftopt.models.rows import Rows
from swiftopt.models.runtime import Runtime
from swiftopt.models.saved import quiet
from swiftopt.store import Store

DEPTH = 6
BY_LAYER = ("qwen2-window", "gemma3", "gemma3-softcap")
FAMILIES = [name for name in CONFIGS if name not in BY_LAYER]
IDS = [1, 2, 3, 4, 5, 60, 61, 62, 7, 8, 9, 10, 11, 90, 91, 92]  # more than the windows of the tiny models


def set_of(kept: tuple[bool, ...]) -> LayerSet:
    """Return the set that keeps these sub-layers, in the order of running."""
    left_out = [frozenset(i for i, keep in enumerate(kept[first::2]) if not keep) for first in (0, 1)]
    return LayerSet(len(kept) // 2, *left_out)


def alternates(kept: tuple[bool, ...]) -> bool:
    """Whether the kept sub-layers are attention, MLP, attention, MLP, …, at least one of each."""
    left = [place % 2 for place, keep in enumerate(kept) if keep]
    return bool(left) and left == [0, 1] * (len(left) // 2)


@st.composite
def drawn_alternating_sets(draw: Any, depth: int = DEPTH) -> LayerSet:
    kept, wanted = [], 0
    for place in range(2 * depth):
        keep = place % 2 == wanted and draw(st.booleans())
        kept.append(keep)
        wanted ^= keep
    if wanted or not any(kept):  # an attention without an MLP, or nothing
        kept[-1] = True
        kept[-2] = not wanted or kept[-2]
    return set_of(tuple(kept))


@contextmanager
def written(folder: Path, layer_set: LayerSet, parallel: bool = False, no_ops: bool = False) -> Iterator[Path]:
    with TemporaryDirectory() as out:
        write_restacked(folder, pairs_of(layer_set, parallel, no_ops), Path(out))
        yield Path(out)


def logits_of(folder: Path) -> torch.Tensor:
    """Return the checkpoint's logits as transformers computes them."""
    auto: Any = AutoModelForCausalLM
    with quiet():  # sdpa: the eager attention computes its softmax in float32
        model, found = auto.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="sdpa", output_loading_info=True
        )
    assert not found["missing_keys"] and not found["unexpected_keys"]
    with torch.inference_mode():
        out: torch.Tensor = model.eval()(torch.tensor([IDS])).logits[0]
    return out


class Nothing(torch.nn.Module):
    """Replaces a missing half of a layer and adds zero; as an attention it returns weights too."""

    def __init__(self, attention: bool) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> Any:
        zero = torch.zeros_like(hidden_states)
        return (zero, None) if self.attention else zero


def logits_by_blocks(folder: Path) -> torch.Tensor:
    """Return logits of a checkpoint with layers of one half: Llama's layers without the halves that are no_op."""
    config = NoOpsConfig.from_pretrained(folder)
    bias_out = config.attention_bias
    config.attention_bias = getattr(config, "qkv_bias", bias_out)
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config).double().eval()
    for layer, block in zip(model.model.layers, config.block_configs, strict=True):
        group = config.num_attention_heads // block.attention.n_heads_in_group
        assert (group, block.ffn.intermediate_size) == (config.num_key_value_heads, config.intermediate_size)
        if not bias_out and layer.self_attn.o_proj.bias is not None:
            layer.self_attn.o_proj.bias = None
        if block.attention.no_op:
            layer.self_attn, layer.input_layernorm = Nothing(attention=True), torch.nn.Identity()
        if block.ffn.no_op:
            layer.mlp, layer.post_attention_layernorm = Nothing(attention=False), torch.nn.Identity()
    found = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not found.unexpected_keys and found.missing_keys in ([], ["lm_head.weight"][: config.tie_word_embeddings])
    with torch.inference_mode():
        return model(torch.tensor([IDS])).logits[0]


@pytest.fixture(scope="module", params=variants(FAMILIES))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Runtime]:
    """Save a tiny float64 model; return its folder and runtime."""
    depth = "n_layer" if request.param == "gpt2" else "num_hidden_layers"
    changed: dict[str, Any] = {depth: DEPTH}
    if "layer_types" in CONFIGS[request.param].to_dict():
        changed["layer_types"] = ["full_attention"] * DEPTH
    model = tiny_model(request.param, scale=2.0, **changed)
    with torch.no_grad():
        for parameter in model.parameters():  # biases are zero and norms one at first
            parameter.add_(0.1 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return folder, Runtime(model, None, ModelInfo("tiny", request.param, DEPTH, 1))


@settings(max_examples=12)
@given(layer_set=drawn_alternating_sets())
def test_restacked_checkpoint_has_the_logits_of_the_skipped_model(
    saved: tuple[Path, Runtime], layer_set: LayerSet
) -> None:
    folder, runtime = saved
    if runtime.parallel:
        layer_set = nearest(layer_set, parallel=True)[0]
    with torch.inference_mode():
        skipped = runtime.forward(Rows(IDS, 0, variants=(layer_set,)), runtime.new_buffer(len(IDS)))
    with written(folder, layer_set, runtime.parallel) as out:
        torch.testing.assert_close(logits_of(out), skipped, rtol=1e-9, atol=1e-9)


WITH_ATTENTION_FIRST = st.tuples(*[st.booleans()] * 2 * DEPTH).filter(lambda kept: not [*kept, True].index(True) % 2)


@pytest.mark.parametrize("saved", ["llama", "mistral", "qwen2"], indirect=True)
@settings(max_examples=12)
@given(kept=WITH_ATTENTION_FIRST.filter(any))
def test_checkpoint_with_layers_of_one_half_has_the_logits_of_the_skipped_model(
    saved: tuple[Path, Runtime], kept: tuple[bool, ...]
) -> None:
    folder, runtime = saved
    layer_set = set_of(kept)
    with torch.inference_mode():
        skipped = runtime.forward(Rows(IDS, 0, variants=(layer_set,)), runtime.new_buffer(len(IDS)))
    with written(folder, layer_set, no_ops=True) as out:
        mine = logits_of(out) if alternates(kept) else logits_by_blocks(out)
        assert has_no_ops(out) != alternates(kept)
        torch.testing.assert_close(mine, skipped, rtol=1e-9, atol=1e-9)


def test_logits_of_another_set_differ(saved: tuple[Path, Runtime]) -> None:
    """The equality above is thus not that of a model that ignores its layers."""
    folder, runtime = saved
    with written(folder, LayerSet(DEPTH, frozenset({2}), frozenset({2})), runtime.parallel) as out:
        other = runtime.forward(Rows(IDS, 0), runtime.new_buffer(len(IDS)))
        assert not torch.allclose(logits_of(out), other, rtol=1e-4, atol=1e-4)


@given(kept=st.tuples(*[st.booleans()] * 2 * DEPTH))
def test_set_has_pairs_exactly_if_it_alternates(kept: tuple[bool, ...]) -> None:
    """With layers of one half, a set has pairs if it begins with attention."""
    layer_set = set_of(kept)
    left = [i for i, keep in enumerate(kept) if keep]
    if left and left[0] % 2 == 0:
        layers = pairs_of(layer_set, no_ops=True)
        halves = [2 * half + place for pair in layers for place, half in enumerate(pair) if half is not None]
        assert halves == left and all(pair != (None, None) for pair in layers)
        assert not any(one[1] is None and after[0] is None for one, after in pairwise(layers))  # no fewer would do
    else:
        with pytest.raises(LayerSetError, match=r"MLP of layer|whole model"):
            pairs_of(layer_set, no_ops=True)
    if alternates(kept):
        pairs = pairs_of(layer_set)
        assert [2 * a for a, _ in pairs] == left[::2] and [2 * m + 1 for _, m in pairs] == left[1::2]
    else:
        with pytest.raises(LayerSetError, match=r"alternate|MLP|whole model"):
            pairs_of(layer_set)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_nearest_sets_have_the_fewest_changes(depth: int) -> None:
    """Compared with all possible sets."""
    everything = [set_of(kept) for kept in product((False, True), repeat=2 * depth) if alternates(kept)]
    for kept in product((False, True), repeat=2 * depth):
        layer_set = set_of(kept)
        found = nearest(layer_set, most=1000)
        fewest = min(distance(layer_set, each) for each in everything)
        assert len(found) == len(set(found))
        assert set(found) == {each for each in everything if distance(layer_set, each) == fewest}
        assert nearest(layer_set, most=1) == found[:1] and all(pairs_of(each) for each in found)


def test_nearest_set_keeps_the_earlier_sub_layer_and_the_formats() -> None:
    layer_set = LayerSet(4, frozenset(), frozenset({1}), formats=(("mlp", "int4"),))  # A0 M0 A1 A2 M2 A3 M3
    found = nearest(layer_set)
    assert [(sorted(each.skip_attn), sorted(each.skip_mlp)) for each in found] == [([], []), ([2], [1]), ([1], [1])]
    assert all(each.formats == layer_set.formats for each in found)


def test_nearest_set_of_the_deepest_model_is_found_at_once() -> None:
    skipped = [sub for i, sub in enumerate(searchable(126)) if i % 3]
    (found,) = nearest(LayerSet(126).skipping(skipped), most=1)
    assert pairs_of(found)


@given(kept=st.tuples(*[st.booleans()] * 2 * DEPTH))
def test_parallel_models_are_split_only_at_whole_layers(kept: tuple[bool, ...]) -> None:
    layer_set = set_of(kept)
    (found,) = nearest(layer_set, parallel=True, most=1)
    assert found.skip_attn == found.skip_mlp and all(a == m for a, m in pairs_of(found, parallel=True))
    if layer_set.skip_attn != layer_set.skip_mlp:
        with pytest.raises(LayerSetError, match="sets of whole layers"):
            pairs_of(layer_set, parallel=True)


@pytest.mark.parametrize("family", BY_LAYER)
def test_models_with_several_attention_types_are_refused(family: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", family)
    with pytest.raises(UnsupportedModel, match="differ in their attention"):
        write_restacked(folder, [(0, 0)], tmp_path)


def test_gpt2_that_scales_by_the_layers_index_is_refused(tmp_path: Path) -> None:
    folder = edit_config(save(tmp_path / "model", "gpt2"), scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(UnsupportedModel, match="layer's index"):
        write_restacked(folder, [(0, 0)], tmp_path)


def test_large_checkpoints_are_sharded_and_have_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, layer_set = save(tmp_path / "model"), LayerSet(4, frozenset({1}), frozenset({1}))
    with written(folder, layer_set) as out:
        whole = logits_of(out)
    monkeypatch.setattr(restacked, "SHARD_BYTES", 20_000)
    with written(folder, layer_set) as out:
        assert len(list(out.glob("model-*.safetensors"))) > 2 and not (out / "model.safetensors").exists()
        assert torch.equal(logits_of(out), whole)
        assert AutoTokenizer.from_pretrained(out)("w3 w5")["input_ids"] == [3, 5]


def test_a_tensor_of_neither_sub_layer_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.1.extra.weight": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match="neither to attention nor to the MLP"), written(folder, LayerSet(4)):
        pass


# --- swiftopt export


SKIPPING = LayerSet(4, frozenset({1, 2}), frozenset({1}))  # leaves A0 M0 M2 A3 M3


def plan_of(layer_set: LayerSet | None, method: str = "swift", **known: Any) -> FoundPlan:
    record = None if layer_set is None else LayerSetRecord("tiny", "code", layer_set, **known)
    return FoundPlan(Plan(method, record, measured_speedup=1.31, device="EPYC", dtype="float32"), 3, None)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model whose rows are multiples of blocks of 32."""
    folder = save(tmp_path_factory.mktemp("tiny"))
    tiny_model("llama", torch.float32, intermediate_size=64).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_gets_a_draft_with_settings_and_a_readme(tiny: Path, tmp_path: Path, engine: str) -> None:
    made = export(plan_of(SKIPPING, acceptance_rate=0.9), str(tiny), engine, tmp_path / "out")
    row, page = ENGINES[engine], (tmp_path / "out" / "README.md").read_text()
    draft = "draft.gguf" if engine in ("llamacpp", "openvino") else "draft/model.safetensors"
    assert {draft, row.settings_file, "README.md"} <= set(made.files) and made.kind == "draft"
    assert str(made.n_draft_tokens) in (tmp_path / "out" / row.settings_file).read_text()
    assert "acceptance 0.90" in page and "speed-up 1.31" in page and (str(tiny) in page or engine == "llamacpp")
    assert page.startswith(f"# {tiny.name} in {row.title}\n")
    assert ("Not run" in page) == (not row.is_tested)
    assert distance(SKIPPING, made.layer_set or LayerSet(4)) == (0 if row.no_ops else 1)
    assert "does not alternate" in made.remarks[0]
    summary = json.loads((tmp_path / "out" / "export.json").read_text())
    assert summary["schema"] == "swiftopt.export/1" and (summary["engine"], summary["kind"]) == (engine, "draft")
    assert (summary["model"], summary["version"], summary["draft_tokens"]) == (tiny.name, 3, made.n_draft_tokens)
    assert summary["draft"] == draft.partition("/")[0]
    assert summary["settings"] == json.loads((tmp_path / "out" / row.settings_file).read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    paths = [tmp_path / "out", *(tmp_path / "out").rglob("*")]  # which the engine may read as another user
    assert all(path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644) for path in paths)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_path_with_a_space_is_quoted_in_the_command(tmp_path: Path, engine: str) -> None:
    folder = save(tmp_path / "my model")
    export(plan_of(None, "prompt-lookup"), str(folder), engine, tmp_path / "out")
    lines = re.findall(r"```bash\n(.+?)\n```", (tmp_path / "out" / "README.md").read_text(), re.DOTALL)
    assert lines and all(str(folder) in shlex.split(line) for line in lines)


@pytest.mark.parametrize("layer_set", [SKIPPING, None], ids=["draft", "text"])
def test_lines_for_transformers_run_and_give_the_targets_tokens(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer_set: LayerSet | None
) -> None:
    found = plan_of(layer_set, "swift" if layer_set else "prompt-lookup")
    export(found, str(tiny), "transformers", tmp_path / "out")
    monkeypatch.chdir(tmp_path / "out")
    page = (tmp_path / "out" / "README.md").read_text()
    ways = re.findall(r"```python\n(.+?)```", page, re.DOTALL)
    assert [("draft" in code, "swiftopt" in code) for code in ways] == (
        [(False, True), (True, False)] if layer_set else [(False, False)]
    )
    for code in ways:
        values: dict[str, Any] = {}
        with quiet():
            exec(code.replace("def fibonacci(n):", "w3 w5 w3 w5 w3"), values)
        plain = values["target"].generate(**values["inputs"], do_sample=False, max_new_tokens=128)
        assert torch.equal(values["ids"], plain) and plain.shape[1] > 100


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_stop_threshold_is_passed_to_transformers(tiny: Path, tmp_path: Path, engine: str) -> None:
    found = plan_of(SKIPPING, settings=SwiftSettings(stop_threshold=0.6).to_json())
    export(found, str(tiny), engine, tmp_path / "out")
    values = json.loads((tmp_path / "out" / "export.json").read_text())["settings"]
    assert values.get("assistant_confidence_threshold") == (0.6 if engine == "transformers" else None)


def test_layer_set_for_transformers_is_that_of_the_plan(tmp_path: Path) -> None:
    """This includes models whose sub-layers cannot be a checkpoint, and plans that only have formats."""
    gemma, sets = save(tmp_path / "gemma", "gemma3"), (SKIPPING, LayerSet(4).filled("int8"))
    for number, layer_set in enumerate(sets):
        made = export(plan_of(layer_set), str(gemma), "transformers", tmp_path / str(number))
        assert made.files == ("README.md", "export.json", "layer_set.json", "settings.json") and made.remarks
        assert LayerSetRecord.load(tmp_path / str(number) / "layer_set.json").layer_set == layer_set
        summary = json.loads((tmp_path / str(number) / "export.json").read_text())
        assert (summary["kind"], summary["draft"], summary["layer_set"]) == ("draft", None, "layer_set.json")
    adaptive = FoundPlan(Plan("adaptive", None, {"draft_format": "int4"}), 1, None)
    export(adaptive, str(gemma), "transformers", tmp_path / "adaptive")
    record = LayerSetRecord.load(tmp_path / "adaptive" / "layer_set.json")
    assert record.layer_set == LayerSet(4).filled("int4") and record.settings["method"] == "adaptive"


@pytest.mark.parametrize("format_name", [None, "int4"])
def test_vllm_gets_a_set_that_does_not_alternate_unchanged(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_name: str | None
) -> None:
    """Its tensors are equal bitwise, or the same maps rounded, and the blocks of its config have attributes."""
    layer_set = SKIPPING if format_name is None else SKIPPING.filled(format_name)
    made = export(plan_of(layer_set), str(tiny), "vllm", tmp_path / "out")
    out = tmp_path / "out" / "draft"
    assert made.layer_set == layer_set and "--trust-remote-code" in made.remarks[0]
    assert f"vllm serve {tiny} --trust-remote-code --spec" in (tmp_path / "out" / "README.md").read_text()
    sources = {"attn": (0, None, 3), "mlp": (0, 2, 3)}
    model, draft = load_file(tiny / "model.safetensors"), load_file(out / "model.safetensors")
    expected = {name: value for name, value in model.items() if ".layers." not in name}
    for kind, layers in sources.items():
        parts = ("self_attn.", "input_layernorm.") if kind == "attn" else ("mlp.", "post_attention_layernorm.")
        for at, layer in enumerate(layers):
            stem = f"model.layers.{layer}."
            own = {name.removeprefix(stem): value for name, value in model.items() if name.startswith(stem)}
            expected |= {f"model.layers.{at}.{name}": own[name] for name in own if name.startswith(parts)}
    few = {name.removesuffix("_packed") for name in draft if name.endswith("_packed")}
    assert few == {name for name in expected if format_name and "_proj." in name}
    assert {name for name in draft if "_proj.weight_" not in name} == set(expected) - few
    assert all(torch.equal(draft[name], expected[name]) for name in set(expected) - few)
    for name in few:
        mean = defined(draft, name.removesuffix(".weight"), 4, 32)
        assert (mean - expected[name]).abs().mean() < 0.1 * expected[name].abs().mean()
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])
    config = AutoConfig.from_pretrained(out, trust_remote_code=True)
    assert type(config).__module__ != NoOpsConfig.__module__ and config.architectures == ["DeciLMForCausalLM"]
    assert [block.attention.no_op for block in config.block_configs] == [False, True, False]
    assert not any(block.ffn.no_op for block in config.block_configs) and config.num_hidden_layers == 3
    assert config.to_dict()["block_configs"] == json.loads((out / "config.json").read_text())["block_configs"]
    assert has_no_ops(out) and not has_no_ops(tiny)
    (out / NO_OPS_CODE.name).write_text("import os\n")
    assert not has_no_ops(out)


def test_models_without_vllms_block_checkpoint_get_the_nearest_set(tiny: Path, tmp_path: Path) -> None:
    """One of them has its own code, which --trust-remote-code would run."""
    qwen, window = save(tmp_path / "qwen3", "qwen3"), save(tmp_path / "window", "mistral-window")
    other = edit_config(save(tmp_path / "other"), hidden_act="gelu")
    coded = edit_config(save(tmp_path / "coded"), auto_map={"AutoConfig": "mine.Mine"})
    first = LayerSet(4, frozenset({0, 2}), frozenset({1}))  # begins with an MLP
    for number, (model, layer_set) in enumerate(
        [(qwen, SKIPPING), (window, SKIPPING), (other, SKIPPING), (coded, SKIPPING), (tiny, first)]
    ):
        assert takes_no_ops(model) == (model == tiny)
        made = export(plan_of(layer_set), str(model), "vllm", tmp_path / str(number))
        assert made.layer_set in nearest(layer_set) and made.layer_set != layer_set
        page = (tmp_path / str(number) / "README.md").read_text()
        assert "--trust-remote-code" not in page and not has_no_ops(tmp_path / str(number) / "draft")


def test_gguf_draft_has_the_function_of_the_set(tiny: Path, tmp_path: Path) -> None:
    found = plan_of(LayerSet(4, frozenset({1}), frozenset({1})))
    export(found, str(tiny), "llamacpp", tmp_path / "llama")
    export(found, str(tiny), "transformers", tmp_path / "hf")
    auto: Any = AutoModelForCausalLM
    read = auto.from_pretrained(tmp_path / "llama", gguf_file="draft.gguf", dtype=torch.float64)
    with torch.inference_mode():
        mine = read.eval()(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(mine, logits_of(tmp_path / "hf" / "draft"), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "kind"), [("int4", "Q4_0"), ("int8", "Q8_0")])
@pytest.mark.parametrize("engine", ["llamacpp", "openvino"])
def test_formats_become_gguf_types(tiny: Path, tmp_path: Path, name: str, kind: str, engine: str) -> None:
    found = plan_of(LayerSet(4, frozenset({1}), frozenset({1})).filled(name))
    export(found, str(tiny), engine, tmp_path / "llama")
    tensors = {each.name: each for each in gguf.GGUFReader(str(tmp_path / "llama" / "draft.gguf")).tensors}
    assert tensors["blk.2.ffn_up.weight"].tensor_type.name == kind and "blk.3.ffn_up.weight" not in tensors


def defined(tensors: dict[str, torch.Tensor], name: str, bits: int, group: int) -> torch.Tensor:
    """Return a map's weight by compressed-tensors' definition: code i of a row starts at bit i · bits of its words."""
    _, width = tensors[f"{name}.weight_shape"].tolist()
    words = tensors[f"{name}.weight_packed"].numpy().view(np.uint32).astype(np.int64)
    places = [divmod(bits * i, 32) for i in range(width)]
    codes = np.stack([(words[:, word] >> bit) % 2**bits for word, bit in places], axis=1)
    return (torch.tensor(codes) - 2 ** (bits - 1)) * tensors[f"{name}.weight_scale"].repeat_interleave(group, dim=1)


@pytest.mark.parametrize(("engine", "name"), [("vllm", "int4"), ("sglang", "int4-32"), ("vllm", "int8")])
def test_formats_become_compressed_tensors_of_the_same_weights(
    tiny: Path, tmp_path: Path, name: str, engine: str
) -> None:
    """Skipped sub-layers and formats together are written, read by the definition, and loaded as a model."""
    formats = (("mlp", name), ("attn", name), ("attn:2", "stored"))
    layer_set = LayerSet(4, frozenset({1}), frozenset({1}), formats=formats)
    made = export(plan_of(layer_set), str(tiny), engine, tmp_path / "out")
    export(plan_of(replace(layer_set, formats=())), str(tiny), engine, tmp_path / "stored")
    assert any(name.partition("-")[0] in remark for remark in made.remarks)
    few, whole = (load_file(tmp_path / one / "draft" / "model.safetensors") for one in ("out", "stored"))
    config = json.loads((tmp_path / "out" / "draft" / "config.json").read_text())["quantization_config"]
    whole_maps = [f"model.layers.1.self_attn.{each}_proj" for each in "kqvo"]
    assert config["ignore"] == sorted(["lm_head", *whole_maps])
    bits, group = (8, None) if name == "int8" else (4, 32)
    weights = config["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"]) == (bits, group)
    means = dict(whole)
    for key in [key for key in whole if key.endswith("_proj.weight")]:
        place, weight = key.removesuffix(".weight"), whole[key]
        if place in whole_maps:
            assert torch.equal(few[key], weight)
            continue
        assert key not in few and few[f"{place}.weight_scale"].dtype == weight.dtype
        means[key] = defined(few, place, bits, group or weight.shape[1])
        scale = few[f"{place}.weight_scale"].repeat_interleave(group or weight.shape[1], dim=1)
        inside = (weight / scale).abs() <= 2 ** (bits - 1) - 1
        assert inside.float().mean() > 0.8 and ((means[key] - weight).abs() <= 0.51 * scale)[inside].all()
    assert {key for key in few if "_proj" not in key} == {key for key in whole if "_proj" not in key}
    loaded = load(str(tmp_path / "out" / "draft"), dtype="float32", device="cpu", speed="eager")
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(tmp_path / "stored" / "draft", dtype=torch.float32)
    model.load_state_dict(means, strict=False)
    with torch.inference_mode():
        ours = loaded.forward(Rows(IDS, 0), loaded.new_buffer(len(IDS)))
        torch.testing.assert_close(ours, model(torch.tensor([IDS])).logits[0], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(ours, logits_of(tmp_path / "stored" / "draft").float(), rtol=1e-4, atol=1e-4)


def test_plan_with_formats_is_a_draft_for_engines_that_accept_one(tiny: Path, tmp_path: Path) -> None:
    adaptive = FoundPlan(Plan("adaptive", None, {"draft_format": "int4"}), 1, None)
    for number, engine in enumerate(("vllm", "sglang", "llamacpp", "openvino")):
        made = export(adaptive, str(tiny), engine, tmp_path / str(number))
        assert made.kind == "draft" and made.layer_set is not None and not made.layer_set.n_skipped
    assert export(adaptive, str(tiny), "tensorrt-llm", tmp_path / "text").kind == "text"
    with pytest.raises(InvalidInput, match="it only has fewer bits"):
        export(plan_of(LayerSet(4).filled("int8")), str(tiny), "tensorrt-llm", tmp_path / "other")
    gpt2 = save(tmp_path / "gpt2", "gpt2")
    with pytest.raises(UnsupportedModel, match="fewer bits"):
        export(adaptive, str(gpt2), "vllm", tmp_path / "other")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rounding_to_four_bits_beats_scales_of_the_largest_weight(dtype: torch.dtype) -> None:
    weight = torch.randn(8, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[0] = 0
    codes, scales = rounded(weight, 4, 64)
    spread = scales.float().repeat_interleave(64, dim=1)
    error = ((codes.float() - 8) * spread - weight.float()).square().sum()
    reach = (weight.float().view(8, -1, 64).abs().amax(-1) / 7).clamp(min=1e-9).repeat_interleave(64, dim=1)
    naive = ((weight.float() / reach).round() * reach - weight.float()).square().sum()
    assert scales.dtype == dtype and error < 0.95 * naive and (codes[0] == 8).all()


def test_plan_tuned_in_an_engine_has_its_draft_and_length(tiny: Path, tmp_path: Path) -> None:
    def tuned(drafts: str, engine: str = "llamacpp", layer_set: LayerSet | None = None) -> FoundPlan:
        found = plan_of(layer_set, "spd")
        settings = {"drafts": drafts, "draft_tokens": 7}
        return FoundPlan(replace(found.plan, settings=settings, engine=engine), 3, None)

    for drafts, layer_set, spec in [
        ("bits", None, "draft-simple"),
        ("layers", SKIPPING, "draft-simple"),
        ("text", None, "ngram-simple"),
    ]:
        made = export(tuned(drafts, layer_set=layer_set), str(tiny), "llamacpp", tmp_path / drafts)
        own = json.loads((tmp_path / drafts / "settings.json").read_text())
        assert own["spec-type"] == spec and made.n_draft_tokens == 7
        assert ("draft.gguf" in made.files) == (drafts != "text")
    export(tuned("own-text", "vllm"), str(tiny), "vllm", tmp_path / "own")
    own = json.loads((tmp_path / "own" / "speculative_config.json").read_text())
    module, _, name = own.pop("model").rpartition(".")
    assert own == {"method": "custom_class", "num_speculative_tokens": 7}
    assert hasattr(import_module(module), name)
    found = tuned("shared", "transformers")
    inside = {"drafts": "shared", "draft_format": "int8", "engine_version": "transformers 5"}
    plan = replace(found.plan, method="adaptive", settings=inside)
    export(replace(found, plan=plan), str(tiny), "transformers", tmp_path / "shared")
    written = LayerSetRecord.load(tmp_path / "shared" / "layer_set.json")
    assert {name for _, name in written.layer_set.formats} == {"int8"} and written.settings["method"] == "adaptive"
    with pytest.raises(InvalidInput, match="version 3 is for llamacpp: export it --to llamacpp"):
        export(tuned("text"), str(tiny), "vllm", tmp_path / "other")
    with pytest.raises(InvalidInput, match="which needs no files"):
        export(tuned("server"), str(tiny), "llamacpp", tmp_path / "other")


def test_failed_export_of_a_plan_leaves_no_files(tiny: Path, tmp_path: Path) -> None:
    draft, gemma = plan_of(SKIPPING), save(tmp_path / "gemma", "gemma3")
    for found, model, words in [
        (plan_of(None, "plain"), tiny, "decodes with plain"),
        (plan_of(SKIPPING, fingerprint="v1:0"), tiny, "tuned on another model"),
        (plan_of(LayerSet(6, frozenset({1}))), tiny, "tuned on another model"),
        (draft, gemma, "differ in their attention"),
        (draft, tmp_path / "absent", "there is no folder"),
    ]:
        with pytest.raises(SwiftoptError, match=words):
            export(found, str(model), "vllm", tmp_path / "out")
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(InvalidInput, match="exists already"):
        export(draft, str(tiny), "transformers", tmp_path / "taken")
    with pytest.raises(OutputError, match="cannot be written"):
        export(draft, str(tiny), "transformers", tmp_path / "taken" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gemma", "taken"]
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
def test_failed_write_leaves_no_files(
    error: Exception, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OutputError, match="No space left"):
        export(plan_of(SKIPPING), str(tiny), "transformers", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_set_with_the_best_trials_wins_at_equal_distance() -> None:
    candidates = nearest(SKIPPING)
    assert len(candidates) > 2
    trials = [Trial(1, candidates[0], "random", 0.5, 0.5), Trial(2, candidates[2], "random", 0.75, 0.5)]
    assert alternating_sets(SKIPPING, False, trials)[:2] == (candidates[2], candidates[0])
    assert alternating_sets(SKIPPING, False, []) == candidates
    assert alternating_sets(LayerSet(4), False, trials) == (LayerSet(4),)


def test_reported_acceptance_equals_that_of_the_exported_draft(tiny: Path, tmp_path: Path) -> None:
    """It is counted from one pass over the text, and by drafting with the exported model."""
    prompts = [Prompt(str(i), "code", f"w{i + 3} w5 w9", max_new_tokens=40) for i in range(6)]
    made = export(plan_of(SKIPPING), str(tiny), "sglang", tmp_path / "out", prompts=prompts)
    page, summary = ((tmp_path / "out" / name).read_text() for name in ("README.md", "export.json"))
    target, draft = (load(str(each), "float32", "cpu", speed="eager") for each in (tiny, tmp_path / "out" / "draft"))
    length, session = made.n_draft_tokens, Session(target, Sampling(), 40)
    method = build("spd", Resources(target, draft_runtime=draft), SpdSettings(length, None))
    done = [session.run(prompt, method)[0].completion for prompt in prompts]
    drafted, accepted = sum(one.drafted for one in done), sum(one.accepted for one in done)
    (mine,) = measured_acceptance(target, prompts, [made.layer_set or SKIPPING])
    assert mine.counts(length)[1:] == (drafted, accepted) and 0 < accepted < drafted
    value = json.loads(summary)
    assert (
        value["acceptance"] == round(accepted / drafted, 4) and f"{accepted / drafted:.2f}, measured with its" in page
    )
    others = measured_acceptance(target, prompts, nearest(SKIPPING)[:5])
    assert max(each.tokens_per_round(1) for each in others) >= mine.tokens_per_round(1) > 1
    exact = export(plan_of(SKIPPING), str(tiny), "vllm", tmp_path / "exact", prompts=prompts)
    candidates = {SKIPPING, *nearest(SKIPPING)}
    assert exact.layer_set in candidates and has_no_ops(tmp_path / "exact" / "draft") == (exact.layer_set == SKIPPING)
    export(plan_of(SKIPPING, matchness=0.5), str(tiny), "vllm", tmp_path / "estimate")
    assert json.loads((tmp_path / "estimate" / "export.json").read_text())["acceptance_from"].startswith("estimated")


def test_drafts_get_longer_with_acceptance_and_shorter_under_load() -> None:
    half = LayerSet(8, frozenset(range(2, 6)), frozenset(range(2, 6)))
    lengths = [lengths_by_load(half, acceptance, None)[0][2] for acceptance in (0.3, 0.6, 0.9, 0.99)]
    assert lengths == sorted(lengths) and lengths[0] == 0 and lengths[-1] > 3
    widths = {1: 1.0, 8: 1.0, 16: 2.0, 32: 4.0}  # flat to 8 rows, then by the row
    costs = CostProfile("v1:0", "cpu", "float32", 512, 8, 0.05, 0.05, 0.1, 0.1, widths)
    found = lengths_by_load(half, 0.9, costs)
    assert [k for _, _, k in found] == sorted((k for _, _, k in found), reverse=True) and found[0][2] > found[-1][2]
    assert found[0][0] == 1 and all(one[1] + 1 == after[0] for one, after in pairwise(found))
    assert lengths_by_load(half, None, costs) == ((1, 64, 5),)
    bits = [lengths_by_load(LayerSet(8).filled(name), 0.8, costs)[0][2] for name in ("stored", "int8", "int4")]
    assert bits == sorted(set(bits)) and lengths_by_load(LayerSet(8).filled("int4"), 0.8, costs)[0][1] == 64


def test_export_command(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert tuple(ENGINES) == ENGINE_WORDS
    monkeypatch.setenv("SWIFTOPT_DATABASE_URL", str(tmp_path / "plans.db"))
    with Store.open() as store:
        store.add_layer_set(LayerSetRecord(str(tiny), "code", SKIPPING))
    command = ["export", f"{tiny}/code", "--to", "vllm", "--out", str(tmp_path / "out")]
    assert run([*command, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["schema"] == "swiftopt.export/1" and value["draft_tokens"] == 5 and value["kind"] == "draft"
    settings_of = json.loads((tmp_path / "out" / "speculative_config.json").read_text())
    assert settings_of["method"] == "draft_model" and settings_of["num_speculative_tokens"] == 5
    with pytest.raises(SystemExit, match="2"):
        monkeypatch.setattr("sys.argv", ["swiftopt", *command])
        main()
    assert "exists already" in capsys.readouterr().err
