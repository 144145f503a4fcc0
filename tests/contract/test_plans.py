"""Plans of any method, heads and probes, and comparisons: the laws that they keep on every database."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import Engine, event

from swiftopt.core.errors import InvalidInput, LayerSetNotFound, LearnedNotFound, StoreError
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.records import LayerSetRecord, LearnedRecord, ModelInfo, Plan
from swiftopt.store import Store
from swiftopt.store.tables import MoveRow

MODEL = ModelInfo("f" * 16, "LlamaForCausalLM", 30, 135_000_000, ("smol", "org/smol"))
HERE: dict[str, Any] = {"device": "NVIDIA H200", "dtype": "bfloat16"}
SET = LayerSetRecord("smol", "code", LayerSet(30, frozenset({7}), frozenset({8})), MODEL.fingerprint, **HERE)
TUNED = dataclasses.replace(SET, verdict="use", measured_speedup=1.2, measured_interval=(1.1, 1.3))
SPD = Plan(
    "spd",
    settings={"draft_length": 5},
    verdict="use",
    draft_model="smaller",
    measured_speedup=1.4,
    measured_interval=(1.3, 1.5),
    acceptance_rate=0.61,
    mean_generated_length=2.44,
    **HERE,
)
VLLM = Plan("prompt-lookup", settings={"method": "ngram"}, verdict="use", measured_speedup=1.2, engine="vllm", **HERE)
HEADS = LearnedRecord(
    "heads",
    "smol",
    "code",
    MODEL.fingerprint,
    (7, 15),
    2**33,
    settings={"epochs": 3},
    figures={"agreement": 1 / 3},
    curve=((0, 2.5), (10, 1 / 7)),
    stream_sha256="ab",
    swiftopt_version="0.1.0",
    created_at="2026-11-21T00:00:00Z",
)
WEIGHTS = bytes(range(256)) * 40


@pytest.fixture
def store(store: Store) -> Store:
    store.remember_model(MODEL)
    return store


def standing(store: Store) -> tuple[int, str]:
    found = store.lookup("smol", "code", **HERE)
    return found.version, found.plan.method


# --- plans ------------------------------------------------------------------------------------------------------------


def test_plan_comes_back_as_it_was_stored_with_its_layer_set_and_heads(store: Store) -> None:
    stored, heads = store.add_layer_set(SET), store.add_learned(HEADS, WEIGHTS)
    for plan in (SPD, dataclasses.replace(SPD, method="adadecode", layer_set=stored, learned=heads)):
        found = store.add_plan("org/smol", "code", plan)
        assert found.plan == plan and (found.alias, found.fallback) == ("best", None)
        assert store.lookup(MODEL.fingerprint, "code", **HERE) == found
        assert store.plan("smol", "code", found.version) == dataclasses.replace(found, alias="")


def test_a_model_takes_over_what_is_stored_under_its_earlier_fingerprint(store: Store) -> None:
    earlier, heads = store.add_plan("smol", "code", SPD), store.add_learned(HEADS, WEIGHTS)
    now = dataclasses.replace(MODEL, fingerprint="now", names=("file.gguf",), earlier=(MODEL.fingerprint,))
    store.remember_model(now)
    assert store.lookup("now", "code", **HERE) == store.lookup("smol", "code", **HERE) == earlier
    assert store.learned("now", "code", "heads") == dataclasses.replace(heads, fingerprint="now")
    assert [info.fingerprint for info in store.models()] == ["now"]


def test_versions_under_an_earlier_fingerprint_are_numbered_after_the_models_own(store: Store) -> None:
    store.add_plan("smol", "code", SPD)
    store.add_learned(HEADS, WEIGHTS)
    now = dataclasses.replace(MODEL, fingerprint="now", names=("file.gguf",))
    store.remember_model(now)
    store.add_plan("now", "code", dataclasses.replace(SPD, method="plain"))
    store.add_learned(dataclasses.replace(HEADS, fingerprint="now", model="file.gguf"), WEIGHTS)
    for _ in range(2):
        store.remember_model(dataclasses.replace(now, earlier=("unknown", MODEL.fingerprint)))
        assert [one.plan.method for one in store.plan_versions("now", "code")] == ["plain", "spd"]
        assert [store.plan("smol", "code", version).plan.method for version in (1, 2)] == ["plain", "spd"]
        assert [(one.version, one.model) for one in store.learned_list("now")] == [(1, "file.gguf"), (2, "smol")]
        assert [info.fingerprint for info in store.models()] == ["now"]


def test_layer_sets_and_plans_of_a_task_share_one_sequence_of_versions(store: Store) -> None:
    assert [store.add_layer_set(SET).version, store.add_plan("smol", "code", SPD).version] == [1, 2]
    assert [store.add_layer_set(SET).version, store.add_plan("smol", "code", SPD).version] == [3, 4]
    assert store.add_plan("smol", "notes", SPD).version == 1
    assert [one.version for one in store.layer_sets()] == [3, 1]


def test_versions_are_distinct_when_tuning_and_comparisons_write_at_once(database_url: str, store: Store) -> None:
    def add(tuned: bool) -> list[int | None]:
        with Store.open(database_url) as mine:
            return [
                mine.add_layer_set(SET).version if tuned else mine.add_plan("smol", "code", SPD).version
                for _ in range(8)
            ]

    with ThreadPoolExecutor(2) as pool:
        numbers = [version for some in pool.map(add, (True, False)) for version in some]
    assert sorted(numbers, key=str) == sorted(range(1, 17), key=str)


def test_plan_that_was_not_promoted_is_not_looked_up_until_it_is(store: Store) -> None:
    store.add_layer_set(SET)
    assert store.add_plan("smol", "code", SPD, promote=False).alias == ""
    assert standing(store) == (1, "swift")
    assert store.promote("smol", "code", 2).plan == SPD
    assert standing(store) == (2, "spd")
    assert store.rollback("smol", "code").version == 1


def test_plan_for_another_engine_is_found_by_that_engine_and_never_as_the_best(store: Store) -> None:
    own = store.add_plan("smol", "code", SPD)
    first = store.add_plan("smol", "code", VLLM)
    assert (first.alias, first.version) == ("vllm", own.version + 1)
    assert standing(store) == (own.version, "spd")
    found = store.lookup("smol", "code", alias="vllm", **HERE)
    assert found == first and found.plan.engine == "vllm" and found.to_json()["engine"] == "vllm"
    second = store.add_plan("smol", "code", dataclasses.replace(VLLM, method="plain", settings={}), promote=False)
    assert store.promote("smol", "code", second.version).alias == "vllm"  # `best` of an engine's plan is the engine's
    assert store.lookup("smol", "code", alias="vllm").version == second.version
    assert store.rollback("smol", "code", "vllm").version == first.version
    assert standing(store) == (own.version, "spd")
    since = {each.version: bool(each.best_for) for each in store.plan_versions("smol")}
    assert since == {own.version: True, first.version: True, second.version: False}
    with pytest.raises(InvalidInput, match="is not for vllm: choose one that is, or use another alias"):
        store.promote("smol", "code", own.version, "vllm")
    with pytest.raises(
        LayerSetNotFound, match=r"no plan for openvino is stored for smol/code: run .* --engine openvino"
    ):
        store.lookup("smol", "code", alias="openvino")


def test_look_up_reads_one_move_by_its_index_however_many_there_are(store: Store) -> None:
    for n in range(1, 6):
        store.add_layer_set(dataclasses.replace(SET, dtype=f"dtype {n}"))
    asked, read = list[Any](), list[MoveRow]()
    event.listen(store.engine, "before_cursor_execute", lambda *values: asked.append(values[2:4]))
    event.listen(MoveRow, "load", note := lambda row, _: read.append(row))
    found = store.lookup("smol", "code", HERE["device"], "dtype 3")
    event.remove(MoveRow, "load", note)
    assert found.version == 3 and len(read) == 1
    if store.engine.dialect.name == "sqlite":  # PostgreSQL scans what is small
        queries = [(f"EXPLAIN QUERY PLAN {words}", values) for words, values in asked if words.startswith("SELECT")]
        with store.engine.connect() as connection:
            steps = "\n".join(step[3] for query in queries for step in connection.exec_driver_sql(*query))
        assert "SCAN swiftopt" not in steps and "ix_swiftopt_alias_moves_model_id" in steps, steps


def test_plan_is_the_best_of_its_own_device_and_dtype(store: Store) -> None:
    store.add_layer_set(SET)
    store.add_plan("smol", "code", dataclasses.replace(SPD, device="cpu", dtype="float32"))
    assert standing(store) == (1, "swift")
    assert store.lookup("smol", "code", "cpu", "float32").plan.method == "spd"
    assert store.lookup("smol", "code", "cpu", "bfloat16").fallback == "tuned on cpu float32"


def test_versions_say_what_they_are_and_where_they_are_the_best(store: Store) -> None:
    first = store.add_layer_set(dataclasses.replace(TUNED, created_at="2026-11-21T00:00:00Z"))
    store.add_plan("smol", "code", dataclasses.replace(SPD, layer_set=first))
    store.add_plan("smol", "code", dataclasses.replace(SPD, device="cpu"))
    store.add_plan("smol", "code", SPD, promote=False)
    store.add_plan("smol", "notes", SPD, promote=False)
    store.rollback("smol", "code")
    found = store.plan_versions(MODEL.fingerprint, "code")
    assert [each.version for each in found] == [4, 3, 2, 1]
    assert all((each.model, each.names) == ("smol", ("smol", "org/smol", MODEL.fingerprint)) for each in found)
    assert [each.plan for each in found] == [store.plan("smol", "code", each.version).plan for each in found]
    assert [[where[:2] for where in each.best_for] for each in found] == [[], [], [("NVIDIA H200", "bfloat16")], []]
    assert found[3].created_at == "2026-11-21T00:00:00Z" and found[0].created_at is None
    assert found[3].own_set == first and found[2].own_set is None, "a plan may take over another version's set"
    assert [each.task for each in store.plan_versions()] == ["notes", "code", "code", "code", "code"]
    assert store.plan_versions("nobody") == []


def test_moves_of_an_alias_are_listed_with_what_was_taken_back(store: Store) -> None:
    for _ in range(3):
        store.add_plan("smol", "code", SPD)
    store.rollback("smol", "code")
    moves = store.alias_moves("smol", "code")
    assert [(move.version, move.is_rollback, move.taken_back) for move in moves] == [
        (2, True, False),
        (3, False, True),
        (2, False, False),
        (1, False, False),
    ]
    assert {(move.device, move.dtype) for move in moves} == {("NVIDIA H200", "bfloat16")}
    assert store.alias_moves("smol", "notes") == []


def test_layer_set_of_a_plan_is_that_which_it_decodes_with(store: Store) -> None:
    stored = store.add_layer_set(dataclasses.replace(SET, task="default"))
    store.add_plan("smol", "code", dataclasses.replace(SPD, method="self-sd", layer_set=stored))
    assert store.layer_set("smol", "code", 1) == stored


def test_layer_set_of_a_plan_without_one_is_not_found_and_those_with_one_are_named(store: Store) -> None:
    store.add_plan("smol", "code", SPD)
    sentence = "version 1 of smol/code decodes with spd and has no layer set: "
    with pytest.raises(LayerSetNotFound, match=sentence + "tune one with `swiftopt tune --model smol"):
        store.layer_set("smol", "code", 1)
    store.add_layer_set(SET)
    with pytest.raises(LayerSetNotFound, match=sentence + "those with one are 2$"):
        store.layer_set("smol", "code", 1)


def test_plan_of_what_is_not_stored_is_refused_and_nothing_is_written(store: Store) -> None:
    stored, heads = store.add_layer_set(SET), store.add_learned(HEADS, WEIGHTS)
    for missing in (SET, dataclasses.replace(stored, version=2), dataclasses.replace(stored, task="notes")):
        with pytest.raises(LayerSetNotFound, match="is not stored for that model: store it first"):
            store.add_plan("smol", "code", dataclasses.replace(SPD, layer_set=missing))
    with pytest.raises(LearnedNotFound, match="no version 2 of heads"):
        store.add_plan("smol", "code", dataclasses.replace(SPD, learned=dataclasses.replace(heads, version=2)))
    with pytest.raises(StoreError, match="no model nobody is stored"):
        store.add_plan("nobody", "code", SPD)
    assert standing(store) == (1, "swift")
    with pytest.raises(LayerSetNotFound, match=r"stored are 1$"):
        store.plan("smol", "code", 2)


def test_plans_of_an_imported_model_are_numbered_after_those_of_the_loaded_one(store: Store) -> None:
    store.add_layer_set(SET)
    store.add_layer_set(dataclasses.replace(SET, model="theirs", fingerprint=None))
    store.add_plan("theirs", "code", SPD)
    store.add_comparison("theirs", "code", "cpu", "float32", {}, "2026-11-21T00:00:00Z")
    store.remember_model(dataclasses.replace(MODEL, names=("theirs",)))
    assert [store.plan("smol", "code", version).plan.method for version in (1, 2, 3)] == ["swift", "swift", "spd"]
    assert standing(store) == (3, "spd")
    assert len(store.comparisons("smol")) == 1


# --- when a tuned set becomes the best --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("best", "new", "stays"),
    [
        (SPD, TUNED, True),
        (SPD, dataclasses.replace(TUNED, measured_speedup=1.5), False),
        (SPD, dataclasses.replace(TUNED, measured_speedup=1.4), False),
        (SPD, dataclasses.replace(TUNED, measured_speedup=1.5, verdict="plain"), True),
        (SPD, SET, True),
        (dataclasses.replace(SPD, measured_speedup=None), SET, True),
        (dataclasses.replace(SPD, method="plain", verdict="plain"), TUNED, False),
        (dataclasses.replace(SPD, verdict="unmeasured"), SET, False),
        (dataclasses.replace(SPD, method="swift"), TUNED, False),
        (dataclasses.replace(SPD, device="cpu"), TUNED, False),
        (dataclasses.replace(SPD, dtype="float32"), TUNED, False),
    ],
)
def test_tuned_set_becomes_the_best_unless_a_comparisons_faster_method_stands_there(
    store: Store, best: Plan, new: LayerSetRecord, stays: bool
) -> None:
    store.add_plan("smol", "code", best)
    assert store.add_layer_set(new).version == 2
    assert store.lookup("smol", "code", **HERE).version == (1 if stays else 2)
    assert store.promote("smol", "code", 2) == store.lookup("smol", "code", **HERE)


def test_plan_of_another_device_that_was_promoted_later_does_not_hide_the_faster_one_here(store: Store) -> None:
    store.add_plan("smol", "code", SPD)
    store.add_plan("smol", "code", dataclasses.replace(SPD, device="cpu", measured_speedup=1.01))
    store.add_layer_set(TUNED)
    assert standing(store) == (1, "spd")


def test_comparisons_plan_becomes_the_best_whatever_stands_there(store: Store) -> None:
    store.add_plan("smol", "code", SPD)
    store.add_plan("smol", "code", dataclasses.replace(SPD, method="jacobi", measured_speedup=1.1))
    assert standing(store) == (2, "jacobi")


# --- heads and probes -------------------------------------------------------------------------------------------------


def test_heads_and_their_weights_come_back_as_they_were_stored(store: Store) -> None:
    stored = store.add_learned(HEADS, WEIGHTS)
    assert stored == dataclasses.replace(HEADS, version=1)
    for name in (*MODEL.names, MODEL.fingerprint):
        assert store.learned(name, "code", "heads") == stored
    assert store.weights(stored) == WEIGHTS


def test_newest_version_is_found_and_the_others_stay(store: Store) -> None:
    first = store.add_learned(HEADS, b"1")
    second = store.add_learned(dataclasses.replace(HEADS, depths=(9,)), b"2")
    assert store.learned("smol", "code", "heads") == second
    assert store.learned("smol", "code", "heads", version=1) == first
    assert [store.weights(one) for one in (first, second)] == [b"1", b"2"]


def test_learned_versions_count_per_model_task_and_kind(store: Store) -> None:
    other = dataclasses.replace(MODEL, fingerprint="e", names=("other",))
    store.remember_model(other)
    changes: list[dict[str, Any]] = [{}, {"kind": "probe"}, {"task": "notes"}, {"fingerprint": "e"}, {}]
    stored = [store.add_learned(dataclasses.replace(HEADS, **change), b"") for change in changes]
    assert [one.version for one in stored] == [1, 1, 1, 1, 2]
    assert store.learned_list() == stored[::-1]
    assert store.learned_list("smol", "code", "heads") == [stored[4], stored[0]]
    assert store.learned_list("other") == [stored[3]] and store.learned_list("nobody") == []


def test_learned_of_the_task_default_stands_in_but_not_for_a_version(store: Store) -> None:
    default = store.add_learned(dataclasses.replace(HEADS, task="default"), b"")
    assert store.learned("smol", "code", "heads") == default
    with pytest.raises(LearnedNotFound):
        store.learned("smol", "code", "heads", version=1)
    own = store.add_learned(HEADS, b"")
    assert store.learned("smol", "code", "heads") == own


def test_missing_heads_are_answered_with_what_is_stored_and_the_command(store: Store) -> None:
    command = "run `swiftopt heads train --model smol --stream FILE --task code`"
    with pytest.raises(LearnedNotFound, match=rf"no heads are stored for smol/code .*nothing\): {command}$"):
        store.learned("smol", "code", "heads")
    with pytest.raises(LearnedNotFound, match=rf"no heads are stored for smol/code .*nothing\): {command}$"):
        store.learned(MODEL.fingerprint, "code", "heads")  # as `generate --method adadecode` asks
    store.add_learned(dataclasses.replace(HEADS, task="notes"), b"")
    with pytest.raises(LearnedNotFound, match=rf"\(stored for the model: notes version 1\): {command}$"):
        store.learned("smol", "code", "heads")
    with pytest.raises(LearnedNotFound, match=r"no probe is stored .*nothing\): run `swiftopt probe train --model"):
        store.learned("smol", "code", "probe")
    with pytest.raises(LearnedNotFound, match="for nobody/code"):
        store.learned("nobody", "code", "heads")
    with pytest.raises(LearnedNotFound):
        store.weights(dataclasses.replace(HEADS, version=7))


def test_heads_of_a_model_that_was_never_loaded_are_refused(store: Store) -> None:
    with pytest.raises(StoreError, match="no model smol \\(0000\\) is stored: store it before its heads"):
        store.add_learned(dataclasses.replace(HEADS, fingerprint="0000"), b"")


def test_heads_stay_with_the_loaded_model_when_a_file_gave_its_fingerprint_another_depth(store: Store) -> None:
    store.add_layer_set(dataclasses.replace(SET, model="m", fingerprint="0000", layer_set=LayerSet(32)))
    stored = store.add_learned(dataclasses.replace(HEADS, fingerprint="0000"), b"1")
    store.remember_model(dataclasses.replace(MODEL, fingerprint="0000", names=("m",)))
    assert store.learned("m", "code", "heads") == stored and store.weights(stored) == b"1"


def test_weights_are_read_by_nothing_but_their_own_method(store: Store) -> None:
    heads = store.add_learned(HEADS, WEIGHTS)
    store.add_plan("smol", "code", dataclasses.replace(SPD, learned=heads))
    statements: list[str] = []
    engine: Engine = store.engine
    event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    store.learned_list()
    store.learned("smol", "code", "heads")
    assert store.lookup("smol", "code").plan.learned == heads
    assert statements and not any("swiftopt_learned_weights" in one for one in statements)
    store.weights(heads)
    assert "swiftopt_learned_weights" in statements[-1]


# --- comparisons ------------------------------------------------------------------------------------------------------


def test_comparisons_come_back_newest_first_and_by_model_and_task(store: Store) -> None:
    store.remember_model(dataclasses.replace(MODEL, fingerprint="e", names=("other",)))
    asked = [("smol", "code"), ("org/smol", "notes"), ("other", "code")]
    numbers = [
        store.add_comparison(model, task, "cpu", "float32", {"rows": [{"ratio": n / 3}]}, f"2026-11-2{n}T00:00:00Z")
        for n, (model, task) in enumerate(asked)
    ]
    assert [one["id"] for one in store.comparisons()] == numbers[::-1]
    assert store.comparisons(MODEL.fingerprint, "notes") == [
        {
            "id": numbers[1],
            "model": "org/smol",
            "task": "notes",
            "device": "cpu",
            "dtype": "float32",
            "created_at": "2026-11-21T00:00:00Z",
            "report": {"rows": [{"ratio": 1 / 3}]},
        }
    ]
    assert [one["id"] for one in store.comparisons(task="code", limit=1)] == [numbers[2]]
    assert store.comparisons("nobody") == []


def test_comparison_of_a_model_that_was_never_loaded_is_refused(store: Store) -> None:
    with pytest.raises(StoreError, match="no model nobody is stored"):
        store.add_comparison("nobody", "code", "cpu", "float32", {}, "")
