"""Times are compared only with times of the same moment."""

from collections.abc import Callable
from itertools import count

import pytest

from swiftopt.models import costs
from swiftopt.models.saved import no_step

SECONDS = {"one": 1.0, "four": 1.2, "part": 0.4}


class Machine:
    """A clock that passes advance, by more while the machine is slow."""

    def __init__(self, slowness: Callable[[int], float]) -> None:
        self.now, self.slowness, self.calls = 0.0, slowness, count()

    def run(self, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.now += seconds * self.slowness(next(self.calls))

        return run


def measured(monkeypatch: pytest.MonkeyPatch, slowness: Callable[[int], float]) -> dict[str, float]:
    machine = Machine(slowness)
    monkeypatch.setattr(costs, "perf_counter", lambda: machine.now)
    monkeypatch.setattr(costs, "BUDGET_S", 1e9)
    return costs._beside("one", {name: machine.run(seconds) for name, seconds in SECONDS.items()}, no_step)[0]


def test_a_quiet_machine_is_measured_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(monkeypatch, lambda call: 1.0) == pytest.approx(SECONDS)


def test_a_machine_that_slows_down_for_a_while_does_not_bend_the_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, lambda call: 3.0 if 17 <= call < 40 else 1.0)
    assert found["four"] / found["one"] == pytest.approx(1.2)
    assert found["part"] / found["one"] == pytest.approx(0.4)


def test_one_disturbed_pass_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for disturbed in range(20):
        found = measured(monkeypatch, lambda call, at=disturbed: 50.0 if call == at else 1.0)
        assert found == pytest.approx(SECONDS), disturbed
