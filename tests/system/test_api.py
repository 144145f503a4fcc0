"""Every route of the HTTP API; the app runs in this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from api import LOOKUP, MODEL, RECORD, TASK, client_of, filled, problem, sse, submission
from sqlalchemy import event
from starlette.testclient import TestClient

from swiftopt.core.errors import StoreError, StoreUnavailable, SwiftoptError
from swiftopt.core.events import PhaseChanged, PromptFinished
from swiftopt.core.requests import Lease
from swiftopt.core.types import Completion, Prompt
from swiftopt.server.lookups import LookupCache, LookupQuery
from swiftopt.store import Store
from swiftopt.worker.queue import RedisQueue


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    with filled(database_url) as opened:
        yield opened


@pytest.fixture
def client(store: Store) -> Iterator[TestClient]:
    with client_of(store) as opened:
        yield opened


def claimed(store: Store, job: str) -> Lease:
    claim = store.jobs.claim(Lease(job, 1), "w1")
    assert claim is not None
    return claim.lease


def finished(index: int) -> PromptFinished:
    completion = Completion(
        token_ids=(1, 2), text="é\n", finish_reason="length", method="plain", n_prompt_tokens=1, target_passes=2,
        first_tokens=1, drafted=0, accepted=0,
    )  # fmt: skip
    return PromptFinished(Prompt(str(index), "notes", "x"), index, completion)


# --- layer sets


def test_lookup_returns_the_same_object_as_commands_and_library(client: TestClient, store: Store) -> None:
    values = client.get(LOOKUP).json()
    stored = store.layer_set(MODEL, TASK, 1)
    assert values["layer_set"] == json.loads(json.dumps(stored.to_json()))
    assert {key: values[key] for key in ("schema", "model", "task", "alias", "version", "method", "fallback")} == {
        "schema": "swiftopt.plan/1", "model": MODEL, "task": TASK, "alias": "best", "version": 1, "method": "swift",
        "fallback": None,
    }  # fmt: skip


def test_lookup_takes_a_model_with_or_without_encoded_slashes(client: TestClient, store: Store) -> None:
    store.add_layer_set(replace(RECORD, model="/models/a b", fingerprint="e" * 16))
    assert client.get("/v1/layer-sets/org/tiny/notes").json() == client.get(LOOKUP).json()
    assert client.get("/v1/layer-sets/%2Fmodels%2Fa%20b/notes").json()["model"] == "/models/a b"


def test_lookup_with_a_known_etag_answers_304(client: TestClient) -> None:
    first = client.get(LOOKUP)
    assert first.headers["cache-control"] == "max-age=1"
    for tags in (first.headers["etag"], f'"x", W/{first.headers["etag"]}', "*"):
        again = client.get(LOOKUP, headers={"If-None-Match": tags})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
    assert client.get(LOOKUP, headers={"If-None-Match": '"other"'}).status_code == 200


def test_lookup_of_a_version_ignores_aliases(client: TestClient, store: Store) -> None:
    store.add_layer_set(replace(RECORD, verdict="plain"))
    found = client.get(LOOKUP, params={"version": 1}).json()
    assert (found["version"], found["alias"]) == (1, None)
    assert client.get(LOOKUP).json()["version"] == 2
    assert "stored are 1, 2" in problem(client.get(LOOKUP, params={"version": 7}), 404, "layer-set-not-found")


def test_lookup_names_its_fallback(client: TestClient, store: Store) -> None:
    store.add_layer_set(replace(RECORD, task="default"))
    assert client.get("/v1/layer-sets/org%2Ftiny/other").json()["fallback"] == "model default"


def test_unknown_set_names_the_nearest(client: TestClient) -> None:
    detail = problem(client.get("/v1/layer-sets/org%2Ftiny/note"), 404, "layer-set-not-found")
    assert "org/tiny/notes" in detail


def test_lookup_sees_a_change_within_two_seconds(client: TestClient, store: Store) -> None:
    assert client.get(LOOKUP).json()["version"] == 1
    store.add_layer_set(RECORD)
    threading.Event().wait(2.05)
    assert client.get(LOOKUP).json()["version"] == 2


def test_batch_gives_each_query_its_answer_or_problem(client: TestClient) -> None:
    queries = [{"model": MODEL, "task": TASK}, {"model": "nobody", "task": TASK}]
    values = client.post("/v1/layer-sets:lookup", json={"queries": queries}).json()
    assert values["schema"] == "swiftopt.lookup/1"
    assert values["answers"][0] == client.get(LOOKUP).json()
    assert values["answers"][1]["type"] == "urn:swiftopt:problem:layer-set-not-found"


def test_size_of_a_batch_is_limited(client: TestClient) -> None:
    body = {"queries": [{"model": "m", "task": "t"}] * 1000}
    assert len(client.post("/v1/layer-sets:lookup", json=body).json()["answers"]) == 1000
    body["queries"].append({"model": "m", "task": "t"})
    problem(client.post("/v1/layer-sets:lookup", json=body), 422, "invalid-input")


def test_lists_show_what_is_stored(client: TestClient) -> None:
    assert [s["task"] for s in client.get("/v1/layer-sets").json()["layer_sets"]] == [TASK]
    assert client.get("/v1/layer-sets", params={"model": "nobody"}).json()["layer_sets"] == []
    assert client.get("/v1/models").json()["names"] == [MODEL]


# --- jobs


def test_submission_gives_202_then_the_same_job(client: TestClient) -> None:
    first = client.post("/v1/jobs", json=submission())
    again = client.post("/v1/jobs", json=submission())
    assert (first.status_code, again.status_code) == (202, 200)
    assert first.headers["location"] == again.headers["location"] == f"/v1/jobs/{first.json()['id']}"
    assert client.get(first.headers["location"]).json() == first.json()
    assert first.json()["request"]["max_new_tokens"] == 128


def test_identical_submissions_at_once_are_one_job(client: TestClient) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.post("/v1/jobs", json=submission()), range(16)))
    assert sorted(answer.status_code for answer in answers) == [200] * 15 + [202]
    assert len({answer.json()["id"] for answer in answers}) == 1


def test_idempotency_key_belongs_to_one_submission(client: TestClient) -> None:
    headers = {"Idempotency-Key": "k-1"}
    first = client.post("/v1/jobs", json=submission(), headers=headers).json()
    client.post(f"/v1/jobs/{first['id']}/cancel")
    assert client.post("/v1/jobs", json=submission(), headers=headers).json()["id"] == first["id"]
    problem(client.post("/v1/jobs", json=submission("other"), headers=headers), 409, "conflict")
    problem(client.post("/v1/jobs", json=submission(), headers={"Idempotency-Key": "a b"}), 422, "invalid-input")


def test_jobs_are_listed_by_state_and_controlled(client: TestClient) -> None:
    job = client.post("/v1/jobs", json=submission()).json()["id"]
    for verb, state in (("pause", "paused"), ("resume", "queued"), ("cancel", "cancelled"), ("retry", "queued")):
        assert client.post(f"/v1/jobs/{job}/{verb}").json()["state"] == state
        listed = client.get("/v1/jobs", params={"state": state}).json()
        assert (listed["schema"], [found["id"] for found in listed["jobs"]]) == ("swiftopt.jobs-list/1", [job])
    assert "cancel it instead" in problem(client.post(f"/v1/jobs/{job}/stop"), 409, "conflict")
    problem(client.post(f"/v1/jobs/{job}/explode"), 422, "invalid-input")


def test_unknown_job_names_the_nearest(client: TestClient) -> None:
    job = client.post("/v1/jobs", json=submission()).json()["id"]
    for path in ("", "/events", "/outputs", "/events?format=json"):
        assert job in problem(client.get(f"/v1/jobs/{job[:-1]}x{path}"), 404, "not-found")
    assert job in problem(client.post(f"/v1/jobs/{job[:-1]}x/cancel"), 404, "not-found")


def test_outputs_are_the_lines_of_the_output_file(client: TestClient, store: Store, tmp_path: Path) -> None:
    from swiftopt.core.streams import LineWriter

    job = client.post("/v1/jobs", json=submission()).json()["id"]
    done = [finished(index) for index in range(70)]
    store.jobs.checkpoint(claimed(store, job), 1, done, None)
    with LineWriter(tmp_path / "out.jsonl") as writer:
        for event in done:
            writer.write_completion(event.prompt, event.completion)
    answer = client.get(f"/v1/jobs/{job}/outputs")
    assert answer.content == (tmp_path / "out.jsonl").read_bytes()
    assert answer.headers["content-disposition"] == f'attachment; filename="{job}.jsonl"'


# --- events


def ended_job(client: TestClient, store: Store) -> str:
    job = str(client.post("/v1/jobs", json=submission()).json()["id"])
    lease = claimed(store, job)
    store.jobs.renew(lease, [PhaseChanged("notes", "load"), PhaseChanged("notes", "accumulate")])
    store.jobs.renew(lease, progress={"type": "progress", "tokens": 3})
    store.jobs.end(lease, "succeeded")
    return job


def test_events_end_with_the_job(client: TestClient, store: Store) -> None:
    job = ended_job(client, store)
    with client.stream("GET", f"/v1/jobs/{job}/events") as answer:
        found = sse(answer.iter_lines())
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert [name for name, _, _ in found] == [
        "state_changed", "state_changed", "phase_changed", "phase_changed", "state_changed", "progress", "end",
    ]  # fmt: skip
    assert found[-1][2] == client.get(f"/v1/jobs/{job}").json()
    assert found[-2][1:] == (None, {"type": "progress", "tokens": 3}) and found[2][2]["phase"] == "load"


def test_events_continue_after_the_last_one_seen(client: TestClient, store: Store) -> None:
    job = ended_job(client, store)
    with client.stream("GET", f"/v1/jobs/{job}/events") as answer:
        whole = sse(answer.iter_lines())
    seen = whole[1][1]
    for options in ({"headers": {"Last-Event-ID": seen}}, {"params": {"after": seen}}):
        with client.stream("GET", f"/v1/jobs/{job}/events", **options) as answer:  # type: ignore[arg-type]
            assert sse(answer.iter_lines()) == whole[2:]
    problem(client.get(f"/v1/jobs/{job}/events", headers={"Last-Event-ID": "x"}), 422, "invalid-input")


def test_events_can_be_read_as_pages(client: TestClient, store: Store) -> None:
    job, after, types = ended_job(client, store), 0, []
    while True:
        params = {"after": after, "limit": 2}
        page = client.get(f"/v1/jobs/{job}/events", params=params, headers={"Accept": "application/json"}).json()
        types += [event["type"] for event in page["events"]]
        if not page["events"]:
            break
        after = page["next_after"]
    assert types == ["state_changed", "state_changed", "phase_changed", "phase_changed", "state_changed"]


# --- health, metrics, errors of ours


def test_health_reports_database_migrations_and_redis(client: TestClient) -> None:
    assert client.get("/livez").json() == {"status": "ok"}
    ready = {"status": "ok", "database": "ok", "migrations": "ok", "redis": "not configured", "engines": {}}
    assert client.get("/readyz").json() == client.get("/health").json() == {**ready, "storage": "ok"}


def test_lookups_and_submissions_work_without_redis(store: Store, tmp_path: Path) -> None:
    queue = RedisQueue(f"unix://{tmp_path}/none.sock")
    with client_of(store, queue=queue) as client:
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["redis"]) == (200, "unreachable, jobs wait")
        assert client.get(LOOKUP).status_code == 200
        assert client.post("/v1/jobs", json=submission()).status_code == 202
        assert "swiftopt_redis_up 0.0" in client.get("/metrics").text


def test_submitted_job_is_delivered_and_shown_in_the_metrics(store: Store, redis_url: str) -> None:
    with client_of(store, queue=RedisQueue(redis_url)) as client:
        client.post("/v1/jobs", json=submission())
        client.get(LOOKUP)
        text = client.get("/metrics").text
        assert client.get("/readyz").json()["redis"] == "ok"
    for line in ('swiftopt_queue_depth{queue="default"} 1.0', 'swiftopt_jobs{state="queued"} 1.0',
                 "swiftopt_lookup_seconds_count 1.0", "swiftopt_redis_up 1.0", "swiftopt_database_up 1.0"):  # fmt: skip
        assert f"{line}\n" in text


def test_metrics_have_the_names_of_speculative_decoding(client: TestClient, store: Store) -> None:
    job = client.post("/v1/jobs", json=submission()).json()["id"]
    done = finished(0)
    swift = replace(
        done.completion, method="swift", drafted=5, accepted=3, accepted_per_position=(2, 1), target_passes=2
    )
    store.jobs.checkpoint(claimed(store, job), 1, [replace(done, completion=swift)], None)
    text = client.get("/metrics").text
    of = '{model="smollm2-135m",task="notes"}'
    assert f"swiftopt_spec_decode_num_draft_tokens_total{of} 5.0" in text
    assert f"swiftopt_spec_decode_num_accepted_tokens_total{of} 3.0" in text
    position = 'swiftopt_spec_decode_num_accepted_tokens_per_pos_total{model="smollm2-135m",position="1",task="notes"}'
    assert (
        f"{position} 1.0" in text
        or position.replace(',position="1",task="notes"', ',task="notes",position="1"') in text
    )
    assert 'swiftopt_job_attempts_total{outcome="started"} 1.0' in text and job not in text


def test_unexpected_error_reveals_no_internals(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("inside")

    monkeypatch.setattr(store, "models", broken)
    with client_of(store) as client:
        answer = client.get("/v1/models")
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert "inside" not in answer.text


def test_concurrent_equal_lookups_are_one_query(store: Store) -> None:
    import asyncio

    asked: list[LookupQuery] = []

    def find(queries: Sequence[LookupQuery]) -> list[dict[str, Any] | SwiftoptError]:
        asked.extend(queries)
        threading.Event().wait(0.05)
        if any(query.model == "away" for query in queries):
            raise StoreUnavailable("the database is away")
        return [StoreError("cannot be read") if query.task == "bad" else {"model": query.model} for query in queries]

    async def many() -> None:
        answers, one, bad = (
            LookupCache(find, lambda _: {}, lambda *_: ()),
            LookupQuery(model="m", task="t"),
            LookupQuery(model="m", task="bad"),
        )
        found = await asyncio.gather(*(answers.get([one]) for _ in range(50)))
        assert len({id(answer) for [answer] in found}) == 1 and len(asked) == 1
        for _ in range(2):  # an outage is not kept
            with pytest.raises(StoreUnavailable):
                await answers.get([LookupQuery(model="away", task="t")])
        assert len(asked) == 3
        other = LookupQuery(model="n", task="t")
        together, alone = answers.get([one, other, bad]), answers.get([one, other, other])
        refused, found_alone = await asyncio.gather(together, alone, return_exceptions=True)
        assert isinstance(refused, StoreError), "the error of one query is raised where that is asked for"
        assert not isinstance(found_alone, BaseException) and [each.status for each in found_alone] == [200] * 3
        assert asked[3:] == [other, bad], "what is fresh is not asked for, and what is loading only once"

    asyncio.run(many())


def test_models_that_are_looked_up_once_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    monkeypatch.setattr("swiftopt.server.lookups.MAX_ANSWERS", 3)

    async def ask() -> None:
        cache = LookupCache(lambda queries: [{"model": query.model} for query in queries], lambda _: {}, lambda *_: ())
        for i in range(20):
            await cache.get([LookupQuery(model=f"m{i}", task="t")])
        assert len(cache._cached) == 3 and {"m19", "m18", "m17"} <= {*cache._asked_at_s}
        assert len(cache._asked_at_s) <= 7

    asyncio.run(ask())


def test_lookups_do_not_wait_for_the_states_of_all_models(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    monkeypatch.setattr("swiftopt.server.lookups.FRESH_S", 0.0)
    states: dict[str, tuple[int, int | None]] = {"m": (1, 1), "n": (2, 1)}
    reads: list[list[str]] = []
    found: list[list[str]] = []
    may_go_on = threading.Event()

    def states_of(models: Sequence[str]) -> dict[str, tuple[int, int | None]]:
        reads.append(sorted(models))
        assert may_go_on.wait(10)
        return dict(states)

    def find(queries: Sequence[LookupQuery]) -> list[dict[str, Any] | SwiftoptError]:
        found.append([query.task for query in queries])
        return [{"state": states[query.model]} for query in queries]

    async def checked(cache: LookupCache) -> None:
        while cache._checking is not None:
            await asyncio.sleep(0.01)

    async def ask() -> None:
        cache = LookupCache(find, states_of, lambda *_: {"moved"})
        m, moved, n = (LookupQuery(model=model, task=task) for model, task in (("m", "t"), ("m", "moved"), ("n", "t")))
        may_go_on.set()
        first = await cache.get([m, moved, n])
        await checked(cache)
        may_go_on.clear()
        reads.clear()
        found.clear()
        assert await asyncio.wait_for(cache.get([m, moved]), 5) == first[:2], "a check is not waited for"
        states["m"] = (1, 2)
        may_go_on.set()
        await checked(cache)
        assert reads == [["m", "n"]] and not found
        monkeypatch.setattr("swiftopt.server.lookups.LONGEST_S", 0.0)
        again = await cache.get([m, moved, n])
        assert [answer.body for answer in again[::2]] == [answer.body for answer in first[::2]]
        assert json.loads(again[1].body) == {"state": [1, 2]} and found == [["moved"]]

    asyncio.run(ask())


def selects_of(store: Store) -> list[str]:
    """Record the SELECT statements of the store from now on."""
    statements: list[str] = []

    def note(*values: Any) -> None:
        if values[2].startswith("SELECT"):
            statements.append(values[2])

    event.listen(store.engine, "before_cursor_execute", note)
    return statements


def test_lookup_is_repeated_only_after_a_change_of_its_model(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for age in ("FRESH_S", "LONGEST_S"):  # every answer is too old at once
        monkeypatch.setattr(f"swiftopt.server.lookups.{age}", 0.0)
    statements = selects_of(store)
    with client_of(store) as client:
        first = client.get(LOOKUP)
        statements.clear()
        assert client.get(LOOKUP).content == first.content and len(statements) == 1, statements
        store.add_layer_set(replace(RECORD, task="other"))
        statements.clear()
        assert client.get(LOOKUP).content == first.content and len(statements) == 2, statements
        assert client.get(f"{LOOKUP}?version=2").status_code == 404
        store.add_layer_set(RECORD, promote=False)
        assert client.get(f"{LOOKUP}?version=2").json()["version"] == 2
        store.promote(MODEL, TASK, 2)
        assert client.get(LOOKUP).json()["version"] == 2
        store.rollback(MODEL, TASK)
        assert client.get(LOOKUP).content == first.content
        absent = LOOKUP.replace(TASK, "absent")
        assert client.get(absent).status_code == 404
        store.add_layer_set(replace(RECORD, task="default"))
        assert client.get(absent).json()["fallback"] == "model default"


def test_many_lookups_of_a_model_need_few_queries(store: Store) -> None:
    statements = selects_of(store)
    tasks = [f"task-{n}" for n in range(64)]
    for task in tasks[:40]:
        store.add_layer_set(replace(RECORD, task=task))
    statements.clear()
    with client_of(store) as client:
        queries = [{"model": MODEL, "task": task} for task in tasks[:40]]
        answers = client.post("/v1/layer-sets:lookup", json={"queries": queries}).json()["answers"]
        assert [answer["task"] for answer in answers] == tasks[:40] and len(statements) == 3, statements
        mixed = [{"model": MODEL, "task": "none"}, *queries, {"model": MODEL, "task": TASK, "version": 1}]
        answers = client.post("/v1/layer-sets:lookup", json={"queries": mixed}).json()["answers"]
    assert "the nearest is" in answers[0]["detail"] and answers[-1]["version"] == 1 and answers[-1]["alias"] is None
    assert [answer["task"] for answer in answers[1:-1]] == tasks[:40]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "use /v1/chat/completions"),
        ("/v1/v1/models", "use /v1/models"),
        ("/v1/embeddings", "/openapi.json lists all routes"),
    ],
)
def test_wrong_prefix_of_a_route_is_answered_with_the_right_one(client: TestClient, path: str, meant: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404 and f"there is nothing at this address: {meant}" in answer.text
