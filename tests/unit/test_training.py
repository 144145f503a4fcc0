"""The arithmetic of training: closed-form gradients, figures, schedules, and the layers of heads."""

from __future__ import annotations

import math

import pytest
import torch
from families import tiny_runtime

from swiftopt.bench.micro import head_rank
from swiftopt.core.errors import SettingsError
from swiftopt.models.runtime import Runtime
from swiftopt.papers.ablation_recipes import shift_targets
from swiftopt.papers.training.features import Features
from swiftopt.papers.training.settings import HeadSettings, ProbeSettings, TrainingSettings
from swiftopt.papers.training.trainer import (
    CHUNK_VALUES,
    HeadObjective,
    ProbeObjective,
    batch_rows,
    early_exits,
    kl_to_gradient,
    learning_rate,
    probe_figures,
    vocabulary_product,
)

ROWS = torch.tensor([3, 0, 7, 5])


def random_features(runtime: Runtime, n: int = 9) -> Features:
    torch.manual_seed(1)
    hidden = {depth: torch.randn(n, 32, dtype=runtime.dtype) for depth in (1, 3)}
    return Features(hidden, runtime.normed(torch.randn(n, 32, dtype=runtime.dtype)).detach())


def test_a_hop_is_taught_what_the_last_layer_says_later() -> None:
    text = Features({2: torch.arange(5.0)[:, None]}, torch.arange(10.0, 15.0)[:, None])
    moved = shift_targets(text, 3)
    assert moved.hidden[2].flatten().tolist() == [0, 1, 2] and moved.final.flatten().tolist() == [12, 13, 14]
    assert shift_targets(text, 6).n_rows == len(shift_targets(text, 6).hidden[2]) == 0


def test_rank_of_a_head_is_that_of_its_singular_values() -> None:
    torch.manual_seed(0)
    head = torch.randn(60, 8)
    rank, smallest = head_rank(head)
    assert rank == 8 and smallest == pytest.approx(float(torch.linalg.svdvals(head)[-1]), rel=1e-5)
    head[:, 0] = head[:, 1] + head[:, 2]
    assert head_rank(head)[0] == 7


