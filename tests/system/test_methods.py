"""Laws of every decoding method in the catalogue."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from fakes import cheap_draft_costs, letter_tokenizer, results_of
from families import VOCAB, taken_in_turns, tiny_model, tiny_runtime
from mtp_files import with_layer
from native import quick_runtime
from transformers import MinNewTokensLengthLogitsProcessor

from swiftopt.core.errors import InvalidInput, LayerSetError, SettingsError
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.records import ModelInfo
from swiftopt.core.types import Completion, Sampling
from swiftopt.decoding.context import Ending, TokenRule
from swiftopt.decoding.draft import Draft, Drafter, DraftModel
from swiftopt.decoding.draft_models import OtherModel
from swiftopt.decoding.draft_tree import DraftTree
from swiftopt.decoding.engine import alone
from swiftopt.decoding.events import Prefilled, Round, WorkEvent
from swiftopt.decoding.grammar import Grammar
from swiftopt.decoding.loop import decode, decoding
from swiftopt.decoding.methods import METHODS, PLAIN, Method, Resources, build
from swiftopt.decoding.verify import TargetWalk
from swiftopt.decoding.work import PassGenerator, subscribed
from swiftopt.models.rows import Rows
from swiftopt.models.runtime import Runtime
from swiftopt.papers.early_exit import Heads, Probe

N_NEW = 24
WARM = Sampling(temperature=1.3)
LOSSLESS = [info.name for info in METHODS.values() if not info.lossy]
LOSSY = [info.name for info in METHODS.values() if info.lossy]
WITH_A_MODEL = [info.name for info in METHODS.values() if info.drafts_with_model]
FAMILIES = ["llama", "mistral-window", "gemma3", "gpt2", "gpt_neox"]


@cache
def parts(family: str = "llama", with_model: bool = False, make: Callable[..., Runtime] = tiny_runtime) -> Resources:
    runtime = with_layer(make(family))
    width, dtype = runtime.config.hidden_size, runtime.dtype
    generator = torch.Generator().manual_seed(3)
    heads = Heads({depth: torch.eye(width, dtype=dtype) * 3 for depth in (1, 2)})
    probe = Probe(1, torch.randn(width, generator=generator), 0.5)
    draft = make(family, seed=1) if with_model else None
    learned = {"heads": heads, "probe": probe}
    return Resources(runtime, LayerSet(4, frozenset({1}), frozenset({2})), learned, draft, cheap_draft_costs())


def prompt(seed: int) -> list[int]:
    """Return repeated words, so that lookups find matches."""
    rng = random.Random(seed)
    words = [rng.randrange(2, VOCAB) for _ in range(6)]
    return words * 3


def rule_of(sampling: Sampling, n_prompt: int, grammar: Grammar | None = None) -> TokenRule:
    masks = [] if grammar is None else [grammar.mask(letter_tokenizer(), VOCAB, n_prompt, [1])]
    return TokenRule.of(sampling, None, n_prompt, masks)


def run(
    method: Method,
    runtime: Runtime,
    ids: list[int],
    sampling: Sampling,
    n_new: int = N_NEW,
    grammar: Grammar | None = None,
) -> Completion:
    return decode(runtime, ids, method, rule_of(sampling, len(ids), grammar), Ending(n_new))


@cache
def plainly(family: str, seed: int) -> Completion:
    return run(PLAIN, parts(family).runtime, prompt(seed), Sampling())


def cases(names: list[str]) -> list[tuple[str, bool]]:
    return [(name, False) for name in names] + [(name, True) for name in names if name in WITH_A_MODEL]


@pytest.mark.parametrize(
    ("name", "with_model", "family"),
    [
        (*case, family)
        for case, (_, families) in zip(
            cases(LOSSLESS), taken_in_turns([name for name, _ in cases(LOSSLESS)], FAMILIES, 2), strict=True
        )
        for family in families
    ],
)
def test_greedy_output_equals_plain_decoding(name: str, with_model: bool, family: str) -> None:
    """On torch's passes; `test_exact` runs the methods with more families on the native kernels."""
    own = parts(family, with_model)
    method = build(name, own)
    assert method.name == name and not method.lossy
    for seed in range(2):
        done, plain = run(method, own.runtime, prompt(seed), Sampling()), plainly(family, seed)
        assert done.token_ids == plain.token_ids and not done.lossy
        # a pass of the target gives a token at least; of a repetition penalty nothing is asked here
        assert done.target_passes <= plain.target_passes


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(repetition_penalty=1.5),
        Sampling(presence_penalty=1.0, frequency_penalty=0.7, logit_bias=((5, 1.5), (7, -100.0))),
    ],
    ids=["repetition", "presence, frequency and bias"],
)
@pytest.mark.parametrize("name", LOSSLESS)
def test_penalties_and_biases_apply_to_drafts(name: str, sampling: Sampling) -> None:
    own = parts("llama", False, quick_runtime)
    done, plain = (run(m, own.runtime, prompt(4), sampling) for m in (build(name, own), PLAIN))
    assert done.token_ids == plain.token_ids != run(PLAIN, own.runtime, prompt(4), Sampling()).token_ids


