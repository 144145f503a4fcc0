"""Measures what a model's parts cost on this machine, by timing whole passes rather than counting operations."""

from __future__ import annotations

import errno
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from statistics import median, quantiles
from time import perf_counter

import torch

from .. import __version__
from ..core.context_costs import SlotCopies
from ..core.costs import CostProfile, ExpertCosts, ExpertCounts, FormatCosts
from ..core.layer_sets import KINDS, LayerSet
from ..core.settings import STORED, cpu_words, measures_alone
from .buffer import KVBuffer, free_bytes
from .huge_pages import PAGES
from .measuring import MOST_SHARE, DisturbanceMeter, measuring_turn
from .mtp import MTP_COSTS, MtpRuntime, format_of_costs
from .rows import Pass, Rows
from .runtime import Runtime
from .saved import OnStep, no_step

WIDTHS = (1, 2, 4, 8, 16, 32, 64)  # Rows per measured target pass; widths that exceed the model's context are skipped.
MOST_ROWS = 4096  # The widest pass that is measured: 128 candidates of 32 tokens.
CHEAPER = 0.9  # Measure wider passes only while doubling the rows cuts the cost per row to this share or less.
DRAFT_WIDTHS = (1, 2, 4, 8, 16)  # Rows per measured pass of a quantised draft.
BUDGET_S = 4.0  # No repetition beyond the minimum number begins later than this many seconds.
REPEATS = (3, 15)  # Minimum and maximum number of repetitions of each pass.
EXPENSIVE = 2.2  # Passes that cost more than this many base passes are rarely chosen, so they are timed only twice.
AGAIN_S = 10.0  # A disturbed measurement is repeated for at most this many seconds.
SHORTEST_S = 0.5  # The system counts time in steps of 10 ms, which tell nothing of a shorter time.
MOST_SPREAD = 1.3  # Largest accepted ratio of the upper to the lower quartile of the base passes' times.
# A wider pass that takes less than this share of a narrower one's time shows that one of them was disturbed.
MOST_REVERSED = 0.93
# Largest accepted relative error of the predicted check pass, and of the parts' sum above the whole pass.
MOST_ERROR = 0.1
TOKEN_STEP = 89  # Between the token ids of neighbouring rows of a timed pass.
UNSEEN_ROWS = 4  # Rows of the pass that checks the fitted costs; half of its sub-layers are skipped.
RECORD_AT = 3  # Capture a shape's CUDA graph at its third use: most layer sets of a search run only once.
RECORDED_ROWS = 128  # Rows of the widest pass that is captured as a CUDA graph.
MEMORY_SHARE = 0.5  # Largest share of the free memory that keys and values may take.


def device_name(device: torch.device) -> str:
    """Return the hardware that a stored figure is valid for: the GPU, or the CPU and its number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = cpu_words("model name") or platform.processor() or platform.machine()
    return f"{name} ({torch.get_num_threads()} threads)"


def machine_name(runtime: Runtime) -> str:
    """Return the device's name and, unless it is eager, the runtime's speed mode: measured times depend on both."""
    name = device_name(runtime.device)
    if runtime.native is not None:
        return f"{name}, {runtime.native.level} kernels"
    return name if runtime.speed == "eager" else f"{name}, {runtime.speed}"


def software_of(runtime: Runtime) -> str:
    """Return the versions of the software that computes a runtime's passes: measured times depend on them."""
    kernels_version = f"swiftopt {__version__}" if runtime.native is None else runtime.native.library
    return f"torch {torch.__version__}, {kernels_version}"


@dataclass(frozen=True, slots=True)
class _Measurement:
    """Result of one measurement: context length, costs, seconds of the base pass, reasons to doubt it, and experts."""

    bucket: int
    costs: FormatCosts
    base_s: float
    doubts: tuple[str, ...]
    distinct: Mapping[int, float] = field(default_factory=dict)  # As in `ExpertCosts`.


