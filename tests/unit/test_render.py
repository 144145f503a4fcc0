"""Views at the terminal: every line fits and agrees with the values."""

from __future__ import annotations

import io
import random
import re
import shlex
from dataclasses import replace
from itertools import pairwise

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from swiftopt.cli.backend import RunState, TuneProgress, live_view
from swiftopt.cli.doctor import Check, checks_table
from swiftopt.cli.layers import aliases_table, stored_table
from swiftopt.core.events import (
    Adopted,
    DraftingChosen,
    FormatTried,
    PhaseChanged,
    Progress,
    PromptFinished,
    PromptStarted,
    SkipRatioLowered,
    StreamShifted,
    TaskFinished,
    TrialsDone,
    event_line,
)
from swiftopt.core.layer_sets import LayerSet, searchable
from swiftopt.core.records import LayerSetRecord, ModelInfo, PlanInUse
from swiftopt.core.types import Completion, Prompt, Timings, Trial, Verdict
from swiftopt.models.sources import ALIASES, LocalCopy
from swiftopt.server.dashboard.drawing import map_words
from swiftopt.terminal.output import StepNotes, about
from swiftopt.terminal.render import (
    KEPT,
    SKIPPED,
    command_text,
    layer_map,
    record_view,
    records_table,
    size,
    sparkline,
    tune_summary,
    verdict_words,
    weights_words,
)

WIDTHS = (80, 120)
USED = PlanInUse("humaneval", 12, "swift", verdict="use", measured_speedup=1.27, measured_interval=(1.19, 1.33))
COMMAND = ["swiftopt", "generate", "--model", "smollm2-135m", "--task", "notes", "--prompt", 'it\'s a "test"']


def drawn(renderable: RenderableType, width: int) -> list[str]:
    """Return the lines that a console of that width prints, without cutting long ones."""
    console = Console(file=io.StringIO(), width=width, markup=False, highlight=False, emoji=False)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get().splitlines()


def widest(lines: list[str]) -> int:
    return max(cell_len(line) for line in lines)


def some_set(n_layers: int, seed: int = 0) -> LayerSet:
    subs = searchable(n_layers)
    return LayerSet(n_layers).skipping(random.Random(seed).sample(subs, round(0.45 * len(subs))))


def some_trials(n: int, n_layers: int = 30) -> tuple[Trial, ...]:
    layer_set = some_set(n_layers)
    return tuple(Trial(i, layer_set, "random", i / max(1, n - 1), 1.0, adopted=i == n - 1) for i in range(n))


def some_record(n_layers: int = 30, **changes: object) -> LayerSetRecord:
    values: dict[str, object] = {
        "model": "Qwen/Qwen2.5-Coder-32B-Instruct",
        "task": "humaneval",
        "layer_set": some_set(n_layers),
        "fingerprint": "v1:0123456789abcdef",
        "matchness": 0.94,
        "acceptance_rate": 0.912,
        "mean_generated_length": 3.81,
        "expected_speedup": 1.31,
        "measured_speedup": 1.27,
        "measured_interval": (1.19, 1.33),
        "verdict": "use",
        "device": "NVIDIA A100-SXM4-80GB",
        "dtype": "bfloat16",
        "created_at": "2026-11-21T00:00:00Z",
        "version": 12,
    }
    return LayerSetRecord(**{**values, **changes})  # type: ignore[arg-type]


def some_result(n_layers: int, n_trials: int = 400, word: str = "use") -> TaskFinished:
    return TaskFinished(
        task="humaneval",
        record=some_record(n_layers),
        verdict=Verdict(word, 1.27, (1.19, 1.33), 1.31, 5),  # type: ignore[arg-type]
        stopped_because="no better layer set in 300 trials",
        trials=some_trials(n_trials, n_layers),
        timings=Timings(4.0, 10.0, 25.0, 1.0),
        n_prompts=24,
        n_tokens=4000,
        draft_cost=0.61,
        plain_tok_s=40.2,
        tuned_tok_s=51.3,
        paces=tuple(20.0 + i for i in range(24)),
    )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("n_layers", [3, 12, 30, 37, 38, 48, 74, 75, 80])
def test_layer_map_has_one_mark_per_sub_layer_and_fits(n_layers: int, width: int) -> None:
    layer_set = some_set(n_layers)
    lines = drawn(layer_map(layer_set, width), width)
    assert widest(lines) <= width
    for kind, skipped in (("attn", layer_set.skip_attn), ("mlp", layer_set.skip_mlp)):
        marks = "".join(line.removeprefix(kind).replace(" ", "") for line in lines if line.startswith(kind))
        assert marks == "".join(SKIPPED if i in skipped else KEPT for i in range(n_layers))


