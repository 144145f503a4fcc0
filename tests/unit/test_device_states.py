"""Laws of the Triton kernels for states: they agree with torch, and bits do not depend on how a text is split."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from families import tiny_runtime
from on_device import HALF, PLACE, close, here, in_steps_and_in_a_tree, seen_by

from swiftopt.models.recurrent import RecurrentStates, StateRows
from swiftopt.models.rows import Rows
from swiftopt.models.runtime import Runtime
from swiftopt.models.state_rules import StateRule, ValueSteps

pytest.importorskip("triton")

from swiftopt.models.kernels import device, device_states

# Of a delta rule whose heads share key heads, of a state space whose values have steps of their own, and of one with
# limits, multipliers and biases; with few heads, for the interpreter is slow.
SIZES: dict[str, dict[str, int]] = {
    "qwen3_next": {"linear_num_key_heads": 1, "linear_num_value_heads": 2},
    "mamba": {"hidden_size": 16, "expand": 1, "intermediate_size": 16},
    "jamba": {"mamba_expand": 1},
}
OTHERS = [pytest.param(name, marks=pytest.mark.families) for name in ("falcon_h1", "mamba2", "bamba", "jamba")]
each_variant = pytest.mark.parametrize("variant", ["qwen3_next", "mamba", *OTHERS])
MORE = [(torch.float32, 0), (torch.float32, 2), (HALF, 0)]  # Types of numbers, and lags of the older state.
N_TEXT, N_ROWS = 3, 5


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftopt.models.kernels.device.PLACES", (PLACE.type,))


def made(variant: str, dtype: torch.dtype) -> tuple[Runtime, StateRule, int]:
    runtime = here(tiny_runtime(variant, dtype, **SIZES.get(variant, {})))
    block = next(block for block in runtime.blocks if block.rule is not None)
    assert block.rule is not None
    return runtime, block.rule, block.index


def given(states: RecurrentStates, layer: int, rule: StateRule, rows: StateRows) -> torch.Tensor:
    """Return what rows read of the state, and the convolution's output where it is computed first."""
    convolved = []
    if isinstance(rule, ValueSteps):
        alone = rows._replace(inputs=rows.inputs[:, : rule.form.n_convolved])
        convolved.append(states.convolved(layer, rule, alone))
    return torch.cat([*convolved, states.advance(layer, rule, rows)], dim=1)


def states_of(runtime: Runtime, layer: int, lag: int = 0) -> RecurrentStates:
    states = runtime.new_buffer(64, 12, lag).states
    assert states is not None and layer in states.states
    return states


def inputs_of(rule: StateRule, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N_TEXT + N_ROWS, rule.form.n_inputs, generator=generator).to(PLACE, dtype)


TREE = [-1, 0, 0, 2, -1]


def rounds(states: RecurrentStates, layer: int, rule: StateRule, inputs: torch.Tensor) -> list[torch.Tensor]:
    """Read a text in two pieces, then a tree of which a path is accepted, then further rows."""
    outs = [given(states, layer, rule, StateRows(inputs[:2], range(2), None, True))]
    states.commit(2)
    outs.append(given(states, layer, rule, StateRows(inputs[2:N_TEXT], range(2, N_TEXT), None, True)))
    states.commit(N_TEXT)
    slots = range(N_TEXT, N_TEXT + N_ROWS)
    outs.append(given(states, layer, rule, StateRows(inputs[N_TEXT:], slots, seen_by(TREE, N_TEXT), False)))
    states.move([N_TEXT, N_TEXT + 2, N_TEXT + 3], N_TEXT)
    states.commit(N_TEXT + 3)
    slots = range(N_TEXT + 3, N_TEXT + 5)
    outs.append(given(states, layer, rule, StateRows(inputs[:2], slots, None, False)))
    return outs


