"""Drafts from earlier text inside vLLM, whose speculative_config names `TextProposer` as its `custom_class`.

vLLM's own n-gram drafts have a fixed length. Here a draft follows a match while the estimated probability of a hit
(`decoding.text_matches`) exceeds the cost of one more row. Both are estimated while vLLM runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from ..decoding.hit_rates import HitRates
from ..decoding.text_matches import Matches

Ids = npt.NDArray[np.int32]  # Token ids of one request, or of all by batch position.

DECAY = 0.98  # Factor by which each new step reduces the weight of older steps.
INITIAL_ROW_COST = 0.2  # `row_cost`, in tokens, until it can be estimated.
# Minimum sum of squared deviations of row counts from their mean for estimating `row_cost`.
MIN_SPREAD = 4.0
# Multiple of the mean step time above which a step is ignored: it compiled something, or waited.
LONG_STEP = 4.0


@dataclass(slots=True)
class StepTimes:
    """Linear fit of the seconds of steps over their rows, and their tokens; the weight of old steps decays."""

    # Weighted sums over steps of 1, rows, rows², seconds, rows · seconds and tokens.
    sums: tuple[float, ...] = (0.0,) * 6

    def add(self, rows: int, seconds: float, tokens: int) -> None:
        n_steps, _, _, total_s, *_ = self.sums
        if n_steps and seconds > LONG_STEP * total_s / n_steps:
            return
        step = (1, rows, rows * rows, seconds, rows * seconds, tokens)
        self.sums = tuple(DECAY * old + new for old, new in zip(self.sums, step, strict=True))

    @property
    def row_cost(self) -> float:
        """Tokens generated in the time of one more row; a draft token pays only if it is expected to give more."""
        n_steps, rows, squares, seconds, products, tokens = self.sums
        spread = squares - rows * rows / n_steps if n_steps else 0.0
        if spread < MIN_SPREAD:
            return INITIAL_ROW_COST
        slope = (products - rows * seconds / n_steps) / spread
        return max(0.0, slope) * tokens / seconds


@dataclass(slots=True, eq=False)
class RequestText:
    """The tokens of one request read so far, with their index of matches."""

    matches: Matches
    ids: Ids = field(default_factory=lambda: np.zeros(0, np.int32))

    def is_prefix_of(self, ids: Ids) -> bool:
        """Tell whether `ids` starts with this text, which must not be empty."""
        return 0 < len(self.ids) <= len(ids) and bool((ids[: len(self.ids)] == self.ids).all())

    def read(self, ids: Ids) -> None:
        self.matches.extend(ids[len(self.ids) :].tolist())
        self.ids = ids.copy()  # Copy, because vLLM reuses its array.


class TextProposer:
    """Custom drafter for vLLM; `propose` returns up to num_speculative_tokens tokens for each request."""

    def __init__(self, vllm_config: Any) -> None:
        self._max_length = int(vllm_config.speculative_config.num_speculative_tokens)
        self._n_context = int(vllm_config.model_config.max_model_len)
        self._texts: list[RequestText] = []  # By batch position in the last step.
        self._rates = HitRates()  # Estimated over all requests so far.
        self._times = StepTimes()
        self._current_step = 0, -1, 0.0  # Rows, requests and start time of the engine's current step.

    def load_model(self, *_: Any) -> None:
        """Do nothing: there is no model."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Ids,
        token_ids_cpu: Ids,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return draft tokens for each request, as long as they are likely enough to pay.

        Args: sampled_token_ids: of this step, by batch position; empty while a prompt is read. num_tokens_no_spec:
              int (batch,), tokens of each request including sampled ones. token_ids_cpu: int32 (batch, context).
        """
        now, (rows, n_requests, started) = perf_counter(), self._current_step
        unmatched, texts = list(self._texts), list[RequestText]()
        n_continued = 0  # Requests that got tokens in this step and in an earlier one.
        for position, sampled in enumerate(sampled_token_ids):
            ids = token_ids_cpu[position, : num_tokens_no_spec[position]]
            # Batch positions shift when a request ends, so look at the same position first, then at all others.
            candidates = (*self._texts[position : position + 1], *unmatched)
            text = next((text for text in candidates if text in unmatched and text.is_prefix_of(ids)), None)
            if text is None:
                text = RequestText(Matches(self._rates))
            else:
                unmatched.remove(text)
            n_continued += bool(sampled) and len(text.ids) > 0
            if sampled:
                text.read(ids)
            texts.append(text)
        self._texts = texts
        # Otherwise the step's number of rows is unknown: it also read a prompt, or a request has ended.
        if 0 < n_continued == n_requests == len(texts):
            self._times.add(rows, now - started, sum(map(len, sampled_token_ids)))
        row_cost = self._times.row_cost
        drafts = [
            self._draft(text, row_cost) if sampled else []
            for text, sampled in zip(texts, sampled_token_ids, strict=True)
        ]
        self._current_step = len(drafts) + sum(map(len, drafts)), len(drafts), perf_counter()
        return drafts

    def _draft(self, text: RequestText, row_cost: float) -> list[int]:
        max_length = max(0, min(self._max_length, self._n_context - len(text.ids) - 1))
        return [guess.token_id for guess in text.matches.at_end().guesses(max_length, row_cost)]
