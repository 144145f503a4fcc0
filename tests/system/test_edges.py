"""Edge cases: shortest and longest texts, smallest models, ends within characters, and interrupted runs."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from fakes import flat_costs, worded_runtime
from families import CONFIGS, VOCAB, tiny_model, tiny_runtime
from tiny_files import save
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from swiftopt.bench.decode import run_methods
from swiftopt.core.costs import CostProfile
from swiftopt.core.errors import ContextOverflow, InvalidInput, OutputError, SettingsError, UnsupportedModel
from swiftopt.core.events import Event, PhaseChanged, PromptFinished, SkipRatioLowered, TaskFinished, TrialsDone
from swiftopt.core.layer_sets import LayerSet, n_skipped_for
from swiftopt.core.records import ModelInfo
from swiftopt.core.requests import GenerateRequest, TuneRequest
from swiftopt.core.settings import SwiftSettings
from swiftopt.core.types import Prompt, Sampling
from swiftopt.decoding.context import Context, Ending, TokenRule
from swiftopt.decoding.engine import alone, side_by_side
from swiftopt.decoding.events import Generated, Turn
from swiftopt.decoding.loop import decode
from swiftopt.decoding.methods import PLAIN, swift
from swiftopt.decoding.session import Session
from swiftopt.models import costs
from swiftopt.models.buffer import KVBuffer
from swiftopt.models.costs import measure_costs
from swiftopt.models.rows import Pass
from swiftopt.models.runtime import PREFILL_ROWS, Runtime
from swiftopt.optimizer.evaluation import score_window
from swiftopt.optimizer.tuning import Tuner
from swiftopt.optimizer.verdict import Timed, judge
from swiftopt.store import Store
from swiftopt.tasks.generate import GrowingText, generate
from swiftopt.tasks.tune import run_tuning

WIDE = SwiftSettings(early_stop=False, max_draft_length=25, branching=((1.0, 10),))
SMALL: dict[str, Any] = dict(context_window=8, strategy="random", stop_threshold=0.05, max_draft_length=4)
DEAR = dataclasses.replace(flat_costs(), pass_s={n: float(n) for n in (1, 2, 4, 8, 16, 32, 64)})  # batches of one


def runtime_of(config: PreTrainedConfig) -> Runtime:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval().requires_grad_(False)
    return Runtime(model, None, ModelInfo("tiny", "tiny", config.num_hidden_layers, 1))


def changed(family: str, **changes: Any) -> PreTrainedConfig:
    return type(CONFIGS[family])(**{**CONFIGS[family].to_dict(), **changes})


def words(*token_ids: int) -> str:
    return " ".join(f"w{i}" for i in token_ids)


def stream(n: int, task: str = "t") -> list[Prompt]:
    return [Prompt(f"{task}{i}", task, text=words(2 + i, 40 + i, 7)) for i in range(n)]


def tuned(prompts: list[Prompt], costs: CostProfile | None = None, **settings: Any) -> tuple[TaskFinished, list[Event]]:
    """Return the result of the stream's only task, and all events."""
    values = SwiftSettings(**{**SMALL, **settings})
    events = list(Tuner(Session(worded_runtime(), Sampling(), 24), values, costs or flat_costs(), "tiny").run(prompts))
    (result,) = (event for event in events if isinstance(event, TaskFinished))
    return result, events


@pytest.mark.parametrize(
    ("family", "changes", "n_prompt", "n_new"),
    [
        ("gpt2", {"n_positions": 48}, 8, 40),
        ("gpt2", {"n_positions": 48}, 47, 1),
        ("llama", {"max_position_embeddings": 48}, 1, 47),
        ("mistral-window", {"max_position_embeddings": 1200}, PREFILL_ROWS, 12),
        ("mistral-window", {"max_position_embeddings": 1200}, 2 * PREFILL_ROWS + 1, 12),
        ("llama", {"num_hidden_layers": 1}, 1, 12),
        ("llama", {"num_hidden_layers": 2}, 2, 12),
        ("llama", {"num_hidden_layers": 3}, 2, 12),
    ],
)
def test_wide_trees_change_nothing_at_the_edges(
    family: str, changes: dict[str, Any], n_prompt: int, n_new: int
) -> None:
    """Prompt and completion fill the context, or span several prefill passes, or the model is tiny."""
    runtime = runtime_of(changed(family, **changes))
    ids = [(7 * i + 3) % (VOCAB - 2) + 2 for i in range(n_prompt)]
    inputs = torch.tensor([ids])
    model: Any = runtime.hf_model
    expected = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=n_new, do_sample=False)[
        0, n_prompt:
    ].tolist()
    drafter = swift(LayerSet.uniform(runtime.n_layers, max(0, runtime.n_layers - 2)), WIDE)
    done = decode(runtime, ids, drafter, TokenRule.of(Sampling(), None), Ending(n_new))
    assert list(done.token_ids) == expected


