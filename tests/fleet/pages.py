"""How long the dashboard's pages take over a full database and a full log of requests."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlencode

import httpx2
from figures import Figure
from searched import AT_ONCE, COSTS, trials
from serving import serving

from swiftopt.core import collector
from swiftopt.core.events import TrialsDone
from swiftopt.core.messages import AnswerDone
from swiftopt.core.plainly import NO_GAIN
from swiftopt.core.requests import CompletionRequest, JobSpec, Lease
from swiftopt.core.rounds import RequestRounds, RoundFigures
from swiftopt.core.types import Completion, Timings
from swiftopt.server.app import create_app
from swiftopt.server.engines import Engines
from swiftopt.server.request_log import EndedRequest
from swiftopt.server.settings import ServerSettings
from swiftopt.store import Store
from swiftopt.store.served_trials import ServedSearch
from swiftopt.worker.queue import JobService

from .filled import Size, fill, fingerprint, job_id, model_name, task_name

WANTED_S = 0.2
N_REQUESTS, N_TRIALS = 10_000, 10_000
TIMES = 7  # Each page is asked for so often; the middle one counts, the first is left out.
SIZE = Size(models=20, tasks=200, versions=1, jobs=1_000, trials=10)
SERVED = "served-search"


@dataclass(frozen=True, slots=True)
class Timed:
    """A page, its seconds and those of the processor, in their order, and its bytes."""

    address: str
    seconds: list[float]
    cpu_s: list[float]
    n_bytes: int

    @property
    def middle_s(self) -> float:
        """The median."""
        return self.seconds[len(self.seconds) // 2]


def pages(folder: Path) -> list[Figure]:
    """Every page at 10,000 trials, 1,000 jobs, 200 plans and 10,000 requests, on SQLite."""
    timed = time_pages(str(folder / "pages.db"), SIZE, N_TRIALS, N_REQUESTS, TIMES)
    slowest = max(timed, key=lambda page: page.middle_s)
    middle = TIMES // 2
    values = {
        name: {page.address: round(1e3 * seconds[middle]) for page, seconds in of_pages}
        for name, of_pages in (
            ("ms", [(page, page.seconds) for page in timed]),
            ("processor_ms", [(page, page.cpu_s) for page in timed]),
        )
    }
    measured = f"{len(timed)} pages, slowest {1e3 * slowest.middle_s:.0f} ms (`{slowest.address.partition('?')[0]}`)"
    how = (
        f"{SIZE.tasks} plans, {SIZE.jobs:,} jobs, two searches of {N_TRIALS:,} trials, {N_REQUESTS:,} requests, SQLite;"
        f" medians of {TIMES}, over HTTP on one machine"
    )
    wanted = f"each ≤ {1e3 * WANTED_S:.0f} ms"
    return [Figure("pages", measured, wanted, slowest.middle_s <= WANTED_S, how, values)]


def time_pages(database: str, size: Size, n_trials: int, n_requests: int, times: int) -> list[Timed]:
    """Fill a database and a log of requests, and ask a server for each page."""
    with Store.open(database) as store:
        fill(store, size)
        job = _long_search(store, n_trials)
        addresses = list(_addresses(job, size, n_requests))
        with served(store, n_requests) as client:
            return [_time(client, address, times) for address in addresses]


def _long_search(store: Store, n_trials: int) -> str:
    """A running job, and a served model's search, with so many trials each."""
    spec = JobSpec("tune", "default", {"model": model_name(0), "task": "code"}, n_prompts=1)
    job, _ = store.jobs.submit(spec)
    lease = Lease(job.id, job.attempt)
    assert store.jobs.claim(lease, "worker-1") is not None
    store.save_cost_profile(replace(COSTS, fingerprint=fingerprint(0)))
    found = trials(n_trials)
    search = ServedSearch(SERVED, fingerprint(0), model_name(0), "code", "2026-11-02")
    for at in range(0, n_trials, AT_ONCE):
        store.jobs.checkpoint(lease, 1 + at // AT_ONCE, [TrialsDone("code", tuple(found[at : at + AT_ONCE]))], {})
        store.add_served_trials(search, found[at : at + AT_ONCE])
    return job.id


def _addresses(job: str, size: Size, n_requests: int) -> Iterator[str]:
    yield from ("/", "/traffic", "/playground", "/terms", "/jobs/new", "/metrics")
    yield from ("/requests", f"/requests?page={n_requests // 50}&way=plain", f"/requests/r{n_requests - 1}")
    of_task = {"model": model_name(1), "task": task_name(0)}
    yield from ("/plans", f"/plans/task?{urlencode(of_task)}")
    yield f"/plans/compare?{urlencode({**of_task, 'left': 1, 'right': size.versions})}"
    yield from ("/searches", f"/searches/{job}", f"/searches/{job}?sort=oldest&page=9&trial=7", f"/searches/{SERVED}")
    yield f"/searches/compare?{urlencode({'left': f'{job}/code', 'right': f'{SERVED}/code'})}"
    yield from ("/jobs", f"/jobs?page={size.jobs // 50}", "/jobs?state=failed", f"/jobs/{job}", f"/jobs/{job_id(0)}")


def ended(number: int) -> EndedRequest:
    """A request of 60 rounds; every third was decoded plainly."""
    rng = random.Random(number)
    rounds = tuple(
        RoundFigures(1 + accepted, 5, accepted, "draft") for accepted in (rng.randrange(6) for _ in range(60))
    )
    completion = Completion(
        (0,) * 200, "", "stop", "adaptive", n_prompt_tokens=300, target_passes=60, drafted=300, accepted=140,
        timings=Timings(draft_s=1.0, verify_s=2.0),
    )  # fmt: skip
    sums = RequestRounds(60, 0, 0.0, 200, 3.0, 0.5, rounds)
    done = AnswerDone(1, 0.1, task_name(number % 64), completion, "adaptive", 1, None, verdict="use", rounds=sums)
    if number % 3 == 0:
        plain = replace(completion, drafted=0, accepted=0)
        done = replace(done, completion=plain, why_plain=NO_GAIN, rounds=replace(sums, drafted_tokens=0))
    return EndedRequest.of(f"r{number}", model_name(0), CompletionRequest(text="a"), done, (0.2, 4.0))


@contextmanager
def served(store: Store, n_requests: int) -> Iterator[httpx2.Client]:
    """A client of a server that has so many requests behind it."""
    engines = Engines()
    collector.start()  # As the command line does.
    gc.collect()
    gc.freeze()  # As `serve` does when it starts.
    for number in range(n_requests):
        engines.requests.add(ended(number))
    settings = ServerSettings(requests_per_min=0)
    app = create_app(store, JobService(store, None), settings, engines=engines)
    try:
        with serving(app) as url, httpx2.Client(base_url=url, timeout=60) as client:
            yield client
    finally:
        gc.unfreeze()
        collector.run()


def _time(client: httpx2.Client, address: str, times: int) -> Timed:
    n_bytes = len(_page(client, address))
    seconds, cpu_s = [], []
    for _ in range(times):
        began_s, cpu_began_s = time.perf_counter(), time.process_time()
        _page(client, address)
        seconds.append(time.perf_counter() - began_s)
        cpu_s.append(time.process_time() - cpu_began_s)  # Of server and client, which share the process.
    return Timed(address, sorted(seconds), sorted(cpu_s), n_bytes)


def _page(client: httpx2.Client, address: str) -> bytes:
    answer = client.get(address)
    assert answer.status_code == 200, (address, answer.text[:500])
    return answer.content
