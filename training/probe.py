"""A linear probe at an early exit, trained to predict whether its token is accepted (AdaSPEED II.B)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import TopPLogitsWarper

from ..core.types import Prompt
from ..models.early_exit import Probe
from ..models.runtime import Runtime
from .checkpoint import Checkpoint, Features
from .descent import Descent, Schedule
from .features import collect, greedy_session
from .settings import OnStep, ProbeSettings, Trained, TrainingStep, ignore

CHUNK_ROWS = 64


@torch.no_grad()
def train_probe(
    runtime: Runtime,
    prompts: Sequence[Prompt],
    settings: ProbeSettings | None = None,
    on_step: OnStep = ignore,
    *,
    budget_s: float | None = None,
    kept: Checkpoint | None = None,
) -> Trained[Probe]:
    """Train a probe on the model's own greedy completions of the prompts; arguments and errors as `train_heads`."""
    settings = settings or ProbeSettings()
    depth, started = settings.depth(runtime.n_layers), time.monotonic()
    session = greedy_session(runtime, settings.max_new_tokens)
    half_s = None if budget_s is None else budget_s / 2
    data = collect(session, prompts, (depth,), settings.seed, on_step, kept, half_s)
    accepted = acceptances(runtime, data.train, depth, settings)
    held_out = acceptances(runtime, data.held_out, depth, settings)
    lessons = ProbeLessons(data.train.hidden[depth], accepted)
    left_s = None if budget_s is None else max(1.0, budget_s - (time.monotonic() - started))
    descent = Descent(lessons.start(), Schedule.of(settings, left_s), kept)
    descent.run(data.train.n_rows, lessons.gradient, on_step)
    probe = lessons.probe(descent.weights, depth)
    on_step(TrainingStep("measure"))
    scores = data.held_out.hidden[depth].float() @ probe.direction + probe.bias
    figures = {**descent.figures(data, n_points=1), **probe_figures(scores, held_out)}
    return Trained(probe, (depth,), figures, descent.curve())


def acceptances(runtime: Runtime, data: Features, depth: int, settings: ProbeSettings) -> Tensor:
    """Tell whether the token that the exit at `depth` gives is accepted by the last layer; bool (n,).

    "greedy": both argmaxes are the same. "top-p": the token is drawn from the exit's distribution and accepted with
    min(1, target_probs / draft_probs), both cut to the same top-p.
    """
    random = torch.Generator().manual_seed(settings.seed)
    found = []
    for start in range(0, data.n_rows, CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        draft = runtime.logits(data.hidden[depth][rows].to(runtime.device))
        target = runtime.head(data.final[rows].to(runtime.device))
        if settings.sampling == "greedy":
            found.append((draft.argmax(-1) == target.argmax(-1)).cpu())
            continue
        draft_probs, target_probs = _top_p(draft, settings.top_p), _top_p(target, settings.top_p)
        token_ids = torch.multinomial(draft_probs, 1, generator=random)
        odds = target_probs.gather(1, token_ids) / draft_probs.gather(1, token_ids)
        found.append((torch.rand(odds.shape, generator=random) < odds)[:, 0])
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.bool)


def _top_p(logits: Tensor, top_p: float) -> Tensor:
    kept = TopPLogitsWarper(top_p)(cast(Any, None), cast(Any, logits.float()))
    return torch.softmax(kept, dim=-1).cpu()


class ProbeLessons:
    """The binary cross-entropy of a linear probe on standardised states; weights are (hidden_size + 1,), bias last."""

    def __init__(self, hidden: Tensor, accepted: Tensor) -> None:
        states = hidden.float()
        self._mean, self._scale = states.mean(0), states.std(0).clamp_min(1e-6)
        self._states = (states - self._mean) / self._scale
        self._accepted = accepted.float()

    def start(self) -> Tensor:
        """Return the weights of an untrained probe."""
        return torch.zeros(self._states.shape[1] + 1)

    def probe(self, weights: Tensor, depth: int) -> Probe:
        """Return the probe of raw states: mean and scale folded into it."""
        direction = weights[:-1] / self._scale
        return Probe(depth, direction, float(weights[-1] - direction @ self._mean))

    def gradient(self, weights: Tensor, rows: Tensor) -> tuple[float, Tensor]:
        """Return the mean loss of the rows, and its gradient: (probability - label) times the state."""
        states, wanted = self._states[rows], self._accepted[rows]
        scores = states @ weights[:-1] + weights[-1]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, wanted)
        off = (torch.sigmoid(scores) - wanted) / len(rows)
        return float(loss), torch.cat((off @ states, off.sum()[None]))


def probe_figures(scores: Tensor, accepted: Tensor) -> dict[str, float]:
    """Measure a probe: `accuracy` at one half, `base_rate` of acceptance, and `auc` where both outcomes occur.

    Args: scores: logits (n,); accepted: bool (n,).
    """
    figures = {
        "accuracy": float(((scores > 0) == accepted).float().mean()),
        "base_rate": float(accepted.float().mean()),
    }
    n_yes = int(accepted.sum())
    n_no = len(accepted) - n_yes
    if n_yes and n_no:  # the chance that an accepted token scores above a rejected one, from the sum of ranks
        _, inverse, counts = torch.unique(scores.double(), return_inverse=True, return_counts=True)
        ranks = (counts.cumsum(0) - (counts - 1) / 2)[inverse]
        figures["auc"] = (float(ranks[accepted].sum()) - n_yes * (n_yes + 1) / 2) / (n_yes * n_no)
    return figures
