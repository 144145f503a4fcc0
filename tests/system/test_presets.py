"""Presets: each paper's numbers, and SWIFT's published search step by step on a tiny model."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import flat_costs, worded_runtime
from native import quick_runtime
from tiny_files import save

from swiftopt.cli.main import run as run_cli
from swiftopt.core.events import TaskFinished
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.settings import SwiftSettings, TuningSettings, presets
from swiftopt.core.types import Prompt, Sampling, Trial
from swiftopt.decoding.context import Ending, TokenRule
from swiftopt.decoding.loop import decode
from swiftopt.decoding.methods import PLAIN, method_info
from swiftopt.decoding.methods.chains import swift
from swiftopt.decoding.session import Session
from swiftopt.models.rows import Rows
from swiftopt.optimizer.tuning import Tuner
from swiftopt.papers.training.settings import HeadSettings
from swiftopt.server.jobs import JobSubmission
from swiftopt.tasks import recipes

PRESETS = presets()
WINDOW = 8
STOPS = dict(max_steps=40, target_matchness=1.0, skip_ratio=0.5, min_acceptance=0.0)


def stream(n: int) -> list[Prompt]:
    return [Prompt(f"p{i}", "t", text=" ".join(f"w{3 * i + j}" for j in range(5))) for i in range(n)]


@cache
def searched(**more: Any) -> tuple[Trial, ...]:
    settings = TuningSettings(**{**PRESETS["swift"].tuning, "context_window": WINDOW, **STOPS, **more})
    session = Session(worded_runtime(), Sampling(), 24)
    events = list(Tuner(session, settings, flat_costs(), "tiny").run(stream(10)))
    (result,) = [event for event in events if isinstance(event, TaskFinished)]
    return result.trials


# Every number of a preset with its place in the paper; "ours" where neither paper nor code gives one.
PAPER_SWIFT: dict[str, tuple[Any, str]] = {
    "method": ("swift", "4"),
    "draft_format": ("stored", "3: the target's own weights"),
    "context_window": (32, "B.2"),
    "max_draft_length": (25, "B.2"),
    "max_steps": (1000, "B.2"),
    "bayes_interval": (25, "B.2"),
    "patience": (300, "B.2"),
    "target_matchness": (0.95, "B.2"),
    "skip_ratio": (None, "B.2: 0.45, and 0.5 from 34B on"),
    "min_acceptance": (0.7, "C.2, footnote"),
    "skip_ratio_step": (0.1, "C.2, footnote: from 0.5 to 0.4"),
    "min_acceptance_rounds": (50, "ours"),
    "branching": (((0.5, 10), (0.8, 5), (0.95, 3), (1.0, 1)), "4.2"),
    "drawn_branching": (None, "4.2: one rule for all temperatures"),
    "early_stop": (True, "4.2"),
    "dynamic_verification": (True, "4.2"),
    "sampled": (True, "B.2: speculative sampling"),
    "stop_threshold": (0.8, "published code"),
    "search_drafting": (False, "4.2: the thresholds are fixed"),
    "optimise": (True, "4.1"),
    "optimise_interval": (1, "4.1: a step before each round"),
    "strategy": ("published", "4.1.2, Eq. 2; published code: the whole cube"),
    "objective": ("matchness", "4.1, Eq. 4"),
    "adoption": ("highest", "4.1.2"),
    "candidates": (1, "4.1.2"),
    "window_at": ("first", "Eq. 3"),
    "exportable": (False, "ours"),
    "deterministic": (True, "published code: it waits"),
    "seed": (0, "ours"),
}
NUMBERS: dict[str, dict[str, tuple[Any, str]]] = {
    "swift": PAPER_SWIFT,
    "swift-code": {
        **PAPER_SWIFT,
        "branching": (((0.5, 10), (0.8, 8), (0.95, 5), (1.0, 3)), "get_choices_list, greedy"),
        "drawn_branching": (((0.5, 10), (0.8, 5), (0.95, 3), (1.0, 1)), "get_choices_list, above temperature 0"),
    },
    "self-sd": {
        "stop_threshold": (0.6, "AdaDecode C"),
        "max_draft_length": (12, "AdaDecode C"),
        "max_steps": (200, "AdaDecode C"),
        "n_prompts": (4, "AdaDecode C"),
        "uniform_starts": (False, "Draft & Verify 3.2: none"),
    },
    "adadecode": {
        "early_threshold": (0.75, "D"),
        "max_early": (5, "D"),
        "epochs": (100, "D"),
        "batch": (128, "D"),
        "learning_rate": (5e-3, "D"),
        "warm_up": (0.03, "D"),
        "shares": ((0.25, 0.5, 0.75), "2.1: layers 8, 16 and 24 of 32"),
    },
    "paradecode": {
        "early_threshold": (0.0, "4.3: no search"),
        "epochs": (50, "C"),
        "batch": (128, "C"),
        "learning_rate": (5e-3, "C"),
        "warm_up": (0.03, "C"),
        "shares": ((0.25, 0.5, 0.75), "2.1"),
    },
    "mtad": {
        "beam_width": (4, "F: 4 or 8"),
        "draft_length": (4, "F: 3 or 4"),
        "acceptance_threshold": (0.5, "F: 0.1 to 0.9"),
        "top_k": (10, "C.4, F"),
        "top_p": (0.9, "C.4, F"),
        "temperature": (1.0, "5"),
    },
    "adaspeed": {},  # its numbers are the method's defaults
}


@pytest.mark.parametrize("name", PRESETS)
def test_preset_has_exactly_the_numbers_of_its_paper(name: str) -> None:
    preset, wanted = PRESETS[name], {field: value for field, (value, _) in NUMBERS[name].items()}
    has = preset.tuning if preset.is_tuned else {**preset.settings, **preset.making, **preset.sampling}
    assert has == wanted and all(source for _, source in NUMBERS[name].values())
    if preset.is_tuned:
        starts = [TuningSettings(**preset.tuning).start_skip_ratio(n * 10**9) for n in (13, 34, 70)]
        assert starts == [0.45, 0.5, 0.5]


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if not preset.is_tuned])
def test_preset_sets_only_its_methods_settings(name: str) -> None:
    preset = PRESETS[name]
    method_info(preset.method).settings_from(preset.settings)
    if preset.method in ("adadecode", "paradecode"):
        assert HeadSettings(**preset.making).depths(32) == (8, 16, 24)


def test_swift_preset_scores_one_set_a_round_on_the_first_window_of_each_text() -> None:
    trials = searched()
    runtime = worded_runtime()
    places = {prompt.id: len(runtime.tokenizer(prompt.text)["input_ids"]) for prompt in stream(10)}
    assert len(trials) == 40 and all(trial.position == places[trial.prompt_id] for trial in trials)
    assert len({trial.prompt_id for trial in trials}) > 1  # it goes on from text to text


def test_swift_preset_uses_the_highest_score_so_far() -> None:
    trials, adopted = searched(), list[int]()
    best, in_use = trials[0].score, trials[0].layer_set
    for trial in trials[1:]:
        if trial.score > best:
            adopted += [trial.step] if trial.layer_set != in_use else []
            best, in_use = trial.score, trial.layer_set
    assert adopted and [trial.step for trial in trials if trial.adopted] == adopted
    assert all(trial.score == trial.matchness for trial in trials)


@pytest.mark.slow
def test_swift_preset_uses_the_process_at_every_interval() -> None:
    trials = searched(bayes_interval=6)
    # the first set is the uniform one, which the strategy did not propose
    expected = ["uniform", *("cube" if step % 6 == 0 else "random" for step in range(1, 40))]
    assert [trial.origin for trial in trials] == expected


@pytest.mark.slow
def test_swift_preset_ends_by_patience_or_matchness() -> None:
    trials = searched(patience=7, max_steps=1000)
    highest = list(accumulate((trial.score for trial in trials), max))
    assert len(trials) == highest.index(highest[-1]) + 1 + 7
    assert len(searched(target_matchness=0.01, max_steps=1000)) == 1


@pytest.mark.slow
def test_optimise_interval_skips_rounds() -> None:
    every, third = (len(searched(optimise_interval=n, max_steps=1000)) for n in (1, 3))
    assert every // 4 <= third <= every // 2


def test_matchness_of_a_first_window_equals_the_skipped_models() -> None:
    """By hand: the draft reads the target's keys and values up to the window, and the target's tokens in it."""
    runtime, seen = worded_runtime(), 0
    for trial in searched(max_steps=12):
        prompt = next(each for each in stream(10) if each.id == trial.prompt_id)
        ids = runtime.tokenizer(prompt.text)["input_ids"]
        said = decode(runtime, ids, PLAIN, TokenRule.of(Sampling(), None), Ending(24)).token_ids
        buffer = runtime.new_buffer(len(ids) + WINDOW)
        runtime.prefill(ids[:-1], buffer)
        rows = Rows([ids[-1], *said[: WINDOW - 1]], len(ids) - 1, variants=(trial.layer_set,))
        predicted = runtime.forward(rows, buffer).argmax(-1).tolist()
        hits = sum(own == wanted for own, wanted in zip(predicted, said[:WINDOW], strict=True))
        assert trial.matchness == pytest.approx(hits / WINDOW)
        seen += 1
    assert seen == 12


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_sampled_swift_has_the_target_distribution(temperature: float) -> None:
    """Trees have branches drawn without replacement; two tokens of 500 seeds fit the exact distribution."""
    runtime, ids = quick_runtime("llama"), [3, 5, 2, 9]
    sampling = Sampling(temperature=temperature, top_k=3)
    method = swift(LayerSet(runtime.n_layers, frozenset({1}), frozenset({2})), SwiftSettings(sampled=True))
    rule = TokenRule.of(sampling, None)
    expected: dict[tuple[int, ...], float] = {}
    for first, chance in probabilities(runtime, rule, ids).items():
        for second, more in probabilities(runtime, rule, [*ids, first]).items():
            expected[first, second] = chance * more
    n, counts = 500, dict.fromkeys(expected, 0)
    for seed in range(n):
        seeded = TokenRule.of(replace(sampling, seed=seed), None)
        counts[decode(runtime, ids, method, seeded, Ending(2)).token_ids] += 1
    often = {path: n * chance for path, chance in expected.items() if chance > 0.01}
    chi_square = sum((counts[path] - wanted) ** 2 / wanted for path, wanted in often.items())
    degrees = len(often)
    assert degrees >= 5 and chi_square < degrees + 5 * (2 * degrees) ** 0.5


def probabilities(runtime: Any, rule: TokenRule, ids: list[int]) -> dict[int, float]:
    logits = runtime.forward(Rows(ids, 0), runtime.new_buffer(len(ids)))[-1]
    probs = rule.probs(rule.scores(ids, logits))
    return {int(token): float(probs[token]) for token in torch.nonzero(probs)[:, 0]}


@pytest.mark.parametrize("sampled", [False, True])
def test_draft_equal_to_the_target_is_accepted_at_any_temperature(sampled: bool) -> None:
    """The draft is drawn with the target's noise, or drawn and weighed; an argmax would be rejected at times."""
    runtime, ids, sampling = quick_runtime("llama"), [3, 5, 2, 9], Sampling(temperature=2.0)
    settings = SwiftSettings(sampled=sampled, early_stop=False, max_draft_length=4, dynamic_verification=False)
    method = swift(LayerSet(runtime.n_layers), settings)
    done = decode(runtime, ids, method, TokenRule.of(sampling, None), Ending(60))
    assert done.acceptance_rate is not None and done.acceptance_rate > 0.95
    plain = decode(runtime, ids, PLAIN, TokenRule.of(sampling, None), Ending(60))
    assert (done.token_ids == plain.token_ids) is not sampled


