"""Launches of Triton kernels: their number per layer and their device; all compile without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from families import tiny_runtime
from on_device import here
from torch.utils._python_dispatch import TorchDispatchMode

from swiftopt.models.fused import fuse
from swiftopt.models.rows import Pass, Rows
from swiftopt.models.state_rules import DeltaRule, StateForm

pytest.importorskip("triton")
from triton.runtime.jit import KernelInterface

from swiftopt.models.kernels import (
    device,
    device_attention,
    device_codes,
    device_convolutions,
    device_experts,
    device_states,
    layout,
)

# Functions in Triton that no program of ours launches.
CALLED_BY_KERNELS = {
    *("_best", "_scales", "_doubled", "_iq4", "_softplus"),
    *("sigmoid", "silu_of_sum", "of_token", "sum_of_taps"),
}


class Operations(TorchDispatchMode):
    """Records the names of torch's operations that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not func.name().startswith(("aten::empty", "aten::_unsafe_view")):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_layer_is_four_maps_and_five_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted as the kernels and operations in a pass of three layers minus those of two."""
    launched = list[str]()
    for name, owner in kernels_by_module().items():
        note = partial(lambda name, *_, **__: launched.append(name), name)
        monkeypatch.setattr(owner, name, defaultdict(lambda note=note: note))
    counts = []
    for n_layers in (2, 3):
        runtime = here(tiny_runtime("llama", torch.float32, num_hidden_layers=n_layers))
        fuse(runtime)
        runtime.by_table = True
        passes = [Pass(runtime, Rows([3], 5), runtime.new_buffer(16)) for _ in range(2)]
        launched.clear()
        with Operations() as operations:
            runtime.forward_together(passes)
        counts.append(Counter([*launched, *operations.names]))
    assert counts[1] - counts[0] == Counter(_norm=2, _store=1, _attend=1, _gated=1) + Counter({"aten::linear": 4})


def kernels_by_module() -> dict[str, Any]:
    """Return the name of every Triton kernel with its module."""
    modules = (device, device_attention, device_codes, device_convolutions, device_experts, device_states)
    kernels = {name: of for of in modules for name, each in vars(of).items() if isinstance(each, KernelInterface)}
    return {name: of for name, of in kernels.items() if name not in CALLED_BY_KERNELS}


class Guard:
    """Stands in for `torch.cuda.device_of`, and records the tensors whose device is current."""

    current: ClassVar[list[torch.Tensor]] = []

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __enter__(self) -> None:
        self.current.append(self.tensor)

    def __exit__(self, *_: object) -> None:
        self.current.pop()


def test_every_kernel_is_launched_where_its_tensors_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors have no data, and the kernels record the current tensor's device."""
    launched = dict[str, torch.Tensor]()
    kernels = kernels_by_module()
    for name, owner in kernels.items():
        note = partial(lambda name, *_, **__: launched.update({name: Guard.current[-1]}), name)
        monkeypatch.setattr(owner, name, defaultdict(lambda note=note: note))
    monkeypatch.setattr(torch.cuda, "device_of", Guard)
    with torch.device("meta"):
        x, weight, table = torch.empty(2, 64), torch.empty(64, 64), torch.empty(30, 2, dtype=torch.int64)
        codes, scales = torch.empty(4, 512, dtype=torch.uint8), torch.empty(4, 2, 2, 16)
        heads, taken = torch.empty(2, 4, 16), torch.empty(2, 2, dtype=torch.int32)
        maps = torch.empty(6, 64, 64)
        state, moves = torch.empty(2, 8, 4), torch.empty(3, 5, dtype=torch.int32)
        form = StateForm(2, 1, 8, 4, 2)
        delta = DeltaRule(form, torch.empty(24, 2), None, x[0, :2], x[0, :2], x, x, 4)
    device.linear(x, weight, weight[0])
    assert set(launched) == {"_dense", "_joined"} and all(each is x for each in launched.values())
    device_codes.coded_linear(x, device_codes.CodedMap(codes, scales, 4, 32, 64, layout.ZERO_CODES_F32))
    device.norm(x, weight[0], None, 1e-6, False, False)
    device_attention.store(heads, heads, heads, table, (heads[0], heads[0]), 0, 1)
    device_attention.attend(heads, table, 5, 1, device_attention.SPLIT + 1, 0, 1, 4, 1.0)
    device.gated(x, device.SILU)
    device.gated_norm(x, x, weight[0], 1e-6, 16, False)
    device_experts.choose(x, None, layout.Routing(n_experts=64, n_chosen=2, n_groups=1, n_groups_chosen=1))
    shared = device_experts.shared_out(taken, 6)
    assert device_experts.expert_linear(x, maps, None, taken, *shared).shape == (4, 64)
    device_experts.mixed(heads.view(4, -1)[:, :64], maps, None, taken, x, *shared)
    device_states.take(state, state, delta, x, x, moves, x)
    assert device_states.convolved(x[:, :24], x, delta, moves, 3).shape == (3, 24)
    with torch.device("meta"):
        conv = torch.nn.Conv1d(21, 21, 3, groups=21)
    projected = weight[:2, :63]
    device_convolutions.gated_convolution(projected, weight[:, :21], table, conv)
    assert launched.pop("_gated_convolution") is projected and kernels.pop("_gated_convolution")
    assert set(launched) == set(kernels) and not Guard.current
    assert launched["_chosen"] is x and launched["_shared_out"] is taken
    assert launched["_joined"] is launched["_coded"] is launched["_norm"] is launched["_gated"] is x
    assert launched["_gated_norm"] is x
    assert launched["_updates"] is launched["_taken"] is state
    assert launched["_store"] is launched["_attend"] is launched["_merge"] is heads


@pytest.mark.slow
@pytest.mark.timeout(900)  # One thread compiles some hundreds of variants, for minutes on a slow machine.
def test_every_kernel_compiles_for_gpus_that_are_not_there_and_spills_nothing() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).parents[1] / "compile_kernels.py"],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = [json.loads(line) for line in done.stdout.splitlines()]
    kernels = kernels_by_module()
    assert {(one["kernel"], one["arch"]) for one in made} == {(name, arch) for name in kernels for arch in (80, 90)}
    assert all(one["shared_bytes"] <= 99 * 1024 for one in made)  # which any GPU since 2020 has
    halves = [one for one in made if one["dtype"] in ("*bf16", "*fp16")]
    maps = [one for one in made if one["kernel"] in ("_dense", "_coded")]
    # Tiles of 16 and of 32 rows sum a row in one order, by the same instruction.
    assert not any(one["by_warp_groups"] for one in maps)
    assert halves and all(one["stack_bytes"] == 0 for one in halves)
    attention = [one for one in halves if one["kernel"] == "_attend"]
    assert attention and all(one["tensor_cores"] and one["wide_loads"] >= 16 for one in attention)


def test_models_load_where_triton_is_not_installed() -> None:
    code = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "triton" else find_spec(name, *more)
sys.modules["triton"] = None
import swiftopt.models.loading
import swiftopt.models.kernels.device_experts
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
