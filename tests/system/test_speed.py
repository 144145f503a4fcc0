"""Laws of the speeds: static passes give the logits of the eager runtime."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from families import CONFIGS, taken_in_turns, tiny_model, tiny_runtime, variants
from tiny_files import save
from torch import Tensor

from swiftopt import __version__
from swiftopt.cli.main import run
from swiftopt.core.errors import SettingsError
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.records import ModelInfo
from swiftopt.core.requests import TuneRequest
from swiftopt.core.settings import SwiftSettings
from swiftopt.core.types import Sampling
from swiftopt.decoding.context import Ending, TokenRule
from swiftopt.decoding.loop import decode
from swiftopt.decoding.methods import PLAIN, Method, swift
from swiftopt.models import costs, loading
from swiftopt.models.buffer import KVBuffer
from swiftopt.models.costs import RECORD_AT, RECORDED_ROWS, device_name, measure_costs, measure_format
from swiftopt.models.graphs import Answer, GraphPasses, StaticPass, launched_s, pass_seconds, replayed_s
from swiftopt.models.kernels import device as device_kernels
from swiftopt.models.loading import at_speed
from swiftopt.models.rows import Pass, Rows
from swiftopt.models.runtime import Runtime
from swiftopt.papers.early_exit import StackedLayers
from swiftopt.store import Store
from swiftopt.tasks.recipes import stored_costs

pytestmark = pytest.mark.usefixtures("few_steps")

PROMPT = [3, 17, 42, 8, 91, 5]
N_LAYERS = 2  # what the second is given the first has made; the interpreter's time is that of its operations
SKIPPING = LayerSet(N_LAYERS, frozenset({1}), frozenset({0}))
TREES = swift(SKIPPING, SwiftSettings(early_stop=False, max_draft_length=4, branching=((1.0, 3),)))  # 13 rows


def tokens(runtime: Runtime, method: Method, n_new: int = 24) -> tuple[int, ...]:
    return decode(runtime, PROMPT, method, TokenRule.of(Sampling(), None), Ending(n_new)).token_ids


def tiny(family: str) -> Runtime:
    return tiny_runtime(family, torch.float32, num_hidden_layers=N_LAYERS)


def graphed(family: str, recorded: list[StaticPass]) -> Runtime:
    """Return a runtime whose static passes run without capture, because this device has none."""

    def record(static: StaticPass) -> Callable[[], Answer]:
        recorded.append(static)
        return static.run

    runtime = tiny(family)
    runtime.graphs = GraphPasses(runtime, record)
    return runtime


# Node 2 hangs beside node 1, so that its position is not its slot's.
_NODES = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
TREE = partial(Rows, [7, 8, 9], 40, [40, 41, 41], torch.cat((torch.ones(3, 40, dtype=torch.bool), _NODES), dim=1))
# Layers are left out of any rows alike: of a tree is enough.
KINDS = {"a row": Rows([7], 40), "a chain": Rows([7, 8, 9, 10, 11], 40), "a tree of a draft": TREE((SKIPPING,))}


@pytest.mark.parametrize(
    ("family", "kind"),
    variants((family, kind) for family, kinds in taken_in_turns(CONFIGS, KINDS, 1) for kind in kinds),
)
def test_static_passes_give_the_logits_of_eager_ones(family: str, kind: str) -> None:
    """A tree, or rows of another kind; one of these per family, because the interpreter is slow."""
    eager, recorded = tiny(family), list[StaticPass]()
    runtime = graphed(family, recorded)
    ids = [1 + 5 * i % 90 for i in range(40)]
    buffers = [each.new_buffer(60) for each in (eager, runtime)]
    for each, buffer in zip((eager, runtime), buffers, strict=True):
        each.prefill(ids, buffer)
    for rows in (KINDS[kind], TREE()):
        wanted = eager.forward(rows, buffers[0])
        for _ in range(RECORD_AT):
            given = runtime.forward(rows, buffers[1])
        torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(buffers[1].keys[-1][:, :43], buffers[0].keys[-1][:, :43], rtol=1e-4, atol=1e-4)
    assert [static.shape.width for static in recorded] == [{"a row": 1, "a chain": 8}.get(kind, 4), 4]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_one_static_pass_serves_several_sequences_and_early_exits(family: str) -> None:
    eager, recorded = tiny(family), list[StaticPass]()
    runtime = graphed(family, recorded)
    texts = [[1 + 5 * i % 90 for i in range(n)] for n in (9, 17, 33)]
    buffers = [[each.new_buffer(60) for _ in texts] for each in (eager, runtime)]
    for each, own in zip((eager, runtime), buffers, strict=True):
        for text, buffer in zip(texts, own, strict=True):
            each.prefill(text, buffer)
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    rows = [Rows([7], 9), Rows([7, 8, 9], 17, [17, 18, 18], tree), Rows([4, 5], 33)]
    wanted: list[tuple[int, ...] | None] = [None, (0, 2), (1,)]

    def passes(of: Runtime, own: Sequence[KVBuffer]) -> list[Pass]:
        return [Pass(of, *each) for each in zip(rows, own, wanted, strict=True)]

    expected = eager.forward_together(passes(eager, buffers[0]))
    for _ in range(RECORD_AT):
        found = runtime.forward_together(passes(runtime, buffers[1]))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert [static.shape.width for static in recorded] == [8]  # six rows of three sequences

    def staged(of: Runtime, own: Sequence[KVBuffer]) -> list[Tensor]:
        depths: list[Tensor] = []
        begun = [of.embed([7], 9), of.embed([4], 33)]
        for first, last in ((0, 1), (1, 2)):
            states: list[list[Tensor]] = [[], []]
            span, own_rows = (first, last), () if first == 0 else None
            some = [
                Pass(of, Rows([0], slot), buffer, own_rows, {last: state}, hidden, span)
                for slot, buffer, state, hidden in zip((9, 33), (own[0], own[2]), states, begun, strict=True)
            ]
            logits = of.forward_together(some)
            begun = [state[0] for state in states]
            depths += [*begun, *logits]
        return depths

    theirs = staged(eager, buffers[0])
    for _ in range(RECORD_AT):
        ours = staged(runtime, buffers[1])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert [(each.shape.first, each.shape.last, each.shape.is_read) for each in recorded[1:]] == [
        (0, 1, False),
        (1, 2, True),
    ]


def test_each_layer_set_has_its_replayed_pass_and_wide_passes_have_none() -> None:
    recorded: list[StaticPass] = []
    runtime = graphed("llama", recorded)
    buffers = [runtime.new_buffer(200) for _ in range(3)]
    sets = [(), (SKIPPING,), ()]
    for n_rows in (2, 130):
        some = [
            Pass(runtime, Rows([4] * n_rows, 0, variants=own), buffer)
            for own, buffer in zip(sets, buffers, strict=True)
        ]
        for _ in range(RECORD_AT + 1):
            logits = runtime.forward_together(some)
        alone = [runtime._computed([each])[0] for each in some]
        for one, other in zip(logits, alone, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        assert [(each.shape.width, each.shape.variants) for each in recorded] == [(4, ()), (2, (SKIPPING,))]


def test_row_that_sees_more_slots_than_a_table_runs_without_it() -> None:
    recorded: list[StaticPass] = []
    runtime = graphed("llama", recorded)
    seen = torch.ones((1, 100), dtype=torch.bool)
    seen[0, 1] = False  # 98 slots behind the run
    for _ in range(RECORD_AT):
        logits = runtime.forward(Rows([4], 99, [98], seen), runtime.new_buffer(120))
    assert logits.shape == (1, runtime.vocab_size) and runtime.graphs is not None
    assert runtime.graphs.forward([Pass(runtime, Rows([4], 99, [98], seen), runtime.new_buffer(120))]) is None


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", pytest.param("gpt2", marks=pytest.mark.families)])
def test_decoding_by_static_passes_gives_the_same_tokens(family: str) -> None:
    recorded: list[StaticPass] = []
    runtime, eager = graphed(family, recorded), tiny(family)
    for method, n_new in ((PLAIN, 5), (TREES, 8)):
        assert tokens(runtime, method, n_new) == tokens(eager, method, n_new)
    assert {static.shape.width for static in recorded} >= {1, 16}


def test_captured_passes_are_dropped_when_weights_move() -> None:
    """On a device they would still read the old memory."""
    recorded: list[StaticPass] = []
    runtime = graphed("llama", recorded)
    before = tokens(runtime, PLAIN, 5)
    n = len(recorded)
    assert tokens(runtime, PLAIN, 5) == before and len(recorded) == n
    StackedLayers(runtime)
    assert tokens(runtime, PLAIN, 5) == before and len(recorded) > n
    n = len(recorded)
    runtime.drop_copies("int4")
    assert tokens(runtime, PLAIN, 5) == before and len(recorded) > n


def test_longer_text_gets_its_own_pass_over_more_slots() -> None:
    recorded: list[StaticPass] = []
    runtime, eager = graphed("llama", recorded), tiny("llama")
    text = [1 + 5 * i % 90 for i in range(250)]
    rule = TokenRule.of(Sampling(), None)
    runtime.max_positions = eager.max_positions = 512
    long, expected = (decode(each, text, PLAIN, rule, Ending(11)).token_ids for each in (runtime, eager))
    assert long == expected
    assert [static.shape.n_slots for static in recorded] == [256, 512]


def test_padding_rows_change_no_slot_of_the_request() -> None:
    recorded: list[StaticPass] = []
    runtime = graphed("llama", recorded)
    buffer = runtime.new_buffer(60)
    runtime.prefill([*PROMPT, 9, 9, 9, 9, 9], buffer)
    before = buffer.keys[1][:, :60].clone()
    for _ in range(RECORD_AT):
        runtime.forward(Rows([4, 5, 6], 6), buffer)
    changed = (buffer.keys[1][:, :60] != before).any(dim=-1).any(dim=0).nonzero().flatten().tolist()
    assert recorded[0].shape.width == 4 and changed == [6, 7, 8]


def test_layer_sets_of_a_single_pass_are_not_captured() -> None:
    recorded: list[StaticPass] = []
    runtime = graphed("llama", recorded)
    buffer = runtime.new_buffer(60)
    for skipped in (({0}, ()), ({1}, ()), ((), {0}), ((), {1})):
        runtime.forward(Rows([4], 0, variants=(LayerSet(N_LAYERS, *map(frozenset, skipped)),)), buffer)
    assert recorded == []


def test_pass_that_cannot_be_captured_is_tried_once_and_still_runs() -> None:
    asked: list[StaticPass] = []

    def record(static: StaticPass) -> Callable[[], Answer]:
        asked.append(static)
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB.")

    runtime, eager = tiny("llama"), tiny("llama")
    graphs = runtime.graphs = GraphPasses(runtime, record)
    assert tokens(runtime, PLAIN, 12) == tokens(eager, PLAIN, 12)
    assert len(asked) == len(graphs.refused) == 1
    graphs.forget()  # as memory is free again
    assert tokens(runtime, PLAIN, 12) == tokens(eager, PLAIN, 12) and len(asked) == 2
    graphs.forget()
    with pytest.raises(RuntimeError, match=r"^CUDA out of memory$"):  # so that it is no default
        pass_seconds(runtime, graphs)


def test_states_are_recorded_once_if_one_of_two_passes_cannot_be_captured() -> None:
    runtime = tiny("llama")

    def record(static: StaticPass) -> Callable[[], Answer]:
        if static.shape.variants:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return static.run

    runtime.graphs = GraphPasses(runtime, record)
    for _ in range(RECORD_AT):
        states: list[list[Tensor]] = [[], []]
        runtime.forward_together(
            [
                Pass(runtime, Rows([4], 0, variants=own), runtime.new_buffer(60), (), {N_LAYERS: noted})
                for own, noted in zip(((), (SKIPPING,)), states, strict=True)
            ]
        )
        assert [len(noted) for noted in states] == [1, 1]


LAUNCHED_S, CAPTURE_S = 15e-3, 80e-3  # of a pass run one operation after the other, and of a capture


def replay_s(n_rows: int, layer_set: LayerSet, is_read: bool = True) -> float:
    """Return made-up seconds of a replayed pass: 6 ms without skipping, a third of that in int4."""
    n_parts = 2 * layer_set.n_layers - layer_set.n_skipped
    return (1.0 * is_read + 0.6 * n_parts + 0.2 + 0.01 * n_rows) * 1e-3 / (3 if layer_set.formats else 1)


def graphed_by_a_clock(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Return a runtime whose launched, captured and replayed passes advance the clock of cost measurements."""
    now = 0.0

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    def record(static: StaticPass) -> Callable[[], Answer]:
        shape = static.shape
        layer_set = shape.variants[0] if shape.variants else LayerSet(runtime.n_layers)
        hidden = torch.zeros(shape.width, int(runtime.config.hidden_size))
        logits = torch.zeros(shape.width, runtime.vocab_size) if shape.is_read else None
        spend(CAPTURE_S)

        def replay() -> Answer:
            spend(replay_s(shape.width, layer_set, shape.is_read))
            return hidden, logits

        return replay

    model = tiny_model("llama", torch.float32, max_position_embeddings=2048)
    runtime = Runtime(model, None, ModelInfo("tiny", "llama", 4, 1))
    runtime.graphs = GraphPasses(runtime, record)
    model.get_input_embeddings().register_forward_hook(lambda *_: spend(LAUNCHED_S))  # no replay calls it
    for module in ("costs", "graphs"):
        monkeypatch.setattr(f"swiftopt.models.{module}.perf_counter", lambda: now)
    return runtime


