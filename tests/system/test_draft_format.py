"""The choice of a draft's format, by its cost on this machine and its agreement with the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import cheap_draft_costs, worded_runtime
from tiny_files import save

from swiftopt.core.costs import CostProfile
from swiftopt.core.events import Event, FormatTried, PhaseChanged, TaskFinished
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.requests import TuneRequest
from swiftopt.core.settings import STORED
from swiftopt.core.types import Prompt, Sampling
from swiftopt.decoding.context import Context, Ending
from swiftopt.decoding.draft import Draft, Drafter
from swiftopt.decoding.draft_tree import DraftTree
from swiftopt.decoding.loop import decode
from swiftopt.decoding.methods import PLAIN, Method
from swiftopt.decoding.session import Session
from swiftopt.decoding.work import PassGenerator, exhaust
from swiftopt.models.runtime import Runtime
from swiftopt.optimizer import drafting
from swiftopt.optimizer.drafting import choose_format
from swiftopt.optimizer.evaluation import WindowScore
from swiftopt.optimizer.verdict import ERROR_RATE, Timed
from swiftopt.store import Store
from swiftopt.tasks.tune import run_tuning

WINDOW = 8


class Knowing(Drafter):
    """Drafts the model's next tokens, a set number at a time."""

    def __init__(self, n: int) -> None:
        self.n = n

    def begin(self, context: Context) -> Knowing:
        prompt = context.token_ids[: context.n_prompt]
        self.said = decode(context.runtime, prompt, PLAIN, context.rule, Ending(60)).token_ids
        self.context = context
        return self

    def draft(self, room: int) -> PassGenerator[Draft]:
        yield from ()
        done = len(self.context.generated)
        ahead = self.said[done : done + min(self.n, room)]
        return Draft(DraftTree.grow(self.context.token_ids[-1], [(token_id,) for token_id in ahead]))

    def max_rows(self, room: int) -> int:
        return 1 + room


PROMPTS = [Prompt(f"p{i}", "t", text=f"w{i + 2} w{i + 3} w{i + 4}") for i in range(3)]


def with_shares(**shares: float) -> Callable[[str], CostProfile]:
    """Return costs in which a draft pass of a format is that share of a plain one; other formats do not run."""

    def measured(name: str) -> CostProfile:
        if name not in shares:
            raise NotImplementedError(f"no kernel for {name}\nand a long trace")
        costs = cheap_draft_costs(shares[name])
        return dataclasses.replace(costs, formats={name: costs.formats["int4"]})

    return measured


def chosen(
    measured: Callable[[str], CostProfile], n_tokens: int = 40
) -> tuple[str, CostProfile, list[FormatTried], Runtime]:
    runtime, tried = worded_runtime(), list[FormatTried]()
    choosing = choose_format(Session(runtime, Sampling(), n_tokens), PROMPTS, WINDOW, cheap_draft_costs(), measured)
    while True:
        try:
            if isinstance(event := next(choosing), FormatTried):
                tried.append(event)
        except StopIteration as end:
            return *end.value, tried, runtime


def test_cheap_format_is_chosen_and_said_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "SUFFICIENT_SPEEDUP", 1.06)
    name, costs, told, runtime = chosen(with_shares(int4=0.01, int8=0.01))
    assert name == "int4" and set(costs.formats) == {"int4"}
    (tried,) = told  # int8 was not looked at, for int4 is enough
    assert tried.expected is not None and tried.expected > 1.06 and tried.agreement is not None
    assert runtime.copies.n_bytes > 0


def timing(*speeds: float) -> Callable[..., Generator[Event, None, list[list[Timed]]]]:
    """Stands in for `time_methods`; a method has the same speed on every prompt."""

    def timed(*_: object) -> Generator[Event, None, list[list[Timed]]]:
        yield from ()
        return [[Timed(n, n / speed) for n in (10, 12, 14)] for speed in speeds]

    return timed


def has_copies(runtime: Runtime) -> list[str]:
    """Return the formats with copies of weights."""
    whole = LayerSet(runtime.n_layers)
    return [name for name in ("int4", "int8") if runtime.copies.bytes_of(whole.filled(name))]


@pytest.mark.parametrize(("speeds", "best"), [((30.0, 20.0), "int4"), ((20.0, 30.0), "int8")])
def test_near_estimates_are_decided_by_time(
    speeds: tuple[float, ...], best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "SUFFICIENT_SPEEDUP", 99.0)
    monkeypatch.setattr(drafting, "MAX_SPEEDUP_RATIO", 99.0)
    monkeypatch.setattr(drafting, "time_methods", timing(*speeds))
    name, costs, told, runtime = chosen(with_shares(int4=0.1, int8=0.1))
    assert name == best and set(costs.formats) == {best} and has_copies(runtime) == [best]
    assert [tried.format for tried in told[2:]] == ["int4", "int8"]
    assert [tried.tok_s for tried in told[2:]] == pytest.approx(speeds)
    monkeypatch.setattr(drafting, "time_methods", timing())  # too little to time: the estimates decide
    assert chosen(with_shares(int4=0.3, int8=0.2))[0] == "int8"


def test_far_estimates_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "SUFFICIENT_SPEEDUP", 99.0)
    name, _, told, runtime = chosen(with_shares(int4=0.01, int8=0.9))
    assert name == "int4" and [tried.format for tried in told] == ["int4", "int8"]
    assert has_copies(runtime) == ["int4"]


