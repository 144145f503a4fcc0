"""How often a round waits for its device: once, for its tokens; and what it drafts without waiting is what it drafts.

The device is torch's `meta`, whose tensors hold nothing: whatever reads one, or moves something there and waits for it,
is counted, and is given zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import cheap_draft_costs, results_of
from families import tiny_runtime
from native import words
from torch import Tensor
from torch.overrides import TorchFunctionMode

from swiftopt.core.settings import SwiftSettings
from swiftopt.core.types import LayerSet, Sampling
from swiftopt.decoding.context import Ending, TokenRule
from swiftopt.decoding.engine import side_by_side
from swiftopt.decoding.loop import Round, decode, decoding
from swiftopt.decoding.methods import PLAIN, Method, Resources, build, swift
from swiftopt.decoding.methods.adaptive import AdaptiveSettings
from swiftopt.models.graphs import GraphPasses
from swiftopt.models.kernels import device
from swiftopt.models.runtime import Runtime

META = torch.device("meta")
PROMPT = [3, 17, 42, 8, 91, 5]
SKIPPING = LayerSet(4, frozenset({1}), frozenset({2}))
EARLY_STOP = swift(SKIPPING, SwiftSettings())
CHAINS = swift(SKIPPING, SwiftSettings(early_stop=False, dynamic_verification=False, max_draft_length=4))
READS = {
    "item", "tolist", "cpu", "numpy", "nonzero", "__array__", "__bool__", "__int__", "__float__", "__index__",
}  # fmt: skip


class Waits(TorchFunctionMode):
    """Counts what waits for the `meta` device, and answers reads with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        own = args[0] if args and isinstance(args[0], Tensor) else None
        if own is not None and own.device == META and name in READS:
            self.seen.append(name)
            return getattr(torch.zeros(own.shape, dtype=own.dtype), name)()
        if name == "__getitem__" and own is not None and own.device == META and self._is_moved(args[1]):
            self.seen.append("an index of this machine")
        answer = func(*args, **kwargs)
        if isinstance(answer, Tensor) and answer.device == META and not kwargs.get("non_blocking"):
            to_meta = torch.device(kwargs.get("device") or "cpu") == META
            sources = [part for part in args if isinstance(part, Tensor)]
            if (name in ("tensor", "as_tensor") and to_meta) or (
                name in ("to", "copy_", "__setitem__") and any(part.device != META for part in sources if part.dim())
            ):
                self.seen.append(f"{name} to the device")
        return answer

    @staticmethod
    def _is_moved(index: Any) -> bool:
        parts = index if isinstance(index, tuple) else (index,)
        return any(isinstance(part, list) or (isinstance(part, Tensor) and part.device != META) for part in parts)


def without_data(monkeypatch: pytest.MonkeyPatch, graphs: bool) -> Runtime:
    """A runtime on a device that holds nothing."""
    runtime = tiny_runtime("llama", torch.float32)
    runtime.hf_model.to(META)
    runtime.device = runtime._head_device = META
    for block in runtime.blocks:
        block.device = META
    runtime.reads_late = True
    monkeypatch.setattr(device, "store", lambda *args: None)
    monkeypatch.setattr(device, "attend", lambda query, *args: torch.empty_like(query).flatten(1))
    if graphs:
        runtime.graphs = GraphPasses(runtime, lambda static: static.run)
    return runtime


def adaptive(runtime: Runtime, **settings: Any) -> Method:
    parts = Resources(runtime, SKIPPING, costs=cheap_draft_costs(0.1))
    return build("adaptive", parts, AdaptiveSettings.from_json({"draft_format": "stored", **settings}))


SAMPLINGS = [Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=3)]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["plain", "chains", "adaptive"])
def test_a_round_waits_for_the_device_once(
    name: str, sampling: Sampling, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = without_data(monkeypatch, graphs)
    methods = {"plain": (PLAIN, 20), "chains": (CHAINS, 40), "adaptive": (adaptive(runtime, lookup=False), 120)}
    method, n_new = methods[name]
    work = decoding(runtime, PROMPT, method, TokenRule.of(sampling, None), Ending(n_new))
    rounds, drafted, waits = 0, 0, Waits()
    with waits:
        for event in side_by_side([work]):
            if isinstance(event, Round):
                assert len(waits.seen) <= 1, waits.seen
                rounds, drafted = rounds + 1, drafted + event.n_steps
            waits.seen.clear()
    assert rounds > 5 and (drafted > 2 * rounds) == (name != "plain")
    if runtime.graphs is not None:
        assert runtime.graphs._passes  # type: ignore[attr-defined]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_what_is_read_late_is_what_is_read_at_once(family: str, sampling: Sampling) -> None:
    runtime, rule = tiny_runtime(family), TokenRule.of(sampling, None)
    expected = decode(runtime, PROMPT, PLAIN, rule, Ending(60)).token_ids
    found = []
    for runtime.reads_late in (False, True):
        done = decode(runtime, PROMPT, CHAINS, TokenRule.of(sampling, None), Ending(60))
        assert done.token_ids == expected
        found.append((done.drafted, done.accepted, done.accepted_per_position, done.target_passes))
    assert found[0] == found[1] and found[0][0] > 60


@pytest.mark.parametrize("at_once", [1, 3])
def test_requests_that_are_read_late_give_plain_tokens_beside_each_other(at_once: int) -> None:
    """Those that look up text, whose rules read it or whose drafts may end early are read at every step, as before."""
    runtime = tiny_runtime("llama")
    runtime.reads_late = True
    reading = Sampling(temperature=0.8, presence_penalty=0.5, seed=11)
    methods = [lambda: CHAINS, lambda: adaptive(runtime, lookup=False), lambda: adaptive(runtime), lambda: EARLY_STOP]
    asked = [(words(i, 7) * 2, sampling, make) for i, sampling in enumerate([*SAMPLINGS, reading]) for make in methods]
    works = [decoding(runtime, ids, make(), TokenRule.of(how, None, len(ids)), Ending(40)) for ids, how, make in asked]
    plain = [decode(runtime, ids, PLAIN, TokenRule.of(how, None, len(ids)), Ending(40)) for ids, how, _ in asked]
    assert [done.token_ids for done in results_of(works, at_once)] == [done.token_ids for done in plain]
