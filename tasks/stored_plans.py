"""Plans of a served model's tasks as they are stored, which other replicas and operators change."""

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
    """Looks up all tasks in one query, and again only if an alias of the model was moved.

    Hundreds of replicas ask every few seconds, and nearly always nothing has changed. Used by one thread.

    Args:   is_usable: whether drafts of a layer set can be made here.
    Raises: StoreError: in every method, the database is away.
    """

    def __init__(self, store: Store, runtime: Runtime, is_usable: Callable[[LayerSet], bool]) -> None:
        self._store, self._runtime, self._is_usable = store, runtime, is_usable
        self._state: LookupState = None
        self._read_at_s = -math.inf  # On the monotonic clock.

    def look_up(self, names: Sequence[str]) -> dict[str, FoundPlan]:
        """Return by task the plan that the alias `best` means, if it is a layer set of ours for adaptive drafts."""
        runtime = self._runtime
        plans = self._store.lookup_many(runtime.info.fingerprint, names, machine_name(runtime), runtime.dtype_name)
        return {name: plan for name, plan in plans.items() if self._is_ours(plan)}

    def look_again(self, names: Sequence[str]) -> dict[str, FoundPlan]:
        """Return what `look_up` does, of those tasks that had an alias moved since the last time."""
        state, now_s = self._store.lookup_state(self._runtime.info.fingerprint), time.monotonic()
        is_old = now_s >= self._read_at_s + REREAD_S
        moved = None if is_old else tasks_between(self._state, state, self._store.tasks_moved)
        if moved is not None:
            # Plans of the task "default" are not used for others.
            names = [name for name in names if name in moved]
        plans = self.look_up(names) if names else {}
        self._state = state
        self._read_at_s = now_s if is_old else self._read_at_s
        return plans

    def _is_ours(self, plan: FoundPlan) -> bool:
        record = plan.plan.layer_set
        if record is None or plan.plan.method != "adaptive" or plan.fallback is not None:
            return False
        return self._is_usable(record.layer_set)
