"""What methods need beyond the model, looked up for a task: layer sets, heads, probes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import LayerSetError, LayerSetNotFound, LearnedNotFound
from ..core.learned import LearnedKind, LearnedRecord
from ..core.plans import AS_FOUND
from ..core.types import LayerSet, LayerSetRecord
from ..decoding.methods import Resources, method_info
from ..decoding.methods.adaptive import AdaptiveSettings
from ..models.early_exit import Heads, Probe, heads_from_bytes, probe_from_bytes
from ..models.runtime import Runtime
from ..models.saved import no_step
from ..store import Store
from .stored_costs import stored_costs

DEFAULT_TASK = "default"
TYPICAL_POSITIONS = 512  # of a request, which costs are measured at where no stream says how long its texts are


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """What one method is built of, the stored records of it, and the settings that come with its layer set."""

    parts: Resources
    layer_set: LayerSetRecord | None = None
    learned: LearnedRecord | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


class StoredPieces:
    """Finds what was stored for a model's tasks; weights are read once."""

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
    ) -> Pieces:
        """The pieces of a method, those that are given or else the task's own; costs are those that `settings` need.

        Adaptive drafts take what was tuned for them, unless `settings` name the format of their weights.

        Raises: LayerSetNotFound, LearnedNotFound: one is needed and not stored. LayerSetError: the set is another
                model's.
        """
        info = method_info(name)
        if "costs" in info.needs:
            if layer_set is None and "draft_format" not in settings:
                layer_set = self._newest(name, task)
            own = None if layer_set is None else self._own(layer_set)
            found = AS_FOUND if own is not None and own.found_for == name else {}
            return Pieces(self._with_costs(own, info.settings_from({**found, **settings})), own, settings=found)
        skips = "layer_set" in info.needs or (info.drafts_with_model and self.draft_runtime is None)
        if skips:
            layer_set = self._own(layer_set or self.layer_set(name, task))
        heads = probe = None
        if "heads" in info.needs:
            heads, learned = self.heads(learned or self.learned("heads", task))
        if "probe" in info.needs:
            probe, learned = self.probe(learned or self.learned("probe", task))
        draft = self.draft_runtime if info.drafts_with_model else None
        skipped = layer_set.layer_set if skips and layer_set is not None else None
        found = layer_set.settings if name == "swift" and layer_set is not None else {}
        return Pieces(
            Resources(self.runtime, skipped, heads, probe, draft), layer_set if skips else None, learned, found
        )

    def _with_costs(self, record: LayerSetRecord | None, settings: AdaptiveSettings) -> Resources:
        layer_set = LayerSet(self.runtime.n_layers) if record is None else record.layer_set
        formats = {name for _, name in layer_set.filled(settings.draft_format).formats}
        costs = stored_costs(self.runtime, self.store, TYPICAL_POSITIONS, self.on_step, formats)
        return Resources(self.runtime, layer_set, costs=costs)

    def layer_set(self, name: str, task: str) -> LayerSetRecord:
        """The newest set for the task: Self-SD's own for "self-sd", SWIFT's for all others.

        Raises: LayerSetNotFound: there is none.
        """
        record = self._newest("self-sd" if name == "self-sd" else "swift", task)
        if record is not None:
            return record
        command = "layers search" if name == "self-sd" else "tune --method swift --draft-format stored"
        raise LayerSetNotFound(
            f"{name} needs a layer set, and none is stored for the task {task}:"
            f" run `swiftopt {command} --model MODEL --stream FILE --task {task}`, or pass --layer-set FILE"
        )

    def _newest(self, method: str, task: str) -> LayerSetRecord | None:
        """The task's newest set that was found for a method, whatever its verdict; that of the default task else."""
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
        """The newest heads or probe for the task.

        Raises: LearnedNotFound: there are none.
        """
        if self.store is None:
            raise LearnedNotFound(f"no database to look {kind} up in: pass --db")
        return self.store.learned(self.runtime.info.fingerprint, task, kind)

    def heads(self, record: LearnedRecord) -> tuple[Heads, LearnedRecord]:
        """The weights of stored heads."""
        key = ("heads", record.task, record.version)
        if key not in self._weights:
            assert self.store is not None
            self._weights[key] = heads_from_bytes(self.store.weights(record), self.runtime)
        found = self._weights[key]
        assert isinstance(found, Heads)
        return found, record

    def probe(self, record: LearnedRecord) -> tuple[Probe, LearnedRecord]:
        """The weights of a stored probe."""
        key = ("probe", record.task, record.version)
        if key not in self._weights:
            assert self.store is not None
            self._weights[key] = probe_from_bytes(self.store.weights(record), self.runtime)
        found = self._weights[key]
        assert isinstance(found, Probe)
        return found, record

    def _own(self, record: LayerSetRecord) -> LayerSetRecord:
        if record.fingerprint is not None and record.fingerprint != self.runtime.info.fingerprint:
            raise LayerSetError(
                f"the layer set was tuned on {record.model} ({record.fingerprint}), but this model is"
                f" {self.runtime.info.fingerprint}: tune it first, or export a set of this model"
            )
        return record
