"""Runs an ablation: its variants by turns on the same prompts, beside plain decoding, and rows of the paper's shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..core.errors import SwiftoptError
from ..core.requests import BASE, GenerateRequest
from ..core.types import Prompt, Sampling
from ..decoding.methods import PLAIN, Method
from ..decoding.session import Session
from ..models.costs import machine_name
from ..models.early_exit import Heads, n_parameters
from ..optimizer.search import Search
from ..store import Store
from ..tasks.compare import first_turns, made_on, open_models, task_of
from ..tasks.measures import EnergyMeter, nll
from ..tasks.report import Figures, Interleaved, OnRun, decoder, figures
from .ablation_recipes import AblationRecipes
from .ablations import ABLATIONS, SCHEMA, Variant


@dataclass(frozen=True, slots=True, eq=False)
class BuiltVariant:
    """A variant with what decodes it, and the heads that count; `error` says why there is none."""

    variant: Variant
    by: Method | Search | None = None
    heads: Heads | None = None
    error: str | None = None

    @property
    def n_added(self) -> tuple[int | None, int | None]:
        """Heads and parameters added to the model: none where the heads are the model's own, read early."""
        if self.heads is None:
            return None, None
        added = [t for t in self.heads.transforms.values() if not torch.equal(t, torch.eye(*t.shape).to(t))]
        return (len(self.heads.depths), n_parameters(self.heads)) if added else (0, 0)


def ablate(
    name: str,
    request: GenerateRequest,
    draft_model: str | None,
    prompts: Sequence[Prompt],
    store: Store | None,
    others: Sequence[Prompt] = (),
    on_step: Callable[[str], None] = lambda words: None,
    on_run: OnRun | None = None,
) -> dict[str, Any]:
    """Return the object that `swiftopt bench ablate --json` prints.

    Missing heads, probes and layer sets are made briefly on `others`, or the prompts themselves where there are none,
    as `swiftopt compare` makes them, and not kept. A search goes on from prompt to prompt while its variant decodes,
    and its time counts.
    """
    prompts, others = first_turns(prompts), first_turns(others)
    greedy = replace(request, draft_model=draft_model, sampling=Sampling())
    session, draft = open_models(greedy, prompts, store, on_step)
    runtime = session.runtime
    task = request.task or task_of(prompts)
    recipes = AblationRecipes(session, store, draft, request.model, task, others or prompts, None, on_step)
    built = [_built(variant) for variant in ABLATIONS[name].variants(recipes)]
    able = {BASE: decoder(session, PLAIN)}
    for one in built:
        if one.by is not None:
            variant_session = Session(runtime, one.variant.sampling, request.max_new_tokens)
            able[one.variant.label] = decoder(variant_session, one.by)
    meter = EnergyMeter.of(runtime.device)
    runs = Interleaved(able, prompts, meter, on_run)
    finished = runs.run()
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
        "made": [{"piece": one.piece, "how": one.how} for one in recipes.made],
        "made_on": made_on(others),
        "rows": [_row(one, runs, session, prompts) for one in built],
        "interrupted": not finished,
    }


def _built(variant: Variant) -> BuiltVariant:
    try:
        by = variant.make()
        return BuiltVariant(variant, by, None if variant.heads is None else variant.heads())
    except SwiftoptError as error:
        return BuiltVariant(variant, error=str(error))


def _row(built: BuiltVariant, runs: Interleaved, session: Session, prompts: Sequence[Prompt]) -> dict[str, Any]:
    variant = built.variant
    head = {"label": variant.label, "base": variant.base, **variant.values}
    search = built.by if isinstance(built.by, Search) else None
    method = built.by.method if isinstance(built.by, Search) else built.by
    figures_so_far = Figures(variant.label, lossy=method is not None and method.lossy, extra_bytes=0)
    if built.error is not None:
        return {
            **head,
            **figures_so_far.missing(len(prompts), built.error).to_json(),
            "heads": None,
            "consistency": None,
        }

    def nll_of(number: int, token_ids: tuple[int, ...]) -> float:
        return nll(session.runtime, session.encode(prompts[number]), token_ids)

    variant_runs = runs.runs[variant.label]
    plain = figures(
        figures_so_far, variant_runs, runs.runs[BASE], len(prompts), nll_of, predicts_early=built.heads is not None
    )
    base = (
        plain
        if variant.base == BASE
        else figures(figures_so_far, variant_runs, runs.runs[variant.base], len(prompts), None)
    )
    n_heads, n_added = built.n_added
    consistency = plain.identical / plain.prompts if variant.sampling.greedy and plain.identical is not None else None
    return {
        **head,
        **replace(plain, ratio=base.ratio, ratio_interval=base.ratio_interval).to_json(),
        "extra_parameters": n_added,
        "heads": n_heads,
        "consistency": consistency,
        **_search_figures(search, variant_runs.by_prompt.values()),
    }


def _search_figures(search: Search | None, runs: Iterable[Any]) -> dict[str, float | None]:
    """Milliseconds per candidate, share of the time that the search took, and what it found."""
    if search is None:
        return {}
    runs = list(runs)
    seconds = sum(run.completion.timings.optimise_s for run in runs)
    total = sum(run.seconds for run in runs)
    return {
        "candidates": len(search.trials),
        "optimise_ms": 1000 * seconds / len(search.trials) if search.trials else None,
        "optimise_share": seconds / total if total else None,
        "matchness": search.matchness,
        "skip_ratio": search.layer_set.skip_ratio,
    }