def measure_costs(runtime: Runtime, bucket: int, on_step: OnStep = no_step) -> CostProfile:
    """Time passes of several widths and with sub-layers skipped, interleaved; `measure_format` does quantised ones.

    One process of a machine measures on a device at a time. A measurement that was disturbed is repeated, and where
    every one was, the profile's quality says so.
    """
    PAGES.finish(on_step)
    with measuring_turn(runtime.device, on_step):
        measured = _trusted(partial(_measured, runtime, bucket, WIDTHS, runtime.whole, on_step))
        costs = measured.costs
        pass_s = {n: measured.base_s * wider for n, wider in costs.wider.items()}
        meter, began = DisturbanceMeter(), perf_counter()
        pass_s |= _wider(runtime, measured.bucket, *max(pass_s.items()))
        tells = measures_alone() and perf_counter() - began > SHORTEST_S
        doubts = measured.doubts or (tuple(_doubts_of_machine(meter, ())) if tells else ())
    return CostProfile(
        fingerprint=runtime.info.fingerprint,
        device=machine_name(runtime),
        dtype=runtime.dtype_name,
        context_bucket=measured.bucket,
        n_layers=runtime.n_layers,
        attn_s=costs.attn_s,
        mlp_s=costs.mlp_s,
        head_s=costs.head_s,
        fixed_s=costs.fixed_s,
        pass_s=pass_s,
        software=software_of(runtime),
        quality="disturbed" if doubts else "quiet",
        remark="; ".join(doubts),
        experts=_experts_of(runtime, measured),
        absent=runtime.whole.absent or None,
    )


def _experts_of(runtime: Runtime, measured: _Measurement) -> ExpertCosts | None:
    mixtures = runtime.mixtures
    if mixtures is None:
        return None
    return ExpertCosts(
        n_experts=mixtures.n_experts,
        n_chosen=mixtures.n_chosen,
        layers=mixtures.layers,
        expert_s=measured.costs.expert_s,
        least=mixtures.least,
        distinct=measured.distinct,
    )


def _trusted(measure: Callable[[], _Measurement]) -> _Measurement:
    """Measure until nothing casts doubt on the result, for a bounded time; return that, or the least doubtful one.

    When several processes measure at the same time, there is no quiet moment to wait for: measure once.
    """
    until = perf_counter() + (AGAIN_S if measures_alone() else 0.0)
    best = measure()
    while best.doubts and perf_counter() < until:
        best = min(best, measure(), key=lambda each: len(each.doubts))
    return best


@torch.inference_mode()
def _wider(runtime: Runtime, bucket: int, n_rows: int, seconds: float) -> dict[int, float]:
    """Time passes over ever more rows, from one of `n_rows` on that takes `seconds`, while more make each row cheaper.

    A search scores as many candidates together as that pays for: on a GPU hundreds of rows cost little more than one.
    What does not fit in memory with the model is not measured, and so not scored together either.
    """
    by_rows: dict[int, float] = {}
    while 2 * n_rows <= min(MOST_ROWS, runtime.max_positions - bucket):
        before, n_rows = seconds, 2 * n_rows
        try:
            wide_s = _wide_s(runtime, bucket, n_rows)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            break
        seconds = by_rows[n_rows] = max(before, wide_s)
        # The narrowest pass that is too wide for a CUDA graph pays for its kernel launches, so its rows may cost more
        # than before. Still wider passes may be cheaper per row again.
        is_first_launched = runtime.graphs is not None and n_rows == 2 * RECORDED_ROWS
        if seconds > 2 * CHEAPER * before and not is_first_launched:
            break
    if runtime.device.type == "cuda":
        # Memory that torch keeps cached after wide passes would count as used when memory is planned.
        torch.cuda.empty_cache()
    return by_rows


def slot_copies(runtime: Runtime) -> SlotCopies | None:
    """Return what drafts made of the model read in its longest contexts in place of slots; None: the slots."""
    coding = None if runtime.native is None else runtime.native.slot_coding(runtime.max_positions)
    return None if coding is None else coding.copies


def _buffer_at(runtime: Runtime, bucket: int, n_rows: int) -> KVBuffer:
    """Return a buffer for passes of up to `n_rows` rows after `bucket` slots of zeros."""
    buffer = runtime.new_buffer(bucket + n_rows, n_rows)
    if buffer.states is not None:
        buffer.states.begin_at(bucket)
    return buffer


