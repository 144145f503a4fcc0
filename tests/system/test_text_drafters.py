"""Drafts that need no draft model: prompt lookup, Jacobi and Lookahead give the tokens of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
import torch
from fakes import cheap_draft_costs
from families import CONFIGS, VOCAB, taken_in_turns, tiny_runtime, variants
from native import quick_runtime

from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.types import Completion, Sampling, TracedToken
from swiftopt.decoding.context import Context, Ending, TokenRule
from swiftopt.decoding.draft import Draft, Drafter, Outcome, Walk
from swiftopt.decoding.draft_tree import DraftTree, ancestor_mask, tree_rows
from swiftopt.decoding.engine import alone, side_by_side
from swiftopt.decoding.events import Prefilled, Round
from swiftopt.decoding.hit_rates import HitRates
from swiftopt.decoding.loop import _trace_sources, decode, decoding
from swiftopt.decoding.methods import PLAIN, Method, Resources, build
from swiftopt.decoding.methods.adaptive import AdaptiveSettings
from swiftopt.decoding.methods.lookup import LookupDrafter, LookupSettings
from swiftopt.decoding.text_matches import SuffixAutomaton
from swiftopt.decoding.work import PassGenerator
from swiftopt.models.rows import Rows
from swiftopt.models.runtime import Runtime
from swiftopt.papers.methods.guesses import (
    JacobiDrafter,
    JacobiSettings,
    LookaheadDrafter,
    LookaheadSettings,
    NgramPool,
    Window,
    merge_paths,
)

N_NEW = 48
GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.3, top_p=0.9, seed=2)
DRAFTERS: dict[str, Drafter] = {
    "lookup": LookupDrafter(LookupSettings()),
    "lookup-from-one": LookupDrafter(LookupSettings(max_draft_length=4, min_match=1)),
    "jacobi": JacobiDrafter(JacobiSettings()),
    "jacobi-narrow": JacobiDrafter(JacobiSettings(window=1)),
    "lookahead": LookaheadDrafter(LookaheadSettings()),
    "lookahead-bigrams": LookaheadDrafter(LookaheadSettings(ngram=2, window=3, guesses=2)),
    "lookahead-deep": LookaheadDrafter(LookaheadSettings(ngram=6, window=2, guesses=5)),
    "lookahead-least": LookaheadDrafter(LookaheadSettings(ngram=2, window=1, guesses=1)),
}


class Watched(Drafter):
    """A drafter that records its drafts, and checks each against its promised limits."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.drafts: list[Draft] = []

    def max_rows(self, room: int) -> int:
        return self.drafter.max_rows(room)

    def start(self) -> None:
        self.drafter = self.drafter.begin(self.context)

    def draft(self, room: int) -> PassGenerator[Draft]:
        draft = yield from self.drafter.draft(room)
        n_extra = 0 if draft.extra_rows is None else len(draft.extra_rows.token_ids)
        assert draft.tree.n_nodes + n_extra <= self.max_rows(room)
        assert draft.n_steps == int(ancestor_mask(draft.tree.parents).sum(1).max()) - 1 <= room
        self.drafts.append(draft)
        return draft

    def observe(self, outcome: Outcome) -> None:
        self.drafter.observe(outcome)


def repetitive(seed: int, length: int = 24) -> list[int]:
    """Return a prompt that repeats a few words."""
    rng = random.Random(seed)
    phrase = [rng.randrange(2, VOCAB) for _ in range(6)]
    return (phrase * length)[:length]


def run(runtime: Runtime, ids: list[int], method: Method, sampling: Sampling, n_new: int = N_NEW) -> Completion:
    return decode(runtime, ids, method, TokenRule.of(sampling, None, len(ids)), Ending(n_new))


