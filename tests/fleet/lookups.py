"""The lookups of a fleet's replicas on one PostgreSQL: straight to the database, and through API processes."""

from __future__ import annotations

import itertools
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import Queue, get_context
from multiprocessing.synchronize import Barrier

import httpx2

from swiftopt.core.errors import LayerSetNotFound, StoreUnavailable
from swiftopt.store import Store

from .filled import DEVICE, DTYPE, Size, fingerprint, model_name, record, task_name

REPLICAS, TASKS, PERIOD_S = 200, 64, 5.0
N_PROCESSES, N_CLIENTS = 2, 20  # Processes that ask, and the connections of all of them: one per API process.
START_S = 120.0  # That the processes may take to begin, and to end, on a machine under load.
STORED_EVERY_S = 1.0  # Between two versions that some replica stores.


@dataclass(slots=True)
class Load:
    """What was asked within `seconds`: of each query its number of lookups and its time from when it was due."""

    seconds: float = 0.0
    n_lookups: int = 0
    latencies_s: list[float] = field(default_factory=list)
    n_failed: int = 0  # Queries that found the database away.
    first_after_s: float | None = None  # From the start to the first success behind a failure.

    def add(self, other: Load) -> None:
        """Add what another process asked meanwhile."""
        self.seconds = max(self.seconds, other.seconds)
        self.n_lookups += other.n_lookups
        self.n_failed += other.n_failed
        self.latencies_s += other.latencies_s
        times = [each for each in (self.first_after_s, other.first_after_s) if each is not None]
        self.first_after_s = max(times, default=None)

    @property
    def per_s(self) -> float:
        """Lookups answered per second."""
        return self.n_lookups / self.seconds

    def ms(self, share: float) -> float:
        """A percentile of the queries' times, in milliseconds."""
        ordered = sorted(self.latencies_s)
        return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def words(self) -> str:
        """Rate and times in words."""
        return f"{self.per_s:,.0f} a second; p50 {self.ms(0.5):.1f} ms, p99 {self.ms(0.99):.1f} ms"


# --- ways to ask: a function of a database or server that returns one of (replica, its tasks) -> number of lookups


def one_by_one(url: str, size: Size) -> Callable[[int, Sequence[str]], int]:
    """A query for each task, as replicas asked before."""
    store = Store.open(url)

    def ask(replica: int, tasks: Sequence[str]) -> int:
        for task in tasks:
            try:
                store.lookup(fingerprint(replica % size.models), task, DEVICE, DTYPE)
            except LayerSetNotFound:
                continue
        return len(tasks)

    return ask


def together(url: str, size: Size) -> Callable[[int, Sequence[str]], int]:
    """All tasks of a replica in one lookup."""
    store = Store.open(url)

    def ask(replica: int, tasks: Sequence[str]) -> int:
        assert len(store.lookup_many(fingerprint(replica % size.models), tasks, DEVICE, DTYPE)) == len(tasks)
        return len(tasks)

    return ask


def as_replicas(url: str, size: Size) -> Callable[[int, Sequence[str]], int]:
    """As replicas ask (`StoredPlans`): the tasks together that had an alias moved since the last time."""
    store, seen = Store.open(url), dict[int, tuple[int, int | None]]()

    def ask(replica: int, tasks: Sequence[str]) -> int:
        model, before = fingerprint(replica % size.models), seen.get(replica)
        state = store.lookup_state(model)
        assert state is not None
        if before != state:
            moved = tasks if before is None else set(tasks) & store.tasks_moved(*before)
            if moved:
                store.lookup_many(model, list(moved), DEVICE, DTYPE)
            seen[replica] = state
        return len(tasks)

    return ask


def over_http(url: str, size: Size) -> Callable[[int, Sequence[str]], int]:
    """All tasks of a replica in one request to an API process."""
    client = httpx2.Client(base_url=url, timeout=60, limits=httpx2.Limits(max_connections=N_CLIENTS))

    def ask(replica: int, tasks: Sequence[str]) -> int:
        of_model = {"model": model_name(replica % size.models), "device": DEVICE, "dtype": DTYPE}
        body = {"queries": [{**of_model, "task": task} for task in tasks]}
        answer = client.post("/v1/layer-sets:lookup", json=body)
        if answer.status_code == 503:
            raise StoreUnavailable(answer.text)
        answers = json.loads(answer.content)["answers"]
        assert all("plan" in each or "layer_set" in each for each in answers), answers[0]
        return len(answers)

    return ask


