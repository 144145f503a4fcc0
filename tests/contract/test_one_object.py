"""The layer set that a job found is the same object at every front door (design 8)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from api import client_of
from job_table import running, task_finished, tune

from swiftopt.cli.main import run
from swiftopt.store import Store


def printed(capsys: pytest.CaptureFixture[str], args: Sequence[str]) -> dict[str, Any]:
    assert run(args) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_job_list_look_up_and_export_carry_the_same_layer_set(
    database_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store.open(database_url) as store:
        lease = running(store.jobs, tune())
        store.jobs.finish_task(lease, 1, task_finished(lease.job), "swift", "always", {})
        store.jobs.end(lease, "succeeded")
        (job,) = store.jobs.latest()
        (record,) = job.layer_sets
        path = f"/v1/layer-sets/{record.model}/{record.task}"
        answered = client_of(store).get(path).json()["layer_set"]
        of_api_list = client_of(store).get("/v1/jobs").json()["jobs"][0]["layer_sets"]
    listed = printed(capsys, ["jobs", "list", "--json", "--db", database_url])["jobs"][0]["layer_sets"]
    file = tmp_path / "set.json"
    assert run(["layers", "export", f"{record.model}/{record.task}", "-o", str(file), "--db", database_url]) == 0
    assert json.loads(file.read_text()) == answered == listed[0] == of_api_list[0] == record.to_json()
    assert answered["schema"] == "swiftopt.layer-set/1"
