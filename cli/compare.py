"""`swiftopt compare`: decoding methods side by side, as a table, a picture or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..core.errors import SettingsError
from ..core.requests import BASE, PEERS, CompareRequest, GenerateRequest
from ..core.settings import preset_of, presets
from ..core.types import Prompt
from ..decoding.methods import METHODS, method_info
from ..terminal import commands, inputs, options
from ..terminal.charts import Pictures, draw_ratios
from ..terminal.commands import DRAFTING, PROMPTS, option
from ..terminal.inputs import check_model, open_store, pick
from ..terminal.output import Result, RunNotes, StepNotes, about, console, note
from ..terminal.render import fixed, heading, interval, number, numeric, percent, ratio, size, table
from ..terminal.value_types import positive

Row = Mapping[str, Any]
ALL = "all"
LOSSY = "≈"
ROOMY = 116  # Terminal width from which nearly all columns of the table are shown.


def _names(lossy: bool) -> str:
    return ", ".join(name for name, method in METHODS.items() if method.lossy is lossy)


HELP = f"""Run decoding methods alternately on the same prompts; the best lossless one becomes the task's plan.

The command first estimates how long it will take. Missing parts of methods (a layer set, heads, a probe) are created
before the timing, within about a minute. plain always runs, as the base of the ratios. Methods:
{_names(lossy=False)}, and the lossy {_names(lossy=True)}. {", ".join(PEERS)} run in transformers."""


def _use_sampling(context: click.Context, parameter: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    """Use the presets' sampling settings as defaults for all compared methods; explicit options win."""
    for name in names:
        context.default_map = {**(context.default_map or {}), **preset_of(name).sampling}
    return names


@commands.command(
    short_help="All decoding methods side by side; the best becomes the plan.",
    common="model stream task limit max_new_tokens methods lossless presets png no_store db as_json",
)
@options.model_and_stream
@options.task("result", "Task whose plan is stored.  [default: the stream's task, or default if it has several]")
@option(PROMPTS, "--limit", type=positive, help="Compare only on the first prompts of the stream.")
@option(DRAFTING, "--methods", default="all", help="all, or method names separated by commas.")
@option(
    DRAFTING,
    "--preset",
    "presets",
    metavar="NAME",
    multiple=True,
    type=click.Choice([*presets()]),
    is_eager=True,
    callback=_use_sampling,
    help=f"Run a paper's method with all of its numbers instead of --methods; repeatable: {', '.join(presets())}.",
)
@options.draft_model
@option(DRAFTING, "--lossless", is_flag=True, help="Only methods whose output equals the model's.")
@option(
    DRAFTING,
    "--set",
    "assignments",
    multiple=True,
    metavar="METHOD.KEY=VALUE",
    help="Change a setting of a method; may be repeated.",
)
@options.pictures("Draw the ratios as a bar chart.")
@commands.from_field(PROMPTS, CompareRequest, "samples", "Completions per prompt, for pass@k.", type=positive)
@click.option("--no-store", is_flag=True, help="Store neither the report, nor the plan, nor parts that were created.")
@options.form
@options.machine(GenerateRequest, "max_new_tokens", "speed")
@options.sampling
@options.db_and_json
@commands.example(
    "compare --model smollm2-135m --stream prompts.jsonl --limit 8 --max-new-tokens 64 --png ratios.png", help=HELP
)
@options.read_more
def compare(
    prompts: Sequence[Prompt],
    others: Sequence[Prompt],
    methods: str,
    presets: tuple[str, ...],
    lossless: bool,
    assignments: tuple[str, ...],
    pictures: Pictures,
    no_store: bool,
    db: str | None,
    **values: Any,
) -> Result:
    if presets and not inputs.on_command_line("methods"):
        methods = BASE
    method_names = parse_methods(",".join([methods, *(preset_of(name).method for name in presets)]), lossless)
    request_fields = {
        "methods": method_names,
        "settings": parse_settings(assignments, method_names),
        "keep": not no_store,
    }
    request = pick(CompareRequest, {**values, **request_fields, "presets": presets})
    return comparison(request, prompts, others, pictures, db)


