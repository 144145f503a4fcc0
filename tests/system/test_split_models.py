"""Models over several devices: whatever is computed together lies together, and comes back to where requests are.

The devices are the CPU and torch's `meta`, whose tensors hold nothing: on a move back they become zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from families import tiny_runtime, variants
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from swiftopt.core.layer_sets import LayerSet
from swiftopt.decoding.engine import alone
from swiftopt.models.families import FAMILIES
from swiftopt.models.rows import Rows
from swiftopt.models.runtime import Runtime
from swiftopt.models.transfers import uploaded
from swiftopt.papers.early_exit import Heads, Probe, StagedPass

CPU, META = torch.device("cpu"), torch.device("meta")
TREE = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)


class Apart(TorchFunctionMode):
    """Refuses what two GPUs refuse: any function of tensors of both but one that moves them."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "to" and args[0].is_meta and CPU in args[1:]:
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        found = {part.device for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor) and part.dim()}
        assert len(found) < 2 or name in ("to", "copy_"), f"{name} of tensors on {found}"
        return func(*args, **kwargs)


def split(family: str) -> Runtime:
    """The last two layers, the final norm and the head lie on the other device."""
    runtime = tiny_runtime(family, torch.float32)
    head: Any = runtime.head_module(None)
    head.weight = torch.nn.Parameter(head.weight.clone(), requires_grad=False)  # not the embedding's
    layers = runtime.hf_model.get_submodule(FAMILIES[runtime.config.model_type].layers)
    for module in (*cast(Any, layers)[2:], runtime.final_norm, head):
        module.to(META)
    for block in runtime.blocks[2:]:
        block.device = META
    runtime._head_device, runtime.one_device = META, False  # which it would see, but that it refuses such weights
    return runtime


@pytest.mark.parametrize("family", variants())
def test_passes_of_a_split_model_run_on_their_layers_devices(family: str) -> None:
    runtime = split(family)
    buffer, variants = runtime.new_buffer(32), (LayerSet(4), LayerSet(4, frozenset({1}), frozenset({2})))
    several = Rows([1, 2, 3, 4], 6, [6, 7, 6, 7], torch.eye(4, dtype=torch.bool), variants)
    with Apart():
        for rows in (Rows([1, 2, 3], 0), Rows([1, 2, 3], 3, [3, 4, 4], TREE), several):
            for wanted in (None, [2]):
                assert runtime.forward(rows, buffer, wanted).device == CPU


@pytest.mark.parametrize("full", [False, True])
def test_early_exits_of_a_split_model_are_read_on_the_first_device(full: bool) -> None:
    """Heads and probes lie where the embedding does, whatever device the states come from."""
    runtime = split("llama")
    heads = Heads({depth: torch.zeros(97 if full else 32, 32) for depth in (1, 2, 3)}, full)
    staged = StagedPass(runtime, runtime.new_buffer(32), 0)
    with Apart():
        for token_id in (5, 7):
            staged.add(token_id)
            for depth in heads.depths:
                read = alone(staged.advance(depth, with_logits=True)).device
                assert read == CPU and staged.newest.device == (META if depth > 2 else CPU)
                assert heads.logits(runtime, depth, staged.newest).device == CPU
                assert Probe(depth, torch.zeros(32), 0.0).acceptance(staged.newest).device == CPU
        assert alone(staged.finish()).device == CPU


def test_only_host_tensors_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch pins no GPU's memory, which a draft model on one hands to a target on another."""
    pinned = list[torch.device]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Tensor, "pin_memory", lambda own: (pinned.append(own.device), own)[1])
    for values in ([3, 5], torch.tensor([3, 5]), torch.tensor([3, 5], device=META)):
        assert uploaded(values, torch.device("meta", 1)).device == META
    assert pinned == [CPU, CPU]
