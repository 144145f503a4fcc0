"""A running request: its rule for choosing tokens, its ending conditions, and its committed tokens.

Biases, penalties, temperature and cuts are applied here once, to draft and target alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..core.types import FinishReason, Sampling
from ..models.buffer import KVBuffer
from ..models.runtime import Runtime
from ..models.transfers import uploaded
from .corpus import TaskCorpus
from .grammar import GrammarMask
from .load import Load

# Processors that depend on the scores alone, not on the earlier tokens.
_TEXT_INDEPENDENT = TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper
KEPT_NOISES = 64  # Maximum positions whose noise is cached; 0.6 MB each at 152,000 tokens.
Drafted = Sequence[int] | Sequence[Tensor]  # Token ids, or tensors (1,) that their device may still be computing.
_SMALLEST_DIVISOR = 1e-15  # Minimum temperature and repetition penalty: dividing by less overflows float32.


class GeneratedPenalty(LogitsProcessor):
    """Subtracts `presence` from the score of each generated token, and `frequency` per occurrence."""

    def __init__(self, n_prompt: int, presence: float, frequency: float) -> None:
        self.n_prompt, self.presence, self.frequency = n_prompt, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores (1, vocab) after `input_ids` (1, tokens)."""
        vocab = scores.shape[-1]
        generated = input_ids[0, self.n_prompt :].clamp(max=vocab)  # A padded embedding can give ids beyond the scores.
        counts = scores.new_zeros(vocab + 1).index_add(0, generated, scores.new_ones(generated.shape))[:vocab]
        return scores - self.presence * (counts > 0) - self.frequency * counts


class TopP(TopPLogitsWarper):
    """transformers' top-p, faster on a CPU: it sorts only tokens that may be kept, rarely more than 1 %."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores (1, vocab), minus infinity where a token is cut off."""
        if scores.device.type != "cpu":  # Reading the count from a GPU would synchronise with it.
            return cast(Tensor, super().__call__(cast(Any, input_ids), cast(Any, scores)))
        probs = scores[0].softmax(dim=-1)
        # Tokens too improbable to survive top_p, even together.
        is_improbable = probs < probs.max().clamp(max=(1 - self.top_p) / len(probs))
        probable_ids = (~is_improbable).nonzero()[:, 0]
        sorted_probs, order = probs[probable_ids].sort()
        is_kept = sorted_probs.cumsum(dim=0) + probs.where(is_improbable, 0.0).sum() > 1 - self.top_p
        is_kept[-1] = True
        kept_ids = probable_ids[order[is_kept]]
        return torch.full_like(scores, -math.inf).index_copy_(1, kept_ids, scores[:, kept_ids])


