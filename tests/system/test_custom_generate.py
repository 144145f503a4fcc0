"""`custom_generate` for users of transformers: one argument changes, and the tokens stay the same."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import letter_tokenizer
from families import VOCAB, tiny_model, variants
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

import swiftopt
from swiftopt.core.errors import InvalidInput, SettingsError
from swiftopt.decoding import transformers_hook
from swiftopt.decoding.generate_options import MODES, OBEYED, REFUSED, WITHOUT_EFFECT
from swiftopt.models import quantised

LAYERS = swiftopt.LayerSet(4, frozenset({1}), frozenset({1, 2}))
SETTINGS = swiftopt.SwiftSettings(early_stop=False, max_draft_length=4)


def prompt(length: int = 9) -> torch.Tensor:
    return torch.arange(2, 2 + length)[None] * 7 % VOCAB


OURS = {"custom_generate": swiftopt.custom_generate, "layer_set": LAYERS, "swift_settings": SETTINGS}


def both(
    model: Any, inputs: torch.Tensor, make: Callable[[], dict[str, Any]] = dict, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of transformers and of swiftopt; `make` returns new options for each, as they keep a state."""
    options = {"attention_mask": torch.ones_like(inputs), "max_new_tokens": 30, **options}
    plain = model.generate(inputs, **options, **make())
    return plain, model.generate(inputs, **options, **make(), **OURS)


@pytest.mark.parametrize("family", variants())
def test_custom_generate_equals_generate(family: str) -> None:
    plain, ours = both(tiny_model(family), prompt(), do_sample=False)
    assert plain.tolist() == ours.tolist()


class NoRepeat(LogitsProcessor):
    """Forbids the two latest tokens, so it must get the ids of each row of a tree."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return scores.index_fill(1, input_ids[0, -2:], float("-inf"))  # type: ignore[return-value]


def test_logits_processors_apply_per_tree_row() -> None:
    model = tiny_model("llama")
    plain, ours = both(model, prompt(), do_sample=False, logits_processor=LogitsProcessorList([NoRepeat()]))
    unprocessed, _ = both(model, prompt(), do_sample=False)
    assert plain.tolist() == ours.tolist() != unprocessed.tolist()


class Rotating(LogitsProcessor):
    """Forbids, in place, 40 tokens that depend on the number of calls, and records the lengths of its inputs."""

    def __init__(self, lengths: list[int] | None = None) -> None:
        self.lengths = [] if lengths is None else lengths

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.lengths.append(input_ids.shape[1])
        scores[:, (len(self.lengths) * 13 + torch.arange(40)) % VOCAB] = float("-inf")
        return scores


SYNTHID = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[654, 400, 836], context_history_size=16)


@pytest.mark.parametrize(
    "options",
    [
        {"guidance_scale": 1.5},
        {"guidance_scale": 3.0, "repetition_penalty": 1.3},
        {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[5, 6, 7]])},
        {"guidance_scale": 1.5, "use_cache": False},
        {"prefix_allowed_tokens_fn": lambda _, ids: [(int(ids[-1]) * k + 3) % VOCAB for k in range(1, 30)]},
        {"watermarking_config": WatermarkingConfig(bias=4.0)},
        {"watermarking_config": SYNTHID},
        {"logits_processor": LogitsProcessorList([Rotating()])},
    ],
)
def test_ids_equal_generates_if_a_processor_depends_on_its_calls(options: dict[str, Any]) -> None:
    model = tiny_model("llama")
    plain, ours = both(model, prompt(), lambda: copy.deepcopy(options), do_sample=False)
    assert plain.tolist() == ours.tolist() != both(model, prompt(), do_sample=False)[0].tolist()


def test_a_callers_processor_sees_each_token_once_and_in_order() -> None:
    lengths: list[int] = []
    processors = LogitsProcessorList([Rotating(lengths)])
    model = tiny_model("llama")
    out = model.generate(
        prompt(), max_new_tokens=20, do_sample=False, logits_processor=processors, return_dict_in_generate=True, **OURS
    )
    assert lengths[:20] == list(range(9, 29)) and out.drafted > 0


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


@pytest.mark.parametrize("min_p", [pytest.param(0.0, marks=pytest.mark.families), 0.3])
def test_sampling_preserves_the_target_distribution(min_p: float) -> None:
    """300 seeded samples of two tokens at temperature 1.3, with top-k and with min-p, fit the exact probabilities.

    Chi-square over the pairs of tokens, with bins below 5 expected counts merged. The bound is the 1 - 1e-4 quantile,
    so a correct sampler fails one seed in 10,000; the seeds are fixed.
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


def test_stop_strings_use_the_tokenizer_given_to_generate() -> None:
    model, tokenizer = tiny_model("llama"), letter_tokenizer()
    full = model.generate(prompt(), max_new_tokens=30, do_sample=False)[0, 9:]
    stop = tokenizer.decode(full[10:12])
    at = {"stop_strings": [stop], "tokenizer": tokenizer}
    plain, ours = both(model, prompt(), do_sample=False, **at)
    assert plain.tolist() == ours.tolist() and ours.shape[1] <= 9 + 12
    function = partial(swiftopt.custom_generate, layer_set=LAYERS)
    again = model.generate(prompt(), max_new_tokens=30, do_sample=False, custom_generate=function, **at)
    assert again.tolist() == ours.tolist()


def test_streamer_gets_each_token_and_the_end() -> None:
    class Streamer(list[Any]):
        def put(self, token_ids: torch.Tensor) -> None:
            self.extend(token_ids.flatten().tolist())

        def end(self) -> None:
            self.append("end")

    streamers = Streamer(), Streamer()
    made = iter(streamers)
    plain, _ = both(tiny_model("llama"), prompt(), lambda: {"streamer": next(made)}, do_sample=False)
    assert streamers[0] == streamers[1] == [*plain[0].tolist(), "end"]


