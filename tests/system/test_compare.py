"""`swiftopt compare` and `python -m swiftopt.papers.ablate` from end to end on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_files import save

from swiftopt.cli.main import run
from swiftopt.core.records import Plan
from swiftopt.core.types import Prompt
from swiftopt.decoding.methods import METHODS
from swiftopt.models.loading import load
from swiftopt.papers import ablation_recipes, parts
from swiftopt.papers.ablate import command as ablation
from swiftopt.papers.ablations import ABLATIONS
from swiftopt.store import Store
from swiftopt.tasks import compare as comparing
from swiftopt.tasks import recipes
from swiftopt.terminal import program

TOKENS = ("--max-new-tokens", "24", "--dtype", "float32")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a working folder with a database and a stream, in which parts are trained only briefly."""
    monkeypatch.setattr(recipes, "BRIEF_SEARCH_S", 0.5)
    for name in ("SELF_SD_S", "HEADS_S", "PROBE_S"):
        monkeypatch.setattr(parts, name, 0.5)
    monkeypatch.setattr(ablation_recipes, "HEADS_S", 0.5)
    monkeypatch.setattr(ablation_recipes, "SELF_SD_TOKENS", 4)
    monkeypatch.setenv("SWIFTOPT_DATABASE_URL", str(tmp_path / "home.db"))
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"id": f"p{i}", "prompt": f"w{i} w{i + 1} w{i + 2}"}) for i in range(6)]
    (tmp_path / "notes.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def compare(capsys: pytest.CaptureFixture[str], *args: str, expect: int = 0) -> dict[str, Any]:
    code = run(["compare", "--stream", "notes.jsonl", "--limit", "3", *TOKENS, "--json", *args])
    out, err = capsys.readouterr()
    assert code == expect, err
    report: dict[str, Any] = json.loads(out)
    return report


def test_all_methods_run_and_lossless_ones_give_plain_tokens(
    tiny: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = compare(capsys, "--model", tiny, "--methods", "all,hf-plain,hf-lookup", "--png", "c.png")
    rows = {row["method"]: row for row in report["results"]}
    assert report["schema"] == "swiftopt.compare/1" and set(rows) == {*METHODS, "hf-plain", "hf-lookup"}
    reasons = {name: row["reason"] for name, row in rows.items() if row["ratio"] is None}
    assert list(reasons) == ["mtp"] and "multi-token-prediction layer" in reasons["mtp"]
    for name, row in rows.items():
        if name in reasons:
            continue
        assert row["tok_s"] > 0 and row["perplexity"] > 1, name
        if not row["lossy"]:
            assert row["identical"] == row["prompts"], name
    assert rows["plain"]["ratio"] == 1 and {made["piece"] for made in report["made"]} >= {"heads", "probe", "layer set"}
    assert rows["adadecode"]["extra_parameters"] > 0 and rows["plain"]["extra_bytes"] == 0
    assert (home / "c.png").stat().st_size > 0
    with Store.open() as store:
        found = store.lookup(tiny, "notes", report["device"], report["dtype"])
        assert (found.plan.method, found.plan.verdict) == (report["plan"]["method"], report["plan"]["verdict"])
        assert found.version == report["plan"]["version"] and found.fallback is None
        (kept,) = store.comparisons(tiny, "notes")
        assert kept["report"]["results"] == report["results"]


def test_time_is_estimated_first_and_then_once_per_prompt(
    tiny: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(["compare", "--model", tiny, "--stream", "notes.jsonl", *TOKENS, "--methods", "swift,prompt-lookup"]) == 0
    )
    told = capsys.readouterr().err.splitlines()
    (estimate,) = [line for line in told if line.startswith("3 methods on 6 prompts: about ")]
    (made,) = [line for line in told if line.startswith("make: ")]
    assert told.index(estimate) < told.index(made)
    done = [f"{number} of 6 prompts done, about 10 s left" for number in range(1, 6)]
    assert [line for line in told if "prompts done" in line] == done


def test_made_parts_are_reused(tiny: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = compare(capsys, "--model", tiny, "--methods", "swift,adadecode")
    again = compare(capsys, "--model", tiny, "--methods", "swift,adadecode")
    assert [made["piece"] for made in first["made"]] == ["layer set", "heads"] and again["made"] == []


def test_nothing_is_stored_with_no_store(tiny: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = compare(capsys, "--model", tiny, "--methods", "spd", "--no-store", "--set", "spd.max_draft_length=2")
    (row,) = [row for row in report["results"] if row["method"] == "spd"]
    assert row["settings"]["max_draft_length"] == 2 and not report["stored"]
    with Store.open() as store:
        assert store.comparisons(tiny) == [] and store.layer_sets(tiny) == []


def test_a_draft_model_drafts_and_counts_as_memory(
    tiny: str, home: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    small = str(save(tmp_path_factory.mktemp("small"), "mistral"))
    methods = ("--methods", "spd,mcss,hf-assisted", "--draft-model", small)
    report = compare(capsys, "--model", tiny, *methods)
    rows = {row["method"]: row for row in report["results"]}
    size = load(small, "float32", "cpu").info.n_parameters
    assert report["made"] == [] and rows["spd"]["extra_parameters"] == size
    assert rows["spd"]["extra_bytes"] > 4 * size and rows["hf-assisted"]["extra_parameters"] == size
    for name in ("spd", "mcss"):  # on a busy machine a slow one stops early
        assert rows[name]["identical"] == rows[name]["prompts"] >= 2


def test_a_draft_model_with_another_tokenizer_is_refused_before_any_run(
    tiny: str, home: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save(tmp_path_factory.mktemp("other"))
    text = (other / "tokenizer.json").read_text().replace('"w96"', '"other"')
    (other / "tokenizer.json").write_text(text)
    code = run(["compare", "--model", tiny, "--stream", "notes.jsonl", "--draft-model", str(other), *TOKENS])
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and "other tokens than the target's" in err and "prompt 1" not in err


def test_sampled_requests_compare_tokens_only_where_the_seed_gives_them(
    tiny: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = compare(capsys, "--model", tiny, "--methods", "spd,prompt-lookup", "--temperature", "1", "--seed", "5")
    rows = {row["method"]: row for row in report["results"]}
    looked_up = rows["prompt-lookup"]  # on a busy machine a slow one stops early
    assert looked_up["identical"] == looked_up["prompts"] >= 2 and rows["spd"]["identical"] is None


def test_faster_plan_of_a_method_that_did_not_run_remains(
    tiny: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = compare(capsys, "--model", tiny, "--methods", "plain")
    with Store.open() as store:
        where = {"device": first["device"], "dtype": first["dtype"]}
        plan = Plan("jacobi", verdict="use", measured_speedup=99.0, measured_interval=(98.0, 100.0), **where)
        store.add_plan(tiny, "notes", plan)
    again = compare(capsys, "--model", tiny, "--methods", "prompt-lookup")
    assert again["standing"]["method"] == "jacobi"
    with Store.open() as store:
        assert store.lookup(tiny, "notes", **where).plan.method == "jacobi"
    compare(capsys, "--model", tiny, "--methods", "jacobi")
    with Store.open() as store:
        assert store.lookup(tiny, "notes", **where).plan.measured_speedup != 99.0


def test_ctrl_c_shows_finished_methods_and_makes_no_plan(
    tiny: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from swiftopt.cli import compare as command

    def stop(method: str, number: int, n_prompts: int, timed: object) -> None:
        if (method, number) == ("prompt-lookup", 1):
            raise KeyboardInterrupt

    monkeypatch.setattr(command, "RunNotes", lambda: stop)
    report = compare(capsys, "--model", tiny, "--methods", "prompt-lookup", expect=130)
    assert report["interrupted"] and report["plan"] is None
    assert {row["method"]: row["prompts"] for row in report["results"]}["plain"] >= 1


@pytest.mark.slow
@pytest.mark.usefixtures("rough_costs")
@pytest.mark.parametrize("name", list(ABLATIONS))
def test_every_ablation_has_a_row_per_variant(
    name: str, tiny: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = program.run(ablation, [name, "--model", tiny, "--stream", "notes.jsonl", "--limit", "3", *TOKENS, "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    report = json.loads(out)
    assert (report["schema"], report["name"]) == ("swiftopt.ablation/1", name)
    missing = {row["label"] for row in report["rows"] if row["ratio"] is None}
    assert missing == ({"w/ mixed-domain LM head"} if name == "adadecode-parts" else set())
    for row in report["rows"]:
        assert all(key in row for key in (*ABLATIONS[name].varied, *ABLATIONS[name].shown))


@pytest.mark.slow
def test_an_ablation_learns_on_prompts_that_it_does_not_decode(
    tiny: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    learned: list[str] = []

    class Spy(ablation_recipes.AblationRecipes):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            learned.extend(prompt.id for prompt in self.prompts)

    monkeypatch.setattr("swiftopt.papers.ablate.AblationRecipes", Spy)
    words = ["adadecode-threshold", "--model", tiny, "--stream", "notes.jsonl", *TOKENS]
    assert program.run(ablation, [*words, "--limit", "2"]) == 0
    assert learned == ["p2", "p3", "p4", "p5"] and "favours" not in capsys.readouterr().out
    assert program.run(ablation, words) == 0
    assert learned[4:] == [f"p{i}" for i in range(6)] and "favours the variants" in capsys.readouterr().out


CODE = [
    {
        "task_id": f"C/{i}",
        "prompt": f"w{i} w{i + 1}",
        "canonical_solution": "w1",
        # what the tiny model says is no program, so the tests are run without it
        "test": "def check(answer):\n    pass\n",
        "entry_point": "None",
    }
    for i in range(3)
]


def test_answers_are_judged_by_their_data_set(
    tiny: str, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[tuple[str, str]] = []

    def quality(prompt: Prompt, text: str) -> float:
        judged.append((prompt.id, text))
        return float(len(text) % 2)

    monkeypatch.setattr(comparing, "quality", quality)
    monkeypatch.setattr("swiftopt.tasks.report.MAX_SLOWDOWN", 1e9)  # on a busy machine, too, all prompts are decoded
    (home / "code.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CODE))
    sampling = ("--temperature", "1.0", "--samples", "2", "--stop", "w5")
    words = ("--stream", "code.jsonl", "--template", "humaneval", "--methods", "prompt-lookup,typical", *sampling)
    report = compare(capsys, "--model", tiny, *words)
    rows = {row["method"]: row for row in report["results"]}
    assert report["quality"] == "pass@1" and report["samples"] == 2 and report["prompts"] == 6
    assert rows["prompt-lookup"]["identical"] == 6 and rows["prompt-lookup"]["quality"] == rows["plain"]["quality"]
    assert 0 <= rows["typical"]["quality"] <= 1 and rows["plain"]["pass_at_10"] is None
    assert all("w5" not in text.split() for _, text in judged)
    by_prompt = {
        name: {text for prompt_id, text in judged if prompt_id.split("~")[0] == name} for name in ("C/0", "C/1", "C/2")
    }
    assert max(map(len, by_prompt.values())) > 1  # samples are others


def test_samples_of_greedy_decoding_are_refused(tiny: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", "--model", tiny, "--stream", "notes.jsonl", "--samples", "3"]) == 2
    assert "greedy decoding gives identical samples" in capsys.readouterr().err


@pytest.mark.usefixtures("rough_costs")
def test_tuned_completions_end_at_stop_strings(tiny: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The search must not learn from text after the end of a completion."""
    for options, ends in (((), "length"), (("--stop", " "), "stop_string")):
        words = ("--stream", "notes.jsonl", "--out", f"{ends}.jsonl", "--no-optimise", *TOKENS, *options)
        assert run(["tune", "--model", tiny, *words, "--json"]) == 0, capsys.readouterr().err
        done = [json.loads(line) for line in (home / f"{ends}.jsonl").read_text().splitlines()]
        assert {one["finish_reason"] for one in done} == {ends}
