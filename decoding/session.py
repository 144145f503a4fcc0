"""From a prompt to token ids and back: chat templates, turns, stop tokens, and the model's own defaults.

`custom_generate` is the entry for transformers users: `model.generate(..., custom_generate=swiftopt.custom_generate,
layer_set=…)`. transformers 5.23 passes a callable only the options that it names as parameters, and never the
`streamer`: pass `on_tokens` instead. Logits processors and stopping criteria are the caller's own; a processor is
applied to each tree row that is visited, with the ids that lead to that row, and a criterion to each committed token.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple, cast

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    StoppingCriteriaList,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..core.costs import CostProfile
from ..core.errors import ContextOverflow, InvalidInput, SettingsError
from ..core.records import LayerSetRecord
from ..core.serialization import LARGEST
from ..core.settings import STORED, SwiftSettings
from ..core.streams import EMPTY_STOP
from ..core.types import Completion, FinishReason, LayerSet, Prompt, Sampling, n_turns
from ..models.costs import SMALLEST_BUCKET, measure_costs, with_formats
from ..models.loading import at_speed, info_of
from ..models.runtime import Runtime
from .context import Ending, ResumePoint, TokenRule
from .draft_models import SkippedTarget
from .engine import Work, alone, intercept
from .grammar import Grammar
from .loop import Prefilled, Round, decoding
from .methods import Method, swift
from .methods.adaptive import AdaptiveSettings, adaptive

LONG, PIECE = 16, 4  # characters per position of the context: beyond, a text is looked at first; of a piece then
KEPT = "_swiftopt"  # under which a model object has what its calls of `custom_generate` share


class Turn(NamedTuple):
    """A completion of a prompt; of several turns each prompt has an id of its own, `id#1`, `id#2`, …"""

    prompt: Prompt
    completion: Completion


@dataclass(eq=False)
class Session:
    """Decodes prompts on one runtime with one way of sampling; every completion starts from the request's seed.

    Args:   stop_token_ids: tokens that end a completion beside the model's own. ignore_eos: the model's own do not end
            it. min_new_tokens: before so many no stop token is chosen, and no stop string ends it. grammar: what
            completions keep to, by lossless methods only; where it allows nothing more, they end.
    Raises: SettingsError: a stop string is empty, a number is below 0, or the model has no such token.
            InvalidInput: the grammar cannot be read with the model's tokenizer.
    """

    runtime: Runtime
    sampling: Sampling
    max_new_tokens: int
    stop_strings: Sequence[str] = ()
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    min_new_tokens: int = 0
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if "" in self.stop_strings:
            raise SettingsError(EMPTY_STOP, "stop")
        for name in ("max_new_tokens", "min_new_tokens"):
            if getattr(self, name) < 0:
                raise SettingsError(f"{name} {getattr(self, name)} is out of range: use 0 or more", name)
        self._check_tokens("stop_token_ids", self.stop_token_ids)
        self._check_tokens("logit_bias", [token_id for token_id, _ in self.sampling.logit_bias])
        self.generation_config: Any = getattr(self.runtime.hf_model, "generation_config", None)
        if self.grammar is not None:
            self.rule()  # one that cannot be read with this tokenizer is refused here

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, up to its first turn.

        Raises: InvalidInput: the model has no tokenizer or chat template for it, or it has no tokens.
        """
        return self._encode(prompt, self._messages(prompt))

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a text, possibly none.

        Raises: InvalidInput: the model has no tokenizer. ContextOverflow: the text is much longer than the context.
        """
        tokenizer = self._tokenizer()
        self._check_length(text)
        return list(tokenizer(text)["input_ids"])

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        template: Mapping[str, Any] = {},
    ) -> list[int]:
        """Return the token ids of a chat by the model's template, which gets the `tools` and the values of `template`.

        Raises: InvalidInput: there is none, or it refuses the messages. ContextOverflow: the chat is much longer than
                the context.
        """
        return self._templated("the prompt", messages, {"tools": list(tools) or None, **template})

    def check(self, prompt: Prompt) -> int:
        """Return the positions that the prompt's first turn needs, completion included.

        Raises: ContextOverflow, InvalidInput: it cannot be decoded on this model; the message names the prompt.
        """
        ids = self.encode(prompt)
        with _naming(prompt.id):
            self.runtime.check_context(len(ids), self.room(prompt))
        return len(ids) + self.room(prompt)

    def run(self, prompt: Prompt, method: Method) -> list[Turn]:
        """Decode all turns of a prompt by itself; see `request`."""
        return alone(self.request(prompt, method))

    def request(
        self,
        prompt: Prompt,
        method: Method,
        answers: Sequence[str] = (),
        resume_from: ResumePoint | None = None,
        **options: Any,
    ) -> Work[list[Turn]]:
        """Decode a prompt, pass by pass; yield a `Turn` per turn of the user, later ones seeing the earlier answers.

        Beside them come the events of `decoding`, which takes the `options`.

        Args:   answers: texts of the turns that are done, which are not decoded again. resume_from: where the turn
                after them was interrupted.
        Raises: ContextOverflow: a turn with all before it does not fit; the turns before it were yielded.
                SettingsError: there is a grammar, which a lossy method would not keep to.
        """
        if self.grammar is not None and method.lossy:
            raise SettingsError(f"method {method.name} is lossy and keeps to no grammar: use a lossless one")
        said, turns = list(answers), list[Turn]()
        while len(said) < n_turns(prompt):
            turn = turn_of(prompt, len(said))
            ids = self._encode(turn, self._messages(prompt, said))
            with _naming(turn.id):
                ending, rule = self.ending(self.room(turn), prompt.stop), self.rule(len(ids), prompt.sample)
                done = yield from decoding(self.runtime, ids, method, rule, ending, resume_from, **options)
            said.append(done.text)
            resume_from = None
            turns.append(Turn(turn, done))
            yield turns[-1]
        return turns

    def rule(self, n_prompt: int = 0, sample: int = 0) -> TokenRule:
        """Return a new rule for a prompt of so many tokens; its draws start from the seed plus the sample's number."""
        stops, constraints = sorted(self._stop_token_ids()), list[LogitsProcessor]()
        if self.min_new_tokens and stops:
            device = str(self.runtime.device)
            constraints.append(MinNewTokensLengthLogitsProcessor(n_prompt, self.min_new_tokens, stops, device))
        if self.grammar is not None:
            tokenizer, own_stops = self.runtime.tokenizer, sorted(self._own_stop_token_ids())
            constraints.append(self.grammar.mask(tokenizer, self.runtime.vocab_size, n_prompt, own_stops))
        sampling = replace(self.sampling, seed=(self.sampling.seed + sample) % LARGEST) if sample else self.sampling
        return TokenRule.of(sampling, self.generation_config, n_prompt, constraints)

    def ending(self, max_new_tokens: int, stop: Sequence[str] = ()) -> Ending:
        """Return when a completion of this session ends; `stop` are strings beside the session's own."""
        stops, strings = self._stop_token_ids(), tuple(dict.fromkeys((*self.stop_strings, *stop)))
        return Ending(max_new_tokens, stops, strings, self.to_text, self.min_new_tokens)

    def room(self, prompt: Prompt) -> int:
        return prompt.max_new_tokens or self.max_new_tokens

    def _messages(self, prompt: Prompt, said: Sequence[str] = ()) -> Sequence[Mapping[str, str]] | None:
        if prompt.messages:
            return prompt.messages
        texts = [text for pair in zip(prompt.turns, [*said, None], strict=False) for text in pair if text is not None]
        roles = cycle(("user", "assistant"))
        return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)] or None

    def _encode(self, prompt: Prompt, messages: Sequence[Mapping[str, str]] | None) -> list[int]:
        tokenizer = self._tokenizer()
        if prompt.token_ids:
            ids = list(prompt.token_ids)
        elif messages is None:
            ids = list(tokenizer(prompt.text)["input_ids"])
        else:
            ids = self._templated(f"prompt {prompt.id!r}", messages)
        if not ids:
            raise InvalidInput(f"prompt {prompt.id!r} has no tokens: write at least one word")
        return ids

    def _check_tokens(self, what: str, token_ids: Sequence[int]) -> None:
        last = self.runtime.vocab_size - 1
        for token_id in token_ids:
            if not 0 <= token_id <= last:
                words = f"{what} names token {token_id}, but this model has tokens 0 to {last}"
                raise SettingsError(f"{words}: use ids of its own tokenizer", what)

    def _tokenizer(self) -> Any:
        if self.runtime.tokenizer is None:
            raise InvalidInput("this model has no tokenizer: put its tokenizer's files next to its weights")
        return self.runtime.tokenizer

    def _templated(self, name: str, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any] = {}) -> list[int]:
        tokenizer = self.runtime.tokenizer
        if getattr(tokenizer, "chat_template", None) is None:
            raise InvalidInput(
                f"{name} is a chat, but this model's tokenizer has no chat template:"
                " give plain text, or use an instruct model"
            )
        if "developer" not in str(tokenizer.chat_template):  # it may leave out what a role says that it does not know
            messages = [{**each, "role": "system"} if each.get("role") == "developer" else each for each in messages]
        values = {"add_generation_prompt": True, **values}
        try:
            if len(str(messages)) + len(str(values)) > LONG * self.runtime.max_positions:
                as_text = {"tokenize": False, "sanitize_control_tokens": False}
                self._check_length(tokenizer.apply_chat_template(list(messages), **{**values, **as_text}))
            encoded = tokenizer.apply_chat_template(list(messages), return_dict=True, **values)
        except ContextOverflow:
            raise
        except (TemplateError, TypeError, ValueError) as error:  # as of a role that the model was not trained on
            raise InvalidInput(
                f"{name} does not suit this model's chat template ({error}): change its messages"
            ) from error
        return list(encoded["input_ids"])

    def _check_length(self, text: str) -> None:
        """Check that a very long text fits, piece by piece: all of it takes seconds a megabyte, while others wait.

        Raises: ContextOverflow: it does not.
        """
        most, tokenizer = self.runtime.max_positions, self._tokenizer()
        n_tokens, starts = 0, range(0, len(text) if len(text) > LONG * most else 0, PIECE * most)
        for n_pieces, start in enumerate(starts):
            n_tokens += len(tokenizer(text[start : start + PIECE * most], add_special_tokens=False)["input_ids"])
            if n_tokens - n_pieces > most:  # where a word is cut it may have a token more
                raise ContextOverflow(
                    f"a prompt of more than {n_tokens} tokens does not fit the model's context of {most}: shorten it"
                )

    def _stop_token_ids(self) -> frozenset[int]:
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else self._own_stop_token_ids())

    def _own_stop_token_ids(self) -> frozenset[int]:
        """Return the generation config's stop tokens, else the tokenizer's."""
        owners = (self.generation_config, self.runtime.tokenizer)
        given = (getattr(owner, "eos_token_id", None) for owner in owners)
        stops = next((each for each in given if each is not None), ())
        return frozenset([stops] if isinstance(stops, int) else stops)

    def to_text(self, token_ids: Sequence[int]) -> str:
        """Return what tokens say, without those that are no text."""
        return str(self.runtime.tokenizer.decode(list(token_ids), skip_special_tokens=True))


