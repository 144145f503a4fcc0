"""Trains heads and probes: Adam with a cosine learning rate over shuffled positions; can continue after any saved step.

Heads learn the last layer's predictions (AdaDecode 2.1). A probe learns whether the token read at its layer is accepted
(AdaSPEED II.B).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from transformers import TopPLogitsWarper

from ...core.types import Prompt, Sampling
from ...decoding.session import Session
from ...models.quantised import cpu_multiplies_bf16
from ...models.runtime import Runtime
from ..early_exit import Heads, Probe
from .features import Checkpoint, Features, collect
from .settings import HeadSettings, OnStep, ProbeSettings, Trained, TrainingSettings, TrainingStep, ignore

MAX_POINTS = 200  # Maximum number of points in a reported loss curve.
CHUNK_VALUES = 1 << 19  # Logits processed at a time on a CPU, so that they stay in its caches.
CHUNK_ROWS = 64  # Positions whose logits are computed at a time, which bounds their memory.
THRESHOLDS = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)


@torch.no_grad()
def train(
    runtime: Runtime,
    prompts: Sequence[Prompt],
    settings: HeadSettings | ProbeSettings,
    on_step: OnStep = ignore,
    *,
    budget_s: float | None = None,
    checkpoint: Checkpoint | None = None,
) -> Trained:
    """Train a probe, or heads of all depths together, on the model's own greedy completions of the prompts.

    Args:   budget_s: time limit in seconds; at most half goes into the completions, the rest into training.
            checkpoint: saves progress, from which a later call continues; it is not removed.
    Raises: SettingsError: a layer is out of range. InvalidInput: the stream or its completions are too short.
    """
    depths, started = settings.depths(runtime.n_layers), time.monotonic()
    session = Session(runtime, Sampling(), settings.max_new_tokens)
    features = collect(session, prompts, depths, settings.seed, on_step, checkpoint, budget_s and budget_s / 2)
    objective = _make_objective(runtime, settings, features.train, depths)
    training_s = None if budget_s is None else max(1.0, budget_s - (time.monotonic() - started))
    trainer = Trainer(objective, settings, training_s, checkpoint)
    trainer.run(on_step)
    on_step(TrainingStep("measure"))
    curve = trainer.curve()
    last_losses = [loss for _, loss in curve[-objective.LAST_POINTS :]]
    figures = {
        "prompts": features.n_prompts,
        "positions": features.train.n_rows,
        "held_out_positions": features.held_out.n_rows,
        "steps": trainer.step,
        "loss": sum(last_losses) / len(last_losses),
        "collect_s": round(features.seconds, 1),
        "train_s": round(trainer.spent_s, 1),
        **objective.figures(trainer.weights, features.held_out),
    }
    return Trained(objective.model(trainer.weights), figures, curve)


def _make_objective(
    runtime: Runtime, settings: HeadSettings | ProbeSettings, data: Features, depths: Sequence[int]
) -> HeadObjective | ProbeObjective:
    if isinstance(settings, HeadSettings):
        return HeadObjective(runtime, data, depths, settings.full)
    return ProbeObjective(data, depths[0], partial(acceptances, runtime, depth=depths[0], settings=settings))


def learning_rate(settings: TrainingSettings, progress: float) -> float:
    """Return the learning rate at `progress`, the share of the training that is done (0 to 1)."""
    if progress < settings.warm_up:
        return settings.learning_rate * progress / settings.warm_up
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def batch_rows(settings: TrainingSettings, step: int, n_rows: int) -> Tensor:
    """Return the row indices of a step's batch; every epoch visits all rows once in a new random order."""
    n_batches = math.ceil(n_rows / settings.batch)
    epoch, batch_index = divmod(step, n_batches)
    row_order = torch.randperm(n_rows, generator=torch.Generator().manual_seed((settings.seed << 20) + epoch))
    return row_order[batch_index * settings.batch : (batch_index + 1) * settings.batch]


