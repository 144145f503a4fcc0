"""Stored parts of methods for a task: layer sets, heads, probes, and what passes cost on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .. import __version__
from ..core.costs import CostProfile
from ..core.errors import LayerSetError, LayerSetNotFound, LearnedNotFound
from ..core.types import AS_FOUND, LayerSet, LayerSetRecord, LearnedKind, LearnedRecord, now
from ..decoding.methods import Resources, method_info
from ..decoding.methods.adaptive import AdaptiveSettings
from ..models.costs import context_bucket, machine_name, measure_costs, with_formats
from ..models.early_exit import Heads, Probe, heads_from_bytes, probe_from_bytes
from ..models.runtime import Runtime
from ..models.saved import no_step
from ..store import Store
from .job import patiently

DEFAULT_TASK = "default"
KINDS: tuple[LearnedKind, ...] = ("heads", "probe")
TYPICAL_POSITIONS = 512  # of a request, at which costs are measured where no stream says how long its texts are


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
                learned = learned or self.learned(kind, task)
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
            f" run `swiftopt {command} --model MODEL --stream FILE --task {task}`, or pass --layer-set FILE"
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

    def learned(self, kind: LearnedKind, task: str) -> LearnedRecord:
        """Return the record of the newest heads or probe for the task.

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
            self._weights[key] = (
                heads_from_bytes(data, self.runtime) if record.kind == "heads" else probe_from_bytes(data, self.runtime)
            )
        return self._weights[key]

    def _own(self, record: LayerSetRecord) -> LayerSetRecord:
        if record.fingerprint is not None and record.fingerprint != self.runtime.info.fingerprint:
            raise LayerSetError(
                f"the layer set was tuned on {record.model} ({record.fingerprint}), but this model is"
                f" {self.runtime.info.fingerprint}: tune it first, or export a set of this model"
            )
        return record


def weights_key(record: LearnedRecord) -> tuple[str, str, int | None]:
    """Return what distinguishes the weights of one model."""
    return record.kind, record.task, record.version


def searched_by(method: str) -> str:
    """Return the method whose search finds layer sets for `method`: Self-SD has its own, all others take SWIFT's."""
    return "self-sd" if method == "self-sd" else "swift"


def stamped(record: LayerSetRecord, **known: Any) -> LayerSetRecord:
    """Return the record with this version of swiftopt and the time; `known` are further fields."""
    return replace(record, swiftopt_version=__version__, created_at=now(), **known)


def stored_costs(
    runtime: Runtime,
    store: Store | None,
    n_positions: int,
    on_step: Callable[[str], None] | None = None,
    formats: Iterable[str] = (),
) -> CostProfile:
    """Return the model's cost profile on this machine with the named formats, measured once and stored.

    Waits for a database that is away; without one nothing is stored.

    Raises: StoreUnavailable: it stayed away.
    """
    bucket = min(context_bucket(n_positions), runtime.max_positions)
    key = (runtime.info.fingerprint, machine_name(runtime), runtime.dtype_name, bucket)
    found = None if store is None else patiently(lambda: store.cost_profile(*key))
    costs = found or replace(measure_costs(runtime, bucket, on_step), context_bucket=bucket)
    costs = with_formats(runtime, costs, formats, on_step)
    if store is not None and costs is not found:
        patiently(lambda: store.save_cost_profile(costs))
    return costs
