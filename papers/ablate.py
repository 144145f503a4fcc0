"""Runs an ablation: its variants and plain decoding take turns on the same prompts; the rows are those of the paper.

python -m swiftopt.papers.ablate swift-parts --model M --stream prompts.jsonl --limit 8
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click
import torch
from rich.console import RenderableType

from ..core.errors import SwiftoptError, look_up
from ..core.requests import BASE, GenerateRequest
from ..core.types import Prompt, Sampling
from ..decoding.methods import PLAIN, Method
from ..decoding.session import Session
from ..models.costs import machine_name
from ..optimizer.search import Search
from ..store import Store
from ..tasks.compare import first_turns, open_models, task_of, training_prompts_words
from ..tasks.measures import EnergyMeter, nll
from ..tasks.report import Figures, Interleaved, OnRun, decoder, figures
from ..terminal import commands, options, program
from ..terminal.charts import Pictures, draw_ratios
from ..terminal.commands import PROMPTS
from ..terminal.inputs import decoding_request, open_store
from ..terminal.output import Result, RunNotes, StepNotes
from ..terminal.render import folding, heading, number, numeric, table
from .ablation_recipes import AblationRecipes
from .ablations import ABLATIONS, SCHEMA, Variant
from .early_exit import Heads, n_parameters

HEADINGS = {
    "mean_generated_length": "M",
    "acceptance_rate": "α",
    "ratio": "ratio",
    "tok_s": "tok/s",
    "perplexity": "PPL",
    "optimise_ms": "search ms",
    "optimise_share": "search %",
    "early_share": "early %",
    "rejected_share": "rejected %",
    "extra_parameters": "new params",
    "consistency": "same",
    "joules_per_token": "J/tok",
}


@dataclass(frozen=True, slots=True, eq=False)
class BuiltVariant:
    """A variant with its `drafter` (a method, or a search that runs while decoding) and its heads.

    `error` says why the variant could not be built.
    """

    variant: Variant
    drafter: Method | Search | None = None
    heads: Heads | None = None
    error: str | None = None

    @property
    def n_added(self) -> tuple[int | None, int | None]:
        """Numbers of added heads and parameters; 0 if every head is the model's own head (identity transform)."""
        if self.heads is None:
            return None, None
        has_new_head = any(
            not torch.equal(transform, torch.eye(*transform.shape).to(transform))
            for transform in self.heads.transforms.values()
        )
        return (len(self.heads.depths), n_parameters(self.heads)) if has_new_head else (0, 0)


def ablate(
    name: str,
    request: GenerateRequest,
    draft_model: str | None,
    prompts: Sequence[Prompt],
    store: Store | None,
    training_prompts: Sequence[Prompt] = (),
    on_step: Callable[[str], None] = lambda words: None,
    on_run: OnRun | None = None,
) -> dict[str, Any]:
    """Return the object that `python -m swiftopt.papers.ablate --json` prints.

    Heads, probes and layer sets that the store lacks are made briefly, as in `swiftopt compare`, and are not stored.
    They are made on `training_prompts`, or on `prompts` if there are none. A variant's search continues from prompt to
    prompt, and its time counts.
    """
    prompts, training_prompts = first_turns(prompts), first_turns(training_prompts)
    greedy = replace(request, draft_model=draft_model, sampling=Sampling())
    session, draft_runtime = open_models(greedy, prompts, store, on_step)
    runtime = session.runtime
    task = request.task or task_of(prompts)
    recipes = AblationRecipes(
        session, store, draft_runtime, request.model, task, training_prompts or prompts, None, on_step
    )
    built_variants = [_build_variant(variant) for variant in ABLATIONS[name].variants(recipes)]
    decoders = {BASE: decoder(session, PLAIN)}
    for built in built_variants:
        if built.drafter is not None:
            variant_session = Session(runtime, built.variant.sampling, request.max_new_tokens)
            decoders[built.variant.label] = decoder(variant_session, built.drafter)
    meter = EnergyMeter.of(runtime.device)
    runs = Interleaved(decoders, prompts, meter, on_run)
    is_finished = runs.run()
    return {
        "schema": SCHEMA,
        "name": name,
        "title": ABLATIONS[name].title,
        "source": ABLATIONS[name].source,
        "model": request.model,
        "draft_model": draft_model,
        "device": machine_name(runtime),
        "dtype": runtime.dtype_name,
        "torch": torch.__version__,
        "max_new_tokens": request.max_new_tokens,
        "prompts": len(prompts),
        "energy": meter.source,
        "made": [{"piece": part.piece, "how": part.how} for part in recipes.made],
        "made_on": training_prompts_words(training_prompts),
        "rows": [_row(built, runs, session, prompts) for built in built_variants],
        "interrupted": not is_finished,
    }


def _build_variant(variant: Variant) -> BuiltVariant:
    try:
        drafter = variant.make()
        return BuiltVariant(variant, drafter, None if variant.heads is None else variant.heads())
    except SwiftoptError as error:
        return BuiltVariant(variant, error=str(error))