# --- front doors


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWIFTOPT_DATABASE_URL", str(tmp_path / "home.db"))
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"id": f"p{i}", "prompt": f"w{i} w{i + 1} w{i + 2}"}) for i in range(8)]
    (tmp_path / "notes.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def called(capsys: pytest.CaptureFixture[str], *args: str, expect: int = 0) -> dict[str, Any]:
    code = run_cli([*args, "--stream", "notes.jsonl", "--max-new-tokens", "24", "--dtype", "float32", "--json"])
    out, err = capsys.readouterr()
    assert code == expect, err
    return json.loads(out) if out else {"error": err}


def test_tune_accepts_a_preset_with_further_options(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, narrow = str(save(home / "tiny")), ("--context-window", "8")
    done = called(capsys, "tune", "--model", model, "--preset", "swift", *narrow, "--max-steps", "9")
    settings = TuningSettings.from_json(done["tasks"][0]["layer_set"]["settings"])
    preset = TuningSettings(**PRESETS["swift"].tuning)
    changed = {each.name for each in fields(settings) if getattr(settings, each.name) != getattr(preset, each.name)}
    assert changed == {"context_window", "max_steps"} and done["tasks"][0]["n_trials"] == 9


@pytest.mark.parametrize("name", ["self-sd", "adadecode", "mtad", "adaspeed"])
def test_tune_makes_parts_of_presets_and_compares_with_plain(
    name: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recipes, "BRIEF_SEARCH_S", 0.5)  # for mtad, which drafts by a layer set where no model is named
    brief = {"self-sd": {"max_steps": 3}, "adadecode": {"epochs": 2}}.get(name, {})
    own = PRESETS[name]
    monkeypatch.setitem(PRESETS, name, replace(own, making={**own.making, **brief}))
    report = called(capsys, "tune", "--model", str(save(home / "tiny")), "--preset", name)
    rows = {row["method"]: row for row in report["results"]}
    assert set(rows) == {"plain", own.method} and report["prompts"] == 4 and report["made_on"] == "other prompts"
    row = rows[own.method]
    assert row["ratio"] is not None and {key: row["settings"][key] for key in own.settings} == own.settings
    pieces = {"self-sd": "Self-SD's layer set", "adadecode": "heads", "mtad": "layer set"}
    assert [made["piece"] for made in report["made"]] == ([pieces[name]] if name in pieces else [])


def test_compare_runs_presets_and_plain(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    making = {**PRESETS["swift"].making, "max_steps": 5}
    monkeypatch.setitem(PRESETS, "swift", replace(PRESETS["swift"], making=making))  # type: ignore[arg-type]
    model = str(save(home / "tiny"))
    report = called(capsys, "compare", "--model", model, "--preset", "swift", "--preset", "adaspeed", "--limit", "4")
    assert {row["method"] for row in report["results"]} == {"plain", "swift", "adaspeed"}
    assert [made["how"].split(",")[0] for made in report["made"]] == ["5 candidates"]


def test_preset_with_parts_that_no_job_makes_is_refused_for_the_queue(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--model", str(save(home / "tiny")), "--preset", "adadecode", "--redis", "redis://127.0.0.1:1")
    assert "runs locally only, because jobs only search layer sets" in called(capsys, "tune", *words, expect=2)["error"]


def test_submitted_job_has_a_preset_and_further_settings() -> None:
    body = {"model": "m", "stream": {"prompts": [{"prompt": "p"}]}, "preset": "swift-code"}
    settings = JobSubmission.model_validate({**body, "settings": {"max_steps": 50}}).settings
    assert settings == replace(TuningSettings(**PRESETS["swift-code"].tuning), max_steps=50)
