"""A comparison's figures, its plan, its requests and its energy, from made-up runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pynvml
import pytest
import torch
from families import tiny_runtime

from swiftopt.cli.compare import parse_methods, parse_settings
from swiftopt.core.errors import SettingsError, UnsupportedModel
from swiftopt.core.requests import CompareRequest
from swiftopt.core.types import Completion, Prompt, Sampling
from swiftopt.decoding.methods import METHODS, Resources
from swiftopt.tasks.measures import ROWS, Counter, EnergyMeter, nll, nvml, rapl
from swiftopt.tasks.recipes import Recipe
from swiftopt.tasks.report import (
    MIN_PROMPTS,
    Decoded,
    Figures,
    Interleaved,
    Run,
    Runs,
    best_of,
    by_ratio,
    figures,
    plan_of,
)

PROMPTS = [Prompt(f"p{i}", "t", text="w1") for i in range(8)]


def runs(name: str, speeds: Sequence[float], **counts: Any) -> Runs:
    """Return runs of ten tokens per prompt with these tokens per second."""
    found = Runs(name)
    for number, tok_s in enumerate(speeds):
        done = Completion(tuple(range(10)), "", "length", name, first_tokens=1, **counts)
        found.by_prompt[number] = Run(done.token_ids, 10 / tok_s, done, joules=5.0)
    return found


def row(method: str, ratio: float | None, low: float | None = None, lossy: bool = False) -> Figures:
    interval = None if low is None or ratio is None else (low, 2 * ratio - low)
    return Figures(method, ratio=ratio, ratio_interval=interval, lossy=lossy)


def test_figures_of_a_method_are_sums_over_its_prompts() -> None:
    own = runs("swift", [20, 30, 20], drafted=8, accepted=6, target_passes=3)
    got = figures(Figures("swift"), own, runs("plain", [10, 10, 10]), 3, lambda number, run: 10 * math.log(4))
    assert (got.prompts, got.of, got.tokens, got.identical) == (3, 3, 30, 3)
    assert got.tok_s == pytest.approx(30 / (10 / 20 + 10 / 30 + 10 / 20))
    assert got.ratio == pytest.approx(got.tok_s / 10)
    assert got.ratio_interval is not None and got.ratio_interval[0] <= got.ratio <= got.ratio_interval[1]
    assert (got.acceptance_rate, got.mean_generated_length) == (0.75, 3.0)
    assert got.passes_per_token == pytest.approx(1 / 3)
    assert got.perplexity == pytest.approx(4.0)
    assert got.joules_per_token == pytest.approx(0.5)
    assert got.early_share is None and got.rejected_share is None


def test_intervals_are_over_prompts_and_not_over_samples() -> None:
    """With ten samples of two prompts, a faster and a slower one, the interval stays wide."""
    base, nlls = runs("plain", [10.0] * 20), [4.0] * 10 + [9.0] * 10
    own = runs("swift", [30.0 + i / 10 for i in range(10)] + [9.0] * 10)
    one, many = (figures(Figures("swift"), own, base, 20, lambda number, _: nlls[number], samples=n) for n in (1, 10))
    assert one.ratio == many.ratio and one.ratio_interval is not None and many.ratio_interval is not None
    assert many.ratio_interval[0] < 1 < one.ratio_interval[0]
    alone = figures(Figures("swift"), own, base, 20, lambda number, _: nlls[number], samples=20)
    assert alone.ratio_interval is None and alone.perplexity_interval is None


def test_only_early_exit_methods_have_early_and_rejected_shares() -> None:
    own = runs("adadecode", [20, 30], drafted=5, accepted=3, refused=1, target_passes=6)  # one thrown away unjudged
    got = figures(Figures("adadecode"), own, runs("plain", [10, 10]), 2, None, predicts_early=True)
    assert got.early_share == pytest.approx(3 / 9) and got.rejected_share == pytest.approx(1 / 4)
    assert got.perplexity is None


def test_method_is_compared_with_plain_on_the_prompts_that_it_decoded() -> None:
    own = Runs("jacobi", {2: runs("jacobi", [5, 5, 5]).by_prompt[2]})
    got = figures(Figures("jacobi"), own, runs("plain", [100, 100, 10]), 3, None)
    assert got.prompts == 1 and got.ratio == pytest.approx(0.5) and got.ratio_interval is None


def test_energy_is_unknown_if_a_run_was_not_measured() -> None:
    own = runs("swift", [20, 20])
    own.by_prompt[1] = Run((1, 2), 1.0, None, joules=None)
    assert figures(Figures("swift"), own, runs("plain", [10, 10]), 2, None).joules_per_token is None


def test_consistency_is_omitted_for_methods_with_other_random_draws() -> None:
    got = figures(Figures("spd"), runs("spd", [20, 20]), runs("plain", [10, 10]), 2, None, keeps_tokens=False)
    assert got.identical is None


def test_method_without_runs_has_a_reason() -> None:
    own = Runs("paradecode", error="its layers differ")
    got = figures(Figures("paradecode"), own, runs("plain", [10]), 1, None)
    assert got.ratio is None and got.reason == "its layers differ"


def test_plan_is_the_best_lossless_method_with_an_interval_above_one() -> None:
    rows = [row("mtad", 1.9, 1.5, lossy=True), row("swift", 1.5, 0.9), row("spd", 1.3, 1.1), row("jacobi", 1.2, 1.15)]
    best = best_of(rows)
    assert best is not None and best.method == "spd"
    assert best_of([row("plain", 1.0, 1.0), row("swift", 1.5, 1.0), row("mcss", None)]) is None


def test_a_peer_never_becomes_the_plan() -> None:
    report = {"device": "cpu", "dtype": "float32", "draft_model": "small"}
    plan = plan_of(report, [row("hf-assisted", 2.0, 1.8), row("plain", 1.0, 1.0)], {})
    assert (plan.method, plan.verdict, plan.draft_model) == ("plain", "plain", None)


def test_plan_has_the_figures_of_its_row_in_the_comparison() -> None:
    best = replace(row("spd", 1.3, 1.1), acceptance_rate=0.6, mean_generated_length=2.5)
    report = {"device": "cpu", "dtype": "float32", "draft_model": "small"}
    plan = plan_of(report, [best, row("plain", 1.0, 1.0)], {"spd": Recipe(Resources(tiny_runtime("llama")))})
    found = plan.measured_speedup, plan.measured_interval, plan.acceptance_rate, plan.mean_generated_length
    assert found == (best.ratio, best.ratio_interval, 0.6, 2.5)


def test_rows_without_figures_come_last() -> None:
    assert [r.method for r in by_ratio([row("a", None), row("b", 0.5), row("c", 2.0)])] == ["c", "b", "a"]


class Clockwork:
    """Methods with set seconds, which replace the measured time after each run."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.order: list[str] = []
        self.interleaved = Interleaved({name: self.decoder(name) for name in seconds}, PROMPTS)
        self.interleaved.on_run = self.rewrite
        self.seconds = seconds

    def decoder(self, name: str) -> Any:
        def run(prompt: Prompt) -> Decoded:
            self.order.append(name)
            return (1, 2, 3), None

        return run

    def rewrite(self, name: str, number: int, n_prompts: int, timed: object) -> None:
        self.interleaved.runs[name].by_prompt[number] = Run((1, 2, 3), self.seconds[name])


