"""transformers users change one argument, and get the same tokens."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from families import CONFIGS, VOCAB, tiny_model
from transformers import LogitsProcessor, LogitsProcessorList

import swiftopt
from swiftopt.core.errors import InvalidInput, SettingsError
from swiftopt.decoding import session
from swiftopt.models import quantised

LAYERS = swiftopt.LayerSet(4, frozenset({1}), frozenset({1, 2}))
SETTINGS = swiftopt.SwiftSettings(early_stop=False, max_draft_length=4)


def prompt(length: int = 9) -> torch.Tensor:
    return torch.arange(2, 2 + length)[None] * 7 % VOCAB


def both(model: Any, inputs: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    options = {"attention_mask": torch.ones_like(inputs), "max_new_tokens": 30, **options}
    plain = model.generate(inputs, **options)
    ours = model.generate(
        inputs, custom_generate=swiftopt.custom_generate, layer_set=LAYERS, swift_settings=SETTINGS, **options
    )
    return plain, ours


@pytest.mark.parametrize("family", CONFIGS)
def test_custom_generate_equals_generate(family: str) -> None:
    plain, ours = both(tiny_model(family), prompt(), do_sample=False)
    assert plain.tolist() == ours.tolist()


class NoRepeat(LogitsProcessor):
    """Forbids the two latest tokens: depends on the ids, so it must see each tree row's own."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return scores.index_fill(1, input_ids[0, -2:], float("-inf"))  # type: ignore[return-value]


def test_logits_processors_apply_per_tree_row() -> None:
    model = tiny_model("llama")
    plain, ours = both(model, prompt(), do_sample=False, logits_processor=LogitsProcessorList([NoRepeat()]))
    unprocessed, _ = both(model, prompt(), do_sample=False)
    assert plain.tolist() == ours.tolist() != unprocessed.tolist()


def test_stop_token_inside_an_accepted_block_ends_the_text() -> None:
    model = tiny_model("qwen2")
    full, _ = both(model, prompt(), do_sample=False)
    stop = int(full[0, 9 + 17])
    plain, ours = both(model, prompt(), do_sample=False, eos_token_id=stop)
    assert plain.tolist() == ours.tolist() and ours.shape[1] <= 9 + 18


def test_tokens_are_streamed_by_callback() -> None:
    seen: list[int] = []
    inputs = prompt()
    ours = tiny_model("llama").generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=20,
        do_sample=False,
        custom_generate=swiftopt.custom_generate,
        layer_set=LAYERS,
        on_tokens=seen.extend,
        return_dict_in_generate=True,
    )
    assert ours.sequences[0, 9:].tolist() == seen


@pytest.mark.parametrize("min_p", [0.0, 0.3])
def test_sampling_preserves_the_target_distribution(min_p: float) -> None:
    """The whole pipeline at temperature 1.3 with top-k, and min-p: 300 seeded samples against exact probabilities.

    Two tokens each; chi-square over their joint, bins below 5 expected counts merged; the bound is the 1 - 1e-4
    quantile, so a correct sampler fails one seed in 10,000, and the seeds are fixed.
    """
    from scipy.stats import chi2

    model = tiny_model("llama", seed=3)
    inputs = prompt(5)
    warp = {"do_sample": True, "temperature": 1.3, "top_k": 5, "min_p": min_p or None}

    def next_probs(ids: torch.Tensor) -> torch.Tensor:
        scores = model(ids).logits[0, -1] / 1.3
        scores[scores < scores.topk(5).values[-1]] = float("-inf")
        probs = torch.softmax(scores, dim=-1)
        probs[probs < min_p * probs.max()] = 0.0
        return probs / probs.sum()

    expected: dict[tuple[int, int], float] = {}
    first = next_probs(inputs)
    for a in first.nonzero().flatten().tolist():
        second = next_probs(torch.cat((inputs, torch.tensor([[a]])), dim=1))
        for b in second.nonzero().flatten().tolist():
            expected[(a, b)] = float(first[a] * second[b])
    n = 300
    counts = dict.fromkeys(expected, 0)
    for seed in range(n):
        torch.manual_seed(seed)
        out = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=3,
            custom_generate=swiftopt.custom_generate,
            layer_set=LAYERS,
            swift_settings=SETTINGS,
            **warp,
        )
        counts[(int(out[0, 5]), int(out[0, 6]))] += 1
    large = [pair for pair, share in expected.items() if n * share >= 5]
    rest = n * (1 - sum(expected[pair] for pair in large))
    statistic = sum((counts[p] - n * expected[p]) ** 2 / (n * expected[p]) for p in large)
    seen_rest = n - sum(counts[p] for p in large)
    statistic += (seen_rest - rest) ** 2 / rest if rest > 1e-9 else 0.0
    assert statistic < chi2.ppf(1 - 1e-4, df=len(large))