def _wide_s(runtime: Runtime, bucket: int, n_rows: int) -> float:
    run = _pass(runtime, _buffer_at(runtime, bucket, n_rows), bucket, n_rows, runtime.whole)
    _warm(run, runtime)
    return min(_seconds(run) for _ in range(2))


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether an error means that memory ran out: torch has an exception class for this only on GPUs."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def memory_for_texts(runtime: Runtime) -> int:
    """Return the bytes that keys and values may take: a share of the memory that is free on the layers' devices."""
    devices = [block.device for block in runtime.blocks]
    return int(MEMORY_SHARE * min(free_bytes(device) * len(devices) / devices.count(device) for device in set(devices)))


def measure_format(runtime: Runtime, profile: CostProfile, name: str, on_step: OnStep = no_step) -> CostProfile:
    """Add to a profile what attention, MLP and head cost in a format, timed together with the target's own pass.

    Or what the multi-token-prediction layer costs, by the name of its costs. Copies stay in the runtime's memory, for
    drafts.
    """
    if name.startswith(MTP_COSTS):
        measure = partial(_measured_mtp, runtime, profile.context_bucket, name, on_step)
    else:
        draft = runtime.whole.filled(name)
        runtime.copies.prepare(draft, on_step)
        measure = partial(_measured, runtime, profile.context_bucket, DRAFT_WIDTHS, draft, on_step)
    with measuring_turn(runtime.device, on_step):
        measured = _trusted(measure)
    # Rescale to the profile's base pass, which may have been timed on another day.
    scale = profile.target_pass_s(1) / measured.base_s
    profile = replace(profile, formats={**profile.formats, name: measured.costs.scaled(scale)})
    if not measured.doubts:
        return profile
    remark = "; ".join(filter(None, (profile.remark, f"{name}: {'; '.join(measured.doubts)}")))
    return replace(profile, quality="disturbed", remark=remark)


def with_formats(
    runtime: Runtime, profile: CostProfile, formats: Iterable[str], on_step: OnStep = no_step
) -> CostProfile:
    """Add to a profile the costs of those named formats that it lacks."""
    for name in sorted(set(formats) - {STORED} - set(profile.formats)):
        profile = measure_format(runtime, profile, name, on_step)
    return profile


@torch.inference_mode()
def _measured_mtp(runtime: Runtime, bucket: int, name: str, on_step: OnStep) -> _Measurement:
    """Time steps of the multi-token-prediction layer, over one row and over several, together with the base."""
    mtp = runtime.mtp
    assert isinstance(mtp, MtpRuntime)
    format_name = format_of_costs(name)
    mtp.prepare(format_name)
    widths = [n for n in DRAFT_WIDTHS if n < runtime.max_positions]
    bucket = min(bucket, runtime.max_positions - widths[-1])
    buffer = mtp.new_buffer(bucket + widths[-1])

    def step(n_rows: int) -> Callable[[], None]:
        tokens = [row * TOKEN_STEP % runtime.vocab_size for row in range(n_rows)]
        states = torch.zeros((n_rows, runtime.config.hidden_size), dtype=runtime.dtype, device=runtime.device)

        def run() -> None:
            pass_, out = mtp.pass_over(tokens, states, buffer, bucket, format_name)
            mtp.forward_together([pass_])[0].max(dim=-1).indices.tolist()
            mtp.normed(out[0][-1:])

        return run

    runs = {"target": _pass(runtime, runtime.new_buffer(bucket + 1), bucket, 1, runtime.whole)}
    runs |= {f"rows {n}": step(n) for n in widths}
    for run in runs.values():
        _warm(run, runtime)
    meter = DisturbanceMeter()
    seconds, bases = _beside("target", runs, on_step)
    one = seconds["rows 1"]
    wider = dict(zip(widths, accumulate((seconds[f"rows {n}"] / one for n in widths), max), strict=True))
    doubts = tuple(_doubts_of_machine(meter, bases)) if measures_alone() else ()
    return _Measurement(bucket, FormatCosts(0.0, 0.0, 0.0, one, wider), seconds["target"], doubts)