WAYS = {each.__name__: each for each in (one_by_one, together, as_replicas, over_http)}


# --- the load


@dataclass(frozen=True, slots=True)
class Plan:
    """A load: `way` asks `at` for `seconds`; each replica's tasks in pieces of `per_query`, once a period.

    Without `paced`, each client asks again as soon as it has its answer: what can be carried at most.
    """

    way: str
    at: str
    size: Size
    seconds: float
    per_query: int = TASKS
    paced: bool = True
    replicas: int = REPLICAS
    clients: int = N_CLIENTS

    @property
    def tasks(self) -> list[str]:
        """The tasks of each replica."""
        return [task_name(n) for n in range(min(TASKS, self.size.tasks_of_model))]

    def queries(self, process: int) -> Iterator[tuple[float, int, list[str]]]:
        """A process's share: when each query is due, of which replica it is, and its tasks; it has no end."""
        rng, names = random.Random(process), self.tasks
        pieces = [names[at : at + self.per_query] for at in range(0, len(names), self.per_query)]
        asked = [
            (rng.random() * PERIOD_S, replica, piece)
            for replica in range(process, self.replicas, N_PROCESSES)
            for piece in pieces
        ]
        asked.sort(key=lambda query: query[0])
        for round_ in itertools.count():
            for phase_s, replica, piece in asked:
                yield round_ * PERIOD_S + phase_s, replica, piece


def ask_in_process(plan: Plan, process: int, begin: Barrier, measured: Queue[Load]) -> None:
    """Ask with a process's share of the clients, from when all processes are ready; put what it measures."""
    ask, queries, lock, load = WAYS[plan.way](plan.at, plan.size), plan.queries(process), threading.Lock(), Load()
    for replica in range(process, plan.replicas, N_PROCESSES):  # As a replica does when it starts.
        ask(replica, plan.tasks[: plan.per_query])
    begin.wait()
    began_s = time.monotonic()

    def client() -> None:
        while True:
            with lock:
                due_s, replica, tasks = next(queries)
            if not plan.paced:
                due_s = time.monotonic() - began_s
            if due_s >= plan.seconds or time.monotonic() - began_s >= plan.seconds:
                return
            time.sleep(max(0.0, began_s + due_s - time.monotonic()))
            try:
                n = ask(replica, tasks)
            except StoreUnavailable:
                with lock:
                    load.n_failed += 1
                continue
            took_s = time.monotonic() - began_s - due_s
            with lock:
                load.n_lookups += n
                load.latencies_s.append(took_s)
                if load.n_failed and load.first_after_s is None:
                    load.first_after_s = due_s + took_s

    with ThreadPoolExecutor(plan.clients // N_PROCESSES) as clients:
        for running in [clients.submit(client) for _ in range(plan.clients // N_PROCESSES)]:
            running.result()
    load.seconds = time.monotonic() - began_s
    measured.put(load)


@contextmanager
def asking(plan: Plan) -> Iterator[Callable[[], Load]]:
    """The load in processes of its own, which ask when the block begins; what is given waits for its end."""
    context = get_context("spawn")
    begin, measured = context.Barrier(N_PROCESSES + 1), context.Queue()
    processes = [
        context.Process(target=ask_in_process, args=(plan, n, begin, measured), daemon=True) for n in range(N_PROCESSES)
    ]
    for process in processes:
        process.start()

    def end() -> Load:
        total = Load()
        for _ in processes:
            total.add(measured.get(timeout=plan.seconds + START_S))
        return total

    try:
        begin.wait(START_S)
        yield end
    finally:
        for process in processes:
            process.kill()


def measure(plan: Plan) -> Load:
    """The load alone."""
    with asking(plan) as end:
        return end()


@contextmanager
def storing(store: Store, size: Size) -> Iterator[None]:
    """Beside the block, some replica stores a version every STORED_EVERY_S, which moves an alias."""
    is_over, rng = threading.Event(), random.Random(1)

    def store_versions() -> None:
        while not is_over.wait(STORED_EVERY_S):
            task = task_name(rng.randrange(size.tasks_of_model))
            try:
                store.add_layer_set(record(rng.randrange(size.models), task, rng))
            except StoreUnavailable as error:
                print(error, file=sys.stderr)

    thread = threading.Thread(target=store_versions)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