def test_layer_map_and_counts_omit_missing_sub_layers() -> None:
    hybrid = LayerSet(5, frozenset({1}), formats=(("mlp", "int4"),), absent=("mlp:1", "attn:2", "mlp:4"))
    lines = drawn(layer_map(hybrid, 80), 80)
    attention, mlp = f"{KEPT} {SKIPPED}   {KEPT} {KEPT}", f"{KEPT}   {KEPT} {KEPT}"
    assert [line[5:].strip() for line in lines[1:3]] == [attention, mlp]
    assert "skipped 1 of 4: 1 attention, 0 MLP (r = 0.25)" in lines[3]
    assert weights_words(hybrid) == "the model's own (4 parts), int4 (3 parts)"
    attention, mlp = "skipped in 1; absent in 2; kept in 0, 3–4", "absent in 1, 4; int4 in 0, 2–3"
    assert map_words(hybrid) == f"Attention: {attention}. MLP: {mlp}. Head: kept."


def test_layer_map_shows_the_numbers_of_experts_of_a_draft() -> None:
    lines = drawn(layer_map(LayerSet(5, frozenset({2}), frozenset({3}), experts=(("mlp", 2), ("mlp:1", 1))), 80), 80)
    assert "".join(lines[2].split()) == f"mlp212{SKIPPED}2" and "".join(lines[1].split()).count(KEPT) == 4


@pytest.mark.parametrize("n_layers", [30, 80])
def test_layer_map_ruler_is_aligned_with_its_layers(n_layers: int) -> None:
    layer_set = LayerSet(n_layers, frozenset({10, 20}), frozenset())
    lines = drawn(layer_map(layer_set, 80), 80)
    ruler, attention = next((a, b) for a, b in pairwise(lines) if b.startswith("attn"))
    assert attention.index(SKIPPED) == ruler.index("10")
    assert attention.rindex(SKIPPED) == ruler.index("20")


def test_layer_map_folds_into_rows_of_about_equal_length() -> None:
    lines = drawn(layer_map(some_set(80), 80), 80)
    assert [len(line.split()[1]) for line in lines if line.startswith("attn")] == [40, 40]


def test_sparkline_follows_its_values_within_its_width() -> None:
    line = sparkline([i / 999 for i in range(1000)], 40)
    assert len(line) == 40
    assert list(line) == sorted(line)
    assert (line[0], line[-1]) == ("▁", "█")


@pytest.mark.parametrize(("values", "length"), [([], 0), ([0.5], 1), ([0.5, 0.5, 0.5], 3)])
def test_sparkline_draws_few_or_equal_values(values: list[float], length: int) -> None:
    assert len(sparkline(values, 40)) == length


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("n_layers", [12, 30, 80])
def test_summary_fits_and_has_every_figure(n_layers: int, width: int) -> None:
    lines = drawn(tune_summary(some_result(n_layers), USED, "notes.jsonl", COMMAND, width), width)
    text = "\n".join(lines)
    assert widest(lines) <= width
    for word in (
        "0.91",
        "3.81",
        "0.61",
        "1.31x",
        "1.27x [1.19, 1.33]",
        "40.2",
        "51.3",
        "400 candidates",
        "notes.jsonl",
    ):
        assert word in text
    assert "no better layer set in 300 trials" in text
    assert USED.sentence in " ".join(text.split()) and "use it:" in lines


def test_summary_omits_ratio_and_command_of_unused_drafts() -> None:
    """Only the ratio that is the reason appears, in the sentence."""
    few = "4 held-out prompts are too few to tell: give more"
    verdict = Verdict("plain", 1.29, (0.66, 2.52), 1.31, 4, few)
    result = replace(some_result(30), record=some_record(verdict="plain"), verdict=verdict)
    plain = PlanInUse("humaneval", 12, "plain", verdict="plain", measured_speedup=1.29, measured_interval=(0.66, 2.52))
    text = "\n".join(drawn(tune_summary(result, plain, "notes.jsonl", COMMAND, 120), 120))
    assert "humaneval: decode plainly (drafts measured 1.29x, 95 % 0.66 to 2.52: not enough to be sure)" in text
    assert few in text and text.count("1.2") == 1 and "1.31x" not in text
    assert "use it" not in text and "swiftopt generate" not in text