@torch.inference_mode()
def _measured(
    runtime: Runtime, bucket: int, widths: Sequence[int], layer_set: LayerSet, on_step: OnStep
) -> _Measurement:
    """Time passes with a layer set that skips nothing, together with one row's pass of the whole model, the base."""
    widths = [n for n in widths if n < runtime.max_positions]
    bucket = min(bucket, runtime.max_positions - widths[-1])
    buffer = _buffer_at(runtime, bucket, widths[-1])
    timed = partial(_pass, runtime, buffer, bucket)
    # Drafts read copies of the slots where decoding makes them.
    buffer.coding = None if runtime.native is None else runtime.native.slot_coding(buffer.capacity)
    reads_copies = buffer.code(bucket, at_once=True)
    timed_draft = partial(timed, reads_coded=reads_copies and not layer_set.is_whole)
    inner = frozenset(range(1, runtime.n_layers - 1))
    of_kind = {kind: [layer for layer in sorted(inner) if kind in runtime.blocks[layer].kinds] for kind in KINDS}
    unseen = replace(layer_set, skip_attn=frozenset(of_kind["attn"][::2]), skip_mlp=frozenset(of_kind["mlp"][1::2]))
    runs = {f"rows {n}": timed_draft(n, layer_set) for n in widths}
    # The cost of attention, of the MLPs or of the logits is the time that a pass saves by leaving them out.
    runs["no attention"] = timed_draft(1, replace(layer_set, skip_attn=inner))
    runs["no mlp"] = timed_draft(1, replace(layer_set, skip_mlp=inner))
    runs["no head"] = timed_draft(1, layer_set, wanted=())
    if reads_copies and layer_set.is_whole:
        # A draft that keeps the model's weights reads copies all the same.
        runs["no mlp, copies"] = timed(1, replace(layer_set, skip_mlp=inner), reads_coded=True)
    mixtures = runtime.mixtures
    n_experts_left = 0 if mixtures is None or mixtures.n_chosen // 2 < mixtures.least else mixtures.n_chosen // 2
    if n_experts_left:
        runs["fewer experts"] = timed_draft(1, replace(layer_set, experts=(("mlp", n_experts_left),)))
    if UNSEEN_ROWS in widths and len(inner) > 1:
        runs["unseen"] = timed_draft(UNSEEN_ROWS, unseen)
    base = "rows 1" if layer_set.is_whole else "target"
    runs = {base: timed(1, runtime.whole), **runs}
    taken: dict[str, ExpertCounts] = {}
    for name, run in runs.items():
        runtime.taken_experts()
        _warm(run, runtime)
        if (counts := runtime.taken_experts()) is not None:
            taken[name] = counts
    meter = DisturbanceMeter()
    seconds, bases = _beside(base, runs, on_step)
    one = seconds["rows 1"]
    attn = max(0.0, (one - seconds["no attention"]) / max(1, len(of_kind["attn"])))
    mlp = max(0.0, (one - seconds["no mlp"]) / max(1, len(of_kind["mlp"])))
    head = max(0.0, one - seconds["no head"])
    n_attn, n_mlp = (sum(kind in block.kinds for block in runtime.blocks) for kind in KINDS)
    rest = one - head - n_attn * attn - n_mlp * mlp
    # A wider pass cannot be cheaper than a narrower one: if measured so, the narrower one was disturbed. Take the
    # running maximum.
    wider = dict(zip(widths, accumulate((seconds[f"rows {n}"] / one for n in widths), max), strict=True))
    saved_s = max(0.0, seconds["no mlp"] - seconds.get("no mlp, copies", seconds["no mlp"]))
    costs = FormatCosts(max(0.0, attn - saved_s / max(1, n_attn)), mlp, head, max(0.0, rest), wider)
    if mixtures is not None and n_experts_left:
        n_dropped = len(mixtures.layers) * (mixtures.n_chosen - n_experts_left)
        costs = replace(costs, expert_s=max(0.0, (one - seconds["fewer experts"]) / n_dropped))
    distinct = {n: taken[f"rows {n}"].distinct for n in widths if f"rows {n}" in taken}
    doubts: list[str] = []
    if measures_alone():
        predicted = (one - len(unseen.skip_attn) * attn - len(unseen.skip_mlp) * mlp) * wider.get(UNSEEN_ROWS, 1.0)
        doubts += _doubts_of_machine(meter, bases)
        doubts += _doubts_of_passes({n: seconds[f"rows {n}"] for n in widths}, rest, predicted, seconds.get("unseen"))
    return _Measurement(bucket, costs, seconds[base], tuple(doubts), distinct)