@each_variant
@pytest.mark.parametrize(
    ("dtype", "lag"), [(HALF, 2), *(pytest.param(*one, marks=pytest.mark.families) for one in MORE)]
)
def test_states_and_rows_are_torchs(
    variant: str, dtype: torch.dtype, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, rule, layer = made(variant, dtype)
    inputs, found = inputs_of(rule, dtype), list[list[torch.Tensor]]()
    for places in ((), (PLACE.type,)):
        monkeypatch.setattr("swiftopt.models.kernels.device.PLACES", places)
        states = states_of(runtime, layer, lag)
        outs = rounds(states, layer, rule, inputs)
        if lag:  # Rows of a search read the older state, and are not kept.
            seen = seen_by([-1, 0], N_TEXT + 3, N_TEXT + 3 - lag + 1)
            slots = range(N_TEXT + 3, N_TEXT + 5)
            outs.append(given(states, layer, rule, StateRows(inputs[3:5], slots, seen, False)))
        found.append([*outs, *states.states[layer], states.inputs[layer], states.roots])
    for by_torch, by_kernels in zip(*found, strict=True):
        close(by_kernels, by_torch, dtype)


@pytest.mark.slow
@each_variant
def test_bits_do_not_depend_on_how_a_text_is_cut_nor_on_other_rows(variant: str, by_kernels: None) -> None:
    """The text is read at once, in pieces, by token, and as a path of a tree whose other branches are rejected."""
    runtime, rule, layer = made(variant, HALF)
    if isinstance(rule, ValueSteps):  # Torch's product may round a row by the rows beside it.
        rule.step_map.forward = partial(device.linear, weight=rule.step_map.weight)
    inputs, found = inputs_of(rule, HALF), dict[str, tuple[torch.Tensor, torch.Tensor]]()

    def add(name: str, states: RecurrentStates, outs: list[torch.Tensor]) -> None:
        states.commit(N_TEXT)  # The next pass brings the state to the text's end.
        slots = range(N_TEXT, N_TEXT + 1)
        last = given(states, layer, rule, StateRows(inputs[N_TEXT : N_TEXT + 1], slots, None, False))
        found[name] = torch.cat([*outs, last]), states.states[layer].clone()

    for name, cuts in {"whole": [0, N_TEXT], "in pieces": [0, 1, N_TEXT]}.items():
        states, outs = states_of(runtime, layer), []
        for start, end in pairwise(cuts):
            outs.append(given(states, layer, rule, StateRows(inputs[start:end], range(start, end), None, True)))
            states.commit(end)
        add(name, states, outs)
    states, outs = states_of(runtime, layer), []
    for slot in range(N_TEXT):
        outs.append(given(states, layer, rule, StateRows(inputs[slot : slot + 1], [slot], None, False)))
        states.commit(slot + 1)
    add("decoded", states, outs)
    states, outs = states_of(runtime, layer), []
    other = inputs_of(rule, HALF, seed=1)
    for start in range(0, N_TEXT, 3):  # Rows by turns of the text and of a branch that is rejected.
        rows = torch.stack([part[start + i] for i in range(3) for part in (inputs, other)])
        seen = seen_by([-1, -1, 0, 0, 2, 2], start)
        out = given(states, layer, rule, StateRows(rows, range(start, start + 6), seen, False))
        outs.append(out[::2])
        states.move([start, start + 2, start + 4], start)
        states.commit(start + 3)
    add("drafted", states, outs)
    for name, (out, state) in found.items():
        assert torch.equal(out, found["whole"][0]) and torch.equal(state, found["whole"][1]), name


@pytest.mark.families
@pytest.mark.parametrize("variant", ["qwen3_next", "falcon_h1", "jamba"])
def test_models_compute_by_them(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, single steps and rows of a tree agree with torch, and every layer runs the kernels."""
    prompt, chain = [5, 9, 3], [4, 8]
    answers: list[Any] = []
    calls, take = list[int](), device_states.take
    monkeypatch.setattr(device_states, "take", lambda *args: (calls.append(len(calls)), take(*args)))
    for places in ((), (PLACE.type,)):
        monkeypatch.setattr("swiftopt.models.kernels.device.PLACES", places)
        runtime, _, _ = made(variant, torch.float32)
        prefilled, steps, rows, _ = in_steps_and_in_a_tree(runtime, prompt, chain)
        answers.append(torch.cat([prefilled[None], torch.stack(steps), rows]))
        plain = runtime.forward(Rows([*prompt, *chain], 0, is_text=True), runtime.new_buffer(16))
        answers += [plain, len(calls)]
    assert answers[2] == 0 < answers[5]
    close(answers[3], answers[0], torch.float32)
    close(answers[4], answers[1], torch.float32)
