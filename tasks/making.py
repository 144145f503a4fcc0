"""Makes what methods need and nobody has stored: layer sets by search, heads and probes by brief training.

What a comparison finds missing is made outside its timing, within about a minute together; what is kept of it is marked
as brief.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from ..core.errors import LayerSetNotFound, LearnedNotFound
from ..core.requests import GenerateRequest
from ..core.settings import SwiftSettings
from ..core.types import LayerSet, LayerSetRecord, LearnedKind, LearnedRecord, Prompt
from ..decoding.engine import side_by_side
from ..decoding.loop import Round
from ..decoding.session import Session
from ..models.costs import machine_name
from ..models.loading import load
from ..models.runtime import Runtime
from ..models.saved import no_step
from ..optimizer import self_sd
from ..optimizer.search import Search
from ..optimizer.self_sd import Candidate, SelfSdSearch
from ..store import Store
from ..training.heads import train_heads
from ..training.probe import train_probe
from ..training.settings import HeadSettings, ProbeSettings
from .recipes import Recipes, searched_by, stamped, weights_key
from .train import record_of, store_trained

SWIFT_S, SELF_SD_S, HEADS_S, PROBE_S = 10.0, 15.0, 22.0, 8.0
BRIEF_EPOCHS = 1000  # more than fit in the time, which is what ends a brief training
LEAST_TOKENS = 48  # per completion that is learned from: shorter ones would leave too few positions
SWIFT_STEPS = 100  # a search this short is seen from its settings
SELF_SD_TOKENS, SELF_SD_PROMPTS = 24, 2  # per candidate: several candidates fit in the time only if each is short


@dataclass(frozen=True, slots=True)
class Made:
    """A missing piece that was made: which, how, and in how many seconds."""

    piece: str
    how: str
    seconds: float


class MakingRecipes(Recipes):
    """Recipes for one task, which make what is not stored, each part once, on `prompts`; `made` lists it.

    Args: model: the name that the caller used. keep: where to store what is made; None: nowhere.
    """

    def __init__(
        self,
        session: Session,
        store: Store | None,
        draft_runtime: Runtime | None,
        model: str,
        task: str,
        prompts: Sequence[Prompt],
        keep: Store | None,
        on_step: Callable[[str], None] = no_step,
    ) -> None:
        super().__init__(session.runtime, store, draft_runtime, on_step)
        self.session, self.model, self.task, self.prompts, self.keep = session, model, task, prompts, keep
        self.made: list[Made] = []
        self._sets: dict[str, LayerSetRecord] = {}
        self._learned: dict[LearnedKind, LearnedRecord] = {}

    def layer_set(self, name: str, task: str) -> LayerSetRecord:
        """Return the stored set for the method, or search one briefly."""
        by = searched_by(name)
        if by not in self._sets:
            try:
                self._sets[by] = super().layer_set(name, task)
            except LayerSetNotFound:
                self._sets[by] = self._self_sd_set() if by == "self-sd" else self._swift_set()
        return self._sets[by]

    def learned(self, kind: LearnedKind, task: str) -> LearnedRecord:
        """Return the record of stored heads or a probe, or train them briefly at the default depths.

        Raises: InvalidInput: the prompts and their completions are too few to learn from.
        """
        if kind not in self._learned:
            try:
                self._learned[kind] = super().learned(kind, task)
            except LearnedNotFound:
                self._learned[kind] = self._train(kind)
        return self._learned[kind]

    def _train(self, kind: LearnedKind) -> LearnedRecord:
        words, seconds = ("heads", HEADS_S) if kind == "heads" else ("a probe", PROBE_S)
        self.on_step(f"make: {words}, by {seconds:.0f} s of training")
        clock, runtime = perf_counter(), self.runtime
        n_tokens = max(LEAST_TOKENS, self.session.max_new_tokens)
        settings: HeadSettings | ProbeSettings
        trained: Any
        if kind == "heads":
            settings = HeadSettings(epochs=BRIEF_EPOCHS, max_new_tokens=n_tokens)
            trained = train_heads(runtime, self.prompts, settings, budget_s=seconds)
        else:
            settings = ProbeSettings(max_new_tokens=n_tokens)
            trained = train_probe(runtime, self.prompts, settings, budget_s=seconds)
        self._note(kind, f"{trained.figures['steps']:.0f} steps of training", perf_counter() - clock)
        record = record_of(kind, runtime, self.model, self.task, trained, {**settings.to_json(), "brief": True})
        if self.keep is not None:
            record = store_trained(self.keep, record, trained)
        self._weights[weights_key(record)] = trained.model
        return record

    def _swift_set(self) -> LayerSetRecord:
        """Run SWIFT's search while decoding; evenly spaced sub-layers where the completions are too short for it."""
        self.on_step(f"make: a layer set, by {SWIFT_S:.0f} s of SWIFT's search")
        window = min(SwiftSettings().context_window, max(1, self.session.max_new_tokens // 2))  # short texts count too
        clock, settings = perf_counter(), SwiftSettings(max_steps=SWIFT_STEPS, context_window=window)
        search = searched(self.session, self.prompts, settings, SWIFT_S)
        n_tried = len(search.trials)
        how = f"{n_tried} candidates" if n_tried else "evenly spaced, for the completions are too short to search on"
        self._note("layer set", how, perf_counter() - clock)
        return self._kept("swift", search.layer_set, matchness=search.matchness, settings=settings.to_json())

    def _self_sd_set(self) -> LayerSetRecord:
        self.on_step(f"make: Self-SD's layer set, by {SELF_SD_S:.0f} s of its search")
        n_tokens = min(SELF_SD_TOKENS, self.session.max_new_tokens)
        brief = Session(self.runtime, self.session.sampling, n_tokens)
        found = self_sd.search(brief, self.prompts[:SELF_SD_PROMPTS], budget_s=SELF_SD_S)
        self._note("Self-SD's layer set", f"{len(found.candidates)} candidates", found.seconds)
        return self._kept("self-sd", found.best.layer_set)

    def _kept(self, method: str, layer_set: LayerSet, **known: Any) -> LayerSetRecord:
        record = set_record(self.runtime, self.model, self.task, layer_set, **known)
        return record if self.keep is None else self.keep.add_layer_set(record, plan_method=method, promote=False)

    def _note(self, piece: str, how: str, seconds: float) -> None:
        self.made.append(Made(piece, f"{how}, {seconds:.0f} s", seconds))


def search_offline(
    request: GenerateRequest,
    prompts: Sequence[Prompt],
    store: Store,
    max_steps: int,
    budget_s: float,
    on_step: Callable[[str], None],
    on_candidate: Callable[[int, Candidate], None],
) -> tuple[LayerSetRecord, SelfSdSearch]:
    """Run Self-SD's search on all of `prompts` and store its best set as a version that `best` does not mean.

    Its figures are not stored with it: the search maximised them on its own prompts, so they would flatter.

    Raises: InvalidInput, ContextOverflow: a prompt cannot be decoded with this model.
    """
    runtime = load(request.model, request.dtype, request.device, on_step)
    store.remember_model(runtime.info)
    session = Session(runtime, request.sampling, request.max_new_tokens)
    for prompt in prompts:
        session.check(prompt)
    seed = request.sampling.seed
    found = self_sd.search(session, prompts, None, max_steps, budget_s, seed=seed, on_candidate=on_candidate)
    record = set_record(runtime, request.model, request.task or prompts[0].task, found.best.layer_set)
    return store.add_layer_set(record, plan_method="self-sd", promote=False), found


def typical_ratio(found: SelfSdSearch) -> float:
    """Return the median ratio of all candidates to plain decoding, an estimate for a random one."""
    return median(candidate.ratio for candidate in found.candidates)


def set_record(runtime: Runtime, model: str, task: str, layer_set: LayerSet, **known: Any) -> LayerSetRecord:
    """Describe a layer set that was found on this machine; `known` are further fields."""
    found = LayerSetRecord(model, task, layer_set, runtime.info.fingerprint)
    return stamped(found, device=machine_name(runtime), dtype=runtime.dtype_name, **known)


def searched(session: Session, prompts: Sequence[Prompt], settings: SwiftSettings, budget_s: float) -> Search:
    """Run SWIFT's search while decoding the prompts, for `budget_s` seconds at most; return it ended."""
    runtime, started = session.runtime, perf_counter()
    ratio = settings.start_skip_ratio(runtime.info.n_parameters)
    search = Search("", runtime.n_layers, settings, ratio, None)
    try:
        with closing(side_by_side(search.request(session, prompt) for prompt in prompts)) as events:
            for event in events:
                if isinstance(event, Round) and (not search.optimising or perf_counter() - started > budget_s):
                    break
    finally:
        search.finish("the time is over")
    return search
