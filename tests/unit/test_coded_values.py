"""The 13-bit values that a Mamba-1 layer keeps of a row."""

from __future__ import annotations

import pytest
import torch
from native import native_runtime, words
from torch import Tensor

from swiftopt.models.coded_values import coded, decoded, kept_width, trimmed
from swiftopt.models.recurrent import RecurrentStates
from swiftopt.models.rows import Rows
from swiftopt.models.runtime import Runtime

N_VALUES, N_OTHERS = 160, 29


def bits_of(part: Tensor) -> list[int]:
    return part.contiguous().view(torch.int16).flatten().tolist()


def rows_of(scale: float) -> Tensor:
    """Return rows whose exponents span about sixty steps, with zeros and subnormal numbers below."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.randint(-60, 3, (40, N_VALUES), generator=generator).double()
    return (torch.randn(40, N_VALUES, generator=generator) * torch.exp2(spread) * scale).to(torch.bfloat16)


@pytest.mark.parametrize("scale", [1.0, 2.0**-110, 2.0**-130, 2.0**120, 0.0, float("inf"), float("nan")])
def test_coded_rows_are_decoded_with_the_same_bits(scale: float) -> None:
    inputs = torch.cat((trimmed(rows_of(scale)), torch.randn(40, N_OTHERS).to(torch.bfloat16)), dim=1)
    rows = coded(inputs, N_VALUES)
    assert rows.shape == (40, kept_width(N_VALUES + N_OTHERS, N_VALUES))
    assert bits_of(decoded(rows, N_VALUES)) == bits_of(inputs)


def test_trimmed_values_are_zero_far_below_the_largest_and_unchanged_above() -> None:
    values = rows_of(1.0)
    least, found = values.abs().amax(dim=1, keepdim=True).double() * 2.0**-30, trimmed(values)
    is_large = values.abs() >= least
    assert torch.equal(found[is_large], values[is_large])
    assert (values.abs() < least / 2).any() and (found[values.abs() < least / 2] == 0).all()


def _states_after(runtime: Runtime, ids: list[int]) -> tuple[Tensor, RecurrentStates]:
    """Return the logits of a prompt of which all but the last three tokens were prefilled."""
    buffer = runtime.new_buffer(len(ids), 3)
    runtime.prefill(ids[:-3], buffer)
    logits = runtime.forward(Rows(ids[-3:], len(ids) - 3), buffer)
    assert buffer.states is not None
    return logits, buffer.states


def test_rows_that_the_kernels_keep_are_coded_as_torchs() -> None:
    ids = words(0, 12)
    ours, torchs = native_runtime("jamba"), native_runtime("jamba")
    torchs.native = None
    (logits, kept), (expected, kept_by_torch) = _states_after(ours, ids), _states_after(torchs, ids)
    torch.testing.assert_close(logits.float(), expected.float(), rtol=0.05, atol=0.05)
    for layer, rows in kept.inputs.items():
        n_values = kept.form.n_convolved
        assert rows.shape[1] == kept_width(kept.form.n_inputs, n_values) < kept.form.n_inputs
        inputs = decoded(rows, n_values)
        assert bits_of(coded(inputs, n_values)) == bits_of(rows)
        likewise = decoded(kept_by_torch.inputs[layer], n_values)
        torch.testing.assert_close(inputs.float(), likewise.float(), rtol=0.1, atol=0.1)


def test_text_has_the_same_bits_whole_and_row_by_row_where_values_are_trimmed() -> None:
    """Some values of a layer are far smaller than the others."""
    runtime = native_runtime("jamba")
    for layer in runtime.hf_model.model.layers:
        if (mixer := getattr(layer, "mamba", None)) is not None:
            mixer.in_proj.weight.data[:40] *= 2.0**-31
    ids = words(1, 14)
    whole = runtime.forward(Rows(ids, 0, is_text=True), runtime.new_buffer(len(ids), len(ids)))
    buffer = runtime.new_buffer(len(ids), 4)
    parts = list[Tensor]()
    for first in range(0, len(ids), 2):
        parts.append(runtime.forward(Rows(ids[first : first + 2], first), buffer))
        buffer.commit(first + 2)
    assert bits_of(torch.cat(parts)) == bits_of(whole)
    states = buffer.states
    assert states is not None
    small = [decoded(rows, states.form.n_convolved)[:, :40] for rows in states.inputs.values()]
    assert any(0 < (part == 0).sum() < part.numel() for part in small)
