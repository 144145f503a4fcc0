"""Laws that every search strategy keeps, whatever it learns with."""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from swiftopt.core.errors import LayerSetError, SettingsError
from swiftopt.core.layer_sets import LayerSet, searchable
from swiftopt.core.types import Trial
from swiftopt.optimizer import strategies
from swiftopt.optimizer.strategies import STRATEGIES, Proposal, SearchProblem, Strategy, Study, strategy_info
from swiftopt.optimizer.strategies.interval import SuggestionProcess

N_LAYERS, N_SKIPPED, N_SKIPPED_LATER = 12, 8, 6
N_STEPS, INTERVAL = 6, 3
SIZE = len(searchable(N_LAYERS))
LEARNING = sorted(set(STRATEGIES) - {"random", "clasp"})  # clasp moves whole layers, and single ones bring this worth
CHOOSING = sorted(name for name, recipe in STRATEGIES.items() if recipe.chooses_size)
WORTH = [random.Random(f"worth/{i}").random() for i in range(SIZE)]
HARM = [0.02 + 0.3 * random.Random(f"harm/{i}").random() ** 2 for i in range(SIZE)]  # of leaving a sub-layer out
# Attention is cheap and MLPs are dear; nothing left out, a draft pass is nine tenths of a plain one.
WHOLE, SAVINGS = 0.9, tuple(0.01 if i < SIZE // 2 else 0.06 for i in range(SIZE))


@pytest.fixture(autouse=True, scope="module")
def one_process_per_engine() -> Iterator[None]:
    """Strategies share the suggestion processes, whose answers depend on the request alone: a start takes long."""
    children: dict[str, subprocess.Popen[bytes]] = {}
    start = SuggestionProcess._start

    def share(process: SuggestionProcess) -> None:
        child = children.get(process.engine)
        if child is None or child.poll() is not None:
            start(process)
            process._stop_subprocess.detach()  # type: ignore[attr-defined]  a finalizer
            assert process._subprocess is not None
            child = children[process.engine] = process._subprocess
        process._subprocess = child

        def stop() -> None:
            if process.in_flight:
                child.kill()
                child.communicate()  # closes its pipes, too

        process._stop_subprocess = stop

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SuggestionProcess, "_start", share)
        yield
    for child in children.values():
        child.communicate()  # ends it, as its input ends


def worth(layer_set: LayerSet) -> float:
    """A separable objective: what each skipped sub-layer brings adds up."""
    return sum(w for w, bit in zip(WORTH, layer_set.bits(), strict=True) if bit)


def speed(layer_set: LayerSet) -> tuple[float, float]:
    """(matchness, tokens per time) where each skipped sub-layer does its harm: the rounds of a chain of four."""
    bits = layer_set.bits()
    matchness = math.exp(-sum(h for h, bit in zip(HARM, bits, strict=True) if bit))
    cost = WHOLE - sum(s for s, bit in zip(SAVINGS, bits, strict=True) if bit)
    return matchness, sum(matchness**i for i in range(5)) / (4 * cost + 1.2)


def study_of(n_layers: int) -> Study:
    """What a model might say: turns that go with the harm, roughly, and two sets."""
    size = len(searchable(n_layers))
    turns = tuple(0.1 + HARM[i % SIZE] * random.Random(f"turn/{i}").uniform(0.5, 1.5) for i in range(size))
    sets = tuple(tuple(int(i < n) for i in range(size)) for n in (2, 4) if n <= size)
    return Study(turns, sets, 100.0)


def make(name: str, *problem: Any, **more: Any) -> Strategy:
    return strategy_info(name).make(SearchProblem(*problem, **more))


def make_strategy(name: str, n_layers: int, n_skipped: int, seed: int, **more: Any) -> Strategy:
    """One that was shown what it wanted to see."""
    strategy = make(name, LayerSet(n_layers), n_skipped, seed, **more)
    shown(strategy, n_layers)
    return strategy


def shown(strategy: Strategy, n_layers: int = N_LAYERS) -> None:
    if strategy.wants("p") is not None:
        strategy.study("p", study_of(n_layers))


@pytest.mark.parametrize("name", sorted(STRATEGIES))
@pytest.mark.parametrize("savings", [None, SAVINGS], ids=["", "savings"])
def test_whole_layers_are_skipped_where_only_these_may_be(name: str, savings: tuple[float, ...] | None) -> None:
    start = LayerSet.uniform(N_LAYERS, N_SKIPPED)
    problem = dict(seed=3, interval=INTERVAL, deterministic=True, savings=savings, whole_layers=True)
    problem["project"] = LayerSet.in_whole_layers
    with closing(make(name, start, N_SKIPPED, **problem)) as strategy:
        shown(strategy)
        sets = [proposal.layer_set for proposal in played(strategy, 2 * N_STEPS)]
        assert all(one.skip_attn == one.skip_mlp for one in sets) and len({*sets}) > N_STEPS
        if savings is None:
            assert sum(one.n_skipped == N_SKIPPED for one in sets) > N_STEPS
            strategy.set_n_skipped(N_SKIPPED_LATER - 1)
            assert strategy.propose().layer_set.n_skipped <= N_SKIPPED_LATER - 2


