"""Compiles every Triton kernel for GPUs that are not there, at the shapes of a 13B model.

What Triton's interpreter runs need not compile. Prints what each kernel needs, a line of JSON each; to be run without
TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from swiftopt.models.kernels import (
    device,
    device_attention,
    device_codes,
    device_convolutions,
    device_experts,
    device_states,
    layout,
)
from swiftopt.models.state_rules import DeltaRule, StateForm, StateSpace, ValueSteps

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
ARCHES = (80, 90)  # A100; H100 and H200
NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}
HIDDEN, HEADS, WIDTH, ROWS = 5120, 40, 128, 16
# Codes of files: bits, inputs that share a scale, types of scales and of codes, and bytes that the scales of 16 outputs
# and 256 inputs take.
STORED = {
    "Q4_0": (4, 32, layout.CENTRED, layout.NUMBERS, 256),
    "Q5_1": (5, 32, layout.PAIRS, layout.NUMBERS, 512),
    "Q8_0": (8, 32, layout.CENTRED, layout.NUMBERS, 256),
    "Q2_K": (4, 16, layout.SUPER_PAIRS, layout.NUMBERS, 576),
    "Q4_K": (4, 32, layout.SUPER_PAIRS, layout.NUMBERS, 320),
    "Q5_K": (5, 32, layout.SUPER_PAIRS, layout.NUMBERS, 320),
    "Q6_K": (6, 16, layout.SUPER_CENTRED, layout.NUMBERS, 288),
    "IQ4_XS": (4, 32, layout.SUPER_CENTRED, layout.IQ4, 160),
    "MXFP4": (4, 32, layout.EXPONENTS, layout.E2M1, 128),
}


def name_of(value: Any) -> str:
    """Return the type of an argument as Triton calls it."""
    if isinstance(value, Tensor):
        return f"*{NAMES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


def compiled(
    kernel: JITFunction[Any],
    *args: Any,
    grid: Any,
    warmup: bool,
    num_stages: int = 3,
    num_warps: int = 4,
    **constants: Any,
) -> None:
    """Compile in place of a launch."""
    given = dict(zip(kernel.arg_names, args, strict=False))
    signature = {name: "constexpr" if name in constants else name_of(given[name]) for name in kernel.arg_names}
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if isinstance(value := given.get(name), Tensor)
        or (isinstance(value, int) and name != "layer" and value % 16 == 0)
    }
    for arch in ARCHES:
        if arch < 89 and "*fp8e4nv" in signature.values():  # which those GPUs do not read
            continue
        source = ASTSource(kernel, signature=signature, constexprs=fixed, attrs=aligned)
        made = triton.compile(
            source, target=GPUTarget("cuda", arch, 32), options={"num_stages": num_stages, "num_warps": num_warps}
        )
        ptx = made.asm["ptx"]
        with NamedTemporaryFile(suffix=".cubin") as file:
            file.write(made.asm["cubin"])
            file.flush()
            told = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)
        registers, stack = (int(re.search(rf"{word}:(\d+)", told.stdout)[1]) for word in ("REG", "STACK"))
        line = {
            "kernel": kernel.__name__,
            "arch": arch,
            "dtype": signature[kernel.arg_names[0]],
            "registers": registers,
            "stack_bytes": stack,
            "shared_bytes": made.metadata.shared,
            "wide_loads": ptx.count("ld.global.v4") + ptx.count("cp.async.cg.shared.global"),
            "tensor_cores": "mma.sync" in ptx or "wgmma" in ptx,
            "by_warp_groups": "wgmma" in ptx,
        }
        print(json.dumps(line))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a tensor of a shape and nothing in it."""
    return torch.empty(shape, dtype=dtype, device="meta")


