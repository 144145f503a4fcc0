"""Lookups of the stored plans of a served model's tasks, which other replicas and operators change."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from ..core.layer_sets import LayerSet
from ..core.records import FoundPlan
from ..models.costs import machine_name
from ..models.runtime import Runtime
from ..store import Store
from ..store.plans import REREAD_S, LookupState, tasks_between


class StoredPlans:
    """Looks up all tasks in one query, and repeats it only for tasks whose alias was moved.

    Hundreds of replicas look up their plans every few seconds, and nearly always nothing has changed. Not thread-safe.

    Args:   is_usable: tells whether drafts of a layer set can be made here.
    Raises: StoreError: every method, if the database is away.
    """

    def __init__(self, store: Store, runtime: Runtime, is_usable: Callable[[LayerSet], bool]) -> None:
        self._store, self._runtime, self._is_usable = store, runtime, is_usable
        self._state: LookupState = None
        self._read_at_s = -math.inf  # On the monotonic clock.

    def look_up(self, names: Sequence[str]) -> dict[str, FoundPlan]:
        """Return the `best` plan of each task that has one for adaptive drafts that can be made here."""
        runtime = self._runtime
        plans = self._store.lookup_many(runtime.info.fingerprint, names, machine_name(runtime), runtime.dtype_name)
        return {name: plan for name, plan in plans.items() if self._can_draft_by(plan)}

    def look_up_changed(self, names: Sequence[str]) -> dict[str, FoundPlan]:
        """Look up only the tasks whose alias was moved since the last call; every REREAD_S seconds, all of them."""
        state, now_s = self._store.lookup_state(self._runtime.info.fingerprint), time.monotonic()
        reads_all = now_s >= self._read_at_s + REREAD_S
        moved = None if reads_all else tasks_between(self._state, state, self._store.tasks_moved)
        if moved is not None:
            # A moved alias of the default task matters to no other task: fallback plans are not used here.
            names = [name for name in names if name in moved]
        plans = self.look_up(names) if names else {}
        self._state = state
        self._read_at_s = now_s if reads_all else self._read_at_s
        return plans

    def _can_draft_by(self, stored_plan: FoundPlan) -> bool:
        record = stored_plan.plan.layer_set
        if record is None or stored_plan.plan.method != "adaptive" or stored_plan.fallback is not None:
            return False
        return self._is_usable(record.layer_set)
