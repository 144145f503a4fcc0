"""The settings have the paper's defaults and refuse values out of range."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from swiftopt.core.errors import LayerSetError, SettingsError
from swiftopt.core.layer_sets import LayerSet, searchable
from swiftopt.core.serialization import LARGEST
from swiftopt.core.settings import SwiftSettings
from swiftopt.core.types import Sampling


def test_defaults_are_those_of_appendix_b2() -> None:
    settings = SwiftSettings()
    assert (settings.context_window, settings.max_draft_length, settings.max_steps) == (32, 25, 1000)
    assert (settings.bayes_interval, settings.patience, settings.target_matchness) == (25, 300, 0.95)
    assert (settings.start_skip_ratio(13_000_000_000), settings.start_skip_ratio(34_000_000_000)) == (0.45, 0.5)


@pytest.mark.parametrize(
    ("confidence", "k"), [(0.1, 10), (0.5, 10), (0.51, 5), (0.8, 5), (0.9, 3), (0.95, 3), (0.96, 1), (1.0, 1)]
)
def test_branching_is_the_papers_table(confidence: float, k: int) -> None:
    assert SwiftSettings().candidates_at(confidence) == k
    assert SwiftSettings(dynamic_verification=False).candidates_at(confidence) == 1


def test_drafting_stops_when_confidence_is_below_the_threshold_or_the_draft_is_full() -> None:
    settings = SwiftSettings(max_draft_length=3)
    assert settings.stops_after(0.79, 1) and not settings.stops_after(0.8, 1) and settings.stops_after(0.99, 3)
    assert not SwiftSettings(early_stop=False).stops_after(0.01, 1)


@pytest.mark.parametrize(
    "values",
    [
        {"stop_threshold": 1.5},
        {"max_draft_length": 0},
        {"skip_ratio": -0.1},
        {"branching": ((0.5, 3), (0.4, 1))},
        {"branching": ((0.5, 3),)},
        {"objective": "speed"},
        {"skip_ratio_step": 0},
    ],
)
def test_settings_out_of_range_are_refused_with_the_value(values: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="is out of range: use"):
        SwiftSettings(**values)


def test_settings_survive_json_and_unknown_keys_are_named() -> None:
    settings = SwiftSettings(skip_ratio=0.3, branching=((0.6, 4), (1.0, 2)))
    assert SwiftSettings.from_json(settings.to_json()) == settings
    with pytest.raises(SettingsError, match="the settings: it has no 'speed': did you mean 'seed'"):
        SwiftSettings.from_json({"speed": 1})


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1},
        {"temperature": math.inf},
        {"top_p": -0.1},
        {"top_k": -1},
        {"min_p": 1.1},
        {"repetition_penalty": 0},
        {"repetition_penalty": math.inf},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"logit_bias": ((5, 100.5),)},
        {"logit_bias": ((5, math.nan),)},
        {"logit_bias": ((-1, 1.0),)},
    ],
)
def test_sampling_out_of_range_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="is out of range"):
        Sampling(**values)


def test_number_that_is_too_large_is_told_the_largest() -> None:
    with pytest.raises(SettingsError, match=f"use a number from 0 to {LARGEST}"):
        Sampling(top_k=LARGEST + 1)
    with pytest.raises(SettingsError, match="top_k -1 is out of range: use 0 or more"):
        Sampling(top_k=-1)


def test_biases_are_an_object_by_token_in_json() -> None:
    sampling = Sampling(logit_bias=((40, -2.0), (5, 1.5)))
    assert sampling.to_json()["logit_bias"] == {"5": 1.5, "40": -2.0}
    assert (
        Sampling.from_json(sampling.to_json()) == sampling == Sampling.from_json({"logit_bias": {"5": 1.5, "40": -2}})
    )
    for wrong in ({"a": 1.0}, {"5": "1"}, [[5, 1.0]], {"5": 200.0}):
        with pytest.raises(SettingsError, match=r"the sampling: .*logit_bias"):
            Sampling.from_json({"logit_bias": wrong})


def test_only_layers_of_the_model_can_be_skipped() -> None:
    for layer in (6, -1, 9):
        with pytest.raises(LayerSetError, match=r"only 0\.\.5 may be skipped"):
            LayerSet(6, frozenset({layer}), frozenset())


def test_a_set_without_an_end_was_chosen_from_all_sub_layers() -> None:
    assert LayerSet(6, frozenset({0, 2}), frozenset({5})).skip_ratio == 3 / 12
    assert LayerSet(6, frozenset({1, 2}), frozenset({4})).skip_ratio == 3 / 8


def test_a_share_has_only_sub_layers_that_there_are() -> None:
    hybrid = LayerSet(6, frozenset({1}), absent=("mlp:0", "mlp:1", "attn:2", "attn:5"))
    assert (hybrid.n_searched, hybrid.skip_ratio) == (6, 1 / 6) and hybrid == LayerSet(6, frozenset({1}))
    assert replace(hybrid, skip_attn=frozenset({0})).n_searched == 8
    for part in ("mlp:6", "mlp", "head:1"):
        with pytest.raises(LayerSetError, match=f"6 layers have no sub-layer '{part}'"):
            LayerSet(6, absent=(part,))
    assert LayerSet.from_json(hybrid.to_json()).absent == hybrid.absent and "absent" not in LayerSet(6).to_json()


def test_layer_set_survives_its_bits() -> None:
    layer_set = LayerSet(6, frozenset({1, 4}), frozenset({2}))
    assert LayerSet(6).with_bits(layer_set.bits()) == layer_set
    assert sum(layer_set.bits()) == layer_set.n_skipped == 3 and layer_set.skip_ratio == 3 / 8


@pytest.mark.parametrize("n", range(9))
def test_uniform_set_has_the_wanted_size_and_spreads_over_the_depth(n: int) -> None:
    layer_set = LayerSet.uniform(6, n)
    assert layer_set.n_skipped == n
    assert abs(len(layer_set.skip_attn) - len(layer_set.skip_mlp)) <= 1
    assert set(LayerSet.uniform(6, 8).bits()) == {1} and len(searchable(6)) == 8