def comparison(
    request: CompareRequest, prompts: Sequence[Prompt], others: Sequence[Prompt], pictures: Pictures, db: str | None
) -> Result:
    """Run a comparison; `others` are prompts used only for searches and training, never for measurement."""
    check_model(request, request.draft_model)
    drafts_with_model = {"hf-assisted", *(name for name, method in METHODS.items() if method.drafts_with_model)}
    if request.draft_model is not None and drafts_with_model.isdisjoint(request.methods):
        note("warning: --draft-model has no effect: none of these methods drafts with another model")

    def note_time(plain_s: float) -> None:
        n_methods, n_prompts = len(request.methods), len(prompts) * request.samples
        making_duration = "the parts that its preset needs" if request.presets else "about a minute for missing parts"
        note(
            f"{n_methods} methods on {n_prompts} prompts: {about(plain_s * n_methods * n_prompts)},"
            f" after {making_duration}"
        )

    with open_store(db) as store:
        from ..tasks.compare import Comparison

        report = Comparison(request, prompts, store, others, StepNotes(), RunNotes(), note_time).run()
    pictures.draw(draw_ratios, report)
    return Result(report, [comparison_view(report, console().width)], interrupted=report["interrupted"])


def parse_methods(text: str, lossless: bool = False) -> tuple[str, ...]:
    """Parse a list of methods such as "swift,spd" or "all"; return each once, `plain` first.

    With `lossless`, "all" means the methods that preserve the target's output.

    Raises: SettingsError: a method is unknown (the message names the nearest), or lossy although `lossless` is set.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    method_names = [BASE]
    for name in names:
        if name == ALL:
            method_names += [name for name, method in METHODS.items() if not (lossless and method.lossy)]
        elif name not in PEERS and method_info(name).lossy and lossless:
            raise SettingsError(f"{name} is lossy, which --lossless excludes: remove one of the two")
        else:
            method_names.append(name)
    if not names:
        raise SettingsError(f"--methods is empty: use {ALL}, or some of {', '.join((*METHODS, *PEERS))}")
    return tuple(dict.fromkeys(method_names))


def parse_settings(assignments: Iterable[str], methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parse settings such as "mtad.beam_width=8" into values by method and name.

    Raises: SettingsError: a word has another form, its method is not compared, or the method rejects the value.
    """
    by_method: dict[str, dict[str, Any]] = {}
    for assignment in assignments:
        setting_path, equals, text = assignment.partition("=")
        name, dot, key = setting_path.strip().partition(".")
        if not (equals and dot and key):
            raise SettingsError(
                f"{assignment!r} is not a setting: use METHOD.KEY=VALUE, for example spd.max_draft_length=8"
            )
        method = method_info(name)
        if name not in methods:
            raise SettingsError(f"{assignment!r} sets a method that is not compared: add {name} to --methods")
        by_method.setdefault(name, {})[key.strip().replace("-", "_")] = _setting(text.strip())
        method.settings_from(by_method[name])
    return by_method


def _setting(text: str) -> Any:
    """Parse a number, true, false or null (also "none"); anything else stays text."""
    try:
        return None if text.lower() == "none" else json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: deeply nested lists. ValueError: no JSON or too many digits.
        return text


# --- text for a person


def comparison_view(report: Row, width: int) -> RenderableType:
    """Return the table, remarks, and the resulting plan."""
    rows = [row for row in report["results"] if row["ratio"] is not None]
    lossy = any(row["lossy"] for row in rows)
    remarks = [f"{LOSSY} lossy: the output may differ from the model's own"] if lossy else []
    if report["energy"] is None:
        remarks.append("energy per token: not measured, because this machine does not report energy")
    remarks += [
        f"created for this comparison: {made_part['piece']} ({made_part['how']})" for made_part in report["made"]
    ]
    for row in report["results"]:
        reason = row["reason"] or "interrupted"
        if row["ratio"] is None:
            remarks.append(f"{row['method']}: not run: {reason}")
        elif row["prompts"] < row["of"]:
            remarks.append(f"{row['method']}: {row['prompts']} of {row['of']} prompts, {reason}")
    if report["made"] and report["made_on"] != "other prompts":
        remarks.append(f"created on {report['made_on']} themselves, which favours the methods that use it")
    style = "bold green" if report["plan"] and report["plan"]["verdict"] == "use" else "bold yellow"
    temperature, draft_model = report["sampling"]["temperature"], report["draft_model"]
    conditions = (
        f"{report['dtype']}, {report['device']}, {report['prompts']} prompts, up to {report['max_new_tokens']} tokens,"
        f" {f'temperature {temperature:g}' if temperature else 'greedy'}"
        f"{f', drafts by {draft_model}' if draft_model else ''}"
    )
    hidden_columns = {name for name, key in OPTIONAL.items() if all(row.get(key) is None for row in rows)}
    if report["energy"] is None:
        hidden_columns.add("J/tok")
    if report.get("quality") is not None:
        remarks.append(f"quality: {report['quality']} over {report['prompts']} answers")
    return Group(
        heading(f"{report['model']}/{report['task']}"),
        Text(conditions, style="dim"),
        _table(rows, width, hidden_columns),
        *(Text(text, style="dim") for text in remarks),
        "",
        Text(plan_words(report), style=style),
    )


