"""The door for transformers users: `model.generate(..., custom_generate=swiftopt.custom_generate, layer_set=…)`.

transformers 5.23 hands a callable only the options it names as parameters, and never the `streamer`: pass `on_tokens`
instead. Logits processors and stopping criteria are the caller's own; a processor is applied to each tree row that
is visited, with the ids that lead to that row, and a criterion to each token that is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..core.errors import InvalidInput, SettingsError
from ..core.records import load_record
from ..core.settings import SwiftSettings
from ..core.types import FinishReason, LayerSet, LayerSetRecord, ModelInfo, Sampling
from ..models.runtime import Runtime
from .loop import Watch, decode
from .method import swift
from .rule import TokenRule


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    layer_set: LayerSet | LayerSetRecord | str | Path | None = None,
    swift_settings: SwiftSettings | None = None,
    on_tokens: Callable[[Sequence[int]], None] | None = None,
    **model_kwargs: Any,
) -> Any:
    """Decode as `generate` would, drafting with the sub-layers of `layer_set` left out.

    Args:    layer_set: a `LayerSet`, a record, or the path of an exported file.
    Returns: int64 (1, prompt + completion), or a `GenerateDecoderOnlyOutput` with `return_dict_in_generate`.
    Raises:  SettingsError: no layer set, beams, or several sequences at once.
             InvalidInput: padding in the prompt. UnsupportedModel, LayerSetError, ContextOverflow as in `decode`.
    """
    skipped, settings = _layer_set(layer_set)
    if input_ids.shape[0] != 1 or generation_config.num_beams != 1:
        raise SettingsError(
            f"custom_generate decodes one sequence without beams, not a batch of {input_ids.shape[0]} with"
            f" {generation_config.num_beams} beams: call generate once per prompt"
        )
    mask = model_kwargs.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise InvalidInput("the prompt has padding (zeros in attention_mask): pass it without padding")
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    info = ModelInfo("", type(model).__name__, model.config.num_hidden_layers, n_parameters)
    prompt_ids = input_ids[0].tolist()
    # One draw from torch's global generator seeds the request, so that torch.manual_seed governs it as usual.
    seed = int(torch.randint(2**31, ()).item()) if generation_config.do_sample else 0
    rule = TokenRule(Sampling(temperature=float(generation_config.do_sample), seed=seed), logits_processor)
    ending = CriteriaEnding(prompt_ids, generation_config.max_length - len(prompt_ids), stopping_criteria)
    done = decode(
        Runtime(model, None, info),
        prompt_ids,
        swift(skipped, swift_settings or settings),
        rule,
        ending,
        Watch(on_tokens=on_tokens),
    )
    sequences: Any = torch.tensor([[*prompt_ids, *done.token_ids]], device=input_ids.device)
    return GenerateDecoderOnlyOutput(sequences=sequences) if generation_config.return_dict_in_generate else sequences


class CriteriaEnding:
    """Ends where transformers' stopping criteria say so, asked after every token."""

    def __init__(self, prompt_ids: Sequence[int], max_new_tokens: int, criteria: StoppingCriteriaList) -> None:
        self.max_new_tokens = max_new_tokens
        self._prompt_ids = list(prompt_ids)
        self._criteria: Any = criteria

    def crop(self, generated: Sequence[int], block: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        """See `Ending.crop`; the reason is "length" where the room is used up, else "stop"."""
        for n in range(1, len(block) + 1):
            context = torch.tensor([[*self._prompt_ids, *generated, *block[:n]]])
            if bool(self._criteria(context, None).all()):
                reason: FinishReason = "length" if len(generated) + n >= self.max_new_tokens else "stop"
                return list(block[:n]), reason
        return list(block), None

    def cut(self, text: str) -> int | None:
        """Nothing is cut: `generate` returns token ids."""
        return None


def _layer_set(given: LayerSet | LayerSetRecord | str | Path | None) -> tuple[LayerSet, SwiftSettings]:
    if given is None:
        raise SettingsError("custom_generate needs layer_set=: a LayerSet, a record, or the path of an exported file")
    if isinstance(given, LayerSet):
        return given, SwiftSettings()
    record = given if isinstance(given, LayerSetRecord) else load_record(Path(given))
    return record.layer_set, SwiftSettings.from_json(record.settings)
