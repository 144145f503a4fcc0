"""The suggestion process: never waited for, restarted when it dies, given up after repeated failures, without torch."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.types import Trial
from swiftopt.optimizer.strategies import interval
from swiftopt.optimizer.strategies.base import SearchProblem, draw, exchange
from swiftopt.optimizer.strategies.interval import MAX_FAILURES, SUGGESTIONS_MODULE, IntervalStrategy, SuggestionProcess
from swiftopt.optimizer.suggestions import KAPPA, next_point, points_of, repair

SIZE, N_SKIPPED = 12, 5
WAIT_S = 60.0  # how long a test waits for a process on a busy machine


@pytest.fixture
def process() -> Iterator[SuggestionProcess]:
    """Start the process of the Parzen estimator, which starts fastest, with ten observations."""
    with closing(SuggestionProcess("tpe", seed=3)) as made:
        observe(made, 10)
        yield made


def observe(process: SuggestionProcess, n: int) -> None:
    for i in range(n):
        rng = random.Random(i)
        process.observe(draw(SIZE, N_SKIPPED, rng), rng.random())


def suggested(process: SuggestionProcess, step: int) -> tuple[int, ...] | None:
    process.ask(step, N_SKIPPED, [])
    return process.take(wait=True)


def play(strategy: IntervalStrategy, step: int) -> str:
    proposal = strategy.propose()
    score = random.Random(step).random()
    strategy.observe(Trial(step, proposal.layer_set, proposal.origin, score, score))
    return proposal.origin


def test_propose_does_not_wait_for_a_suggestion() -> None:
    """While the process loads its library, which takes more than a second, proposals have another origin."""
    with closing(IntervalStrategy(SearchProblem(LayerSet(30), 25, 0), engine="gp", interval=1)) as strategy:
        assert [play(strategy, step) for step in (1, 2)] == ["random", "random"]
        origins = [play(strategy, step) for step in range(3, 23)]
    assert origins == ["late"] * 20


def test_propose_uses_a_late_suggestion_at_the_next_due_step() -> None:
    with closing(IntervalStrategy(SearchProblem(LayerSet(8), 4, 0), engine="tpe", interval=2)) as strategy:
        origins = [play(strategy, step) for step in range(1, 5)]
        give_up = time.monotonic() + WAIT_S
        while origins[-1] != "tpe" and time.monotonic() < give_up:
            time.sleep(0.01)
            origins.append(play(strategy, len(origins) + 1))
    assert origins[:4] == ["random", "random", "random", "late"]
    assert set(origins[5:-1:2]) <= {"late"}
    assert set(origins[::2]) == {"random"}
    assert origins[-1] == "tpe"


def test_pending_suggestion_is_requested_again_after_a_restore() -> None:
    """A run that is resumed elsewhere gets the same suggestion, whatever was observed in the meantime."""
    problem = SearchProblem(LayerSet(8), 4, 0)
    trials: list[Trial] = []
    with closing(IntervalStrategy(problem, engine="tpe", interval=1)) as first:
        for step in range(3):
            proposal = first.propose()
            trials.append(Trial(step, proposal.layer_set, proposal.origin, 0.1 * step, 0.1 * step))
            first.observe(trials[-1])
        state = first.state()
        assert state["asked"] is not None and state["asked"]["n_observed"] < 3
        with closing(IntervalStrategy(problem, engine="tpe", interval=1)) as second:
            for trial in trials:
                second.observe(trial)
            second.restore(state)
            give_up = time.monotonic() + WAIT_S
            for strategy in (first, second):
                assert strategy._process is not None and strategy._process._answer is not None
                strategy._process._answer.result(max(0.0, give_up - time.monotonic()))
            proposals = [strategy.propose() for strategy in (first, second)]
    assert proposals[0] == proposals[1] and proposals[0].origin == "tpe"


def test_suggestion_for_another_size_is_dropped() -> None:
    with closing(IntervalStrategy(SearchProblem(LayerSet(8), 4, 0), engine="tpe", interval=1)) as strategy:
        give_up = time.monotonic() + WAIT_S
        step = 0
        while play(strategy, step) != "tpe" and time.monotonic() < give_up:
            time.sleep(0.01)
            step += 1
        time.sleep(1.0)  # the next one, for 4 sub-layers, is there by now
        strategy.set_n_skipped(3)
        proposal = strategy.propose()
    assert proposal.origin == "late" and proposal.layer_set.n_skipped == 3


def test_suggestion_does_not_change_the_draws_of_other_steps() -> None:
    with (
        closing(IntervalStrategy(SearchProblem(LayerSet(12), 8, 7, deterministic=True), "tpe", interval=3)) as learning,
        closing(IntervalStrategy(SearchProblem(LayerSet(12), 8, 7))) as drawing,
    ):
        pairs = []
        for step in range(1, 10):
            proposal = learning.propose()
            learning.observe(Trial(step, proposal.layer_set, proposal.origin, 0.5, 0.1 * step))
            pairs.append((proposal, drawing.propose()))
    assert [one.origin for one, _ in pairs] == (["random"] * 2 + ["tpe"]) * 3
    assert [one for one, _ in pairs if one.origin == "random"] == [
        other for one, other in pairs if one.origin == "random"
    ]


def test_process_starts_with_the_first_request_and_ends_with_close(process: SuggestionProcess) -> None:
    assert process.pid is None
    process.ask(1, N_SKIPPED, [])
    pid = process.pid
    assert pid is not None
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert process.take(wait=True) is None


def test_process_is_restarted_with_its_history_when_killed(process: SuggestionProcess) -> None:
    expected = suggested(process, step=1)
    pid = process.pid
    assert expected is not None and pid is not None
    os.kill(pid, signal.SIGSTOP)  # it must not answer before it is killed
    process.ask(2, N_SKIPPED, [])
    os.kill(pid, signal.SIGKILL)
    assert process.take(wait=True) is None  # that suggestion is lost
    assert suggested(process, step=1) == expected
    assert process.pid not in (None, pid)


def test_suggestion_does_not_depend_on_how_trials_are_sent(process: SuggestionProcess) -> None:
    suggested(process, step=1)
    extra = draw(SIZE, N_SKIPPED, random.Random(99))
    process.observe(extra, 2.0)
    in_two_parts = suggested(process, step=2)
    with closing(SuggestionProcess("tpe", seed=3)) as whole:
        observe(whole, 10)
        whole.observe(extra, 2.0)
        assert in_two_parts == suggested(whole, step=2)


def test_process_gives_up_with_one_warning_when_deadlines_are_missed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interval, "DEADLINE_S", 0.01)
    with caplog.at_level(logging.WARNING), closing(SuggestionProcess("gp", seed=0)) as process:
        observe(process, 4)
        assert [suggested(process, step) for step in range(MAX_FAILURES)] == [None] * MAX_FAILURES
        assert process.gave_up
        process.ask(9, N_SKIPPED, [])
        assert not process.in_flight and process.pid is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no suggestion within 0.01 s" in caplog.text


def test_process_gives_up_without_an_interpreter(
    process: SuggestionProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert [suggested(process, step) for step in range(MAX_FAILURES)] == [None] * MAX_FAILURES
    assert process.gave_up


def test_process_fails_with_its_request_when_the_answer_cannot_be_read(
    process: SuggestionProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A site hook of the environment may write to standard output before the answer."""
    (tmp_path / "sitecustomize.py").write_text("print('welcome', flush=True)")
    with caplog.at_level(logging.INFO), monkeypatch.context() as patched:
        patched.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
        assert suggested(process, step=1) is None
    assert "suggestions=failed" in caplog.text
    assert suggested(process, step=2) is not None


