"""`swiftopt layers`, `models` and `bench search`: look at what is stored, search layer sets, choose, move them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import RenderableType
from rich.table import Table

from ..core.errors import InvalidInput, LayerSetNotFound, NotFound
from ..core.records import FoundPlan, LayerSetRecord, ModelInfo
from ..core.requests import GenerateRequest
from ..core.settings import SwiftSettings
from ..core.streams import read_stream
from ..core.types import Prompt, Sampling, Trial, check_task
from ..models.sources import ALIASES, LocalCopy, find_alias, local_copies
from ..optimizer.strategies import SIZE_CHOOSING, strategy_info
from . import options
from .charts import Pictures, draw_layer_sets, draw_search
from .options import ConfiguredGroup, ModelTask, decoding_request, measurement, open_store, positive
from .output import Result, StepNotes, check_writable, console, listed, note, write_text, writing
from .render import (
    fixed,
    folding,
    layer_map,
    number,
    numbers,
    numeric,
    ratio,
    record_view,
    size,
    stored_view,
    table,
)

if TYPE_CHECKING:
    from ..store import Store

TRIAL_FIGURES = ("step", "origin", "matchness", "score", "adopted")  # Figures of a trial in --json.
SEARCHES = ("published", "swift", "random", *SIZE_CHOOSING)  # Strategies compared by default.
# with which no search stops before its passes are used up, for what each finds in them is compared
ENDLESS = {"max_steps": 10**6, "patience": 10**6, "target_matchness": 1.0, "deterministic": True}
SPENT = {"passes": 0, "seconds": 1}  # what a search takes, with the digits that are shown of it


@click.group(cls=ConfiguredGroup, short_help="Show, choose, export and import layer sets.")
@options.example("layers list", "layers best smollm2-135m/notes --json")
def layers() -> None:
    """The stored layer sets: look at them, choose among them, export and import."""


@layers.command("list", short_help="List the stored layer sets and plans.")
@options.of_model
@options.of_task
@options.store_and_json
@options.example("layers list --model smollm2-135m")
def list_(of_model: str | None, of_task: str | None, store: Store) -> Result:
    """List the stored layer sets, and the plans that have none of their own.

    The newest come first; * marks the best of its model, task, device and dtype.
    """
    records = [(record, _is_best(store, record)) for record in store.layer_sets(of_model, of_task)]
    plans = [plan for plan in store.plan_versions(of_model, of_task) if plan.own_set is None]
    sets = [{**record.to_json(), "best": best} for record, best in records]
    value = {"schema": "swiftopt.layers-list/1", "layer_sets": sets, "plans": [plan.to_json() for plan in plans]}
    what = "no layer set is stored for that" if of_model or of_task else "no layer set is stored yet"
    none = f"{what}: find one with `swiftopt tune --model M --stream FILE --task T`"
    return listed(value, [*records, *plans], lambda _, width: stored_view(records, plans, width), none)


@layers.command(short_help="Show the best layer set of a task.")
@options.model_task
@click.option("--device", "device_name", help="As tuned on, for example 'NVIDIA H200'.  [default: any]")
@click.option("--dtype", "tuned_dtype", help="As tuned with, for example bfloat16.  [default: any]")
@options.alias
@options.store_and_json
@options.example("layers best smollm2-135m/notes --json")
def best(name: ModelTask, device_name: str | None, tuned_dtype: str | None, alias: str, store: Store) -> Result:
    """Show the best layer set of MODEL/TASK; with --json exactly the object that export writes."""
    plan = store.lookup(name.model, name.task, device_name, tuned_dtype, alias)
    record = _layer_set_of(plan, name)
    return Result(record.to_json(), [record_view(record, _trials(store, record), console().width)])


@layers.command("show", short_help="Show a layer set, its map and its search.")
@options.model_task
@options.version
@options.pictures("Draw the layer map and the search to a file as well.")
@options.store_and_json
@options.example("layers show smollm2-135m/notes --version 2 --png notes.png")
def show_(name: ModelTask, version: int | None, pictures: Pictures, store: Store) -> Result:
    """Show a layer set of MODEL/TASK with its map, its figures and the curve of the search that found it."""
    record = _find(store, name, version)
    trials = _trials(store, record)
    pictures.draw(draw_layer_sets, [(record, trials)])
    tried = []
    for trial in trials:
        parts = {"skip_attn": sorted(trial.layer_set.skip_attn), "skip_mlp": sorted(trial.layer_set.skip_mlp)}
        tried.append({**{name: getattr(trial, name) for name in TRIAL_FIGURES}, **parts})
    value = {"schema": "swiftopt.layers-show/1", "layer_set": record.to_json(), "trials": tried}
    return Result({**value, **pictures.to_json()}, [record_view(record, trials, console().width)])


@layers.command(short_help="Self-SD's offline search for a layer set.")
@options.model_and_stream
@options.task("result", "Task to store the set under.  [default: the first prompt's own]")
@options.option(options.PROMPTS, "--limit", type=positive, default=4, help="Prompts that each candidate decodes.")
@options.option(options.SEARCH, "--max-steps", type=positive, default=200, help="Candidates to try at most.")
@options.option(
    options.SEARCH,
    "--minutes",
    type=options.FloatRange(min=0, min_open=True),
    help="Begin no candidate after this time.",
)
@options.form
@options.machine(GenerateRequest, "max_new_tokens")
@options.shared(Sampling, "seed")
@options.db_and_json
@options.example(
    "layers search --model smollm2-135m --stream prompts.jsonl --task notes --minutes 10 --max-new-tokens 32"
)
@options.read
def search(prompts: Sequence[Prompt], max_steps: int, minutes: float | None, db: str | None, **values: Any) -> Result:
    """Bayesian optimisation over all sub-layers, each candidate by the tokens per second that Self-SD makes with it.

    The set is stored for the method self-sd; the best plan stays what it is until `swiftopt compare` finds it faster.
    """
    request = decoding_request(values)

    def show_candidate(number: int, candidate: Any) -> None:
        skipped = candidate.layer_set.n_skipped
        note(f"candidate {number}: {skipped} sub-layers left out, {candidate.ratio:.2f}x plain decoding")

    max_s = float("inf") if minutes is None else 60 * minutes
    with open_store(db) as store:
        from ..tasks.recipes import search_offline

        record, result = search_offline(request, prompts, store, max_steps, max_s, StepNotes("load: "), show_candidate)
    ratio, median, n_tried = result.best.ratio, result.typical_ratio, len(result.candidates)
    figures = {"candidates": n_tried, "ratio": ratio, "median_ratio": median}
    text = (
        f"{record.model}/{record.task} version {record.version}: {ratio:.2f}x plain decoding on the search's"
        f" own prompts, the best of {n_tried} candidates (median {median:.2f}x)"
    )
    return Result(
        {"schema": "swiftopt.layers-search/1", "layer_set": record.to_json(), **figures},
        [layer_map(record.layer_set, console().width), text],
    )


@layers.command("export", short_help="Write a layer set as JSON.")
@options.model_task
@options.version
@click.option("-o", "--out", type=options.FILE, help="Write to a file instead of stdout.")
@options.store
@options.as_json
@options.example("layers export smollm2-135m/notes -o notes.json")
def export_json(name: ModelTask, version: int | None, out: str | None, store: Store, as_json: bool) -> None:
    """Write a layer set of MODEL/TASK as one JSON object, which `import` and `generate --layer-set` read.

    --json puts the object on one line.
    """
    record = _find(store, name, version)
    text = json.dumps(record.to_json(), indent=None if as_json else 2)
    if out is None:
        click.echo(text)
    else:
        write_text(Path(out), text + "\n")
        note(f"written to {out}")


@layers.command("import", short_help="Store layer sets from a file.")
@click.argument("file", type=options.FILE)
@click.option("--model", "as_model", type=options.MODEL, help="Store it under this model; for a file with one set.")
@click.option("--task", "as_task", help="Store it under this task; for a file with one set.")
@click.option("--n-layers", type=positive, help="Depth of a model that swiftopt does not know.")
@options.store_and_json
@options.example("layers import skip_layers.json")
def import_(file: str, as_model: str | None, as_task: str | None, n_layers: int | None, store: Store) -> Result:
    """Store the layer sets of FILE: an exported one, or the skip_layers.json that SWIFT's authors published.

    A set becomes the best one where its model and task have none yet; `promote` changes that.
    """
    stored = [_add(store, record) for record in _imported(store, file, as_model, as_task, n_layers)]
    sets = [{**record.to_json(), "promoted": promoted} for record, promoted in stored]
    lines = [
        f"{record.model}/{record.task} version {record.version}"
        + ("" if promoted else ", not promoted: the best one stays what it was")
        for record, promoted in stored
    ]
    return Result({"schema": "swiftopt.layers-import/1", "layer_sets": sets}, lines)


@layers.command(short_help="Choose a version as the best one.")
@options.model_task
@click.option("--version", type=positive, required=True, help="The version to choose.")
@options.alias
@options.store_and_json
@options.example("layers promote smollm2-135m/notes --version 2")
def promote(name: ModelTask, version: int, alias: str, store: Store) -> Result:
    """Choose a version of MODEL/TASK as the best one, for the device and dtype it was tuned or compared on."""
    return _moved("promote", name, store.promote(name.model, name.task, version, alias))


@layers.command(short_help="Take back the last choice.")
@options.model_task
@options.alias
@options.store_and_json
@options.example("layers rollback smollm2-135m/notes")
def rollback(name: ModelTask, alias: str, store: Store) -> Result:
    """Take back the last choice for MODEL/TASK."""
    return _moved("rollback", name, store.rollback(name.model, name.task, alias))


# --- what the commands share


def _find(store: Store, name: ModelTask, version: int | None) -> LayerSetRecord:
    if version is not None:
        return store.layer_set(name.model, name.task, version)
    return _layer_set_of(store.lookup(name.model, name.task), name)


def _layer_set_of(found: FoundPlan, name: ModelTask) -> LayerSetRecord:
    """Return the layer set of a plan, with a remark where it is only the nearest match."""
    if found.fallback:
        note(f"note: {found.fallback}")
    plan = found.plan
    if plan.layer_set is None:
        measured = f", measured {ratio(plan.measured_speedup, plan.measured_interval)}" if plan.measured_speedup else ""
        raise LayerSetNotFound(
            f"version {found.version} of {name} decodes with {plan.method} and has no layer set: its verdict is"
            f" {plan.verdict}{measured}; `swiftopt layers list` shows what is stored"
        )
    return plan.layer_set


def _trials(store: Store, record: LayerSetRecord) -> Sequence[Trial]:
    return store.trials(record.job, record.task) if record.job else ()


def _is_best(store: Store, record: LayerSetRecord) -> bool:
    """Return whether look-ups for the device and dtype that it was tuned on find this set, in whatever plan."""
    try:
        plan = store.lookup(record.fingerprint or record.model, record.task, record.device, record.dtype)
    except LayerSetNotFound:
        return False
    used = plan.plan.layer_set
    return plan.fallback is None and used is not None and (used.task, used.version) == (record.task, record.version)


def _imported(
    store: Store, file: str, as_model: str | None, as_task: str | None, n_layers: int | None
) -> list[LayerSetRecord]:
    """Read the layer sets of a file, under other names where they are given."""
    from ..core.records import import_file

    depths = {name: info.n_layers for info in store.models() for name in info.names}

    def depth_of(name: str) -> int | None:
        alias = find_alias(as_model or name)
        return n_layers or depths.get(as_model or name) or (alias.n_layers if alias else None)

    records = import_file(file, depth_of)
    if as_task is not None:
        check_task(as_task, "--task")
    if (as_model or as_task) and len(records) != 1:
        raise InvalidInput(f"{file} holds {len(records)} layer sets: leave --model and --task out to import them all")
    return [dataclasses.replace(r, model=as_model or r.model, task=as_task or r.task) for r in records]


def _add(store: Store, record: LayerSetRecord) -> tuple[LayerSetRecord, bool]:
    """Store a layer set, and return with it whether it was promoted, as the first of its model and task."""
    promote = True
    with suppress(LayerSetNotFound):
        promote = store.lookup(record.model, record.task).fallback is not None
    return store.add_layer_set(record, promote=promote), promote


def _moved(command: str, name: ModelTask, found: FoundPlan) -> Result:
    where = {**name._asdict(), "alias": found.alias, "version": found.version}
    text = f"{found.alias} of {name} is now version {found.version} ({found.plan.method})"
    return Result({"schema": f"swiftopt.layers-{command}/1", **where, **found.plan.to_json()}, [text])


# --- search strategies


@options.command("search", short_help="Search strategies side by side on recorded text.")
@options.model
@click.option("--stream", type=options.FILE, help="Prompts to record, one JSON object per line; - is standard input.")
@click.option("--limit", type=positive, default=8, help="Prompts that are recorded.")
@measurement("--record", type=options.PATH, help="Recorded texts and costs: read where the file is, else written.")
@measurement("--strategies", default=",".join(SEARCHES), help="What to compare, by commas.")
@measurement("--passes", type=positive, default=300, help="Candidate passes of each strategy.")
@measurement(
    "--window",
    "context_window",
    type=positive,
    default=options.default_of(SwiftSettings, "context_window"),
    help="γ, generated tokens that score a candidate.",
)
@measurement("--stride", type=positive, default=4, help="Tokens between two steps of a search.")
@options.shared(SwiftSettings, "seed")
@measurement(
    "--long-search", type=options.natural, default=0, metavar="N", help="Judge N sets more, up from the best one."
)
@options.pictures("Draw the best objective against candidate passes and seconds.")
@options.machine(GenerateRequest, "max_new_tokens")
@options.json
@options.example("bench search --model smollm2-135m --stream prompts.jsonl --record texts.json --png search.png")
def search_strategies(
    stream: str | None,
    limit: int,
    record: Path | None,
    strategies: str,
    passes: int,
    stride: int,
    long_search: int,
    pictures: Pictures,
    **values: Any,
) -> Result:
    """Run search strategies on the same recorded windows and show how soon each finds a good layer set.

    The prompts are completed once by plain decoding. Every strategy then sees the completions grow, and each set it
    takes into use is judged on all of them, outside the timing. The objective is the expected speedup of measured
    costs. A pass is one candidate on one window; studies of the model count by the rows that they run. A long search
    says how far they end from the best there is: it climbs on from the best set, every step judged on all windows.
    Ctrl-C shows the strategies that have ended, and the best set of a long search.
    """
    chosen = [word.strip() for word in strategies.split(",")]
    for name in chosen:
        strategy_info(name)
    recorded_before = record is not None and record.exists()
    if stream is None and not recorded_before:
        raise NotFound("there is nothing to search on: give --stream, or a --record that was written before")
    prompts = [] if stream is None else read_stream(stream, None, limit)
    request, settings = decoding_request(values), options.pick(SwiftSettings, {**values, **ENDLESS})
    lengths = [prompt.max_new_tokens or request.max_new_tokens for prompt in prompts]
    if not recorded_before and max(lengths) < settings.context_window:
        raise InvalidInput(
            f"no completion has {settings.context_window} tokens: raise --max-new-tokens or lower --window"
        )
    if record is not None and not recorded_before:
        check_writable(record)

    from ..bench import search as bench

    texts = bench.TextRecord.read(record) if record is not None and recorded_before else None
    runtime = options.load(request)
    if texts is not None:
        texts.check(runtime)
    else:
        texts = bench.record(runtime, prompts, request.max_new_tokens, note)
        if record is not None:
            with writing(record):
                texts.write(record)
    run = bench.Bench(runtime, texts, settings, stride)
    report = {"model": request.model, **bench.compare_strategies(run, chosen, passes, _note_gain)}
    if long_search and not report["interrupted"]:
        report = bench.with_long_search(run, report, long_search, _note_gain)
    pictures.draw(draw_search, report)
    return Result(report, [_search_table(report)], interrupted=report["interrupted"])


def _note_gain(strategy: str, passes: float, value: float) -> None:
    note(f"{strategy}, {passes:.0f} passes: {value:.3f}x")


def _search_table(report: Mapping[str, Any]) -> Table:
    goal = f"to {report['goal']:.3f}x"
    headings = numbers("objective", "left out", "passes", "seconds", f"passes {goal}", f"seconds {goal}")
    rows = []
    for result in report["results"]:
        reached = result["to_goal"] or {"passes": None, "seconds": None}
        spent = [number(figures[key], digits) for figures in (result, reached) for key, digits in SPENT.items()]
        rows.append((result["strategy"], f"{result['final']:.3f}x", str(result["n_skipped"]), *spent))
    caption = None
    if long_search := report.get("long_search"):
        caption = f"a long search over {long_search['sets']} sets: {long_search['best']:.3f}x"
        caption += f", {long_search['n_skipped']} left out"
    title = f"{report['model']}, {report['dtype']}, {report['device']}, {report['windows']} windows"
    return table([fixed("strategy"), *headings], rows, lined=True, title=title, caption=caption)


# --- models


@options.command(short_help="List model names, and what was tuned here.")
@options.store_and_json
@options.example("models")
def models(store: Store) -> Result:
    """List the short names of models, which of them are on this machine, and what was loaded and tuned here.

    `here` is wheel or cached (by the hub's client); other models are downloaded at first use. Any folder of a saved
    model, GGUF file or hub id of a supported architecture works as well.
    """
    stored, records, copies = store.models(), store.layer_sets(), local_copies()
    tasks = {r.model: sorted({o.task for o in records if o.model == r.model}) for r in records}
    value = {
        "schema": "swiftopt.models/1",
        "aliases": [
            {"alias": name, **dataclasses.asdict(alias), "here": copies[name]._asdict() if name in copies else None}
            for name, alias in ALIASES.items()
        ],
        "stored": [info.to_json() for info in stored],
        "tasks": tasks,
    }
    loaded: list[RenderableType] = ["", stored_table(stored, tasks, console().width)] if stored else []
    return Result(value, [aliases_table(tasks, copies), *loaded])


def aliases_table(tasks: Mapping[str, Sequence[str]], copies: Mapping[str, LocalCopy]) -> Table:
    """List the short names of models, those on this machine first, with the tasks tuned under each."""
    rows = []
    for name, alias in sorted(ALIASES.items(), key=lambda item: item[0] not in copies):
        where, tuned = copies[name].kind if name in copies else "", ", ".join(tasks.get(name, ()))
        rows.append((name, where, alias.hub_id, str(alias.n_layers), size(alias.n_parameters), tuned))
    columns = [fixed("alias"), fixed("here"), fixed("hub id"), numeric("layers"), numeric("size"), folding("tuned")]
    return table(columns, rows)


def stored_table(stored: Sequence[ModelInfo], tasks: Mapping[str, Sequence[str]], width: int) -> Table:
    """List models that were loaded here, with every name they were loaded by."""
    columns = [folding("names", max_width=width // 2), folding("architecture"), numeric("layers"), numeric("size")]
    rows = []
    for info in stored:
        tuned = sorted({task for name in info.names for task in tasks.get(name, ())})
        names = "\n".join(sorted(info.names, key=len))
        rows.append((names, info.architecture, str(info.n_layers), size(info.n_parameters), ", ".join(tuned)))
    titled: dict[str, Any] = {"title": "loaded here", "title_style": "bold", "header_style": "table.header"}
    return table([*columns, folding("tuned tasks")], rows, gap=2, **titled)