@pytest.mark.parametrize("name", sorted(STRATEGIES))
@pytest.mark.parametrize("has_savings", [False, True], ids=["", "savings"])
def test_only_the_sub_layers_that_there_are_may_be_skipped(name: str, has_savings: bool) -> None:
    """Layers of one sub-layer each, as Nemotron-H's."""
    own = tuple((kind, layer) for kind, layer in searchable(N_LAYERS) if (kind == "attn") == (layer % 2 == 0))
    savings = tuple(SAVINGS[searchable(N_LAYERS).index(one)] for one in own) if has_savings else None
    problem = dict(seed=3, interval=INTERVAL, deterministic=True, savings=savings, sub_layers=own)
    with closing(make(name, LayerSet(N_LAYERS), 3, **problem)) as strategy:
        assert strategy.size == len(own) == N_LAYERS - 2
        if strategy.wants("p") is not None:
            strategy.study(
                "p", Study(tuple(0.1 * (i + 1) for i in range(len(own))), ((1, *(0 for _ in own[1:])),), 100.0)
            )
        sets = [proposal.layer_set for proposal in played(strategy, N_STEPS)]
    assert {("attn", layer) for one in sets for layer in one.skip_attn} <= {*own}
    assert {("mlp", layer) for one in sets for layer in one.skip_mlp} <= {*own}
    assert len({*sets}) > N_STEPS // 2 and (has_savings or {one.n_skipped for one in sets} == {3})


def played(strategy: Strategy, n_steps: int) -> Iterator[Proposal]:
    for step in range(n_steps):
        proposal = strategy.propose()
        score = worth(proposal.layer_set) if proposal.layer_set.n_layers == N_LAYERS else 0.5
        strategy.observe(Trial(step, proposal.layer_set, proposal.origin, score, score))
        yield proposal


@cache
def run(name: str, seed: int) -> tuple[tuple[Proposal, ...], tuple[Proposal, ...]]:
    """Proposals before and after the number of skipped sub-layers is lowered."""
    with closing(make_strategy(name, N_LAYERS, N_SKIPPED, seed, interval=INTERVAL, deterministic=True)) as strategy:
        before = tuple(played(strategy, N_STEPS))
        strategy.set_n_skipped(N_SKIPPED_LATER)
        return before, tuple(played(strategy, N_STEPS))


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategy_never_proposes_first_or_last_layer(name: str) -> None:
    for proposal in (*run(name, 1)[0], *run(name, 1)[1]):
        skipped = proposal.layer_set.skip_attn | proposal.layer_set.skip_mlp
        assert proposal.layer_set.n_layers == N_LAYERS
        assert not skipped & {0, N_LAYERS - 1}


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategy_skips_exactly_the_number_asked_for_also_when_it_changes(name: str) -> None:
    before, after = run(name, 1)
    assert [proposal.layer_set.n_skipped for proposal in before] == [N_SKIPPED] * N_STEPS
    assert [proposal.layer_set.n_skipped for proposal in after] == [N_SKIPPED_LATER] * N_STEPS


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategy_proposes_no_set_twice(name: str) -> None:
    proposed = [proposal.layer_set for half in run(name, 1) for proposal in half]
    assert len(set(proposed)) == len(proposed)


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategy_repeats_itself_when_seed_and_observations_are_equal(name: str) -> None:
    assert run.__wrapped__(name, 1) == run(name, 1)  # the first one does not look into the cache


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("n_played", [0, 3, 5])
def test_strategy_goes_on_from_its_state_as_it_would_have(name: str, n_played: int) -> None:
    """After three and five steps a learning strategy has asked for a suggestion that it has not taken yet."""

    def made() -> Strategy:
        return make(name, LayerSet(N_LAYERS), N_SKIPPED, 1, interval=INTERVAL, deterministic=True)

    with closing(made()) as first, closing(made()) as second:
        shown(first)
        first.set_n_skipped(N_SKIPPED_LATER)
        for step, proposal in enumerate(played(first, n_played)):
            score = worth(proposal.layer_set)
            second.observe(Trial(step, proposal.layer_set, proposal.origin, score, score))
        second.restore(json.loads(json.dumps(first.state())))
        assert list(played(second, 4)) == list(played(first, 4))


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategy_differs_when_seed_differs(name: str) -> None:
    with closing(make_strategy(name, N_LAYERS, N_SKIPPED, 2, interval=INTERVAL, deterministic=True)) as other:
        assert run(name, 1)[0] != tuple(played(other, N_STEPS))


