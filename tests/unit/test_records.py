"""Layer-set records in files: swiftopt's JSON object, and the published skip_layers.json."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

import swiftopt
from swiftopt.core.errors import LayerSetError, NotFound
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.records import FoundPlan, LayerSetRecord, Plan, PlanInUse, import_file
from swiftopt.core.settings import FORMATS

LEAST: dict[str, Any] = {
    "schema": LayerSetRecord.SCHEMA,
    "model": "m",
    "n_layers": 40,
    "skip_attn": [7, 10],
    "skip_mlp": [7],
}
DEPTHS = {"llama-2-13b": 40, "llama-2-13b-chat": 40, "codellama-34b": 48}

figures = st.none() | st.floats(0, 10)
names = st.text(min_size=1, max_size=9)
optional_names = st.none() | names


@st.composite
def layer_sets(draw: st.DrawFn) -> LayerSet:
    n_layers = draw(st.integers(3, 50))
    inner = st.frozensets(st.integers(1, n_layers - 2))
    parts = st.sampled_from(["attn", "mlp", "head", "mlp:1", "attn:2"])
    formats = st.dictionaries(parts, st.sampled_from([*FORMATS, "stored"]), max_size=3)
    return LayerSet(n_layers, draw(inner), draw(inner), tuple(draw(formats).items()))


records = st.builds(
    LayerSetRecord,
    model=names,
    task=names,
    layer_set=layer_sets(),
    fingerprint=optional_names,
    matchness=figures,
    acceptance_rate=figures,
    mean_generated_length=figures,
    expected_speedup=figures,
    measured_speedup=figures,
    measured_interval=st.none() | st.tuples(st.floats(0, 10), st.floats(0, 10)),
    verdict=st.sampled_from(["use", "plain", "unmeasured"]),
    device=optional_names,
    dtype=optional_names,
    settings=st.dictionaries(names, st.integers() | st.booleans() | names, max_size=2),
    stream_sha256=optional_names,
    swiftopt_version=st.text(max_size=9),
    created_at=st.text(max_size=9),
    version=st.none() | st.integers(1, 9),
    job=optional_names,
)


@given(record=records)
@settings(max_examples=50, deadline=None)
def test_record_survives_its_json_but_for_its_job(record: LayerSetRecord) -> None:
    text = json.dumps(record.to_json(), allow_nan=False)
    assert LayerSetRecord.from_json(json.loads(text), "x.json") == dataclasses.replace(record, job=None)


@given(layer_set=layer_sets())
@settings(max_examples=20, deadline=None)
def test_layer_set_survives_the_json_of_what_holds_it(layer_set: LayerSet) -> None:
    """Checkpoints are written by another adapter than records, with other settings."""
    holder = TypeAdapter(dict[str, LayerSet])
    assert holder.validate_python(json.loads(holder.dump_json({"kept": layer_set}))) == {"kept": layer_set}
    assert LayerSet.from_json(layer_set.to_json()) == layer_set


def test_record_json_names_the_schema_first_and_the_version_only_where_there_is_one() -> None:
    record = LayerSetRecord("m", "t", LayerSet(40, frozenset({10, 7}), frozenset({7})))
    out = record.to_json()
    assert next(iter(out.items())) == ("schema", LayerSetRecord.SCHEMA)
    assert (out["skip_attn"], out["skip_mlp"], out["skip_ratio"]) == ([7, 10], [7], 0.0395)
    assert "version" not in out and "job" not in out
    assert dataclasses.replace(record, version=3).to_json()["version"] == 3


def test_object_in_the_manual_is_read_and_written_again_as_it_is() -> None:
    manual = Path(swiftopt.__file__).parent.joinpath("docs", "store.md").read_text(encoding="utf-8")
    values = json.loads(manual.partition("```json\n")[2].partition("```")[0])
    assert LayerSetRecord.from_json(values).to_json() == values


def test_record_needs_only_the_required_keys() -> None:
    layer_set = LayerSet(40, frozenset({7, 10}), frozenset({7}))
    assert LayerSetRecord.from_json(LEAST, "x.json") == LayerSetRecord("m", "default", layer_set)


@pytest.mark.parametrize("key", LEAST)
def test_record_is_refused_when_a_required_key_is_missing(key: str) -> None:
    values = {name: value for name, value in LEAST.items() if name != key}
    with pytest.raises(LayerSetError, match=rf"x\.json: it lacks '{key}'"):
        LayerSetRecord.from_json(values, "x.json")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("schema", "swiftopt.layer-set/2", "its schema is 'swiftopt.layer-set/2'"),
        ("n_layers", "40", "n_layers is '40': use a whole number"),
        ("n_layers", None, "it lacks 'n_layers'"),
        ("n_layers", -3, "n_layers is -3: use a number greater than or equal to 1"),
        ("n_layers", float("inf"), "n_layers is Infinity: use a whole number"),
        ("model", None, "it lacks 'model'"),
        ("model", "", "model is '': .* at least 1 character"),
        ("fingerprint", 7, "fingerprint is 7: use a text"),
        ("device", ["cpu"], r'device is \["cpu"\]: use a text'),
        ("matchness", float("nan"), "matchness is NaN: use a finite number"),
        ("measured_interval", {"low": 1}, 'measured_interval is {"low": 1}: use a list'),
        ("skip_attn", [-1], r"skips layers \[-1\]"),
        ("skip_mlp", [40], r"skips layers \[40\]"),
        ("skip_mlp", "7", "skip_mlp is '7': use a list"),
        ("skip_mlp", [7.0], "skip_mlp.0 is 7.0: use a whole number"),
        ("skip_attn", [True], "skip_attn.0 is true: use a whole number"),
        ("matchness", "good", "matchness is 'good': use a number"),
        ("measured_interval", [1.0], "measured_interval lacks"),
        ("quantised", 3, "quantised is 3: use a list"),
        ("settings", "none", "settings is 'none': use an object"),
        ("verdict", "maybe", "verdict is 'maybe': use 'use', 'plain' or 'unmeasured'"),
    ],
)
def test_record_is_refused_with_the_files_name_when_a_value_is_wrong(key: str, value: Any, words: str) -> None:
    with pytest.raises(LayerSetError, match=words) as caught:
        LayerSetRecord.from_json({**LEAST, key: value}, "x.json")
    assert "x.json" in str(caught.value)


def written(folder: Path, content: Any) -> Path:
    path = folder / "sets.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_import_reads_an_exported_record(tmp_path: Path) -> None:
    assert import_file(written(tmp_path, LEAST), DEPTHS.get) == [LayerSetRecord.from_json(LEAST, "")]


def test_import_reads_every_set_of_a_published_file(tmp_path: Path) -> None:
    published = {
        "llama-2-13b_cnndm": {"attention": [3, 5], "mlp": [6]},
        "llama-2-13b_chat_cnndm": {"attention": [], "mlp": [7]},
        "codellama-34b_humaneval": {"attention": [46], "mlp": []},
    }
    found = import_file(str(written(tmp_path, published)), DEPTHS.get)
    assert found == [
        LayerSetRecord("llama-2-13b", "cnndm", LayerSet(40, frozenset({3, 5}), frozenset({6}))),
        LayerSetRecord("llama-2-13b-chat", "cnndm", LayerSet(40, frozenset(), frozenset({7}))),
        LayerSetRecord("codellama-34b", "humaneval", LayerSet(48, frozenset({46}))),
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ([LEAST], "contains a list"),
        ({}, "contains no layer set"),
        ({**LEAST, "skip_mlp": [40]}, r"skips layers \[40\]"),
        ({"llama-2-13b": {"attention": [], "mlp": []}}, "'llama-2-13b' is not of the form MODEL_TASK"),
        ({"llama-2-13b_": {"attention": [], "mlp": []}}, "'llama-2-13b_' is not of the form MODEL_TASK"),
        ({"llama-2-13b_cnndm": [3]}, "'llama-2-13b_cnndm' is not a layer set"),
        ({"llama-2-13b_cnndm": {"attention": [3]}}, "'llama-2-13b_cnndm' is not a layer set"),
        ({"llama-2-13b_cnndm": {"attention": [40], "mlp": []}}, r"'llama-2-13b_cnndm': .*skips layers \[40\]"),
        (
            {"llama-2-13b_cnndm": {"attention": [], "mlp": [True]}},
            "'llama-2-13b_cnndm': skip_mlp.0 is true: use a whole number",
        ),
        ({"vicuna-7b_cnndm": {"attention": [], "mlp": []}}, "'vicuna-7b' is unknown: pass --n-layers"),
    ],
)
def test_import_is_refused_in_one_sentence_that_names_file_and_key(tmp_path: Path, content: Any, words: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(LayerSetError, match=words) as caught:
        import_file(path, DEPTHS.get)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_import_is_refused_when_the_file_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no file .*gone\.json"):
        import_file(tmp_path / "gone.json", DEPTHS.get)
    with pytest.raises(LayerSetError, match="cannot be read"):
        import_file(tmp_path, DEPTHS.get)
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(LayerSetError, match="is not UTF-8 text"):
        import_file(tmp_path / "latin.json", DEPTHS.get)


# the plan in use


@pytest.mark.parametrize(
    ("plan", "sentence", "brief"),
    [
        (
            PlanInUse("code", 3, "adaptive", verdict="use", measured_speedup=1.418, measured_interval=(1.281, 1.579)),
            "code: decode with adaptive drafts of version 3 (measured 1.42x, 95 % 1.28 to 1.58)",
            "v3 1.42x",
        ),
        (
            PlanInUse("code", 3, "adaptive", verdict="use", measured_speedup=1.4, fallback="tuned on another device"),
            "code: decode with adaptive drafts of version 3 (measured 1.40x; tuned on another device)",
            "v3 1.40x",
        ),
        (
            PlanInUse("code", 3, "swift", verdict="use"),
            "code: decode with swift drafts of version 3 (not measured)",
            "v3",
        ),
        (
            PlanInUse("code", 1, "plain", verdict="plain", measured_speedup=1.29, measured_interval=(0.66, 2.52)),
            "code: decode plainly (drafts measured 1.29x, 95 % 0.66 to 2.52: not enough to be sure)",
            "plain",
        ),
        (
            PlanInUse("code", 1, "plain", verdict="plain", measured_speedup=0.83, measured_interval=(0.78, 0.89)),
            "code: decode plainly (drafts measured 0.83x, 95 % 0.78 to 0.89: slower)",
            "plain",
        ),
        (
            PlanInUse("code", 1, "plain", verdict="plain", measured_speedup=1.7),
            "code: decode plainly (drafts measured 1.70x: not enough to be sure)",
            "plain",
        ),
        (
            PlanInUse("code", 1, "plain", verdict="plain"),
            "code: decode plainly (no method that was compared is reliably faster)",
            "plain",
        ),
        (
            PlanInUse("code", 1, "swift", verdict="unmeasured"),
            "code: decode plainly (the drafts of version 1 were not compared with plain decoding)",
            "plain",
        ),
        (PlanInUse("code"), "code: decode plainly (no plan is in use)", "plain"),
    ],
)
def test_plan_in_use_is_told_with_what_decided_it(plan: PlanInUse, sentence: str, brief: str) -> None:
    assert (plan.sentence, plan.brief, plan.drafts) == (sentence, brief, brief != "plain")
    assert PlanInUse.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert plan.to_json()["sentence"] == sentence


def test_plan_in_use_is_what_a_look_up_found() -> None:
    plan = Plan("spd", verdict="use", measured_speedup=1.5, measured_interval=(1.2, 1.8))
    found = PlanInUse.of("code", FoundPlan(plan, 4, "best", "tuned on cpu"))
    assert found == PlanInUse(
        "code", 4, "spd", verdict="use", measured_speedup=1.5, measured_interval=(1.2, 1.8), fallback="tuned on cpu"
    )
