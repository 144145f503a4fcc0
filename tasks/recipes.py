"""The parts that methods need for a task: lookup of stored parts, and quick making of missing ones for a comparison.

Costs of passes are measured once. Brief searches and trainings take about a minute together, outside a comparison's
timing, and their stored results are marked as brief. Optional packages (wings) make the parts that only they use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from .. import __version__
from ..core.costs import CostProfile, context_bucket
from ..core.errors import LayerSetError, LayerSetNotFound, LearnedNotFound
from ..core.layer_sets import LayerSet
from ..core.records import FOUND_SET_SETTINGS, LayerSetRecord, LearnedKind, LearnedRecord
from ..core.requests import ModelRequest
from ..core.settings import STORED, Preset, SwiftSettings
from ..core.types import DEFAULT_TASK, Prompt, now
from ..core.wings import load as load_from_wing
from ..core.wings import parts
from ..decoding.engine import side_by_side
from ..decoding.events import Round
from ..decoding.methods import Resources, method_info
from ..decoding.methods.adaptive import AdaptiveSettings
from ..decoding.session import Session
from ..models.costs import machine_name, measure_costs, software_of, with_formats
from ..models.loading import load, mtp_of
from ..models.mtp import DRAFT_FORMAT, cost_name
from ..models.prompts import check_prompts
from ..models.runtime import Runtime
from ..models.saved import OnStep, no_step
from ..models.sources import check_names, known_folder, tokenizer_folder
from ..optimizer.search import Search
from ..optimizer.task_state import sub_layers_of
from .job import PATIENCE_S, ModelTurn, with_retries

if TYPE_CHECKING:
    from ..store import Store

TYPICAL_POSITIONS = 512  # Context length in tokens at which costs are measured when no stream shows typical lengths.

BRIEF_SEARCH_S = 10.0  # Time limit of a brief search.
# Step limit of a brief search. It is stored with the layer set, and so distinguishes brief searches from full ones.
BRIEF_SEARCH_STEPS = 100


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """The parts of a method, the stored records that they come from, and the settings stored with its layer set."""

    parts: Resources
    layer_set: LayerSetRecord | None = None
    learned: LearnedRecord | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


class Recipes:
    """Looks up the stored parts of methods on one model. Weights are read once.

    Args: turn: see `stored_costs`.
    """

    def __init__(
        self,
        runtime: Runtime,
        store: Store | None,
        draft_runtime: Runtime | None = None,
        on_step: OnStep = no_step,
        turn: ModelTurn = nullcontext,
    ) -> None:
        self.runtime, self.store, self.draft_runtime, self.on_step = runtime, store, draft_runtime, on_step
        self._turn = turn
        self._weights: dict[tuple[str, str, int | None], Any] = {}

    def of(
        self,
        name: str,
        task: str,
        layer_set: LayerSetRecord | None = None,
        learned: LearnedRecord | None = None,
        settings: Mapping[str, Any] = {},
    ) -> Recipe:
        """Return the recipe of a method, from the given records or from those stored for the task.

        Adaptive drafts use the newest layer set that was tuned for them, unless `settings` choose the format of their
        weights. Their costs include the formats that they need.

        Raises: LayerSetNotFound, LearnedNotFound: a needed part is not stored. LayerSetError: the layer set was tuned
                on another model.
        """
        method = method_info(name)
        if "costs" in method.needs:
            return self._adaptive(name, task, layer_set, settings)
        record = None
        if "layer_set" in method.needs or (method.drafts_with_model and self.draft_runtime is None):
            record = self._check_model(layer_set or self.layer_set(name, task))
        for kind in get_args(LearnedKind):
            if kind in method.needs:
                learned = learned or self.learned(kind, task, name)
        resources = Resources(
            self.runtime,
            None if record is None else record.layer_set,
            {} if learned is None else {learned.kind: self.weights(learned)},
            self.draft_runtime if method.drafts_with_model else None,
        )
        return Recipe(resources, record, learned, record.settings if name == "swift" and record is not None else {})

    def _adaptive(self, name: str, task: str, layer_set: LayerSetRecord | None, settings: Mapping[str, Any]) -> Recipe:
        """Return the recipe of a method that needs the costs of passes; see `of`."""
        if layer_set is None and "draft_format" not in settings:
            layer_set = self._newest(name, task)
        record = None if layer_set is None else self._check_model(layer_set)
        set_settings = FOUND_SET_SETTINGS if record is not None and record.found_for == name else {}
        method_settings: AdaptiveSettings = method_info(name).settings_from({**set_settings, **settings})
        draft = self.runtime.whole if record is None else record.layer_set
        formats = {format_name for _, format_name in draft.filled(method_settings.draft_format).formats}
        costs = stored_costs(self.runtime, self.store, TYPICAL_POSITIONS, self.on_step, formats, turn=self._turn)
        return Recipe(Resources(self.runtime, draft, costs=costs), record, settings=set_settings)

    def layer_set(self, name: str, task: str) -> LayerSetRecord:
        """Return the task's newest layer set from the search that the method has, or from SWIFT's.

        Raises: LayerSetNotFound: none is stored.
        """
        record = self._newest(search_method_of(name), task)
        if record is not None:
            return record
        search = parts().get(name)
        command = "tune --method swift --draft-format stored" if search is None else search.command
        raise LayerSetNotFound(
            f"{name} needs a layer set, but none is stored for the task {task}:"
            f" run `swiftopt {command} --model MODEL --stream FILE --task {task}`, or pass one"
        )

    def _newest(self, method: str, task: str) -> LayerSetRecord | None:
        """Return the newest set of the task, or else of the default task, that was found for a method.

        The set's verdict does not matter. None: no such set is stored.
        """
        store, fingerprint = self.store, self.runtime.info.fingerprint
        if store is None:
            return None
        for task_name in dict.fromkeys((task, DEFAULT_TASK)):
            for record in store.layer_sets(fingerprint, task_name):
                assert record.version is not None
                plan = store.plan(fingerprint, task_name, record.version).plan
                if method == (record.found_for if plan.method == "plain" else plan.method):
                    return record
        return None

    def learned(self, kind: LearnedKind, task: str, name: str = "") -> LearnedRecord:
        """Return the record of the newest weights of a kind for the task; `name`, the method, is ignored here.

        Raises: LearnedNotFound: none are stored.
        """
        if self.store is None:
            raise LearnedNotFound(f"there is no database to look {kind} up in: pass --db")
        return self.store.learned(self.runtime.info.fingerprint, task, kind)

    def weights(self, record: LearnedRecord) -> Any:
        """Return the weights of a record.

        Raises: InvalidInput: the weights belong to another model.
        """
        key = (record.kind, record.task, record.version)
        if key not in self._weights:
            assert self.store is not None
            read_weights = load_from_wing(parts()[record.kind].reader)
            self._weights[key] = read_weights(record.kind, self.store.weights(record), self.runtime)
        return self._weights[key]

    def keep_weights(self, record: LearnedRecord, weights: Any) -> None:
        """Keep weights that were just made, so that they are not read again."""
        self._weights[record.kind, record.task, record.version] = weights

    def _check_model(self, record: LayerSetRecord) -> LayerSetRecord:
        """Return the record.

        Raises: LayerSetError: it was tuned on another model.
        """
        info = self.runtime.info
        if record.fingerprint not in (None, info.fingerprint, *info.earlier):
            raise LayerSetError(
                f"the layer set was tuned on {record.model} ({record.fingerprint}), but this model is"
                f" {info.fingerprint}: tune this model first, or export a set of it"
            )
        return record


class MadePart(NamedTuple):
    """A part that was made because it was not stored: its name, how it was made, and the seconds it took."""

    piece: str
    how: str
    seconds: float


class MakingRecipes(Recipes):
    """Recipes for one task that make the parts that are not stored, each once, on `prompts`. `made` lists them.

    Args: model: the name that the caller used. keep: where to store made parts; None: nowhere. presets: by method; the
          parts of these methods are always made, as the preset says.
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
        on_step: OnStep = no_step,
        presets: Mapping[str, Preset] = {},
    ) -> None:
        super().__init__(session.runtime, store, draft_runtime, on_step)
        self.session, self.model, self.task, self.prompts, self.keep = session, model, task, prompts, keep
        self.presets = {name: preset for name, preset in presets.items() if preset.making}
        self.made: list[MadePart] = []
        self._sets: dict[str, LayerSetRecord] = {}
        self._learned: dict[str, LearnedRecord] = {}

    def layer_set(self, name: str, task: str) -> LayerSetRecord:
        """Return the stored layer set for the method, or search for one: briefly, or as the method's preset says."""
        preset, search_method = self.presets.get(name), search_method_of(name)
        key = search_method if preset is None else name
        if key not in self._sets:
            stored_set = self._newest(search_method, task) if preset is None else None
            self._sets[key] = stored_set or (
                self._make(search_method, preset) if search_method in parts() else self._swift_set(preset)
            )
        return self._sets[key]

    def learned(self, kind: LearnedKind, task: str, name: str = "") -> LearnedRecord:
        """Return the record of stored weights, or train them: briefly, or as the method's preset says.

        Raises: InvalidInput: there are too few prompts and completions to train on.
        """
        preset, stored_record = self.presets.get(name), None
        key = kind if preset is None else name
        if key not in self._learned:
            if preset is None:
                with suppress(LearnedNotFound):
                    stored_record = super().learned(kind, task)
            self._learned[key] = stored_record or self._make(kind, preset)
        return self._learned[key]

    def _make(self, name: str, preset: Preset | None) -> Any:
        """Let an optional package (wing) make a part; return the part's record."""
        return load_from_wing(parts()[name].maker)(self, preset)

    def _swift_set(self, preset: Preset | None) -> LayerSetRecord:
        """Run SWIFT's search while decoding the prompts; return the record of the set in use at its end.

        If the completions are too short to score candidates, that is the first set: evenly spaced sub-layers.
        """
        budget_s = BRIEF_SEARCH_S if preset is None else math.inf
        self.on_step(f"make: a layer set, by {f'{budget_s:.0f} s of ' if preset is None else ''}SWIFT's search")
        started_s = perf_counter()
        settings = SwiftSettings(max_steps=BRIEF_SEARCH_STEPS) if preset is None else SwiftSettings(**preset.tuning)
        # A window of at most half a completion, so that short completions can be scored.
        window = min(settings.context_window, max(1, self.session.max_new_tokens // 2))
        settings = replace(settings, context_window=window)
        search = run_search(self.session, self.prompts, settings, budget_s)
        description = f"{len(search.trials)} candidates"
        if not search.trials:
            description = "evenly spaced, because the completions are too short for a search"
        self.record_part("layer set", description, perf_counter() - started_s)
        return self.keep_layer_set("swift", search.layer_set, matchness=search.matchness, settings=settings.to_json())

    def keep_layer_set(self, method: str, layer_set: LayerSet, **record_fields: Any) -> LayerSetRecord:
        """Return the record of a layer set that was made for a method; store it if made parts are kept."""
        record = set_record(self.runtime, self.model, self.task, layer_set, **record_fields)
        return record if self.keep is None else self.keep.add_layer_set(record, plan_method=method, promote=False)

    def record_part(self, name: str, description: str, seconds: float) -> None:
        """Add a part to the list of made parts."""
        self.made.append(MadePart(name, f"{description}, {seconds:.0f} s", round(seconds, 1)))


def search_method_of(method: str) -> str:
    """Return the method whose search finds layer sets for `method`: itself if its wing has a search, else SWIFT."""
    return method if method in parts() else "swift"


def open_session(
    request: ModelRequest,
    prompts: Sequence[Prompt],
    store: Store | None,
    on_step: OnStep,
    stop: Sequence[str] = (),
) -> Session:
    """Load the request's model, register it in the store, and check that it can decode the prompts.

    Checks that need only the model's files come before loading.

    Raises: SwiftoptError: as `load`, `check_prompts` and `Session.check` raise it.
    """
    source = check_names(request.model, request.dtype, request.device, request.speed)
    if (folder := known_folder(source)) is not None:
        tokenizer_files, logit_bias = tokenizer_folder(source, folder), dict(request.sampling.logit_bias)
        check_prompts(folder, tokenizer_files, prompts, request.max_new_tokens, logit_bias)
    runtime = load(request.model, request.dtype, request.device, on_step, request.speed)
    if store is not None:
        store.remember_model(runtime.info)
    session = Session(runtime, request.sampling, request.max_new_tokens, stop)
    for prompt in prompts:
        session.check(prompt)
    return session


def stamp(record: LayerSetRecord, **record_fields: Any) -> LayerSetRecord:
    """Return the record with swiftopt's version, the current time, and the `record_fields`."""
    return replace(record, swiftopt_version=__version__, created_at=now(), **record_fields)


def stored_costs(
    runtime: Runtime,
    store: Store | None,
    n_positions: int,
    on_step: OnStep = no_step,
    formats: Iterable[str] = (),
    patience_s: float = PATIENCE_S,
    turn: ModelTurn = nullcontext,
) -> CostProfile:
    """Return the model's cost profile on this machine with the named formats; measure and store it if it is missing.

    Costs are measured again if other programs disturbed them, or if torch or the kernels have another version.

    Args:   n_positions: context length in tokens. patience_s: how long an unreachable database is retried. turn: the
            context in which costs are measured, for models that other threads use too.
    Raises: StoreUnavailable: the database stayed unreachable.
    """
    bucket = min(context_bucket(n_positions), runtime.max_positions)
    key = (runtime.info.fingerprint, machine_name(runtime), runtime.dtype_name, bucket)
    profile = None if store is None else with_retries(lambda: store.cost_profile(*key), patience_s)
    if profile is not None and (profile.quality == "disturbed" or profile.software not in ("", software_of(runtime))):
        profile = None
    missing_formats = set(formats) - {STORED}
    if mtp_of(runtime, on_step) is not None:
        missing_formats.add(cost_name(DRAFT_FORMAT))
    if profile is not None and missing_formats <= set(profile.formats):
        return profile
    with turn():
        costs = profile or replace(measure_costs(runtime, bucket, on_step), context_bucket=bucket)
        costs = with_formats(runtime, costs, missing_formats, on_step)
    if store is not None:
        with_retries(lambda: store.save_cost_profile(costs), patience_s)
    return costs


def set_record(runtime: Runtime, model: str, task: str, layer_set: LayerSet, **record_fields: Any) -> LayerSetRecord:
    """Return the record of a layer set that was found on this machine, with the `record_fields`."""
    complete_set = replace(layer_set, absent=runtime.whole.absent)
    record = LayerSetRecord(model, task, complete_set, runtime.info.fingerprint)
    return stamp(record, device=machine_name(runtime), dtype=runtime.dtype_name, **record_fields)


def run_search(session: Session, prompts: Sequence[Prompt], settings: SwiftSettings, budget_s: float) -> Search:
    """Run SWIFT's search while decoding the prompts, for at most `budget_s` seconds; return the search."""
    runtime, started_s = session.runtime, perf_counter()
    skip_ratio = settings.start_skip_ratio(runtime.info.n_parameters)
    search = Search("", runtime.whole, sub_layers_of(runtime), settings, skip_ratio, None)
    try:
        with closing(side_by_side(search.request(session, prompt) for prompt in prompts)) as events:
            for event in events:
                if isinstance(event, Round) and (not search.optimising or perf_counter() - started_s > budget_s):
                    break
    finally:
        search.finish("the time is over")
    return search