def by_turns(n_prompts: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[Timed]], list[str]]:
    """Return the result of timing two methods, and the order of their runs."""
    runtime, order = worded_runtime(), list[str]()

    class Noting(Knowing):
        def begin(self, context: Context) -> Knowing:
            order.append(str(self.n))
            return super().begin(context)

    methods = [Method(str(n), Noting(n)) for n in (1, 2)]
    prompts = [replace(PROMPTS[0], id=f"p{i}") for i in range(n_prompts)]
    phase = PhaseChanged("t", "profile", "timing")
    work = drafting.time_methods(Session(runtime, Sampling(), 20), prompts, methods, phase)
    return exhaust(work, lambda event: None), order


def test_methods_are_timed_by_turns_until_one_is_surely_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert by_turns(2, monkeypatch) == ([], [])  # too few prompts
    monkeypatch.setattr(drafting, "unbeaten_methods", lambda runs, error: [0, 1])
    runs, order = by_turns(16, monkeypatch)
    assert [len(own) for own in runs] == [4, 4] and order == ["1", "2", "2", "1"] * 2  # a quarter of the prompts
    monkeypatch.setattr(drafting, "unbeaten_methods", lambda runs, error: [1])
    assert len(by_turns(40, monkeypatch)[1]) == 2 * drafting.MIN_TIMED_PROMPTS


def test_method_is_ahead_when_its_whole_interval_is() -> None:
    base = [Timed(10, 1.0), Timed(10, 1.1), Timed(10, 0.9)]
    double = [Timed(10, run.seconds / 2) for run in base]
    mixed = [Timed(10, 0.5), Timed(10, 1.6), Timed(10, 0.8)]
    assert drafting.unbeaten_methods([base, double], ERROR_RATE) == [1] and drafting.unbeaten_methods(
        [double, base, base], ERROR_RATE
    ) == [0]
    assert (
        drafting.unbeaten_methods([base, mixed], ERROR_RATE)
        == drafting.unbeaten_methods([base, base], ERROR_RATE)
        == [0, 1]
    )


def test_method_is_beaten_when_another_leads_by_a_standard_error() -> None:
    base = [Timed(10, seconds) for seconds in (1.0, 1.1, 0.9, 1.0)]
    double, alike = [Timed(10, run.seconds / 2) for run in base], [Timed(10, run.seconds * 0.999) for run in base[::-1]]
    assert drafting.unbeaten_methods([base, double]) == [1] and drafting.unbeaten_methods([double, base]) == [0]
    assert drafting.unbeaten_methods([base, alike])[0] == drafting.unbeaten_methods([alike, base])[0] == 0
    assert drafting.unbeaten_methods([base, alike, double]) == [2]


def test_format_that_costs_as_much_as_the_model_is_not_chosen_and_its_copies_go() -> None:
    name, costs, told, runtime = chosen(with_shares(int4=0.97, int8=0.99))
    assert name == STORED and costs == cheap_draft_costs()
    assert [tried.format for tried in told] == ["int4", "int8"]
    assert runtime.copies.n_bytes == 0


def test_format_without_a_kernel_is_passed_over_with_a_reason() -> None:
    name, _, told, _ = chosen(with_shares(int8=0.01))
    assert name == "int8"
    assert told[0] == FormatTried("int4", None, None, "no kernel for int4")
    assert chosen(with_shares())[0] == STORED


@pytest.mark.parametrize("n_drafted", [0, 2, 5, 7])
def test_every_text_is_looked_at_twice_however_far_a_round_goes(
    n_drafted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def scored(context: Context, sets: Sequence[LayerSet], window: int) -> PassGenerator[list[WindowScore]]:
        yield from ()
        seen.append(len(context.generated))
        return [WindowScore((0,) * window, (0.99,) * window)]

    monkeypatch.setattr(drafting, "score_window", scored)
    monkeypatch.setattr(drafting, "adaptive", lambda *_: Method("knowing", Knowing(n_drafted)))
    chosen(with_shares(int4=0.01))
    assert len(seen) == 2 * 2  # prompts and windows
    assert all(later - earlier >= WINDOW for earlier, later in zip(seen[::2], seen[1::2], strict=True))


def test_answers_shorter_than_a_window_leave_the_decision_to_the_costs() -> None:
    assert chosen(with_shares(int4=0.05), n_tokens=4)[0] == "int4"
    assert chosen(with_shares(int4=0.99), n_tokens=4)[0] == STORED


def test_tuning_that_chooses_keeps_its_choice_in_settings_and_snapshot(tmp_path: Path) -> None:
    lines = "\n".join(f'{{"prompt": "w{i} w{i + 1} w{i + 2}"}}' for i in range(2, 10))
    (tmp_path / "notes.jsonl").write_text(lines + "\n", encoding="utf-8")
    request = TuneRequest(str(save(tmp_path / "tiny")), str(tmp_path / "notes.jsonl"), dtype="float32")
    settings = dataclasses.replace(request.settings, context_window=8, max_steps=6)
    request = dataclasses.replace(request, max_new_tokens=20, settings=settings, out=str(tmp_path / "out.jsonl"))
    events: list[Event] = []
    with Store.open(str(tmp_path / "a.db")) as store:
        (result,) = run_tuning(request, store, events.append).tasks
        kept = store.jobs.get(result.record.job or "")
    tried = [event for event in events if isinstance(event, FormatTried)]
    assert tried and isinstance(events[-1], TaskFinished) and kept.state == "succeeded"
    chosen_one = result.record.settings["draft_format"]
    assert chosen_one in {*(event.format for event in tried), STORED}
    formats = {name for _, name in result.record.layer_set.formats}
    assert formats == ({chosen_one} if chosen_one != STORED else set())
