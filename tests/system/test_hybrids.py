"""Models that mix attention with other layers: their states stay right in every course of a request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from api import Served, serving, until_ready
from families import tiny_model, tiny_runtime
from native import native, repeating, words
from tiny_files import CHAT_TEMPLATE, save

from swiftopt.cli.main import run
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.records import ModelInfo
from swiftopt.core.settings import SwiftSettings
from swiftopt.core.types import Completion, Sampling
from swiftopt.decoding.context import Ending, ResumePoint, TokenRule
from swiftopt.decoding.engine import Engine, Request, alone
from swiftopt.decoding.events import Round
from swiftopt.decoding.loop import decoding
from swiftopt.decoding.methods import PLAIN, Method, Resources, build, swift
from swiftopt.decoding.work import Work
from swiftopt.models.costs import measure_costs
from swiftopt.models.rows import Rows
from swiftopt.models.runtime import Runtime
from swiftopt.optimizer.evaluation import score_window
from swiftopt.optimizer.search import Search
from swiftopt.optimizer.task_state import sub_layers_of

N_NEW, PLENTY = 24, 1 << 30
SKIPPING = LayerSet(4, frozenset({1}), frozenset({2}))
MOST = LayerSet(4, frozenset({1, 2}), frozenset({1, 2}))
TREES = SwiftSettings(stop_threshold=0.02, max_draft_length=5, branching=((0.03, 4), (0.06, 2), (1.0, 1)))
VARIANTS = [
    "lfm2",
    "qwen3_5_text",
    "granitemoehybrid:dense",
    *(pytest.param(name, marks=pytest.mark.families) for name in ("lfm2:longer", "qwen3_next", "granitemoehybrid")),
    *(pytest.param(name, marks=pytest.mark.families) for name in ("bamba", "falcon_h1", "nemotron_h", "mamba2")),
    *(pytest.param(name, marks=pytest.mark.families) for name in ("jamba", "mamba")),
]
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def methods(variant: str) -> list[Method]:
    resources = Resources(native(variant), SKIPPING, {}, native(variant, seed=1))
    return [PLAIN, swift(SKIPPING, TREES), build("prompt-lookup", resources), build("spd", resources)]


def request(variant: str, ids: Sequence[int], method: Method, n_new: int = N_NEW, **options: Any) -> Work[Completion]:
    rule = TokenRule.of(Sampling(), None)
    return decoding(native(variant), ids, method, rule, Ending(n_new), **options)


def plain(variant: str, ids: Sequence[int], n_new: int = N_NEW) -> tuple[int, ...]:
    return alone(request(variant, ids, PLAIN, n_new)).token_ids


def finish(engine: Engine) -> None:
    while engine.requests:
        list(engine.step())


def test_heads_are_put_into_another_order_only_where_the_output_map_reads_one() -> None:
    """A map with a GGUF file's codes may read heads in the file's order."""
    ids, order = words(0, 9), torch.tensor([2, 0, 3, 1])
    expected: torch.Tensor | None = None
    for head_order in (None, torch.arange(4), order):
        model = tiny_model("qwen3_next", linear_num_value_heads=4)
        for layer in model.model.layers:
            if (mixer := getattr(layer, "linear_attn", None)) is not None and head_order is not None:
                columns = mixer.out_proj.weight.data.unflatten(1, (4, -1))
                mixer.out_proj.weight.data = columns[:, head_order].flatten(1)
                mixer.out_proj.head_order = head_order
        runtime = Runtime(model, None, ModelInfo("tiny", "qwen3_next", 4, 1))
        orders = [block.head_order for block in runtime.blocks if block.rule is not None]
        assert orders and all((found is None) == (head_order is not order) for found in orders)
        logits = runtime.forward(Rows(ids, 0), runtime.new_buffer(len(ids)))
        expected = logits if expected is None else expected
        assert torch.allclose(logits, expected, rtol=0, atol=1e-12)


@each_variant
def test_concurrent_and_cancelled_requests_give_plain_tokens(variant: str) -> None:
    engine, running = Engine(by_time=False), list[tuple[Request[Completion], list[int]]]()
    for number, method in enumerate(methods(variant) * 3):
        ids = repeating(number)[: 7 + number]
        running.append((engine.add(request(variant, ids, method)), ids))
    for _ in range(4):
        list(engine.step())
    for number in (1, 5):
        engine.cancel(running[number][0])
    finish(engine)
    for number, (one, ids) in enumerate(running):
        assert number in (1, 5) or one.result.token_ids == plain(variant, ids)


@each_variant
def test_evicted_or_moved_request_continues(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftopt.decoding.loop.FIRST_NEW_SLOTS", 4)
    for number, method in enumerate(methods(variant)):
        ids, points = repeating(number), list[ResumePoint]()
        slot_bytes = native(variant).slot_bytes + method.drafter.slot_bytes
        # Room for one at its end, so that others are evicted.
        engine = Engine(slot_bytes * (len(ids) + N_NEW + 40) + native(variant).state_bytes(22))
        asked = [ids, words(number, 20), ids[:9]]
        running = [engine.add(request(variant, own, method)) for own in asked]
        while engine.requests:
            for event in engine.step():
                if isinstance(event, Round) and event.context.token_ids[: len(ids)] == ids:
                    points.append(event.context.resume_point())
        assert [one.result.token_ids for one in running] == [plain(variant, own) for own in asked]
        for point in points[::3]:
            assert alone(request(variant, ids, method, resume_from=point)).token_ids == running[0].result.token_ids


@each_variant
def test_next_turn_of_a_chat_reads_only_new_tokens(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots can be cut anywhere; recurrent states continue only from the end of a text or from a snapshot."""
    monkeypatch.setattr("swiftopt.models.runtime.SNAPSHOT_BEFORE", 6)
    for number, method in enumerate(methods(variant)):
        engine, ids = Engine(PLENTY), repeating(number)
        first = engine.add(request(variant, ids, method))
        finish(engine)
        for n_kept in (len(ids) + N_NEW - 1, len(ids) - 4):  # The whole answer, and none of it nor of the prompt's end.
            longer = [*(*ids, *first.result.token_ids)[:n_kept], *words(number, 9)]
            again = engine.add(request(variant, longer, method))
            finish(engine)
            assert again.result.token_ids == plain(variant, longer)
            is_cut = native(variant).recurrent and n_kept < len(ids)
            assert again.result.n_cached == (len(ids) - 6 if is_cut else n_kept)