def _table(rows: Sequence[Row], width: int, hidden_columns: Collection[str]) -> Table:
    """Return a table of methods sorted by ratio, lossy ones below a line; `width` decides which columns are shown."""
    cell_by_column = {
        name: cell for name, cell, min_width in COLUMNS if width >= min_width and name not in hidden_columns
    }
    result_table = table(
        [(numeric if column_index else fixed)(name) for column_index, name in enumerate(cell_by_column)], []
    )
    lossless, lossy = ([row for row in rows if bool(row["lossy"]) is is_lossy] for is_lossy in (False, True))
    for row in lossless:
        is_faster = row["ratio_interval"] and row["ratio_interval"][0] > 1
        result_table.add_row(
            *(cell(row) for cell in cell_by_column.values()), style="bold green" if is_faster else None
        )
    if lossy and lossless:
        widths = [max(len(name), *(len(cell(row)) for row in rows)) for name, cell in cell_by_column.items()]
        result_table.add_row(*(Text("─" * widest, style="dim") for widest in widths))
    for row in lossy:
        result_table.add_row(*(cell(row) for cell in cell_by_column.values()))
    return result_table


def plan_words(report: Row) -> str:
    """Describe the resulting plan of the task, or why there is none."""
    plan, standing, model_task = report["plan"], report["standing"], f"{report['model']}/{report['task']}"
    if report["interrupted"]:
        return f"interrupted: the plan of {model_task} stays unchanged"
    if standing:
        return f"plan of {model_task}: stays {standing['method']}, which was measured to be faster and did not run here"
    storage_note = "" if report["stored"] else " (not stored)"
    if plan["verdict"] == "use":
        speed = ratio(plan["measured_speedup"], plan["measured_interval"])
        return f"plan of {model_task}: {plan['method']}, {speed} of plain decoding's speed{storage_note}"
    return f"plan of {model_task}: plain, because no lossless method is reliably faster here{storage_note}"


def _parameters(row: Row) -> str:
    n = row["extra_parameters"]
    return "–" if n is None else size(n) if n >= 100_000 else f"{n:,}"


def _megabytes(row: Row) -> str:
    n = row["extra_bytes"]
    return "–" if n is None else f"{n / 2**20:.{1 if n < 100 * 2**20 else 0}f}M"


OPTIONAL = {"J/tok": "joules_per_token", "quality": "quality", "pass@10": "pass_at_10"}  # Columns that may be empty.
# Heading, function for the cell's text, and minimum terminal width at which the column is shown.
COLUMNS: list[tuple[str, Callable[[Row], str], int]] = [
    ("method", lambda row: f"{row['method']} {LOSSY}" if row["lossy"] else row["method"], 0),
    ("tok/s", lambda row: number(row["tok_s"], 1), 0),
    ("ratio", lambda row: number(row["ratio"], unit="x"), 0),
    ("95 %", lambda row: interval(row["ratio_interval"]), 0),
    ("α", lambda row: number(row["acceptance_rate"]), 0),
    ("M", lambda row: number(row["mean_generated_length"]), 0),
    ("passes", lambda row: number(row["passes_per_token"]), ROOMY),
    ("expected", lambda row: number(row["expected_ratio"], unit="x"), ROOMY + 20),
    ("Eq. 6", lambda row: number(row["published_ratio"], unit="x"), ROOMY + 20),
    ("same", lambda row: "–" if row["identical"] is None else f"{row['identical']}/{row['prompts']}", 0),
    ("PPL", lambda row: number(row["perplexity"], 2 if (row["perplexity"] or 0) < 1000 else 0), 0),
    ("quality", lambda row: percent(row["quality"]), 100),
    ("pass@10", lambda row: percent(row["pass_at_10"]), ROOMY),
    ("to plain", lambda row: number(row["perplexity_ratio"], unit="x"), ROOMY + 10),
    ("early", lambda row: percent(row["early_share"]), ROOMY),
    ("rejected", lambda row: percent(row["rejected_share"]), ROOMY),
    ("params", _parameters, ROOMY),
    ("memory", _megabytes, 80),
    ("J/tok", lambda row: number(row["joules_per_token"]), 0),
]