@pytest.mark.parametrize(("name", "origin"), [("bayes", "gp"), ("swift", "gp"), ("published", "cube"), ("tpe", "tpe")])
def test_deterministic_strategy_waits_for_the_suggestion_of_every_due_step(name: str, origin: str) -> None:
    every = INTERVAL if name in ("swift", "published") else 1
    first = max(2, every)  # at step 1 there is nothing to ask about yet
    steps = range(1, N_STEPS + 1)
    expected = [origin if step >= first and step % every == 0 else "random" for step in steps]
    assert [proposal.origin for proposal in run(name, 1)[0]] == expected


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(("n_layers", "n_skipped"), [(2, 0), (3, 0), (3, 2), (4, 2)])
def test_strategy_works_when_model_is_tiny(name: str, n_layers: int, n_skipped: int) -> None:
    with closing(make_strategy(name, n_layers, n_skipped, 0, interval=4, deterministic=True)) as strategy:
        proposals = list(played(strategy, 12))
    assert {proposal.layer_set.n_skipped for proposal in proposals} == {n_skipped}
    n_sets = 6 if n_layers == 4 else 1
    assert len({proposal.layer_set for proposal in proposals[:n_sets]}) == n_sets


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategy_gives_different_candidates_when_several_are_asked_before_a_score(name: str) -> None:
    with closing(make_strategy(name, N_LAYERS, N_SKIPPED, 0, interval=2, deterministic=True)) as strategy:
        list(played(strategy, 3))
        batch = [strategy.propose().layer_set for _ in range(6)]
    assert len(set(batch)) == 6


@pytest.mark.parametrize("name", LEARNING)
def test_strategy_beats_random_on_a_separable_objective(name: str) -> None:
    def best(of: str) -> float:
        with closing(make_strategy(of, N_LAYERS, N_SKIPPED, 5, interval=INTERVAL, deterministic=True)) as strategy:
            return max(worth(proposal.layer_set) for proposal in played(strategy, 60))

    lead = 0.04 if name == "published" else 0.05  # which takes its scores for noisier
    assert best(name) > best("random") + lead * sum(sorted(WORTH)[-N_SKIPPED:])


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategy_refuses_a_trial_of_another_model(name: str) -> None:
    with (
        closing(make_strategy(name, N_LAYERS, N_SKIPPED, 0)) as strategy,
        pytest.raises(LayerSetError, match="13 layers"),
    ):
        strategy.observe(Trial(0, LayerSet(13), "uniform", 1.0, 1.0))


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("n_skipped", [-1, 2 * (N_LAYERS - 2) + 1])
def test_strategy_refuses_a_number_of_sub_layers_the_model_lacks(name: str, n_skipped: int) -> None:
    with pytest.raises(SettingsError, match="use 0 to 20"):
        make_strategy(name, N_LAYERS, n_skipped, 0)


def test_strategy_info_names_the_known_and_the_nearest_when_name_is_unknown() -> None:
    with pytest.raises(
        SettingsError, match=r"'bayse'.*random, bayes, swift, published, tpe, local, knapsack, clasp.*nearest: bayes"
    ):
        strategy_info("bayse")


def test_table_of_strategies_is_read_without_numpy() -> None:
    """The program's help lists it."""
    code = "import sys; from swiftopt.optimizer.strategies import STRATEGIES; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_strategy_refuses_an_interval_below_one() -> None:
    with pytest.raises(SettingsError, match="interval 0"):
        make_strategy("swift", N_LAYERS, N_SKIPPED, 0, interval=0)


# strategies that choose how many sub-layers are left out


def searched(name: str, seed: int, n_steps: int) -> tuple[float, set[int]]:
    """The best speed of so many candidates, and the sizes that were tried."""
    best, sizes = 0.0, set()
    with closing(make_strategy(name, N_LAYERS, N_SKIPPED, seed, deterministic=True, savings=SAVINGS)) as strategy:
        for step in range(n_steps):
            proposal = strategy.propose()
            matchness, score = speed(proposal.layer_set)
            strategy.observe(Trial(step, proposal.layer_set, proposal.origin, matchness, score))
            best = max(best, score)
            sizes.add(proposal.layer_set.n_skipped)
    return best, sizes


