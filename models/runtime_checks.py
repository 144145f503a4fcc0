"""Checks before a runtime computes: of the length of texts, that drafts fit the model, and whether layers are alike."""

from __future__ import annotations

from typing import Any

from ..core.errors import InvalidInput, LayerSetError, SettingsError, UnsupportedModel
from ..core.layer_sets import LayerSet
from .blocks import Block
from .expert_choice import refuse_experts
from .prompts import refuse_overflow


class RuntimeChecks:
    """The checks of `Runtime`, a subclass that sets the fields."""

    n_layers: int
    max_positions: int
    tokenizer: Any
    blocks: list[Block]

    @property
    def has_alike_attention(self) -> bool:
        """Whether attention has one form in all layers that have it, and no layer computes more than its sub-layers."""
        forms = {(block.heads, block.parts.v_norm is None) for block in self.blocks if block.has_attention}
        usual = all(heads.latent is None and has_plain_values for heads, has_plain_values in forms)
        return len(forms) <= 1 and usual and all(block.end is None for block in self.blocks)

    @property
    def has_alike_layers(self) -> bool:
        """Whether all layers have one form: attention with keys of its own, an MLP, and nothing else."""
        usual = (block.has_attention and not block.n_taps and "mlp" in block.kinds for block in self.blocks)
        return self.has_alike_attention and all(usual)

    def check_context(self, n_prompt: int, max_new_tokens: int) -> None:
        """Raises: ContextOverflow: prompt and completion together need more positions than the model has."""
        refuse_overflow(n_prompt, max_new_tokens, self.max_positions)

    def check_layer_set(self, layer_set: LayerSet) -> None:
        """Raises: LayerSetError: the set is for another number of layers or of experts."""
        if layer_set.n_layers != self.n_layers:
            raise LayerSetError(
                f"the layer set is for {layer_set.n_layers} layers, but this model has {self.n_layers}:"
                " use a set that was tuned on this model"
            )
        if layer_set.experts:
            refuse_experts(layer_set, self.blocks)

    def check_depth(self, depth: int) -> None:
        """Raises: SettingsError: a draft cannot end after `depth` layers. UnsupportedModel: the model has one layer."""
        if self.n_layers == 1:
            raise UnsupportedModel(
                "this model has one layer, so that there is nothing to leave early: use another method"
            )
        if not 0 < depth < self.n_layers:
            raise SettingsError(
                f"a draft cannot leave the model after {depth} of its {self.n_layers} layers:"
                f" use 1 to {self.n_layers - 1}"
            )

    def check_same_tokenizer(self, target: RuntimeChecks) -> None:
        """Raises: InvalidInput: this model's tokenizer has other tokens than the target's."""
        vocab: dict[str, int] = getattr(self.tokenizer, "get_vocab", dict)()
        other: dict[str, int] = getattr(target.tokenizer, "get_vocab", dict)()
        if vocab != other:
            raise InvalidInput(
                f"the draft model's tokenizer has other tokens than the target's ({len(vocab)} and {len(other)}):"
                " draft with a smaller model of the same family"
            )
