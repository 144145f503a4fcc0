"""Builds the methods that ablations compare, among them draft trees of heads that predict several tokens ahead.

A head of hop h reads a token's state and predicts the token h positions later; hop 1 at the last layer is the model's
own head. The heads' most probable tokens form a chain. At each position the head's second choice starts a branch, which
continues with the chain's later tokens. Source: AdaDecode, appendix E.
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
from .training.settings import MIXED_TASK, HeadSettings, ignore
from .training.trainer import HeadObjective, Trainer, train
from .verifiers import Rollback

N_HOPS = 3
N_CHOICES = 2  # Most probable tokens that each head adds to the draft tree.

HeadsOf = Callable[[], Heads]
HopsOf = Callable[[], Sequence[Heads]]


class AblationRecipes(MakingRecipes):
    """Builds the methods of variants; looks up or makes a part when a variant first needs it."""

    def method(self, name: str, **settings: Any) -> Method:
        return build(name, self.of(name, self.task).parts, method_info(name).settings_from(settings))

    def search(self, **settings: Any) -> Search:
        """Start SWIFT's search with its published settings, overridden by `settings`."""
        tuning = replace(SwiftSettings(**PRESETS["swift"].tuning), **settings)
        ratio = tuning.start_skip_ratio(self.runtime.info.n_parameters)
        return Search("", self.runtime.whole, sub_layers_of(self.runtime), tuning, ratio, None)

    def self_sd(self, steps: int) -> Method:
        """Return Self-SD with the best layer set of a search of `steps` candidates on `SELF_SD_PROMPTS` prompts."""
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
        """Return AdaSPEED's early exit with Draft & Verify's rule, which compares single confidences, not products."""
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
        """Return the heads that trees add to the model: with `early` those of all depths, else of the last layer.

        Hop 1 at the last layer is the model's own head and not counted.
        """
        hop_heads = hops()
        depths = hop_heads[0].depths
        added_transforms = [
            heads.transforms[depth]
            for heads in hop_heads
            for depth in depths
            if (early or depth == depths[-1]) and not (heads is hop_heads[0] and depth == depths[-1])
        ]
        return Heads(dict(enumerate(added_transforms)))

    def heads(self) -> Heads:
        return cast(Heads, self.weights(self.learned("heads", self.task)))

    def one_head(self) -> Heads:
        """Return the middle one of the task's heads."""
        heads = self.heads()
        depth = heads.depths[len(heads.depths) // 2]
        return Heads({depth: heads.transforms[depth]}, heads.full)

    def original_head(self) -> Heads:
        """Return the model's own head, as identity transforms at the depths of the task's heads."""
        return Heads(
            {
                depth: torch.eye(transform.shape[-1]).to(transform)
                for depth, transform in self.heads().transforms.items()
            }
        )

    def mixed_heads(self) -> Heads:
        """Return the stored heads that were trained on several streams.

        Raises: LearnedNotFound: there are none. They cannot be trained here, where only one stream is known.
        """
        record = Recipes.learned(self, "heads", MIXED_TASK)
        if record.task != MIXED_TASK:
            raise LearnedNotFound("no mixed-domain heads are stored: train them with several --stream and --task mixed")
        return cast(Heads, self.weights(record))

    def full_heads(self) -> Heads:
        """Train full-parameterized heads at the depths of the task's heads for `HEADS_S` seconds."""
        n_tokens = self.session.max_new_tokens
        settings = HeadSettings(epochs=BRIEF_EPOCHS, layers=self.heads().depths, full=True, max_new_tokens=n_tokens)
        self.on_step(f"make: full-parameterized heads, by {HEADS_S:.0f} s of training")
        return cast(Heads, train(self.runtime, self.prompts, settings, budget_s=HEADS_S).model)

    @torch.no_grad()
    def hop_heads(self) -> list[Heads]:
        """Train heads of hops 1 to N_HOPS, in N_HOPS * HEADS_S seconds of which half may go into the completions.

        Returns: the heads of each hop, at the depths of the task's two deepest heads and at the last layer.
        """
        depths = (*self.heads().depths[-2:], self.runtime.n_layers)
        budget_s = N_HOPS * HEADS_S
        self.on_step(f"make: heads that predict {N_HOPS} tokens ahead, by {budget_s:.0f} s of training")
        session = Session(self.runtime, Sampling(), max(MIN_TOKENS, self.session.max_new_tokens))
        started, features_of_texts, hop_heads = monotonic(), list[Features](), list[Heads]()
        for prompt in self.prompts:
            if not features_of_texts or monotonic() - started < budget_s / 2:
                features_of_texts.append(features_of(session, prompt, depths))
        for hop in range(1, N_HOPS + 1):
            shifted_features = Features.join([shift_targets(text, hop) for text in features_of_texts])
            objective = HeadObjective(self.runtime, shifted_features, depths, full=False)
            hop_budget_s = (budget_s - (monotonic() - started)) / (N_HOPS + 1 - hop)
            trainer = Trainer(objective, HeadSettings(epochs=BRIEF_EPOCHS), max(1.0, hop_budget_s))
            trainer.run(ignore)
            hop_heads.append(objective.model(trainer.weights))
        return hop_heads


class HopDrafter(Drafter):
    """Drafts a tree from the last-layer state of the token before the root; with `early`, from the root's early state.

    With `early`, the root's pass stops at the first depth whose hop-1 head has a confidence above `threshold`. The tree
    then has one level more than a tree drafted from the last layer, and verification runs the root's deeper layers.

    DEVIATION: Medusa's tree has 64 nodes, for a GPU; this one has few, because each row costs time on a CPU.

    Args: hops: `hops[h - 1]` are the heads of hop h; all hops have the same depths, the last layer included.
    """

    max_width = N_HOPS + 1

    def __init__(self, hops: Sequence[Heads], early: bool, threshold: float) -> None:
        self.hops, self.early, self.threshold, self.max_depth = tuple(hops), early, threshold, len(hops)

    def start(self) -> None:
        self._state: Tensor | None = None  # Last-layer state (1, hidden_size) of the token before the root.
        self._states: list[Tensor] = []  # Last-layer states (rows, hidden_size) of the latest target pass.

    def draft(self, room: int) -> PassGenerator[Draft]:
        context = self.context
        root_id, depth, hidden = context.token_ids[-1], 0, None
        logits_by_level: list[Tensor] = []  # (vocab,) each, for the first token after the root, the second, …
        if self.early and room:
            staged = StagedPass(context.runtime, context.buffer, context.root_slot)
            staged.add(root_id)
            for depth in self.hops[0].depths[:-1]:
                yield from staged.advance(depth)
                hidden = staged.newest
                logits = self.hops[0].logits(context.runtime, depth, hidden)[0]
                if context.rule.confidence(context.scores([], logits))[1] > self.threshold:
                    logits_by_level = [logits, *self._later_hops(depth, hidden)]
                    break
        if not logits_by_level and self._state is not None:
            logits_by_level = self._later_hops(context.runtime.n_layers, self._state)
        choices = [logits.topk(N_CHOICES).indices.tolist() for logits in logits_by_level]
        chain = [top_ids[0] for top_ids in choices]
        branches = [[*chain[:level], top_ids[1], *chain[level + 1 :]] for level, top_ids in enumerate(choices)]
        tree = merge_paths(root_id, [chain, *branches], room)
        return Draft(tree, staged=self._verified(tree, depth, hidden))

    def observe(self, outcome: Outcome) -> None:
        (states,) = self._states
        node = outcome.walk.path[-1] if outcome.walk.path else 0
        self._state = states[node : node + 1]

    def _later_hops(self, depth: int, state: Tensor) -> list[Tensor]:
        """Return the logits (vocab,) of each hop after the first, from a state (1, hidden_size) at `depth`."""
        return [heads.logits(self.context.runtime, depth, state)[0] for heads in self.hops[1:]]

    def _verified(self, tree: DraftTree, depth: int, hidden: Tensor | None) -> PassGenerator[Tensor]:
        """Run the rest of the target over a tree whose root has run `depth` layers; store the last-layer states.

        Returns: the target's logits (nodes, vocab).
        """
        context = self.context
        runtime, n_layers = context.runtime, context.runtime.n_layers
        rows = tree_rows(tree.token_ids, tree.parents, context.root_slot)
        self._states = []
        if hidden is None:
            return (yield Pass(runtime, rows, context.buffer, capture={n_layers: self._states}))
        if tree.n_nodes > 1:
            draft_rows, draft_states = tree_rows(tree.token_ids[1:], tree.parents, context.root_slot), list[Tensor]()
            yield Pass(runtime, draft_rows, context.buffer, (), {depth: draft_states}, layers=(0, depth))
            hidden = torch.cat((hidden, *draft_states))
        capture, layers = {n_layers: self._states}, (depth, n_layers)
        return (yield Pass(runtime, rows, context.buffer, None, capture, hidden=hidden, layers=layers))


def shift_targets(text: Features, hop: int) -> Features:
    """Pair the hidden states of each position with the final state `hop` - 1 positions later, the training target."""
    n_rows = max(0, text.n_rows - hop + 1)
    return Features({depth: hidden[:n_rows] for depth, hidden in text.hidden.items()}, text.final[hop - 1 :])