@cache
def exact(
    runtime: Runtime, ids: tuple[int, ...], sampling: Sampling, length: int, grammar: Grammar | None
) -> dict[tuple[int, ...], float]:
    """Return the probability of every continuation of that length."""
    rule = rule_of(sampling, len(ids), grammar)
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        grown = {}
        for path, weight in found.items():
            text = [*ids, *path]
            logits = runtime.forward(Rows(text, 0), runtime.new_buffer(len(text)))[-1]
            probs = rule.probs(rule.scores(text, logits))
            grown |= {(*path, int(t)): weight * float(probs[t]) for t in probs.nonzero()[:, 0]}
        found = grown
    return found


@pytest.mark.parametrize("name", ["plain", "swift", "adaptive"])
def test_noise_is_kept_only_if_it_is_read_again(name: str) -> None:
    """A row of noise is as wide as the vocabulary, and every request has its own."""
    own, ids = parts("llama", False, quick_runtime), prompt(1)
    rule = rule_of(WARM, len(ids))

    def check(event: WorkEvent) -> None:
        assert isinstance(event, Prefilled | Round)
        assert all(position >= len(event.context.token_ids) for position in rule._noises)

    done = alone(subscribed(decoding(own.runtime, ids, build(name, own), rule, Ending(90)), check))
    assert done.token_ids == run(PLAIN, own.runtime, ids, WARM, 90).token_ids


@cache
def drawn_plainly(sampling: Sampling, grammar: Grammar | None) -> Completion:
    return run(PLAIN, parts("llama", False, quick_runtime).runtime, prompt(1), sampling, N_NEW, grammar)


TOP_3 = Sampling(temperature=1.3, top_k=3)
MIN_P = Sampling(
    temperature=2.0, min_p=0.4, presence_penalty=1.5, frequency_penalty=0.5, logit_bias=((5, 4.0), (7, 4.0), (9, 3.5))
)


LETTERS = Grammar.regex("[ab][cd][a-e]*")


FURTHER = [(name, False, *changed) for name in LOSSLESS for changed in ((MIN_P, None), (WARM, LETTERS))]
CHANGED = ("plain", "swift", "adaptive", "spd")  # Tested with a changed distribution by default.