def turn_of(prompt: Prompt, number: int) -> Prompt:
    """Return the prompt under the id of one of its turns (0-based), which is its own where there is only one."""
    return prompt if len(prompt.turns) < 2 else replace(prompt, id=f"{prompt.id}#{number + 1}")


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
    quantised copies, CUDA graphs and what was learnt of acceptance stay with the model object for the next one, until
    its weights are others. Calls on one object run one after the other.

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
    shared, prompt_ids = _Shared.of(model), input_ids[0].tolist()
    # One draw from torch's global generator seeds the request, so that torch.manual_seed governs it as usual.
    seed = int(torch.randint(2**31, ()).item()) if generation_config.do_sample else 0
    rule = TokenRule(Sampling(temperature=float(generation_config.do_sample), seed=seed), logits_processor)
    room = generation_config.max_length - len(prompt_ids)
    ending = CriteriaEnding(room, prompt_ids=prompt_ids, criteria=stopping_criteria)

    def report(event: Prefilled | Round) -> Iterator[Any]:
        if on_tokens is not None:
            on_tokens(event.token_ids)
        yield from ()

    with shared.lock:
        method = shared.method(skipped, swift_settings or settings)
        done = alone(intercept(decoding(shared.runtime, prompt_ids, method, rule, ending), report))
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
class _Shared:
    """What calls on one model object share: a runtime, costs of its drafts, and what was learnt of their acceptance.

    It lies in the object's `__dict__`, to be freed with the model, and counts for the weights that the model had.
    """

    runtime: Runtime  # with copies and captured passes, one at a time
    parts: Sequence[Any]
    lock: RLock = field(default_factory=RLock)
    costs: CostProfile | None = None
    adaptive: dict[LayerSet, Method] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any) -> _Shared:
        """Return that of earlier calls, unless the model was moved, cast or changed since."""
        known, parts = vars(model).get(KEPT), _parts(model)
        if known is None or known.parts != parts:
            known = vars(model)[KEPT] = cls(_runtime_of(model), parts)
        return cast(_Shared, known)

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the model begins anew

    def method(self, layer_set: LayerSet, settings: SwiftSettings) -> Method:
        """SWIFT's drafting with the set, or adaptive drafts where the settings say so."""
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


def _runtime_of(model: Any) -> Runtime:
    runtime = Runtime(model, None, info_of(model, ""))
    at_speed(runtime, "auto", lay_out=False)
    runtime.hf_model = cast(Any, weakref.proxy(model))  # which holds the runtime
    return runtime


def _parts(model: Any) -> list[Any]:
    """Return what a runtime takes from a model: its modules, what else they do when called, and where weights lie."""
    found: list[Any] = []
    for module in islice(model.modules(), 1, None):
        hooks = (*module._forward_hooks, *module._forward_pre_hooks, vars(module).get("forward"))
        own = [(p.data_ptr(), p.dtype, p.shape, p.stride()) for p in module.parameters(recurse=False)]
        found.append((module, hooks, own))
    return found


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


@contextmanager
def _naming(prompt_id: str) -> Iterator[None]:
    """Say which prompt does not fit the context."""
    try:
        yield
    except ContextOverflow as error:
        raise ContextOverflow(f"prompt {prompt_id!r}: {error}") from error
