"""Search strategies side by side: every one sees the same recorded windows in the same order, scored by the model."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from ..core.costs import CostProfile
from ..core.errors import InvalidInput
from ..core.settings import SwiftSettings
from ..core.types import LayerSet, Prompt, Sampling
from ..decoding.context import Context
from ..decoding.engine import alone
from ..decoding.loop import Round
from ..decoding.methods import PLAIN
from ..decoding.session import Session
from ..models.costs import context_bucket, machine_name, measure_costs
from ..models.runtime import Runtime
from ..optimizer.evaluation import Replay, WindowScore, replay, score_window
from ..optimizer.search import Search

SCHEMA = "swiftopt.bench-search/1"
RECORD = "swiftopt.search-record/2"
AT_ONCE = 4  # sets that are judged in one pass
LAP, BEHIND = 4, 0.02  # windows between two looks at a race, and how far behind a set drops out
GOAL = 0.95  # of the best objective that any strategy ended with
BASE = "swift"  # whose passes the others' are compared with


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and its greedy completion as token ids, the first `n_prompt` of which are the prompt's."""

    id: str
    token_ids: tuple[int, ...]
    n_prompt: int


@dataclass(frozen=True, slots=True)
class TextRecord:
    """What a benchmark runs on: texts of a model, and what its passes cost where they were recorded."""

    texts: tuple[Text, ...]
    costs: CostProfile

    def write(self, path: Path) -> None:
        """As one JSON object."""
        values = {"schema": RECORD, "costs": self.costs.to_json(), "texts": [asdict(text) for text in self.texts]}
        path.write_text(json.dumps(values) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path, runtime: Runtime) -> TextRecord:
        """Raises: InvalidInput: the file is no record, or of another model."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if values["schema"] != RECORD:
                raise ValueError(f"schema {values['schema']}")
            texts = [Text(each["id"], tuple(each["token_ids"]), each["n_prompt"]) for each in values["texts"]]
            record = cls(tuple(texts), CostProfile.from_json(values["costs"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidInput(f"{path} is no record of {RECORD} ({error!r}): name another file") from error
        if record.costs.fingerprint != runtime.info.fingerprint:
            raise InvalidInput(f"{path} was recorded with another model: name another file, and it is recorded anew")
        return record


def record(
    runtime: Runtime, prompts: Sequence[Prompt], max_new_tokens: int, on_step: Callable[[str], None]
) -> TextRecord:
    """Complete the prompts greedily and measure what passes cost; chats are cut to their first turn."""
    session = Session(runtime, Sampling(), max_new_tokens)
    prompts = [replace(prompt, turns=prompt.turns[:1]) for prompt in prompts]
    longest = max(session.check(prompt) for prompt in prompts)
    texts = []
    for prompt in prompts:
        ids = session.encode(prompt)
        ((_, done),) = session.run(prompt, PLAIN)
        texts.append(Text(prompt.id, (*ids, *done.token_ids), len(ids)))
        on_step(f"record: {prompt.id}, {done.n_tokens} tokens")
    return TextRecord(tuple(texts), measure_costs(runtime, context_bucket(longest), on_step))


class Bench:
    """The windows of a record: as a search sees them while the texts grow, and all of them to judge a set on.

    Raises: InvalidInput: no completion is as long as a window.
    """

    def __init__(self, runtime: Runtime, record: TextRecord, settings: SwiftSettings, stride: int) -> None:
        self.runtime, self.settings, self.costs, self.stride = runtime, settings, record.costs, stride
        self.window = settings.context_window
        self.texts = [text for text in record.texts if len(text.token_ids) - text.n_prompt >= self.window]
        if not self.texts:
            raise InvalidInput(
                f"no completion has {self.window} tokens: raise --max-new-tokens or lower --window, and record anew"
            )
        self._rule = Session(runtime, Sampling(), 1).rule()
        self._seen: dict[LayerSet, list[WindowScore]] = {}  # of the first windows, or all of them
        self._worths: dict[tuple[LayerSet, int], tuple[float, Replay]] = {}  # over so many of them
        scratch = self.window * AT_ONCE
        windows = [context for text in self.texts for context in self._grown(text, self.window, scratch)]
        self._windows = random.Random(0).sample(windows, len(windows))  # so that the first few are of several texts

    @property
    def n_windows(self) -> int:
        """How many disjoint windows a set is judged on."""
        return len(self._windows)

    def contexts(self, scratch: int) -> Iterator[tuple[str, Context]]:
        """The texts growing by `stride` tokens, one after the other and again from the first; (prompt id, context)."""
        for lap in count():
            for text in self.texts:
                # By its bare name a search would wait for ever for text that it has not seen.
                name = f"{text.id}, lap {lap + 1}" if lap else text.id
                for context in self._grown(text, self.stride, scratch):
                    yield name, context

    def judge(self, layer_set: LayerSet) -> tuple[float, int, int]:
        """The objective over all windows together, and how many tokens it drafts there, how many of them accepted."""
        self._see([layer_set], self.n_windows)
        value, played = self._worth(layer_set, self.n_windows)
        return value, played.draft_steps, played.tokens - self.window * self.n_windows

    def race(self, layer_sets: Sequence[LayerSet], held: LayerSet) -> dict[LayerSet, float]:
        """How each compares with `held` on the windows that it was judged on: a ratio of objectives, 1 being equal.

        Who is well behind after some of the windows drops out; a ratio above 1 is over all of them.
        """
        self._see([held], self.n_windows)
        ratios = {}
        for first in range(0, len(layer_sets), AT_ONCE):
            running = list(layer_sets[first : first + AT_ONCE])
            for n in (*range(LAP, self.n_windows, LAP), self.n_windows):
                self._see(running, n)
                for own in running:
                    ratios[own] = self._worth(own, n)[0] / self._worth(held, n)[0]
                running = [own for own in running if ratios[own] > 1 - BEHIND]
        return ratios

    def _see(self, layer_sets: Sequence[LayerSet], n: int) -> None:
        """Score the sets, side by side, on those of the first `n` windows that they were not scored on yet."""
        for number in range(n):
            new = [own for own in layer_sets if len(self._seen.get(own, ())) == number]
            if new:
                scores = alone(score_window(self._windows[number], new, self.window))
                for own, score in zip(new, scores, strict=True):
                    self._seen.setdefault(own, []).append(score)

    def _worth(self, layer_set: LayerSet, n: int) -> tuple[float, Replay]:
        """The objective over the first `n` windows, which the set was scored on."""
        if (layer_set, n) not in self._worths:
            played = replay(self._seen[layer_set][:n], self.settings)
            value = self.costs.expected_speedup(layer_set, played.tokens, played.draft_steps, played.widths)
            self._worths[layer_set, n] = value, played
        return self._worths[layer_set, n]

    @torch.inference_mode()
    def _grown(self, text: Text, stride: int, scratch: int) -> Iterator[Context]:
        shared = self.runtime.new_buffer(len(text.token_ids) + scratch) if stride < self.window else None
        done = 0
        for end in range(text.n_prompt + self.window, len(text.token_ids) + 1, stride):
            buffer = shared or self.runtime.new_buffer(len(text.token_ids) + scratch)
            done = 0 if shared is None else done
            # What candidates wrote behind the last window is written over, as the target's verification does.
            self.runtime.prefill(text.token_ids[done : end - 1], buffer, done)
            done = end - 1
            yield Context(self.runtime, buffer, self._rule, list(text.token_ids[:end]), text.n_prompt)


def run_strategy(bench: Bench, strategy: str, n_passes: int, on_gain: Callable[[str, float, float], None]) -> Any:
    """One strategy's search until it has cost `n_passes`; its curve has a point where the set in use changes.

    A pass is a candidate on a window; what a study runs counts by its rows. Judging on all windows is not timed.
    """
    settings = replace(bench.settings, strategy=strategy)
    ratio = settings.start_skip_ratio(bench.runtime.info.n_parameters)
    search = Search("", bench.runtime.n_layers, settings, ratio, bench.costs)
    seconds, held, curve = 0.0, None, []
    try:
        for prompt_id, context in bench.contexts(search.scratch_rows):
            clock = perf_counter()
            alone(search.score(context, prompt_id))
            seconds += perf_counter() - clock
            passes = search.rows_run / bench.window
            value, n_steps, n_accepted = bench.judge(search.layer_set)
            if search.layer_set != held:
                held = search.layer_set
                curve.append([round(passes, 2), round(seconds, 3), round(value, 5)])
                on_gain(strategy, passes, value)
            if passes >= n_passes or not search.optimising:
                break
            deque(search.lower(Round(context, (), n_steps, n_accepted, 0, 0.0, 0.0)), 0)
    finally:
        search.finish("the benchmark is over")
    best = max(value for _, _, value in curve)
    return {
        "strategy": strategy,
        "passes": round(passes, 2),
        "seconds": round(seconds, 3),
        "candidates": len(search.trials),
        "best": best,
        "final": curve[-1][2],
        "n_skipped": search.layer_set.n_skipped,
        "skip_attn": sorted(search.layer_set.skip_attn),
        "skip_mlp": sorted(search.layer_set.skip_mlp),
        "stopped_because": search.stopped_because,
        "curve": curve,
    }


def compare_strategies(
    bench: Bench, strategies: Sequence[str], n_passes: int, on_gain: Callable[[str, float, float], None]
) -> dict[str, Any]:
    """The object that `swiftopt bench search --json` prints."""
    results = [run_strategy(bench, strategy, n_passes, on_gain) for strategy in strategies]
    goal = GOAL * max(result["final"] for result in results)
    base = next((result for result in results if result["strategy"] == BASE), None)
    for result in results:
        result["to_goal"] = _reached(result["curve"], goal)
        result["to_base"] = None if base is None else _reached(result["curve"], GOAL * base["final"])
    return {
        "schema": SCHEMA,
        "device": machine_name(bench.runtime),
        "dtype": bench.runtime.dtype_name,
        "texts": len(bench.texts),
        "windows": bench.n_windows,
        "window": bench.window,
        "stride": bench.stride,
        "goal": round(goal, 5),
        "results": results,
    }


def _reached(curve: Sequence[Sequence[float]], goal: float) -> Mapping[str, float] | None:
    """Passes and seconds from where on the objective stays at `goal` or above; None: it does not."""
    below = max((i for i, (_, _, value) in enumerate(curve) if value < goal), default=-1)
    if below + 1 == len(curve):
        return None
    passes, seconds, _ = curve[below + 1]
    return {"passes": passes, "seconds": seconds}