@pytest.mark.parametrize(("family", "names"), variants(taken_in_turns(CONFIGS, DRAFTERS, 3)))
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_text_drafters_equal_plain_decoding(family: str, names: Sequence[str], sampling: Sampling) -> None:
    """Greedy drafts run on torch's passes, sampled ones on the native kernels'."""
    runtime, ids = (tiny_runtime if sampling.greedy else quick_runtime)(family), repetitive(1)
    plain = run(runtime, ids, PLAIN, sampling)
    for name in names:
        watched = Watched(DRAFTERS[name])
        fast = run(runtime, ids, Method(name, watched), sampling)
        assert fast.token_ids == plain.token_ids, name
        assert fast.target_passes == len(watched.drafts) <= plain.target_passes


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "lookahead-least"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_text_drafters_accept_several_tokens(name: str, sampling: Sampling) -> None:
    """Guards the parity test, which must include accepted drafts of several tokens."""
    done = [
        run(quick_runtime(family), repetitive(1), Method(name, DRAFTERS[name]), sampling)
        for family in ("llama", "qwen2-window", "gemma3", "gpt2")
    ]
    assert sum(one.accepted for one in done) > 0
    assert sum(one.target_passes for one in done) < sum(one.n_tokens - one.first_tokens for one in done)


def test_lookahead_accepts_a_branch_beside_the_first_path() -> None:
    """Guards the parity test, which must include moves of rows over those of other branches and extra_rows."""
    beside = 0

    class Noted(Watched):
        def observe(self, outcome: Outcome) -> None:
            nonlocal beside
            beside += any(node != depth for depth, node in enumerate(outcome.walk.path, 1))
            super().observe(outcome)

    for family in ("llama", "gemma3", "gpt2"):
        for sampling in (GREEDY, SAMPLED):
            run(tiny_runtime(family), repetitive(1), Method("lookahead", Noted(DRAFTERS["lookahead"])), sampling)
    assert beside > 0


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_text_drafters_fill_the_context_to_its_last_position(family: str, name: str) -> None:
    runtime = quick_runtime(family)
    ids = repetitive(2, runtime.max_positions - 20)
    plain = run(runtime, ids, PLAIN, GREEDY, 20)
    assert run(runtime, ids, Method(name, DRAFTERS[name]), GREEDY, 20).token_ids == plain.token_ids


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(repetition_penalty=1.3),
        Sampling(presence_penalty=0.6, frequency_penalty=0.2, logit_bias=((5, 2.0),)),
        Sampling(temperature=0.5, min_p=0.1, frequency_penalty=0.3, seed=3),
    ],
)
def test_penalties_and_biases_leave_text_drafters_exact(sampling: Sampling) -> None:
    runtime = tiny_runtime("llama")
    plain = run(runtime, repetitive(1), PLAIN, sampling)
    for name, drafter in DRAFTERS.items():
        assert run(runtime, repetitive(1), Method(name, drafter), sampling).token_ids == plain.token_ids


FREE = Sampling(temperature=1.5, seed=2)  # hot enough that the text does not repeat itself


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, FREE], ids=["greedy", "sampled", "free"])
@pytest.mark.parametrize("name", ["prompt-lookup", "adaptive", "adaptive, no model"])
def test_prediction_saves_passes_with_equal_tokens(name: str, family: str, sampling: Sampling) -> None:
    """A right prediction is accepted from its first token on, an edited one also after the edit, a wrong one not."""
    runtime, rng = quick_runtime(family), random.Random(3)
    ids, wrong = ([rng.randrange(2, VOCAB) for _ in range(n)] for n in (12, N_NEW))
    settings = {"adaptive": AdaptiveSettings(), "adaptive, no model": AdaptiveSettings(draft_format="stored")}
    expected = run(runtime, ids, PLAIN, sampling).token_ids
    edited = [*expected[:20], (expected[20] + 1) % VOCAB, *expected[21:]]
    done = []
    for prediction in (expected, edited, wrong, ()):
        method = build(name.partition(",")[0], Resources(runtime, costs=cheap_draft_costs()), settings.get(name))
        rule = TokenRule.of(sampling, None, len(ids))
        done.append(alone(decoding(runtime, ids, method, rule, Ending(N_NEW), prediction=prediction)))
        assert done[-1].token_ids == expected
        assert done[-1].accepted_prediction <= done[-1].accepted
        assert done[-1].accepted_prediction + done[-1].rejected_prediction <= done[-1].drafted
    right, close, useless, none = done
    assert useless.rejected_prediction > 0 or name == "adaptive"  # whose model says that its own draft is worth more
    assert (none.accepted_prediction, none.rejected_prediction) == (0, 0)
    assert right.accepted_prediction > 0 and right.accepted_per_position[0] > 0
    if sampling == FREE:
        assert right.accepted_prediction > 0.6 * N_NEW and right.rejected_prediction == 0
        assert close.accepted_prediction > 0.5 * N_NEW and close.rejected_prediction > 0
        assert right.target_passes <= close.target_passes < 0.6 * none.target_passes