def test_passes_of_a_loaded_model_are_timed_both_launched_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = graphed_by_a_clock(monkeypatch)
    assert isinstance(runtime.graphs, GraphPasses)
    graphs, runtime.graphs = runtime.graphs, None
    assert pass_seconds(runtime, graphs) == pytest.approx((LAUNCHED_S, replay_s(1, LayerSet(4))))


def test_costs_are_those_of_replays_and_not_of_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = graphed_by_a_clock(monkeypatch)
    whole, int4 = LayerSet(4), LayerSet(4).filled("int4")
    profile = measure_format(runtime, measure_costs(runtime, 256), "int4")
    for n in (*costs.WIDTHS, RECORDED_ROWS):
        assert profile.target_pass_s(n) == pytest.approx(replay_s(n, whole)), n
    assert profile.target_pass_s(2 * RECORDED_ROWS) == pytest.approx(LAUNCHED_S)
    assert profile.head_s == pytest.approx(1e-3) and profile.attn_s == pytest.approx(0.6e-3)
    assert profile.draft_pass_s(int4) == pytest.approx(replay_s(1, int4))


def test_passes_too_wide_for_graphs_are_measured_even_if_the_first_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launched pass of 256 rows takes twice as long as a replayed one of 128, and wider passes take as long."""
    profile = measure_costs(graphed_by_a_clock(monkeypatch), 256)
    assert 1.8 * profile.target_pass_s(RECORDED_ROWS) < LAUNCHED_S and max(profile.pass_s) == 1024


@pytest.mark.parametrize("answer", ["faster", "slower", "capture fails", "several devices", "by a library"])
def test_auto_on_gpus_chooses_graphs_if_they_are_faster(
    answer: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A capture may fail because of a library such as bitsandbytes; the model is still loaded."""
    runtime, gpu = tiny_runtime("llama", torch.float32), torch.device("cuda", 1)
    for each in (runtime, *runtime.blocks):
        each.device = gpu
    runtime.one_device = answer != "several devices"

    def seconds(runtime: Runtime, graphs: Any) -> tuple[float, float]:
        if answer == "capture fails":
            raise RuntimeError("operation not permitted when stream is capturing")
        return 2.0, 3.0 if answer == "slower" else 1.0

    graphs = GraphPasses(runtime, lambda static: static.run)
    monkeypatch.setattr(loading, "GraphPasses", lambda runtime: graphs)
    monkeypatch.setattr(loading, "pass_seconds", seconds)
    monkeypatch.setattr(loading, "is_by_library", lambda module: answer == "by a library")
    at_speed(runtime, "auto")
    taken = answer == "faster"
    assert runtime.graphs is (graphs if taken else None) and runtime.speed == ("graphs" if taken else "eager")
    assert runtime.by_table == (answer in ("faster", "slower", "by a library"))
    assert ("not replayed as CUDA graphs here: operation not permitted" in caplog.text) == (answer == "capture fails")
    chosen: Any = runtime.copies.packed  # by the time of a replay, or of a launch
    if answer == "by a library":
        assert chosen is False
    else:
        assert chosen.func is (replayed_s if taken else launched_s) and chosen.args == (gpu,)
    runtime.blocks[0].device = torch.device("cpu")
    at_speed(runtime, "auto")
    assert runtime.copies.packed is False  # our kernels read no weights there