def test_suggestion_process_ends_when_its_owner_is_killed() -> None:
    script = (
        "import os, signal\n"
        "from swiftopt.optimizer.strategies.interval import SuggestionProcess\n"
        "process = SuggestionProcess('tpe', 0)\n"
        "process.observe((1, 0, 0, 1), 0.5)\n"
        "process.ask(1, 2, [])\n"
        "process.take(wait=True)\n"
        "print(process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S)
    pid = int(killed.stdout)
    give_up = time.monotonic() + WAIT_S
    while is_running(pid) and time.monotonic() < give_up:
        time.sleep(0.01)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_process_reports_why_it_failed(caplog: pytest.LogCaptureFixture, process: SuggestionProcess) -> None:
    with caplog.at_level(logging.INFO):
        process.ask(1, SIZE + 1, [])  # more sub-layers than there are
        assert process.take(wait=True) is None
    assert "ValueError" in caplog.text
    assert not process.gave_up


def test_strategy_draws_when_its_process_has_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interval, "DEADLINE_S", 0.01)
    with closing(IntervalStrategy(SearchProblem(LayerSet(8), 4, 0, deterministic=True), "gp", interval=1)) as strategy:
        origins = [play(strategy, step) for step in range(1, 9)]
    assert origins == ["random"] + ["late"] * MAX_FAILURES + ["random"] * 4