class TokenRule:
    """Turns a row of logits into the target's token or the draft's candidates.

    Sampling takes the argmax of the scores with Gumbel noise added, which is a draw from their softmax. The noise is a
    function of the request's seed and the token's position alone. So speculative and plain decoding of one seed give
    the same tokens, and a draft that reads the same noise proposes the target's token nearly as often as any coupling
    of the two distributions allows (Daliri et al., arXiv:2408.07978): sampling is greedy decoding of noisy scores.
    """

    def __init__(
        self, sampling: Sampling, processors: LogitsProcessorList, drafting: LogitsProcessorList | None = None
    ) -> None:
        """Args: drafting: the processors that also apply to drafts (None: all).

        The other processors see only the target's scores, once per committed token and in order.
        """
        self.greedy = sampling.greedy
        self._seed = sampling.seed % 2**64
        self._noises: dict[int, Tensor] = {}  # Noise by position; only the latest are kept.
        self.processors = processors
        self.drafting = processors if drafting is None else drafting
        self.in_order = len(self.drafting) < len(processors)  # Whether scores must be computed token by token.
        self.grammar = next((processor for processor in processors if isinstance(processor, GrammarMask)), None)
        # Whether any processor depends on the earlier tokens.
        self.reads_text = any(not _ignores_text(processor) for processor in processors)
        # Three independent streams keep the target's draws unaffected by drafting and acceptance. Their seeds differ in
        # the low 32 bits because a CPU generator uses only those.
        self._streams = [
            torch.Generator().manual_seed((sampling.seed ^ stream) % 2**63) for stream in (0, 0x9E3779B9, 0x85EBCA6B)
        ]
        self._generator, self._draft_generator, self._accept_generator = self._streams
        self._n_drawn = [0, 0, 0]
        self._peeked: float | None = None  # Next number of the first stream, if already drawn by `peek`.

    @classmethod
    def of(
        cls, sampling: Sampling, generation_config: Any, n_prompt: int = 0, constraints: Sequence[LogitsProcessor] = ()
    ) -> TokenRule:
        """Build the rule of a request on a model whose `generation_config` may ask for a repetition penalty.

        Args: n_prompt: number of prompt tokens, which do not count as generated. constraints: processors that forbid
              tokens, applied after biases and penalties.
        """
        processors = LogitsProcessorList()
        if sampling.logit_bias:
            biases = {(token_id,): float(bias) for token_id, bias in sampling.logit_bias}
            processors.append(SequenceBiasLogitsProcessor(cast(Any, biases)))
        penalty = sampling.repetition_penalty
        if penalty is None:
            penalty = getattr(generation_config, "repetition_penalty", None)
        if penalty not in (None, 1.0):
            processors.append(RepetitionPenaltyLogitsProcessor(max(float(penalty), _SMALLEST_DIVISOR)))
        if sampling.presence_penalty or sampling.frequency_penalty:
            processors.append(GeneratedPenalty(n_prompt, sampling.presence_penalty, sampling.frequency_penalty))
        processors.extend(constraints)
        if not sampling.greedy:
            if sampling.temperature != 1.0:
                processors.append(TemperatureLogitsWarper(max(float(sampling.temperature), _SMALLEST_DIVISOR)))
            if sampling.top_k:
                processors.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1.0:
                processors.append(TopP(sampling.top_p))
            if sampling.min_p:
                processors.append(MinPLogitsWarper(sampling.min_p))
        return cls(sampling, processors)

    @property
    def is_argmax(self) -> bool:
        """Whether the target's token is just the argmax of its logits."""
        return self.greedy and not self.processors

    def scores(self, token_ids: Sequence[int] | Tensor, logits: Tensor, of_target: bool = False) -> Tensor:
        """Return `logits` (vocab,) after the processors, in the context of `token_ids`: float32 (vocab,).

        Args: of_target: the logits are the target's, and the resulting token will be committed.
        """
        processors = self.processors if of_target else self.drafting
        # Copy if a caller's processor may write into the scores.
        scores = logits.to(torch.float32, copy=of_target and self.in_order)
        if processors:
            context: Any = uploaded(token_ids, logits.device)[None]
            processed: Any = scores[None]
            for processor in processors:  # LogitsProcessorList.__call__ would inspect every signature for every token.
                processed = processor(context, processed)
            scores = processed[0]
        return scores

    def noisy(self, scores: Tensor, position: int) -> Tensor:
        """Return `scores` (vocab,) plus the position's sampling noise, if any; their argmax is the sampled token."""
        return scores if self.greedy else scores + self._noise(position, scores)

    def _noise(self, position: int, scores: Tensor) -> Tensor:
        noise = self._noises.get(position)
        if noise is None or noise.shape != scores.shape or noise.device != scores.device:
            bit_generator = np.random.PCG64(np.random.SeedSequence((self._seed, position)))
            exponentials = np.random.Generator(bit_generator).standard_exponential(scores.shape[-1])
            # Avoid infinite noise, which would beat any score.
            exponentials = np.maximum(exponentials, np.finfo(np.float64).tiny)
            noise = uploaded(-np.log(exponentials), scores.device, scores.dtype)
            if len(self._noises) >= KEPT_NOISES:
                del self._noises[min(self._noises)]
            self._noises[position] = noise
        return noise

    def forget_before(self, position: int) -> None:
        """Drop the cached noise of earlier positions."""
        self._noises = {
            noise_position: noise for noise_position, noise in self._noises.items() if noise_position >= position
        }

    def probs(self, scores: Tensor) -> Tensor:
        """Return the token distribution of `scores` (vocab,): float64 (vocab,); one-hot if greedy."""
        if self.greedy:
            return torch.zeros(scores.shape, dtype=torch.float64).index_fill_(0, scores.argmax().cpu(), 1.0)
        return torch.softmax(scores.double(), dim=-1)

    def peek(self, probs: Tensor) -> Tensor:
        """Draw a token from each of `probs` (…, vocab) by inversion with one random number: int64 (…, 1), same device.

        For verifiers that weigh two distributions. All draws before `spend` use the same number.
        """
        if self._peeked is None:
            self._peeked = self._uniform(0)
        return invert_cdf(probs, self._peeked)

    def spend(self) -> None:
        """Consume the random number that `peek` used."""
        self._peeked = None

    def draw_drafts(self, probs: Tensor) -> Tensor:
        """Draw a token from each of `probs` (…, vocab) by inversion, with the draft's stream: int64 (…, 1)."""
        uniforms = [self._uniform(1) for _ in range(math.prod(probs.shape[:-1]))]
        if probs.dim() == 1:
            return invert_cdf(probs, uniforms[0])
        return invert_cdf(probs, uploaded(uniforms, probs.device, torch.float64).view(*probs.shape[:-1], 1))

    def accept(self, probability: float) -> bool:
        """Return True with that probability, using the acceptance stream of random numbers."""
        return self._uniform(2) < probability

    @property
    def n_drawn(self) -> tuple[int, ...]:
        """Count of numbers consumed from each random stream."""
        n_target_draws, *other_counts = self._n_drawn
        return n_target_draws - (self._peeked is not None), *other_counts

    def skip(self, n_drawn: Sequence[int]) -> None:
        """Skip the numbers that an interrupted rule of the same seed had consumed."""
        for stream, n_numbers in enumerate(n_drawn):
            # Advance the generator as n single draws would.
            torch.rand(n_numbers, generator=self._streams[stream], dtype=torch.float64)
            self._n_drawn[stream] += n_numbers

    def _uniform(self, stream: int) -> float:
        self._n_drawn[stream] += 1
        return torch.rand((), generator=self._streams[stream], dtype=torch.float64).item()

    def confidence(self, scores: Tensor) -> tuple[int, float]:
        """Return the most probable token of `scores` (vocab,) and its probability."""
        return self.confidences(scores[None])[0]

    def confidences(self, scores: Tensor) -> list[tuple[int, float]]:
        """Return `confidence` of each row of `scores` (rows, vocab), in one transfer: on a GPU each synchronises."""
        token_ids, logprobs = likeliest(scores).tolist()
        return [(int(token_id), math.exp(logprob)) for token_id, logprob in zip(token_ids, logprobs, strict=True)]

    def candidates(self, scores: Tensor, token_id: int, n: int) -> tuple[int, ...]:
        """Return the `n` most probable tokens, `token_id` first; fewer if other tokens have probability 0."""
        if n == 1:
            return (token_id,)
        other_ids, other_scores = most_probable(scores, n).tolist()
        return possible_candidates(token_id, other_ids, other_scores, n)


