"""What passes cost on this machine: looked up, or measured once and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from ..core.costs import CostProfile
from ..models.costs import context_bucket, machine_name, measure_costs, with_formats
from ..models.runtime import Runtime
from ..store import Store
from .job import patiently


def stored_costs(
    runtime: Runtime,
    store: Store | None,
    n_positions: int,
    on_step: Callable[[str], None] | None = None,
    formats: Iterable[str] = (),
) -> CostProfile:
    """The cost profile of this model here with the named formats, measured once and kept.

    A database that is away is waited for; without one nothing is kept.

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