def _doubts_of_machine(meter: DisturbanceMeter, bases: Sequence[float]) -> Iterator[str]:
    """Yield reasons to doubt a measurement because of other load on the machine."""
    disturbance = meter.read()
    if disturbance.share > MOST_SHARE:
        yield (
            f"other programs had {disturbance.share:.0%} of the processors' time, and swiftopt {disturbance.own:.0%}"
        )
    if len(bases) > 3:
        low, _, high = quantiles(bases, n=4)
        if high > MOST_SPREAD * low:
            yield f"the same pass took from {1000 * low:.1f} to {1000 * high:.1f} ms (quartiles)"


def _doubts_of_passes(rows: Mapping[int, float], rest: float, predicted: float, unseen: float | None) -> Iterator[str]:
    """Yield what cannot be true of raw seconds, before they are made monotonous or fitted.

    Args: rows: seconds by number of rows. rest: what no part accounts for. predicted, unseen: seconds of a pass that
          leaves out half of the sub-layers, by the fit and as measured.
    """
    for (narrow, fewer_s), (wide, more_s) in pairwise(rows.items()):
        if more_s < MOST_REVERSED * fewer_s:
            yield f"a pass over {wide} rows seemed faster than one over {narrow}"
    if rest < -MOST_ERROR * rows[1]:
        yield f"the parts of a pass took {1 - rest / rows[1]:.2f} times the whole"
    if unseen is not None and abs(predicted / unseen - 1) > MOST_ERROR:
        yield f"a pass that the fit has not seen took {unseen / predicted:.2f} times its prediction"


def _pass(
    runtime: Runtime,
    buffer: KVBuffer,
    first_slot: int,
    n_rows: int,
    layer_set: LayerSet,
    wanted: tuple[int, ...] | None = None,
    reads_coded: bool = False,
) -> Callable[[], None]:
    # Rows of a mixture take the experts of their tokens: the same token in all rows would make them seem cheap.
    tokens = [row * TOKEN_STEP % runtime.vocab_size for row in range(n_rows)]
    rows = Rows(tokens, first_slot, variants=() if layer_set.is_whole else (layer_set,))
    pass_ = Pass(runtime, rows, buffer, wanted, reads_coded=reads_coded)

    def run() -> None:
        (out,) = runtime.forward_together([pass_])
        # Read the result as part of the timed pass: on a GPU only this waits until the pass has finished.
        (out.max(dim=-1).indices if wanted is None else out.sum()).tolist()

    return run


def _warm(run: Callable[[], None], runtime: Runtime) -> None:
    """Warm up a pass: allocate memory, choose kernels and capture graphs."""
    for _ in range(1 if runtime.graphs is None else RECORD_AT):
        run()


def _beside(base: str, runs: Mapping[str, Callable[[], None]], on_step: OnStep) -> tuple[dict[str, float], list[float]]:
    """Return the median seconds per run, each taken as a ratio to the `base` passes right before and after it; and
    the seconds of all base passes.

    Ratios, because other load comes and goes within seconds and slows neighbouring passes alike. Medians rather than
    minima, because decoding is slowed by such load as well.
    """
    ratios: dict[str, list[float]] = {name: [] for name in runs if name != base}
    started, repeats = perf_counter(), 0
    bases = [_seconds(runs[base])]
    while repeats < REPEATS[0] or (repeats < REPEATS[1] and perf_counter() - started < BUDGET_S):
        for name, values in ratios.items():
            if len(values) == 2 and min(values) > EXPENSIVE:
                continue
            seconds = _seconds(runs[name])
            bases.append(_seconds(runs[base]))
            values.append(2 * seconds / (bases[-2] + bases[-1]))
        repeats += 1
        on_step(f"measuring costs, round {repeats}")
    usual = median(bases)
    return {base: usual, **{name: usual * median(values) for name, values in ratios.items()}}, bases


def _seconds(run: Callable[[], None]) -> float:
    clock = perf_counter()
    run()
    return perf_counter() - clock
