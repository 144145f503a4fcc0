"""Recorded completions, and the windows of them on which layer sets are judged, for comparisons of searches."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import ClassVar

import torch

from ..core.costs import CostProfile, context_bucket
from ..core.errors import InvalidInput
from ..core.layer_sets import LayerSet
from ..core.serialization import Record
from ..core.settings import SwiftSettings
from ..core.types import Prompt, Sampling
from ..decoding.context import Context
from ..decoding.engine import alone
from ..decoding.methods import PLAIN
from ..decoding.session import Session
from ..models.costs import measure_costs
from ..models.runtime import Runtime
from ..optimizer.evaluation import Replay, WindowScore, replay, score_window

AT_ONCE = 4  # Layer sets scored together in one pass.
# A race of layer sets compares them after every WINDOWS_PER_LAP windows; a set that is worse by MAX_DEFICIT drops out.
WINDOWS_PER_LAP, MAX_DEFICIT = 4, 0.02


@dataclass(frozen=True, slots=True)
class Text(Record):
    """Token ids of a prompt (the first `n_prompt`) and of its greedy completion."""

    id: str
    token_ids: tuple[int, ...]
    n_prompt: int


@dataclass(frozen=True, slots=True)
class TextRecord(Record):
    """Recorded completions of a model, and its pass costs on the machine that recorded them."""

    SCHEMA: ClassVar = "swiftopt.search-record/2"

    texts: tuple[Text, ...]
    costs: CostProfile

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json()) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> TextRecord:
        """Raises: InvalidInput: the file is not a record."""
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")), str(path))
        except (OSError, ValueError) as error:
            raise InvalidInput(f"{path} is no record of {cls.SCHEMA} ({error}): use another file") from error

    def check(self, runtime: Runtime) -> None:
        """Raises: InvalidInput: the record was made with another model."""
        if self.costs.fingerprint != runtime.info.fingerprint:
            raise InvalidInput("--record was made with another model: use the path of a new file to record again")


def record_texts(
    runtime: Runtime, prompts: Sequence[Prompt], max_new_tokens: int, on_step: Callable[[str], None]
) -> TextRecord:
    """Complete the prompts greedily and measure pass costs; only the first turn of a chat is used."""
    session = Session(runtime, Sampling(), max_new_tokens)
    prompts = [replace(prompt, turns=prompt.turns[:1]) for prompt in prompts]
    longest = max(session.check(prompt) for prompt in prompts)
    texts = []
    for prompt in prompts:
        ids = session.encode(prompt)
        ((_, completion),) = session.run(prompt, PLAIN)
        texts.append(Text(prompt.id, (*ids, *completion.token_ids), len(ids)))
        on_step(f"record: {prompt.id}, {completion.n_tokens} tokens")
    return TextRecord(tuple(texts), measure_costs(runtime, context_bucket(longest), on_step))


class RecordedWindows:
    """The windows of a record: a sequence for searches, as texts grow, and a fixed sample on which sets are judged.

    Raises: InvalidInput: every completion is shorter than a window.
    """

    def __init__(self, runtime: Runtime, record: TextRecord, settings: SwiftSettings, stride: int) -> None:
        self.runtime, self.settings, self.costs, self.stride = runtime, settings, record.costs, stride
        self.window = settings.context_window
        self.texts = [text for text in record.texts if len(text.token_ids) - text.n_prompt >= self.window]
        if not self.texts:
            raise InvalidInput(
                f"no completion has {self.window} tokens: raise --max-new-tokens or lower --window, and record again"
            )
        self._rule = Session(runtime, Sampling(), 1).rule()
        # Scores of each layer set on the first windows, in the windows' order.
        self._window_scores: dict[LayerSet, list[WindowScore]] = {}
        # (layer set, n) -> objective and replay over the first n windows.
        self._objectives: dict[tuple[LayerSet, int], tuple[float, Replay]] = {}
        n_rows = self.window * AT_ONCE
        windows = [context for text in self.texts for context in self._contexts_of(text, self.window, n_rows)]
        # Shuffle, so that the first few windows come from several texts.
        self._windows = random.Random(0).sample(windows, len(windows))

    @property
    def n_windows(self) -> int:
        """Number of disjoint windows on which a layer set is judged."""
        return len(self._windows)

    def contexts(self, n_scratch_rows: int) -> Iterator[tuple[str, Context]]:
        """Yield (prompt id, context) for each text as it grows by `stride` tokens; repeat all texts without end."""
        for n_repeats in count():
            for text in self.texts:
                # A search may wait for a prompt that it has not seen, so each repetition has new prompt ids.
                name = f"{text.id}, lap {n_repeats + 1}" if n_repeats else text.id
                for context in self._contexts_of(text, self.stride, n_scratch_rows):
                    yield name, context

    def judge(self, layer_set: LayerSet) -> tuple[float, float, float]:
        """Return a set's objective over all windows, and its mean numbers of drafted and accepted tokens."""
        self._score_missing([layer_set], self.n_windows)
        objective, replay_of_set = self._judge_windows(layer_set, self.n_windows)
        n_rounds = sum(replay_of_set.widths.values())
        return objective, replay_of_set.draft_steps, replay_of_set.tokens - n_rounds

    def race(self, layer_sets: Sequence[LayerSet], current_set: LayerSet) -> dict[LayerSet, float]:
        """Return each set's objective divided by that of `current_set`, over the windows on which the set was judged.

        A set that drops out was judged on the first windows only; a ratio above 1 always covers all windows.
        """
        self._score_missing([current_set], self.n_windows)
        ratios = {}
        for batch_start in range(0, len(layer_sets), AT_ONCE):
            running = list(layer_sets[batch_start : batch_start + AT_ONCE])
            for n in (*range(WINDOWS_PER_LAP, self.n_windows, WINDOWS_PER_LAP), self.n_windows):
                self._score_missing(running, n)
                for layer_set in running:
                    ratios[layer_set] = self._judge_windows(layer_set, n)[0] / self._judge_windows(current_set, n)[0]
                running = [layer_set for layer_set in running if ratios[layer_set] > 1 - MAX_DEFICIT]
        return ratios

    def _score_missing(self, layer_sets: Sequence[LayerSet], n: int) -> None:
        """Score the sets on those of the first `n` windows that lack their score, several sets per pass."""
        for index in range(n):
            unscored = [layer_set for layer_set in layer_sets if len(self._window_scores.get(layer_set, ())) == index]
            if unscored:
                scores = alone(score_window(self._windows[index], unscored, self.window))
                for layer_set, score in zip(unscored, scores, strict=True):
                    self._window_scores.setdefault(layer_set, []).append(score)

    def _judge_windows(self, layer_set: LayerSet, n: int) -> tuple[float, Replay]:
        """Return a set's objective and replay over the first `n` windows, which must be scored already."""
        if (layer_set, n) not in self._objectives:
            replay_of_set = replay(self._window_scores[layer_set][:n], self.settings)
            objective = self.costs.expected_speedup(
                layer_set, replay_of_set.tokens, replay_of_set.draft_steps, replay_of_set.widths
            )
            self._objectives[layer_set, n] = objective, replay_of_set
        return self._objectives[layer_set, n]

    @torch.inference_mode()
    def _contexts_of(self, text: Text, stride: int, n_scratch_rows: int) -> Iterator[Context]:
        shared_buffer = self.runtime.new_buffer(len(text.token_ids) + n_scratch_rows) if stride < self.window else None
        n_prefilled = 0
        for text_end in range(text.n_prompt + self.window, len(text.token_ids) + 1, stride):
            buffer = shared_buffer or self.runtime.new_buffer(len(text.token_ids) + n_scratch_rows)
            n_prefilled = 0 if shared_buffer is None else n_prefilled
            # As verification would, prefill overwrites the keys and values of the last window's candidates.
            self.runtime.prefill(text.token_ids[n_prefilled : text_end - 1], buffer, n_prefilled)
            n_prefilled = text_end - 1
            yield Context(self.runtime, buffer, self._rule, list(text.token_ids[:text_end]), text.n_prompt)