@pytest.mark.parametrize("n_positions", [24, 40, 100])
def test_costs_are_measured_within_the_context(n_positions: int) -> None:
    profile = measure_costs(runtime_of(changed("gpt2", n_positions=n_positions)), 256)
    assert profile.target_pass_s(64) > 0 and max(profile.pass_s) <= n_positions


@pytest.mark.parametrize(("per_row", "widest"), [(0.0, 512), (0.001, 512), (1.0, 128)])
def test_wider_passes_are_measured_while_more_rows_make_each_cheaper(
    per_row: float, widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Run(SimpleNamespace):
        def __call__(self) -> None:
            self.pass_()

    made = costs._pass

    def pass_of(*args: Any, **more: Any) -> Run:
        return Run(pass_=made(*args, **more), n_rows=args[3])

    monkeypatch.setattr(costs, "_pass", pass_of)
    monkeypatch.setattr(costs, "_seconds", lambda run: 1.0 + per_row * run.n_rows)
    monkeypatch.setattr(costs, "MOST_ROWS", 512)
    profile = measure_costs(runtime_of(changed("llama", max_position_embeddings=2048)), 256)
    assert max(profile.pass_s) == widest


NO_MEMORY = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    "error", [partial(torch.OutOfMemoryError, "CUDA out of memory"), partial(RuntimeError, NO_MEMORY)]
)
@pytest.mark.parametrize("what", ["pass", "buffer"])
def test_costs_are_measured_up_to_the_rows_that_fit_in_memory(
    what: str, error: Callable[[], Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers: list[weakref.ref[KVBuffer]] = []

    class Small(Runtime):
        def new_buffer(self, capacity: int, n_rows: int | None = None, lag: int = 0) -> KVBuffer:
            assert not any(ref() is not None for ref in buffers), "dropped before a larger one is made"
            if what == "buffer" and capacity > 256 + 256:
                raise error()
            buffer = super().new_buffer(capacity, n_rows, lag)
            buffers.append(weakref.ref(buffer))
            return buffer

        def forward_together(self, passes: Sequence[Pass]) -> list[Tensor]:
            if what == "pass" and len(passes[0].rows.token_ids) > 256:
                raise error()
            return super().forward_together(passes)

    monkeypatch.setattr(costs, "CHEAPER", 1e9)
    runtime = runtime_of(changed("llama", max_position_embeddings=2048))
    runtime.__class__ = Small
    assert max(measure_costs(runtime, 256).pass_s) == 256
    assert not any(ref() is not None for ref in buffers)


def test_costs_are_not_measured_if_passes_fail_for_another_reason() -> None:
    runtime = runtime_of(changed("llama", max_position_embeddings=2048))
    runtime.hf_model.get_input_embeddings().register_forward_pre_hook(fail_beyond(4))
    with pytest.raises(RuntimeError, match="an illegal instruction"):
        measure_costs(runtime, 256)


def fail_beyond(n_rows: int) -> Callable[[torch.nn.Module, tuple[Tensor, ...]], None]:
    def hook(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if len(inputs[0]) > n_rows:
            raise RuntimeError("CUDA error: an illegal instruction was encountered")

    return hook


def test_model_with_weights_outside_memory_is_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[2].to("meta")
    with pytest.raises(UnsupportedModel, match="meta"):
        Runtime(model, None, ModelInfo("tiny", "llama", 4, 1))


@pytest.mark.gpu
def test_rotations_are_on_the_layers_device_if_the_rotary_module_is_elsewhere() -> None:
    """accelerate dispatches a model in this way: the output of a module stays on the module's device."""
    model = tiny_model("llama")
    runtime = Runtime(model, None, ModelInfo("tiny", "llama", 4, 1))
    whole = decode(runtime, [3, 4, 5], PLAIN, TokenRule.of(Sampling(), None), Ending(20))
    for layer in model.model.layers[2:]:
        layer.to("cuda")
    add_hook_to_module(model.model.rotary_emb, AlignDevicesHook(execution_device="cpu"))
    split = Runtime(model, None, ModelInfo("tiny", "llama", 4, 1))
    again = decode(split, [3, 4, 5], PLAIN, TokenRule.of(Sampling(), None), Ending(20))
    assert again.token_ids == whole.token_ids


# where completions end


class ByteTokenizer:
    """A tokenizer with one token per byte of UTF-8, the fallback of byte-level vocabularies."""

    chat_template = None
    eos_token_id = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return bytes(token_ids).decode(errors="replace")


def test_stop_string_is_found_when_each_character_is_several_tokens() -> None:
    tokenizer = ByteTokenizer()
    stop = "結束標記在這裡出現了"
    ending = Ending(200, stop_strings=(stop,), to_text=tokenizer.decode)
    ids = tokenizer(f"well: {stop} and more")["input_ids"]
    kept, reason = ending.crop([], ids)
    assert reason == "stop_string" and bytes(kept).decode() == f"well: {stop}"


@pytest.mark.parametrize("least", [0, 4, 10, 24])
@pytest.mark.parametrize("at_once", [1, 3])
def test_streamed_text_is_the_completion_text_with_stop_strings(least: int, at_once: int) -> None:
    runtime = worded_runtime()
    prompt = Prompt("1", "t", text=words(5, 9, 11))
    full = next(iter(Session(runtime, Sampling(), 24).run(prompt, PLAIN)))[1].text
    halfway = full.split()[9]
    for stop in (halfway, f"{halfway} no such word"):
        session = Session(runtime, Sampling(), 24, [stop], min_new_tokens=least)
        completion = session.run(prompt, PLAIN)[0].completion
        free, text = " ".join(full.split()[:least]), GrowingText(session, prompt)
        shown = ""
        for start in range(0, completion.n_tokens, at_once):
            shown += text.add(completion.token_ids[start : start + at_once])
            assert stop not in shown[len(free) :]
        assert shown + "".join(added.text for added in text.finish_completion(completion)) == completion.text


def test_stop_string_has_an_effect_only_after_the_minimum_length() -> None:
    """A stop string that ends before the minimum stays; one that ends later is cut at its beginning."""
    ids = list(b"end of the end, and END")
    for least, kept in ((0, ""), (2, ""), (3, "end of the "), (13, "end of the "), (14, "end of the end, and END")):
        ending = Ending(200, stop_strings=("end",), to_text=ByteTokenizer().decode, min_new_tokens=least)
        found, reason = ending.crop([], ids)
        assert ending.text(found) == kept
        assert (reason == "stop_string") == (least < 14)
        one_by_one: list[int] = []
        while len(one_by_one) < len(found):
            block, _ = ending.crop(one_by_one, [ids[len(one_by_one)]])
            one_by_one += block
        assert one_by_one == found


def test_stop_tokens_of_a_request_are_added_to_the_models() -> None:
    runtime = worded_runtime()
    (prompt,) = stream(1)
    full = Session(runtime, Sampling(), 24).run(prompt, PLAIN)[0].completion.token_ids
    stop, own = full[5], next(token_id for token_id in full[6:] if token_id not in full[:6])
    runtime.hf_model.generation_config.eos_token_id = own  # type: ignore[union-attr]
    options: dict[str, Any] = {"stop_token_ids": [stop]}
    for ignore_eos in (False, True):
        session = Session(runtime, Sampling(), 24, ignore_eos=ignore_eos, **options)
        assert session.run(prompt, PLAIN)[0].completion.token_ids == full[: full.index(stop) + 1]
        again = Session(runtime, Sampling(), 24, ignore_eos=ignore_eos, min_new_tokens=24, **options)
        longest = again.run(prompt, PLAIN)[0].completion
        assert longest.n_tokens == 24 and stop not in longest.token_ids
        assert (own in longest.token_ids) <= ignore_eos
    assert Session(runtime, Sampling(), 24).run(prompt, PLAIN)[0].completion.finish_reason == "stop"


def test_unknown_stop_tokens_are_refused() -> None:
    for sampling, options in (
        (Sampling(logit_bias=((VOCAB, 1.0),)), {}),
        (Sampling(), {"stop_token_ids": [VOCAB]}),
        (Sampling(), {"stop_token_ids": [-1]}),
    ):
        with pytest.raises(SettingsError, match=f"this model has tokens 0 to {VOCAB - 1}"):
            Session(worded_runtime(), sampling, 8, **options)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="min_new_tokens -1"):
        Session(worded_runtime(), Sampling(), 8, min_new_tokens=-1)


def test_streamed_text_ends_with_an_incomplete_character_at_the_length_limit() -> None:
    runtime = worded_runtime()
    tokenizer: Any = ByteTokenizer()
    runtime.tokenizer = tokenizer
    half = tuple("né".encode()[:-1])
    completion = next(iter(Session(worded_runtime(), Sampling(), 3).run(stream(1)[0], PLAIN)))[1]
    completion = dataclasses.replace(completion, token_ids=half, text=tokenizer.decode(half))
    text = GrowingText(Session(runtime, Sampling(), 3), stream(1)[0])
    assert text.add(half) + "".join(added.text for added in text.finish_completion(completion)) == "n\ufffd"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(SettingsError, match="stop string"):
        Session(worded_runtime(), Sampling(), 8, ["", "x"])


# prompts that cannot be encoded


def test_a_prompt_without_a_tokenizer_is_refused_in_a_sentence() -> None:
    with pytest.raises(InvalidInput, match="has no tokenizer"):
        Session(tiny_runtime("llama"), Sampling(), 8).encode(stream(1)[0])


def chatting(tmp_path: Path, template: str, **changes: Any) -> Runtime:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(save(tmp_path / "chat"))
    tokenizer.chat_template = template
    runtime = runtime_of(changed("llama", **changes))
    runtime.tokenizer = tokenizer
    return runtime


def test_chat_that_the_template_refuses_is_an_error_with_its_id(tmp_path: Path) -> None:
    runtime = chatting(tmp_path, "{{ raise_exception('System role not supported') }}")
    prompt = Prompt("7", "t", messages=({"role": "system", "content": "w3"},))
    with pytest.raises(InvalidInput, match=r"'7'.*System role not supported"):
        Session(runtime, Sampling(), 8).encode(prompt)


TURNS = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def test_a_later_turn_beyond_the_context_is_named_after_the_finished_turns(tmp_path: Path) -> None:
    runtime = chatting(tmp_path, TURNS, max_position_embeddings=40)
    turns = Prompt("chat", "t", turns=(words(3, 4, 5), words(6, 7), words(8)))
    finished = []
    with pytest.raises(ContextOverflow, match="'chat#3'"):
        for event in side_by_side([Session(runtime, Sampling(), 15).request(turns, PLAIN)]):
            if isinstance(event, Turn):
                finished.append(event.prompt.id)
    assert finished == ["chat#1", "chat#2"]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_chat_beyond_the_context_ends_and_the_tuning_continues(
    tmp_path: Path, concurrency: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chat is tuned on or held out, in one run or resumed from any checkpoint."""
    monkeypatch.setattr("swiftopt.optimizer.verdict.is_open", lambda verdict: False)  # which the clock would decide
    runtime = chatting(tmp_path, TURNS, max_position_embeddings=40)
    prompts = [
        Prompt(f"{name}{i}", "t", turns=tuple(map(words, turns)))
        for i in range(2)
        for name, turns in (("short", [3 + i]), ("long", [3, 4 + i, 5, 6]), ("last", [7]))
    ]

    def tuner() -> Tuner:
        session = Session(runtime, Sampling(), 15)
        return Tuner(session, SwiftSettings(**SMALL), flat_costs(), "tiny", concurrency=concurrency)

    kept: list[tuple[int, str]] = []
    events: list[Event] = []
    for event in (first := tuner()).run(prompts):
        events.append(event)
        if isinstance(event, PromptFinished):
            kept.append((len(events), json.dumps(first.snapshot())))
    finished = [event.prompt.id for event in events if isinstance(event, PromptFinished)]
    fit = ["short0", "long0#1", "long0#2", "last0", "short1", "long1#1", "long1#2", "last1"]
    assert sorted(finished) == sorted(fit)
    reasons = [event.detail for event in events if isinstance(event, PhaseChanged) if "ends early" in event.detail]
    assert [f"'long{i}#3'" in reason for i, reason in enumerate(reasons)] == [True, True]
    (result,) = (event for event in events if isinstance(event, TaskFinished))
    assert (result.n_prompts, result.verdict.n_prompts, len(result.record.evidence)) == (4, 3, 4)
    for n, start in kept:
        tried = [trial for event in events[:n] if isinstance(event, TrialsDone) for trial in event.trials]
        later = list(tuner().run(prompts, json.loads(start), {"t": tried}))
        again = [event.prompt.id for event in [*events[:n], *later] if isinstance(event, PromptFinished)]
        assert sorted(again) == sorted(fit)


def test_chat_beyond_the_context_does_not_stop_later_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(chatting(tmp_path, TURNS, max_position_embeddings=40), Sampling(), 15)
    monkeypatch.setattr("swiftopt.tasks.generate.open_session", lambda *values: session)
    prompts = [Prompt("long", "t", turns=tuple(map(words, [3, 4, 5]))), Prompt("last", "t", turns=(words(7),))]
    request, finished = GenerateRequest("tiny", method="plain"), []
    with pytest.raises(ContextOverflow, match="'long#3'"):
        for event in generate(request, prompts, None):
            finished += [event.prompt.id] if isinstance(event, Generated) else []
    assert finished == ["long#1", "long#2", "last"]


# the search's bookkeeping


@pytest.mark.parametrize("max_steps", [0, 1, 2, 3])
def test_search_scores_no_more_candidates_than_max_steps(max_steps: int) -> None:
    result, _ = tuned(stream(4), max_steps=max_steps, target_matchness=1.0)
    assert len(result.trials) == max_steps


@pytest.mark.slow
def test_patience_counts_the_candidates_after_the_last_better_one() -> None:
    result, _ = tuned(stream(8), DEAR, patience=5, target_matchness=1.0, skip_ratio=0.5)
    last_gain = max((trial.step for trial in result.trials if trial.adopted), default=0)
    assert result.stopped_because == "no better layer set in 5 candidates"
    assert len(result.trials) - 1 - last_gain >= 5  # more, where a final was still to be held


@pytest.mark.slow
def test_each_lowering_of_the_skip_ratio_restores_a_sub_layer() -> None:
    """The default step of 0.05 is less than one of the four searchable sub-layers of this model."""
    settings: dict[str, Any] = dict(skip_ratio=1.0, early_stop=False, min_acceptance=1.0, min_acceptance_rounds=4)
    result, events = tuned(stream(8), target_matchness=1.0, **settings)
    sizes = [n_skipped_for(4, event.skip_ratio) for event in events if isinstance(event, SkipRatioLowered)]
    assert len(sizes) > 1 and sizes == sorted(set(sizes), reverse=True)
    assert result.record.layer_set.n_skipped == sizes[-1]


def test_a_tie_counts_as_a_match_only_for_the_draft_token() -> None:
    """All logits are equal, so the draft's argmax is token 0, whatever was generated."""
    runtime = tiny_runtime("llama")
    head: Any = runtime.hf_model
    head.lm_head.weight.zero_()
    ids = [5, 6, 7, 8, 0, 9]
    buffer = runtime.new_buffer(20)
    runtime.prefill(ids[:-1], buffer)
    context = Context(runtime, buffer, TokenRule.of(Sampling(), None), ids, 2)
    (score,) = alone(score_window(context, [LayerSet(4)], 4))
    assert score.matchness == 0.25


@pytest.mark.parametrize("n_layers", [1, 2])
def test_model_without_searchable_sub_layers_is_tuned_to_the_whole_model(n_layers: int) -> None:
    runtime = runtime_of(changed("llama", num_hidden_layers=n_layers))
    runtime.tokenizer = worded_runtime().tokenizer
    costs = flat_costs(n_layers=n_layers)
    *_, result = Tuner(Session(runtime, Sampling(), 24), SwiftSettings(**SMALL), costs, "tiny").run(stream(3))
    assert isinstance(result, TaskFinished)
    assert result.record.layer_set.n_skipped == 0 and result.record.matchness == 1.0


def test_repeated_prompt_is_both_tuned_on_and_held_out() -> None:
    result, events = tuned(stream(1) * 6, max_steps=5)
    assert result.verdict.n_prompts == 3 and result.n_prompts == 3 and len(result.trials) == 5
    finished = [event for event in events if isinstance(event, PromptFinished)]
    assert [event.index for event in finished] == list(range(6))


def test_one_held_out_prompt_never_says_use() -> None:
    """One pair has no spread, and thus no interval."""
    verdict = judge([Timed(10, 1.0)], [Timed(10, 2.0)], None)
    assert verdict.word == "plain" and verdict.interval is None and verdict.ratio == 2.0


# runs that break in the middle


class Tuning:
    """A tuning run on files, with a listener that may interrupt it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, str(folder / "test.db")
        self.model = str(save(folder / "model"))

    def run(self, lines: list[dict[str, Any]], on_event: Any, **changes: Any) -> Any:
        path = self.folder / "stream.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        request = TuneRequest(
            self.model,
            str(path),
            out=str(self.folder / "out.jsonl"),
            **{"max_new_tokens": 12, "settings": SwiftSettings(**SMALL, max_steps=4), **changes},
        )
        with Store.open(self.url) as store:
            return run_tuning(request, store, on_event)


@pytest.fixture
def tuning(tmp_path: Path) -> Tuning:
    return Tuning(tmp_path)


def two_tasks() -> list[dict[str, Any]]:
    return [{"prompt": words(3 + i, 9), "task": task} for i in range(4) for task in ("a", "b")]


def test_finished_task_is_stored_if_a_later_one_is_interrupted(tuning: Tuning) -> None:
    def on_event(event: Event) -> None:
        if isinstance(event, PhaseChanged) and event.phase == "verdict" and event.task == "b":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuning.run(two_tasks(), on_event)
    with Store.open(tuning.url) as store:
        kept = {record.task: record for record in store.layer_sets()}
    assert kept["a"].measured_speedup is not None
    assert kept["b"].verdict == "unmeasured"


def test_the_first_error_is_reported_when_the_database_fails_too(tuning: Tuning) -> None:
    def on_event(event: Event) -> None:
        if isinstance(event, PromptFinished):
            with sqlite3.connect(tuning.url) as database:
                database.execute("DROP TABLE swiftopt_jobs")
            raise OutputError("the disk is full")

    with pytest.raises(OutputError, match="the disk is full"):
        tuning.run(two_tasks(), on_event)


def test_window_is_checked_against_the_lengths_that_lines_request(tuning: Tuning) -> None:
    lines = [{"prompt": words(3 + i, 9), "max_new_tokens": 20} for i in range(3)]
    finished: list[Event] = []
    result = tuning.run(lines, finished.append, max_new_tokens=4)
    assert result.tasks[0].trials and any(isinstance(event, TaskFinished) for event in finished)
    short = [{"prompt": words(3), "max_new_tokens": 6}]
    with pytest.raises(SettingsError, match="context window of 8"):
        tuning.run(short, finished.append, max_new_tokens=100)


def test_a_benchmark_of_single_tokens_has_no_expected_ratio() -> None:
    runtime = worded_runtime()
    request = GenerateRequest("tiny", max_new_tokens=1)
    with Store.open("sqlite://") as store:
        store.save_cost_profile(dataclasses.replace(flat_costs(), fingerprint=runtime.info.fingerprint))
        report = run_methods(runtime, stream(2), ["plain", "swift"], request, store)
    for result in report["results"]:
        assert result["tokens"] == 2 and result["identical"] == 2
        assert result["expected_ratio"] is None and result["decode_ratio"] is None


def test_a_benchmark_that_ignores_stop_tokens_gives_every_method_the_full_length() -> None:
    runtime = worded_runtime()
    methods = ["plain", "prompt-lookup", "hf-plain"]
    request = GenerateRequest("tiny", max_new_tokens=12)
    session = Session(runtime, Sampling(), 12, ignore_eos=True)
    ((_, plain),) = session.run(stream(1)[0], PLAIN)
    runtime.hf_model.generation_config.eos_token_id = plain.token_ids[3]  # type: ignore[union-attr]
    for ignore_eos, n_tokens in ((False, plain.token_ids.index(plain.token_ids[3]) + 1), (True, 12)):
        report = run_methods(runtime, stream(1), methods, request, None, ignore_eos=ignore_eos)
        assert report["ignore_eos"] is ignore_eos
        assert [result["tokens"] for result in report["results"]] == [n_tokens] * 3
        assert [result["identical"] for result in report["results"]] == [1] * 3


def test_a_benchmark_that_is_interrupted_keeps_the_prompts_that_every_method_decoded() -> None:
    runtime, request = worded_runtime(), GenerateRequest("tiny", max_new_tokens=4)

    def interrupt(when: int) -> Callable[..., None]:
        def on_run(method: str, number: int, *_: object) -> None:
            if number == when:
                raise KeyboardInterrupt

        return on_run

    report = run_methods(runtime, stream(4), ["plain", "prompt-lookup"], request, None, interrupt(2))
    assert report["interrupted"] and report["prompts"] == 2
    assert [(row["tokens"], row["identical"], row["of"]) for row in report["results"]] == [(8, 2, 2)] * 2
    with pytest.raises(KeyboardInterrupt):
        run_methods(runtime, stream(4), ["plain", "prompt-lookup"], request, None, interrupt(0))
