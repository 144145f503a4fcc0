"""Builds the methods that ablations compare, among them draft trees of heads that predict several tokens ahead.

A head of hop h reads a token's state and predicts the token h positions later; hop 1 at the last layer is the model's
own head. The heads' most probable tokens form a chain, and the second choice at each position opens a side branch
(AdaDecode, appendix E).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any, cast

import torch
from torch import Tensor

from ..core.errors import LearnedNotFound
from ..core.settings import PAPER_BRANCHING, PRESETS, SwiftSettings
from ..core.types import Sampling
from ..decoding.draft import Draft, Drafter, Outcome
from ..decoding.draft_tree import DraftTree, tree_rows
from ..decoding.methods import Method, Resources, build, method_info
from ..decoding.methods.chains import ChainDrafter
from ..decoding.session import Session
from ..decoding.verify import ChainRatio, SeveralRatio, TargetWalk
from ..decoding.work import PassGenerator
from ..models.rows import Pass
from ..optimizer.search import Search
from ..optimizer.task_state import sub_layers_of
from ..tasks.recipes import MakingRecipes, Recipes
from . import self_sd
from .early_exit import Heads, StackedLayers, StagedPass
from .methods.chains import AdaptiveStop, AdaptiveThreshold
from .methods.early_exit import (
    AdaDecodeSettings,
    AdaSpeedSettings,
    EarlyDrafter,
    PipelineDrafter,
    early_exit,
)
from .methods.guesses import merge_paths
from .parts import BRIEF_EPOCHS, HEADS_S, MIN_TOKENS, SELF_SD_PROMPTS, SELF_SD_TOKENS
from .training.features import Features, features_of
from .training.settings import HeadSettings, ignore
from .training.trainer import HeadObjective, Trainer, train
from .verifiers import Rollback

MIXED_TASK = "mixed"  # Task name under which heads trained on several streams are stored.
N_HOPS = 3
N_CHOICES = 2  # Most probable tokens that each head adds to the draft tree.

HeadsOf = Callable[[], Heads]
HopsOf = Callable[[], Sequence[Heads]]


class AblationRecipes(MakingRecipes):
    """Builds the methods of variants; looks up or makes each part when a variant first needs it."""

    def method(self, name: str, **settings: Any) -> Method:
        return build(name, self.of(name, self.task).parts, method_info(name).settings_from(settings))

    def search(self, **settings: Any) -> Search:
        """Start SWIFT's search with its published settings, overridden by `settings`."""
        tuning = replace(SwiftSettings(**PRESETS["swift"].tuning), **settings)
        ratio = tuning.start_skip_ratio(self.runtime.info.n_parameters)
        return Search("", self.runtime.whole, sub_layers_of(self.runtime), tuning, ratio, None)

    def self_sd(self, steps: int) -> Method:
        """Return Self-SD with a layer set found in `steps` steps on `SELF_SD_PROMPTS` prompts."""
        self.on_step(f"make: Self-SD's layer set, by {steps} candidates of its search")
        session = Session(self.runtime, Sampling(), min(SELF_SD_TOKENS, self.session.max_new_tokens))
        search_result = self_sd.search(session, self.prompts[:SELF_SD_PROMPTS], steps)
        return build("self-sd", Resources(self.runtime, search_result.best.layer_set), AdaptiveThreshold())

    def branching(self) -> Method:
        """Return Self-SD with its layer set and threshold rule, but with SWIFT's draft-tree branching."""
        model = self.of("self-sd", self.task).parts.skipped()
        drafter = ChainDrafter(model, AdaptiveStop.of(AdaptiveThreshold()), PAPER_BRANCHING, sampled=True)
        return Method("self-sd", drafter, SeveralRatio("without"))

    def marginal(self) -> Method:
        """Return AdaSPEED's early exit with Draft & Verify's rule, which compares each token's own confidence."""
        settings = AdaSpeedSettings()
        model = early_exit(self.of("adaspeed", self.task).parts, settings.exit_layer)
        return Method("draft-verify", ChainDrafter(model, AdaptiveStop.of(settings), sampled=True), ChainRatio())

    def early(self, heads: HeadsOf, verified: bool = True) -> Method:
        settings = AdaDecodeSettings()
        drafter = EarlyDrafter(heads(), settings.early_threshold, settings.max_early)
        return Method("adadecode", drafter, ChainRatio() if verified else Rollback(math.inf))

    def stacked(self, heads: HeadsOf, verified: bool = True) -> Method:
        drafter = PipelineDrafter(heads(), 0.0, StackedLayers(self.runtime))
        return Method("paradecode", drafter, TargetWalk() if verified else Rollback(math.inf))

    def trees(self, hops: HopsOf, early: bool) -> Method:
        return Method("hop-heads", HopDrafter(hops(), early, AdaDecodeSettings().early_threshold), TargetWalk())

    def added_by_trees(self, hops: HopsOf, early: bool) -> Heads:
        """Return the heads that trees add to the model; without `early` only the last layer's heads of later hops."""
        hop_heads = hops()
        depths = hop_heads[0].depths
        used_heads = [(depth, hop) for hop in range(N_HOPS) for depth in depths if early or depth == depths[-1]]
        added_transforms = [
            hop_heads[hop].transforms[depth] for depth, hop in used_heads if (depth, hop) != (depths[-1], 0)
        ]
        return Heads(dict(enumerate(added_transforms)))

    def heads(self) -> Heads:
        return cast(Heads, self.weights(self.learned("heads", self.task)))

    def one_head(self) -> Heads:
        """Return only the middle head of the task's heads."""
        heads = self.heads()
        depth = heads.depths[len(heads.depths) // 2]
        return Heads({depth: heads.transforms[depth]}, heads.full)

    def original_head(self) -> Heads:
        return Heads(
            {
                depth: torch.eye(transform.shape[-1]).to(transform)
                for depth, transform in self.heads().transforms.items()
            }
        )

    def mixed_heads(self) -> Heads:
        """Return heads that were trained on several streams.

        Raises: LearnedNotFound: no such heads are stored; training them here is impossible without the other streams.
        """
        record = Recipes.learned(self, "heads", MIXED_TASK)
        if record.task != MIXED_TASK:
            raise LearnedNotFound("no mixed-domain heads are stored: train them with several --stream and --task mixed")
        return cast(Heads, self.weights(record))

    def full_heads(self) -> Heads:
        """Train full-size heads at the depths of the task's heads for `HEADS_S` seconds."""
        n_tokens = self.session.max_new_tokens
        settings = HeadSettings(epochs=BRIEF_EPOCHS, layers=self.heads().depths, full=True, max_new_tokens=n_tokens)
        self.on_step(f"make: whole heads, by {HEADS_S:.0f} s of training")
        return cast(Heads, train(self.runtime, self.prompts, settings, budget_s=HEADS_S).model)

    @torch.no_grad()
    def hop_heads(self) -> list[Heads]:
        """Train heads of every hop at the last layer and the task's two deepest heads, in HOPS * HEADS_S seconds."""
        depths = (*self.heads().depths[-2:], self.runtime.n_layers)
        budget_s = N_HOPS * HEADS_S
        self.on_step(f"make: heads that predict {N_HOPS} tokens ahead, by {budget_s:.0f} s of training")
        session = Session(self.runtime, Sampling(), max(MIN_TOKENS, self.session.max_new_tokens))
        started, features_of_texts, heads = monotonic(), list[Features](), list[Heads]()
        for prompt in self.prompts:
            if not features_of_texts or monotonic() - started < budget_s / 2:
                features_of_texts.append(features_of(session, prompt, depths))
        for hop in range(1, N_HOPS + 1):
            shifted_features = Features.join([shift_targets(text, hop) for text in features_of_texts])
            objective = HeadObjective(self.runtime, shifted_features, depths, full=False)
            left_s = (budget_s - (monotonic() - started)) / (N_HOPS + 1 - hop)
            trainer = Trainer(objective, HeadSettings(epochs=BRIEF_EPOCHS), max(1.0, left_s))
            trainer.run(ignore)
            heads.append(objective.model(trainer.weights))
        return heads


class HopDrafter(Drafter):
    """Drafts a tree from the last-layer state of the token before the root; with `early`, from the root's early state.

    With `early`, the root's pass stops at the first layer whose hop-1 head has a confidence above `threshold`. Its tree
    is one token deeper than one drafted from the last layer, and the root's other layers are run with the tree.

    DEVIATION: Medusa's tree has 64 nodes, for a GPU; this one has as many as rows are cheap on a CPU.

    Args: hops: `hops[h - 1]` are the heads of hop h, at the same layers, the last one included.
    """

    max_width = N_HOPS + 1

    def __init__(self, hops: Sequence[Heads], early: bool, threshold: float) -> None:
        self.hops, self.early, self.threshold, self.max_depth = tuple(hops), early, threshold, len(hops)

    def start(self) -> None:
        self._state: Tensor | None = None  # Last-layer state (1, hidden_size) of the token before the root.
        self._states: list[Tensor] = []  # Last-layer states (rows, hidden_size) of the latest target pass.

    def draft(self, room: int) -> PassGenerator[Draft]:
        context = self.context
        root_id, depth, hidden, predicted = context.token_ids[-1], 0, None, list[Tensor]()
        if self.early and room:
            staged = StagedPass(context.runtime, context.buffer, context.root_slot)
            staged.add(root_id)
            for depth in self.hops[0].depths[:-1]:
                yield from staged.advance(depth)
                hidden = staged.newest
                logits = self.hops[0].logits(context.runtime, depth, hidden)[0]
                if context.rule.confidence(context.scores([], logits))[1] > self.threshold:
                    predicted = [logits, *self._later(depth, hidden)]
                    break
        if not predicted and self._state is not None:
            predicted = self._later(context.runtime.n_layers, self._state)
        choices = [logits.topk(N_CHOICES).indices.tolist() for logits in predicted]
        first_choices, positions = [top_ids[0] for top_ids in choices], range(len(choices))
        paths = (
            [
                first_choices,
                *(
                    [*first_choices[:position], choices[position][1], *first_choices[position + 1 :]]
                    for position in positions
                ),
            ]
            if first_choices
            else []
        )
        tree = merge_paths(root_id, paths, room)
        return Draft(tree, staged=self._checked(tree, depth, hidden))

    def observe(self, outcome: Outcome) -> None:
        (checked_states,) = self._states
        node = outcome.walk.path[-1] if outcome.walk.path else 0
        self._state = checked_states[node : node + 1]

    def _later(self, depth: int, state: Tensor) -> list[Tensor]:
        """Return the predictions of hops after the first, logits (vocab,), from a state (1, hidden_size) at `depth`."""
        return [heads.logits(self.context.runtime, depth, state)[0] for heads in self.hops[1:]]

    def _checked(self, tree: DraftTree, depth: int, hidden: Tensor | None) -> PassGenerator[Tensor]:
        """Return the target's logits for a tree whose root has run `depth` layers; store the last-layer states."""
        context = self.context
        runtime, n_layers = context.runtime, context.runtime.n_layers
        rows = tree_rows(tree.token_ids, tree.parents, context.root_slot)
        self._states = []
        if hidden is None:
            return (yield Pass(runtime, rows, context.buffer, capture={n_layers: self._states}))
        if tree.n_nodes > 1:
            later_rows, states_below = tree_rows(tree.token_ids[1:], tree.parents, context.root_slot), list[Tensor]()
            yield Pass(runtime, later_rows, context.buffer, (), {depth: states_below}, layers=(0, depth))
            hidden = torch.cat((hidden, *states_below))
        remaining_layers = (depth, n_layers)
        return (
            yield Pass(
                runtime, rows, context.buffer, None, {n_layers: self._states}, hidden=hidden, layers=remaining_layers
            )
        )


def shift_targets(text: Features, hop: int) -> Features:
    """Pair each position's hidden states with the final state `hop` - 1 positions later, as training targets."""
    n_rows = max(0, text.n_rows - hop + 1)
    return Features({depth: hidden[:n_rows] for depth, hidden in text.hidden.items()}, text.final[hop - 1 :])
