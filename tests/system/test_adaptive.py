"""Laws of adaptive drafting on tiny models: exact with any source of drafts, and no drafts where they do not pay."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace
from functools import cache

import pytest
from fakes import cheap_draft_costs, flat_costs
from native import quick_runtime

from swiftopt.core.costs import CostProfile
from swiftopt.core.errors import SettingsError
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.observed_costs import ObservedCosts, PassTiming
from swiftopt.core.types import Completion, Sampling
from swiftopt.decoding.context import Context, Ending, TokenRule
from swiftopt.decoding.corpus import Corpora
from swiftopt.decoding.draft_models import OtherModel
from swiftopt.decoding.draft_worth import PassCosts
from swiftopt.decoding.engine import side_by_side
from swiftopt.decoding.events import Prefilled, Round
from swiftopt.decoding.hit_rates import HitRates
from swiftopt.decoding.loop import decode, decoding
from swiftopt.decoding.methods import PLAIN, Method, Resources, build
from swiftopt.decoding.methods.adaptive import AdaptiveDrafter, AdaptiveSettings
from swiftopt.decoding.text_matches import Matches
from swiftopt.models.runtime import Runtime
from swiftopt.tasks.served_task import SwitchedDrafter

REPEATING, FREE = [3, 1, 4, 1, 5, 9] * 4, [5, 9, 11, 2, 7]


@cache
def model() -> Runtime:
    return quick_runtime("llama")


def run(method: Method, ids: list[int], n_new: int = 80, sampling: Sampling | None = None) -> Completion:
    return decode(model(), ids, method, TokenRule.of(sampling or Sampling(), None), Ending(n_new))


def adaptive(share: float = 0.25, **settings: object) -> Method:
    parts = Resources(model(), costs=cheap_draft_costs(share))
    return build("adaptive", parts, AdaptiveSettings.from_json(settings))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "settings",
    [{}, {"lookup": False}, {"second_candidates": False}, {"draft_format": "stored"}, {"max_draft_length": 1}],
)
def test_output_is_plain_decodings_in_every_make(settings: dict[str, object], temperature: float) -> None:
    method = adaptive(**settings)
    for ids in (REPEATING, FREE):  # one method for both: what it learnt of the first must not tell in the second
        sampling = Sampling(temperature=temperature, seed=7)
        assert run(method, ids, sampling=sampling).token_ids == run(PLAIN, ids, sampling=sampling).token_ids


def test_good_cheap_draft_is_followed_far() -> None:
    """The draft is the model itself at a tenth of the cost, so nearly every token comes from a chain."""
    runtime = model()
    drafter = AdaptiveDrafter(
        OtherModel(runtime),
        PassCosts(cheap_draft_costs(0.1), LayerSet(4).filled("int4")),
        AdaptiveSettings(lookup=False),
    )
    done = run(Method("adaptive", drafter), FREE)
    assert done.token_ids == run(PLAIN, FREE).token_ids
    assert done.acceptance_rate == 1 and (done.mean_generated_length or 0) > 6
    assert drafter.learned.throughput.rate > 3


def test_adaptive_drafting_leaves_a_hopeless_draft_alone() -> None:
    """Another random model predicts nothing of this one, so after some tries passes have one row."""
    costs = PassCosts(cheap_draft_costs(0.5), LayerSet(4).filled("int4"))
    settings = AdaptiveSettings(lookup=False)
    method = Method("adaptive", AdaptiveDrafter(OtherModel(quick_runtime("llama", seed=9)), costs, settings))
    first, later = run(method, FREE, 200), run(method, REPEATING, 200)
    assert (first.acceptance_rate or 0) < 0.2
    assert later.drafted < 0.2 * later.n_tokens
    assert later.verified_widths[1] > 0.8 * later.target_passes


def test_dear_draft_is_never_run_but_to_probe() -> None:
    """A draft step that costs a plain pass cannot pay, whatever its acceptance."""
    method = adaptive(1.0, lookup=False)
    done = run(method, REPEATING, 120)
    assert done.drafted <= 4 * 4
    assert done.verified_widths[1] > 0.9 * done.target_passes


def test_second_candidate_pays_for_the_row_behind_the_first_ones() -> None:
    """A pass over two rows costs as much as one over one row, and each further row as much again."""
    costs = replace(cheap_draft_costs(0.25), pass_s={1: 8.0, 2: 8.0, 3: 16.0, 4: 24.0, 32: 248.0})
    other = OtherModel(quick_runtime("llama", seed=9))
    settings = AdaptiveSettings(lookup=False, max_draft_length=1)
    drafter = AdaptiveDrafter(other, PassCosts(costs, LayerSet(4).filled("int4")), settings)
    done = run(Method("adaptive", drafter), FREE, 200)
    assert done.drafted
    assert set(done.verified_widths) <= {1, 2}


def test_text_saves_passes_of_the_draft() -> None:
    """In repetitive text, one pass of the draft checks several tokens."""
    with_text, alone = adaptive(), adaptive(lookup=False)
    for method in (with_text, alone):
        run(method, REPEATING)
    costs = [method.drafter.learned.models["model"].step_cost for method in (with_text, alone)]  # type: ignore[attr-defined]
    assert costs[0] < costs[1] == pytest.approx(0.25)


def test_missing_costs_are_asked_for_in_a_sentence() -> None:
    runtime = model()
    with pytest.raises(SettingsError, match="decides by measured costs: give Resources the profile"):
        build("adaptive", Resources(runtime))
    with pytest.raises(SettingsError, match="costs of int4 are not in the profile: add them with measure_format"):
        build("adaptive", Resources(runtime, costs=flat_costs()))
    with pytest.raises(SettingsError, match="draft_format is 'int3': use 'int8', 'fp8', 'int4'"):
        AdaptiveSettings.from_json({"draft_format": "int3"})
    with pytest.raises(SettingsError, match="draft_format is 4: use 'int8', 'fp8', 'int4'"):
        AdaptiveSettings.from_json({"draft_format": 4})


def test_text_is_learnt_once_where_several_requests_are_gone_on_with() -> None:
    first, again = adaptive(), adaptive()
    contexts: dict[int, Context] = {}
    works = [decoding(model(), ids, first, TokenRule.of(Sampling(), None), Ending(40)) for ids in (REPEATING, FREE)]
    with closing(side_by_side(works, 2)) as events:
        for event in events:
            contexts[event.context.n_prompt] = event.context
            if isinstance(event, Round) and len(contexts) == 2 and len(event.context.generated) > 12:
                break
    cut = {n: (context.token_ids[:n], context.resume_point()) for n, context in contexts.items()}
    again.drafter.restore(first.drafter.state() or {})
    works = [decoding(model(), ids, again, TokenRule.of(Sampling(), None), Ending(40), at) for ids, at in cut.values()]
    with closing(side_by_side(works, 2)) as events:
        next(event for event in events if isinstance(event, Round))  # behind which both have read what is committed
    once = HitRates()
    for ids, at in cut.values():
        Matches(once, ids).read([*ids, *at.token_ids])
    assert isinstance(again.drafter, AdaptiveDrafter) and again.drafter.learned.matched.seen == once.seen


# --- deep contexts, by a made-up machine


class DeepCosts:
    """Costs of contexts that are `depth` tokens longer than the decoded ones."""

    def __init__(self, costs: ObservedCosts) -> None:
        self.costs, self.depth = costs, 0

    def at(self, n_positions: int | None = None) -> CostProfile:
        return self.costs.at(None if n_positions is None else n_positions + self.depth)

    def missing(self, layer_set: LayerSet) -> frozenset[str]:
        return self.costs.missing(layer_set)


WEIGHTS = replace(cheap_draft_costs(), pass_s={1: 0.07, 2: 0.071, 4: 0.074, 8: 0.082, 16: 0.13, 32: 0.23, 64: 0.43})


def pass_s(n_rows: int, depth: int, shared: float, of_row: float) -> float:
    """Return the seconds of a pass: its weights, and per 1,000 slots a shared part and a part of each row."""
    return WEIGHTS.target_pass_s(n_rows) + depth / 1000 * (shared + n_rows * of_row)


def deep_speedups(shared: float, of_row: float, wrong: float, depths: list[int]) -> list[float]:
    """Return plain seconds ÷ drafted seconds of consecutive requests at these depths, after two plain rounds.

    Their answers are repeated with a share `wrong` of changed tokens. Costs were measured at 512 tokens.
    """
    measured = {n: pass_s(n, 512, shared, of_row) for n in WEIGHTS.pass_s}
    costs = DeepCosts(ObservedCosts(replace(WEIGHTS, pass_s=measured, context_bucket=512)))
    method = Method("adaptive", AdaptiveDrafter(None, PassCosts(costs, None), AdaptiveSettings()))
    rng, corpora, speedups = random.Random(3), Corpora(1 << 20), list[float]()
    for depth in depths:
        ids, sampling = [rng.randrange(2, 90) for _ in range(5)], Sampling(temperature=1.5, seed=2)
        plain = run(PLAIN, ids, 100, sampling)
        answer = [rng.randrange(2, 90) if rng.random() < wrong else token_id for token_id in plain.token_ids]
        corpora.add("", "code", ids, answer)
        costs.depth, seconds, n_rounds = depth, 0.0, 0

        def drafts() -> bool:
            return n_rounds >= 2  # noqa: B023 - the drafter is used within this turn of the loop

        work = decoding(
            model(),
            ids,
            Method("adaptive", SwitchedDrafter(method, drafts)),
            TokenRule.of(sampling, None, len(ids)),
            Ending(100),
        )
        for event in side_by_side([work]):
            if isinstance(event, Prefilled):
                event.context.corpus = corpora.of("", "code")
            elif isinstance(event, Round):
                taken_s = pass_s(event.n_rows, depth + event.context.root_slot, shared, of_row)
                parts = ((event.n_rows, None),)
                costs.costs.learn([PassTiming(parts, depth + event.context.root_slot, taken_s)])
                n_rounds, seconds = n_rounds + 1, seconds + taken_s
        speedups.append(99 * pass_s(1, depth + 50, shared, of_row) / seconds)
    return speedups


@pytest.mark.parametrize(("shared", "of_row"), [(0.0025, 0.0025), (0.0, 0.005), (0.001, 0.015)])
def test_drafts_are_at_no_depth_slower_than_plain_beyond_what_finding_out_costs(shared: float, of_row: float) -> None:
    """Half of the tokens are wrong, and a row costs as much as at depth 0, or its own attention."""
    for depth in (0, 8_000, 24_000):
        first, *later = deep_speedups(shared, of_row, 0.5, [depth] * 4)
        assert first > 0.95 and sum(later) / len(later) > 0.97, depth


def test_drafts_at_a_depth_are_as_long_as_they_pay_there_whatever_others_do() -> None:
    deep = deep_speedups(0.0025, 0.0025, 0.0, [24_000] * 3)[-1]
    *_, short, beside_short = deep_speedups(0.0025, 0.0025, 0.0, [0, 24_000] * 3)
    assert beside_short > 0.98 * deep > 2.4 and short > 7
