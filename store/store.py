"""The store: one object per database, whose methods take and return core values."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from ..core.costs import CostProfile
from ..core.known_sets import KnownSet
from ..core.learned import LearnedKind, LearnedRecord
from ..core.types import FoundPlan, LayerSetRecord, ModelInfo, Plan, Trial
from . import aliases, comparisons, layer_sets, learned, names, plans, rows, runs
from .database import as_url, connect, default_url, shown, store_errors
from .jobs import Jobs
from .schema import SchemaState, ensure_head, revision
from .transactions import Transactions


class Store:
    """Layer sets, heads and probes, plans, aliases, comparisons, cost profiles, jobs and trials in one SQL database.

    Threads may share it.

    Every method raises StoreError, in one sentence, when the database cannot be read or written.
    """

    def __init__(self, engine: Engine, url: str) -> None:
        self.url = url
        self._do = Transactions(engine, url)
        self.jobs = Jobs(self._do)

    @classmethod
    def open(cls, url: str | None = None) -> Store:
        """Open the database (a URL or a path; None: the default one), created and migrated as needed.

        Raises: SchemaTooNew: a newer swiftopt has written it. StoreError: it cannot be opened.
        """
        url = default_url() if url is None else as_url(url)
        engine = connect(url)
        try:
            with store_errors(url):
                ensure_head(engine, url)
        except BaseException:
            engine.dispose()
            raise
        return cls(engine, url)

    def schema(self) -> SchemaState:
        """Where the database stands now, asked over a connection that is open already."""
        return self._do.read(lambda session: SchemaState(shown(self.url), revision(session.connection())))

    def close(self) -> None:
        """Close the connections."""
        self._do.engine.dispose()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def remember_model(self, info: ModelInfo) -> None:
        """Insert or update a model; its names stand for it from now on, and sets imported under them become its own.

        Such a set keeps its version, unless the model has sets for the same task: then it is numbered after those.
        """
        self._do.write(lambda session: names.remember(session, info))

    def models(self) -> list[ModelInfo]:
        """Every model that was loaded once; one known only from an imported set has no fingerprint and is left out."""
        return self._do.read(names.list_models)

    def model_names(self) -> list[str]:
        """Every name that a model can be looked up by, sorted."""
        return self._do.read(names.list_names)

    def add_layer_set(
        self, record: LayerSetRecord, plan_method: str | None = None, promote: bool = True
    ) -> LayerSetRecord:
        """Store a new version with its plan and, unless told otherwise, let `best` mean it; the record as stored.

        The plan is of the method that the set was found for, where none is named.

        `best` stays where, for the same device and dtype, it means a plan of another method with the verdict "use"
        and a higher measured speedup, or the new set's verdict is not "use".

        Raises: LayerSetError: the model has another number of layers.
        """

        def work(session: Session) -> LayerSetRecord:
            row, plan = layer_sets.add_version(session, record, plan_method or record.found_for)
            if promote:
                aliases.offer(session, plan)
            return rows.layer_set_record(row)

        return self._do.write(work)

    def layer_set(self, model: str, task: str, version: int) -> LayerSetRecord:
        """The layer set of one version.

        Raises: LayerSetNotFound: it names the versions that exist, or says that this one's method needs no layer set.
        """
        return self._do.read(lambda session: layer_sets.layer_set_of(session, model, task, version))

    def add_plan(self, model: str, task: str, plan: Plan, promote: bool = True) -> FoundPlan:
        """Store how to decode as the next version and, unless told otherwise, let `best` mean it.

        The plan's layer set and heads or probe must be stored records. `alias` is "" if `best` was not moved.

        Raises: LayerSetNotFound, LearnedNotFound: they are not. StoreError: the model was never remembered.
        """

        def work(session: Session) -> FoundPlan:
            row = plans.add_plan(session, model, task, plan)
            return aliases.move(session, row, "best") if promote else rows.found_plan(row, "")

        return self._do.write(work)

    def plan(self, model: str, task: str, version: int) -> FoundPlan:
        """The plan of one version, whatever alias means it; its `alias` is "".

        Raises: LayerSetNotFound: it names the versions that exist.
        """
        return self._do.read(lambda session: rows.found_plan(plans.plan_of(session, model, task, version), ""))

    def layer_sets(self, model: str | None = None, task: str | None = None) -> list[LayerSetRecord]:
        """The stored versions of a model, a task, both or all, newest first."""
        return self._do.read(lambda session: layer_sets.list_layer_sets(session, model, task))

    def known_sets(self, fingerprint: str) -> list[KnownSet]:
        """The newest layer sets of a model, of any task, with the place of the text that each was found on."""
        return self._do.read(lambda session: layer_sets.known_sets(session, fingerprint))

    def promote(self, model: str, task: str, version: int, alias: str = "best") -> FoundPlan:
        """Let the alias mean that version, for the device and dtype that it was tuned or compared on.

        Raises: LayerSetNotFound: it names the versions that exist.
        """
        return self._do.write(lambda s: aliases.move(s, plans.plan_of(s, model, task, version), alias))

    def rollback(self, model: str, task: str, alias: str = "best") -> FoundPlan:
        """Take back the alias's last move, whatever device and dtype it was for.

        Raises: LayerSetNotFound: no plan was there before it.
        """
        return self._do.write(lambda session: aliases.undo(session, model, task, alias))

    def lookup(
        self, model: str, task: str, device: str | None = None, dtype: str | None = None, alias: str = "best"
    ) -> FoundPlan:
        """The plan for a model (name or fingerprint) and task; device or dtype None accepts any.

        Falls back to another dtype or device, then to the task "default"; `fallback` says so in words.

        Raises: LayerSetNotFound: it names the nearest model and task, and the command that tunes this one.
        """
        return self._do.read(lambda session: aliases.lookup(session, model, task, device, dtype, alias))

    def add_learned(self, record: LearnedRecord, weights: bytes) -> LearnedRecord:
        """Store heads or a probe as a new version, `weights` the bytes of their safetensors file; the record as stored.

        Raises: StoreError: no model of that fingerprint was remembered.
        """
        return self._do.write(lambda session: learned.add_learned(session, record, weights))

    def learned(self, model: str, task: str, kind: LearnedKind, version: int | None = None) -> LearnedRecord:
        """The newest heads or probe for a model (name or fingerprint) and task, or else the task "default"; or exactly
        that version.

        Raises: LearnedNotFound: it names what is stored, and the command that trains it.
        """
        return self._do.read(lambda session: learned.find_learned(session, model, task, kind, version))

    def weights(self, record: LearnedRecord) -> bytes:
        """The bytes that were stored with a record.

        Raises: LearnedNotFound: the record is not stored.
        """
        return self._do.read(lambda session: learned.weights_of(session, record))

    def learned_list(
        self, model: str | None = None, task: str | None = None, kind: LearnedKind | None = None
    ) -> list[LearnedRecord]:
        """The stored versions of a model, task and kind, or of all, newest first; weights are not read."""
        return self._do.read(lambda session: learned.list_learned(session, model, task, kind))

    def add_comparison(
        self, model: str, task: str, device: str, dtype: str, report: Mapping[str, Any], created_at: str
    ) -> int:
        """Store what a comparison measured; its number.

        Raises: StoreError: the model was never remembered.
        """
        return self._do.write(
            lambda session: comparisons.add_comparison(session, model, task, device, dtype, report, created_at)
        )

    def comparisons(self, model: str | None = None, task: str | None = None, limit: int = 20) -> list[dict[str, Any]]:
        """Comparisons of a model, a task, both or all, newest first: `id`, `model`, `task`, `device`, `dtype`,
        `created_at`, and `report` as it was stored.
        """
        return self._do.read(lambda session: comparisons.list_comparisons(session, model, task, limit))

    def save_cost_profile(self, profile: CostProfile) -> None:
        """Store measured costs in place of those of the same model, device, dtype and context bucket."""

        self._do.write(lambda session: runs.save_cost_profile(session, profile))

    def cost_profile(self, fingerprint: str, device: str, dtype: str, context_bucket: int) -> CostProfile | None:
        """The measured costs, if there are any."""
        return self._do.read(
            lambda session: runs.find_cost_profile(session, fingerprint, device, dtype, context_bucket)
        )

    def trials(self, job: str, task: str) -> list[Trial]:
        """A job's trials for a task in step order; none if nothing was tried."""
        return self._do.read(lambda session: runs.list_trials(session, job, task))