def begun(runtime: Runtime, ids: list[int], drafter: Drafter) -> tuple[Context, Drafter]:
    context = Context(runtime, runtime.new_buffer(1), TokenRule.of(GREEDY, None), ids, len(ids))
    return context, drafter.begin(context)


def test_lookup_round_reads_only_new_tokens() -> None:
    """Counted in steps of the automaton: a hundred rounds take as many as a hundred tokens of the prompt."""
    rng = random.Random(7)
    text = [int(60 * rng.random() ** 2) for _ in range(6_000)]
    context, drafting = begun(tiny_runtime("llama"), text[:-200], LookupDrafter(LookupSettings()))
    alone(drafting.draft(10))
    automaton: SuffixAutomaton = drafting.matches.text  # type: ignore[attr-defined]
    prompt_moves, n_prompt = automaton.n_moves, len(context.token_ids)
    for start in range(n_prompt, len(text), 2):
        context.token_ids += text[start : start + 2]
        alone(drafting.draft(10))
        assert automaton.token_ids == context.token_ids
    assert automaton.n_moves - prompt_moves <= 200 * 1.5 * prompt_moves / n_prompt


def test_lookup_drafts_the_tokens_after_the_match_within_its_limits() -> None:
    text = [5, 6, 7, 8, 9, 10, 11, 12, 13, 5, 6, 7, 8]
    runtime = tiny_runtime("llama")

    def drafted(room: int, settings: LookupSettings) -> tuple[int, ...]:
        return alone(begun(runtime, list(text), LookupDrafter(settings))[1].draft(room)).tree.token_ids[1:]

    longest = drafted(10, LookupSettings())
    assert longest == (9, 10, 11, 12, 13, 5, 6, 7, 8)[: len(longest)] and len(longest) > 3
    assert drafted(2, LookupSettings()) == longest[:2]
    assert drafted(10, LookupSettings(max_draft_length=1)) == longest[:1]
    assert drafted(10, LookupSettings(min_match=4)) == longest
    assert drafted(10, LookupSettings(min_match=5)) == ()


def test_lookup_drafts_less_after_rejected_matches() -> None:
    rng = random.Random(5)
    misleading = [token for _ in range(60) for token in (90, 91, rng.randrange(2, 80))]
    faithful = [2, 3, 4, 90, 91, 5, 6, 7, 8] * 20
    lengths = [
        alone(begun(tiny_runtime("llama"), [*text, 90, 91], LookupDrafter(LookupSettings()))[1].draft(10)).n_steps
        for text in (misleading, faithful)
    ]
    assert lengths[0] < 3 and lengths[1] == 10


def test_hit_rates_follow_what_is_seen() -> None:
    rates = HitRates()
    assert rates.rate(1) == 0.5 < rates.rate(4) < rates.rate(50) < 1
    for _ in range(100):
        rates.learn(1, True)
        rates.learn(4, False)
    assert rates.rate(1) > 0.95 and rates.rate(4) < 0.05