@each_variant
def test_candidate_without_skipping_predicts_every_token_of_a_window(variant: str) -> None:
    """Candidates start before the end of the text, several in one pass. Blocks are scored as windows of their own."""
    work = request(variant, words(3, 11), PLAIN, 16, scratch_rows=24)

    def scored() -> Work[list[float]]:
        found: list[float] = []
        event = next(work)
        answer: Any = None
        while True:
            if isinstance(event, Round) and len(event.context.generated) == 14:
                scores = yield from score_window(event.context, [MOST, LayerSet(4)], 12, block=5)
                found.append(scores[1].matchness)
                ranks, start = list[int](), len(event.context.token_ids) - 12
                for first, length in ((0, 5), (5, 5), (10, 2)):
                    (score,) = yield from score_window(event.context, [MOST], length, start + first, length)
                    ranks += score.ranks
                assert scores[0].ranks == tuple(ranks)
            try:
                answer = (yield event) if not isinstance(event, Round) else None
                event = work.send(answer)
            except StopIteration as end:
                assert end.value.token_ids == plain(variant, words(3, 11), 16)
                return found

    assert alone(scored()) == [1.0]


# Sizes of layers that people run, as far as they are those of a state and its rows; and what eight rows may add to it.
DRAFTED: dict[str, tuple[str, dict[str, int], float]] = {
    "Qwen3.5 2B": (
        "qwen3_5_text",
        {f"linear_{name}": 16 for name in ("num_key_heads", "num_value_heads")}
        | {f"linear_{name}_head_dim": 128 for name in ("key", "value")},
        0.1,
    ),
    "Granite 4 H 1B": (
        "granitemoehybrid:dense",
        {"mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_expand": 96},
        0.05,
    ),
    "Jamba 3B": ("jamba", {"mamba_expand": 160, "mamba_d_state": 16, "mamba_dt_rank": 160}, 0.2),
}


@pytest.mark.parametrize("what", DRAFTED)
def test_drafted_rows_take_little_memory_beside_a_state(what: str) -> None:
    variant, sizes, most = DRAFTED[what]
    runtime = tiny_runtime(variant, torch.bfloat16, **sizes)
    states = [runtime.new_buffer(16, n_rows).states for n_rows in (1, 9)]
    plain, drafted = (one.n_bytes for one in states if one is not None)
    assert [plain, drafted] == [runtime.state_bytes(n_rows) for n_rows in (1, 9)]
    assert 0 < drafted / plain - 1 < most


