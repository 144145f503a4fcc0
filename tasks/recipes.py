"""The parts of methods for a task: those that are stored, and what is made where none are.

Layer sets, heads and probes are looked up, and what passes cost is measured once. What a comparison finds missing is
made outside its timing, within about a minute together; what is kept of it is marked as brief.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from .. import __version__
from ..core.costs import CostProfile
from ..core.errors import LayerSetError, LayerSetNotFound, LearnedNotFound
from ..core.records import AS_FOUND, LayerSetRecord, LearnedKind, LearnedRecord
from ..core.requests import GenerateRequest, ModelRequest
from ..core.settings import Preset, SwiftSettings
from ..core.types import DEFAULT_TASK, LayerSet, Prompt, now
from ..decoding.engine import side_by_side
from ..decoding.loop import Round
from ..decoding.methods import Resources, method_info
from ..decoding.methods.adaptive import AdaptiveSettings
from ..decoding.session import Session
from ..models.costs import context_bucket, machine_name, measure_costs, with_formats
from ..models.early_exit import Heads, Probe, learned_from_bytes, learned_to_bytes
from ..models.loading import load
from ..models.runtime import Runtime
from ..models.saved import no_step
from ..optimizer import self_sd
from ..optimizer.search import Search
from ..optimizer.self_sd import Candidate, SelfSdSearch
from ..store import Store
from ..training.descent import train
from ..training.settings import HeadSettings, ProbeSettings
from .job import PATIENCE_S, patiently
from .train import record_of

KINDS: tuple[LearnedKind, ...] = ("heads", "probe")
TYPICAL_POSITIONS = 512  # of a request, at which costs are measured where no stream says how long its texts are

SWIFT_S, SELF_SD_S, HEADS_S, PROBE_S = 10.0, 15.0, 22.0, 8.0
BRIEF_EPOCHS = 1000  # more than fit in the time, which is what ends a brief training
LEAST_TOKENS = 48  # per completion that is learned from: shorter ones would leave too few positions
SWIFT_STEPS = 100  # a search this short is seen from its settings
SELF_SD_TOKENS, SELF_SD_PROMPTS = 24, 2  # per candidate: several candidates fit in the time only if each is short


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """The parts of one method, the stored records among them, and the settings that come with its layer set."""

    parts: Resources
    layer_set: LayerSetRecord | None = None
    learned: LearnedRecord | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


class Recipes:
    """Finds the stored parts of methods on one model; weights are read once."""

    def __init__(
        self,
        runtime: Runtime,
        store: Store | None,
        draft_runtime: Runtime | None = None,
        on_step: Callable[[str], None] = no_step,
    ) -> None:
        self.runtime, self.store, self.draft_runtime, self.on_step = runtime, store, draft_runtime, on_step
        self._weights: dict[tuple[str, str, int | None], Heads | Probe] = {}

    def of(
        self,
        name: str,
        task: str,
        layer_set: LayerSetRecord | None = None,
        learned: LearnedRecord | None = None,
        settings: Mapping[str, Any] = {},
    ) -> Recipe:
        """Return the recipe of a method, of the given records or else the task's own.

        Adaptive drafts take the layer set that was tuned for them, unless `settings` name the format of their weights;
        their costs are those of the formats that `settings` need.

        Raises: LayerSetNotFound, LearnedNotFound: a part is needed and not stored. LayerSetError: the set is another
                model's.
        """
        info = method_info(name)
        if "costs" in info.needs:
            if layer_set is None and "draft_format" not in settings:
                layer_set = self._newest(name, task)
            own = None if layer_set is None else self._own(layer_set)
            found = AS_FOUND if own is not None and own.found_for == name else {}
            return Recipe(self._with_costs(own, info.settings_from({**found, **settings})), own, settings=found)
        record = None
        if "layer_set" in info.needs or (info.drafts_with_model and self.draft_runtime is None):
            record = self._own(layer_set or self.layer_set(name, task))
        weights: dict[str, Any] = {}
        for kind in KINDS:
            if kind in info.needs:
                learned = learned or self.learned(kind, task, name)
                weights[kind] = self.weights(learned)
        parts = Resources(
            self.runtime,
            None if record is None else record.layer_set,
            draft_runtime=self.draft_runtime if info.drafts_with_model else None,
            **weights,
        )
        return Recipe(parts, record, learned, record.settings if name == "swift" and record is not None else {})

    def _with_costs(self, record: LayerSetRecord | None, settings: AdaptiveSettings) -> Resources:
        layer_set = LayerSet(self.runtime.n_layers) if record is None else record.layer_set
        formats = {name for _, name in layer_set.filled(settings.draft_format).formats}
        costs = stored_costs(self.runtime, self.store, TYPICAL_POSITIONS, self.on_step, formats)
        return Resources(self.runtime, layer_set, costs=costs)

    def layer_set(self, name: str, task: str) -> LayerSetRecord:
        """Return the newest set for the task: Self-SD's own for "self-sd", SWIFT's for all others.

        Raises: LayerSetNotFound: there is none.
        """
        record = self._newest(searched_by(name), task)
        if record is not None:
            return record
        command = "layers search" if name == "self-sd" else "tune --method swift --draft-format stored"
        raise LayerSetNotFound(
            f"{name} needs a layer set, and none is stored for the task {task}:"
            f" run `swiftopt {command} --model MODEL --stream FILE --task {task}`, or give one"
        )

    def _newest(self, method: str, task: str) -> LayerSetRecord | None:
        """Return the task's newest set that was found for a method, whatever its verdict, else the default task's."""
        fingerprint = self.runtime.info.fingerprint
        for each in dict.fromkeys((task, DEFAULT_TASK)) if self.store is not None else ():
            assert self.store is not None
            for record in self.store.layer_sets(fingerprint, each):
                assert record.version is not None
                plan = self.store.plan(fingerprint, each, record.version).plan
                if method == (record.found_for if plan.method == "plain" else plan.method):
                    return record
        return None

    def learned(self, kind: LearnedKind, task: str, name: str = "") -> LearnedRecord:
        """Return the record of the newest heads or probe for the task; a method's `name` makes no difference here.

        Raises: LearnedNotFound: there are none.
        """
        if self.store is None:
            raise LearnedNotFound(f"no database to look {kind} up in: pass --db")
        return self.store.learned(self.runtime.info.fingerprint, task, kind)

    def weights(self, record: LearnedRecord) -> Heads | Probe:
        """Return the weights of heads or of a probe.

        Raises: InvalidInput: they are another model's.
        """
        key = weights_key(record)
        if key not in self._weights:
            assert self.store is not None
            data = self.store.weights(record)
            self._weights[key] = learned_from_bytes(record.kind, data, self.runtime)
        return self._weights[key]

    def _own(self, record: LayerSetRecord) -> LayerSetRecord:
        if record.fingerprint is not None and record.fingerprint != self.runtime.info.fingerprint:
            raise LayerSetError(
                f"the layer set was tuned on {record.model} ({record.fingerprint}), but this model is"
                f" {self.runtime.info.fingerprint}: tune it first, or export a set of this model"
            )
        return record


@dataclass(frozen=True, slots=True)
class Made:
    """A missing piece that was made: which, how, and in how many seconds."""

    piece: str
    how: str
    seconds: float


class MakingRecipes(Recipes):
    """Recipes for one task, which make what is not stored, each part once, on `prompts`; `made` lists it.

    Args: model: the name that the caller used. keep: where to store what is made; None: nowhere. presets: by method, by
          which the parts of these are made, in full and whatever is stored.
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
        presets: Mapping[str, Preset] = {},
    ) -> None:
        super().__init__(session.runtime, store, draft_runtime, on_step)
        self.session, self.model, self.task, self.prompts, self.keep = session, model, task, prompts, keep
        self.presets = {name: preset for name, preset in presets.items() if preset.making}
        self.made: list[Made] = []
        self._sets: dict[str, LayerSetRecord] = {}
        self._learned: dict[str, LearnedRecord] = {}

    def layer_set(self, name: str, task: str) -> LayerSetRecord:
        """Return the stored set for the method, or search one: briefly, or as its preset says."""
        own, by = self.presets.get(name), searched_by(name)
        key = by if own is None else name
        if key not in self._sets:
            try:
                if own is not None:
                    raise LayerSetNotFound("a preset's set is searched anew")
                self._sets[key] = super().layer_set(name, task)
            except LayerSetNotFound:
                self._sets[key] = self._self_sd_set(own) if by == "self-sd" else self._swift_set(own)
        return self._sets[key]

    def learned(self, kind: LearnedKind, task: str, name: str = "") -> LearnedRecord:
        """Return the record of stored heads or a probe, or train them: briefly, or as the method's preset says.

        Raises: InvalidInput: the prompts and their completions are too few to learn from.
        """
        own = self.presets.get(name)
        key = kind if own is None else name
        if key not in self._learned:
            try:
                if own is not None:
                    raise LearnedNotFound("what a preset trains is trained anew")
                self._learned[key] = super().learned(kind, task)
            except LearnedNotFound:
                self._learned[key] = self._train(kind, own)
        return self._learned[key]

    def _train(self, kind: LearnedKind, preset: Preset | None) -> LearnedRecord:
        words, seconds = ("heads", HEADS_S) if kind == "heads" else ("a probe", PROBE_S)
        clock, runtime = perf_counter(), self.runtime
        n_tokens = max(LEAST_TOKENS, self.session.max_new_tokens)
        brief: Mapping[str, Any] = {"epochs": BRIEF_EPOCHS} if kind == "heads" else {}
        of_kind = HeadSettings if kind == "heads" else ProbeSettings
        settings = of_kind(**(brief if preset is None else preset.making), max_new_tokens=n_tokens)
        how = f"by {seconds:.0f} s of training" if preset is None else f"by {settings.epochs} epochs of training"
        self.on_step(f"make: {words}, {how}")
        trained = train(runtime, self.prompts, settings, budget_s=seconds if preset is None else None)
        self._note(kind, f"{trained.figures['steps']:.0f} steps of training", perf_counter() - clock)
        values = {**settings.to_json(), "brief": preset is None}
        record = record_of(runtime, self.model, self.task, trained, values)
        if self.keep is not None:
            record = self.keep.add_learned(record, learned_to_bytes(trained.model, record))
        self._weights[weights_key(record)] = trained.model
        return record

    def _swift_set(self, preset: Preset | None) -> LayerSetRecord:
        """Run SWIFT's search while decoding; evenly spaced sub-layers where the completions are too short for it."""
        most_s = SWIFT_S if preset is None else math.inf
        self.on_step(f"make: a layer set, by {f'{most_s:.0f} s of ' if preset is None else ''}SWIFT's search")
        clock, settings = perf_counter(), SwiftSettings(max_steps=SWIFT_STEPS)
        if preset is not None:
            settings = SwiftSettings(**preset.tuning)
        window = min(settings.context_window, max(1, self.session.max_new_tokens // 2))  # short texts count too
        settings = replace(settings, context_window=window)
        search = searched(self.session, self.prompts, settings, most_s)
        n_tried = len(search.trials)
        how = f"{n_tried} candidates" if n_tried else "evenly spaced, for the completions are too short to search on"
        self._note("layer set", how, perf_counter() - clock)
        return self._kept("swift", search.layer_set, matchness=search.matchness, settings=settings.to_json())

    def _self_sd_set(self, preset: Preset | None) -> LayerSetRecord:
        own = dict(preset.making if preset is not None else {})
        how = f"{SELF_SD_S:.0f} s of its search" if preset is None else f"{own['max_steps']} candidates of its search"
        self.on_step(f"make: Self-SD's layer set, by {how}")
        n_tokens, n_prompts = self.session.max_new_tokens, own.pop("n_prompts", SELF_SD_PROMPTS)
        session, most_s = self.session, math.inf
        if preset is None:
            session, most_s = Session(self.runtime, session.sampling, min(SELF_SD_TOKENS, n_tokens)), SELF_SD_S
        found = self_sd.search(session, self.prompts[:n_prompts], budget_s=most_s, **own)
        self._note("Self-SD's layer set", f"{len(found.candidates)} candidates", found.seconds)
        return self._kept("self-sd", found.best.layer_set)

    def _kept(self, method: str, layer_set: LayerSet, **known: Any) -> LayerSetRecord:
        record = set_record(self.runtime, self.model, self.task, layer_set, **known)
        return record if self.keep is None else self.keep.add_layer_set(record, plan_method=method, promote=False)

    def _note(self, piece: str, how: str, seconds: float) -> None:
        self.made.append(Made(piece, f"{how}, {seconds:.0f} s", seconds))


def weights_key(record: LearnedRecord) -> tuple[str, str, int | None]:
    """Return what distinguishes the weights of one model."""
    return record.kind, record.task, record.version


def searched_by(method: str) -> str:
    """Return the method whose search finds layer sets for `method`: Self-SD has its own, all others take SWIFT's."""
    return "self-sd" if method == "self-sd" else "swift"


def opened(
    request: ModelRequest,
    prompts: Sequence[Prompt],
    store: Store | None,
    on_step: Callable[[str], None],
    stop: Sequence[str] = (),
) -> Session:
    """Load the request's model, let the store know it, and see that the prompts can be decoded with it.

    Raises: SwiftoptError: as `load` and `Session.check` raise it.
    """
    runtime = load(request.model, request.dtype, request.device, on_step, request.speed)
    if store is not None:
        store.remember_model(runtime.info)
    session = Session(runtime, request.sampling, request.max_new_tokens, stop)
    for prompt in prompts:
        session.check(prompt)
    return session


def stamped(record: LayerSetRecord, **known: Any) -> LayerSetRecord:
    """Return the record with this version of swiftopt and the time; `known` are further fields."""
    return replace(record, swiftopt_version=__version__, created_at=now(), **known)


def stored_costs(
    runtime: Runtime,
    store: Store | None,
    n_positions: int,
    on_step: Callable[[str], None] | None = None,
    formats: Iterable[str] = (),
    patience_s: float = PATIENCE_S,
) -> CostProfile:
    """Return the model's cost profile on this machine with the named formats, measured once and stored.

    Waits `patience_s` for a database that is away; without one nothing is stored.

    Raises: StoreUnavailable: it stayed away.
    """
    bucket = min(context_bucket(n_positions), runtime.max_positions)
    key = (runtime.info.fingerprint, machine_name(runtime), runtime.dtype_name, bucket)
    found = None if store is None else patiently(lambda: store.cost_profile(*key), patience_s)
    costs = found or replace(measure_costs(runtime, bucket, on_step), context_bucket=bucket)
    costs = with_formats(runtime, costs, formats, on_step)
    if store is not None and costs is not found:
        patiently(lambda: store.save_cost_profile(costs), patience_s)
    return costs


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
    session, seed = opened(request, prompts, store, on_step), request.sampling.seed
    found = self_sd.search(session, prompts, max_steps, budget_s, seed=seed, on_candidate=on_candidate)
    record = set_record(session.runtime, request.model, request.task or prompts[0].task, found.best.layer_set)
    return store.add_layer_set(record, plan_method="self-sd", promote=False), found


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