def likeliest(scores: Tensor) -> Tensor:
    """Return the most probable token of each row of `scores` (rows, vocab), and its log probability.

    float64 (2, rows), on the device, which may still be computing them.
    """
    top_scores, token_ids = scores.max(-1)
    return torch.stack((token_ids.double(), (top_scores - scores.logsumexp(-1)).double()))


def most_probable(scores: Tensor, n: int) -> Tensor:
    """Return the `n` most probable tokens by `scores` (vocab,), and their scores: float64 (2, n), on the device."""
    top_scores, token_ids = scores.topk(min(n, scores.shape[-1]))
    return torch.stack((token_ids.double(), top_scores.double()))


def possible_candidates(token_id: int, other_ids: Sequence[float], scores: Sequence[float], n: int) -> tuple[int, ...]:
    """Return up to `n` tokens: `token_id`, then those of `other_ids` with nonzero probability, most probable first."""
    possible_ids = [
        int(other_id)
        for other_id, score in zip(other_ids, scores, strict=True)
        if score > float("-inf") and other_id != token_id
    ]
    return (token_id, *possible_ids[: n - 1])


def _ignores_text(processor: LogitsProcessor) -> bool:
    """Whether a processor ignores the text and depends on the scores alone."""
    if isinstance(processor, SequenceBiasLogitsProcessor):
        return all(len(token_ids) == 1 for token_ids in processor.sequence_bias)
    return isinstance(processor, _TEXT_INDEPENDENT)


def invert_cdf(probs: Tensor, uniform: float | Tensor) -> Tensor:
    """Return for each of `probs` (…, n) the index whose interval of [0, 1) contains `uniform`: int64 (…, 1)."""
    cumulative = probs.cumsum(-1)
    total = cumulative[..., -1:].contiguous()
    index = torch.searchsorted(cumulative, uniform * total, right=True)
    # Rounding may push the index past the last possible token.
    return index.minimum(torch.searchsorted(cumulative, total))


