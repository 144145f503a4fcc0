"""`make fleet`, scaled down: what it measures holds on any machine but for its times."""

from __future__ import annotations

import gc

import pytest
from figures import FLEET, Figure, table
from fleet.__main__ import SECTIONS, run
from fleet.filled import Size
from fleet.pages import time_pages

SMALL = Size(models=4, tasks=256, versions=2, jobs=200, trials=10)


@pytest.mark.slow
def test_fleet_loses_no_job_and_no_lookup() -> None:
    kept: list[int] = []
    chosen = [name for name in SECTIONS if name != "pages"]
    figures = {each.section: each for each in run(chosen, SMALL, 4.0, 40, 8, lambda found: kept.append(len(found)))}
    assert figures["jobs"].ok and figures["database lost"].values["same"], figures
    assert kept == sorted(kept) and kept[-1] == len(figures)
    for name in ("lookups one by one, at most", "lookups together, at most", "lookups of replicas"):
        assert figures[name].values["per_s"] > 0 and figures[name].values["failed"] == 0, figures[name]
    assert figures["migration"].values["failed"] == 0, figures["migration"]


@pytest.mark.slow
def test_every_page_is_timed(sqlite_url: str) -> None:
    try:
        timed = time_pages(sqlite_url, SMALL, 500, 200, 2)
    finally:
        gc.unfreeze()
    assert len({page.address for page in timed}) == len(timed) > 20
    assert all(0 < page.n_bytes < 150_000 for page in timed), [(page.address, page.n_bytes) for page in timed]


def test_table_of_a_run_replaces_the_one_before() -> None:
    mark, figures = "<!-- written by `make fleet` -->\n", [Figure("jobs", "0 lost", "0 lost", True, "with kills")]
    page = f"before\n\n{mark}\n{table([])}\n\nafter\n"
    once = FLEET.with_table(page, table(figures))
    assert once == f"before\n\n{mark}\n{table(figures)}\n\nafter\n" == FLEET.with_table(once, table(figures))
    assert FLEET.with_table(f"before\n{mark}", table(figures)) == f"before\n{mark}\n{table(figures)}\n"
