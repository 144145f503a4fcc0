"""The training data of heads and probes: the model's states at the positions of its greedy completions.

Collected states and the training state are saved to disk, so that a killed run can continue.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...core.errors import InvalidInput, OutputError
from ...core.types import Prompt
from ...decoding.engine import alone, side_by_side
from ...decoding.events import Round, WorkEvent
from ...decoding.methods import PLAIN
from ...decoding.session import Session
from ...decoding.work import Work, subscribed
from ...models.cache import replacing
from ...models.costs import memory_for_texts
from ...models.runtime import Runtime
from .settings import OnStep, TrainingStep

SAVE_INTERVAL_S = 3.0  # Minimum seconds between two saves of the training state.
# Saves are at least this many save durations apart, so saving takes at most 1/20 of the time.
MIN_PAUSE_RATIO = 20
HELD_OUT_SHARE = 0.1  # Share of the prompts that are used for evaluation only, not for training.
MAX_CONCURRENT = 8  # Prompts that are decoded concurrently.
MIN_ROWS = 16  # Minimum number of training positions; with fewer, training is refused.


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """States of n positions, in the model's dtype, on the CPU."""

    hidden: Mapping[int, Tensor]  # Depth -> states (n, hidden_size) after so many layers.
    final: Tensor  # States (n, hidden_size) after the final norm.

    @property
    def n_rows(self) -> int:
        """Number of positions."""
        return self.final.shape[0]

    @classmethod
    def join(cls, parts: Sequence[Features]) -> Features:
        """Concatenate the positions of several parts."""
        hidden = {depth: torch.cat([part.hidden[depth] for part in parts]) for depth in parts[0].hidden}
        return cls(hidden, torch.cat([part.final for part in parts]))


class Checkpoint:
    """The files of one training run: the hidden states of each completed prompt, and the training state.

    Each `identity` has a folder, with one training state per `settings`. A file gets its final name when it is
    complete.

    Args:   identity: all values that determine the collected states. settings: all other values that affect training.
            every_s: minimum seconds between saves, longer if saving is slow; 0 saves after every step.
    Raises: OutputError: the folder cannot be written.
    """

    def __init__(
        self, root: Path, identity: Mapping[str, Any], settings: Mapping[str, Any], every_s: float = SAVE_INTERVAL_S
    ) -> None:
        self.every_s = every_s
        self.folder = root / _key(identity)
        self._state = self.folder / f"state-{_key(settings)}.safetensors"
        self._saved_at = time.monotonic()
        self._save_s = 0.0
        with self._translating_write_errors():
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "about.json").write_text(json.dumps({**identity, "settings": dict(settings)}))

    def features(self) -> dict[int, Features]:
        """Return the hidden states collected so far, by prompt index."""
        by_prompt: dict[int, Features] = {}
        for path in self.folder.glob("states-*.safetensors"):
            if (content := _read(path)) is not None:
                tensors, index = content[0], int(path.stem.partition("-")[2])
                final = tensors.pop("final")
                by_prompt[index] = Features({int(depth): hidden for depth, hidden in tensors.items()}, final)
        return by_prompt

    def add(self, index: int, features: Features) -> None:
        """Save the hidden states of the prompt with this index."""
        tensors = {str(depth): hidden for depth, hidden in features.hidden.items()}
        self._write(self.folder / f"states-{index}.safetensors", {**tensors, "final": features.final}, {})

    def due(self) -> bool:
        """Tell whether it is time to save the training state."""
        pause_s = max(self.every_s, MIN_PAUSE_RATIO * self._save_s) if self.every_s else 0.0
        return time.monotonic() - self._saved_at >= pause_s

    def save(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Save a training state in place of the last one."""
        self._write(self._state, tensors, {"values": json.dumps(values)})

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the tensors and values of the last training state; None if there is none or it is unreadable."""
        content = _read(self._state)
        return None if content is None else (content[0], json.loads(content[1]["values"]))

    def remove(self) -> None:
        """Delete the folder; call this once the result is stored."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
        started = time.monotonic()
        with self._translating_write_errors(), replacing(path) as part:
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, part, metadata)
        self._saved_at = time.monotonic()
        self._save_s = self._saved_at - started

    @contextlib.contextmanager
    def _translating_write_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise OutputError(
                f"the checkpoint {self.folder} cannot be written ({error}): make room there or set SWIFTOPT_CACHE_DIR"
            ) from error


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]] | None:
    """Return a file's tensors and metadata; None if it is unreadable, since its content can be recomputed."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError):
        return None


def _key(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """Training positions and held-out positions; no prompt contributes to both."""

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
    checkpoint: Checkpoint | None = None,
    budget_s: float | None = None,
) -> Collected:
    """Complete the prompts greedily, in an order drawn from `seed`, and return the states.

    The last tenth of the completed prompts is held out, at least one.

    Args:   budget_s: seconds after which no prompt is started, except the first two.
    Raises: InvalidInput: fewer than two prompts, or too few positions in their completions.
    """
    if len(prompts) < 2:
        raise InvalidInput("training needs at least 2 prompts, one of them held out: give a longer stream")
    started = time.monotonic()
    for prompt in prompts:
        session.check(prompt)
    features_by_prompt = {} if checkpoint is None else checkpoint.features()
    if features_by_prompt:
        remark = f"resumed: {len(features_by_prompt)} of {len(prompts)} prompts were done before"
        on_step(TrainingStep("collect", note=remark))
    prompt_order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed)).tolist()

    def works() -> Iterator[Work[None]]:
        for n_started, index in enumerate(prompt_order):
            if budget_s is not None and n_started >= 2 and time.monotonic() - started > budget_s:
                break
            if index not in features_by_prompt:
                yield collecting(index)

    def collecting(index: int) -> Work[None]:
        features_by_prompt[index] = yield from _collect_features(session, prompts[index], depths)
        if checkpoint is not None:
            checkpoint.add(index, features_by_prompt[index])

    n_reported = len(features_by_prompt)
    events = side_by_side(works(), MAX_CONCURRENT, memory_for_texts(session.runtime))
    for _ in chain(events, (None,)):  # The extra None reports the last prompt, which ends after the last event.
        if len(features_by_prompt) > n_reported:
            n_reported = len(features_by_prompt)
            on_step(TrainingStep("collect", n_reported, len(prompts)))
    features_in_order = [
        features_by_prompt[index] for index in takewhile(features_by_prompt.__contains__, prompt_order)
    ]
    n_held_out = max(1, round(HELD_OUT_SHARE * len(features_in_order)))
    train, held_out = Features.join(features_in_order[:-n_held_out]), Features.join(features_in_order[-n_held_out:])
    if train.n_rows < MIN_ROWS or not held_out.n_rows:
        raise InvalidInput(
            f"the completions have {train.n_rows} training positions and {held_out.n_rows} held-out ones, but"
            f" {MIN_ROWS} and 1 are needed: give more prompts or raise --max-new-tokens"
        )
    return Collected(train, held_out, len(features_in_order), time.monotonic() - started)


