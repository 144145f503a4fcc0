"""Candidates of a strategy, and the studies of the model that some strategies request first.

A study measures how far each sub-layer turns the residual stream, and finds layer sets by dynamic programming.
`knapsack` follows KnapSpec (arXiv:2602.20217), `clasp` follows CLaSp (arXiv:2505.24196). Both extend paths through the
layers: a path runs or skips each sub-layer, or runs it with fewer experts if these are searched. For each amount of
saved cost they keep the path whose hidden state is nearest to the full model's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.costs import CostProfile
from ..core.layer_sets import LayerSet, PartForm, SubLayer
from ..core.settings import SwiftSettings
from ..decoding.context import Context
from ..models.blocks import BufferRows
from ..models.residual import normed
from ..models.rows import PassPlan, Rows
from .strategies import Proposal, SearchProblem, Study, StudyKind, strategy_info
from .strategies.base import ExpertLevels

MIN_PAIRED_SETS = 2  # Minimum candidates per pass for strategies that score the set in use in every pass.
N_STUDY_TOKENS = 4  # Tokens of the window whose hidden states the knapsack follows.
N_BUCKETS = 24  # Number of buckets to which the knapsack rounds saved costs.
MAX_SAVED_SHARE = 0.6  # Maximum share of the searchable sub-layers' cost that the knapsack may save.


def chooses_size(settings: SwiftSettings, costs: CostProfile | None) -> bool:
    """Tell whether the strategy chooses the number of skipped sub-layers, for which it needs measured costs."""
    maximises_speedup = settings.objective == "expected_speedup" and costs is not None
    return strategy_info(settings.strategy).chooses_size and maximises_speedup


def savings_of(
    costs: CostProfile, base: LayerSet, sub_layers: Sequence[SubLayer], experts: ExpertLevels | None = None
) -> tuple[float, ...]:
    """Return the cost that each bit of a set saves, in plain passes; the formats are those of `base`.

    The first values are for skipping each of `sub_layers`. With `experts` follow the values of each layer's expert
    bits, each the saving on top of the bit before it.
    """
    full_set = base.skipping(())
    full_cost = costs.draft_cost(full_set)
    costs_without_one = (costs.draft_cost(base.skipping([sub_layer])) for sub_layer in sub_layers)
    savings = [max(0.0, full_cost - cost_without) for cost_without in costs_without_one]
    if experts is None:
        return tuple(savings)
    for layer in experts.layers:
        sets_with_fewer = (replace(full_set, experts=((f"mlp:{layer}", number),)) for number in experts.numbers)
        cost_levels = [costs.draft_cost(replace(full_set, experts=())), *map(costs.draft_cost, sets_with_fewer)]
        savings += [max(0.0, more - fewer) for more, fewer in pairwise(cost_levels)]
    return tuple(savings)


class Proposer:
    """Asks the settings' strategy for candidates, which keep the formats of `base`; runs the studies that it requests.

    `chooses_size`: the strategy chooses the number of skipped sub-layers. `paired`: every pass also scores the set in
    use, and takes place only once half of its window is new text.

    Args: sub_layers: those that a candidate may skip. project: maps a set to the nearest allowed one; None: all sets
          are allowed. whole_layers: a candidate skips both sub-layers of a layer or neither.
    """

    def __init__(
        self,
        settings: SwiftSettings,
        costs: CostProfile | None,
        base: LayerSet,
        skip_ratio: float,
        project: Callable[[LayerSet], LayerSet] | None,
        whole_layers: bool,
        sub_layers: tuple[SubLayer, ...],
    ) -> None:
        info = strategy_info(settings.strategy)
        self.chooses_size, self.paired = chooses_size(settings, costs), info.chooses_size
        experts, savings = None, None
        if self.chooses_size and costs is not None:
            experts = ExpertLevels.of(costs.experts, base.n_layers)
            savings = savings_of(costs, base, sub_layers, experts)
        self.patience = settings.patience
        if self.chooses_size and info.patience is not None:
            self.patience = min(self.patience, info.patience)
        self.rows_run = 0.0  # Rows run by studies, in rows of the full model.
        self._window, self._skip_ratio, self._n_layers = settings.context_window, skip_ratio, base.n_layers
        # Buffer slots that a study needs after the committed ones.
        self.scratch_rows = 0 if info.study is None else study_slots(info.study, self._window, base.n_layers)
        self._savings = (1.0,) * len(sub_layers) if savings is None else savings
        self._sub_layers, self._experts, self._whole_layers = sub_layers, experts, whole_layers
        problem = SearchProblem(
            base,
            base.n_skipped,
            settings.seed,
            interval=settings.bayes_interval,
            deterministic=settings.deterministic,
            window=self._window,
            savings=savings,
            project=project,
            experts=experts,
            whole_layers=whole_layers,
            sub_layers=sub_layers,
        )
        self.strategy = info.make(problem)

    def n_new_candidates(self, n_finalists: int, batch: int, n_other: int) -> int:
        """Return the number of new candidates for a pass that also scores `n_other` sets, finalists included."""
        if self.paired:
            return max(1, max(batch, MIN_PAIRED_SETS) - n_finalists)
        return 0 if n_finalists else batch - n_other

    def study_row_limit(self, prompt_id: str) -> int:
        """Return the maximum rows that the study due on this prompt runs; 0 if no study is due."""
        kind = self.strategy.wants(prompt_id)
        return 0 if kind is None else max_study_rows(kind, self._window, self._n_layers, self._experts)

    def next_candidates(self, context: Context, prompt_id: str, n: int) -> list[Proposal]:
        """Return the next `n` candidates; run a study of the model before them if the strategy requests one."""
        kind = self.strategy.wants(prompt_id) if n else None
        if kind is not None:
            study_result = study(
                context,
                kind,
                self._window,
                self._sub_layers,
                self._savings,
                self._skip_ratio,
                self._experts,
                self._whole_layers,
            )
            self.rows_run += study_result.rows
            self.strategy.study(prompt_id, study_result)
        return [self.strategy.propose() for _ in range(n)]


@dataclass(frozen=True, slots=True)
class Change:
    """A way to run a study's item that saves cost: skip it, or run it with this number of `experts`.

    `bits`: indices of the layer set's bits that are 1 for it. `weight`: the cost that it saves, in buckets.
    """

    bits: tuple[int, ...]
    weight: int
    experts: int | None = None


@dataclass(frozen=True, slots=True)
class StudyItem:
    """Sub-layers that a path either runs in full or with one of the changes."""

    sub_layers: tuple[SubLayer, ...]
    changes: tuple[Change, ...] = ()


@dataclass(slots=True)
class _Paths:
    """The nearest path through the layers so far for each saved weight, in ascending order of weight.

    `bits`: for each path, the indices of its set's bits that are 1. `hidden`, `entered`: states of shape
    (paths, tokens, hidden_size), now and at the start of the current layer.
    """

    weights: list[int]
    bits: list[frozenset[int]]
    hidden: Tensor
    entered: Tensor


Program = tuple[list[StudyItem], int]  # Items of a dynamic program in depth order, and the maximum saved weight.


class StudyPass:
    """Runs single sub-layers on a window's tokens, in scratch slots.

    DEVIATION: in both papers a draft reads the keys and values that it computed itself. Here a row reads those that the
    target committed, except for its own position, so that all paths can run in one batch.
    """

    def __init__(self, context: Context, window: int) -> None:
        self.runtime, self.buffer = context.runtime, context.buffer
        self.scratch_slot = context.root_slot
        first_position = len(context.token_ids) - window - 1
        self.inputs = context.token_ids[first_position:-1]
        self.positions = list(range(first_position, first_position + window))
        self.n_rows = 0.0  # Rows run so far, in rows of the full model.
        self._plans: dict[tuple[bool, tuple[int, ...]], PassPlan] = {}
        self._layer_inputs: Tensor | None = None  # Per-layer inputs of the window's tokens; see `PerLayerInputs`.
        self._n_sub_layers = 2 * self.runtime.n_layers

    def run_window(self) -> list[Tensor]:
        """Return the hidden states (window, hidden_size) before the first sub-layer and after each sub-layer."""
        hidden = self.runtime.embed(self.inputs, self.positions[0])
        states = [hidden]
        for layer, block in enumerate(self.runtime.blocks):
            hidden = entered = hidden.to(block.device)
            for kind in ("attn", "mlp"):
                hidden = hidden + self.delta((kind, layer), hidden, entered, self.positions)
                hidden = self.end_layer((kind, layer), hidden, self.positions)
                states.append(hidden)
        return states

    def end_layer(self, sub_layer: SubLayer, hidden: Tensor, positions: Sequence[int]) -> Tensor:
        """Apply what a layer does after its MLP to states (…, hidden_size), if `sub_layer` is that MLP."""
        kind, layer = sub_layer
        layer_ending = self.runtime.blocks[layer].end
        if layer_ending is None or kind != "mlp":
            return hidden
        if self._layer_inputs is None and self.runtime.layer_inputs is not None:
            self._layer_inputs = self.runtime.inputs_of([PassPlan(self.runtime, Rows(self.inputs, self.positions[0]))])
        rows = [position - self.positions[0] for position in positions]
        layer_inputs = None if self._layer_inputs is None else self._layer_inputs[rows]
        return layer_ending.ended(hidden.flatten(0, -2), layer_inputs).view_as(hidden)

    def delta(
        self,
        sub_layer: SubLayer,
        hidden: Tensor,
        entered: Tensor,
        positions: Sequence[int],
        experts: int | None = None,
    ) -> Tensor:
        """Return the output that a sub-layer adds to `hidden` (rows, hidden_size), whose rows have these positions.

        Args: entered: the states at the start of the layer. experts: experts per row; None: as many as the model takes.
        """
        kind, layer = sub_layer
        block = self.runtime.blocks[layer]
        if kind not in block.kinds:
            return torch.zeros_like(hidden)
        self.n_rows += len(positions) / self._n_sub_layers  # Rows with fewer experts count in full.
        if kind == "attn":
            group = self._plan_pass(positions, block.source == layer).group(block, frozenset({0}))
            inputs = normed(block.parts.attn_norm, hidden.to(block.device))
            return block.attention(inputs, BufferRows([(group, self.buffer)]))
        parts = None if experts is None else self.runtime.copies.parts("mlp", layer, PartForm(None, experts))
        inputs = (entered if self.runtime.parallel else hidden).to(block.device)
        return block.mlp(normed(block.parts.mlp_norm, inputs), parts)

    def _plan_pass(self, positions: Sequence[int], writes: bool) -> PassPlan:
        """Return the plan of rows at these positions, which read the committed slots before their position.

        Args: writes: each row also reads the scratch slot that it writes for its own position. If False, it reads the
              committed slot of its own position.
        """
        key = writes, tuple(positions)
        if key not in self._plans:
            n_rows = len(positions)
            visible = torch.zeros((n_rows, self.scratch_slot + n_rows), dtype=torch.bool)
            ends = torch.tensor(positions)[:, None] + (not writes)
            visible[:, : self.scratch_slot] = torch.arange(self.scratch_slot)[None] < ends
            visible[torch.arange(n_rows), self.scratch_slot + torch.arange(n_rows)] = writes
            rows = Rows([0] * n_rows, self.scratch_slot, tuple(positions), visible)
            self._plans[key] = PassPlan(self.runtime, rows)
        return self._plans[key]


@torch.inference_mode()
def study(
    context: Context,
    kind: StudyKind,
    window: int,
    sub_layers: Sequence[SubLayer],
    savings: Sequence[float],
    skip_ratio: float,
    experts: ExpertLevels | None = None,
    whole_layers: bool = False,
) -> Study:
    """Study the latest `window` generated tokens. The buffer must have `study_slots` free slots.

    Args: sub_layers: those that a set may skip. savings: the cost that each bit of a set saves, as from `savings_of`,
          in any unit. skip_ratio: maximum share of sub-layers that `clasp` skips. whole_layers: a set skips both
          sub-layers of a layer or neither.
    """
    context.load.n_beside += 1
    study_pass = StudyPass(context, window)
    states = study_pass.run_window()
    n_layers = context.runtime.n_layers
    turns = _measure_turns(states, sub_layers)
    programs: list[tuple[Program, Sequence[int]]] = []
    if kind == "knapsack":
        token_indices = sorted(
            {round((i + 1) * window / N_STUDY_TOKENS) - 1 for i in range(min(N_STUDY_TOKENS, window))}
        )
        programs.append((knapsack_items(n_layers, sub_layers, savings, experts, whole_layers), token_indices))
    if kind != "similarity":
        programs.append((clasp_items(n_layers, sub_layers, skip_ratio), [window - 1]))
    path_bits = [
        bits
        for program, token_indices in programs
        for bits in extend_paths(study_pass, states, *program, token_indices).bits
    ]
    sets = (tuple(int(index in bits) for index in range(len(savings))) for bits in path_bits if bits)
    return Study(turns, tuple(dict.fromkeys(sets)), study_pass.n_rows)


def study_slots(kind: StudyKind, window: int, n_layers: int) -> int:
    """Return the maximum number of buffer slots that `study` writes."""
    max_paths = {"similarity": 0, "knapsack": N_BUCKETS + 1, "clasp": n_layers}[kind]
    return max(window, max_paths * (1 if kind == "clasp" else N_STUDY_TOKENS))


def max_study_rows(kind: StudyKind, window: int, n_layers: int, experts: ExpertLevels | None = None) -> int:
    """Return the maximum number of rows that `study` runs, in rows of the full model: the window's and the paths'."""
    programs = {"similarity": (), "knapsack": ("knapsack", "clasp"), "clasp": ("clasp",)}[kind]
    # A path runs a layer's MLP once more for each number of experts.
    n_extra_mlps = 0 if experts is None else len(experts.layers) * len(experts.numbers)
    max_knapsack_rows = math.ceil((N_BUCKETS + 1) * N_STUDY_TOKENS * (1 + n_extra_mlps / (2 * n_layers)))
    max_path_rows = {"knapsack": max_knapsack_rows, "clasp": n_layers}
    return window + sum(max_path_rows[program] for program in programs)


def knapsack_items(
    n_layers: int,
    searched: Sequence[SubLayer],
    savings: Sequence[float],
    experts: ExpertLevels | None = None,
    whole_layers: bool = False,
) -> Program:
    """Return every sub-layer with its changes in depth order, and the maximum saved weight, for the knapsack.

    With `whole_layers` the items are layers, which are skipped as a whole.

    Source: KnapSpec. DEVIATION: a weight is the saved cost in buckets, at least 1. KnapSpec counts skipped attention
    and MLP sub-layers, with costs fitted to the context length. Here an MLP with experts may also take fewer of them.
    """
    bit_of = {sub_layer: bit for bit, sub_layer in enumerate(searched)}
    bucket_cost = MAX_SAVED_SHARE * sum(savings[: len(bit_of)]) / N_BUCKETS

    def change(bits: tuple[int, ...], n_experts: int | None = None) -> Change:
        saved_cost = sum(savings[bit] for bit in bits)
        return Change(bits, max(1, round(saved_cost / bucket_cost)) if bucket_cost else 1, n_experts)

    changes = {sub_layer: [change((bit,))] for sub_layer, bit in bit_of.items()}
    for layer, n_experts, bits in () if experts is None else experts.changes(len(bit_of)):
        changes["mlp", layer].append(change(bits, n_experts))
    sub_layers: list[SubLayer] = [(kind, layer) for layer in range(n_layers) for kind in ("attn", "mlp")]
    if whole_layers:
        items = []
        for layer in range(n_layers):
            pair: tuple[SubLayer, SubLayer] = ("attn", layer), ("mlp", layer)
            bits = tuple(bit_of[sub_layer] for sub_layer in pair if sub_layer in bit_of)
            items.append(StudyItem(pair, (change(bits), *changes.get(pair[1], [])[1:]) if bits else ()))
        return items, N_BUCKETS
    return [StudyItem((sub_layer,), tuple(changes.get(sub_layer, ()))) for sub_layer in sub_layers], N_BUCKETS


def clasp_items(n_layers: int, searched: Sequence[SubLayer], skip_ratio: float) -> Program:
    """Return the layers as items of weight 1, and the maximum number of skipped layers, for CLaSp's program.

    Source: CLaSp. DEVIATION: CLaSp skips a fixed number of layers; here the sets of every smaller number are kept as
    well. The window's last token stands for the last verified token.
    """
    bit_of = {sub_layer: bit for bit, sub_layer in enumerate(searched)}
    layers: list[tuple[SubLayer, SubLayer]] = [(("attn", layer), ("mlp", layer)) for layer in range(n_layers)]
    items = []
    for sub_layers in layers:
        bits = tuple(bit_of[sub_layer] for sub_layer in sub_layers if sub_layer in bit_of)
        items.append(StudyItem(sub_layers, (Change(bits, 1),) if bits else ()))
    n_searched = sum(bool(item.changes) for item in items)
    return items, round(skip_ratio * len(searched)) * n_searched // max(1, len(searched))


def extend_paths(
    study_pass: StudyPass,
    states: Sequence[Tensor],
    items: Sequence[StudyItem],
    capacity: int,
    token_indices: Sequence[int],
) -> _Paths:
    """Run the dynamic program: extend each path by each way to run an item; keep the nearest path per weight.

    Nearest means the highest cosine to the full model's state at that depth, averaged over the tokens. The program is
    greedy: the path that is nearest at one depth need not lead to the nearest one at the end.

    Args: states: of the full model, from `run_window`. capacity: maximum saved weight. token_indices: tokens of the
          window whose states are followed.
    """
    token_index_list, positions = list(token_indices), [study_pass.positions[i] for i in token_indices]
    hidden = states[0][token_index_list][None]
    paths = _Paths([0], [frozenset()], hidden, hidden)

    def run(item: StudyItem, experts: int | None = None) -> Tensor:
        """Return the states of all paths after they run an item."""
        hidden = paths.hidden
        row_positions = positions * hidden.shape[0]
        for sub_layer in item.sub_layers:
            delta = study_pass.delta(
                sub_layer, hidden.flatten(0, 1), paths.entered.flatten(0, 1), row_positions, experts
            )
            hidden = hidden + delta.to(hidden.device).view_as(hidden)
            hidden = study_pass.end_layer(sub_layer, hidden, row_positions)
        return hidden

    def skip(item: StudyItem) -> Tensor:
        """Return the states of all paths after they skip an item."""
        return study_pass.end_layer(item.sub_layers[-1], paths.hidden, positions * paths.hidden.shape[0])

    depth = 0
    for item in items:
        if item.sub_layers[0][0] == "attn":
            paths.entered = paths.hidden
        extensions = [(Change((), 0), run(item))]
        for change in item.changes:
            extensions.append((change, skip(item) if change.experts is None else run(item, change.experts)))
        depth += len(item.sub_layers)
        paths = _keep_nearest(paths, extensions, capacity, states[depth][token_index_list])
    return paths


def _keep_nearest(
    paths: _Paths, extensions: Sequence[tuple[Change, Tensor]], capacity: int, full_states: Tensor
) -> _Paths:
    """Return the nearest extended path for each saved weight up to `capacity`.

    Args: extensions: changes with the states of all paths after each. full_states: (tokens, hidden_size) of the full
          model.
    """
    all_hidden = torch.cat([hidden for _, hidden in extensions])
    full = full_states.float()[None].to(all_hidden.device)
    cosines = F.cosine_similarity(all_hidden.float(), full, dim=-1).mean(dim=1).tolist()
    n_paths = len(paths.weights)
    rows = [(path, change) for change, _ in extensions for path in range(n_paths)]
    best_row: dict[int, int] = {}  # Saved weight -> its row in `all_hidden`.
    for row, (path, change) in enumerate(rows):
        weight = paths.weights[path] + change.weight
        if weight <= capacity and (weight not in best_row or cosines[row] > cosines[best_row[weight]]):
            best_row[weight] = row
    nearest_rows = [best_row[weight] for weight in sorted(best_row)]
    parents = [rows[row][0] for row in nearest_rows]
    bits = [paths.bits[rows[row][0]].union(rows[row][1].bits) for row in nearest_rows]
    return _Paths(sorted(best_row), bits, all_hidden[nearest_rows], paths.entered[parents])


def _measure_turns(states: Sequence[Tensor], sub_layers: Sequence[SubLayer]) -> tuple[float, ...]:
    """Return 1 - cosine of the states before and after each searchable sub-layer, averaged over the window's rows."""
    state_indices = [2 * layer + (kind == "mlp") for kind, layer in sub_layers]
    pairs = [
        (states[state_index].float(), states[state_index + 1].to(states[state_index].device).float())
        for state_index in state_indices
    ]
    cosines = [float(F.cosine_similarity(*pair, dim=-1).mean()) for pair in pairs]
    return tuple(round(max(0.0, 1.0 - cosine), 6) for cosine in cosines)