@pytest.mark.parametrize(
    ("name", "with_model", "sampling", "grammar"),
    [
        *((*case, TOP_3, None) for case in cases(LOSSLESS)),
        *(pytest.param(*row, marks=() if row[0] in CHANGED else pytest.mark.families) for row in FURTHER),
    ],
)
def test_sampled_output_has_the_target_distribution(
    name: str, with_model: bool, sampling: Sampling, grammar: Grammar | None
) -> None:
    """Tested for plain decoding and for methods that draw their drafts, with 300 seeded requests of 3 tokens:
    chi-square over the merged outcomes is below the 1 - 1e-5 quantile. Methods that walk the target's draws give plain
    decoding's tokens for each seed.

    The seeds are fixed, so results repeat; of 40 correct implementations one fails by chance in 2,500 choices.
    """
    own, ids, length = parts("llama", with_model, quick_runtime), prompt(1), 3
    method, n = build(name, own), 300
    if isinstance(method.verifier, TargetWalk) and name != "plain":
        for seed in range(4):
            seeded = replace(sampling, seed=seed)
            done = run(method, own.runtime, ids, seeded, N_NEW, grammar)
            assert done.token_ids == drawn_plainly(seeded, grammar).token_ids
        return
    expected = exact(own.runtime, tuple(ids), sampling, length, grammar)
    counts: dict[tuple[int, ...], int] = {}
    rules = [rule_of(replace(sampling, seed=seed), len(ids), grammar) for seed in range(n)]
    works = (decoding(own.runtime, ids, method, rule, Ending(length)) for rule in rules)
    for done in results_of(works, at_once=50):  # one by one, what is around the passes takes longer
        counts[done.token_ids] = counts.get(done.token_ids, 0) + 1
    assert set(counts) <= set(expected)
    merged: list[list[float]] = [[0.0, 0.0]]
    for path, probability in sorted(expected.items(), key=lambda item: item[1]):
        if merged[-1][0] >= 8:  # expected counts of a bin
            merged.append([0.0, 0.0])
        merged[-1][0] += n * probability
        merged[-1][1] += counts.get(path, 0)
    chi_square = sum((seen - wanted) ** 2 / wanted for wanted, seen in merged)
    degrees = len(merged) - 1
    # Wilson-Hilferty: the normal quantile of 1 - 1e-5 is 4.265
    bound = degrees * (1 - 2 / (9 * degrees) + 4.265 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert degrees >= 5 and chi_square < bound


@pytest.mark.parametrize(("name", "with_model"), cases(LOSSY))
def test_lossy_methods_are_marked(name: str, with_model: bool) -> None:
    own = parts("llama", with_model, quick_runtime)
    method = build(name, own)
    done = run(method, own.runtime, prompt(2), Sampling())
    assert method.lossy and done.lossy and done.n_tokens == N_NEW


@pytest.mark.parametrize("name", METHODS)
def test_completions_have_exactly_the_requested_length(name: str) -> None:
    own = parts("llama", False, quick_runtime)
    method = build(name, own)
    for n_new, seed in itertools.product((1, 2, 3, 7), (0, 1)):
        sampling = Sampling(temperature=0.8 * seed, seed=seed)
        assert run(method, own.runtime, prompt(seed), sampling, n_new).n_tokens == n_new


@pytest.mark.parametrize("name", METHODS)
def test_stop_token_ends_the_text_of_every_method(name: str) -> None:
    own = parts("llama", False, quick_runtime)
    stop = run(PLAIN, own.runtime, prompt(0), Sampling()).token_ids[4]
    done = decode(
        own.runtime, prompt(0), build(name, own), TokenRule.of(Sampling(), None), Ending(N_NEW, frozenset({stop}))
    )
    assert stop not in done.token_ids[:-1] and (done.finish_reason == "stop") == (done.token_ids[-1] == stop)
    if name in LOSSLESS:
        assert done.finish_reason == "stop"


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, seed=4)], ids=["greedy", "sampled"])
def test_stop_tokens_have_no_effect_before_the_minimum_length(name: str, sampling: Sampling) -> None:
    own, ids, least = parts("llama", False, quick_runtime), prompt(0), 9
    stops = sorted(set(run(PLAIN, own.runtime, ids, sampling).token_ids[:6]))

    def under_constraint(method: Method) -> Completion:
        constraint = MinNewTokensLengthLogitsProcessor(len(ids), least, stops, "cpu")
        rule = TokenRule.of(sampling, None, len(ids), [constraint])
        return decode(own.runtime, ids, method, rule, Ending(N_NEW, frozenset(stops), min_new_tokens=least))

    done = under_constraint(build(name, own))
    assert done.n_tokens > least
    if name in LOSSLESS:
        assert not set(done.token_ids[:least]) & set(stops)
    if name in LOSSLESS and (sampling.greedy or isinstance(build(name, own).verifier, TargetWalk)):
        assert done.token_ids == under_constraint(PLAIN).token_ids


def test_method_without_its_parts_names_the_command_that_makes_them() -> None:
    bare = Resources(parts().runtime)
    for name, words in (("adadecode", "heads train"), ("adaspeed-probe", "probe train"), ("swift", "tune first")):
        with pytest.raises(SettingsError, match=words):
            build(name, bare)