def test_summary_names_the_plan_in_use_if_it_differs() -> None:
    other = PlanInUse(
        "humaneval", 9, "prompt-lookup", verdict="use", measured_speedup=1.6, measured_interval=(1.4, 1.8)
    )
    text = "\n".join(drawn(tune_summary(some_result(30), other, "notes.jsonl", COMMAND, 120), 120))
    assert "humaneval: decode with prompt-lookup drafts of version 9 (measured 1.60x, 95 % 1.40 to 1.80)" in text
    assert "version 12, which this run stored, is not in use" in text and "1.27x" not in text and "use it:" in text


def test_summary_breaks_a_token_time_down() -> None:
    lines = drawn(tune_summary(some_result(30), USED, "notes.jsonl", COMMAND, 80), 80)
    rows = {line.split()[0]: line.split()[1:3] for line in lines if line.split()}
    assert rows["optimise"] == ["1.0", "10"]
    assert rows["draft"] == ["2.5", "25"]
    assert rows["verify"][0] == "6.2"  # 6.25 ms, rounded to even
    assert rows["total"][0] == "10.0"


def test_summary_draws_the_speed_along_the_stream() -> None:
    lines = drawn(tune_summary(some_result(30), USED, "notes.jsonl", COMMAND, 80), 80)
    at = next(i for i, line in enumerate(lines) if "tok/s of 24 prompts, during the search, 20.0 to 43.0" in line)
    assert list(lines[at - 1].strip()) == sorted(lines[at - 1].strip()) and lines[at - 1].strip()


def test_summary_is_shown_without_trials_and_measurements() -> None:
    bare = LayerSetRecord("m", "t", LayerSet(4))
    empty = TaskFinished(
        "t", bare, Verdict("unmeasured", reason="too few prompts"), "", (), Timings(), 0, 0, 1.0, None, None
    )
    text = "\n".join(drawn(tune_summary(empty, PlanInUse("t"), "out.jsonl", COMMAND, 80), 80))
    assert "no trials were recorded" in text and "tokens per second" not in text
    assert "t: decode plainly (no plan is in use)" in text and "too few prompts" in text


def test_verdict_says_that_plain_decoding_is_faster() -> None:
    assert (
        verdict_words(Verdict("plain", 0.9, (0.8, 0.95)))
        == verdict_words(Verdict("plain", 0.9, (0.8, 0.95), reason="not reliably faster here"))
        == "plain: drafting is not reliably faster than plain decoding here"
    )
    few = Verdict("plain", 1.2, (0.8, 1.8), reason="2 held-out prompts are too few to tell: give more")
    assert verdict_words(few).endswith("plain decoding here (2 held-out prompts are too few to tell: give more)")


@pytest.mark.parametrize("width", [30, 60, 200])
def test_command_survives_the_shell(width: int) -> None:
    text = command_text(COMMAND, width).plain
    assert shlex.split(text.replace("\\\n", "")) == COMMAND
    assert (width == 200) == ("\n" not in text)


@pytest.mark.parametrize("width", WIDTHS)
def test_record_view_fits(width: int) -> None:
    lines = drawn(record_view(some_record(80), some_trials(500), width), width)
    assert widest(lines) <= width
    assert any("NVIDIA A100-SXM4-80GB bfloat16" in line for line in lines)


@pytest.mark.parametrize("width", WIDTHS)
def test_records_table_fits_and_marks_the_best(width: int) -> None:
    old = some_record(model="smollm2-135m", task="notes", verdict="unmeasured", measured_speedup=None, version=1)
    lines = drawn(records_table([(some_record(), True), (old, False)], width), width)
    assert widest(lines) <= width
    assert ["*" in line for line in lines if "0.91" in line] == [True, False]
    assert any("2026-11-21" in line for line in lines) == (width == 120)


@pytest.mark.parametrize("width", WIDTHS)
def test_model_tables_fit_with_whole_hub_ids(width: int) -> None:
    tasks = {"smollm2-135m": ["humaneval", "notes"]}
    lines = drawn(aliases_table(tasks, {"gpt2-xl": LocalCopy("cached", "/hub/gpt2-xl")}), width)
    assert widest(lines) <= width
    first, *others = lines[[line.startswith("alias") for line in lines].index(True) + 1 :]
    assert first.split()[:2] == ["gpt2-xl", "cached"] and not any("cached" in line for line in others)
    assert all(any(alias.hub_id in line for line in lines) for alias in ALIASES.values())
    info = ModelInfo("v1:0", "llama", 30, 134_515_008, ("smollm2-135m", "/a/long/" + "folder/" * 20))
    stored = drawn(stored_table([info], tasks, width), width)
    assert widest(stored) <= width
    assert any("humaneval" in line for line in stored)


