"""Layer sets for adaptive, quantised drafts: lossless on the way, thinned out by measured time, planned as such."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from fakes import cheap_draft_costs, worded_runtime

from swiftopt.core.errors import LayerSetNotFound, SettingsError
from swiftopt.core.events import Event, PromptFinished, TaskFinished
from swiftopt.core.layer_sets import LayerSet, searchable
from swiftopt.core.records import LayerSetRecord, Plan
from swiftopt.core.requests import GenerateRequest
from swiftopt.core.settings import SwiftSettings
from swiftopt.core.types import Prompt, Sampling
from swiftopt.decoding.context import Ending, TokenRule
from swiftopt.decoding.loop import decode
from swiftopt.decoding.methods import PLAIN, Method
from swiftopt.decoding.session import Session
from swiftopt.models.costs import device_name
from swiftopt.models.runtime import Runtime
from swiftopt.optimizer import tuning
from swiftopt.optimizer.evaluation import WindowScore, adaptive_speedup
from swiftopt.optimizer.search import Search
from swiftopt.optimizer.tuning import Tuner
from swiftopt.optimizer.verdict import Timed
from swiftopt.store import Store
from swiftopt.tasks.compare import make_entry
from swiftopt.tasks.generate import Planner
from swiftopt.tasks.recipes import MakingRecipes, Recipes

INT4 = (("attn", "int4"), ("head", "int4"), ("mlp", "int4"))
TUNED, WHOLE = LayerSet(4, frozenset({1}), formats=INT4), LayerSet(4, formats=INT4)


def stream(n: int) -> list[Prompt]:
    rng = random.Random(0)
    return [Prompt(f"t{i}", "t", text=" ".join(f"w{rng.randrange(2, 97)}" for _ in range(6))) for i in range(n)]


def tune(n: int = 6, **settings: Any) -> tuple[list[Any], list[Event]]:
    given = SwiftSettings(method="adaptive", draft_format="int4", context_window=8, max_steps=30, **settings)
    events = list(Tuner(Session(worded_runtime(), Sampling(), 24), given, cheap_draft_costs(), "tiny").run(stream(n)))
    return [event for event in events if isinstance(event, TaskFinished)], events


@pytest.mark.parametrize("strategy", ["random", "knapsack"])
def test_adaptive_tuning_is_lossless_and_keeps_the_formats(strategy: str) -> None:
    (result,), events = tune(strategy=strategy)
    runtime = worded_runtime()
    for event in (event for event in events if isinstance(event, PromptFinished)):
        ids = runtime.tokenizer(event.prompt.text)["input_ids"]
        plain = decode(runtime, ids, PLAIN, TokenRule.of(Sampling(), None), Ending(24))
        assert event.completion.token_ids == plain.token_ids
        assert event.held_out or event.completion.method == "adaptive"
    assert {trial.layer_set.formats for trial in result.trials} == {INT4}
    assert result.record.layer_set.formats == INT4 and result.record.settings["method"] == "adaptive"
    assert result.verdict.expected is not None  # from the drafter's own reckoning


@pytest.mark.slow
def test_search_that_chooses_the_size_starts_without_skipping() -> None:
    (sized,), _ = tune(strategy="knapsack")
    (fixed,), _ = tune(strategy="random")
    assert sized.trials[0].layer_set == LayerSet(4, formats=INT4)
    assert fixed.trials[0].layer_set.n_skipped == 2
    (matching,), _ = tune(strategy="knapsack", objective="matchness")
    assert {trial.layer_set.n_skipped for trial in matching.trials} == {2}


SLOW, FAST = ([Timed(n, n / speed) for n in (10, 12, 14)] for speed in (1.0, 2.0))


@pytest.mark.parametrize(("runs", "used"), [([SLOW, FAST], TUNED), ([FAST, SLOW], WHOLE), ([], WHOLE)])
def test_set_of_the_search_is_used_unless_another_proves_faster(
    runs: list[list[Timed]], used: LayerSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[tuple[int, list[str]]] = []

    def by_turns(session: Session, prompts: Sequence[Prompt], methods: Sequence[Method], phase: Event) -> Any:
        timed.append((len(methods), [prompt.id for prompt in prompts]))
        yield phase
        return runs

    monkeypatch.setattr(tuning, "time_methods", by_turns)
    monkeypatch.setattr(Search, "sets_to_time", [WHOLE, TUNED])
    (result,), _ = tune(strategy="knapsack")
    assert timed == [(2, ["t2", "t1", "t0"])]  # those that were served, the latest first
    assert result.record.layer_set == used
    if used == TUNED:
        of_it = [trial.matchness for trial in result.trials if trial.layer_set == used]
        assert result.record.matchness == (pytest.approx(sum(of_it) / len(of_it), abs=1e-4) if of_it else None)


def test_only_sets_with_distinct_estimates_are_timed() -> None:
    def contenders(**settings: Any) -> list[LayerSet]:
        given = SwiftSettings(method="adaptive", draft_format="int4", **settings)
        search = Search("t", LayerSet(4), searchable(4), given, 0.5, cheap_draft_costs())
        before = search.sets_to_time
        search.adopt(TUNED)
        assert before == [] and search.layer_set == search.method.layer_set == TUNED
        return search.sets_to_time

    assert contenders(strategy="knapsack") == [TUNED, WHOLE]
    assert contenders(strategy="knapsack", deterministic=True) == []  # the clock may decide nothing
    assert contenders(strategy="knapsack", adoption="highest") == contenders(strategy="random") == []


@pytest.mark.parametrize("share", [0.1, 0.4])
def test_objective_of_adaptive_drafts_is_the_best_tokens_per_time(share: float) -> None:
    """With chances that do not depend on the place, it is that of the best fixed length, which can be written down."""
    costs, draft = cheap_draft_costs(share), LayerSet(4, formats=INT4)
    rng = random.Random(1)
    n, chance = 800, 0.9
    score = WindowScore(tuple(int(rng.random() > chance) for _ in range(n)), (0.92,) * n)
    cost = costs.draft_cost(draft)
    best = max(
        sum(chance**i for i in range(length + 1)) / (length * cost + costs.verify_cost(length + 1))
        for length in range(25)
    )
    assert adaptive_speedup(score, draft, costs) == pytest.approx(best, rel=0.08)


def test_hopeless_draft_is_worth_plain_decoding() -> None:
    score = WindowScore((1,) * 64, (0.1,) * 64)
    assert adaptive_speedup(score, LayerSet(4, formats=INT4), cheap_draft_costs(0.9)) == pytest.approx(1.0, abs=0.01)


@pytest.fixture
def tuned(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Runtime, Store]]:
    """A model with an adaptive layer set for the task t, in a store."""
    runtime = worded_runtime()
    known = cheap_draft_costs()
    costs = replace(known, formats={name: known.formats["int4"] for name in ("int4", "int8")})
    monkeypatch.setattr("swiftopt.tasks.recipes.stored_costs", lambda *_, **__: costs)
    with Store.open(sqlite_url) as store:
        store.remember_model(replace(runtime.info, names=("tiny",)))
        record = LayerSetRecord("tiny", "t", TUNED, runtime.info.fingerprint, verdict="use")
        where = {"device": device_name(runtime.device), "dtype": runtime.dtype_name}
        settings = SwiftSettings(method="adaptive", draft_format="int4").to_json()
        store.add_layer_set(replace(record, settings=settings, **where))
        yield runtime, store


def test_tuned_adaptive_plan_is_used(tuned: tuple[Runtime, Store]) -> None:
    runtime, store = tuned
    method, info = Planner(GenerateRequest("tiny", task="t"), runtime, store).plan_for("t")
    assert (method.name, info.method, method.layer_set) == ("adaptive", "adaptive", TUNED)


def test_adaptive_drafts_use_the_tuned_set_even_if_another_plan_is_best(tuned: tuple[Runtime, Store]) -> None:
    runtime, store = tuned
    where = {"device": device_name(runtime.device), "dtype": runtime.dtype_name}
    lookup = Plan("prompt-lookup", verdict="use", measured_speedup=9.0, **where)
    store.add_plan(runtime.info.fingerprint, "t", lookup)
    assert store.lookup(runtime.info.fingerprint, "t").plan.method == "prompt-lookup"
    method, info = Planner(GenerateRequest("tiny", task="t", method="adaptive"), runtime, store).plan_for("t")
    assert (method.name, method.layer_set, info.version) == ("adaptive", TUNED, 1)


@pytest.mark.parametrize(
    ("told", "drafts"),
    [({}, TUNED), ({"max_draft_length": 3}, TUNED), ({"draft_format": "int8"}, LayerSet(4).filled("int8"))],
    ids=["nothing", "length", "format"],
)
def test_comparison_uses_the_tuned_set_unless_a_format_is_given(
    tuned: tuple[Runtime, Store], told: dict[str, Any], drafts: LayerSet
) -> None:
    runtime, store = tuned
    session = Session(runtime, Sampling(), 8)
    recipes = MakingRecipes(session, store, None, "tiny", "t", stream(2), store)
    entry = make_entry("adaptive", recipes, told)
    assert entry.error is None and entry.method is not None and entry.method.layer_set == drafts
    assert entry.settings["draft_format"] == told.get("draft_format", "stored")
    assert entry.settings["max_draft_length"] == told.get("max_draft_length", 24)


def test_swift_does_not_use_a_set_tuned_for_adaptive_drafts(tuned: tuple[Runtime, Store]) -> None:
    runtime, store = tuned
    with pytest.raises(LayerSetNotFound, match="swift needs a layer set"):
        Recipes(runtime, store).of("swift", "t")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "fast"}, "method fast is out of range"),
        ({"draft_format": "int2"}, "draft_format int2 is out of range"),
    ],
)
def test_unknown_settings_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        SwiftSettings(**settings)
