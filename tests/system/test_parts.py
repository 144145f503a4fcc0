"""A model that has more than its family's row names is refused, and its norms may be of any kind."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from families import VOCAB, tiny_model
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.nanochat.modeling_nanochat import NanoChatRMSNorm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm

import swiftopt
from swiftopt.core.errors import UnsupportedModel
from swiftopt.models.loading import at_speed, info_of
from swiftopt.models.runtime import Runtime

IDS = [3, 5, 5, 9, 40, 41, 12]
LAYERS = swiftopt.LayerSet(4, frozenset({1}), frozenset({1, 2}))


def runtime_of(model: Any) -> Runtime:
    return Runtime(model, None, info_of(model, ""))


def _sinks(model: Any) -> None:
    model.model.layers[1].self_attn.sinks = nn.Parameter(torch.ones(4))


def _scalar(model: Any) -> None:
    model.model.layers[3].register_buffer("layer_scalar", torch.ones(1))


def _root(model: Any) -> None:
    model.score = nn.Linear(32, 1)


def _value_norm(model: Any) -> None:
    model.model.layers[0].self_attn.v_norm = NanoChatRMSNorm()


def _renamed_norm(model: Any) -> None:
    model.model.layers[0].self_attn.q_layernorm = nn.LayerNorm(8)


def _hook(model: Any) -> None:
    model.model.layers[2].register_forward_hook(lambda module, args, out: out + 1)


def _root_hook(model: Any) -> None:
    model.register_forward_pre_hook(lambda module, args: None)


def _replaced(model: Any) -> None:
    model.model.layers[1].self_attn.forward = lambda *args, **options: (torch.zeros(1, 7, 32), None)


def _subclass(model: Any) -> None:
    class Steered(type(model.model.layers[0])):  # type: ignore[misc]
        def forward(self, *args: Any, **options: Any) -> Any:
            return super().forward(*args, **options) + 1

    model.model.layers[0].__class__ = Steered


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_sinks, r"LlamaAttention at model\.layers\.1\.self_attn has a sinks that belongs to no known part"),
        (_scalar, r"LlamaDecoderLayer at model\.layers\.3 has a layer_scalar that belongs to no known part"),
        (_root, "Linear at score has a weight that belongs to no known part"),
        (_value_norm, r"NanoChatRMSNorm at model\.layers\.0\.self_attn\.v_norm is no known part"),
        (_renamed_norm, r"LayerNorm at model\.layers\.0\.self_attn\.q_layernorm has a weight"),
        (_hook, r"LlamaDecoderLayer at model\.layers\.2 has a hook"),
        (_root_hook, "LlamaForCausalLM at its root has a hook"),
        (_replaced, r"LlamaAttention at model\.layers\.1\.self_attn has its own forward"),
        (_subclass, r"Steered at model\.layers\.0 has its own forward"),
    ],
)
def test_model_with_unknown_modules_is_refused(change: Callable[[Any], None], sentence: str) -> None:
    model = tiny_model("llama")
    change(model)
    with pytest.raises(UnsupportedModel, match=sentence):
        runtime_of(model)


def test_a_map_from_latents_whose_weights_a_library_has_is_refused() -> None:
    class Linear4bit(nn.Linear):
        pass

    model = tiny_model("youtu")
    model.model.layers[2].self_attn.kv_b_proj.__class__ = Linear4bit
    with pytest.raises(UnsupportedModel, match="a Linear4bit computes this model's map from latents"):
        runtime_of(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler, of torch's own code
def test_modules_without_effect_on_text_are_accepted() -> None:
    model = tiny_model("llama")
    attention = model.model.layers[0].self_attn
    attention.register_buffer("bias", torch.ones(3), persistent=False)
    attention.dropout, attention.rest = nn.Dropout(0.1), nn.Identity()
    attention.forward = MethodType(type(attention).forward, attention)
    model.forward = torch.compile(model.forward)
    assert runtime_of(model).n_layers == 4


def test_a_hook_that_a_model_gets_between_two_calls_of_custom_generate_is_refused() -> None:
    options: Any = {"max_new_tokens": 4, "do_sample": False, "custom_generate": swiftopt.custom_generate}
    for module_of in (lambda model: model, lambda model: model.model.layers[1]):
        model, inputs = tiny_model("llama"), torch.tensor([IDS])
        model.generate(inputs, layer_set=LAYERS, **options)
        handle = module_of(model).register_forward_hook(lambda *_: None)
        with pytest.raises(UnsupportedModel, match="has a hook"):
            model.generate(inputs, layer_set=LAYERS, **options)
        handle.remove()
        model.generate(inputs, layer_set=LAYERS, **options)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "no weight": lambda width: NanoChatRMSNorm(eps=1e-5),
    "centred, no weight, no epsilon that can be read": OlmoLayerNorm,
    "centred, no bias": lambda width: nn.LayerNorm(width, bias=False),
    "1 + w": Gemma3RMSNorm,
}


@pytest.mark.parametrize("speed", ["eager", "exact"])
@pytest.mark.parametrize("kind", NORMS)
def test_logits_are_those_of_transformers_when_norms_are_of_another_kind(kind: str, speed: Any) -> None:
    model = tiny_model("qwen3", torch.float32, scale=2.0)
    for parent, name, width in [
        *(
            (layer, name, 32)
            for layer in model.model.layers
            for name in ("input_layernorm", "post_attention_layernorm")
        ),
        *((layer.self_attn, name, 16) for layer in model.model.layers for name in ("q_norm", "k_norm")),
        (model.model, "norm", 32),
    ]:
        made = NORMS[kind](width)
        for parameter in made.parameters():
            parameter.data.uniform_(0.5, 1.5)
        setattr(parent, name, made.requires_grad_(False))
    runtime = runtime_of(model)
    at_speed(runtime, speed)
    assert runtime.exact == (speed == "exact")
    found = runtime.prefill(IDS, runtime.new_buffer(16))
    expected = model(torch.tensor([IDS])).logits[0, -1]
    assert found.shape == (VOCAB,)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
