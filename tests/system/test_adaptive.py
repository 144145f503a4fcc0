"""Laws of adaptive drafting on tiny models: exact whatever it drafts from, and quiet where nothing pays."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import cache

import pytest
from fakes import cheap_draft_costs, flat_costs
from native import quick_runtime

from swiftopt.core.errors import SettingsError
from swiftopt.core.types import Completion, LayerSet, Sampling
from swiftopt.decoding.context import Context, Ending, TokenRule
from swiftopt.decoding.draft_models import OtherModel
from swiftopt.decoding.draft_worth import PassCosts
from swiftopt.decoding.engine import side_by_side
from swiftopt.decoding.events import Round
from swiftopt.decoding.hit_rates import HitRates
from swiftopt.decoding.loop import decode, decoding
from swiftopt.decoding.methods import PLAIN, Method, Resources, build
from swiftopt.decoding.methods.adaptive import AdaptiveDrafter, AdaptiveSettings
from swiftopt.decoding.text_matches import Matches
from swiftopt.models.runtime import Runtime

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
    """A draft that is the model itself at a tenth of the cost: nearly every token comes from a chain."""
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
    """Another random model foresees nothing of this one: after some tries passes have one row."""
    costs = PassCosts(cheap_draft_costs(0.5), LayerSet(4).filled("int4"))
    settings = AdaptiveSettings(lookup=False)
    method = Method("adaptive", AdaptiveDrafter(OtherModel(quick_runtime("llama", seed=9)), costs, settings))
    first, later = run(method, FREE, 200), run(method, REPEATING, 200)
    assert (first.acceptance_rate or 0) < 0.2
    assert later.drafted < 0.2 * later.n_tokens
    assert later.verified_widths[1] > 0.8 * later.target_passes


def test_dear_draft_is_never_run_but_to_probe() -> None:
    """A draft step as dear as a plain pass cannot pay, however good it is."""
    method = adaptive(1.0, lookup=False)
    done = run(method, REPEATING, 120)
    assert done.drafted <= 4 * 4
    assert done.verified_widths[1] > 0.9 * done.target_passes


def test_second_candidate_pays_for_the_row_behind_the_first_ones() -> None:
    """A pass over two rows costs what one over one row costs, and each row more as much again."""
    costs = replace(cheap_draft_costs(0.25), pass_s={1: 8.0, 2: 8.0, 3: 16.0, 4: 24.0, 32: 248.0})
    other = OtherModel(quick_runtime("llama", seed=9))
    settings = AdaptiveSettings(lookup=False, max_draft_length=1)
    drafter = AdaptiveDrafter(other, PassCosts(costs, LayerSet(4).filled("int4")), settings)
    done = run(Method("adaptive", drafter), FREE, 200)
    assert done.drafted
    assert set(done.verified_widths) <= {1, 2}


def test_text_saves_passes_of_the_draft() -> None:
    """Where the text repeats itself, one pass of the draft checks several of its tokens."""
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
