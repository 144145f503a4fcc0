"""What a comparison finds missing and makes briefly: layer sets by a short search, heads and a probe by training.

All of it is outside the timing and takes about a minute together; what is kept is marked as brief.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from .. import __version__
from ..core.learned import LearnedKind, LearnedRecord
from ..core.settings import SwiftSettings
from ..core.times import now
from ..core.types import LayerSet, LayerSetRecord, Prompt
from ..decoding.engine import Work, side_by_side
from ..decoding.loop import Round
from ..decoding.session import Session, Turn
from ..models.costs import machine_name
from ..models.early_exit import Heads, Probe, heads_to_bytes, probe_to_bytes
from ..optimizer import self_sd
from ..optimizer.search import Search
from ..store import Store
from ..training.heads import train_heads
from ..training.probe import train_probe
from ..training.settings import HeadSettings, ProbeSettings, Trained, TrainingSettings

SWIFT_S, SELF_SD_S, HEADS_S, PROBE_S = 10.0, 15.0, 22.0, 8.0
BRIEF_EPOCHS = 1000  # more than fit in the time, which is what ends a brief training
LEAST_TOKENS = 48  # per completion that is learned from
SWIFT_STEPS = 100  # a search this short is seen from its settings
SELF_SD_TOKENS, SELF_SD_PROMPTS = 24, 2  # per candidate: several candidates fit in the time only if each is short


@dataclass(frozen=True, slots=True)
class Made:
    """A piece that was missing, and how it came about."""

    piece: str
    how: str
    seconds: float


@dataclass(slots=True)
class Workshop:
    """Makes pieces on `prompts` for a model (by the name it was called by) and task.

    `store` keeps them (None: nothing is kept); `made` lists them.
    """

    session: Session
    model: str
    task: str
    prompts: Sequence[Prompt]
    store: Store | None
    on_step: Callable[[str], None] = lambda words: None
    made: list[Made] = field(default_factory=list)

    def swift_set(self) -> LayerSetRecord:
        """SWIFT's search while decoding; evenly spaced sub-layers where the completions are too short for it."""
        self.on_step(f"make: a layer set, by {SWIFT_S:.0f} s of SWIFT's search")
        window = min(SwiftSettings().context_window, max(1, self.session.max_new_tokens // 2))  # short texts count too
        clock, settings = perf_counter(), SwiftSettings(max_steps=SWIFT_STEPS, context_window=window)
        search = searched(self.session, self.prompts, settings, SWIFT_S)
        n_tried = len(search.trials)
        how = f"{n_tried} candidates" if n_tried else "evenly spaced, for the completions are too short to search on"
        self._note("layer set", how, perf_counter() - clock)
        return self._kept_set(search.layer_set, "swift", settings.to_json(), search.matchness)

    def self_sd_set(self) -> LayerSetRecord:
        """Self-SD's own offline search."""
        self.on_step(f"make: Self-SD's layer set, by {SELF_SD_S:.0f} s of its search")
        n_tokens = min(SELF_SD_TOKENS, self.session.max_new_tokens)
        brief = Session(self.session.runtime, self.session.sampling, n_tokens)
        found = self_sd.search(brief, self.prompts[:SELF_SD_PROMPTS], budget_s=SELF_SD_S)
        self._note("Self-SD's layer set", f"{len(found.candidates)} candidates", found.seconds)
        return self._kept_set(found.best.layer_set, "self-sd", {})

    def heads(self) -> tuple[Heads, LearnedRecord]:
        """Heads at the default depths.

        Raises: InvalidInput: the prompts and their completions are too few to learn from.
        """
        self.on_step(f"make: heads, by {HEADS_S:.0f} s of training")
        clock, settings = perf_counter(), HeadSettings(epochs=BRIEF_EPOCHS, max_new_tokens=self._n_tokens)
        trained = train_heads(self.session.runtime, self.prompts, settings, budget_s=HEADS_S)
        self._note("heads", f"{trained.figures['steps']:.0f} steps of training", perf_counter() - clock)
        record = self._record("heads", trained, settings)
        return trained.model, self._kept(record, heads_to_bytes(trained.model, record))

    def probe(self) -> tuple[Probe, LearnedRecord]:
        """A probe at the default depth; raises as `heads`."""
        self.on_step(f"make: a probe, by {PROBE_S:.0f} s of training")
        clock, settings = perf_counter(), ProbeSettings(max_new_tokens=self._n_tokens)
        trained = train_probe(self.session.runtime, self.prompts, settings, budget_s=PROBE_S)
        self._note("probe", "brief training", perf_counter() - clock)
        record = self._record("probe", trained, settings)
        return trained.model, self._kept(record, probe_to_bytes(trained.model, record))

    @property
    def _n_tokens(self) -> int:
        """Tokens of a completion to learn from: a comparison of very short ones would leave too few positions."""
        return max(LEAST_TOKENS, self.session.max_new_tokens)

    def _note(self, piece: str, how: str, seconds: float) -> None:
        self.made.append(Made(piece, f"{how}, {seconds:.0f} s", seconds))

    def _kept_set(
        self, layer_set: LayerSet, method: str, settings: Mapping[str, Any], matchness: float | None = None
    ) -> LayerSetRecord:
        runtime = self.session.runtime
        record = LayerSetRecord(
            model=self.model,
            task=self.task,
            layer_set=layer_set,
            fingerprint=runtime.info.fingerprint,
            matchness=matchness,
            device=machine_name(runtime),
            dtype=runtime.dtype_name,
            settings=settings,
            swiftopt_version=__version__,
            created_at=now(),
        )
        return record if self.store is None else self.store.add_layer_set(record, plan_method=method, promote=False)

    def _record(self, kind: LearnedKind, trained: Trained[Any], settings: TrainingSettings) -> LearnedRecord:
        return LearnedRecord(
            kind=kind,
            model=self.model,
            task=self.task,
            fingerprint=self.session.runtime.info.fingerprint,
            depths=trained.depths,
            n_parameters=trained.model.n_parameters,
            settings={**settings.to_json(), "brief": True},
            figures=trained.figures,
            curve=trained.curve,
            swiftopt_version=__version__,
            created_at=now(),
        )

    def _kept(self, record: LearnedRecord, weights: bytes) -> LearnedRecord:
        return record if self.store is None else self.store.add_learned(record, weights)


def searched(session: Session, prompts: Sequence[Prompt], settings: SwiftSettings, budget_s: float) -> Search:
    """SWIFT's search while decoding the prompts, for so many seconds at most; it has ended."""
    runtime, started = session.runtime, perf_counter()
    ratio = settings.start_skip_ratio(runtime.info.n_parameters)
    search = Search("", runtime.n_layers, settings, ratio, None)

    def work(prompt: Prompt) -> Work[list[Turn]]:
        return search.during(session.request(prompt, search.method, scratch_rows=search.scratch_rows), prompt.id)

    try:
        with closing(side_by_side(map(work, prompts))) as events:
            for event in events:
                if isinstance(event, Round) and (not search.optimising or perf_counter() - started > budget_s):
                    break
    finally:
        search.finish("the time is over")
    return search
