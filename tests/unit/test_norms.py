"""The kind of a norm is determined by probing it, whatever its class is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nanochat.modeling_nanochat import NanoChatRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm
from transformers.models.stablelm.modeling_stablelm import StableLmLayerNormPerHead

from swiftopt.models.kernels.layout import LAYER, RMS, RMS_PLUS_ONE, RMS_WIDE, Unsupported
from swiftopt.models.kernels.limits import known_form
from swiftopt.models.norms import form_of

WIDTH = 24
HERE: Any = (torch.float32, torch.device("cpu"))


class Outside(LlamaRMSNorm):
    """A norm that adds epsilon after the root."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        root = hidden_states.square().mean(-1, keepdim=True).sqrt()
        return self.weight * hidden_states / (root + self.variance_epsilon)


class Shifted(LlamaRMSNorm):
    """A norm whose parameter has another name."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.shift = nn.Parameter(torch.zeros(WIDTH))


KNOWN: list[tuple[nn.Module, int, float]] = [
    (LlamaRMSNorm(WIDTH, eps=1e-5), RMS, 1e-5),
    (Gemma3RMSNorm(WIDTH), RMS_PLUS_ONE, 1e-6),
    (Gemma4RMSNorm(WIDTH), RMS_WIDE, 1e-6),
    (Gemma4RMSNorm(WIDTH, with_scale=False), RMS, 1e-6),
    (Qwen3NextRMSNorm(WIDTH), RMS_PLUS_ONE, 1e-6),
    (NanoChatRMSNorm(eps=1e-6), RMS, 1e-6),
    (CohereLayerNorm(WIDTH), LAYER, 1e-5),
    (OlmoLayerNorm(WIDTH), LAYER, 1e-5),
    (nn.LayerNorm(WIDTH, eps=1e-12), LAYER, 1e-12),
    (nn.LayerNorm(WIDTH, bias=False), LAYER, 1e-5),
    (nn.LayerNorm(WIDTH, elementwise_affine=False), LAYER, 1e-5),
    (nn.RMSNorm(WIDTH, eps=1e-6), RMS_WIDE, 1e-6),
    (Olmo2RMSNorm(WIDTH, eps=1e-5), RMS_WIDE, 1e-5),
]


@pytest.mark.parametrize(("norm", "kind", "eps"), KNOWN, ids=lambda value: getattr(value, "_get_name", str)())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norms_kind_and_epsilon_are_what_it_computes(
    norm: nn.Module, kind: int, eps: float, dtype: torch.dtype
) -> None:
    form = form_of(norm.to(dtype), WIDTH, dtype, torch.device("cpu"))
    assert form is not None and (form.kind, form.eps) == (kind, eps)
    own = dict(norm.named_parameters())
    assert form.weight is own.get("weight", form.weight) and form.bias is own.get("bias")
    assert form.weight.shape == (WIDTH,) and form.weight.dtype == dtype


def test_a_weight_that_one_is_added_to_is_given_with_it() -> None:
    norm = NemotronLayerNorm1P(WIDTH)
    nn.init.normal_(norm.weight)
    form = form_of(norm, WIDTH, *HERE)
    assert form is not None and form.kind == LAYER and torch.equal(form.weight, norm.weight + 1)


@pytest.mark.parametrize("norm", [CohereLayerNorm((3, WIDTH)), StableLmLayerNormPerHead(WIDTH, 3)])
def test_norms_by_head_may_have_a_weight_for_each(norm: nn.Module) -> None:
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    form = form_of(norm, WIDTH, *HERE, n_heads=3)
    weights = torch.cat([parameter.reshape(-1, WIDTH) for parameter in norm.parameters()])
    assert form is not None and form.kind == LAYER and torch.equal(form.weight, weights)
    assert form_of(norm, WIDTH, *HERE) is None


@pytest.mark.parametrize("norm", [nn.Identity(), Outside(WIDTH), Shifted(), nn.GroupNorm(1, WIDTH)])
def test_a_norm_of_no_known_kind_is_left_to_torch(norm: nn.Module) -> None:
    assert form_of(norm, WIDTH, *HERE) is None
    with pytest.raises(Unsupported, match=type(norm).__name__):
        known_form(norm, WIDTH, *HERE)


def test_norms_of_one_class_that_compute_differently_are_told_apart() -> None:
    changed = LlamaRMSNorm(WIDTH)
    assert form_of(changed, WIDTH, *HERE) is not None
    forward = changed.forward
    changed.forward = lambda x: 2 * forward(x)  # type: ignore[method-assign]
    assert form_of(changed, WIDTH, *HERE) is None
    assert form_of(LlamaRMSNorm(WIDTH), WIDTH, *HERE) is not None
    assert form_of(LlamaRMSNorm(WIDTH, eps=1e-3), WIDTH, *HERE).eps == 1e-3  # type: ignore[union-attr]