def test_the_order_rotates_and_every_prompt_has_one_plain_run() -> None:
    clock = Clockwork({"plain": 1.0, "swift": 1.0, "spd": 1.0})
    assert clock.interleaved.run()
    assert clock.order[3:9] == ["plain", "swift", "spd", "swift", "spd", "plain"]  # behind the warm-up
    assert all(len(found.by_prompt) == len(PROMPTS) for found in clock.interleaved.runs.values())


def test_slow_method_stops_at_twice_the_time_of_plain_decoding() -> None:
    clock = Clockwork({"plain": 1.0, "fair": 1.9, "slow": 4.0, "hopeless": 100.0})
    clock.interleaved.run()
    done = {name: len(found.by_prompt) for name, found in clock.interleaved.runs.items()}
    assert done == {"plain": 8, "fair": 8, "slow": 4, "hopeless": MIN_PROMPTS}


def test_failed_method_is_omitted_and_the_others_continue() -> None:
    def fails(prompt: Prompt) -> Decoded:
        raise UnsupportedModel("not with these layers")

    both = Interleaved({"plain": lambda p: ((1,), None), "paradecode": fails}, PROMPTS)
    assert both.run()
    assert both.runs["paradecode"].error == "not with these layers" and not both.runs["paradecode"].by_prompt
    assert len(both.runs["plain"].by_prompt) == len(PROMPTS)


def test_ctrl_c_keeps_finished_prompts() -> None:
    calls: list[str] = []

    def interrupted(prompt: Prompt) -> Decoded:
        calls.append(prompt.id)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return (1, 2), None

    one = Interleaved({"plain": interrupted}, PROMPTS)
    assert not one.run()
    assert sorted(one.runs["plain"].by_prompt) == [0, 1]


def test_all_means_every_method_and_plain_comes_first() -> None:
    assert parse_methods("all") == tuple(METHODS)
    assert parse_methods("spd,hf-plain, spd") == ("plain", "spd", "hf-plain")
    assert not any(METHODS[name].lossy for name in parse_methods("all", lossless=True))