@pytest.mark.parametrize("full", [False, True], ids=["light", "full"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3-softcap"])
def test_closed_form_gradient_equals_autograd(family: str, full: bool) -> None:
    runtime = tiny_runtime(family)
    data = random_features(runtime)
    objective = HeadObjective(runtime, data, (1, 3), full)
    start = objective.start()
    weights = (start + 0.05 * torch.randn(start.shape, dtype=start.dtype)).requires_grad_()
    target = torch.log_softmax(runtime.head(data.final[ROWS]), -1)
    kl = torch.zeros((), dtype=torch.float64)
    for i, depth in enumerate((1, 3)):
        moved = runtime.normed(data.hidden[depth][ROWS]) @ weights[i].T
        own = torch.log_softmax(moved if full else runtime.head(moved), -1)
        kl = kl + (target.exp() * (target - own)).sum(-1).mean()
    kl.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        loss, gradient = objective.gradient(weights, ROWS)
    assert loss == pytest.approx(float(kl.detach()) / 2, rel=1e-12)
    torch.testing.assert_close(gradient, weights.grad, rtol=1e-9, atol=1e-12)


def test_divergence_of_many_rows_is_that_of_each() -> None:
    wide = CHUNK_VALUES // 2  # a vocabulary of which two rows fill a chunk
    target, heads = torch.randn(5, wide, dtype=torch.float64), torch.randn(2, 5, wide, dtype=torch.float64)
    whole, rows = heads.clone(), heads.clone()
    kl = kl_to_gradient(target, whole)
    torch.testing.assert_close(sum(kl_to_gradient(target[i : i + 1], rows[:, i : i + 1]) for i in range(5)), kl)
    torch.testing.assert_close(rows, whole)
    assert float(kl_to_gradient(target, target[None].clone())) == pytest.approx(0.0, abs=1e-12)


def test_divergence_of_bfloat16_logits_is_taken_in_float32() -> None:
    target, head = 20 * torch.randn(4, 97), 20 * torch.randn(1, 4, 97)
    exact = kl_to_gradient(target.bfloat16().double(), head.bfloat16().double())
    assert float(kl_to_gradient(target.bfloat16(), head.bfloat16())) == pytest.approx(float(exact), rel=1e-5)


@pytest.mark.parametrize("has_instructions", [True, False])
def test_vocabulary_product_in_bfloat16_is_the_exact_one(
    monkeypatch: pytest.MonkeyPatch, has_instructions: bool
) -> None:
    """Without instructions for bfloat16, the product runs over several chunks of the vocabulary."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_instructions)
    rows, weight = torch.randn(3, 2500).bfloat16(), torch.randn(2500, 512).bfloat16()
    product = vocabulary_product(rows, weight)
    assert product.dtype == torch.bfloat16
    torch.testing.assert_close(product.double(), rows.double() @ weight.double(), rtol=8e-3, atol=0.5)


def test_probe_gradient_equals_autograd() -> None:
    torch.manual_seed(0)
    hidden, accepted = 5 * torch.randn(9, 6) + 2, torch.rand(9) < 0.5
    objective = ProbeObjective(Features({2: hidden}, hidden), 2, lambda _: accepted)
    weights = torch.randn(7, requires_grad=True)
    states = (hidden[ROWS] - hidden.mean(0)) / hidden.std(0)
    scores = states @ weights[:-1] + weights[-1]
    loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, accepted[ROWS].float())
    loss.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        own, gradient = objective.gradient(weights, ROWS)
    assert own == pytest.approx(float(loss.detach()), rel=1e-5)
    torch.testing.assert_close(gradient, weights.grad, rtol=1e-4, atol=1e-6)


def test_probe_of_raw_states_equals_the_one_of_standardised_states() -> None:
    torch.manual_seed(0)
    hidden = 30 * torch.randn(9, 6) + 7
    objective = ProbeObjective(Features({2: hidden}, hidden), 2, lambda _: torch.rand(9) < 0.5)
    weights = torch.randn(7)
    probe = objective.model(weights)
    standard = (hidden - hidden.mean(0)) / hidden.std(0) @ weights[:-1] + weights[-1]
    for state, score in zip(hidden, standard, strict=True):
        assert probe.acceptance(state[None]).item() == pytest.approx(float(torch.sigmoid(score)), abs=1e-4)


def test_the_shallowest_sure_head_decides() -> None:
    sure = torch.tensor([[0.9, 0.2, 0.8, 0.1], [0.9, 0.9, 0.9, 0.1]])
    right = torch.tensor([[True, True, False, True], [False, True, True, True]])
    assert early_exits(sure, right, 0.75) == (0.75, pytest.approx(1 / 3))
    assert early_exits(sure, right, 0.95) == (0.0, 0.0)


def test_auc_is_the_chance_that_an_accepted_token_scores_higher() -> None:
    scores, accepted = torch.tensor([-1.0, 0.5, 0.5, 2.0]), torch.tensor([False, False, True, True])
    assert probe_figures(scores, accepted) == {"accuracy": 0.75, "base_rate": 0.5, "auc": (2 * 2 - 0.5) / 4}
    assert "auc" not in probe_figures(scores, torch.ones(4, dtype=torch.bool))


def test_rate_rises_in_the_warm_up_and_falls_to_nothing() -> None:
    settings = TrainingSettings(learning_rate=1.0, warm_up=0.1)
    rates = [learning_rate(settings, i / 100) for i in range(101)]
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[0] == 0.0 and math.isclose(rates[100], 0.0, abs_tol=1e-12) and max(rates) <= 1.0


def test_every_epoch_sees_every_row_once() -> None:
    settings = TrainingSettings(batch=4, seed=3)
    first, second = ([row for s in range(3) for row in batch_rows(settings, 3 * e + s, 10).tolist()] for e in (0, 1))
    assert sorted(first) == sorted(second) == list(range(10)) and first != second


def test_heads_sit_in_the_upper_half_of_the_depth() -> None:
    assert HeadSettings().depths(30) == (18, 22, 26)
    assert HeadSettings(layers=(3, 1)).depths(4) == (1, 3)
    assert HeadSettings().depths(2) == (1,)
    assert ProbeSettings().depths(32) == (8,) and ProbeSettings().depths(2) == (1,)


@pytest.mark.parametrize("layers", [(0,), (4,), (-1, 2), (2, 2)])
def test_layer_outside_the_model_is_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(SettingsError, match=r"use 1 to 3|give each layer once"):
        HeadSettings(layers=layers).depths(4)


@pytest.mark.parametrize(
    ("name", "value"), [("epochs", 0), ("batch", 0), ("max_new_tokens", 1), ("minutes", 0.0), ("learning_rate", 0.0)]
)
def test_setting_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(SettingsError, match=name):
        HeadSettings(**{name: value})  # type: ignore[arg-type]
