"""A fleet measured on one machine: real PostgreSQL and Valkey, bounded clients, workers that only sleep.

    cd tests && python -m fleet [--only pages,lookups] [--seconds 20] [--jobs 2000]

Starts its own servers; prints a table, then one line of JSON, and keeps the figures in bench/fleet.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

from api import serving
from figures import FLEET, Figure, table, write
from servers import Postgres, Valkey, new_database, server_folder

from swiftopt.store import Store

from .filled import Size, fill
from .lookups import PERIOD_S, REPLICAS, TASKS, Load, measure, storing
from .operation import Fleet, lose_database, migrate, run_jobs
from .pages import pages

WANTED_PER_S, WANTED_MS = 1_500, 20.0
SERVER_SETTINGS = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on", "shared_buffers": "128MB"}


class DurablePostgres(Postgres):
    """One whose data would survive a power cut, with the limit of connections that a new cluster has."""

    settings: ClassVar = {**Postgres.settings, **SERVER_SETTINGS, "max_connections": "100"}


def fill_database(fleet: Fleet) -> list[Figure]:
    """Fill the database that the other sections share."""
    began_s = time.monotonic()
    with Store.open(fleet.url) as store:
        fill(store, fleet.size)
    size, n_trials = fleet.size, fleet.size.jobs * fleet.size.trials
    stored = f"{size.models} models, {size.tasks:,} plans, {size.jobs:,} jobs, {n_trials:,} trials"
    print(f"stored in {time.monotonic() - began_s:.0f} s: {stored}", file=sys.stderr, flush=True)
    return []


def lookups(fleet: Fleet) -> list[Figure]:
    """The replicas' lookups in each way of asking, and through an API process."""
    asked = f"{fleet.replicas} replicas, {TASKS} tasks each, every {PERIOD_S:g} s"
    stored = f"{fleet.size.tasks:,} plans of {fleet.size.models} models, a version stored every second"
    figures = []
    with Store.open(fleet.url) as store, storing(store, fleet.size):
        for way, per_query, name in (
            ("one_by_one", 1, "lookups one by one, at most"),
            ("together", TASKS, "lookups together, at most"),
        ):
            load = measure(fleet.plan(way, per_query=per_query, paced=False))
            figures.append(_figure(name, load, f"as fast as 20 clients ask, {per_query} a query; {stored}"))
        load = measure(fleet.plan("as_replicas"))
        figures.append(_figure("lookups of replicas", load, f"{asked}; {stored}", fleet.replicas))
        with serving(fleet.url, fleet.folder / "lookups.log", "--rate", "0") as api:
            load = measure(fleet.plan("over_http", api.url))
            how = f"{asked}, a request for each replica, one API process; {stored}"
            figures.append(_figure("lookups over HTTP", load, how, fleet.replicas))
    return figures


def _figure(name: str, load: Load, how: str, replicas: int = 0) -> Figure:
    """A figure of lookups; those of `replicas` have to keep up with their rate, or with the wanted one, in time."""
    values = {"per_s": load.per_s, "p50_ms": load.ms(0.5), "p99_ms": load.ms(0.99), "longest_ms": load.ms(1.0)}
    values["failed"] = load.n_failed
    if not replicas:
        return Figure(name, load.words, "–", True, how, values)
    wanted_per_s = min(WANTED_PER_S, 0.9 * replicas * TASKS / PERIOD_S)
    wanted = f"≥ {wanted_per_s:,.0f} a second, p99 ≤ {WANTED_MS:g} ms"
    return Figure(name, load.words, wanted, load.per_s >= wanted_per_s and load.ms(0.99) <= WANTED_MS, how, values)


Section = Callable[[Fleet], list[Figure]]
SECTIONS: dict[str, Section] = {
    "pages": lambda fleet: pages(fleet.folder),
    "lookups": lookups,
    "jobs": run_jobs,
    "database": lose_database,
    "migration": migrate,
}


def run(
    chosen: Sequence[str], size: Size, seconds: float, n_jobs: int, replicas: int, keep: Callable[[list[Figure]], None]
) -> list[Figure]:
    """Run sections on servers of their own; `keep` is given the figures after each, for the next one may fail."""
    figures: list[Figure] = []
    with ExitStack() as stack:
        folders = [stack.enter_context(server_folder()) for _ in range(2)]
        postgres, valkey = DurablePostgres(folders[0]), Valkey(folders[1])
        for server in (postgres, valkey):
            stack.enter_context(server)
        url = stack.enter_context(new_database(postgres.url))
        fleet = Fleet(postgres, valkey, url, size, Path(folders[1]), seconds, n_jobs, replicas)
        # Pages come first: what the others store keeps PostgreSQL busy for minutes.
        ordered = {"pages": SECTIONS["pages"], "fill": fill_database, **SECTIONS}
        needed = {*chosen, *(["fill"] if set(chosen) - {"pages"} else [])}
        for name in (name for name in ordered if name in needed):
            print(f"{name} …", file=sys.stderr, flush=True)
            figures += ordered[name](fleet)
            keep(figures)
    return figures


def main() -> int:
    """The exit code: 0 if every figure was reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"some of {','.join(SECTIONS)}, separated by commas")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument("--jobs", type=int, default=2_000, help="that run, beside the 8,000 that have ended")
    parser.add_argument("--replicas", type=int, default=REPLICAS)
    given = parser.parse_args()
    chosen = given.only.split(",") if given.only else list(SECTIONS)
    if unknown := sorted(set(chosen) - set(SECTIONS)):
        parser.error(f"there is no section {unknown[0]!r}: choose from {', '.join(SECTIONS)}")
    lines = []
    figures = run(
        chosen, Size(), given.seconds, given.jobs, given.replicas, lambda found: lines.append(write(found, FLEET))
    )
    print(table(figures))
    print(lines[-1])
    return 0 if all(figure.ok for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