def test_search_skips_only_existing_sub_layers() -> None:
    """Each layer of Nemotron-H has one sub-layer; the first and the last are kept."""
    runtime = native("nemotron_h")
    own = sub_layers_of(runtime)
    assert own == (("attn", 1), ("mlp", 2))
    for ratio, n_skipped in ((0.5, 1), (1.0, 2)):
        search = Search("t", runtime.whole, own, SwiftSettings(strategy="random"), ratio, None)
        assert search.layer_set.n_skipped == n_skipped
        assert search.layer_set.skip_attn <= {1} and search.layer_set.skip_mlp <= {2}
        assert (search.layer_set.n_searched, search.layer_set.skip_ratio) == (2, ratio)
    assert len(sub_layers_of(native("granitemoehybrid:dense"))) == 4


def test_costs_count_only_existing_sub_layers() -> None:
    runtime = native("nemotron_h")
    costs = measure_costs(runtime, 256)
    assert costs.absent == ("mlp:0", "mlp:1", "attn:2", "attn:3")
    assert costs.draft_pass_s(LayerSet(4, frozenset({2}), frozenset({1}))) == costs.draft_pass_s(LayerSet(4))
    assert measure_costs(native("falcon_h1"), 256).absent is None


def chat(served: Served, **way: Any) -> list[str]:
    """Return the answers of a chat of three turns, and check that each later turn continues from the one before."""
    messages: list[dict[str, str]] = []
    for turn in range(3):
        messages.append({"role": "user", "content": " ".join(f"w{word}" for word in repeating(turn))})
        body = {"model": "tiny", "messages": messages, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        body |= {"logit_bias": {"0": -100}, **way}  # The unknown word, which is not in the text that the template gets.
        answer = served.client.post("/v1/chat/completions", json=body).json()
        usage, [choice] = answer["usage"], answer["choices"]
        messages.append({"role": "assistant", "content": choice["message"]["content"]})
        assert not turn or usage["prompt_tokens_details"]["cached_tokens"] > 24 * turn
    return [message["content"] for message in messages[1::2]]


OTHERS_OVER_HTTP = ("lfm2", "granitemoehybrid", "falcon_h1", "nemotron_h", "mamba2", "jamba")


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", ["qwen3_5_text", *(pytest.param(name, marks=pytest.mark.families) for name in OTHERS_OVER_HTTP)]
)
def test_chat_of_three_turns_has_the_same_bytes_with_drafts_and_without(variant: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "tiny", variant, chat_template=CHAT_TEMPLATE)
    options = ["--model", f"tiny={folder}", "--rate", "0", "--threads", "1", "--no-tune", "--dtype", "bfloat16"]
    with serving(str(tmp_path / "a.db"), tmp_path / "log", *options) as served:
        until_ready(served)
        without = chat(served, swiftopt={"plan": "plain"})
        drafted = chat(served, swiftopt={"method": "prompt-lookup"})
        assert without == drafted and all(without)


def test_tuned_plan_skips_whole_layers_and_is_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rough_costs: None
) -> None:
    monkeypatch.setenv("SWIFTOPT_DATABASE_URL", str(tmp_path / "home.db"))
    prompts = [" ".join(f"w{word}" for word in repeating(seed)) for seed in range(3)]
    stream = tmp_path / "notes.jsonl"
    stream.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    model = ["--model", str(save(tmp_path / "tiny", "qwen3_5_text")), "--dtype", "float32", "--max-new-tokens", "24"]

    def called(*words: str) -> Any:
        code = run([*words, *model, "--json"])
        out, err = capsys.readouterr()
        assert code == 0, err
        return json.loads(out)

    search = ("--method", "swift", "--draft-format", "stored", "--context-window", "8", "--max-steps", "6")
    (task,) = called("tune", "--stream", str(stream), *search)["tasks"]
    layer_set = task["layer_set"]
    assert task["n_trials"] > 0 and layer_set["skip_attn"] == layer_set["skip_mlp"] != []
    asked = ("generate", "--prompt", prompts[0], "--task", "notes")
    plain, drafted = (called(*asked, "--method", name) for name in ("plain", "swift"))
    assert drafted["text"] == plain["text"] and plain["text"]
    assert drafted["layer_set"]["version"] == layer_set["version"]