def test_scores_and_logits_equal_those_of_generate() -> None:
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    model = tiny_model("llama")
    plain, ours = both(model, prompt(), do_sample=False, repetition_penalty=1.3, **wanted)
    pairs: Any = ((plain, ours), (ours, plain))
    for kind in ("scores", "logits"):
        (expected, found), _ = ([getattr(each, kind) for each in pair] for pair in pairs)
        assert len(found) == 30
        torch.testing.assert_close(torch.cat(found), torch.cat(expected))
    assert not torch.equal(ours.scores[0], ours.logits[0])  # type: ignore[attr-defined]


class Unsure(StoppingCriteria):
    """Ends a text at its fifth unlikely token, by the given scores."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        self.n += float(scores[-1].softmax(dim=-1)[0, input_ids[0, -1]]) < 0.9
        return torch.full((1,), self.n >= 5)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("make", "at_least", "less_than"), [(Unsure, 5, 30), (lambda: MaxLengthCriteria(9 + 45), 45, 46)]
)
def test_callers_stopping_criteria_end_the_text_as_in_generate(
    make: Callable[[], StoppingCriteria], at_least: int, less_than: int
) -> None:
    wanted = {"return_dict_in_generate": True, "output_scores": True}
    plain, ours = both(
        tiny_model("llama"),
        prompt(),
        lambda: {"stopping_criteria": StoppingCriteriaList([make()])},
        do_sample=False,
        **wanted,
    )
    texts: Any = (plain, ours)
    assert texts[0].sequences.tolist() == texts[1].sequences.tolist()
    assert at_least <= texts[1].sequences.shape[1] - 9 < less_than


def test_manual_states_what_each_field_of_a_generation_config_does() -> None:
    kinds = [OBEYED, WITHOUT_EFFECT, MODES, frozenset(name for name in REFUSED if "=" not in name)]
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields <= frozenset().union(*kinds)
    assert sum(map(len, kinds)) == len(frozenset().union(*kinds))
    manual = (Path(swiftopt.__file__).parent / "docs" / "python.md").read_text(encoding="utf-8")
    assert [name for name in sorted(frozenset().union(*kinds)) if f"`{name}`" not in manual] == []


EMBEDDED = torch.zeros((1, 3, 32), dtype=torch.float64)
PADDED = torch.tensor([[0] + [1] * 8])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"inputs": torch.cat((prompt(), prompt()))}, "not a batch of 2: call generate once per prompt"),
        ({"inputs": torch.zeros((1, 0), dtype=torch.long)}, "has no tokens: pass input_ids"),
        ({"inputs": None, "inputs_embeds": EMBEDDED}, "not inputs_embeds: pass input_ids"),
        ({"attention_mask": PADDED}, "has padding"),
        ({"attention_mask": None, "pad_token_id": int(prompt()[0, 0])}, "has padding"),
        ({"position_ids": torch.arange(3, 12)[None]}, "remove position_ids"),
        ({"past_key_values": DynamicCache()}, "remove past_key_values"),
        ({"labels": prompt()}, "does not take labels"),
        ({"layer_set": None}, "needs layer_set="),
        ({"num_beams": 2}, "not by beam search: leave num_beams out"),
        ({"penalty_alpha": 0.6}, "not by contrastive search: leave penalty_alpha out"),
        ({"dola_layers": "high"}, "not by dola generation: leave dola_layers out"),
        ({"prompt_lookup_num_tokens": 3}, "leave prompt_lookup_num_tokens out"),
        ({"assistant_model": tiny_model("llama", seed=2)}, "leave assistant_model out"),
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences 2, because one sequence is decoded"),
        ({"output_attentions": True}, "does not take output_attentions"),
        ({"output_hidden_states": True}, "does not take output_hidden_states"),
    ],
)
def test_unsupported_fields_are_refused_in_a_sentence(options: dict[str, Any], sentence: str) -> None:
    given = {"inputs": prompt(), "max_new_tokens": 4, "do_sample": False, **OURS, **options}
    with pytest.raises((SettingsError, InvalidInput), match=sentence):
        tiny_model("llama").generate(**given)


def test_unknown_field_of_a_newer_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    make = GenerationConfig.__init__

    def newer(self: Any, **options: Any) -> None:
        self.backwards = options.pop("backwards", None)
        make(self, **options)

    monkeypatch.setattr(GenerationConfig, "__init__", newer)
    with pytest.raises(SettingsError, match="does not support backwards"):
        tiny_model("llama").generate(prompt(), max_new_tokens=4, backwards=True, **OURS)


def test_model_in_training_mode_is_refused_if_it_has_dropout() -> None:
    with pytest.raises(SettingsError, match=r"transformer\.drop drops values at random.*call model\.eval"):
        both(tiny_model("gpt2").train(), prompt(), do_sample=False)
    plain, ours = both(tiny_model("llama").train(), prompt(), do_sample=False)
    assert plain.tolist() == ours.tolist()


@pytest.mark.usefixtures("rough_costs")
def test_set_tuned_for_adaptive_drafting_drafts_adaptively_with_one_copy(
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


def test_calls_on_one_model_share_a_runtime_until_its_weights_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making a runtime on a GPU takes seconds, because graphs are captured and timed."""
    made: list[Any] = []
    monkeypatch.setattr(
        transformers_hook, "at_speed", lambda runtime, *args, **options: made.append(weakref.ref(runtime))
    )
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
