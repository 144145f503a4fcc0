"""transformers' `generate` with drafts: `model.generate(..., custom_generate=swiftopt.custom_generate, layer_set=…)`.

Every option of `generate` is obeyed or refused with a message; `generate_options` lists which.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..core.costs import SMALLEST_BUCKET, CostProfile
from ..core.errors import SettingsError
from ..core.layer_sets import LayerSet
from ..core.records import LayerSetRecord
from ..core.settings import STORED, SwiftSettings
from ..core.types import FinishReason, Sampling
from ..models.costs import measure_costs, with_formats
from ..models.loading import at_speed, info_of
from ..models.runtime import Runtime
from .context import Ending, TokenRule
from .draft_models import SkippedTarget
from .engine import alone
from .events import Prefilled, Round, WorkEvent
from .generate_options import STATELESS, refuse_dropout, refuse_inputs, refuse_options
from .loop import decoding
from .methods import Method, swift
from .methods.adaptive import AdaptiveSettings, adaptive
from .work import subscribed

STATE_ATTRIBUTE = "_swiftopt"  # Attribute of a model object that holds state shared by its `custom_generate` calls.


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    layer_set: LayerSet | LayerSetRecord | str | Path | None = None,
    swift_settings: SwiftSettings | None = None,
    on_tokens: Callable[[Sequence[int]], None] | None = None,
    streamer: Any = None,
    assistant_model: Any = None,
    synced_gpus: bool = False,
    tokenizer: Any = None,
    **model_inputs: Any,
) -> Any:
    """Decode like `generate`, drafting without the sub-layers of `layer_set`.

    A record or file drafts with the method that it was tuned for. For adaptive drafts, costs are measured at the first
    call. Costs, quantised copies, CUDA graphs and learnt acceptance rates stay with the model object for later calls,
    until its weights change. Calls on one object run one after the other.

    Args:    layer_set: a `LayerSet`, a record, or the path of an exported file. on_tokens: receives each block of
             tokens as it is committed. streamer: transformers' streamer; receives each token. tokenizer: used by
             `generate` for `stop_strings`.
    Returns: int64 (1, prompt + completion), or a `DraftedOutput` with `return_dict_in_generate`.
    Raises:  SettingsError: no layer set, several sequences at once, or an unsupported option.
             InvalidInput: the prompt is empty, padded or not token ids. UnsupportedModel, LayerSetError,
             ContextOverflow as in `decode`.
    """
    skipped_layers, stored_settings = _read_layer_set(layer_set)
    refuse_options(generation_config, assistant_model, synced_gpus)
    refuse_inputs(input_ids, model_inputs)
    refuse_dropout(model)
    shared, prompt_ids = _Shared.of(model), input_ids[0].tolist()
    # Seed the request with one draw from torch's global generator, so that torch.manual_seed controls it.
    seed = int(torch.randint(2**31, ()).item()) if generation_config.do_sample else 0
    step_processors = _Steps(logits_processor, generation_config)
    rule = TokenRule(
        Sampling(temperature=float(bool(generation_config.do_sample)), seed=seed), *step_processors.processors
    )
    max_new_tokens = (stopping_criteria.max_length or generation_config.max_length) - len(prompt_ids)
    ending = CriteriaEnding(max_new_tokens, criteria=stopping_criteria, prompt=input_ids, steps=step_processors)

    def report(event: WorkEvent) -> None:
        assert isinstance(event, Prefilled | Round)
        if on_tokens is not None:
            on_tokens(event.token_ids)
        for token_id in event.token_ids if streamer is not None else ():
            streamer.put(torch.tensor([token_id]))

    with shared.lock:
        method = shared.method(skipped_layers, swift_settings or stored_settings)
        completion = alone(subscribed(decoding(shared.runtime, prompt_ids, method, rule, ending), report))
    if streamer is not None:
        streamer.end()
    sequences: Any = torch.tensor([[*prompt_ids, *completion.token_ids]], device=input_ids.device)
    if not generation_config.return_dict_in_generate:
        return sequences
    return DraftedOutput(
        sequences=sequences,
        scores=cast(Any, step_processors.scores(completion.n_tokens)),
        logits=cast(Any, step_processors.logits(completion.n_tokens)),
        drafted=completion.drafted,
        accepted=completion.accepted,
    )


@dataclass
class DraftedOutput(GenerateDecoderOnlyOutput):
    """transformers' output, with the numbers of judged and of accepted draft tokens."""

    drafted: int | None = None
    accepted: int | None = None