@pytest.mark.parametrize(
    ("words", "lossless", "said"),
    [
        ("spdd", False, r"method 'spdd' is unknown: use one of plain, .* \(nearest: spd\)"),
        pytest.param("swift,mtad", True, "mtad is lossy, which --lossless", marks=pytest.mark.wing("papers")),
        (" , ", False, "--methods is empty"),
    ],
)
def test_method_lists_are_refused_in_a_sentence(words: str, lossless: bool, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        parse_methods(words, lossless)


@pytest.mark.wing("papers")
def test_settings_are_read_by_method() -> None:
    words = ["mtad.beam_width=8", "spd.stop-threshold=none", "mtad.top_p=0.8"]
    found = parse_settings(words, ["mtad", "spd"])
    assert found == {"mtad": {"beam_width": 8, "top_p": 0.8}, "spd": {"stop_threshold": None}}


@pytest.mark.wing("papers")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("mtad=8", "is not a setting"),
        (f"mtad.beam_width={'9' * 5000}", "beam_width is '999"),
        (f"mtad.beam_width={'[' * 100_000}", "beam_width is '"),
        ("mtadd.beam_width=8", "nearest: mtad"),
        ("spd.max_draft_length=3", "not compared"),
        ("mtad.beams=8", "no 'beams'"),
        ("mtad.beam_width=many", "use a whole number"),
        ("mtad.beam_width=0", "use a number greater than or equal to 1"),
    ],
)
def test_settings_are_refused_in_a_sentence(words: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        parse_settings([words], ["mtad"])


def test_peers_are_greedy_and_assisted_needs_a_draft_model() -> None:
    with pytest.raises(SettingsError, match="only greedy decoding"):
        CompareRequest("m", ("plain", "hf-plain"), sampling=Sampling(temperature=1.0))
    with pytest.raises(SettingsError, match="--draft-model"):
        CompareRequest("m", ("plain", "hf-assisted"))


def test_wrapped_counter_is_continued() -> None:
    readings = iter([900, 100])
    meter = EnergyMeter([Counter("rapl", lambda: next(readings), span=1000)])
    assert meter.source == "rapl" and meter.joules_since(meter.read()) == pytest.approx(200e-6)


def test_without_counters_energy_is_not_measured() -> None:
    meter = EnergyMeter(())
    assert meter.source is None and meter.joules_since(meter.read()) is None


def test_energy_is_read_of_the_gpu_that_torch_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML numbers GPUs differently, so the device is found by its UUID. The library is real, without a driver."""
    millijoules = iter((5_000, 7_500))
    by_uuid = {"GPU-abc": "handle"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid={1: "abc"}[index]))
    monkeypatch.setattr("pynvml.nvmlInit", lambda: None)
    monkeypatch.setattr("pynvml.nvmlDeviceGetHandleByUUID", by_uuid.__getitem__)
    monkeypatch.setattr("pynvml.nvmlDeviceGetTotalEnergyConsumption", lambda handle: 0)
    (counter,) = nvml(1)
    monkeypatch.setattr("pynvml.nvmlDeviceGetTotalEnergyConsumption", lambda handle: next(millijoules))
    meter = EnergyMeter([counter])
    assert meter.source == "nvml" and meter.joules_since(meter.read()) == pytest.approx(2.5)


def test_machine_without_a_driver_has_no_gpu_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> NoReturn:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr("pynvml.nvmlInit", missing)
    assert nvml(0) == []


def test_rapl_counts_packages_once(tmp_path: Path) -> None:
    for zone, name in {"intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:1": "psys"}.items():
        (tmp_path / zone).mkdir()
        (tmp_path / zone / "name").write_text(f"{name}\n")
        (tmp_path / zone / "energy_uj").write_text("1000\n")
        (tmp_path / zone / "max_energy_range_uj").write_text("5000\n")
    (tmp_path / "intel-rapl:2").mkdir()  # unreadable: no files
    (counter,) = rapl(tmp_path)
    assert (counter.read(), counter.span) == (1000, 5000)


@pytest.mark.parametrize("n_prompt", [1, 7])
def test_nll_equals_that_of_a_single_pass(n_prompt: int) -> None:
    runtime = tiny_runtime("llama")
    text = torch.randint(97, (n_prompt + ROWS + 5,), generator=torch.Generator().manual_seed(1)).tolist()
    logits = runtime.hf_model(torch.tensor([text])).logits[0].float()
    logprobs = torch.log_softmax(logits, dim=-1)
    wanted = -sum(float(logprobs[i - 1, text[i]]) for i in range(n_prompt, len(text)))
    assert nll(runtime, text[:n_prompt], text[n_prompt:]) == pytest.approx(wanted, rel=1e-5)
