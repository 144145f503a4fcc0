"""Runs an ablation: its variants by turns on the same prompts, beside plain decoding, and rows of the paper's shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..core.errors import SwiftoptError
from ..core.requests import BASE, GenerateRequest
from ..core.types import Prompt, Sampling
from ..decoding.methods import PLAIN, Method
from ..decoding.session import Session
from ..models.costs import machine_name
from ..models.early_exit import n_parameters
from ..models.runtime import Runtime
from ..optimizer.search import Search
from ..store import Store
from ..tasks.compare import first_turns, made_on, open_models, task_of
from ..tasks.measures import EnergyMeter, nll
from ..tasks.report import Figures, figures
from ..tasks.runs import Contender, Interleaved, OnRun, Run, decoding_with
from .ablation_table import ABLATIONS, SCHEMA
from .ablations import AblationRecipes, Variant, variants


@dataclass(frozen=True, slots=True, eq=False)
class BuiltVariant:
    """A variant with its method; `error` says why there is none."""

    variant: Variant
    method: Method | None = None
    search: Search | None = None
    n_heads: int | None = None
    n_parameters: int | None = None
    error: str | None = None


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
    """The object that `swiftopt bench ablate --json` prints.

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
    made = [_made(variant) for variant in variants(name, recipes)]
    able = [Contender(BASE, decoding_with(session, PLAIN))]
    able += [_contender(one, runtime, request.max_new_tokens) for one in made if one.error is None]
    meter = EnergyMeter.of(runtime.device.type, runtime.device.index or 0)
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
        "rows": [_row(one, runs, session, prompts) for one in made],
        "interrupted": not finished,
    }


def _made(variant: Variant) -> BuiltVariant:
    try:
        made = variant.make()
        heads = None if variant.heads is None else variant.heads()
    except SwiftoptError as error:
        return BuiltVariant(variant, error=str(error))
    method, search = (made.method, made) if isinstance(made, Search) else (made, None)
    if heads is None:
        return BuiltVariant(variant, method, search)
    own = _is_own(heads.transforms.values())
    return BuiltVariant(variant, method, search, 0 if own else len(heads.depths), 0 if own else n_parameters(heads))


def _is_own(transforms: Any) -> bool:
    """Whether the heads are the model's own, read early: nothing is added to it."""
    return all(t.shape[0] == t.shape[1] and bool((t == torch.eye(t.shape[0]).to(t)).all()) for t in transforms)


def _contender(made: BuiltVariant, runtime: Runtime, max_new_tokens: int) -> Contender:
    assert made.method is not None
    session = Session(runtime, made.variant.sampling, max_new_tokens)
    return Contender(made.variant.label, decoding_with(session, made.search or made.method))


def _row(made: BuiltVariant, runs: Interleaved, session: Session, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """A variant's figures with what it varies, and what its search cost."""
    variant = made.variant
    head = {"label": variant.label, "base": variant.base, **variant.values}
    known = Figures(variant.label, lossy=made.method is not None and made.method.lossy, extra_bytes=0)
    early = made.n_heads is not None
    if made.error is not None:
        return {
            **head,
            **known.missing(len(prompts), made.error).to_json(),
            "heads": None,
            "consistency": None,
        }

    def nll_of(number: int, run: Run) -> float:
        return nll(session.runtime, session.encode(prompts[number]), run.token_ids)

    own = runs.runs[variant.label]
    plain = figures(known, own, runs.runs[BASE], len(prompts), nll_of, predicts_early=early)
    base = plain if variant.base == BASE else figures(known, own, runs.runs[variant.base], len(prompts), None)
    greedy = variant.sampling.greedy and plain.identical is not None
    return {
        **head,
        **replace(plain, ratio=base.ratio, ratio_interval=base.ratio_interval).to_json(),
        "extra_parameters": made.n_parameters,
        "heads": made.n_heads,
        "consistency": plain.identical / plain.prompts if greedy and plain.identical is not None else None,
        **_search_figures(made.search, own.by_prompt.values()),
    }


def _search_figures(search: Search | None, runs: Any) -> dict[str, float | None]:
    """Milliseconds per candidate, share of the time that the search took, and what it came to."""
    if search is None:
        return {}
    seconds = sum(run.completion.timings.optimise_s for run in runs)
    total = sum(run.seconds for run in runs)
    return {
        "candidates": len(search.trials),
        "optimise_ms": 1000 * seconds / len(search.trials) if search.trials else None,
        "optimise_share": seconds / total if total else None,
        "matchness": search.matchness,
        "skip_ratio": search.layer_set.skip_ratio,
    }
