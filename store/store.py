"""The store: one object per database, whose methods take and return core values."""

from __future__ import annotations

from types import TracebackType

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from ..core.types import CostProfile, FoundPlan, LayerSetRecord, ModelInfo, Trial
from . import aliases, layer_sets, names, rows, runs
from .database import as_url, connect, default_url, shown, store_errors
from .jobs import Jobs
from .schema import SchemaState, ensure_head, revision
from .transactions import Transactions


class Store:
    """Layer sets, plans, aliases, cost profiles, jobs and trials in one SQL database; safe to share between threads.

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

    def add_layer_set(self, record: LayerSetRecord, plan_method: str = "swift", promote: bool = True) -> LayerSetRecord:
        """Store a new version with its plan and, unless told otherwise, let `best` mean it; the record as stored.

        Raises: LayerSetError: the model has another number of layers.
        """

        def work(session: Session) -> LayerSetRecord:
            plan = layer_sets.add_version(session, record, plan_method)
            if promote:
                aliases.move(session, plan, "best")
            return rows.layer_set_record(plan.layer_set)

        return self._do.write(work)

    def layer_set(self, model: str, task: str, version: int) -> LayerSetRecord:
        """One version.

        Raises: LayerSetNotFound: it names the versions that exist.
        """
        return self._do.read(lambda s: rows.layer_set_record(layer_sets.plan_of(s, model, task, version).layer_set))

    def plan(self, model: str, task: str, version: int) -> FoundPlan:
        """The plan of one version, whatever alias means it; its `alias` is "".

        Raises: LayerSetNotFound: it names the versions that exist.
        """
        return self._do.read(lambda session: rows.found_plan(layer_sets.plan_of(session, model, task, version), ""))

    def layer_sets(self, model: str | None = None, task: str | None = None) -> list[LayerSetRecord]:
        """The stored versions of a model, a task, both or all, newest first."""
        return self._do.read(lambda session: layer_sets.list_layer_sets(session, model, task))

    def promote(self, model: str, task: str, version: int, alias: str = "best") -> FoundPlan:
        """Let the alias mean that version, for the device and dtype that it was tuned on.

        Raises: LayerSetNotFound: it names the versions that exist.
        """
        return self._do.write(lambda s: aliases.move(s, layer_sets.plan_of(s, model, task, version), alias))

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
