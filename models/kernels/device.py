"""Our kernels for CUDA devices, in Triton: linear maps and norms in which rows do not affect each other.

Torch's kernels choose the order of a sum by the number of rows, so a token that is verified among others may get other
bits than alone. Our kernels sum each row in an order that depends only on the shapes of weights and on the length of
the row's text: products use tiles of `TILE` rows whatever their number, and attention (`device_attention.py`) takes
`SPLIT` slots at a time. So a pass over several rows gives the same bits as one pass for each row.

Linear maps with quantised weights are in `device_codes.py`. The maps of experts use the same products
(`device_experts.py`).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PLACES = ("cuda",)  # Types of devices that the kernels run on.
TILE = 16  # Rows per tile of a product: the minimum for tensor cores.
# Rows per tile of a map over more than `TILE` rows. Tiles of 64 rows would use an instruction that sums in another
# order.
WIDE_TILE = 32
SILU, GELU_TANH, CLAMPED = range(3)  # Activations of a gate.
GATED = 1024  # Gated outputs per Triton program.
OUTPUTS, INPUTS = 64, 128  # Tile of a weight that a Triton program reads per step.
PROGRAMS = 200  # Split a map's inputs to get at least this many Triton programs: an H200 has 132 multiprocessors.
CONVERTING = 800  # The same minimum for weights that are converted to the inputs' type, such as fp8.
MOST_PARTS = 16  # Most partial sums that a map's inputs are split into.
Others = ParamSpec("Others")
Found = TypeVar("Found")

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    @triton.jit
    def sigmoid(x):
        small = tl.exp(-tl.abs(x))  # An exponential of a positive number could overflow.
        return tl.where(x >= 0.0, 1.0, small) / (1.0 + small)

    @triton.jit(do_not_specialize=["n_rows", "n_tiles"])
    def _dense(
        x, weight, out, order, tiles, n_tiles, n_rows, n_in, n_out, x_stride, w_stride, w_step, expert_stride,
        TAKEN: tl.constexpr, ROWS_: tl.constexpr, OUTPUTS: tl.constexpr, READ: tl.constexpr, STEPS: tl.constexpr,
    ):  # fmt: skip
        # Programs that differ only in their rows run one after the other, so the weight is in the cache for the others.
        rows = tl.program_id(0) * ROWS_ + tl.arange(0, ROWS_)
        is_row, read_rows = rows < n_rows, rows
        if TAKEN:  # A tile has rows of one expert. Each row of `x` has TAKEN rows in `out`.
            tile = tl.program_id(0)
            count = tl.load(tiles + 2 * n_tiles + tile)
            if count <= 0:
                return
            is_row = tl.arange(0, ROWS_) < count
            places = tl.load(tiles + n_tiles + tile) + tl.arange(0, ROWS_)
            rows = tl.load(order + places, mask=is_row, other=0)
            read_rows = rows // TAKEN
            weight += tl.load(tiles + tile).to(tl.int64) * expert_stride
        outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
        first = tl.program_id(2) * (STEPS * READ)
        line = weight + outputs.to(tl.int64) * w_stride
        total = tl.zeros((ROWS_, OUTPUTS), dtype=tl.float32)
        for step in range(STEPS):
            inputs = first + step * READ + tl.arange(0, READ)
            x_part = tl.load(
                x + read_rows[:, None] * x_stride + inputs[None, :],
                mask=is_row[:, None] & (inputs < n_in)[None, :],
                other=0.0,
            )
            read = tl.load(
                line[None, :] + inputs[:, None] * w_step,
                mask=(outputs < n_out)[None, :] & (inputs < n_in)[:, None],
                other=0.0,
            ).to(x_part.dtype)
            total = tl.dot(x_part, read, total, input_precision="ieee")
        at = tl.program_id(2).to(tl.int64) * n_rows * n_out + rows[:, None] * n_out + outputs[None, :]
        tl.store(out + at, total, mask=is_row[:, None] & (outputs < n_out)[None, :])

    @triton.jit
    def _joined(
        parts, scales, bias, experts, out, n_rows, n_out,
        N_PARTS: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr, BY_EXPERT: tl.constexpr,
        OUTPUTS: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(1)
        outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        mask = outputs < n_out
        total = tl.zeros((OUTPUTS,), dtype=tl.float32)
        for part in tl.static_range(N_PARTS):
            total += tl.load(parts + (part * n_rows + row).to(tl.int64) * n_out + outputs, mask=mask, other=0.0)
        if HAS_SCALES:
            total *= tl.load(scales + outputs, mask=mask, other=0.0)
        if BY_EXPERT:
            bias += tl.load(experts + row) * n_out
        if HAS_BIAS:
            total += tl.load(bias + outputs, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + row.to(tl.int64) * n_out + outputs, total.to(out.dtype.element_ty), mask=mask)

    @triton.jit
    def _norm(
        x, added, weight, bias, total, out, n, eps, CENTRED: tl.constexpr, PLUS_ONE: tl.constexpr,
        WIDE: tl.constexpr, HAS_BIAS: tl.constexpr, IS_ADDED: tl.constexpr, WIDTH: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, WIDTH)
        mask = at < n
        x_row = tl.load(x + row * n + at, mask=mask, other=0.0).to(tl.float32)
        if IS_ADDED:
            read = x_row + tl.load(added + row * n + at, mask=mask, other=0.0).to(tl.float32)
            read = read.to(total.dtype.element_ty)
            tl.store(total + row * n + at, read, mask=mask)
            x_row = read.to(tl.float32)
        if CENTRED:
            x_row = tl.where(mask, x_row - tl.sum(x_row, axis=0) / n, 0.0)
        x_row = x_row * tl.rsqrt(tl.sum(x_row * x_row, axis=0) / n + eps)
        scale = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
        if PLUS_ONE:
            x_row = x_row * (1.0 + scale)
        elif CENTRED or WIDE:
            x_row = x_row * scale
        else:  # Like Llama's RMSNorm, round to the output type before multiplying by the weight.
            x_row = x_row.to(out.dtype.element_ty).to(tl.float32) * scale
        if HAS_BIAS:
            x_row += tl.load(bias + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + row * n + at, x_row.to(out.dtype.element_ty), mask=mask)

    @triton.jit
    def _gated_norm(
        x, gates, weight, out, n, n_groups, eps, GATE_FIRST: tl.constexpr, WIDTH: tl.constexpr
    ):  # fmt: skip
        group = tl.program_id(0).to(tl.int64)
        lane = tl.arange(0, WIDTH)
        mask = lane < n
        values = tl.load(x + group * n + lane, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gates + group * n + lane, mask=mask, other=0.0).to(tl.float32)
        gate = gate * sigmoid(gate)
        scale = tl.load(weight + (group % n_groups) * n + lane, mask=mask, other=0.0).to(tl.float32)
        if GATE_FIRST:
            values = values * gate
        values = values * tl.rsqrt(tl.sum(values * values, axis=0) / n + eps)
        # The models round to their dtype before they multiply by the weight.
        values = values.to(out.dtype.element_ty).to(tl.float32) * scale
        if GATE_FIRST == 0:
            values = values * gate
        tl.store(out + group * n + lane, values.to(out.dtype.element_ty), mask=mask)

    @triton.jit
    def _gated(
        x, out, n, limit, slope, ACTIVATION: tl.constexpr, BY_TURNS: tl.constexpr, WIDTH: tl.constexpr
    ):  # fmt: skip
        row = tl.program_id(1).to(tl.int64)
        at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
        mask = at < n
        gates, ups = (2 * at, 2 * at + 1) if BY_TURNS else (at, n + at)
        gate = tl.load(x + row * 2 * n + gates, mask=mask, other=0.0)
        up = tl.load(x + row * 2 * n + ups, mask=mask, other=0.0).to(tl.float32)
        wide = gate.to(tl.float32)
        z = wide
        if ACTIVATION == 1:  # The tanh of GELU is written as a sigmoid: (1 + tanh(z / 2)) / 2 = sigmoid(z).
            z = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
        if ACTIVATION == 2:
            wide = tl.minimum(wide, limit)
            z = slope * wide
            up = 1.0 + tl.minimum(tl.maximum(up, -limit), limit)
        small = tl.exp(-tl.abs(z))  # The exponential of a positive number could overflow.
        wide = wide * tl.where(z >= 0.0, 1.0, small) / (1.0 + small)
        # Torch stores the activation before it multiplies, so it is rounded here, too.
        tl.store(out + row * n + at, (wide.to(gate.dtype).to(tl.float32) * up).to(gate.dtype), mask=mask)


def runs(x: Tensor) -> bool:
    """Tell whether the kernels compute with tensors such as this one."""
    return x.device.type in PLACES and x.dtype in DTYPES and obstacle() is None


@cache
def obstacle() -> str | None:
    """Return why the kernels cannot run on this machine, in words; None: they can.

    When a kernel first runs, Triton compiles its launcher, an extension module of Python in C. It uses the compiler
    that CC names, or else gcc or clang.
    """
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        names = " or ".join(compilers)
        return f"Triton finds no C compiler, {names}, which it starts kernels with: install gcc, or name one by CC"
    header = Path(sysconfig.get_paths(_scheme())["include"]) / "Python.h"
    if not header.is_file():
        return f"Triton starts kernels with a module that includes {header}, which is missing: install python3-dev"
    return None


def _scheme() -> str:
    """Return sysconfig's scheme for the folder of Python's headers, as Triton chooses it."""
    scheme = sysconfig.get_default_scheme()
    return "posix_prefix" if scheme == "posix_local" else scheme


def on_its_device(
    function: Callable[Concatenate[Tensor, Others], Found],
) -> Callable[Concatenate[Tensor, Others], Found]:
    """Launch a function's kernels on the device of its first tensor.

    By default Triton launches kernels on the thread's current device.
    """

    @wraps(function)
    def launched(x: Tensor, /, *args: Others.args, **kwargs: Others.kwargs) -> Found:
        with torch.cuda.device_of(x):
            return function(x, *args, **kwargs)

    return launched


def split_inputs(n_out: int, outputs: int, n_in: int, read: int, programs: int) -> tuple[int, int]:
    """Return the steps of `read` inputs per partial sum, and the number of partial sums, from the weight's shape alone.

    Args: outputs, read: tile of the weight per step. programs: the least number of Triton programs.
    """
    n_parts = min(MOST_PARTS, -(-programs // -(-n_out // outputs)), -(-n_in // read))
    steps = -(-n_in // (n_parts * read))
    return steps, -(-n_in // (steps * read))


def sum_parts(
    parts: Tensor, scales: Tensor | None, bias: Tensor | None, dtype: torch.dtype, experts: Tensor | None = None
) -> Tensor:
    """Add up partial sums (parts, rows, out), multiply by scales (out,), and add a bias (out,); return (rows, out).

    Args: experts: the expert of each row, int32 (rows,); the bias is then (experts, out).
    """
    n_parts, n_rows, n_out = parts.shape
    out = torch.empty((n_rows, n_out), dtype=dtype, device=parts.device)
    # `out` stands for tensors that are missing: Triton needs an address.
    scales_at, bias_at, experts_at = (out if tensor is None else tensor for tensor in (scales, bias, experts))
    _joined[(-(-n_out // 256), n_rows)](
        parts, scales_at, bias_at, experts_at, out, n_rows, n_out, N_PARTS=n_parts, HAS_SCALES=scales is not None,
        HAS_BIAS=bias is not None, BY_EXPERT=bias is not None and experts is not None, OUTPUTS=256,
    )  # fmt: skip
    return out


@on_its_device
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Apply a linear map to `x` (rows, in), summing in float32; return (rows, out).

    Args: weight: (out, in) with any strides, in the dtype of `x` or in float8_e4m3fn. bias: (out,). scales: float32
          (out,), factors of the outputs. dtype: of the result (None: that of `x`).
    """
    x = x.contiguous()
    (n_rows, n_in), n_out = x.shape, weight.shape[0]
    tile = TILE if n_rows <= TILE else WIDE_TILE
    is_converted = weight.dtype != x.dtype
    steps, n_parts = split_inputs(n_out, OUTPUTS, n_in, INPUTS, CONVERTING if is_converted else PROGRAMS)
    whole, dtype = n_parts == 1 and bias is None and scales is None, dtype or x.dtype
    parts = torch.empty((n_parts, n_rows, n_out), dtype=dtype if whole else torch.float32, device=x.device)
    _dense[(-(-n_rows // tile), -(-n_out // OUTPUTS), n_parts)](
        x, weight, parts, x, x, 0, n_rows, n_in, n_out, x.stride(0), *weight.stride(), 0,
        TAKEN=0, ROWS_=tile, OUTPUTS=OUTPUTS, READ=INPUTS, STEPS=steps,
        num_warps=8 if is_converted or tile > TILE else 4,
    )  # fmt: skip
    return parts[0] if whole else sum_parts(parts, scales, bias, dtype)


@on_its_device
def expert_parts(
    x: Tensor, weight: Tensor, order: Tensor, tiles: Tensor, n_chosen: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Apply the maps of experts, (experts, out, in) with any strides; return partial sums (parts, choices, out).

    A choice is a row with one of its experts. An expert's weight is read once for all rows that take it, and not at
    all if no row does.

    Args: x: (rows, in) or (choices, in). order, tiles: as `device_experts.shared_out` returns them. n_chosen: experts
          that a row takes. dtype: of the sums if there is one part; several parts are float32.
    """
    x = x.contiguous()
    (n_rows, n_in), n_out, n_choices = x.shape, weight.shape[1], len(order)
    # At least n_chosen weights are read, so each needs fewer programs. The number must not depend on other rows.
    steps, n_parts = split_inputs(n_out, OUTPUTS, n_in, INPUTS, -(-PROGRAMS // n_chosen))
    parts = torch.empty((n_parts, n_choices, n_out), dtype=dtype if n_parts == 1 else torch.float32, device=x.device)
    _dense[(tiles.shape[1], -(-n_out // OUTPUTS), n_parts)](
        x, weight, parts, order, tiles, tiles.shape[1], n_choices, n_in, n_out, x.stride(0), *weight.stride()[1:],
        weight.stride(0), TAKEN=n_choices // n_rows, ROWS_=TILE, OUTPUTS=OUTPUTS, READ=INPUTS, STEPS=steps, num_warps=8,
    )  # fmt: skip
    return parts


@on_its_device
def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool, plus_one: bool, wide: bool = False
) -> Tensor:
    """Return a norm over the last dimension of `x` (…, n): LayerNorm if `centred`, else an RMS norm.

    Args: plus_one: the factor is 1 + weight (Gemma). wide: an RMS norm is rounded only after the weight (OLMo 2).
    """
    return _normed(x.contiguous(), None, weight, bias, eps, centred, plus_one, wide)[1]


@on_its_device
def added_norm(
    x: Tensor, added: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool, plus_one: bool,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return x + added, rounded to the dtype of `x`, and the norm of that sum; see `norm`."""
    return _normed(x.contiguous(), added.contiguous(), weight, bias, eps, centred, plus_one, wide)


def _normed(
    x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centred: bool, plus_one: bool,
    wide: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    n, out = x.shape[-1], torch.empty_like(x)
    total = x if added is None else torch.empty_like(x)
    _norm[(x.numel() // n,)](
        x, x if added is None else added, weight, weight if bias is None else bias, total, out, n, eps,
        CENTRED=centred, PLUS_ONE=plus_one, WIDE=wide, HAS_BIAS=bias is not None, IS_ADDED=added is not None,
        WIDTH=triton.next_power_of_2(n),
    )  # fmt: skip
    return total, out


@on_its_device
def gated_norm(x: Tensor, gates: Tensor, weight: Tensor, eps: float, width: int, gate_first: bool) -> Tensor:
    """Return RMS norms over each `width` values of `x` (…, n), gated by silu(gates) (…, n) before or after the norm.

    Args: weight: (n,), or (m,) of which n is a multiple.
    """
    x, gates = x.contiguous(), gates.contiguous()
    out = torch.empty_like(x)
    _gated_norm[(x.numel() // width,)](
        x, gates, weight, out, width, weight.numel() // width, eps, GATE_FIRST=gate_first,
        WIDTH=triton.next_power_of_2(width),
    )  # fmt: skip
    return out


@on_its_device
def gated(x: Tensor, activation: int, by_turns: bool = False, limit: float = 0.0, slope: float = 1.0) -> Tensor:
    """Return activation(gate) · up (…, n) of `x` (…, 2n), which has the gate and then up.

    Args: activation: `SILU`, `GELU_TANH`, or `CLAMPED`, gpt-oss's, with its `limit` and `slope`. by_turns: values of
          gate and up alternate in `x`.
    """
    x = x.contiguous()
    n = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    _gated[(-(-n // GATED), out.numel() // n)](
        x, out, n, limit, slope, ACTIVATION=activation, BY_TURNS=by_turns, WIDTH=GATED
    )
    return out
