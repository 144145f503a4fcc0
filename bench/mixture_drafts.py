"""Measures what drafts gain with a mixture of experts: costs by distinct experts, and drafts with fewer experts.

python -m swiftopt.bench.mixture_drafts prices
python -m swiftopt.bench.mixture_drafts overlap
python -m swiftopt.bench.mixture_drafts drafts

`prices` needs no model: it computes the cost of rows from the experts' share of a pass. `overlap` and `drafts` use the
small trained mixture (`bench/small_mixture.py`), or --model. Every command prints one JSON object as its last line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import click
import torch

from ..core.costs import CostProfile, ExpertCosts, distinct_experts
from ..core.errors import InvalidInput
from ..core.layer_sets import LayerSet
from ..core.settings import SwiftSettings
from ..core.streams import read_stream
from ..core.types import Prompt, Sampling
from ..decoding.draft_models import SkippedTarget
from ..decoding.engine import alone, side_by_side
from ..decoding.events import Prefilled, Round, Turn
from ..decoding.methods import swift
from ..decoding.session import Session
from ..models.costs import machine_name, measure_costs
from ..models.expert_choice import Mixtures
from ..models.loading import load
from ..models.rows import Rows
from ..models.runtime import Runtime
from ..optimizer.evaluation import WindowScore, score_window, swift_speedup
from .micro import measure_ms
from .small_mixture import EXAMPLES, texts, trained
from .turn import measured

# Qwen3-30B-A3B: a token chooses 8 of 128 experts, which are SHARE of the bytes of a 4-bit pass.
SHARE, N_EXPERTS, N_CHOSEN = 0.576, 128, 8
OVERLAPS = (0.0625, 0.2, 0.4, 0.6, 0.8)
ACCEPTANCES = (0.6, 0.7, 0.8, 0.9)
MAX_ROWS = 16
WINDOW = 32
EXPERT_SHARE = 0.5  # Experts' share of a one-row pass in the unit costs of `drafts`.
MODEL = click.option("--model", help="A folder or a name.  [default: the small trained mixture]")


@click.group()
def main() -> None:
    """Measure what drafts gain with a mixture of experts; every command prints one JSON object as its last line."""


@main.result_callback()
def _print(report: dict[str, Any]) -> None:
    click.echo(json.dumps(report))


# --- prices: computed from shares, without a model


def price(n_rows: int, share: float, n_chosen: int, overlap: float) -> float:
    """Return the cost of a pass over rows of a text, in one-row passes, of which experts are a `share`."""
    return 1 + share * (distinct_experts(n_rows, n_chosen, overlap) / n_chosen - 1)


def best_ratio(acceptance: float, share: float, n_chosen: int, overlap: float) -> tuple[float, int]:
    """Return the highest speedup of free drafts whose tokens are all accepted with the same probability.

    Returns: the speedup, and the draft's length.
    """
    ratios = [
        (sum(acceptance**i for i in range(n_rows)) / price(n_rows, share, n_chosen, overlap), n_rows - 1)
        for n_rows in range(1, MAX_ROWS + 1)
    ]
    return max(ratios)


@main.command()
@click.option("--share", default=SHARE, show_default=True, help="Experts' share of a one-row pass.")
@click.option("--experts", default=N_EXPERTS, show_default=True)
@click.option("--chosen", default=N_CHOSEN, show_default=True)
def prices(share: float, experts: int, chosen: int) -> dict[str, Any]:
    """Show the cost of rows, and the highest speedup of free drafts, by the overlap of neighbouring tokens' experts."""
    rows = []
    for overlap in dict.fromkeys((chosen / experts, *OVERLAPS)):
        costs = {n: round(price(n, share, chosen, overlap), 2) for n in (2, 3, 4, 8)}
        best = {acceptance: best_ratio(acceptance, share, chosen, overlap) for acceptance in ACCEPTANCES}
        rows.append({"overlap": overlap, "price": costs, "best": best})
        best_words = ", ".join(f"α {a}: {ratio:.2f} with {n}" for a, (ratio, n) in best.items())
        click.echo(f"overlap {overlap:.2f}: cost by rows {costs}; best free drafts: {best_words}")
    return {"schema": "swiftopt.bench-mixture-prices/1", "share": share, "experts": experts, "rows": rows}