def _row(built: BuiltVariant, runs: Interleaved, session: Session, prompts: Sequence[Prompt]) -> dict[str, Any]:
    variant = built.variant
    identity = {"label": variant.label, "base": variant.base, **variant.values}
    search = built.drafter if isinstance(built.drafter, Search) else None
    method = built.drafter.method if isinstance(built.drafter, Search) else built.drafter
    unmeasured_row = Figures(variant.label, lossy=method is not None and method.lossy, extra_bytes=0)
    if built.error is not None:
        missing_row = unmeasured_row.unmeasured(len(prompts), built.error).to_json()
        return {**identity, **missing_row, "heads": None, "consistency": None}

    def nll_of(number: int, token_ids: tuple[int, ...]) -> float:
        return nll(session.runtime, session.encode(prompts[number]), token_ids)

    variant_runs = runs.runs[variant.label]
    row = figures(
        unmeasured_row, variant_runs, runs.runs[BASE], len(prompts), nll_of, predicts_early=built.heads is not None
    )
    to_base = (
        row
        if variant.base == BASE
        else figures(unmeasured_row, variant_runs, runs.runs[variant.base], len(prompts), None)
    )
    n_heads, n_added_parameters = built.n_added
    consistency = row.identical / row.prompts if variant.sampling.greedy and row.identical is not None else None
    return {
        **identity,
        **replace(row, ratio=to_base.ratio, ratio_interval=to_base.ratio_interval).to_json(),
        "extra_parameters": n_added_parameters,
        "heads": n_heads,
        "consistency": consistency,
        **_search_figures(search, variant_runs.by_prompt.values()),
    }


def _search_figures(search: Search | None, runs: Iterable[Any]) -> dict[str, float | None]:
    """Return the search's ms per candidate, its share of the total time, and its best matchness and skip ratio."""
    if search is None:
        return {}
    runs = list(runs)
    search_s = sum(run.completion.timings.optimise_s for run in runs)
    total_s = sum(run.seconds for run in runs)
    return {
        "candidates": len(search.trials),
        "optimise_ms": 1000 * search_s / len(search.trials) if search.trials else None,
        "optimise_share": search_s / total_s if total_s else None,
        "matchness": search.matchness,
        "skip_ratio": search.layer_set.skip_ratio,
    }


# --- command line


@commands.command()
@click.argument("name")
@options.model_and_stream
@options.task("plan", "Task whose stored layer set, heads and probe to use.  [default: the stream's task]", PROMPTS)
@options.draft_model
@options.limit
@options.form
@options.machine(GenerateRequest, "max_new_tokens")
@options.pictures("Draw the ratios as a bar chart.")
@options.db_and_json
@options.read_more
def command(
    name: str,
    prompts: Sequence[Prompt],
    others: Sequence[Prompt],
    draft_model: str | None,
    pictures: Pictures,
    db: str | None,
    **values: Any,
) -> Result:
    """Run one of the papers' ablations; its variants take turns on the same prompts.

    NAME is swift-parts, swift-self-sd, swift-window, swift-schedule, swift-ratio, adadecode-parts,
    adadecode-threshold, adadecode-trees, spd-settings, self-sd-steps, paradecode-parts, paradecode-threshold,
    mtad-threshold, mtad-beams, mtad-warp, adaspeed or adaspeed-exit. Parts that are not stored for the task are made
    briefly and not stored, on the prompts after --limit if there are any.
    """
    look_up("ablation", name, ABLATIONS)
    request = decoding_request(values, draft_model)

    with open_store(db) as store:
        report = ablate(name, request, draft_model, prompts, store, others, StepNotes(), RunNotes())
    pictures.draw(draw_ratios, report)
    return Result(report, _ablation_view(report), interrupted=report["interrupted"])


def _ablation_view(report: Mapping[str, Any]) -> list[RenderableType]:
    """Return a table of the variants that ran, and the reasons why others did not."""
    shown_figures = ABLATIONS[report["name"]].shown
    columns = [folding("variant"), *(numeric(HEADINGS[key]) for key in shown_figures)]
    rows = [
        (row["label"], *(_cell(key, row.get(key)) for key in shown_figures))
        for row in report["rows"]
        if row["ratio"] is not None
    ]
    remarks = [f"{row['label']}: not run: {row['reason']}" for row in report["rows"] if row["reason"] is not None]
    if report["made"] and report["made_on"] != "other prompts":
        remarks.append(f"parts were made on {report['made_on']} themselves, which favours the variants that use them")
    return [heading(f"{report['title']} ({report['source']})"), table(columns, rows, gap=2), *remarks]


def _cell(key: str, value: float | None) -> str:
    if value is not None and key.endswith("_share"):
        return f"{100 * value:.1f}"
    if value is not None and key == "extra_parameters":
        return f"{value:,}"
    return number(value, unit="x" if key == "ratio" else "")


if __name__ == "__main__":
    program.main(command, "python -m swiftopt.papers.ablate")