def test_jacobi_keeps_the_argmaxes_after_the_accepted_part() -> None:
    _, drafting = begun(tiny_runtime("llama"), [3, 4], JacobiDrafter(JacobiSettings(window=4)))
    draft = alone(drafting.draft(10))
    assert draft.tree.token_ids == (4, 4, 4, 4, 4)
    argmaxes = [10, 11, 12, 13, 14]
    drafting.observe(Outcome(draft, Walk((1,), (4, 11)), argmaxes))
    assert alone(drafting.draft(10)).tree.token_ids[1:] == (12, 13, 14, 14)
    assert alone(drafting.draft(2)).tree.token_ids[1:] == (12, 13)
    drafting.observe(Outcome(draft, Walk((1, 2, 3, 4), (4, 4, 4, 4, 14)), argmaxes))
    assert alone(drafting.draft(10)).tree.token_ids[1:] == (14, 14, 14, 14)


def successor(token_id: int) -> int:
    return (3 * token_id + 1) % VOCAB


@pytest.mark.parametrize(
    "settings", [LookaheadSettings(), LookaheadSettings(ngram=2), LookaheadSettings(ngram=7, window=2)]
)
def test_lookahead_ngrams_are_the_trajectories_of_their_guesses(settings: LookaheadSettings) -> None:
    """For a model that sees only the last token, each n-gram must be a chain of its predictions."""
    window = Window(settings, [11, 12, 13])
    root, seen = 13, 0
    for _ in range(3 * settings.ngram):
        window.rows(root)
        assert window.levels[0][0] == root
        ngrams = window.advance([successor(token_id) for token_id in window.levels[-1]])
        root = successor(root)
        seen += len(ngrams)
        assert all(len(ngram) == settings.ngram for ngram in ngrams)
        for column, ngram in enumerate(ngrams):
            chain = ngram if column else ngram[1:]  # the first guess of column 0 gave way to the root
            assert all(after == successor(before) for before, after in pairwise(chain))
    assert seen > settings.window and (window.n_levels, window.width) == (settings.ngram - 1, settings.window)


def columns(window: Window) -> Iterator[tuple[int, list[int]]]:
    """Return each guess's row after the tree, and the tokens after the root that it sees, its own last."""
    cells = [(level, column) for level in range(window.n_levels) for column in range(window.width)][1:]
    for row, (level, column) in enumerate(cells):
        yield row, window.levels[0][1 : column + 1] + [window.levels[j][column] for j in range(1, level + 1)]


@pytest.mark.parametrize("family", variants())
def test_a_lookahead_window_equals_each_column_alone(family: str) -> None:
    runtime = tiny_runtime(family)
    rng = random.Random(9)
    ids = [rng.randrange(2, VOCAB) for _ in range(20)]
    window = Window(LookaheadSettings(ngram=4, window=3), ids)
    for _ in range(2):
        window.advance([rng.randrange(2, VOCAB) for _ in range(window.width)])
    tree = merge_paths(ids[-1], [(5, 6, 7), (5, 8), (9,)], 3)
    extra_rows = window.rows(ids[-1])
    assert extra_rows is not None and (window.n_levels, window.width) == (3, 3)
    buffer, root = runtime.new_buffer(64), len(ids) - 1
    runtime.prefill(ids[:-1], buffer)
    together = runtime.forward(tree_rows(tree.token_ids, tree.parents, root, extra_rows), buffer)
    checked = 0
    for row, chain in columns(window):
        alone = runtime.forward(Rows([ids[-1], *chain], root), buffer, [len(chain)])
        torch.testing.assert_close(together[tree.n_nodes + row], alone[0])
        checked += 1
    assert checked == len(extra_rows.token_ids)