def features_of(session: Session, prompt: Prompt, depths: Sequence[int]) -> Features:
    """Return the hidden states at every completion token except the last, for all turns of a prompt."""
    return alone(_collect_features(session, prompt, depths))


def _collect_features(session: Session, prompt: Prompt, depths: Sequence[int]) -> Work[Features]:
    features_of_turns = [states_of(session.runtime, [], 0, depths)]

    def add_turn(event: WorkEvent) -> None:
        # A completion of one token has no Round event and no state to train on.
        if isinstance(event, Round) and event.context.finish is not None:
            context = event.context
            features_of_turns.append(states_of(session.runtime, context.token_ids[:-1], context.n_prompt, depths))

    yield from subscribed(session.request(prompt, PLAIN), add_turn)
    return Features.join(features_of_turns)


def states_of(runtime: Runtime, token_ids: Sequence[int], first_token: int, depths: Sequence[int]) -> Features:
    """Return the hidden states of a text's tokens from `first_token` on, from as few passes as memory allows."""
    captured: dict[int, list[Tensor]] = {depth: [] for depth in (*depths, runtime.n_layers)}
    buffer = runtime.new_buffer(len(token_ids))
    for pass_ in runtime.prefill_passes(token_ids, buffer, capture=captured):
        runtime.forward_together([pass_])
    width = runtime.config.get_text_config().hidden_size
    empty_state = torch.empty((0, width), dtype=runtime.dtype)
    states = {
        depth: torch.cat([empty_state, *(pass_states.cpu() for pass_states in states_of_passes)])[first_token:]
        for depth, states_of_passes in captured.items()
    }
    final = runtime.normed(states[runtime.n_layers].to(runtime.device)).cpu()
    return Features({depth: states[depth].clone() for depth in depths}, final)