def test_launched_task_is_timed_until_the_device_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = list[None]()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: (sleep(0.001 * len(waiting)), waiting.clear()))
    assert 0.001 <= launched_s(torch.device("cuda"), lambda: waiting.append(None)) < 0.1


def test_graphs_without_a_cuda_device_are_refused_in_a_sentence() -> None:
    runtime = tiny_runtime("llama")
    with pytest.raises(SettingsError, match="one CUDA device, and this one lies on cpu"):
        at_speed(runtime, "graphs")
    assert runtime.graphs is None and runtime.speed == "eager"


def test_graphs_without_kernels_for_them_are_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="which do not compute in float64: use the speed eager"):
        GraphPasses(tiny_runtime("llama"), lambda static: static.run)
    monkeypatch.setattr("swiftopt.models.kernels.device.obstacle", lambda: "Triton is gone: get it")
    with pytest.raises(SettingsError, match="and Triton is gone: get it"):
        GraphPasses(tiny_runtime("llama", torch.float32), lambda static: static.run)


def test_reason_why_triton_cannot_launch_is_reported_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reason, compiler = device_kernels.obstacle.__wrapped__, tmp_path / "gcc"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert reason() is None
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": str(tmp_path)})
    assert "no C compiler, gcc or clang, which" in str(reason())
    compiler.touch(0o755)
    assert f"includes {tmp_path}/Python.h, which is missing: install python3-dev" in str(reason())
    (tmp_path / "Python.h").touch()
    assert reason() is None
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "no C compiler, no-such-compiler, which" in str(reason())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert reason() == "Triton is not installed: pip install triton"


