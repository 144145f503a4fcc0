"""How scores become a token: biases, penalties, temperature and cuts, applied once, to draft and target alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
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

from ..core.types import Sampling
from ..models.rows import uploaded
from .grammar import GrammarMask

_BLIND = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)  # they look at scores alone
KEPT_NOISES = 64  # positions ahead of a text; 0.6 MB each for 152,000 tokens
_COLDEST = 1e-30  # below, float32 scores overflow; long before, the argmax has all of the probability


class GeneratedPenalty(LogitsProcessor):
    """Takes `presence` off the scores of tokens that stand behind the prompt, and `frequency` for each time they do."""

    def __init__(self, n_prompt: int, presence: float, frequency: float) -> None:
        self.n_prompt, self.presence, self.frequency = n_prompt, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores (1, vocab) after `input_ids` (1, tokens)."""
        vocab = scores.shape[-1]
        counts = torch.bincount(input_ids[0, self.n_prompt :], minlength=vocab)[
            :vocab
        ]  # embeddings may be padded further
        return scores - self.presence * (counts > 0) - self.frequency * counts


class TokenRule:
    """Turns a row of logits into the target's token or the draft's candidates.

    Sampling takes the argmax of the scores with Gumbel noise added, which is a draw from their softmax. The noise is a
    function of the request's seed and the token's position alone. So speculative and plain decoding of one seed give
    the same tokens, and a draft that reads the same noise proposes the target's token nearly as often as any coupling
    of the two distributions allows (Daliri et al., arXiv:2408.07978): sampling is greedy decoding of noisy scores.
    """

    def __init__(self, sampling: Sampling, processors: LogitsProcessorList) -> None:
        self.greedy = sampling.greedy
        self._seed = sampling.seed % 2**64
        self._noises: dict[int, Tensor] = {}  # by position, the latest
        self.processors = processors
        self.grammar = next((each for each in processors if isinstance(each, GrammarMask)), None)
        self._reads_text = any(not _is_blind(each) for each in processors)
        # Three streams, so that what a draft draws or a test decides never shifts the target's own draws. They differ
        # in their low 32 bits: a CPU generator reads no others of its seed.
        self._generator, self._draft_generator, self._accept_generator = (
            torch.Generator().manual_seed((sampling.seed ^ stream) % 2**63) for stream in (0, 0x9E3779B9, 0x85EBCA6B)
        )

    @classmethod
    def of(
        cls,
        sampling: Sampling,
        generation_config: Any,
        n_prompt: int = 0,
        constraints: Sequence[LogitsProcessor] = (),
    ) -> TokenRule:
        """Build the rule of a request on a model whose `generation_config` may ask for a repetition penalty.

        Args: n_prompt: tokens of the prompt, which do not count as generated. constraints: what forbids tokens, applied
              behind biases and penalties.
        """
        processors = LogitsProcessorList()
        if sampling.logit_bias:
            biases = {(token_id,): float(bias) for token_id, bias in sampling.logit_bias}
            processors.append(SequenceBiasLogitsProcessor(cast(Any, biases)))
        penalty = sampling.repetition_penalty
        if penalty is None:
            penalty = getattr(generation_config, "repetition_penalty", None)
        if penalty not in (None, 1.0):
            processors.append(RepetitionPenaltyLogitsProcessor(float(penalty)))
        if sampling.presence_penalty or sampling.frequency_penalty:
            processors.append(GeneratedPenalty(n_prompt, sampling.presence_penalty, sampling.frequency_penalty))
        processors.extend(constraints)
        if not sampling.greedy:
            if sampling.temperature != 1.0:
                processors.append(TemperatureLogitsWarper(max(float(sampling.temperature), _COLDEST)))
            if sampling.top_k:
                processors.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1.0:
                processors.append(TopPLogitsWarper(sampling.top_p))
            if sampling.min_p:
                processors.append(MinPLogitsWarper(sampling.min_p))
        return cls(sampling, processors)

    @property
    def is_argmax(self) -> bool:
        """Whether the target's token is just the argmax of its logits."""
        return self.greedy and not self.processors

    @property
    def reads_text(self) -> bool:
        """Whether scores depend on the tokens before."""
        return self._reads_text

    def scores(self, token_ids: Sequence[int], logits: Tensor) -> Tensor:
        """Return `logits` (vocab,) after all processors, in the context of `token_ids`: float32 (vocab,)."""
        scores = logits.float()
        if self.processors:
            # Only penalties read the text, and making a tensor of it costs more with every token.
            context: Any = uploaded([token_ids if self._reads_text else ()], logits.device)
            scores = self.processors(context, cast(Any, scores[None]))[0]
        return scores

    def choose(self, token_ids: Sequence[int], logits: Tensor) -> int:
        """Return the target's next token after `token_ids`."""
        return int(self.noisy(self.scores(token_ids, logits), len(token_ids)).argmax())

    def noisy(self, scores: Tensor, position: int) -> Tensor:
        """Return what the token at that position is the argmax of: `scores` (vocab,), when sampling with its noise."""
        return scores if self.greedy else scores + self._noise(position, scores)

    def _noise(self, position: int, scores: Tensor) -> Tensor:
        found = self._noises.get(position)
        if found is None or found.shape != scores.shape or found.device != scores.device:
            bits = np.random.PCG64(np.random.SeedSequence((self._seed, position)))
            drawn = np.random.Generator(bits).standard_exponential(scores.shape[-1])
            drawn = np.maximum(drawn, np.finfo(np.float64).tiny)  # a draw of 0 would win against any score
            found = uploaded(-np.log(drawn), scores.device, scores.dtype)
            if len(self._noises) >= KEPT_NOISES:
                del self._noises[min(self._noises)]
            self._noises[position] = found
        return found

    def probs(self, token_ids: Sequence[int], logits: Tensor) -> Tensor:
        """Return what a token after `token_ids` is drawn from: float64 (vocab,); greedy: all on the argmax."""
        scores = self.scores(token_ids, logits)
        if self.greedy:
            return torch.zeros(scores.shape, dtype=torch.float64).index_fill_(0, scores.argmax().cpu(), 1.0)
        return torch.softmax(scores.double(), dim=-1)

    def draw(self, probs: Tensor) -> int:
        """Draw a token of `probs` (vocab,), float64, by inversion, for verifiers that weigh two distributions."""
        return _invert(probs, self._generator)

    def draw_draft(self, probs: Tensor) -> int:
        """Draw a token as `draw` does, from the draft's stream."""
        return _invert(probs, self._draft_generator)

    def accept(self, probability: float) -> bool:
        """Return True with that probability, by a stream of its own."""
        return torch.rand((), generator=self._accept_generator, dtype=torch.float64).item() < probability

    def confidence(self, scores: Tensor) -> tuple[int, float]:
        """Return the most probable token of `scores` (vocab,) and its probability."""
        return self.confidences(scores[None])[0]

    def confidences(self, scores: Tensor) -> list[tuple[int, float]]:
        """Return `confidence` of each row of `scores` (rows, vocab), in one transfer: on a GPU each synchronises."""
        top, index = scores.max(-1)
        values, token_ids = torch.stack(((top - scores.logsumexp(-1)).double(), index.double())).tolist()
        return [(int(token_id), math.exp(value)) for token_id, value in zip(token_ids, values, strict=True)]

    def candidates(self, scores: Tensor, token_id: int, n: int) -> tuple[int, ...]:
        """Return the `n` most probable tokens, `token_id` first; fewer where the rest has no probability."""
        if n == 1:
            return (token_id,)
        values, tokens = torch.stack([part.double() for part in scores.topk(min(n, scores.shape[-1]))]).tolist()
        offered = [int(t) for t, v in zip(tokens, values, strict=True) if v > float("-inf") and t != token_id]
        return (token_id, *offered[: n - 1])


def _is_blind(processor: LogitsProcessor) -> bool:
    """Whether a processor gives the same scores whatever the text is."""
    if isinstance(processor, SequenceBiasLogitsProcessor):
        return all(len(token_ids) == 1 for token_ids in processor.sequence_bias)
    return isinstance(processor, _BLIND)


def _invert(probs: Tensor, generator: torch.Generator) -> int:
    uniform = torch.rand((), generator=generator, dtype=torch.float64).item()
    cumulative = probs.cumsum(-1)
    index = int(torch.searchsorted(cumulative, uniform * float(cumulative[-1]), right=True))
    return min(index, int(probs.nonzero()[-1]))