def stored_map(
    n_out: int, n_in: int, bits: int, group: int, scale_type: int, table: int, scale_bytes: int, *experts: int
) -> device_codes.CodedMap:
    """Describe a map by codes of a file, or those of some experts."""
    codes = meta(*experts, n_out // 16, n_in * 2 * bits, dtype=torch.uint8)
    scales = meta(*experts, n_out // 16, n_in // 256 * scale_bytes, dtype=torch.uint8)
    return device_codes.CodedMap(codes, scales, bits, group, n_out, scale_type, table)


def main() -> None:
    """Call every function of the kernels once for each dtype."""
    JITFunction.run = compiled
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = meta(ROWS, HIDDEN, dtype=dtype)
        device.linear(x, meta(HIDDEN, HIDDEN, dtype=dtype))
        device.linear(x, meta(32016, HIDDEN, dtype=dtype), meta(32016, dtype=dtype))
        device.linear(x, meta(32016, HIDDEN, dtype=dtype))  # in one part, written in its own type
        scales = meta(HIDDEN, dtype=torch.float32)
        device.linear(x, meta(HIDDEN, HIDDEN, dtype=torch.float8_e4m3fn), scales=scales)
        for bits in (4, 8):
            codes = meta(HIDDEN // 16, HIDDEN * 16 * bits // 8, dtype=torch.uint8)
            for group in (128, 64, 32):
                scales = meta(HIDDEN // 16, HIDDEN // group, 2, 16, dtype=torch.float16)
                kind = layout.ZERO_CODES_F16 if bits == 4 else layout.ZERO_VALUES
                device_codes.coded_linear(x, device_codes.CodedMap(codes, scales, bits, group, HIDDEN, kind))
        for stored in STORED.values():
            device_codes.coded_linear(x, stored_map(HIDDEN, HIDDEN, *stored))
        device.linear(meta(2 * ROWS, HIDDEN, dtype=dtype), meta(HIDDEN, HIDDEN, dtype=dtype))  # a wider tile
        device.norm(x, meta(HIDDEN, dtype=dtype), None, 1e-5, False, False)
        device.added_norm(x, x, meta(HIDDEN, dtype=dtype), None, 1e-5, False, False)
        for width, gate_first in ((WIDTH, False), (HIDDEN, True)):  # a head's, and a group's of Mamba-2
            device.gated_norm(x, x, meta(HIDDEN, dtype=dtype), 1e-5, width, gate_first)
        for activation in (device.SILU, device.GELU_TANH):
            device.gated(meta(ROWS, 2 * HIDDEN, dtype=dtype), activation)
        table = meta(5 + 6 + 64, ROWS, dtype=torch.int64)
        for width in (WIDTH, 2 * WIDTH):  # Gemma's heads are twice as wide
            query, key = meta(ROWS, HEADS, width, dtype=dtype), meta(ROWS, 8, width, dtype=dtype)
            device_attention.store(query, key, key, table, (meta(4096, width, dtype=dtype),) * 2, 3, 40)
            for n_slots in (device_attention.SPLIT, 2048):  # of one split, and of several
                for softcap, sinks in ((None, None), (50.0, None), (None, meta(HEADS, dtype=dtype))):
                    device_attention.attend(query, table, 5, ROWS, n_slots, 3, 40, 8, width**-0.5, softcap, sinks)
        compile_experts(dtype)
        compile_convolutions(dtype)
        compile_states(dtype)


def compile_convolutions(dtype: torch.dtype) -> None:
    """Compile LFM2's convolution, at the shape of LFM2 2.6B, and with a bias."""
    table = meta(ROWS, 1 + 3, dtype=torch.int64)
    for has_bias in (False, True):
        conv = torch.nn.Conv1d(2048, 2048, 3, groups=2048, bias=has_bias, dtype=dtype, device="meta")
        slots = meta(4096, 2048, dtype=dtype)
        device_convolutions.gated_convolution(meta(ROWS, 3 * 2048, dtype=dtype), slots, table, conv)


def compile_states(dtype: torch.dtype) -> None:
    """Compile what takes rows into states, at the shapes of Qwen3.5 2B and of Granite 4 H 1B."""
    no_order = meta(0, dtype=torch.int64)
    for form in (StateForm(16, 16, 128, 128, 4), StateForm(48, 1, 128, 64, 4, 1)):
        taps, of_heads = meta(form.n_convolved, form.n_taps, dtype=dtype), meta(form.n_heads, dtype=dtype)
        numbers = of_heads, of_heads, no_order, no_order, form.value_width
        delta, space = DeltaRule(form, taps, None, *numbers), StateSpace(form, taps, taps[:, 0], *numbers, of_heads)
        state = meta(form.n_heads, form.key_width, form.value_width, dtype=torch.float32)
        new, ring = (meta(n, form.n_inputs, dtype=dtype) for n in (ROWS, 2 * ROWS))
        table = meta(ROWS, device_states.FIELDS + form.n_taps, dtype=torch.int32)
        device_states.take(state, state, delta if form.n_numbers == 2 else space, new, ring, table, new)
    compile_value_steps(dtype)


def compile_value_steps(dtype: torch.dtype) -> None:
    """Compile what takes rows into states whose values have steps of their own, at the shape of Jamba 3B."""
    form, no_order = StateForm(40, 1, 16, 128, 4, 0, convolves_keys=0, n_low=160), meta(0, dtype=torch.int64)
    taps, by_value = meta(form.n_convolved, form.n_taps, dtype=dtype), meta(40, 128, dtype=dtype)
    steps = torch.nn.Linear(form.n_low, form.n_convolved, bias=False, dtype=dtype, device="meta")
    numbers = meta(40, 16, 128, dtype=dtype), by_value, no_order, no_order, form.value_width, by_value
    rule = ValueSteps(form, taps, taps[:, 0], *numbers, None, (None,) * 3, steps)
    state = meta(40, 16, 128, dtype=torch.float32)
    new, ring = (meta(n, form.n_inputs, dtype=dtype) for n in (ROWS, 2 * ROWS))
    table = meta(ROWS, device_states.FIELDS + form.n_taps, dtype=torch.int32)
    convolved = device_states.convolved(new[:, : form.n_convolved], ring, rule, table, ROWS)
    device_states.take(state, state, rule, new, ring, table, convolved)


def compile_experts(dtype: torch.dtype) -> None:
    """Compile what a mixture takes, at the shape of Qwen3-30B-A3B, and with gpt-oss's gates and biases."""
    x, taken = meta(ROWS, 2048, dtype=dtype), meta(ROWS, 8, dtype=torch.int32)
    for scores in range(len(layout.SCORES)):
        n_best = 1 + scores % 2  # Experts whose scores a group is chosen by.
        routing = layout.Routing(128, 8, 8, 4 if scores else 8, scores, 1, n_best, 1e-20, 1.0, 0.01)
        logits, correction = meta(ROWS, 128, dtype=torch.float32), meta(128, dtype=torch.float32)
        device_experts.choose(logits, correction if scores else None, routing)
    shared = device_experts.shared_out(taken, 128)
    for biases in ((None, None), (meta(128, 1536, dtype=dtype), meta(128, 2048, dtype=dtype))):
        both = device_experts.expert_linear(x, meta(128, 1536, 2048, dtype=dtype), biases[0], taken, *shared)
        inner = device.gated(both, device.CLAMPED, by_turns=True, limit=7.0, slope=1.7)
        weights = meta(ROWS, 8, dtype=torch.float32)
        device_experts.mixed(inner, meta(128, 2048, 768, dtype=dtype), biases[1], taken, weights, *shared)
    for bits in (4, 8):
        codes = meta(128, 48, 2048 * 16 * bits // 8, dtype=torch.uint8)
        scales = meta(128, 48, 16, 2, 16, dtype=torch.float16)
        by = device_codes.CodedMap(codes, scales, bits, 128, 768, layout.ZERO_CODES_F16)
        device_experts.expert_linear(x, by, None, taken, *shared)
    for name in ("Q4_K", "Q6_K", "MXFP4"):
        device_experts.expert_linear(x, stored_map(768, 2048, *STORED[name], 128), None, taken, *shared)


main()