def test_doctor_table_fits_when_a_path_is_long() -> None:
    assert widest(drawn(checks_table([Check("cache", "fail", "/x" * 100)]), 80)) <= 80


@pytest.mark.parametrize(("n", "said"), [(134_515_008, "135M"), (999_900_000, "1.0B"), (13_016_028_160, "13.0B")])
def test_sizes_are_written_in_usual_units(n: int, said: str) -> None:
    assert size(n) == said


def test_names_are_not_read_as_markup() -> None:
    lines = drawn(records_table([(some_record(model="[red]m[/red]", task=":smile:"), False)], 120), 120)
    assert "[red]m[/red]" in "\n".join(lines)
    assert ":smile:" in "\n".join(lines)


def some_events() -> list[object]:
    completion = Completion(tuple(range(64)), "", "length", "swift", 9, 20, 1, 50, 44, timings=Timings(0, 1, 2, 1))
    progress = Progress("notes", "optimise", 1000, 1234.5, 0.812, 0.934, 1000, 0.917, 13.4, 0.45)
    return [
        PhaseChanged("", "load", "smollm2-135m"),
        PhaseChanged("notes", "optimise", "a detail"),
        FormatTried("int4", 2.91, 0.953),
        FormatTried("int8", None, None, "no such kernel"),
        PromptStarted("notes", "a prompt with a very long name " * 4, 2, 24),
        progress,
        TrialsDone("notes", some_trials(200)),
        Adopted("notes", some_set(30), 0.9, 7),
        SkipRatioLowered("notes", 0.4, 0.61),
        DraftingChosen("notes", 0.6, 8, ((0.5, 3), (1.0, 1)), 1.12, 1.05),
        StreamShifted("notes", "acceptance fell from 0.90 to 0.61", 2),
        PromptFinished(Prompt("p3", "notes", text="x"), 2, completion),
        some_result(30),
    ]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_live_view_fits_after_every_event(width: int) -> None:
    state = RunState()
    for event in some_events():
        state = state.after(event)  # type: ignore[arg-type]
        assert widest(drawn(live_view(state, width), width)) <= width


def test_live_view_shows_the_round_at_80_columns() -> None:
    state = RunState()
    for event in some_events()[:7]:
        state = state.after(event)  # type: ignore[arg-type]
    text = "\n".join(drawn(live_view(state, 80), 80))
    for word in ("notes", "searching", "prompt 3 of 24", "0.81 (best 0.93)", "1000 trials", "α 0.92", "M 13.4"):
        assert word in text


LIMIT = "36 candidates were scored, the limit for this stream"


@pytest.mark.parametrize(
    ("width", "head"),
    [
        (94, f"code · search ended · prompt 5 of 32 · {LIMIT}"),
        (84, f"code · search ended · 5/32 · {LIMIT}"),
        (80, "code · search ended · prompt 5 of 32"),
        (30, "code · search ended · 5/32"),
    ],
)
def test_live_view_is_shortened_on_small_terminals(width: int, head: str) -> None:
    state = RunState(
        "code", "accelerate", LIMIT, "p", 4, 32, Progress("code", "accelerate", 9, 70.4, 0.8, 0.9, 36, 0.7, 2.8, 0)
    )
    lines = drawn(live_view(state, width), width)
    assert lines[0].rstrip() == head and "…" not in "".join(lines)
    assert lines[2].strip().endswith({30: "70.4 tok/s"}.get(width, "r 0.00"))


def test_end_of_a_search_is_one_line_of_80_columns() -> None:
    line = event_line(PhaseChanged("summary", "accelerate", LIMIT))
    assert line == f"summary: search ended: {LIMIT}" and len(line) <= 80


def test_long_line_is_folded_at_a_terminal() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=40, force_terminal=True, markup=False, highlight=False, legacy_windows=False)
    with TuneProgress(console) as progress:
        progress(StreamShifted("notes", "acceptance fell from 0.90 to 0.61", 2))
    text = " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", " ", stream.getvalue()).split())
    assert (
        "notes: the text has changed, because acceptance fell from 0.90 to 0.61: searching again,"
        " with 2 known sets first" in text
    )


