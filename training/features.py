"""The training data of heads and probes: the model's states at the positions of its own greedy completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.errors import InvalidInput
from ..core.types import Prompt, Sampling
from ..decoding.engine import side_by_side
from ..decoding.loop import Round
from ..decoding.methods import PLAIN
from ..decoding.session import Session
from ..models.rows import Rows
from ..models.runtime import PREFILL_ROWS, Runtime
from .checkpoint import Checkpoint, Features
from .settings import OnStep, TrainingStep

HELD_OUT = 0.1  # share of the prompts that only the figures see
MIN_ROWS = 16  # positions below which nothing can be learned


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """The positions to train on and those held out, which come from other prompts."""

    train: Features
    held_out: Features
    n_prompts: int
    seconds: float


def collect(
    session: Session,
    prompts: Sequence[Prompt],
    depths: Sequence[int],
    seed: int,
    on_step: OnStep,
    kept: Checkpoint | None = None,
    budget_s: float | None = None,
) -> Collected:
    """Complete the prompts greedily, in an order drawn from `seed`, and keep the states; the last tenth is held out.

    Args:   budget_s: stop after that many seconds, with at least two prompts done.
    Raises: InvalidInput: fewer than two prompts, or completions that leave too little to learn from.
    """
    if len(prompts) < 2:
        raise InvalidInput("training needs at least 2 prompts, one of them to measure on: give a longer stream")
    started = time.monotonic()
    for prompt in prompts:
        session.check(prompt)
    done = {} if kept is None else kept.features()
    if done:
        on_step(TrainingStep("collect", note=f"resumed: {len(done)} of {len(prompts)} prompts were done before"))
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed)).tolist()
    parts: list[Features] = []
    for number, index in enumerate(order):
        if budget_s is not None and number >= 2 and time.monotonic() - started > budget_s:
            break
        if index not in done:
            done[index] = features_of(session, prompts[index], depths)
            if kept is not None:
                kept.add(index, done[index])
        parts.append(done[index])
        on_step(TrainingStep("collect", number + 1, len(prompts)))
    if kept is not None:
        kept.flush()
    return _divided(parts, time.monotonic() - started)


def _divided(parts: Sequence[Features], seconds: float) -> Collected:
    n_held_out = max(1, round(HELD_OUT * len(parts)))
    train, held_out = Features.joined(parts[:-n_held_out]), Features.joined(parts[-n_held_out:])
    if train.n_rows < MIN_ROWS or not held_out.n_rows:
        raise InvalidInput(
            f"the completions leave {train.n_rows} positions to learn from and {held_out.n_rows} to measure on:"
            f" give more prompts or raise --max-new-tokens, so that there are {MIN_ROWS} and 1 at least"
        )
    return Collected(train, held_out, len(parts), seconds)


def greedy_session(runtime: Runtime, max_new_tokens: int) -> Session:
    """Return a session that completes prompts by plain greedy decoding.

    Raises: InvalidInput: the model has no tokenizer.
    """
    if runtime.tokenizer is None:
        raise InvalidInput("this model has no tokenizer: put its tokenizer's files next to its weights")
    return Session(runtime, Sampling(), max_new_tokens)


def features_of(session: Session, prompt: Prompt, depths: Sequence[int]) -> Features:
    """The states of all turns of a prompt, at every token of a completion that another one follows."""
    found = [states_of(session.runtime, [], 0, depths)]
    for event in side_by_side([session.request(prompt, PLAIN)]):
        if isinstance(event, Round) and event.context.finish is not None:  # a completion of one token has no round
            context = event.context
            found.append(states_of(session.runtime, context.token_ids[:-1], context.n_prompt, depths))
    return Features.joined(found)


def states_of(runtime: Runtime, token_ids: Sequence[int], first: int, depths: Sequence[int]) -> Features:
    """Return the states of a text's tokens from `first` on, read in as few passes as memory allows."""
    at: dict[int, list[Tensor]] = {depth: [] for depth in (*depths, runtime.n_layers)}
    buffer = runtime.new_buffer(len(token_ids))
    for start in range(0, len(token_ids), PREFILL_ROWS):
        chunk = token_ids[start : start + PREFILL_ROWS]
        runtime.forward(Rows(chunk, start), buffer, wanted=(), capture=at)
    width = runtime.config.get_text_config().hidden_size
    nothing = torch.empty((0, width), dtype=runtime.dtype)
    kept = {depth: torch.cat([nothing, *(part.cpu() for part in parts)])[first:] for depth, parts in at.items()}
    final = runtime.normed(kept.pop(runtime.n_layers).to(runtime.device)).cpu()
    return Features({depth: hidden.clone() for depth, hidden in kept.items()}, final)
