"""A plan without a layer set, as the API, the client and the command line show it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from api import client_of
from serving import serving

import swiftopt
from swiftopt.cli.main import run
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.records import LayerSetRecord, LearnedRecord, ModelInfo, Plan
from swiftopt.server.app import create_app
from swiftopt.store import Store
from swiftopt.worker.queue import JobService

MODEL = ModelInfo("f" * 16, "LlamaForCausalLM", 30, 135_000_000, ("smol",))
SET = LayerSetRecord("smol", "code", LayerSet(30, frozenset({7}), frozenset({8})), MODEL.fingerprint)
HEADS = LearnedRecord("heads", "smol", "code", MODEL.fingerprint, (7,), 99, {"epochs": 3}, {"loss": 0.5}, ((0, 0.5),))
SPD = Plan(
    "spd",
    settings={"draft_length": 5},
    verdict="use",
    draft_model="smaller",
    measured_speedup=1.4,
    measured_interval=(1.3, 1.5),
    acceptance_rate=0.61,
    mean_generated_length=2.44,
)


@pytest.fixture
def store(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """With a layer set (1), a plan without one (2), and one with heads and the layer set (3); 2 is the best."""
    monkeypatch.setenv("SWIFTOPT_DATABASE_URL", sqlite_url)
    monkeypatch.delenv("SWIFTOPT_API_KEY", raising=False)
    with Store.open() as store:
        store.remember_model(MODEL)
        stored, heads = store.add_layer_set(SET), store.add_learned(HEADS, b"weights")
        store.add_plan("smol", "code", SPD)
        both = replace(SPD, method="adadecode", layer_set=stored, learned=heads, draft_model=None)
        store.add_plan("smol", "code", both, promote=False)
        yield store


def json_of(args: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert run([*args, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# --- the API and its client -------------------------------------------------------------------------------------------


def test_lookup_answers_with_the_settings_figures_and_draft_model_of_a_plan(store: Store) -> None:
    values = client_of(store).get("/v1/layer-sets/smol/code").json()
    assert {key: values[key] for key in values if key not in ("schema", "model", "task", "alias", "fallback")} == {
        "version": 2,
        "method": "spd",
        "settings": {"draft_length": 5},
        "draft_model": "smaller",
        "verdict": "use",
        "measured_speedup": 1.4,
        "measured_interval": [1.3, 1.5],
        "acceptance_rate": 0.61,
        "mean_generated_length": 2.44,
        "device": None,
        "dtype": None,
        "layer_set": None,
        "learned": None,
    }


def test_lookup_of_a_version_shows_its_heads_and_its_layer_set(store: Store) -> None:
    values = client_of(store).get("/v1/layer-sets/smol/code", params={"version": 3}).json()
    assert values["learned"] == store.learned("smol", "code", "heads").to_json()
    assert (values["version"], values["layer_set"]["version"], values["draft_model"]) == (3, 1, None)


def test_client_reads_a_plan_with_and_without_a_layer_set(store: Store) -> None:
    with serving(create_app(store, JobService(store, None))) as url, swiftopt.Client(url) as client:
        assert client.layer_set("smol", "code") == store.lookup("smol", "code")
        store.promote("smol", "code", 3, alias="canary")
        found, expected = client.layer_set("smol", "code", alias="canary"), store.plan("smol", "code", 3)
    assert found.plan.layer_set is not None and expected.plan.learned is not None
    assert (found.version, found.plan.layer_set.version) == (3, 1)
    assert found.plan.learned == replace(expected.plan.learned, curve=())


# --- the command line -------------------------------------------------------------------------------------------------


def test_best_version_without_a_layer_set_is_told_in_one_sentence(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    for args in (["best"], ["show"], ["export"], ["show", "--version", "2"]):
        assert run(["layers", args[0], "smol/code", *args[1:]]) == 3
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.count("\n") == 1
        assert "version 2 of smol/code decodes with spd and has no layer set: " in shown.err
    assert run(["layers", "best", "smol/code"]) == 3
    assert ": its verdict is use, measured 1.40x [1.30, 1.50]; " in capsys.readouterr().err


def test_plans_without_a_set_of_their_own_are_listed_below_those_with_one(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store.add_plan("smol", "code", Plan("plain", verdict="plain", device="cpu"), promote=False)
    store.add_plan("smol", "code", Plan("prompt-lookup", engine="transformers"))
    values = json_of(["layers", "list"], capsys)
    assert [each["version"] for each in values["layer_sets"]] == [1]
    assert [(each["version"], each["method"], each["best"]) for each in values["plans"]] == [
        (5, "prompt-lookup", True),
        (4, "plain", False),
        (3, "adadecode", False),
        (2, "spd", True),
    ]
    assert values["plans"][2]["layer_set"]["version"] == 1 and values["plans"][1]["device"] == "cpu"
    assert json_of(["layers", "list", "--task", "other"], capsys)["plans"] == []
    for width in (80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        assert run(["layers", "list"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= width
        rows = [line.split() for line in lines[lines.index("") :]]
        assert ["smol", "code", "4", "plain", "–", "–", "plain"] in [row[:7] for row in rows]
        assert ["smol", "code", "3", "adadecode", "version", "1", "1.40x", "use"] in [row[:8] for row in rows]
        assert ["smol", "code", "5", "*", "prompt-lookup", "in", "transformers"] in [row[:7] for row in rows]
        assert any("spd" in row and {"0.61", "2.4"} <= {*row} for row in rows) == (width == 120)


def test_version_without_a_layer_set_can_be_promoted_and_rolled_back(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert json_of(["layers", "rollback", "smol/code"], capsys)["method"] == "swift"
    values = json_of(["layers", "promote", "smol/code", "--version", "2"], capsys)
    assert (values["version"], values["alias"], values["layer_set"]) == (2, "best", None)
    assert {key: values[key] for key in SPD.to_json()} == json.loads(json.dumps(SPD.to_json()))
    assert run(["layers", "promote", "smol/code", "--version", "3"]) == 0
    assert capsys.readouterr().out == "best of smol/code is now version 3 (adadecode)\n"


def test_layer_set_is_marked_best_where_the_best_plan_decodes_with_it(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    def marked() -> list[tuple[int, bool]]:
        return [(one["version"], one["best"]) for one in json_of(["layers", "list"], capsys)["layer_sets"]]

    assert marked() == [(1, False)]
    store.promote("smol", "code", 3)
    assert marked() == [(1, True)]
