"""Drafts from earlier text inside vLLM, whose speculative_config names `TextProposer` as its `custom_class`.

vLLM's own n-grams always draft a fixed number of tokens. Here a match is followed only as far as it is likely to
be right, by the rates of `decoding.text_matches`, against what a row costs: both are estimated while vLLM runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from ..decoding.text_matches import HitRates, Matches

Ids = npt.NDArray[np.int32]  # token ids of one request, or of all by place

FADING = 0.98  # weight of a step after the next one
FIRST_WORTH = 0.2  # tokens for a row's time, before that is known
LEAST_SPREAD = 4.0  # sum of squared distances of rows from their mean, below which it is not
LONG_STEP = 4.0  # times the mean: a step that compiled or waited for something


@dataclass(slots=True)
class StepTimes:
    """A line through the engine's steps, seconds by rows, and the tokens that they gave; old steps fade.

    `sums`: of 1, rows, rows², seconds, rows · seconds and tokens.
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
        """Tokens that the engine gives in the time that one more row takes: what a draft token must be worth."""
        n, rows, squares, seconds, products, tokens = self.sums
        spread = squares - rows * rows / n if n else 0.0
        if spread < LEAST_SPREAD:
            return FIRST_WORTH
        slope = (products - rows * seconds / n) / spread
        return max(0.0, slope) * tokens / seconds


@dataclass(slots=True, eq=False)
class FollowedText:
    """One request's text, as far as it was read."""

    matches: Matches
    ids: Ids = field(default_factory=lambda: np.zeros(0, np.int32))

    def begins(self, ids: Ids) -> bool:
        """Tell whether `ids` is this text, perhaps with more behind it."""
        return 0 < len(self.ids) <= len(ids) and bool((ids[: len(self.ids)] == self.ids).all())

    def read(self, ids: Ids) -> None:
        self.matches.extend(ids[len(self.ids) :].tolist())
        self.ids = ids.copy()  # vLLM writes over its own


class TextProposer:
    """vLLM's interface for a drafter of one's own; `propose` returns up to num_speculative_tokens for each request."""

    def __init__(self, vllm_config: Any) -> None:
        self._most = int(vllm_config.speculative_config.num_speculative_tokens)
        self._n_context = int(vllm_config.model_config.max_model_len)
        self._texts: list[FollowedText] = []  # by the batch's places at the last step
        self._rates = HitRates()  # over all requests so far
        self._times = StepTimes()
        self._last = 0, -1, 0.0  # rows and requests of the step under way, and when it began

    def load_model(self, *_: Any) -> None:
        """Do nothing: there is no model."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Ids,
        token_ids_cpu: Ids,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return what comes next, for each request, where that is likely enough.

        Args: sampled_token_ids: of this step, by place in the batch; none while a prompt is read. num_tokens_no_spec:
              int (places,), tokens of each request, the sampled ones included. token_ids_cpu: int32 (places, context).
        """
        now, (rows, n_before, begun) = perf_counter(), self._last
        before, texts = list(self._texts), list[FollowedText]()
        n_going_on = 0  # requests that this step gave tokens and an earlier one, too
        for place, sampled in enumerate(sampled_token_ids):
            ids = token_ids_cpu[place, : num_tokens_no_spec[place]]
            here = self._texts[place : place + 1]  # others' places change when one ends
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
        if 0 < n_going_on == n_before == len(texts):  # else its rows are not known: of a prompt, or of one that ended
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
