"""Configs of GGUF files: rotary scaling, windows and caps of scores, checked by the logits of their models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from answer_templates import FAMILIES
from converted import write_gguf
from families import tiny_model
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from swiftopt.core.errors import ModelNotFound, UnsupportedModel
from swiftopt.decoding.turn_tokens import turn_end_ids
from swiftopt.models.gguf_reader import GgufFile
from swiftopt.models.gguf_settings import config_of, ends_of
from swiftopt.models.gguf_tokenizer import write_tokenizer
from swiftopt.models.loading import load, load_tokenizer
from swiftopt.worker.served_tokens import Tokens

TURN_END = 94  # The first token of `write_gguf` that is no letter.
More = Callable[[gguf.GGUFWriter], object]
IDS = [3 + (7 * i) % 90 for i in range(40)]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [2.0, 4.0, 8.0, 16.0],
    "original_max_position_embeddings": 128,
    "attention_factor": 1.25,
}


def _linear(writer: gguf.GGUFWriter) -> None:
    writer.add_string("llama.rope.scaling.type", "linear")
    writer.add_float32("llama.rope.scaling.factor", 4.0)
    writer.add_bool("llama.rope.scaling.finetuned", True)


def _linear_as_of_old(writer: gguf.GGUFWriter) -> None:
    for name in ("type", "factor"):
        writer.kv_data[0].pop(f"llama.rope.scaling.{name}")
    writer.add_float32("llama.rope.scale_linear", 4.0)


def _yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_string("qwen2.rope.scaling.type", "yarn")
    writer.add_float32("qwen2.rope.scaling.factor", 4.0)
    writer.add_uint32("qwen2.rope.scaling.original_context_length", 64)


def _llama3(writer: gguf.GGUFWriter) -> None:
    config = tiny_model("llama", rope_parameters=LLAMA3).config
    usual = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    factors = usual / ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]
    assert float(factors.max()) > 1.0 and float(factors.min()) == 1.0
    writer.add_tensor("rope_freqs.weight", factors.float().numpy())


def _long(writer: gguf.GGUFWriter) -> None:
    writer.add_uint32("phi3.rope.scaling.original_context_length", 128)
    writer.add_float32("phi3.rope.scaling.attn_factor", 1.25)
    for name in ("short", "long"):
        writer.add_tensor(f"rope_factors_{name}.weight", np.array(LONG[f"{name}_factor"], np.float32))


def _pattern(writer: gguf.GGUFWriter) -> None:
    writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)
    writer.add_float32("gemma3.final_logit_softcapping", 3.0)
    writer.add_float32("gemma3.rope.freq_base_swa", 20000.0)
    writer.add_float32("gemma3.rope.scaling.factor", 8.0)


GEMMA = {
    "query_pre_attn_scalar": 16,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
    },
}
# What a file says beside the usual settings: family, config of its model, settings, positions of the runtime.
SAID: dict[str, tuple[str, dict[str, Any], More, int]] = {
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}, _linear, 256),
    "linear, as of old": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        _linear_as_of_old,
        256,
    ),
    "yarn": (
        "qwen2",
        {
            "max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        _yarn,
        256,
    ),
    "llama 3": ("llama", {"rope_parameters": LLAMA3}, _llama3, 256),
    "long": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 128}, _long, 128),
    "in part": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        lambda writer: None,
        256,
    ),
    "windows and caps": ("gemma3-softcap", GEMMA, _pattern, 256),
}


@pytest.mark.parametrize("what", SAID)
def test_what_a_file_says_is_computed(what: str, tmp_path: Path, new_cache: Path) -> None:
    family, changed, more, positions = SAID[what]
    model = tiny_model(family, torch.float32, **changed)
    runtime = load(str(write_gguf(tmp_path / "a.gguf", model, more=more)), "float32", "cpu", speed="eager")
    found = runtime.prefill(IDS, runtime.new_buffer(64))
    expected = model(torch.tensor([IDS])).logits[0, -1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert runtime.max_positions == positions
    plain = tiny_model(family, torch.float32)  # It matters: the model without what the file says computes another.
    assert not torch.allclose(plain(torch.tensor([IDS])).logits[0, -1], expected, rtol=1e-2)


def test_a_pattern_of_windows_may_be_a_list(tmp_path: Path) -> None:
    slides = [True, False, False, True]
    path = write_gguf(
        tmp_path / "a.gguf",
        tiny_model("gemma3", torch.float32),
        more=lambda writer: writer.add_array("gemma3.attention.sliding_window_pattern", slides),
    )
    types = config_of(GgufFile(path))["layer_types"]
    assert [kind == "sliding_attention" for kind in types] == slides


BAD: dict[str, tuple[str, More, type[Exception], str]] = {
    "a factor of a wrong number": (
        "llama",
        lambda writer: writer.add_tensor("rope_freqs.weight", np.full(3, 2, np.float32)),
        ModelNotFound,
        r"rope_freqs\.weight in .* is F32 of the shape \[3\], and .* F32 of \[4\]",
    ),
    "a factor of zero": (
        "llama",
        lambda writer: writer.add_tensor("rope_freqs.weight", np.zeros(4, np.float32)),
        ModelNotFound,
        "values that are no factors",
    ),
    "one kind of factors": (
        "phi3",
        lambda writer: writer.add_tensor("rope_factors_long.weight", np.full(4, 2, np.float32)),
        ModelNotFound,
        r"lacks rope_factors_short\.weight or rope_factors_long\.weight",
    ),
    "factors and another scaling": (
        "llama",
        lambda writer: (_linear(writer), writer.add_tensor("rope_freqs.weight", np.full(4, 2, np.float32))),
        UnsupportedModel,
        r"setting rope\.scaling\.type = linear",
    ),
    "a scaling of another family": (
        "phi3",
        lambda writer: writer.add_float32("phi3.rope.scaling.factor", 2.0),
        UnsupportedModel,
        r"setting rope\.scaling\.type = linear",
    ),
    "heads of another size": (
        "llama",
        lambda writer: writer.add_uint32("llama.attention.key_length_mla", 4),
        UnsupportedModel,
        r"setting attention\.key_length_mla = 4",
    ),
    "a token that is none": (
        "llama",
        lambda writer: writer.add_uint32("tokenizer.ggml.padding_token_id", 1000),
        ModelNotFound,
        r"setting tokenizer\.ggml\.padding_token_id = 1000, which is none of its 97 tokens",
    ),
    "windows of other layers": (
        "gemma3",
        lambda writer: writer.add_array("gemma3.attention.sliding_window_pattern", [True, False, True]),
        UnsupportedModel,
        r"sliding_window_pattern = \[True, False, True\]",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_settings_that_are_wrong_are_one_sentence(what: str, tmp_path: Path) -> None:
    family, more, error, words = BAD[what]

    def changed(writer: gguf.GGUFWriter) -> None:
        for written in writer.kv_data:
            written.pop("tokenizer.ggml.padding_token_id", None)
        more(writer)

    path = write_gguf(tmp_path / "a.gguf", tiny_model(family, torch.float32), more=changed)
    with pytest.raises(error, match=words) as caught:
        config_of(GgufFile(path))
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["block_count", "embedding_length", "attention.head_count", "context_length"])
@pytest.mark.parametrize("value", [None, 0, "four", 1 << 40])
def test_a_size_that_is_missing_or_none_is_one_sentence(name: str, value: object, tmp_path: Path) -> None:
    def changed(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(f"llama.{name}")
        if isinstance(value, str):
            writer.add_string(f"llama.{name}", value)
        elif value is not None:
            writer.add_uint64(f"llama.{name}", value)

    path = write_gguf(tmp_path / "a.gguf", tiny_model("llama", torch.float32), more=changed)
    with pytest.raises(ModelNotFound, match=rf"setting {name} = {value}: download"):
        config_of(GgufFile(path))


def test_an_architecture_that_is_not_supported_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(str(path), "rwkv7")
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="architecture rwkv7, which is not supported: use one of apertus, arcee"):
        config_of(GgufFile(path))


def test_thoughts_calls_and_ends_of_turns_are_those_of_the_files_template(tmp_path: Path) -> None:
    def changed(writer: gguf.GGUFWriter) -> None:
        writer.add_chat_template(FAMILIES["qwen3"].template.replace("<|im_end|>", "ab"))
        writer.kv_data[0]["tokenizer.ggml.token_type"].value[TURN_END] = gguf.TokenType.CONTROL

    path = write_gguf(tmp_path / "a.gguf", tiny_model("llama", torch.float32), more=changed)
    write_tokenizer(GgufFile(path), tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert Tokens(tokenizer).forms == FAMILIES["qwen3"].rows
    assert turn_end_ids(tokenizer) == {TURN_END}


def test_texts_end_by_the_tokens_that_the_file_names(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", tiny_model("llama", torch.float32), more=lambda w: w.add_eot_token_id(7))
    assert ends_of(GgufFile(path)) == [2, 7]