def test_continuations_share_their_prefixes() -> None:
    tree = merge_paths(1, [(2, 3, 4), (2, 5), (2, 3, 6), (7,)], 2)
    assert tree == DraftTree((1, 2, 3, 5, 7), (-1, 0, 1, 1, 0), 2)
    assert merge_paths(1, [], 5) == DraftTree((1,), (-1,), 0)
    assert merge_paths(1, [(2, 3)], 0) == DraftTree((1,), (-1,), 0)


def test_a_pool_keeps_the_latest_ngrams_of_each_first_token() -> None:
    pool = NgramPool(2)
    for ngram in ((1, 2, 3), (1, 4, 5), (9, 9, 9), (1, 2, 3), (1, 6, 7)):
        pool.add(ngram)
    assert pool.continuations(1) == [(6, 7), (2, 3)]
    assert pool.continuations(9) == [(9, 9)]
    assert pool.continuations(2) == []


SOURCES = {  # that a method's accepted drafts come from
    **{"prompt-lookup": {"text"}, "swift": {"draft"}, "jacobi": {"draft"}, "lookahead": {"draft"}},
    **{"adaptive": {"draft", "text"}},
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("predicts", [False, True])
def test_trace_names_the_origin_of_each_token(name: str, predicts: bool) -> None:
    runtime, ids = tiny_runtime("llama"), repetitive(1)
    expected = run(runtime, ids, PLAIN, FREE).token_ids
    layer_set = LayerSet(runtime.n_layers, frozenset({1}))
    settings = AdaptiveSettings(draft_format="stored") if name == "adaptive" else None
    method = build(name, Resources(runtime, layer_set=layer_set, costs=cheap_draft_costs()), settings)
    rule = TokenRule.of(FREE, None, len(ids))
    prediction = [*expected[:20], (expected[20] + 1) % VOCAB, *expected[21:]] if predicts else ()
    events = [
        event
        for event in side_by_side([decoding(runtime, ids, method, rule, Ending(N_NEW), prediction=prediction)])
        if isinstance(event, Prefilled | Round)
    ]
    tokens = [token for event in events for token in event.traced]
    assert [token.token_id for token in tokens] == list(expected)
    assert [token.source for token in events[0].traced] == ["target"]
    for event in events[1:]:
        assert isinstance(event, Round)
        drafted = [token for token in event.traced if token.source != "target"]
        assert len(drafted) == event.n_accepted and event.traced[: len(drafted)] == tuple(drafted)
        if len(event.traced) > len(drafted) and name in ("prompt-lookup", "jacobi"):  # chains
            assert not any(token.rejected for token in drafted)
            assert len(event.traced[-1].rejected) == event.n_steps - event.n_accepted
    assert all(token.rejected[:1] != (token.token_id,) for token in tokens)
    sources = {token.source for token in tokens} - {"target"}
    assert sources <= SOURCES[name] | ({"prediction"} if predicts and "text" in SOURCES[name] else set())
    assert not predicts or "text" not in SOURCES[name] or "prediction" in sources


def test_trace_of_a_side_branch_names_the_first_candidate() -> None:
    tree = DraftTree.grow(1, [(2, 9), (3, 8), (4,)])  # the spine 2, 3, 4; beside them 9 and 8
    draft = Draft(tree, sources={3: "text"})
    assert _trace_sources(draft, Walk((1, 5), (2, 8, 7)), [2, 8, 7]) == (
        TracedToken(2, "draft"),
        TracedToken(8, "draft", (3, 4)),
        TracedToken(7, "target"),
    )
    assert _trace_sources(draft, Walk((1, 2, 3), (2, 3, 4, 7)), [2, 3, 4]) == (
        TracedToken(2, "draft"),
        TracedToken(3, "draft"),
        TracedToken(4, "text"),
    )
    assert _trace_sources(draft, Walk((), (5,)), [5]) == (TracedToken(5, "target", (2, 3, 4)),)