class Trainer:
    """Minimises an objective with Adam; changes `weights` in place.

    With a time limit (`seconds`, or `minutes` in the settings), progress is the larger of the shares of steps and of
    time that have passed, for the learning rate as well.
    """

    def __init__(
        self,
        objective: HeadObjective | ProbeObjective,
        settings: TrainingSettings,
        seconds: float | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.objective, self.settings, self._checkpoint = objective, settings, checkpoint
        self.weights = objective.start()
        limits = [limit for limit in (seconds, settings.minutes and 60 * settings.minutes) if limit is not None]
        self.seconds = min(limits, default=None)
        self._adam = torch.optim.Adam([self.weights])
        self.step = 0
        self.spent_s = 0.0
        self.losses: list[float] = []

    def run(self, on_step: OnStep) -> None:
        """Run all remaining steps; continue from the checkpoint's training state if there is one."""
        n_rows = self.objective.n_rows
        total_steps = self.settings.epochs * math.ceil(n_rows / self.settings.batch)
        self._resume(total_steps, on_step)
        started, before_s = time.monotonic(), self.spent_s
        while (progress := self._progress(total_steps)) < 1:
            row_indices = batch_rows(self.settings, self.step, n_rows)
            loss, self.weights.grad = self.objective.gradient(self.weights, row_indices)
            # torch's schedulers count steps only, but this learning rate also depends on elapsed time.
            self._adam.param_groups[0]["lr"] = learning_rate(self.settings, max(progress, 1 / total_steps))
            self._adam.step()
            self.step += 1
            self.losses.append(loss)
            self.spent_s = before_s + time.monotonic() - started
            on_step(TrainingStep("train", self.step, total_steps, loss))
            if self._checkpoint is not None and self._checkpoint.due():
                self._save(self._checkpoint)
        if self._checkpoint is not None:
            self._save(self._checkpoint)

    def curve(self) -> tuple[tuple[int, float], ...]:
        """Return (last step, mean loss) of at most `MAX_POINTS` equal blocks of steps."""
        losses_per_point = math.ceil(len(self.losses) / MAX_POINTS)
        loss_groups = [
            self.losses[start : start + losses_per_point]
            for start in range(0, len(self.losses), max(1, losses_per_point))
        ]
        return tuple(
            (min((index + 1) * losses_per_point, self.step), sum(losses) / len(losses))
            for index, losses in enumerate(loss_groups)
        )

    def _progress(self, total_steps: int) -> float:
        time_share = 0.0 if self.seconds is None else self.spent_s / self.seconds
        return max(self.step / total_steps, time_share)

    def _save(self, checkpoint: Checkpoint) -> None:
        tensors = {"weights": self.weights, **self._adam.state[self.weights]}
        checkpoint.save(tensors, {"step": self.step, "spent_s": self.spent_s, "losses": self.losses})

    def _resume(self, total_steps: int, on_step: OnStep) -> None:
        state = None if self._checkpoint is None else self._checkpoint.state()
        if state is None:
            return
        tensors, values = state
        self.weights.copy_(tensors.pop("weights"))
        self._adam.load_state_dict({**self._adam.state_dict(), "state": {0: tensors}})
        self.step, self.spent_s, self.losses = values["step"], values["spent_s"], values["losses"]
        on_step(TrainingStep("train", self.step, total_steps, note=f"resumed: step {self.step} of {total_steps}"))


class HeadObjective:
    """The mean over positions of KL(last layer || head), for several heads at once.

    Weights are (heads, hidden_size, hidden_size), of full heads (heads, vocab, hidden_size). They are float32, or
    float64 for a float64 model, and are rounded to the model's dtype for every step.
    """

    LAST_POINTS: ClassVar = 5  # The reported loss is the mean of this many last points of the curve.

    def __init__(self, runtime: Runtime, features: Features, depths: Sequence[int], full: bool) -> None:
        self.runtime, self.depths, self.full, self.n_rows = runtime, tuple(depths), full, features.n_rows
        self._final = features.final
        self._normed = torch.stack(
            [runtime.normed(features.hidden[depth].to(runtime.device)).cpu() for depth in depths]
        )
        self._vocabulary = cast(Tensor, cast(Any, runtime.hf_model).get_output_embeddings().weight).detach()
        self._softcap = None if full else getattr(runtime.config, "final_logit_softcapping", None)

    def start(self) -> Tensor:
        """Return initial weights that make every head equal to the model's own head."""
        weights_dtype = torch.float64 if self.runtime.dtype == torch.float64 else torch.float32
        hidden_size = self._vocabulary.shape[1]
        initial = self._vocabulary if self.full else torch.eye(hidden_size, device=self.runtime.device)
        return initial.to(self.runtime.device, weights_dtype).repeat(len(self.depths), 1, 1)

    def model(self, weights: Tensor) -> Heads:
        """Return heads with `weights` rounded to the model's dtype."""
        model_weights = weights.to(self.runtime.dtype)
        return Heads({depth: model_weights[index].clone() for index, depth in enumerate(self.depths)}, self.full)

    def gradient(self, weights: Tensor, rows: Tensor) -> tuple[float, Tensor]:
        """Return the mean loss over positions and heads, and the gradient of each head's mean loss over positions.

        The gradient is computed without autograd: at the logits it is head_probs - target_probs, and two matrix
        products propagate it to the weights.

        Args: rows: indices of the batch's positions.
        """
        device, model_weights = self.runtime.device, weights.to(self.runtime.dtype)
        target_logits = self.runtime.head(self._final[rows].to(device))  # (rows, vocab)
        normed = self._normed[:, rows].to(device)  # (heads, rows, hidden)
        # (heads, rows, hidden); for full heads these are the logits (heads, rows, vocab)
        transformed = normed @ model_weights.transpose(1, 2)
        logits = (
            transformed
            if self.full
            else self.runtime.head(transformed.flatten(0, 1)).view(len(self.depths), *target_logits.shape)
        )
        kl = kl_to_gradient(target_logits, logits, self._softcap)
        gradient_of_logits = (
            logits
            if self.full
            else vocabulary_product(logits.flatten(0, 1), self._vocabulary.to(device)).view_as(normed)
        )
        weights_dtype = weights.dtype
        gradient = gradient_of_logits.to(weights_dtype).transpose(1, 2) @ normed.to(weights_dtype) / len(rows)
        return float(kl.mean()) / len(rows), gradient

    def figures(self, weights: Tensor, features: Features) -> dict[str, float]:
        """Measure heads with `weights` on held-out positions.

        Returns: per head `agreement@DEPTH`, the share of positions where its argmax is the last layer's;
                 `identity@DEPTH`, the same for the model's own head there; and `kl@DEPTH`. Per threshold γ `early@γ`
                 and `rejected@γ`, see `early_exits`.
        """
        runtime, depths, heads = self.runtime, self.depths, self.model(weights)
        is_right = torch.zeros(len(depths), features.n_rows, dtype=torch.bool)
        confidences = torch.zeros(len(depths), features.n_rows)
        identity_counts, kl_sums = dict.fromkeys(depths, 0), dict.fromkeys(depths, 0.0)
        for start in range(0, features.n_rows, CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            target_logits = runtime.head(features.final[rows].to(runtime.device))
            for index, depth in enumerate(depths):
                hidden = features.hidden[depth][rows].to(runtime.device)
                logits = heads.logits(runtime, depth, hidden)
                probs, token_ids = torch.softmax(logits, dim=-1, dtype=torch.float32).max(-1)
                is_right[index, rows] = (token_ids == target_logits.argmax(-1)).cpu()
                confidences[index, rows] = probs.cpu()
                is_same = runtime.logits(hidden).argmax(-1) == target_logits.argmax(-1)
                identity_counts[depth] += int(is_same.sum())
                kl_sums[depth] += float(kl_to_gradient(target_logits, logits[None]))
        figures = {f"agreement@{depth}": float(is_right[index].float().mean()) for index, depth in enumerate(depths)}
        figures |= {f"identity@{depth}": identity_counts[depth] / features.n_rows for depth in depths}
        figures |= {f"kl@{depth}": kl_sums[depth] / features.n_rows for depth in depths}
        for threshold in THRESHOLDS:
            figures[f"early@{threshold}"], figures[f"rejected@{threshold}"] = early_exits(
                confidences, is_right, threshold
            )
        return figures


def vocabulary_product(rows: Tensor, weight: Tensor) -> Tensor:
    """Return rows (n, vocab) @ weight (vocab, hidden_size) in their dtype.

    On a CPU without instructions for bfloat16, torch's own product takes 30 times as long as one in float32. It is
    computed over chunks of the vocabulary, which bounds the memory of their copies.
    """
    if weight.dtype != torch.bfloat16 or not weight.is_cpu or cpu_multiplies_bf16():
        return rows @ weight
    chunk = max(1, CHUNK_VALUES // weight.shape[1])
    total = torch.zeros(rows.shape[0], weight.shape[1])
    chunks = zip(torch.split(rows, chunk, dim=1), torch.split(weight, chunk), strict=True)
    for rows_chunk, weight_chunk in chunks:
        total.addmm_(rows_chunk.float(), weight_chunk.float())
    return total.to(weight.dtype)


def kl_to_gradient(target: Tensor, heads: Tensor, softcap: float | None = None) -> Tensor:
    """Replace the heads' logits in place by the gradients of KL(target || head).

    The gradient is head_probs - target_probs; with a soft cap, it is the gradient with respect to the logits before the
    cap. Probabilities are computed in float32, or in float64 for float64 logits; the target's are shared by all heads.

    Args:    target: logits (rows, vocab); heads: logits (heads, rows, vocab).
    Returns: KL in nats, summed over the rows, float64 (heads,).
    """
    compute_dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
    kl_totals = torch.zeros(heads.shape[0], dtype=torch.float64, device=target.device)
    n_rows, width = target.shape
    chunk_rows = max(1, CHUNK_VALUES // width) if target.device.type == "cpu" else max(1, n_rows)
    for start in range(0, n_rows, chunk_rows):
        rows = slice(start, start + chunk_rows)
        target_logprobs = torch.log_softmax(target[rows], dim=-1, dtype=compute_dtype)
        target_probs = target_logprobs.exp()
        target_entropy = (target_probs * target_logprobs).sum(dtype=torch.float64)
        for head_index in range(heads.shape[0]):
            logits = heads[head_index, rows]
            logprobs = torch.log_softmax(logits, dim=-1, dtype=compute_dtype)
            kl_totals[head_index] += target_entropy - (target_probs * logprobs).sum(dtype=torch.float64)
            logit_gradient = logprobs.exp_().sub_(target_probs)
            if softcap is not None:
                logit_gradient.mul_(1 - (logits.to(compute_dtype) / softcap) ** 2)
            logits.copy_(logit_gradient)
    return kl_totals


def early_exits(confidences: Tensor, is_right: Tensor, threshold: float) -> tuple[float, float]:
    """Return the share of positions that exit early, and the share of these whose early token is wrong.

    A position exits at the shallowest head whose highest probability reaches `threshold`.

    Args: confidences: (heads, n), the heads' highest probabilities, shallowest head first. is_right: bool (heads, n),
          whether the head's token is the last layer's.
    """
    is_confident = confidences >= threshold
    is_early = is_confident.any(dim=0)
    is_wrong = is_early & ~is_right.gather(0, is_confident.int().argmax(dim=0)[None])[0]
    n_early = int(is_early.sum())
    return n_early / len(is_early), int(is_wrong.sum()) / max(1, n_early)


def acceptances(runtime: Runtime, data: Features, depth: int, settings: ProbeSettings) -> Tensor:
    """Return for each position whether the last layer accepts the token of an exit at `depth`; bool (n,).

    With `sampling` "greedy", both argmaxes must be the same. With "top-p", the token is drawn from the exit's
    distribution and accepted with probability min(1, target_probs / draft_probs), both after top-p.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    accepted_chunks = [torch.zeros(0, dtype=torch.bool)]
    for start in range(0, data.n_rows, CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        draft_logits = runtime.logits(data.hidden[depth][rows].to(runtime.device))
        target_logits = runtime.head(data.final[rows].to(runtime.device))
        if settings.sampling == "greedy":
            accepted_chunks.append((draft_logits.argmax(-1) == target_logits.argmax(-1)).cpu())
            continue
        draft_probs, target_probs = _top_p(draft_logits, settings.top_p), _top_p(target_logits, settings.top_p)
        token_ids = torch.multinomial(draft_probs, 1, generator=generator)
        probability_ratio = target_probs.gather(1, token_ids) / draft_probs.gather(1, token_ids)
        accepted_chunks.append((torch.rand(probability_ratio.shape, generator=generator) < probability_ratio)[:, 0])
    return torch.cat(accepted_chunks)


def _top_p(logits: Tensor, top_p: float) -> Tensor:
    """Return the probabilities (rows, vocab) after top-p, float32 on the CPU."""
    warped_logits = TopPLogitsWarper(top_p)(cast(Any, None), cast(Any, logits.float()))
    return torch.softmax(warped_logits, dim=-1).cpu()


class ProbeObjective:
    """The binary cross-entropy of a linear probe on standardised states; weights are (hidden_size + 1,), bias last.

    Args: accept: returns for each position whether the token read at `depth` is accepted, bool (n,).
    """

    LAST_POINTS: ClassVar = 1

    def __init__(self, data: Features, depth: int, accept: Callable[[Features], Tensor]) -> None:
        self.depth, self.n_rows, self._accept = depth, data.n_rows, accept
        states = data.hidden[depth].float()
        self._mean, self._scale = states.mean(0), states.std(0).clamp_min(1e-6)
        self._states = (states - self._mean) / self._scale
        self._accepted = accept(data).float()

    def start(self) -> Tensor:
        """Return the weights of an untrained probe."""
        return torch.zeros(self._states.shape[1] + 1)

    def model(self, weights: Tensor) -> Probe:
        """Return a probe that reads states as they are: mean and scale are folded into its weights."""
        direction = weights[:-1] / self._scale
        return Probe(self.depth, direction, float(weights[-1] - direction @ self._mean))

    def gradient(self, weights: Tensor, rows: Tensor) -> tuple[float, Tensor]:
        """Return the mean loss of the rows and its gradient, the mean of (probability - label) times the state."""
        states, labels = self._states[rows], self._accepted[rows]
        scores = states @ weights[:-1] + weights[-1]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, labels)
        score_gradient = (torch.sigmoid(scores) - labels) / len(rows)
        return float(loss), torch.cat((score_gradient @ states, score_gradient.sum()[None]))

    def figures(self, weights: Tensor, data: Features) -> dict[str, float]:
        """Measure a probe with `weights` on held-out positions."""
        probe = self.model(weights)
        return probe_figures(data.hidden[self.depth].float() @ probe.direction + probe.bias, self._accept(data))


def probe_figures(scores: Tensor, accepted: Tensor) -> dict[str, float]:
    """Measure a probe: `accuracy` at threshold 0.5, `base_rate` of acceptance, and `auc` if both outcomes occur.

    Args: scores: logits (n,); accepted: bool (n,).
    """
    from sklearn.metrics import roc_auc_score  # Imported here because the import takes about a second.

    figures = {
        "accuracy": float(((scores > 0) == accepted).float().mean()),
        "base_rate": float(accepted.float().mean()),
    }
    if accepted.any() and not accepted.all():
        figures["auc"] = float(roc_auc_score(accepted, scores))
    return figures
