"""Multi-token-prediction (MTP) layers of checkpoints: names of their tensors, and the config of such a layer alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

LAYER = "model.layers.0."  # Prefix of the layer's tensors in a model of the layer alone.


@dataclass(frozen=True, slots=True)
class Mtp:
    """The multi-token-prediction layer of a family's checkpoints: a decoder layer after two norms and a linear map.

    It reads a position's state after the model's final norm, and the embedding of the next token, and predicts the
    token after that.

    names: prefix of stored names -> prefix in a model of this layer alone, which also has `embed_norm`, `hidden_norm`
        and `projection`. The first prefix that matches is used; {n} stands for the number of the model's own layers.
        "": the tensor is a copy of one of the model's own, or is not read.
    attention: type of the layer, if the config has no mtp_layer_types.
    """

    names: Mapping[str, str]
    attention: str = "full_attention"

    def name_of(self, stored: str, n_layers: int) -> str | None:
        """Return a stored tensor's name in a model of this layer alone; "": not read; None: of another layer."""
        for begin, replacement in self.names.items():
            if stored.startswith(begin := begin.format(n=n_layers)):
                return replacement and replacement + stored.removeprefix(begin)
        return None


# Stored as one more layer after the model's own, as in DeepSeek V3.
NUMBERED = Mtp(
    {
        "model.layers.{n}.enorm.": "embed_norm.",
        "model.layers.{n}.hnorm.": "hidden_norm.",
        "model.layers.{n}.eh_proj.": "projection.",
        "model.layers.{n}.shared_head.norm.": "model.norm.",
        "model.layers.{n}.shared_head.head.": "",
        "model.layers.{n}.embed_tokens.": "",
        "model.layers.{n}.": LAYER,
    }
)
# Stored under a prefix of its own, as in Qwen3-Next.
NAMED = Mtp(
    {
        "mtp.pre_fc_norm_embedding.": "embed_norm.",
        "mtp.pre_fc_norm_hidden.": "hidden_norm.",
        "mtp.fc.": "projection.",
        "mtp.norm.": "model.norm.",
        "mtp.layers.0.": LAYER,
        "mtp.": "",
    }
)


def config_of_layer(config: Any, mtp: Mtp, names: Iterable[str]) -> Any:
    """Return the config of a model with only a multi-token-prediction layer.

    The `names` of its tensors tell whether it has experts; in some families it has none (K-EXAONE).
    """
    alone, has_experts = deepcopy(config), any(name.startswith(f"{LAYER}mlp.experts.") for name in names)
    alone.num_hidden_layers = 1
    changed: dict[str, Any] = {
        "layer_types": (getattr(config, "mtp_layer_types", None) or [mtp.attention])[:1],
        "mlp_layer_types": ["sparse" if has_experts else "dense"],
        "first_k_dense_replace": 0 if has_experts else 1,
        "mlp_only_layers": [] if has_experts else [0],
    }
    for name, value in changed.items():
        if getattr(config, name, None) is not None:
            setattr(alone, name, value)
    return alone
