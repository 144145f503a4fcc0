"""Models and drafts that do not fit the memory: reports and refusals."""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest
import torch
from converted import write_gguf
from fakes import made_up_gpus
from families import dense_variants, tiny_model, variants
from native import library, quick_runtime
from packed_files import Packing, packed_folder
from tiny_files import save

from swiftopt.bench import gpu
from swiftopt.cli import doctor
from swiftopt.core.errors import DeviceMissing, SettingsError
from swiftopt.core.layer_sets import LayerSet
from swiftopt.core.requests import Speed
from swiftopt.engines.devices import chosen_device
from swiftopt.models import buffer, copies, free_memory, gguf_model, loading, memory
from swiftopt.models.block_experts import BlockExperts
from swiftopt.models.block_maps import BlockLinear
from swiftopt.models.costs import memory_for_texts
from swiftopt.models.gguf_model import settings_folder
from swiftopt.models.loading import load
from swiftopt.models.mapped_rows import mapped_in
from swiftopt.models.memory import COPY_BYTES, PLANNED_TOKENS, memory_plan
from swiftopt.models.row_invariant import make_row_invariant
from swiftopt.models.rows import Rows
from swiftopt.models.runtime import Runtime
from swiftopt.models.saved import ReadShare, WeightStorage, no_step

N = 4  # layers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "tiny", dtype=torch.bfloat16)


def held_bytes(runtime: Runtime) -> int:
    tensors = runtime.hf_model.state_dict().values()
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


@pytest.mark.parametrize("family", [*variants(), *dense_variants()])
@pytest.mark.parametrize("dtype", ["auto", pytest.param("float32", marks=pytest.mark.families)])
def test_memory_plan_counts_weights_and_keys_and_values(family: str, dtype: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "tiny", family, torch.bfloat16)
    plan = memory_plan(folder, dtype, on_cpu=True)
    runtime = load(str(folder), dtype, "cpu", speed="eager")
    # Some parameters of experts' routers stay in float32, and some are buffers.
    assert plan.weights == pytest.approx(held_bytes(runtime), rel=0.01) and plan.workspace == 0
    assert plan.context == PLANNED_TOKENS * runtime.slot_bytes
    in_files = sum(one.n_values for one in mapped_in(runtime.hf_model))
    assert plan.n_copied == pytest.approx(runtime.info.n_parameters - in_files, rel=0.01)
    assert plan.mapped == 2 * in_files
    assert memory_plan(folder, dtype, on_cpu=False).workspace > 0


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("dtype, speed", [("auto", "auto"), ("auto", "eager"), ("float32", "auto")])
def test_memory_plan_of_a_gguf_file_counts_kept_codes(family: str, dtype: str, speed: Speed, tmp_path: Path) -> None:
    library()
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(family, torch.float32, intermediate_size=64), "Q8_0")
    runtime = load(str(path), dtype, "cpu", speed=speed)
    folder = settings_folder(path, no_step)
    assert memory_plan(folder, dtype, on_cpu=True, speed=speed).weights == held_bytes(runtime)
    if (dtype, speed) == ("auto", "auto"):
        assert 0 < memory_plan(folder, dtype, on_cpu=True).copies <= COPY_BYTES * runtime.info.n_parameters
        assert memory_plan(folder, dtype, on_cpu=False).weights == 2 * runtime.info.n_parameters


def test_a_gguf_file_keeps_its_codes_for_the_kernels_of_a_gpu_but_those_of_the_embedding(tmp_path: Path) -> None:
    """It takes the reported bytes and has the logits of de-quantised weights; a tied head shares the embedding."""
    pytest.importorskip("triton")
    library()
    shape = {"num_hidden_layers": 1, "intermediate_size": 64, "moe_intermediate_size": 32, "mlp_only_layers": []}
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("qwen3_moe", torch.float32, **shape), "Q8_0")
    folder = settings_folder(path, no_step)
    storage = WeightStorage(coded=False, for_device=True)
    model, n_parameters = gguf_model.load_gguf(folder, "float32", storage, ReadShare(no_step, "reading"))
    experts = [one for one in model.modules() if isinstance(one, BlockExperts)]
    packed = [one for own in experts for maps in own.maps.values() for one in maps]
    in_experts = sum(one.codes.nbytes + one.scales.nbytes for one in packed)
    runtime = Runtime(model, None, loading.info_of(model, "tiny", n_parameters=n_parameters))
    assert len(experts) == 1 and isinstance(model.model.layers[0].self_attn.q_proj, BlockLinear)
    assert held_bytes(runtime) + in_experts == memory_plan(folder, "float32", False, "exact").weights
    assert model.model.embed_tokens.weight.dtype == torch.float32
    assert make_row_invariant(runtime) is None
    plain = load(str(path), "float32", "cpu", speed="eager")
    found, wanted = (each.forward(Rows([5, 9], 0), each.new_buffer(8)) for each in (runtime, plain))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_codes_without_a_kernel_count_as_plain_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", torch.float32, intermediate_size=64), "Q8_0")
    for module in (memory, gguf_model):
        monkeypatch.setattr(module, "kernels", lambda: "there is no compiler")
    runtime = load(str(path), device="cpu", speed="eager")
    plan = memory_plan(settings_folder(path, no_step), "auto", on_cpu=True)
    assert plan.weights == held_bytes(runtime) == 2 * runtime.info.n_parameters