# --- overlap: distinct experts over a text, counted and timed


@main.command()
@MODEL
@click.option("--tokens", default=1024, show_default=True, help="Tokens of the text.")
@torch.inference_mode()
def overlap(model: str | None, tokens: int) -> dict[str, Any]:
    """Compare the distinct experts of passes over a text with those of uniform routing, and time the passes.

    Passes over the text alternate with passes over tokens that are far apart.
    """
    runtime = load(model or str(trained()), dtype="auto", device="cpu")
    costs = measure_costs(runtime, 256).experts
    if costs is None or not costs.distinct:
        raise click.ClickException("only swiftopt's CPU kernels count experts: use a mixture that they run")
    ids = runtime.tokenizer("\n".join(text for text in texts() if len(text) > 4 * tokens))["input_ids"][:tokens]
    share, rows = overlap_of_neighbours(runtime, ids), []
    for n_rows in (1, 2, 3, 4, 8):
        context = len(ids) - n_rows
        distant_ids = [int(token_id) for token_id in torch.linspace(7, runtime.vocab_size - 1, n_rows)]
        buffer = runtime.new_buffer(len(ids))
        runtime.prefill(ids[:context], buffer)
        passes = {"text": Rows(ids[context:], context), "apart": Rows(distant_ids, context)}
        ms = measure_ms({name: partial(runtime.forward, pass_rows, buffer) for name, pass_rows in passes.items()})
        counted = mean_distinct(runtime, ids, n_rows)
        uniform = distinct_experts(n_rows, costs.n_chosen, costs.n_chosen / costs.n_experts)
        expected = distinct_experts(n_rows, costs.n_chosen, share)
        rows.append({"rows": n_rows, "text": counted, "by_overlap": expected, "uniform": uniform, "ms": ms})
        click.echo(
            f"{n_rows} rows: {counted:.2f} distinct experts (by overlap {expected:.2f}, uniform {uniform:.2f});"
            f" {ms['text']:.2f} ms over text, {ms['apart']:.2f} ms over tokens that are far apart"
        )
    about = {"schema": "swiftopt.bench-mixture-overlap/1", "device": machine_name(runtime), "overlap": share}
    click.echo(f"overlap of neighbours: {share:.3f}; uniform: {costs.n_chosen / costs.n_experts:.3f}")
    return {**about, "rows": rows}


def overlap_of_neighbours(runtime: Runtime, ids: Sequence[int]) -> float:
    """Return the share of a token's experts that the token before it chose as well, over a text."""
    runtime.taken_experts()  # Reset the counts.
    runtime.prefill(ids, runtime.new_buffer(len(ids)))
    counts = runtime.taken_experts()
    assert counts is not None
    return counts.repeated / counts.taken


def mean_distinct(runtime: Runtime, ids: Sequence[int], n_rows: int) -> float:
    """Return the distinct experts per layer of passes over `n_rows` rows of a text, on average."""
    buffer, distinct = runtime.new_buffer(len(ids)), []
    for context in range(0, len(ids) - n_rows + 1, n_rows):
        runtime.taken_experts()  # Reset the counts.
        runtime.forward(Rows(ids[context : context + n_rows], context), buffer, wanted=())
        counts = runtime.taken_experts()
        assert counts is not None
        distinct.append(counts.distinct)
    return sum(distinct) / len(distinct)


# --- drafts: with fewer experts, their value predicted and observed, in units of cost


@dataclass(frozen=True, slots=True)
class DraftValue:
    """Acceptance rate of a draft, and its tokens per unit of cost, as windows predict them and as rounds show them."""

    acceptance: float | None
    predicted: float
    observed: float

    @property
    def ratio(self) -> float:
        return self.observed / self.predicted


def mixtures_in(runtime: Runtime) -> Mixtures:
    """Return the model's mixtures.

    Raises: InvalidInput: the model has none.
    """
    if runtime.mixtures is None:
        raise InvalidInput("the model has no mixture of experts: name one with --model")
    return runtime.mixtures