MOST = {
    "jacobi": {"window": 256},
    "lookahead": {"ngram": 16, "window": 256, "guesses": 256},
    **{name: {"sequences": 256, "draft_length": 32} for name in ("spectr", "specinfer", "mcss")},
    **{name: {"beam_width": 256, "draft_length": 32} for name in ("mtad", "mtjd")},
}


@pytest.mark.parametrize("name", MOST)
def test_settings_that_make_a_pass_too_wide_are_refused(name: str) -> None:
    own, info = parts("llama", False, quick_runtime), METHODS[name]
    for key, most in MOST[name].items():
        with pytest.raises(SettingsError, match=f"{key} {most + 1} is out of range: use a number from [12] to {most}"):
            info.settings(**{key: most + 1})
    method = build(name, own, info.settings(**MOST[name]))
    assert run(method, own.runtime, prompt(1), Sampling(), 4).n_tokens == 4


def test_a_draft_model_with_other_tokens_is_refused() -> None:
    class Words:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    own = parts()
    draft = tiny_runtime("llama", seed=1)
    draft.tokenizer = Words()
    with pytest.raises(InvalidInput, match="other tokens than the target's"):
        build("spd", Resources(own.runtime, draft_runtime=draft))


@pytest.mark.parametrize("name", WITH_A_MODEL)
def test_a_draft_model_with_a_shorter_context_drafts_while_it_can(name: str) -> None:
    own, draft = parts(), tiny_runtime("llama", seed=1)
    draft.max_positions = 30
    method = build(name, Resources(own.runtime, draft_runtime=draft))
    done, plain = (run(m, own.runtime, prompt(5), Sampling(), 40) for m in (method, PLAIN))
    assert done.n_tokens == 40 and (done.token_ids == plain.token_ids or method.lossy)
    whole = [*prompt(6), *([5] * 230)]  # the target's own context is 256, and used up to its end
    assert run(build(name, parts("llama", True)), own.runtime, whole, Sampling(), 256 - len(whole)).n_tokens == 8


@pytest.mark.parametrize("name", WITH_A_MODEL)
def test_tokens_beyond_the_draft_models_vocabulary_are_harmless(name: str) -> None:
    """Heads of one family are padded to different widths; here the prompt contains such a token."""
    own, sampling = parts(), Sampling(temperature=5.0, seed=1)
    method = build(name, Resources(own.runtime, draft_runtime=narrow_model()))
    assert run(method, own.runtime, [*prompt(5), VOCAB - 1], sampling, 60).n_tokens == 60


def narrow_model() -> Runtime:
    """Return a draft model whose head and embedding lack seven tokens."""
    model = copy.deepcopy(tiny_model("llama", seed=1))  # resizing changes the config, which is shared
    model.resize_token_embeddings(VOCAB - 7, mean_resizing=False)
    return Runtime(model, None, ModelInfo("narrow", "llama", 4, 1))


class _Guessing(Drafter):
    """Lets its model check a token without a row, as suggested by text."""

    def __init__(self, model: DraftModel) -> None:
        self.model, self.max_depth = model, 2

    def draft(self, room: int) -> PassGenerator[Draft]:
        assert self.model is not None
        self.model.restart()
        root = self.context.token_ids[-1]
        logits = yield from self.model.extend([root, VOCAB - 1], (-1, 0))
        return Draft(DraftTree.chain([root, VOCAB - 1, int(logits[1].argmax())][: 1 + room]))


def test_text_may_suggest_tokens_beyond_the_draft_models_vocabulary() -> None:
    runtime, method = parts().runtime, Method("guessing", _Guessing(OtherModel(narrow_model())))
    done, plain = (run(each, runtime, prompt(5), Sampling(), 12) for each in (method, PLAIN))
    assert done.token_ids == plain.token_ids and done.drafted > 10


@pytest.mark.parametrize("name", ["plain", "layerskip", "mcss"])
def test_a_tiny_temperature_is_greedy(name: str) -> None:
    own = parts()
    cold = run(build(name, own), own.runtime, prompt(7), Sampling(temperature=1e-40))
    assert cold.token_ids == run(PLAIN, own.runtime, prompt(7), Sampling()).token_ids


def test_a_layer_set_of_another_depth_is_refused() -> None:
    with pytest.raises(LayerSetError, match="is for 6 layers"):
        build("self-sd", Resources(parts().runtime, LayerSet(6, frozenset({1}))))
