"""`generate` decodes with the stored plan of any method, and with whatever method the caller insists on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from families import tiny_runtime

from swiftopt.core.errors import LayerSetError, LayerSetNotFound, LearnedNotFound, SettingsError
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.records import LayerSetRecord, LearnedRecord, Plan
from swiftopt.core.requests import GenerateRequest
from swiftopt.decoding.methods.lookup import LookupSettings
from swiftopt.models.costs import device_name
from swiftopt.models.runtime import Runtime
from swiftopt.papers.early_exit import Heads, learned_to_bytes, n_parameters
from swiftopt.store import Store
from swiftopt.tasks.generate import Planner, generate

REQUEST = GenerateRequest("tiny", task="notes")


@pytest.fixture
def runtime() -> Runtime:
    return tiny_runtime("llama")


@pytest.fixture
def store(runtime: Runtime, sqlite_url: str) -> Iterator[Store]:
    with Store.open(sqlite_url) as store:
        store.remember_model(replace(runtime.info, names=("tiny",)))
        yield store


def record(runtime: Runtime, **more: object) -> LayerSetRecord:
    layer_set = LayerSet(4, frozenset({1}), frozenset({2}))
    return replace(
        LayerSetRecord("tiny", "notes", layer_set, runtime.info.fingerprint), device=device_name(runtime.device), **more
    )


def plan(runtime: Runtime, method: str, **more: object) -> Plan:
    where = {"device": device_name(runtime.device), "dtype": runtime.dtype_name}
    return replace(Plan(method, verdict="use"), **where, **more)


def test_stored_plan_decides_for_any_method(runtime: Runtime, store: Store) -> None:
    settings = LookupSettings(max_draft_length=3).to_json()
    found = store.add_plan("tiny", "notes", plan(runtime, "prompt-lookup", settings=settings))
    method, info = Planner(REQUEST, runtime, store).plan_for("notes")
    assert (method.name, info.method, info.version, info.verdict) == (
        "prompt-lookup",
        "prompt-lookup",
        found.version,
        "use",
    )
    assert method.drafter.max_rows(99) == 4


def test_a_plan_that_says_plain_is_obeyed(runtime: Runtime, store: Store) -> None:
    store.add_plan("tiny", "notes", replace(plan(runtime, "jacobi"), verdict="plain"))
    assert Planner(REQUEST, runtime, store).plan_for("notes")[0].name == "plain"
    why = Planner(REQUEST, runtime, store).plan_for("notes")[1].why_plain
    assert why is not None and why.reason == "verdict" and "says that plain decoding is faster" in why.message
    insisted = replace(REQUEST, method="jacobi")
    assert Planner(insisted, runtime, store).plan_for("notes")[0].name == "jacobi"


def test_refreshed_plans_are_the_current_best(runtime: Runtime, store: Store) -> None:
    planner = Planner(REQUEST, runtime, store)
    method, info = planner.plan_for("notes")
    assert method.name == "plain" and info.why_plain is not None and info.why_plain.reason == "no_plan"
    store.add_plan("tiny", "notes", plan(runtime, "jacobi"))
    planner.refresh()
    first = planner.plan_for("notes")[0]
    assert first.name == "jacobi"
    planner.refresh()
    assert planner.plan_for("notes")[0] is first, "what it has learnt stays"
    store.add_plan("tiny", "notes", plan(runtime, "prompt-lookup"))
    planner.refresh()
    assert planner.plan_for("notes")[0].name == "prompt-lookup"
    store.rollback("tiny", "notes")
    planner.refresh()
    assert planner.plan_for("notes")[0].name == "jacobi"


def test_heads_are_looked_up_for_the_task(runtime: Runtime, store: Store) -> None:
    insisted = replace(REQUEST, method="adadecode")
    with pytest.raises(LearnedNotFound, match="heads train"):
        Planner(insisted, runtime, store).plan_for("notes")
    heads = Heads({2: torch.eye(32, dtype=runtime.dtype)})
    kept = LearnedRecord("heads", "tiny", "notes", runtime.info.fingerprint, heads.depths, n_parameters(heads))
    store.add_learned(kept, learned_to_bytes(heads, kept))
    assert Planner(insisted, runtime, store).plan_for("notes")[0].name == "adadecode"


def test_self_sd_and_swift_use_their_own_sets(runtime: Runtime, store: Store) -> None:
    insisted = replace(REQUEST, method="self-sd")
    store.add_layer_set(record(runtime))
    with pytest.raises(LayerSetNotFound, match="layers search"):
        Planner(insisted, runtime, store).plan_for("notes")
    own = LayerSet(4, frozenset({0}), frozenset({3}))
    store.add_layer_set(replace(record(runtime), layer_set=own), plan_method="self-sd", promote=False)
    assert Planner(insisted, runtime, store).plan_for("notes")[0].layer_set == own
    swift = Planner(replace(REQUEST, method="swift"), runtime, store).plan_for("notes")[0]
    assert swift.layer_set == record(runtime).layer_set


def test_given_set_replaces_the_stored_one(runtime: Runtime, store: Store) -> None:
    given = replace(record(runtime), layer_set=LayerSet(4, frozenset({2})))
    store.add_layer_set(record(runtime))
    method, _ = Planner(replace(REQUEST, layer_set=given), runtime, store).plan_for("notes")
    assert (method.name, method.layer_set) == ("swift", given.layer_set)
    with pytest.raises(LayerSetError, match="but this model is"):
        Planner(replace(REQUEST, layer_set=replace(given, fingerprint="other")), runtime, store).plan_for("notes")


def test_missing_draft_model_means_plain_decoding_with_a_note(runtime: Runtime, store: Store) -> None:
    store.add_plan("tiny", "notes", plan(runtime, "spd", draft_model="models/that-was-there"))
    method, info = Planner(REQUEST, runtime, store).plan_for("notes")
    assert method.name == "plain" and "the stored plan cannot be used here" in info.note
    assert info.why_plain is not None and info.why_plain.reason == "unusable_plan"


def test_a_misspelt_method_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(SettingsError, match="nearest: prompt-lookup"):
        next(iter(generate(replace(REQUEST, method="promt-lookup"), [], None)))