@dataclass(slots=True)
class Tally:
    """Counters and times of a completion in progress.

    `rounds` counts target passes after the prefill; `by_draft_length` counts them by accepted tokens. `estimated` is
    their cost by the drafter's own estimate, in plain passes. `accepted_prediction` and `rejected_prediction` count
    drafted tokens from the request's prediction. `n_cached` tokens of the prompt had been read by another request.
    `crowded` counts rounds in which drafts did not pay because too many other requests ran. `elapsed_s` are the seconds
    before `started` (a reading of `perf_counter`), spent in an earlier process of a resumed request.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    widths: dict[int, int] = field(default_factory=dict)
    per_position: list[int] = field(default_factory=list)
    by_draft_length: dict[int, list[int]] = field(default_factory=dict)
    refused: int = 0
    estimated: float | None = None
    optimise_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    prefill_s: float = 0.0
    accepted_prediction: int = 0
    rejected_prediction: int = 0
    n_cached: int = 0
    crowded: int = 0
    elapsed_s: float = 0.0
    started: float = field(default_factory=perf_counter)

    @property
    def total_s(self) -> float:
        return self.elapsed_s + perf_counter() - self.started

    def copied(self, elapsed_s: float) -> Tally:
        """Return a copy whose clock starts now at `elapsed_s` seconds."""
        return replace(deepcopy(self), elapsed_s=elapsed_s, started=perf_counter())


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """State to resume a request from, possibly in another process, after an interruption between two passes.

    `token_ids` are those generated so far, at least one; `searched`: the search of the round in progress is done;
    `finish`: nothing is left to decode; `n_drawn` is that of the rule. The drafter has already learnt from the first
    `n_learnt` tokens of the text for later requests.
    """

    token_ids: tuple[int, ...]
    tally: Tally
    searched: bool = False
    finish: FinishReason | None = None
    n_drawn: tuple[int, ...] = ()
    n_learnt: int = 0


@dataclass(slots=True)
class Context:
    """A request in flight.

    Slots 0 … n-2 of `buffer` hold the target's keys and values of `token_ids`; the last token, the root of the next
    draft, will go to slot n-1, after which drafts and scratch rows are written. `searched`, `finish` and `n_learnt`
    are as in `ResumePoint`. `logprobs` is the number of alternatives per token besides its own log probability; None:
    no log probabilities. `prediction` are tokens that the caller expects after the prompt. `corpus`: finished answers
    to draft from. `looks_back`: number of committed tokens that a search will score again. `states`: the target's
    states after its last layer at the newest positions before the root, (rows, hidden_size) each, until a draft model
    takes them; None: not kept.
    """

    runtime: Runtime
    buffer: KVBuffer
    rule: TokenRule
    token_ids: list[int]
    n_prompt: int
    tally: Tally = field(default_factory=Tally)
    load: Load = field(default_factory=Load)  # Load of the engine that runs the request.
    logprobs: int | None = None
    prediction: Sequence[int] = ()
    corpus: TaskCorpus | None = None
    searched: bool = False
    finish: FinishReason | None = None
    n_learnt: int = 0
    looks_back: int = 0
    states: list[Tensor] | None = None
    _text: Tensor | None = None  # Part of `token_ids` already copied to the device.

    @property
    def root_slot(self) -> int:
        """Slot of the last committed token's keys and values."""
        return len(self.token_ids) - 1

    @property
    def generated(self) -> list[int]:
        return self.token_ids[self.n_prompt :]

    @property
    def capture(self) -> dict[int, list[Tensor]] | None:
        """The `capture` of passes (`Pass`) over committed rows, which provides `states`."""
        return None if self.states is None else {self.runtime.n_layers: self.states}

    def keep_states(self, captured: Sequence[Tensor], rows: Sequence[int]) -> None:
        """Add the states of committed rows of a round's pass to `states`, if they are kept."""
        if self.states is not None:
            (of_pass,) = captured
            is_chain = rows[-1] == len(rows) - 1
            self.states.append(of_pass[: len(rows)] if is_chain else of_pass[uploaded(rows, of_pass.device)])

    @property
    def reads_late(self) -> bool:
        """Whether tokens may stay on the device and be read together later, which saves synchronisation."""
        # A grammar needs the tokens on the CPU.
        return self.runtime.reads_late and self.rule.grammar is None and not self.rule.in_order

    def text(self, device: torch.device) -> Tensor:
        """Return the committed tokens, int64 (tokens,), on the device of the request's logits."""
        if self._text is None:
            self._text = uploaded(self.token_ids, device)
        elif len(self._text) < len(self.token_ids):
            self._text = torch.cat((self._text, uploaded(self.token_ids[len(self._text) :], device)))
        return self._text

    def confidences(self, logits: Tensor) -> list[tuple[int, float]]:
        """Return `TokenRule.confidences` of a draft's `logits` (rows, vocab); only for a rule that takes the argmax."""
        native_passes = self.runtime.native
        if native_passes is None or logits.dtype != self.runtime.dtype:
            return self.rule.confidences(logits.float())
        return [
            (token_id, math.exp(logprob)) for token_id, logprob in zip(*native_passes.likeliest(logits), strict=True)
        ]

    def scores(self, drafted: Drafted, logits: Tensor, of_target: bool = False) -> Tensor:
        """Return `TokenRule.scores` of `logits` (vocab,) after the committed tokens and the `drafted` ones.

        If the rule does not read the text, only the number of `drafted` tokens matters, not their values.
        """
        if not self.rule.reads_text:
            return self.rule.scores((), logits, of_target)
        is_on_device = len(drafted) > 0 and isinstance(drafted[0], Tensor)
        token_tensors: Any = drafted if is_on_device else [uploaded(drafted, logits.device)]
        return self.rule.scores(torch.cat((self.text(logits.device), *token_tensors)), logits, of_target)

    def noisy_scores(self, drafted: Drafted, logits: Tensor, of_target: bool = False) -> Tensor:
        """Return scores whose argmax is the token after `drafted`, with the sampling noise of its position added."""
        return self.rule.noisy(self.scores(drafted, logits, of_target), len(self.token_ids) + len(drafted))

    def choose(self, drafted: Drafted, logits: Tensor) -> int:
        """Return the token that the target chooses after `drafted`: argmax of its `logits` (vocab,), or a draw."""
        return int(self.noisy_scores(drafted, logits, of_target=True).argmax())

    def resume_point(self) -> ResumePoint:
        """Return the request's resumable state; call it between passes only."""
        tally = self.tally.copied(self.tally.total_s)
        return ResumePoint(tuple(self.generated), tally, self.searched, self.finish, self.rule.n_drawn, self.n_learnt)