def test_unknown_speed_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match="use auto, exact, eager, graphs"):
        at_speed(tiny_runtime("llama"), "warp")  # type: ignore[arg-type]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"id": f"p{i}", "prompt": f"w{i} w{i + 1} w{i + 2}"}) for i in range(2)]
    (tmp_path / "notes.jsonl").write_text("\n".join(lines) + "\n")
    save(tmp_path / "tiny")
    return tmp_path


DECODE = ["bench", "decode", "--model", "./tiny", "--stream", "notes.jsonl", "--max-new-tokens", "12"]


def test_commands_run_at_the_given_speed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [*DECODE, "--methods", "plain,prompt-lookup", "--dtype", "float32", "--speed", "eager", "--json"]
    assert run(args) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["device"] == device_name(torch.device("cpu")), "not of our kernels, which auto takes"
    assert [result["identical"] for result in report["results"]] == [2, 2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a CUDA device says")
def test_commands_refuse_graphs_without_a_cuda_device(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*DECODE, "--methods", "plain", "--speed", "graphs"]) == 2
    assert "one CUDA device, and this one lies on cpu" in capsys.readouterr().err


def test_costs_are_stored_by_speed() -> None:
    runtime = tiny_runtime("llama")
    with Store.open("sqlite://") as store:
        eager = stored_costs(runtime, store, 32)
        runtime.speed = "graphs"
        replayed = stored_costs(runtime, store, 32)
        assert replayed.device == f"{eager.device}, graphs"
        assert stored_costs(runtime, store, 32) == replayed
        runtime.speed = "eager"
        assert stored_costs(runtime, store, 32) == eager