def test_doctor_reports_a_models_memory_without_reading_its_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    gguf = write_gguf(tmp_path / "new.gguf", tiny_model("gemma3", torch.float32))
    for name, kind in ((folder, "folder"), (gguf, "gguf")):
        state, words = doctor.check_model(str(name))
        needs = rf"{name} is the {kind} {name}; it needs [1-9]\d* kB for its weights, "
        assert state == "ok" and re.match(needs, words)


def test_memory_of_a_model_is_reported_before_its_weights_are_read(folder: Path) -> None:
    steps = list[str]()
    load(str(folder), device="cpu", on_step=steps.append)
    size = r"[1-9]\d* [kM]B"
    needs = f"{folder} needs {size} for its weights, {size} for keys and values of 2,048 tokens"
    assert re.fullmatch(f"{needs}, and drafts in int4 up to {size} more", steps[0]) and steps[1] == f"reading {folder}"


def test_model_beyond_memory_is_refused_before_it_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = memory_plan(folder, "auto", on_cpu=True).needed
    monkeypatch.setattr(loading, "free_bytes", lambda device: int(needed) - 1)
    monkeypatch.setattr(loading, "_load_model", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(SettingsError, match=r"needs \d+ kB for its weights, .* this machine has \d+ kB free: use"):
        load(str(folder), device="cpu")


def test_a_gpu_is_chosen_by_what_model_and_drafts_need(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def place(device: str) -> str:
        return loading.placement(device, folder, "auto")

    plan = memory_plan(folder, "auto", on_cpu=False)
    enough, roomy = plan.needed, plan.needed + plan.weights
    made_up_gpus(monkeypatch, enough, roomy)
    assert place("auto") == "cuda:1" and place("cuda") == place("cuda:0") == "cuda:0"
    made_up_gpus(monkeypatch, enough - 1, enough)
    assert place("auto") == "cuda:1"
    with pytest.raises(SettingsError, match=r"cuda:0 has .* free"):
        place("cuda")
    made_up_gpus(monkeypatch, 0.6 * enough, 0.6 * enough)
    assert place("auto") == place("auto-map") == "auto-map"
    made_up_gpus(monkeypatch, 0.4 * enough, 0.4 * enough)
    with pytest.raises(SettingsError, match="2 GPUs have"):
        place("auto")


def test_only_the_named_gpu_is_queried(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query would create a context of some hundred MB on the GPU."""
    made_up_gpus(monkeypatch, 1 << 40, 1 << 40, 1 << 40)
    asked, tell = list[torch.device](), torch.cuda.mem_get_info
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (asked.append(device), tell(device))[1])
    assert loading.placement("cuda:1", folder, "auto") == "cuda:1" and asked == [torch.device("cuda:1")]
    assert loading.placement("auto", folder, "auto") == "cuda:0" and len(asked) == 4


def test_codes_count_as_they_are_stored_where_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed_folder(tmp_path, "llama", Packing("gptq", 4, 32))
    as_stored = memory_plan(tmp_path, "auto", on_cpu=False, speed="exact")
    plan = memory_plan(tmp_path, "bfloat16", on_cpu=True)
    assert as_stored.weights == plan.weights and plan.copies < 0.6 * 97 * 2 * 64 * 1.1  # of embedding and head
    for dtype, speed in (("float16", "auto"), ("bfloat16", "eager")):  # torch computes, and reads no codes
        runtime = load(str(tmp_path), dtype, "cpu", speed=cast(Speed, speed))
        plan = memory_plan(tmp_path, dtype, on_cpu=True, speed=cast(Speed, speed))
        assert plan.weights == held_bytes(runtime) > as_stored.weights and plan.n_copied == runtime.info.n_parameters
    made_up_gpus(monkeypatch, as_stored.needed)
    assert loading.placement("cuda", tmp_path, "auto", "exact") == "cuda:0"
    with pytest.raises(SettingsError, match=r"cuda:0 has .* free"):
        loading.placement("cuda", tmp_path, "auto", "auto")


def test_codes_that_nothing_computes_with_count_as_plain_weights(tmp_path: Path) -> None:
    packed_folder(tmp_path, "llama", Packing("fp8", 8, 32, rows=32, scale_dtype=torch.float32))
    n_bytes = held_bytes(load(str(tmp_path), "bfloat16", "cpu"))
    assert memory_plan(tmp_path, "bfloat16", on_cpu=True).weights == n_bytes
    assert memory_plan(tmp_path, "bfloat16", on_cpu=False, speed="exact").weights == n_bytes


NO_MEMORY = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize("error", [RuntimeError(NO_MEMORY), MemoryError(), OSError(errno.ENOMEM, "Cannot allocate")])
def test_model_that_exceeds_memory_during_loading_is_reported(
    folder: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outgrow(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", outgrow)
    with pytest.raises(SettingsError, match="does not fit the memory of cpu: use a smaller model"):
        load(str(folder), device="cpu")


def test_segments_are_expandable_before_a_gpu_is_queried(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch reads the variable at its first allocation, and `mem_get_info` initialises the device."""
    made_up_gpus(monkeypatch, 0)
    variable, seen = "PYTORCH_CUDA_ALLOC_CONF", list[str | None]()

    def tell(device: object) -> tuple[int, int]:
        seen.append(os.environ.get(variable))
        return 0, 0

    monkeypatch.setattr(torch.cuda, "mem_get_info", tell)
    for own, wanted in ((None, "expandable_segments:True"), ("backend:cudaMallocAsync", "backend:cudaMallocAsync")):
        for ask in (lambda: load(str(folder), device="cuda:0"), lambda: gpu.main(["--shape", "tiny"])):
            monkeypatch.setenv(variable, own or "")
            if own is None:
                monkeypatch.delenv(variable)
            with suppress(SettingsError):  # there is no room
                ask()
            assert seen.pop() == wanted and not seen


def test_engines_run_where_the_model_would_be_loaded_and_on_one_device(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen_device("cpu", folder, "auto") == "cpu"
    if not torch.cuda.is_available():
        assert chosen_device("auto", folder, "auto") == "cpu"
        with pytest.raises(DeviceMissing, match="no CUDA device can be used here: use cpu or auto"):
            chosen_device("cuda", folder, "auto")
    enough = memory_plan(folder, "auto", on_cpu=False).needed
    made_up_gpus(monkeypatch, enough - 1, enough)
    assert chosen_device("auto", folder, "auto") == chosen_device("cuda:1", folder, "auto") == "cuda:1"
    assert chosen_device("cpu", folder, "auto") == "cpu" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
    with pytest.raises(SettingsError, match=r"cuda:0 has .* free"):
        chosen_device("cuda", folder, "auto")
    made_up_gpus(monkeypatch, 0.6 * enough, 0.6 * enough)
    for device in ("auto", "auto-map"):
        with pytest.raises(SettingsError, match="engines are compared on one device"):
            chosen_device(device, folder, "auto")


def test_copies_beyond_memory_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = quick_runtime("llama")
    draft = LayerSet(N).filled("int4")
    runtime.copies.prepare(draft)
    made = runtime.copies.n_bytes
    runtime.drop_copies("int4")
    monkeypatch.setattr(copies, "free_bytes", lambda device: made)
    monkeypatch.setattr(copies, "SCRATCH", made)  # for each weight of a map
    with pytest.raises(SettingsError, match=r"weights in int4 need .* use --draft-format stored"):
        runtime.copies.prepare(draft)
    monkeypatch.setattr(copies, "SCRATCH", 0)
    monkeypatch.setattr(copies, "free_bytes", lambda device: made // 8)
    with pytest.raises(SettingsError, match=r"weights in int4 need .* use --draft-format stored"):
        runtime.copies.prepare(draft)
    assert runtime.copies.n_bytes < made // 8
    monkeypatch.setattr(copies, "free_bytes", lambda device: 2 * made)
    runtime.copies.prepare(draft)
    assert runtime.copies.n_bytes == made


def test_copies_of_a_split_model_must_fit_on_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = quick_runtime("llama")
    for block in runtime.blocks:
        block.device = torch.device("cuda", int(block.index > 0))
    made_up_gpus(monkeypatch, 1 << 40, 0)
    with pytest.raises(SettingsError, match=r"but cuda:1 has 0\.0 GB free"):
        runtime.copies.prepare(LayerSet(N).filled("int4"))
    assert not runtime.copies.n_bytes


def test_memory_that_torch_has_cached_on_a_gpu_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is counted by GPU: on the second, 5 of torch's 9 bytes are in use."""
    made_up_gpus(monkeypatch, 100, 20)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: (0, 9)[device.index])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: (0, 5)[device.index])
    assert [buffer.free_bytes(torch.device("cuda", i)) for i in range(2)] == [100, 24]


def test_texts_of_a_split_model_fit_on_the_fullest_device(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = quick_runtime("llama")
    assert memory_for_texts(runtime) > 0
    for block, index in zip(runtime.blocks, (0, 0, 0, 1), strict=True):
        block.device = torch.device("cuda", index)
    for free, wanted in (((90, 60), 60), ((90, 20), 40)):  # three quarters lie on the first, one on the second
        made_up_gpus(monkeypatch, *free)
        assert memory_for_texts(runtime) == wanted


def test_memory_of_a_container_is_bounded_by_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(free_memory, "CONTAINER", tmp_path)
    whole = buffer.free_bytes(cpu)
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 700\n")
    assert buffer.free_bytes(cpu) == 2700
    (tmp_path / "memory.max").write_text("max\n")
    assert buffer.free_bytes(cpu) > 0.5 * whole