@dataclass(frozen=True, slots=True)
class Ending:
    """Conditions that end a completion: a stop token, a stop string, or the length.

    Neither stop tokens nor stop strings count before they end after the first `min_new_tokens` tokens.
    """

    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    to_text: Callable[[Sequence[int]], str] | None = field(default=None, repr=False)
    min_new_tokens: int = 0

    def crop(self, generated: Sequence[int], new_ids: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        """Return `new_ids` up to the completion's end, and the finish reason; None if it continues."""
        room = self.max_new_tokens - len(generated)
        for n_new, token_id in enumerate(new_ids[:room], 1):
            if len(generated) + n_new <= self.min_new_tokens:
                continue
            if token_id in self.stop_token_ids:
                return list(new_ids[:n_new]), "stop"
            if self.stop_strings and self._has_stop([*generated, *new_ids[:n_new]]):
                return list(new_ids[:n_new]), "stop_string"
        return list(new_ids[:room]), "length" if len(new_ids) >= room else None

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the completion as text, cut where the first stop string that counts begins; "" without a tokenizer."""
        if self.to_text is None:
            return ""
        text = self.to_text(token_ids)
        return text[: self._find_stop(text, token_ids[: self.min_new_tokens])]

    def _find_stop(self, text: str, ignored_ids: Sequence[int]) -> int | None:
        """Return the position of the first stop string that does not end within the text of `ignored_ids`."""
        n_ignored = 0
        if self.stop_strings and ignored_ids:
            assert self.to_text is not None
            n_ignored = len(self.to_text(ignored_ids))
        stop_positions = [text.find(stop, max(0, n_ignored - len(stop) + 1)) for stop in self.stop_strings]
        return min((position for position in stop_positions if position >= 0), default=None)

    def _has_stop(self, token_ids: Sequence[int]) -> bool:
        """Return whether the last token has completed a stop string that counts."""
        assert self.to_text is not None
        # Each visible token has at least one byte of UTF-8. Add 8 for special tokens and for characters cut at the
        # start.
        n_tail = max(len(stop.encode(errors="surrogatepass")) for stop in self.stop_strings) + 8
        tail_ids = token_ids[-n_tail:]
        n_ignored = max(0, self.min_new_tokens - (len(token_ids) - len(tail_ids)))
        return self._find_stop(self.to_text(tail_ids), tail_ids[:n_ignored]) is not None
