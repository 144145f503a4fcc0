"""Search strategies side by side: every one sees the same recorded windows in the same order, scored by the model.

A long search, up from the best set that they found, estimates how far they end from the best there is.

    python -m swiftopt.bench.search --model M --stream prompts.jsonl --record texts.json --png search.png
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, count
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import click
import torch
from rich.table import Table

from ..core.costs import CostProfile, context_bucket
from ..core.errors import InvalidInput, NotFound
from ..core.layer_sets import LayerSet
from ..core.requests import GenerateRequest
from ..core.serialization import Record
from ..core.settings import SwiftSettings
from ..core.streams import read_stream
from ..core.types import Prompt, Sampling
from ..decoding.context import Context
from ..decoding.engine import alone
from ..decoding.events import Round
from ..decoding.methods import PLAIN
from ..decoding.session import Session
from ..models.costs import machine_name, measure_costs
from ..models.runtime import Runtime
from ..optimizer.evaluation import Replay, WindowScore, replay, score_window
from ..optimizer.search import Search
from ..optimizer.strategies import SIZE_CHOOSING, strategy_info
from ..optimizer.task_state import sub_layers_of
from ..terminal import commands, inputs, options, program, value_types
from ..terminal.charts import Pictures
from ..terminal.commands import measurement
from ..terminal.inputs import decoding_request
from ..terminal.output import Result, check_writable, note, writing
from ..terminal.render import fixed, number, numbers, table
from ..terminal.value_types import positive
from .charts import draw_search
from .turn import measured

SCHEMA = "swiftopt.bench-search/1"
AT_ONCE = 4  # Layer sets evaluated together in one pass.
# In a race of layer sets: windows between comparisons, and the deficit in objective at which a set drops out.
WINDOWS_PER_LAP, MAX_DEFICIT = 4, 0.02
GOAL = 0.95  # A strategy reaches the goal at this share of the best final objective.
BASE = "swift"  # Strategy whose final objective is the second goal.
PAIRS = 96  # Pairs of sub-layer flips tried before a layer set counts as a local optimum.
KICK = 4  # Random sub-layer flips that leave a local optimum.
SEARCHES = ("published", "swift", "random", *SIZE_CHOOSING)  # Default of --strategies.
# Settings under which a search ends only when its passes are used up.
ENDLESS_SETTINGS = {"max_steps": 10**6, "patience": 10**6, "target_matchness": 1.0, "deterministic": True}
SPENT = {"passes": 0, "seconds": 1}  # Cost of a search -> decimal places shown in tables.

OnGain = Callable[[str, float, float], None]  # Called with strategy, passes and objective.


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
            raise InvalidInput(f"{path} is no record of {cls.SCHEMA} ({error}): name another file") from error

    def check(self, runtime: Runtime) -> None:
        """Raises: InvalidInput: the record was made with another model."""
        if self.costs.fingerprint != runtime.info.fingerprint:
            raise InvalidInput("the --record was made with another model: name another file, and it is recorded anew")


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


class Bench:
    """The windows of a record, both as a search sees them while texts grow, and as a fixed sample to judge sets.

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
        # Scores of each layer set on the first windows, in their order.
        self._window_scores: dict[LayerSet, list[WindowScore]] = {}
        # (layer set, n) -> objective and replay over the first n windows.
        self._objectives: dict[tuple[LayerSet, int], tuple[float, Replay]] = {}
        n_rows = self.window * AT_ONCE
        windows = [context for text in self.texts for context in self._contexts_of(text, self.window, n_rows)]
        # Shuffled, so that the first few windows come from several texts.
        self._windows = random.Random(0).sample(windows, len(windows))

    @property
    def n_windows(self) -> int:
        """Number of disjoint windows on which a layer set is judged."""
        return len(self._windows)

    def contexts(self, n_scratch_rows: int) -> Iterator[tuple[str, Context]]:
        """Yield (prompt id, context) of every text as it grows by `stride` tokens; repeats all texts endlessly."""
        for n_repeats in count():
            for text in self.texts:
                # Every lap has new prompt ids, because a search may wait for a prompt that it has not seen.
                name = f"{text.id}, lap {n_repeats + 1}" if n_repeats else text.id
                for context in self._contexts_of(text, self.stride, n_scratch_rows):
                    yield name, context

    def judge(self, layer_set: LayerSet) -> tuple[float, int, int]:
        """Return a set's objective over all windows, with the numbers of drafted and accepted tokens."""
        self._score_missing([layer_set], self.n_windows)
        objective, replay_of_set = self._judge_windows(layer_set, self.n_windows)
        return objective, replay_of_set.draft_steps, replay_of_set.tokens - self.window * self.n_windows

    def race(self, layer_sets: Sequence[LayerSet], current_set: LayerSet) -> dict[LayerSet, float]:
        """Return each set's objective divided by that of `current_set`, over the windows on which the set was judged.

        A set more than `MAX_DEFICIT` worse after some windows drops out; a ratio above 1 always covers all windows.
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
        """Score the sets on those of the first `n` windows where they have no score yet, several sets per pass."""
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
            # Prefill overwrites the candidates' keys and values after the last window, as verification would.
            self.runtime.prefill(text.token_ids[n_prefilled : text_end - 1], buffer, n_prefilled)
            n_prefilled = text_end - 1
            yield Context(self.runtime, buffer, self._rule, list(text.token_ids[:text_end]), text.n_prompt)


def run_strategy(bench: Bench, strategy: str, n_passes: int, on_gain: OnGain) -> Any:
    """Run one strategy's search for `n_passes` passes; its curve has a point for every change of the set in use.

    A pass is one candidate on one window; a study counts as the number of rows it runs divided by the window.
    Judging sets on all windows is not timed.
    """
    settings = replace(bench.settings, strategy=strategy)
    ratio = settings.start_skip_ratio(bench.runtime.info.n_parameters)
    search = Search("", bench.runtime.whole, sub_layers_of(bench.runtime), settings, ratio, bench.costs)
    seconds, set_in_use, curve = 0.0, None, []
    try:
        for prompt_id, context in bench.contexts(search.scratch_rows):
            clock = perf_counter()
            alone(search.score(context, prompt_id))
            seconds += perf_counter() - clock
            passes = search.rows_run / bench.window
            objective, n_steps, n_accepted = bench.judge(search.layer_set)
            if search.layer_set != set_in_use:
                set_in_use = search.layer_set
                curve.append([round(passes, 2), round(seconds, 3), round(objective, 5)])
                on_gain(strategy, passes, objective)
            if passes >= n_passes or not search.optimising:
                break
            deque(search.lower(Round(context, (), n_steps, n_accepted, 0, 0.0, 0.0)), 0)
    finally:
        search.finish("the benchmark is over")
    best = max(objective for _, _, objective in curve)
    return {
        "strategy": strategy,
        "passes": round(passes, 2),
        "seconds": round(seconds, 3),
        "candidates": len(search.trials),
        "best": best,
        "final": curve[-1][2],
        **_left_out(search.layer_set),
        "stopped_because": search.stopped_because,
        "curve": curve,
    }


def _left_out(layer_set: LayerSet) -> dict[str, Any]:
    skipped = {"skip_attn": sorted(layer_set.skip_attn), "skip_mlp": sorted(layer_set.skip_mlp)}
    return {"n_skipped": layer_set.n_skipped, **skipped}


def compare_strategies(bench: Bench, strategies: Sequence[str], n_passes: int, on_gain: OnGain) -> dict[str, Any]:
    """Return the object that `python -m swiftopt.bench.search --json` prints.

    On Ctrl-C the object has the strategies that have finished, if any.
    """
    results, interrupted = list[dict[str, Any]](), False
    try:
        for strategy in strategies:
            results.append(run_strategy(bench, strategy, n_passes, on_gain))
    except KeyboardInterrupt:
        if not results:
            raise
        interrupted = True
    goal = GOAL * max(result["final"] for result in results)
    base_result = next((result for result in results if result["strategy"] == BASE), None)
    for result in results:
        result["to_goal"] = _reaches_goal(result["curve"], goal)
        result["to_base"] = None if base_result is None else _reaches_goal(result["curve"], GOAL * base_result["final"])
    return {
        "schema": SCHEMA,
        "interrupted": interrupted,
        "device": machine_name(bench.runtime),
        "dtype": bench.runtime.dtype_name,
        "texts": len(bench.texts),
        "windows": bench.n_windows,
        "window": bench.window,
        "stride": bench.stride,
        "goal": round(goal, 5),
        "results": results,
    }


def _reaches_goal(curve: Sequence[Sequence[float]], goal: float) -> Mapping[str, float] | None:
    """Return the passes and seconds after which the objective stays at or above `goal`; None if it never does."""
    last_below = max((i for i, (_, _, objective) in enumerate(curve) if objective < goal), default=-1)
    if last_below + 1 == len(curve):
        return None
    passes, seconds, _ = curve[last_below + 1]
    return {"passes": passes, "seconds": seconds}


# --- long search: estimate of the best reachable objective


def with_long_search(bench: Bench, report: dict[str, Any], max_judged: int, on_gain: OnGain) -> dict[str, Any]:
    """Add to `report` a long search from its best set, and each result's share of the long search's objective."""
    best = max(report["results"], key=lambda result: result["final"])
    start_set = LayerSet(bench.runtime.n_layers, frozenset(best["skip_attn"]), frozenset(best["skip_mlp"]))
    search = LongSearch(bench, start_set, max_judged, on_gain)
    long_search = search.run()
    results = [{**result, "of_long": round(result["final"] / long_search["best"], 5)} for result in report["results"]]
    return {**report, "interrupted": search.interrupted, "results": results, "long_search": long_search}


class LongSearch:
    """Iterated local search that judges at most `max_judged` layer sets.

    Every set is judged on all recorded windows, or until it scores clearly less, to exclude chance. Single sub-layers
    are flipped first, then pairs, the most promising first. At a local optimum a few random sub-layers of the best set
    are flipped, and the climb begins again. Ctrl-C ends the search with the best set so far.
    """

    def __init__(self, bench: Bench, start_set: LayerSet, max_judged: int, on_gain: OnGain) -> None:
        self.bench, self.max_judged, self.on_gain = bench, max_judged, on_gain
        self.current = self.best = start_set
        self.n_judged, self.n_peaks, self.interrupted = 0, 0, False
        self._random = random.Random(bench.settings.seed)

    def run(self) -> dict[str, Any]:
        started_at = self._value(self.best)
        try:
            while self.n_judged < self.max_judged and len(self.best.bits()):
                self._climb()
                n = len(self.best.bits())
                self.current = self._flip(self.best, self._random.sample(range(n), min(KICK, n)))
        except KeyboardInterrupt:
            self.interrupted = True
        return {
            "sets": self.n_judged,
            "peaks": self.n_peaks,
            "start": started_at,
            "best": self._value(self.best),
            **_left_out(self.best),
        }

    def _climb(self) -> None:
        """Improve the current set until no flip of one or two sub-layers helps, or `max_judged` sets were judged."""
        while self.n_judged < self.max_judged:
            singles = {(bit,): self._flip(self.current, [bit]) for bit in range(len(self.current.bits()))}
            ratios = self._race(list(singles.values()))
            ratio_by_flip = {flip: ratios[layer_set] for flip, layer_set in singles.items() if layer_set in ratios}
            flips_by_ratio = sorted(ratio_by_flip, key=ratio_by_flip.__getitem__, reverse=True)
            improving_flips = [flip for flip in flips_by_ratio if ratio_by_flip[flip] > 1]
            if improving_flips:
                self._take(singles[improving_flips[0]])
                for flip in improving_flips[1:]:  # Keep further flips that still help in combination.
                    flipped = self._flip(self.current, flip)
                    if self._race([flipped]).get(flipped, 0.0) > 1:
                        self._take(flipped)
            elif not self._try_pairs(ratio_by_flip):
                self.n_peaks += self.n_judged < self.max_judged
                return

    def _try_pairs(self, ratio_by_flip: Mapping[tuple[int], float]) -> bool:
        """Try pairs of flips in batches; take the best pair of the first batch that improves. Returns if one did."""
        pairs = sorted(
            combinations(ratio_by_flip, 2),
            key=lambda flip_pair: ratio_by_flip[flip_pair[0]] + ratio_by_flip[flip_pair[1]],
            reverse=True,
        )
        for batch_start in range(0, min(PAIRS, len(pairs)), AT_ONCE):
            ratios = self._race(
                [
                    self._flip(self.current, [*first_flip, *second_flip])
                    for first_flip, second_flip in pairs[batch_start : batch_start + AT_ONCE]
                ]
            )
            if ratios and max(ratios.values()) > 1:
                self._take(max(ratios, key=ratios.__getitem__))
                return True
        return False

    def _race(self, layer_sets: Sequence[LayerSet]) -> dict[LayerSet, float]:
        """Race the sets against the current one, cut to the number that may still be judged."""
        layer_sets = layer_sets[: max(0, self.max_judged - self.n_judged)]
        ratios = self.bench.race(layer_sets, self.current)
        self.n_judged += len(layer_sets)
        return ratios

    def _take(self, layer_set: LayerSet) -> None:
        self.current = layer_set
        if (objective := self._value(layer_set)) > self._value(self.best):
            self.best = layer_set
            self.on_gain("long search", self.n_judged, objective)

    def _value(self, layer_set: LayerSet) -> float:
        return self.bench.judge(layer_set)[0]

    @staticmethod
    def _flip(layer_set: LayerSet, units: Sequence[int]) -> LayerSet:
        bits = layer_set.bits()
        return layer_set.with_bits([1 - bit if i in units else bit for i, bit in enumerate(bits)])


# --- command line


@commands.command()
@options.model
@click.option(
    "--stream", type=value_types.FILE, help="Prompts to record, one JSON object per line; - is standard input."
)
@click.option("--limit", type=positive, default=8, help="Prompts that are recorded.")
@measurement("--record", type=value_types.PATH, help="Recorded texts and costs: read where the file is, else written.")
@measurement("--strategies", default=",".join(SEARCHES), help="What to compare, by commas.")
@measurement("--passes", type=positive, default=300, help="Candidate passes of each strategy.")
@measurement(
    "--window",
    "context_window",
    type=positive,
    default=commands.default_of(SwiftSettings, "context_window"),
    help="γ, generated tokens that score a candidate.",
)
@measurement("--stride", type=positive, default=4, help="Tokens between two steps of a search.")
@options.shared(SwiftSettings, "seed")
@measurement(
    "--long-search", type=value_types.natural, default=0, metavar="N", help="Judge N sets more, up from the best one."
)
@options.pictures("Draw the best objective against candidate passes and seconds.")
@options.machine(GenerateRequest, "max_new_tokens")
@options.json
def command(
    stream: str | None,
    limit: int,
    record: Path | None,
    strategies: str,
    passes: int,
    stride: int,
    long_search: int,
    pictures: Pictures,
    **values: Any,
) -> Result:
    """Run search strategies on the same recorded windows and show how soon each finds a good layer set.

    The prompts are completed once by plain decoding. Every strategy then sees the completions grow, and each set it
    takes into use is judged on all of them, outside the timing. The objective is the expected speedup of measured
    costs. A pass is one candidate on one window; studies of the model count by the rows that they run. A long search
    says how far they end from the best there is: it climbs on from the best set, every step judged on all windows.
    Ctrl-C shows the strategies that have ended, and the best set of a long search.
    """
    strategy_names = [name.strip() for name in strategies.split(",")]
    for name in strategy_names:
        strategy_info(name)
    is_recorded = record is not None and record.exists()
    if stream is None and not is_recorded:
        raise NotFound("there is nothing to search on: give --stream, or a --record that was written before")
    prompts = [] if stream is None else read_stream(stream, None, limit)
    request, settings = decoding_request(values), inputs.pick(SwiftSettings, {**values, **ENDLESS_SETTINGS})
    lengths = [prompt.max_new_tokens or request.max_new_tokens for prompt in prompts]
    if not is_recorded and max(lengths) < settings.context_window:
        raise InvalidInput(
            f"no completion has {settings.context_window} tokens: raise --max-new-tokens or lower --window"
        )
    if record is not None and not is_recorded:
        check_writable(record)

    texts = TextRecord.read(record) if record is not None and is_recorded else None
    runtime = inputs.load(request)
    if texts is not None:
        texts.check(runtime)
    else:
        texts = record_texts(runtime, prompts, request.max_new_tokens, note)
        if record is not None:
            with writing(record):
                texts.write(record)
    run = Bench(runtime, texts, settings, stride)
    report = {"model": request.model, **compare_strategies(run, strategy_names, passes, _note_gain)}
    if long_search and not report["interrupted"]:
        report = with_long_search(run, report, long_search, _note_gain)
    pictures.draw(draw_search, report)
    return Result(report, [_search_table(report)], interrupted=report["interrupted"])


def _note_gain(strategy: str, passes: float, objective: float) -> None:
    note(f"{strategy}, {passes:.0f} passes: {objective:.3f}x")


def _search_table(report: Mapping[str, Any]) -> Table:
    goal = f"to {report['goal']:.3f}x"
    headings = numbers("objective", "left out", "passes", "seconds", f"passes {goal}", f"seconds {goal}")
    rows = []
    for result in report["results"]:
        reached = result["to_goal"] or {"passes": None, "seconds": None}
        spent_cells = [number(figures[key], digits) for figures in (result, reached) for key, digits in SPENT.items()]
        rows.append((result["strategy"], f"{result['final']:.3f}x", str(result["n_skipped"]), *spent_cells))
    caption = None
    if long_search := report.get("long_search"):
        caption = f"a long search over {long_search['sets']} sets: {long_search['best']:.3f}x"
        caption += f", {long_search['n_skipped']} left out"
    title = f"{report['model']}, {report['dtype']}, {report['device']}, {report['windows']} windows"
    return table([fixed("strategy"), *headings], rows, lined=True, title=title, caption=caption)


if __name__ == "__main__":
    measured(lambda: program.main(command, "python -m swiftopt.bench.search"))