@pytest.mark.parametrize("name", STRATEGIES)
def test_only_some_strategies_choose_the_size_and_only_given_savings(name: str) -> None:
    assert (searched(name, 0, 20)[1] != {N_SKIPPED}) == (name in CHOOSING)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["local", "knapsack"])
def test_guided_search_is_ahead_of_random_draws_with_a_tenth_of_the_candidates(name: str, seed: int) -> None:
    assert searched(name, seed, 30)[0] > searched("random", seed, 300)[0]


@pytest.mark.parametrize("name", CHOOSING)
def test_strategy_wants_a_study_once_per_prompt_and_not_for_ever(name: str) -> None:
    with closing(make(name, LayerSet(N_LAYERS), N_SKIPPED, 0)) as strategy:
        assert strategy.wants("a") == strategy.wants("a") is not None
        strategy.study("a", study_of(N_LAYERS))
        assert strategy.wants("a") is None
        prompts = [f"b{i}" for i in range(50)]
        for prompt in prompts:
            shown_to = strategy.wants(prompt)
            if shown_to is not None:
                strategy.study(prompt, study_of(N_LAYERS))
        assert strategy.wants("c") is None


@pytest.mark.parametrize(
    ("name", "savings"), [*((name, None) for name in STRATEGIES), *((name, SAVINGS) for name in CHOOSING)]
)
def test_proposals_keep_what_else_the_start_says(name: str, savings: tuple[float, ...] | None) -> None:
    base = LayerSet(N_LAYERS, formats=(("mlp", "int8"),))
    with closing(make(name, base, N_SKIPPED, 0, interval=2, deterministic=True, savings=savings)) as strategy:
        shown(strategy)
        assert all(proposal.layer_set.formats == base.formats for proposal in played(strategy, 5))


@pytest.mark.parametrize("name", CHOOSING)
def test_clasp_leaves_out_whole_layers_and_others_need_not(name: str) -> None:
    with closing(make_strategy(name, N_LAYERS, N_SKIPPED, 0, savings=SAVINGS)) as strategy:
        study = Study((0.1,) * SIZE, (tuple(int(i % 10 < 3) for i in range(SIZE)),), 9.0)
        strategy.study("p", study)
        moves = []
        for step in range(30):
            proposal = strategy.propose()
            matchness, score = speed(proposal.layer_set)
            strategy.observe(Trial(step, proposal.layer_set, proposal.origin, matchness, score))
            moves += [proposal.layer_set] if proposal.origin != "random" else []
    assert len(moves) > 10
    assert all(move.skip_attn == move.skip_mlp for move in moves) == (name == "clasp")


@pytest.mark.parametrize("name", CHOOSING)
def test_what_leads_on_many_windows_is_best_and_one_lucky_score_is_not(name: str) -> None:
    held, other = LayerSet(N_LAYERS), LayerSet(N_LAYERS).skipping([("attn", 3), ("mlp", 3)])
    found = []
    with closing(make_strategy(name, N_LAYERS, N_SKIPPED, 0, savings=SAVINGS)) as strategy:
        assert strategy.best(held) == held
        for number in range(20):
            for own, score in ((held, 1.0), (other, 1.3)):
                strategy.observe(Trial(2 * number, own, "move", 0.9, score, "p", number))
            found.append(strategy.best(held))
        assert strategy.best(other) == other
    assert found[0] == held and found[-1] == other


@pytest.mark.parametrize("name", sorted(set(STRATEGIES) - set(CHOOSING)))
def test_strategies_without_a_model_of_sub_layers_leave_the_choice_to_scores(name: str) -> None:
    with closing(make_strategy(name, N_LAYERS, N_SKIPPED, 0)) as strategy:
        held = LayerSet.uniform(N_LAYERS, N_SKIPPED)
        list(played(strategy, 3))
        assert strategy.best(held) == held


def test_one_file_is_all_that_a_new_strategy_takes(tmp_path: Path) -> None:
    """The package, help and the check of words find it."""
    shutil.copytree(Path(strategies.__file__).parent, tmp_path / "strategies")
    (tmp_path / "strategies" / "mine.py").write_text(
        "from .base import StrategyInfo\n"
        "from .interval import IntervalStrategy\n"
        "STRATEGIES = {'mine': StrategyInfo('draws of my own', IntervalStrategy)}\n"
    )
    code = (
        "import sys, swiftopt.optimizer\n"
        f"swiftopt.optimizer.__path__.insert(0, {str(tmp_path)!r})\n"
        "from swiftopt.cli.main import swiftopt\n"
        "swiftopt(['tune', '--help-all'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "mine (draws of my own)" in " ".join(done.stdout.split())