def test_origins_of_candidates_are_shown_as_words() -> None:
    trials = [
        Trial(i, LayerSet(30), origin, 0.5, 1.0) for i, origin in enumerate(["family", "family", "in use", "tpe"])
    ]
    text = " ".join(drawn(tune_summary(replace(some_result(30), trials=tuple(trials)), USED, "o", COMMAND, 120), 120))
    assert "from a study of the layers 2, repeats of the set in use 1, suggested by tpe 1; 0 adopted" in text


def test_state_starts_over_when_the_task_changes() -> None:
    state = RunState().after(TrialsDone("notes", some_trials(3)))
    assert len(state.matchness) == 3
    assert state.after(PhaseChanged("code", "accumulate")).matchness == ()


def test_alternating_tasks_keep_their_phases_curves_and_rows() -> None:
    notes = [PromptStarted("notes", "a", 0, 4), PhaseChanged("notes", "optimise"), TrialsDone("notes", some_trials(3))]
    code = [PromptStarted("code", "b", 1, 4), PhaseChanged("code", "accumulate")]
    stream = io.StringIO()
    progress = TuneProgress(Console(file=stream, width=80, markup=False, highlight=False))
    for event in (*notes, *code, TrialsDone("notes", some_trials(2))):
        progress(event)
    assert (progress.state.phase, progress.state.prompt_id, len(progress.state.matchness)) == ("optimise", "a", 5)
    assert "notes · searching · prompt 1 of 4 · a" in "\n".join(drawn(live_view(progress.state, 80), 80))
    progress(PromptFinished(Prompt("b", "code", text="x"), 1, Completion((1,), "w", "stop", "plain")))
    assert "code: prompt 2 of 4 (b): 1 tokens" in stream.getvalue()
    assert progress.state.phase == "accumulate"


def test_progress_is_plain_lines_without_a_terminal() -> None:
    stream = io.StringIO()
    with TuneProgress(Console(file=stream, width=80, markup=False, highlight=False)) as progress:
        for event in some_events():
            progress(event)  # type: ignore[arg-type]
    assert stream.getvalue().splitlines() == [
        "loading: smollm2-135m",
        "notes: searching: a detail",
        "drafts in int4: 2.91x expected, 0.95 of the tokens agree",
        "drafts in int8 do not run here: no such kernel",
        "notes: set of trial 7 in use: 13 attentions and 12 MLPs skipped, matchness 0.90",
        "notes: skip ratio lowered to 0.40, because α was 0.61",
        "notes: drafts of at most 8 tokens, down to confidence 0.60, 3 candidates at most: 1.12x expected,"
        " 1.05x before",
        "notes: the text has changed, because acceptance fell from 0.90 to 0.61: searching again,"
        " with 2 known sets first",
        "notes: prompt 3 of 24 (p3): 64 tokens, 16.0 tok/s, α 0.88, M 3.15",
        "humaneval: finished, use",
    ]


def test_progress_is_drawn_and_removed_at_a_terminal() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=True, markup=False, highlight=False, legacy_windows=False)
    with TuneProgress(console) as progress:
        for event in some_events()[:5]:
            progress(event)  # type: ignore[arg-type]
    assert "prompt 3 of 24" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[2K")  # the last line of the display is erased
    assert "\x1b[?25h" in stream.getvalue()  # and the cursor is shown again


def test_held_out_prompt_is_labelled() -> None:
    finished = PromptFinished(Prompt("p", "t", text="x"), 0, Completion((), "", "stop", "plain"), held_out=True)
    assert event_line(finished) == "t: prompt 1 (p, held out): 0 tokens, – tok/s, α –, M –"


def test_steps_of_one_phase_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    notes = StepNotes("load: ")
    rounds = [f"measuring costs, round {n}" for n in (1, 2, 3)]
    parts = [f"quantising, attn {n} of 30 as int4" for n in (1, 5)]
    weights = [f"reading m, {n} % of the weights" for n in (0, 50)]
    for step in (
        *weights,
        *rounds,
        *parts,
        "converting m.gguf, only once",
        "make: heads, by 22 s of training",
        rounds[0],
    ):
        notes(step)
    said = ["reading m", "measuring costs", "quantising", "converting m.gguf, only once"]
    said += ["make: heads, by 22 s of training", "measuring costs"]
    assert capsys.readouterr().err.splitlines() == [f"load: {step}" for step in said]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.2, "10 s"), (44, "40 s"), (89, "90 s"), (91, "2 min"), (239, "4 min"), (5300, "88 min"), (9000, "2.5 h")],
)
def test_estimated_time_is_one_rounded_figure(seconds: float, said: str) -> None:
    assert about(seconds) == f"about {said}"
