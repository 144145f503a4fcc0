"""Models of the most common families as bare modules, for our kernels, without transformers' modeling code.

Importing that code takes longer than reading a file of a gigabyte. Modules and parameters have transformers' names and
shapes, and the modules that a runtime calls compute the same bits. Callers that need the whole model, for example its
`generate`, get transformers' own, with these modules in it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "silu": nn.SiLU,
    "gelu_pytorch_tanh": partial(nn.GELU, approximate="tanh"),
}
ROTATIONS = ("default", "linear", "llama3", "yarn")  # Rotations whose frequencies do not depend on a text's length.
# By model type, whether queries, keys and values, the output, and the MLP have biases: a field of the config, or a
# constant.
BIASES: dict[str, tuple[str | bool, str | bool, str | bool]] = {
    "llama": ("attention_bias", "attention_bias", "mlp_bias"),
    "mistral": (False, False, False),
    "qwen2": (True, False, False),
    "qwen3": ("attention_bias", "attention_bias", False),
    "gemma3_text": ("attention_bias", "attention_bias", False),
}
HEAD_NORMS = ("qwen3", "gemma3_text")
GEMMA = ("gemma3_text",)


class Linear(nn.Linear):
    """A linear map without initial weights: initialising them on the meta device would import torch's compiler."""

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """An embedding without initial weights."""

    def reset_parameters(self) -> None:
        pass


class RmsNorm(nn.Module):
    """Llama's norm: rounded before the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class RmsNormPlusOne(RmsNorm):
    """Gemma's norm: the factor is 1 + weight, and it is rounded once."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class ScaledEmbedding(Embedding):
    """Gemma's embedding, whose rows are multiplied by `embed_scale`."""

    embed_scale: Tensor

    def forward(self, token_ids: Tensor) -> Tensor:
        return super().forward(token_ids) * self.embed_scale.to(self.weight.dtype)


class Rotary(nn.Module):
    """Rotary tables, by layer type if the config has parameters by type."""

    def __init__(self, config: Any) -> None:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        super().__init__()
        self._frequencies: dict[str, tuple[Tensor, float]] = {}
        for layer_type, rope in by_layer_type(config).items():
            if rope["rope_type"] == "default":
                width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
                exponents = torch.arange(0, width, 2, dtype=torch.float) / width
                self._frequencies[layer_type] = 1.0 / (rope["rope_theta"] ** exponents), 1.0
            else:
                given = {"layer_type": layer_type} if layer_type else {}
                self._frequencies[layer_type] = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, None, **given)

    def forward(self, x: Tensor, positions: Tensor, layer_type: str = "") -> tuple[Tensor, Tensor]:
        frequencies, scale = self._frequencies[layer_type]
        angles = positions[..., None].float() * frequencies.to(x.device)
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)


def by_layer_type(config: Any) -> dict[str, dict[str, Any]]:
    """Return the rotary parameters by layer type; the key is "" if all layers have the same."""
    rope: dict[str, Any] = config.rope_parameters
    return {name: rope[name] for name in set(config.layer_types)} if config.model_type in GEMMA else {"": rope}


class BareMlp(nn.Module):
    """Llama's gated MLP."""

    def __init__(self, n_hidden: int, n_inner: int, has_bias: bool, activation: str) -> None:
        super().__init__()
        self.gate_proj = Linear(n_hidden, n_inner, has_bias)
        self.up_proj = Linear(n_hidden, n_inner, has_bias)
        self.down_proj = Linear(n_inner, n_hidden, has_bias)
        self.act_fn = ACTIVATIONS[activation]()

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


class Skeleton(nn.Module):
    """A causal language model of a type in `BIASES`, with its weights on the meta device; `config`: transformers'."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        from transformers import GenerationConfig

        super().__init__()
        self.config, self.dtype = config, dtype
        self.generation_config = GenerationConfig.from_model_config(config)
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        n_queries, n_keys = config.num_attention_heads * width, config.num_key_value_heads * width
        qkv_bias, out_bias, mlp_bias = (
            bool(getattr(config, bias)) if isinstance(bias, str) else bias for bias in BIASES[config.model_type]
        )
        is_gemma = config.model_type in GEMMA
        norm = RmsNormPlusOne if is_gemma else RmsNorm
        activation = config.hidden_activation if is_gemma else config.hidden_act
        n_hidden, eps, model, layers = config.hidden_size, config.rms_norm_eps, nn.Module(), nn.ModuleList()
        self.model = model
        with torch.device("meta"):
            embedding = ScaledEmbedding if is_gemma else Embedding
            model.embed_tokens = embedding(config.vocab_size, n_hidden)
            for _ in range(config.num_hidden_layers):
                layer, attention = nn.Module(), nn.Module()
                attention.q_proj = Linear(n_hidden, n_queries, qkv_bias)
                attention.k_proj = Linear(n_hidden, n_keys, qkv_bias)
                attention.v_proj = Linear(n_hidden, n_keys, qkv_bias)
                attention.o_proj = Linear(n_queries, n_hidden, out_bias)
                if config.model_type in HEAD_NORMS:
                    attention.q_norm, attention.k_norm = norm(width, eps), norm(width, eps)
                attention.scaling = (config.query_pre_attn_scalar if is_gemma else width) ** -0.5
                layer.self_attn = attention
                layer.mlp = BareMlp(n_hidden, config.intermediate_size, mlp_bias, activation)
                layer.input_layernorm = norm(n_hidden, eps)
                layer.post_attention_layernorm = norm(n_hidden, eps)
                if is_gemma:
                    layer.pre_feedforward_layernorm = norm(n_hidden, eps)
                    layer.post_feedforward_layernorm = norm(n_hidden, eps)
                layers.append(layer)
            model.layers, model.norm = layers, norm(n_hidden, eps)
            self.lm_head = Linear(n_hidden, config.vocab_size, bias=False)
        if is_gemma:
            model.embed_tokens.register_buffer("embed_scale", torch.tensor(n_hidden**0.5), persistent=False)
        self.to(dtype)
        model.rotary_emb = Rotary(config)
        self.tie_weights()
        self._whole: list[Any] = []  # In a list, so that torch does not register it as a submodule.

    def tie_weights(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.get_submodule("embed_tokens").weight  # type: ignore[assignment]

    def whole(self) -> Any:
        """Return transformers' model made of these modules; it shares their weights and has no others."""
        if not self._whole:
            from .quantised_checkpoints import without_weights

            made = without_weights(self.config, self.dtype)
            for name, module in self.named_modules():
                if module._parameters:
                    made.set_submodule(name, module)
            made.generation_config = self.generation_config
            self._whole.append(made.eval())
        return self._whole[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute logits with transformers' model."""
        return self.whole()(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Decode with transformers' model."""
        return self.whole().generate(*args, **kwargs)

    def get_input_embeddings(self) -> Any:
        return self.model.get_submodule("embed_tokens")

    def get_output_embeddings(self) -> Any:
        return self.lm_head


def fits(config: Any) -> bool:
    """Tell whether a model of a config can be a `Skeleton`."""
    if config.model_type not in BIASES:
        return False
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    rotations = {rope.get("rope_type", "default") for rope in by_layer_type(config).values()}
    return activation in ACTIVATIONS and rotations <= {*ROTATIONS}