class _Recorder(LogitsProcessor):
    """Records the scores that it receives; changes nothing."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(scores.clone())
        return scores


class _Steps:
    """The logits processors of a call; records the scores (1, vocab) before and after them if requested."""

    def __init__(self, processors: LogitsProcessorList, config: Any) -> None:
        self._before, self._after = (
            _Recorder() if config.return_dict_in_generate and is_wanted else None
            for is_wanted in (config.output_logits, config.output_scores)
        )
        all_processors = [processor for processor in (self._before, *processors, self._after) if processor is not None]
        draft_processors = [processor for processor in all_processors if type(processor) in STATELESS]
        self.processors = LogitsProcessorList(all_processors), LogitsProcessorList(draft_processors)

    def logits(self, n: int) -> tuple[Tensor, ...] | None:
        return None if self._before is None else tuple(self._before.seen[:n])

    def scores(self, n: int) -> tuple[Tensor, ...] | None:
        return None if self._after is None else tuple(self._after.seen[:n])


@dataclass(frozen=True, slots=True)
class CriteriaEnding(Ending):
    """Ends a completion by transformers' stopping criteria, evaluated after every token.

    `prompt` is int64 (1, tokens), on the device where the caller's own criteria expect ids.
    """

    criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    prompt: Tensor | None = None
    steps: _Steps | None = None

    def crop(self, generated: Sequence[int], new_ids: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        """See `Ending.crop`; the finish reason is "length" if no room is left, else "stop"."""
        assert self.prompt is not None and self.steps is not None
        is_library = all(type(criterion).__module__.startswith("transformers.") for criterion in self.criteria)
        # The library's criteria run on the CPU, because every value read from a GPU would wait for it.
        prompt = self.prompt.cpu() if is_library else self.prompt
        for n_new in range(1, len(new_ids) + 1):
            text_so_far = torch.tensor([[*generated, *new_ids[:n_new]]], device=prompt.device)
            scores: Any = self.steps.scores(len(generated) + n_new)
            if bool(self.criteria(cast(Any, torch.cat((prompt, text_so_far), dim=1)), scores).all()):
                reason: FinishReason = "length" if len(generated) + n_new >= self.max_new_tokens else "stop"
                return list(new_ids[:n_new]), reason
        return list(new_ids), None


@dataclass(slots=True)
class _Shared:
    """State shared by calls on one model object: the runtime, costs of drafts, and learnt acceptance rates.

    It is stored in the object's `__dict__`, so that it is freed with the model, and is valid for the model's weights at
    that time.
    """

    runtime: Runtime  # Holds quantised copies and captured passes; one call at a time.
    fingerprint: Sequence[Any]
    lock: RLock = field(default_factory=RLock)
    costs: CostProfile | None = None
    adaptive: dict[LayerSet, Method] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any) -> _Shared:
        """Return the state of earlier calls, or a new one if the model was moved, cast or changed."""
        state, parts = vars(model).get(STATE_ATTRIBUTE), _model_fingerprint(model)
        if state is None or state.fingerprint != parts:
            state = vars(model)[STATE_ATTRIBUTE] = cls(_build_runtime(model), parts)
        return cast(_Shared, state)

    def __reduce__(self) -> Any:
        return type(None), ()  # Do not copy or pickle this state with the model.

    def method(self, layer_set: LayerSet, settings: SwiftSettings) -> Method:
        """Return the method of the settings (SWIFT or adaptive), drafting with the layer set."""
        runtime = self.runtime
        if settings.method != "adaptive":
            return swift(layer_set, settings)
        if layer_set not in self.adaptive:
            runtime.check_layer_set(layer_set)
            if self.costs is None:
                self.costs = measure_costs(runtime, SMALLEST_BUCKET)
            self.costs = with_formats(runtime, self.costs, self.costs.missing(layer_set))
            self.adaptive[layer_set] = adaptive(SkippedTarget(layer_set), self.costs, AdaptiveSettings(STORED))
        return self.adaptive[layer_set]


def _build_runtime(model: Any) -> Runtime:
    runtime = Runtime(model, None, info_of(model, ""))
    at_speed(runtime, "auto", lay_out=False)
    runtime.hf_model = cast(Any, weakref.proxy(model))  # A weak reference: the model holds the runtime.
    return runtime


def _model_fingerprint(model: Any) -> list[Any]:
    """Return everything that a runtime reads from a model: its modules, their hooks, and the addresses of weights."""
    parts: list[Any] = []
    for module in model.modules():
        hooks = (*module._forward_hooks, *module._forward_pre_hooks, vars(module).get("forward"))
        tensors = [(p.data_ptr(), p.dtype, p.shape, p.stride()) for p in module.parameters(recurse=False)]
        # None stands for the model itself, which stores this list.
        parts.append((None if module is model else module, hooks, tensors))
    return parts


def _read_layer_set(source: LayerSet | LayerSetRecord | str | Path | None) -> tuple[LayerSet, SwiftSettings]:
    if source is None:
        raise SettingsError("custom_generate needs layer_set=: a LayerSet, a record, or the path of an exported file")
    if isinstance(source, LayerSet):
        return source, SwiftSettings()
    record = source if isinstance(source, LayerSetRecord) else LayerSetRecord.load(Path(source))
    return record.layer_set, SwiftSettings.from_json(record.settings)


def _pass_all_options() -> None:
    """Make `generate` pass `custom_generate` the options that it drops for functions: tokenizer, streamer, assistant.

    It removes `tokenizer` from its arguments, so `stop_strings` finds none, and `streamer` would never be ended. There
    is no public interface for this; if the private method does not exist, transformers stays unchanged.
    """
    extract_options = getattr(GenerationMixin, "_extract_generation_mode_kwargs", None)
    names = ["self", "custom_generate", "kwargs", "synced_gpus", "assistant_model", "streamer"]
    if extract_options is None or list(inspect.signature(extract_options).parameters) != names:
        return

    @functools.wraps(extract_options)
    def extracting(self: Any, function: Any, kwargs: dict[str, Any], *options: Any) -> Any:
        is_ours = (function.func if isinstance(function, functools.partial) else function) is custom_generate
        tokenizer = kwargs.get("tokenizer")
        passed_options = extract_options(self, function, kwargs, *options)
        dropped_options = dict(zip(names[3:], options, strict=True), tokenizer=tokenizer) if is_ours else {}
        return passed_options | {name: value for name, value in dropped_options.items() if value is not None}

    cast(Any, GenerationMixin)._extract_generation_mode_kwargs = extracting


_pass_all_options()
