"""A look at the model itself: how far each sub-layer turns the residual stream, and sets by dynamic programming.

`knapsack` follows KnapSpec (arXiv:2602.20217), `clasp` CLaSp (arXiv:2505.24196); both keep, for every cost that can
be saved, the path through the layers whose state stays nearest to the full model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.types import SubLayer, n_skipped_for, searchable
from ..decoding.context import Context
from ..models.rows import PassPlan, Rows
from .strategies import Study, StudyKind
from .strategies.process import Bits

TOKENS = 4  # of the window that the knapsack's states are followed for
BUCKETS = 24  # saved costs that it tells apart
LARGEST_SHARE = 0.6  # of what all searchable sub-layers cost, that is ever saved


@dataclass(frozen=True, slots=True)
class Item:
    """Sub-layers that are left out together, and the weight of that; weight 0 is never left out."""

    sub_layers: tuple[SubLayer, ...]
    weight: int


@dataclass(slots=True)
class _Paths:
    """What is left of the paths through the layers so far, one per saved weight, in rising order.

    `hidden`, `entered`: (paths, tokens, hidden_size), now and where the layer at hand began.
    """

    weights: list[int]
    skipped: list[frozenset[SubLayer]]
    hidden: Tensor
    entered: Tensor


class Look:
    """The window's tokens, each seeing the committed ones before it as the target left them, in scratch slots.

    DEVIATION: both papers' drafts read keys and values of their own; here only a row's own position is the draft's,
    which is what lets all paths run in one batch.
    """

    def __init__(self, context: Context, window: int) -> None:
        self.runtime, self.buffer = context.runtime, context.buffer
        self.scratch = context.root_slot
        first = len(context.token_ids) - window - 1
        self.inputs = context.token_ids[first:-1]
        self.positions = list(range(first, first + window))
        self.n_rows = 0.0  # that were run, in rows of the whole model
        self._plans: dict[tuple[int, ...], PassPlan] = {}
        self._n_parts = 2 * self.runtime.n_layers

    def own_states(self) -> list[Tensor]:
        """States (window, hidden_size) before the first sub-layer and after each: attention, MLP, attention, …"""
        hidden = self.runtime.embed(self.inputs, self.positions[0])
        states = [hidden]
        for layer, block in enumerate(self.runtime.blocks):
            hidden = entered = hidden.to(block.device)
            for kind in ("attn", "mlp"):
                hidden = hidden + self.delta((kind, layer), hidden, entered, self.positions)
                states.append(hidden)
        return states

    def delta(self, sub_layer: SubLayer, hidden: Tensor, entered: Tensor, positions: Sequence[int]) -> Tensor:
        """What a sub-layer adds to `hidden` (rows, hidden_size), the rows standing at those positions."""
        kind, layer = sub_layer
        block = self.runtime.blocks[layer]
        self.n_rows += len(positions) / self._n_parts
        if kind == "attn":
            group = self._plan(positions).group(block, frozenset({0}))
            return block.attention(hidden.to(block.device), [(group, self.buffer)])
        return block.mlp((entered if self.runtime.parallel else hidden).to(block.device))

    def _plan(self, positions: Sequence[int]) -> PassPlan:
        key = tuple(positions)
        if key not in self._plans:
            n = len(key)
            visible = torch.zeros((n, self.scratch + n), dtype=torch.bool)
            visible[:, : self.scratch] = torch.arange(self.scratch)[None] < torch.tensor(key)[:, None]
            visible[torch.arange(n), self.scratch + torch.arange(n)] = True
            self._plans[key] = PassPlan(self.runtime, Rows([0] * n, self.scratch, key, visible))
        return self._plans[key]


@torch.inference_mode()
def study(context: Context, kind: StudyKind, window: int, saved: Sequence[float], skip_ratio: float) -> Study:
    """Look at the latest `window` generated tokens.

    Args: saved: what leaving each searchable sub-layer out saves, in any unit. skip_ratio: bounds what `clasp` leaves
          out. The buffer must have `study_rows` slots behind the committed ones.
    """
    look = Look(context, window)
    states = look.own_states()
    turns = _turns(states, context.runtime.n_layers)
    sets: list[Bits] = []
    if kind == "knapsack":
        tokens = sorted({round((i + 1) * window / TOKENS) - 1 for i in range(min(TOKENS, window))})
        sets += _family(look, states, knapsack_items(context.runtime.n_layers, saved), tokens)
    if kind != "similarity":
        sets += _family(look, states, clasp_items(context.runtime.n_layers, skip_ratio), [window - 1])
    return Study(turns, tuple(dict.fromkeys(sets)), look.n_rows)


def study_rows(kind: StudyKind, window: int, n_layers: int) -> int:
    """Buffer slots that `study` writes at most."""
    paths = {"similarity": 0, "knapsack": BUCKETS + 1, "clasp": n_layers}[kind]
    return max(window, paths * (1 if kind == "clasp" else TOKENS))


def knapsack_items(n_layers: int, saved: Sequence[float]) -> tuple[list[Item], int]:
    """Every sub-layer with its measured cost as weight, in depth order, and the largest weight that is saved.

    Source: KnapSpec. DEVIATION: weights are whole buckets of the cost, 1 at least; KnapSpec counts attentions and
    MLPs, whose costs it fits to the context's length.
    """
    price = dict(zip(searchable(n_layers), saved, strict=True))
    bucket = LARGEST_SHARE * sum(saved) / BUCKETS
    weights = {sub: max(1, round(cost / bucket)) if bucket else 1 for sub, cost in price.items()}
    subs: list[SubLayer] = [(kind, layer) for layer in range(n_layers) for kind in ("attn", "mlp")]
    return [Item((sub,), weights.get(sub, 0)) for sub in subs], BUCKETS


def clasp_items(n_layers: int, skip_ratio: float) -> tuple[list[Item], int]:
    """Whole layers, all of one weight, and the number of them that is left out at most.

    Source: CLaSp. DEVIATION: the number is not fixed; the program's sets of every smaller number are kept too, and the
    window's last token stands for the last verified one.
    """
    items = [Item((("attn", i), ("mlp", i)), int(0 < i < n_layers - 1)) for i in range(n_layers)]
    return items, n_skipped_for(n_layers, skip_ratio) // 2


def _family(look: Look, states: Sequence[Tensor], program: tuple[list[Item], int], tokens: Sequence[int]) -> list[Bits]:
    """The best set of each saved weight, the empty one left out."""
    order = searchable(look.runtime.n_layers)
    paths = follow(look, states, *program, tokens)
    return [tuple(int(sub in skipped) for sub in order) for skipped in paths.skipped if skipped]


def follow(look: Look, states: Sequence[Tensor], items: Sequence[Item], capacity: int, tokens: Sequence[int]) -> _Paths:
    """The dynamic program: run every path through an item and around it; of equal weight the nearest is kept.

    Near is the mean cosine, over the tokens, to the full model's state at that depth. This is greedy: the nearest here
    need not lead to the nearest at the end.
    """
    index = list(tokens)
    hidden = states[0][index][None]
    paths = _Paths([0], [frozenset()], hidden, hidden)
    depth = 0
    for item in items:
        if item.sub_layers[0][0] == "attn":
            paths.entered = paths.hidden
        around, through = paths.hidden, paths.hidden
        for sub in item.sub_layers:
            through = through + _deltas(look, sub, through, paths.entered, index)
        depth += len(item.sub_layers)
        paths = _nearest(paths, item, capacity, around, through, states[depth][index])
    return paths


def _deltas(look: Look, sub: SubLayer, hidden: Tensor, entered: Tensor, index: Sequence[int]) -> Tensor:
    positions = [look.positions[i] for i in index] * hidden.shape[0]
    delta = look.delta(sub, hidden.flatten(0, 1), entered.flatten(0, 1), positions)
    return delta.to(hidden.device).view_as(hidden)


def _nearest(paths: _Paths, item: Item, capacity: int, around: Tensor, through: Tensor, own: Tensor) -> _Paths:
    both = torch.cat((through, around))
    near = F.cosine_similarity(both.float(), own.float()[None].to(both.device), dim=-1).mean(dim=1).tolist()
    n = len(paths.weights)
    best: dict[int, int] = dict(zip(paths.weights, range(n), strict=True))  # saved weight -> row of `both`
    for row, weight in enumerate(paths.weights, n):
        saved = weight + item.weight
        if item.weight and saved <= capacity and (saved not in best or near[row] > near[best[saved]]):
            best[saved] = row
    rows = [best[weight] for weight in sorted(best)]
    skipped = [paths.skipped[row % n] | (frozenset(item.sub_layers) if row >= n else frozenset()) for row in rows]
    parents = [row % n for row in rows]
    return _Paths(sorted(best), skipped, both[rows], paths.entered[parents])


def _turns(states: Sequence[Tensor], n_layers: int) -> tuple[float, ...]:
    """1 - cosine between the states before and after each searchable sub-layer, averaged over the window's rows."""

    def turn(kind: Literal["attn", "mlp"], layer: int) -> float:
        at = 2 * layer + (kind == "mlp")
        near = F.cosine_similarity(states[at].float(), states[at + 1].to(states[at].device).float(), dim=-1)
        return round(max(0.0, 1.0 - float(near.mean())), 6)

    return tuple(turn(kind, layer) for kind, layer in searchable(n_layers))
