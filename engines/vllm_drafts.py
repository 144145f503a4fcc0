"""Drafts from earlier text inside vLLM, whose speculative_config names `TextProposer` as its `custom_class`.

vLLM's own n-gram drafts have a fixed length. Here a draft follows a match only while the estimated probability of a hit
(`decoding.text_matches`) exceeds the cost of one more row; both are estimated while vLLM runs.
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

FADING = 0.98  # Factor by which each new step reduces the weight of older steps.
FIRST_WORTH = 0.2  # Initial `row_worth`, in tokens, until it can be estimated.
# Minimum sum of squared deviations of row counts from their mean for estimating `row_worth`.
LEAST_SPREAD = 4.0
# Multiple of the mean step time above which a step is ignored: it compiled something, or waited.
LONG_STEP = 4.0


@dataclass(slots=True)
class StepTimes:
    """Linear fit of step seconds over rows, with the tokens generated; the weight of old steps decays.

    `sums`: weighted sums over steps of 1, rows, rows², seconds, rows · seconds and tokens.
    """

    sums: tuple[float, ...] = (0.0,) * 6

    def add(self, rows: int, seconds: float, tokens: int) -> None:
        n, _, _, before, *_ = self.sums
        if n and seconds > LONG_STEP * before / n:
            return
        step = (1, rows, rows * rows, seconds, rows * seconds, tokens)
        self.sums = tuple(FADING * old + new for old, new in zip(self.sums, step, strict=True))

    @property
    def row_worth(self) -> float:
        """Tokens generated in the time of one more row; a draft token pays only if it is expected to give more."""
        n, rows, squares, seconds, products, tokens = self.sums
        spread = squares - rows * rows / n if n else 0.0
        if spread < LEAST_SPREAD:
            return FIRST_WORTH
        slope = (products - rows * seconds / n) / spread
        return max(0.0, slope) * tokens / seconds


@dataclass(slots=True, eq=False)
class FollowedText:
    """Tokens of one request read so far, with their index of matches."""

    matches: Matches
    ids: Ids = field(default_factory=lambda: np.zeros(0, np.int32))

    def begins(self, ids: Ids) -> bool:
        """Tell whether `ids` starts with this text."""
        return 0 < len(self.ids) <= len(ids) and bool((ids[: len(self.ids)] == self.ids).all())

    def read(self, ids: Ids) -> None:
        self.matches.extend(ids[len(self.ids) :].tolist())
        self.ids = ids.copy()  # Copy, because vLLM reuses its array.


class TextProposer:
    """Custom drafter for vLLM; `propose` returns up to num_speculative_tokens tokens for each request."""

    def __init__(self, vllm_config: Any) -> None:
        self._most = int(vllm_config.speculative_config.num_speculative_tokens)
        self._n_context = int(vllm_config.model_config.max_model_len)
        self._texts: list[FollowedText] = []  # By batch position in the last step.
        self._rates = HitRates()  # Estimated over all requests so far.
        self._times = StepTimes()
        self._last = 0, -1, 0.0  # Rows, requests and start time of the current engine step.

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
        now, (rows, n_before, begun) = perf_counter(), self._last
        before, texts = list(self._texts), list[FollowedText]()
        n_going_on = 0  # Requests that got tokens in this step and in an earlier one.
        for place, sampled in enumerate(sampled_token_ids):
            ids = token_ids_cpu[place, : num_tokens_no_spec[place]]
            here = self._texts[place : place + 1]  # Batch positions shift when a request ends.
            text = next((text for text in (*here, *before) if text in before and text.begins(ids)), None)
            if text is None:
                text = FollowedText(Matches(self._rates))
            else:
                before.remove(text)
            n_going_on += bool(sampled) and len(text.ids) > 0
            if sampled:
                text.read(ids)
            texts.append(text)
        self._texts = texts
        # Otherwise the step's row count is unknown: it also read a prompt, or a request has ended.
        if 0 < n_going_on == n_before == len(texts):
            self._times.add(rows, now - begun, sum(map(len, sampled_token_ids)))
        worth = self._times.row_worth
        drafts = [
            self._draft(text, worth) if sampled else [] for text, sampled in zip(texts, sampled_token_ids, strict=True)
        ]
        self._last = len(drafts) + sum(map(len, drafts)), len(drafts), perf_counter()
        return drafts

    def _draft(self, text: FollowedText, worth: float) -> list[int]:
        most = max(0, min(self._most, self._n_context - len(text.ids) - 1))
        return [guess.token_id for guess in text.matches.at_end().guesses(most, worth)]