def unit_costs(runtime: Runtime) -> CostProfile:
    """Return costs in units of a one-row pass, with a fixed share for experts, so that nothing is timed."""
    n_layers, mixtures = runtime.n_layers, mixtures_in(runtime)
    expert_s = EXPERT_SHARE / (len(mixtures.layers) * mixtures.n_chosen)
    experts = ExpertCosts(mixtures.n_experts, mixtures.n_chosen, mixtures.layers, expert_s)
    attn_s, mlp_s = 0.3 / n_layers, EXPERT_SHARE / n_layers
    pass_s = {n: 1 + 0.1 * (n - 1) for n in (1, 2, 4, 8, 16, 32)}
    profile = CostProfile("", "", "", 256, n_layers, attn_s, mlp_s, 0.1, 0.1, pass_s)
    return replace(profile, experts=experts)


def value_of(
    session: Session, prompts: Sequence[Prompt], draft: LayerSet, costs: CostProfile, settings: SwiftSettings
) -> DraftValue:
    """Decode prompts with a draft, and predict its value from windows of the same completions."""
    scores: list[WindowScore] = []
    completions = []
    for prompt in prompts:
        n_scored = 0
        request = session.request(prompt, swift(SkippedTarget(draft), settings), scratch_rows=WINDOW)
        with closing(side_by_side([request])) as events:
            for event in events:
                if isinstance(event, Turn):
                    completions.append(event.completion)
                elif isinstance(event, Prefilled | Round):
                    n_generated, is_done = len(event.context.generated), event.context.finish is not None
                    window = min(WINDOW, n_generated - n_scored)
                    if window == WINDOW or (is_done and window):
                        start = len(event.context.token_ids) - n_generated + n_scored
                        scores += alone(score_window(event.context, [draft], window, start))
                        n_scored += window
    widths: dict[int, int] = {}
    for n_rows, n in chain.from_iterable(completion.verified_widths.items() for completion in completions):
        widths[n_rows] = widths.get(n_rows, 0) + n
    n_drafted = sum(completion.drafted for completion in completions)
    n_accepted = sum(completion.accepted for completion in completions)
    n_tokens = sum(completion.n_decoded for completion in completions)
    return DraftValue(
        n_accepted / n_drafted if n_drafted else None,
        swift_speedup(scores, draft, settings, costs),
        costs.expected_speedup(draft, n_tokens, n_drafted, widths),
    )


@main.command()
@MODEL
@click.option("--stream", default=str(EXAMPLES / "stream.jsonl"), show_default=True)
@click.option("--limit", default=8, show_default=True, help="Number of prompts.")
@click.option("--max-new-tokens", default=128, show_default=True)
@click.option("--length", default=3, show_default=True, help="Draft steps per round.")
def drafts(model: str | None, stream: str, limit: int, max_new_tokens: int, length: int) -> dict[str, Any]:
    """Show the acceptance of drafts with fewer experts, and their predicted and observed value in units of cost."""
    runtime = load(model or str(trained()), dtype="auto", device="cpu")
    session = Session(runtime, Sampling(), max_new_tokens, ignore_eos=True)
    settings = SwiftSettings(early_stop=False, max_draft_length=length, dynamic_verification=False)
    prompts, costs, rows = read_stream(stream, limit=limit), unit_costs(runtime), []
    n_chosen = mixtures_in(runtime).n_chosen
    for n_experts in (n_chosen >> n for n in range(1, n_chosen.bit_length())):
        draft = LayerSet(runtime.n_layers, experts=(("mlp", n_experts),))
        value = value_of(session, prompts, draft, costs, settings)
        cost = costs.draft_cost(draft)
        rows.append({"experts": n_experts, "cost": cost, "ratio": value.ratio, "α": value.acceptance})
        click.echo(
            f"{n_experts} of {n_chosen} experts: c {cost:.2f}, α {value.acceptance or 0:.2f};"
            f" tokens per unit {value.observed:.2f}, predicted {value.predicted:.2f}, quotient {value.ratio:.3f}"
        )
    return {"schema": "swiftopt.bench-mixture-drafts/1", "drafts": rows}


if __name__ == "__main__":
    measured(main)