def test_costs_of_other_software_are_measured_again() -> None:
    runtime = tiny_runtime("llama")
    with Store.open("sqlite://") as store:
        own = stored_costs(runtime, store, 32)
        store.save_cost_profile(replace(own, software="torch 2.0.0, swiftopt 0.0.1"))
        again = stored_costs(runtime, store, 32)
        assert again.software == own.software == f"torch {torch.__version__}, swiftopt {__version__}"
        assert again != own, "measured anew"
        unknown = replace(own, software="")
        store.save_cost_profile(unknown)
        assert stored_costs(runtime, store, 32) == unknown


def test_jobs_state_their_speed() -> None:
    request = TuneRequest("tiny", "s.jsonl", speed="exact")
    assert TuneRequest.from_json(request.to_json()) == request
    assert TuneRequest.from_json({"model": "tiny", "stream": "s.jsonl"}).speed == "auto"
    with pytest.raises(SettingsError, match="warp"):
        TuneRequest.from_json({"model": "tiny", "stream": "s.jsonl", "speed": "warp"})


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_captured_passes_give_the_tokens_of_eager_ones(family: str) -> None:
    info = ModelInfo("tiny", family, N_LAYERS, 1)
    models = [tiny_model(family, torch.float32, num_hidden_layers=N_LAYERS).to("cuda") for _ in range(2)]
    runtimes = [Runtime(model, None, info) for model in models]
    at_speed(runtimes[1], "graphs")
    for method in (PLAIN, TREES, PLAIN):
        assert tokens(runtimes[1], method) == tokens(runtimes[0], method)