def test_what_cannot_be_decoded_is_refused_in_a_sentence() -> None:
    model = tiny_model("llama")
    batch = torch.cat((prompt(), prompt()))
    with pytest.raises(SettingsError, match="batch of 2"):
        both(model, batch, do_sample=False)
    with pytest.raises(SettingsError, match="needs layer_set="):
        model.generate(prompt(), max_new_tokens=4, custom_generate=swiftopt.custom_generate)
    padded = torch.ones_like(prompt())
    padded[0, 0] = 0
    with pytest.raises(InvalidInput, match="padding"):
        both(model, prompt(), do_sample=False, attention_mask=padded)


@pytest.mark.usefixtures("rough_costs")
def test_set_tuned_for_adaptive_drafts_is_drafted_with_adaptively_and_its_copies_are_made_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, inputs = tiny_model("llama"), prompt()
    tuned = swiftopt.SwiftSettings(method="adaptive", draft_format="int8").to_json()
    record = swiftopt.LayerSetRecord("tiny", "t", LAYERS.filled("int8"), settings=tuned)
    options: Any = {"attention_mask": torch.ones_like(inputs), "max_new_tokens": 30, "do_sample": False}
    plain = model.generate(inputs, **options)
    made: list[str] = []
    build = quantised.QuantisedLinear.__init__
    monkeypatch.setattr(quantised.QuantisedLinear, "__init__", lambda *args: (made.append(args[2]), build(*args))[1])

    def ours() -> Any:
        return model.generate(inputs, custom_generate=swiftopt.custom_generate, layer_set=record, **options)

    assert ours().tolist() == plain.tolist()
    n_made = len(made)
    assert set(made) == {"int8"}
    assert ours().tolist() == plain.tolist() and len(made) == n_made
    torch.manual_seed(5)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))  # only drafts are stale
    assert ours().tolist() == model.generate(inputs, **options).tolist() != plain.tolist()


def test_calls_on_one_model_share_a_runtime_until_its_weights_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU graphs are captured, and timed against none, when a runtime is made: seconds."""
    made: list[Any] = []
    monkeypatch.setattr(session, "at_speed", lambda runtime, *args, **options: made.append(weakref.ref(runtime)))
    model, inputs = tiny_model("llama"), prompt()

    def check(n_made: int) -> None:
        plain, ours = both(model, inputs, do_sample=False)
        assert plain.tolist() == ours.tolist() and len(made) == n_made

    check(1)
    check(1)
    model.model.layers[1].mlp.down_proj.weight.mul_(0.5)  # in place, as training does
    check(1)
    model.model.layers[1].mlp = tiny_model("llama", seed=3).model.layers[1].mlp
    check(2)
    model.model.layers[2].mlp.register_forward_hook(lambda *_: None)
    check(3)
    model.to(torch.float32)
    check(4)
    assert [one() is None for one in made] == [True, True, True, False]
    model = copy.deepcopy(model)
    check(5)
    assert made[3]() is None, "the first model is gone, and nothing else holds its runtime"