def test_process_ignores_scores_that_are_not_finite() -> None:
    with closing(SuggestionProcess("gp", seed=0)) as process:
        process.observe((1, 0), float("nan"))
        process.observe((0, 1), float("-inf"))
        process.ask(1, 1, [])
        assert not process.in_flight  # nothing to learn from


@pytest.mark.parametrize(
    ("engine", "library"),
    [
        ("tpe", "optuna"),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (("gp", "sklearn"), ("cube", "bayes_opt"))),
    ],
)
def test_suggestion_process_imports_its_library_and_never_torch(engine: str, library: str) -> None:
    """The interpreter lists its imports on standard error; the answer shows that the engine ran."""
    scores = [["110000", 0.5], ["011000", 0.7], ["000110", 0.2]]
    request = {"engine": engine, "seed": 4, "n_skipped": 2, "scores": scores, "pending": ["001100"]}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", SUGGESTIONS_MODULE],
        input=json.dumps(request) + "\n",
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )
    answer = json.loads(done.stdout)
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert sum(answer["bits"]) == 2
    assert library in imported
    assert "torch" not in imported


def test_suggestion_differs_from_one_that_is_still_being_scored() -> None:
    with closing(SuggestionProcess("gp", seed=0)) as process:
        observe(process, 12)
        first = suggested(process, step=1)
        assert first is not None
        process.ask(1, N_SKIPPED, [first])
        assert process.take(wait=True) not in (None, first)


def test_suggestion_process_needs_no_main_guard_in_the_callers_script() -> None:
    script = (
        "from swiftopt.optimizer.strategies import SearchProblem, strategy_info\n"
        "from swiftopt.core.types import LayerSet, Trial\n"
        "strategy = strategy_info('tpe').make(SearchProblem(LayerSet(6), 3, 0, deterministic=True))\n"
        "for step in range(3):\n"
        "    proposal = strategy.propose()\n"
        "    strategy.observe(Trial(step, proposal.layer_set, proposal.origin, 0.5, 0.5))\n"
        "print(proposal.origin)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert (done.stdout, done.stderr) == ("tpe\n", "")


def test_engine_gets_the_best_and_the_latest_sets_once_each() -> None:
    sets = [tuple(map(int, f"{i:06b}")) for i in range(60)]
    scores = [(bits, 100.0 if i in (3, 8) else float(i % 7)) for i, bits in enumerate(sets)]
    points = points_of([*scores, (sets[3], 50.0)], limit=9)  # scored again: its mean, and now the latest
    assert [bits for bits, _ in points[-6:]] == [*sets[55:], sets[3]]
    assert points[-1] == (sets[3], 75.0)
    assert points[0] == (sets[8], 100.0)
    assert len({bits for bits, _ in points}) == 9


@pytest.mark.parametrize("n_scores", [1, 9])
def test_next_point_equals_the_librarys_exactly(n_scores: int) -> None:
    from bayes_opt import BayesianOptimization
    from bayes_opt.acquisition import UpperConfidenceBound

    rng = random.Random(n_scores)
    scores = [(tuple(rng.random() for _ in range(5)), rng.random()) for _ in range(n_scores)]
    names = [f"x{i}" for i in range(5)]
    theirs = BayesianOptimization(
        None, dict.fromkeys(names, (0.0, 1.0)), acquisition_function=UpperConfidenceBound(kappa=KAPPA), random_state=3
    )
    for point, score in scores:
        theirs.register(dict(zip(names, point, strict=True)), score)
    assert next_point(scores, 3).tolist() == list(theirs.suggest().values())


def test_repair_flips_as_few_bits_as_possible() -> None:
    bits = (1, 1, 1, 1, 0, 0, 0, 0)
    for n_skipped in range(9):
        fixed = repair(bits, n_skipped, random.Random(n_skipped))
        assert sum(fixed) == n_skipped
        assert sum(a != b for a, b in zip(bits, fixed, strict=True)) == abs(n_skipped - 4)


def test_exchange_keeps_the_number_skipped_and_moves_one() -> None:
    bits = draw(SIZE, N_SKIPPED, random.Random(0))
    moved = exchange(bits, random.Random(1))
    assert sum(moved) == N_SKIPPED
    assert sum(a != b for a, b in zip(bits, moved, strict=True)) == 2
    assert exchange((1, 1), random.Random(0)) == (1, 1)
    assert LayerSet(8).with_bits(bits).n_skipped == N_SKIPPED
