"""The door for transformers users: `model.generate(..., custom_generate=swiftopt.custom_generate, layer_set=…)`.

transformers 5.23 hands a callable only the options it names as parameters, and never the `streamer`: pass `on_tokens`
instead. Logits processors and stopping criteria are the caller's own; a processor is applied to each tree row that
is visited, with the ids that lead to that row, and a criterion to each token that is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..core.costs import CostProfile
from ..core.errors import InvalidInput, SettingsError
from ..core.records import LayerSetRecord, ModelInfo
from ..core.settings import STORED, SwiftSettings
from ..core.types import Completion, FinishReason, LayerSet, Sampling
from ..models.costs import SMALLEST_BUCKET, measure_costs, with_formats
from ..models.loading import at_speed
from ..models.quantised import QuantisedCopies
from ..models.runtime import Runtime
from .context import Ending, TokenRule
from .draft_models import SkippedTarget
from .engine import Work, side_by_side
from .loop import decoding
from .methods import Method, swift
from .methods.adaptive import AdaptiveSettings, adaptive
from .session import Session

KEPT = "_swiftopt"  # under which a model object has what its calls share


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

    A record or file drafts as it was tuned for. For adaptive drafts, costs are measured at the first call; they, the
    quantised copies and what was learnt of acceptance stay with the model object for the next one.

    Args:    layer_set: a `LayerSet`, a record, or the path of an exported file.
    Returns: int64 (1, prompt + completion), or a `DraftedOutput` with `return_dict_in_generate`.
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
    runtime = Runtime(model, None, info)
    at_speed(runtime, "auto", lay_out=False)
    method = _Kept.of(model, runtime).method(runtime, skipped, swift_settings or settings)
    prompt_ids = input_ids[0].tolist()
    # One draw from torch's global generator seeds the request, so that torch.manual_seed governs it as usual.
    seed = int(torch.randint(2**31, ()).item()) if generation_config.do_sample else 0
    rule = TokenRule(Sampling(temperature=float(generation_config.do_sample), seed=seed), logits_processor)
    room = generation_config.max_length - len(prompt_ids)
    ending = CriteriaEnding(room, prompt_ids=prompt_ids, criteria=stopping_criteria)
    completions: list[Completion] = []

    def work() -> Work[None]:
        completions.append((yield from decoding(runtime, prompt_ids, method, rule, ending)))

    for event in side_by_side([work()]):
        if on_tokens is not None:
            on_tokens(event.token_ids)
    (done,) = completions
    sequences: Any = torch.tensor([[*prompt_ids, *done.token_ids]], device=input_ids.device)
    if not generation_config.return_dict_in_generate:
        return sequences
    return DraftedOutput(sequences=sequences, drafted=done.drafted, accepted=done.accepted)


@dataclass
class DraftedOutput(GenerateDecoderOnlyOutput):
    """transformers' output, with the draft tokens that were judged and the accepted ones of them."""

    drafted: int | None = None
    accepted: int | None = None


@dataclass(slots=True)
class _Kept:
    """What calls on one model object share: copies and costs of its drafts, and what was learnt of their acceptance.

    It lies in the object's `__dict__`, so that it goes where the model goes. None of it can change what comes out: the
    target is read anew from the model at every call, whose modules may have been replaced.
    """

    copies: QuantisedCopies
    costs: CostProfile | None = None
    adaptive: dict[LayerSet, Method] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any, runtime: Runtime) -> _Kept:
        """That of earlier calls, unless the model was moved or cast since; its copies become the runtime's."""
        key = runtime.device, runtime.dtype, runtime.speed
        known = vars(model).setdefault(KEPT, {}).get(key)
        if known is None:
            known = vars(model)[KEPT][key] = cls(runtime.copies)
        runtime.copies = known.copies
        return cast(_Kept, known)

    def method(self, runtime: Runtime, layer_set: LayerSet, settings: SwiftSettings) -> Method:
        """SWIFT's drafting with the set, or adaptive drafts where the settings say so."""
        if settings.method != "adaptive":
            return swift(layer_set, settings)
        if layer_set not in self.adaptive:
            runtime.check_layer_set(layer_set)
            if self.costs is None:
                self.costs = measure_costs(runtime, SMALLEST_BUCKET)
            self.costs = with_formats(runtime, self.costs, self.costs.missing(layer_set))
            self.adaptive[layer_set] = adaptive(SkippedTarget(layer_set), self.costs, AdaptiveSettings(STORED))
        return self.adaptive[layer_set]


@dataclass(frozen=True, slots=True)
class CriteriaEnding(Ending):
    """Ends where transformers' stopping criteria say so, asked after every token."""

    prompt_ids: Sequence[int] = ()
    criteria: Any = None

    def crop(self, generated: Sequence[int], block: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        """See `Ending.crop`; the reason is "length" where the room is used up, else "stop"."""
        for n in range(1, len(block) + 1):
            context = torch.tensor([[*self.prompt_ids, *generated, *block[:n]]])
            if bool(self.criteria(context, None).all()):
                reason: FinishReason = "length" if len(generated) + n >= self.max_new_tokens else "stop"
                return list(block[:n]), reason
        return list(block), None


def _layer_set(given: LayerSet | LayerSetRecord | str | Path | None) -> tuple[LayerSet, SwiftSettings]:
    if given is None:
        raise SettingsError("custom_generate needs layer_set=: a LayerSet, a record, or the path of an exported file")
    if isinstance(given, LayerSet):
        return given, SwiftSettings()
    record = given if isinstance(given, LayerSetRecord) else LayerSetRecord.load(Path(given))
    return record.layer_set, SwiftSettings.from_json(record.settings)


def hf_generate(
    session: Session, token_ids: Sequence[int], max_new_tokens: int, stop: Sequence[str] = (), **options: Any
) -> tuple[int, ...]:
    """Decode with transformers' own greedy `generate`, on the same model object and with the same ends.

    Args: stop: strings that end it beside the session's. options: further ones of `generate`, as `assistant_model`.
    """
    model: Any = session.runtime.hf_model
    ending = session.ending(max_new_tokens, stop)
    if ending.stop_strings:
        options = {**options, "stop_strings": list(ending.stop_strings), "tokenizer": session.runtime.tokenizer}
    inputs = torch.tensor([token_ids], device=session.runtime.device)
    out = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(ending.stop_token_ids) or None,
        **options,
    )
    return tuple(out[0, len(token_ids) :].tolist())
