"""Real tuning jobs whose workers are attacked at random moments."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from figures import Figure
from servers import Postgres, Valkey, new_database, server_folder
from workers import Site, WorkerProcess, site

from swiftopt.core.requests import JobEvent, TuneRequest
from swiftopt.core.settings import SwiftSettings
from swiftopt.core.types import Prompt

N_JOBS, N_WORKERS, N_ATTACKS = 10, 3, 50
N_PROMPTS, N_TOKENS = 250, 160  # one to three minutes a job
PAUSE_S = (4.0, 10.0)  # between two attacks; loading torch and the model takes a good part of it
WITHIN_S = 3600.0
LEASE_S = 20.0
END_S = 60.0  # that an attacked worker gets to end
WAKE_S = LEASE_S + 8.0  # a stopped child wakes when somebody else has its job


@dataclass
class Attack:
    """The workers of a site, and those children that sleep until their lease is over."""

    found: Site
    rng: random.Random
    workers: list[WorkerProcess] = field(default_factory=list)
    asleep: list[tuple[float, psutil.Process]] = field(default_factory=list)
    done: dict[str, int] = field(default_factory=dict)

    def step(self) -> bool:
        """One attack on a random worker that works; False if there is none that may be attacked."""
        self.wake(time.monotonic())
        busy = [w for w in self.workers if w.process.poll() is None and self._may_be_attacked(w)]
        if not busy:
            return False
        victim, kind = self.rng.choice(busy), self.rng.choice(["SIGKILL", "SIGSTOP", "SIGTERM"])
        try:
            self._hit(victim, kind)
        except psutil.NoSuchProcess:
            return False
        self.done[kind] = self.done.get(kind, 0) + 1
        return True

    def wake(self, now: float) -> None:
        """Let those go on that slept for long enough."""
        for waking, child in [entry for entry in self.asleep if entry[0] <= now]:
            self.asleep.remove((waking, child))
            if child.is_running():
                child.resume()

    def _hit(self, victim: WorkerProcess, kind: str) -> None:
        if kind == "SIGSTOP":
            child = psutil.Process(victim.pid).children()[0]
            child.suspend()
            self.asleep.append((time.monotonic() + WAKE_S, child))
            return
        victim.process.send_signal(signal.Signals[kind])
        victim.process.wait(END_S)
        self.workers.remove(victim)
        self.workers.append(self.found.start())

    def _may_be_attacked(self, worker: WorkerProcess) -> bool:
        """Not where a third attempt without progress would, as it should, make the job fail."""
        for job in self.found.store.jobs.latest("running"):
            if f"-{worker.pid}-" in str(job.worker):
                asleep = {child.ppid() for _, child in self.asleep if child.is_running()}
                return worker.pid not in asleep and n_fruitless(self.found.store.jobs.events(job.id, 0, 100_000)) < 2
        return False


def n_fruitless(events: list[JobEvent]) -> int:
    """How many attempts in a row, up to the one that runs, were lost and brought nothing."""
    n, progress = 0, True
    for event in events:
        if event.type in ("trials_done", "prompt_finished", "task_finished"):
            n, progress = 0, True
        elif event.type == "state_changed" and event.data["state"] == "running":
            progress = False
        elif event.type == "state_changed" and event.data["state"] == "queued" and not progress:
            n += "is ending" not in event.data["detail"]
    return n


def tuning(
    folder: Path, redis: Valkey, n_attacks: int = N_ATTACKS, n_prompts: int = N_PROMPTS, seed: int = 0
) -> list[Figure]:
    """The same jobs without and with attacks; what they leave has to be the same."""
    import tiny_files  # brings torch

    model = tiny_files.save(folder / "model")
    with server_folder() as place, Postgres(place) as postgres, new_database(postgres.url) as database:
        return _compare(database, folder, model, redis, n_attacks, n_prompts, seed)


def _compare(
    database: str, folder: Path, model: Path, redis: Valkey, n_attacks: int, n_prompts: int, seed: int
) -> list[Figure]:
    with site(database, redis.url, folder) as found:  # measures the costs, on which the search depends
        first = _submit(found, model, N_JOBS, 10)
        found.start()
        assert found.ended(first, within_s=300).state == "succeeded"
    quiet = _run(database, folder, model, redis, n_prompts, lambda attack: None)
    rng = random.Random(seed)
    due = [time.monotonic() + PAUSE_S[1]]

    def disturb(attack: Attack) -> None:
        attack.wake(time.monotonic())
        if sum(attack.done.values()) < n_attacks and time.monotonic() >= due[0] and attack.step():
            due[0] = time.monotonic() + rng.uniform(*PAUSE_S)

    loud = _run(database, folder, model, redis, n_prompts, disturb, rng)
    same = {key: sum(quiet[key][n] == loud[key][n] for n in range(N_JOBS)) for key in ("outputs", "sets")}
    faults = loud["faults"] + quiet["faults"]
    n_done = sum(loud["attacks"].values())
    measured = f"{n_done} attacks {loud['attacks']}, of {N_JOBS} jobs equal to the quiet run: {same}"
    ok = set(same.values()) == {N_JOBS} and not faults and n_done >= n_attacks
    wanted = "all succeeded, one set per task, outputs complete, without duplicates, equal"
    how = f"{N_JOBS} tuning jobs of {n_prompts} prompts on a random model, {N_WORKERS} workers, PostgreSQL; seed {seed}"
    values = {"faults": faults, "wall_s": loud["wall_s"], "quiet_wall_s": quiet["wall_s"], "attempts": loud["attempts"]}
    return [Figure("random", measured, wanted, ok, how, values)]


def _run(
    database: str,
    folder: Path,
    model: Path,
    redis: Valkey,
    n_prompts: int,
    disturb: Callable[[Attack], None],
    rng: random.Random | None = None,
) -> dict[str, Any]:
    with site(database, redis.url, folder, LEASE_S) as found:
        attack = Attack(found, rng or random.Random(0))
        clock = time.monotonic()
        jobs = [_submit(found, model, number, n_prompts) for number in range(N_JOBS)]
        attack.workers += [found.start() for _ in range(N_WORKERS)]
        while not all(found.job(job).is_finished for job in jobs) and time.monotonic() - clock < WITHIN_S:
            disturb(attack)
            time.sleep(0.1)
        return {
            "outputs": [_outputs(found, job) for job in jobs],
            "sets": [{record.task: record.layer_set for record in found.job(job).layer_sets} for job in jobs],
            "faults": [fault for job in jobs for fault in _faults(found, job, n_prompts)],
            "attacks": attack.done,
            "attempts": [found.job(job).attempt for job in jobs],
            "wall_s": round(time.monotonic() - clock, 1),
        }


def _submit(found: Site, model: Path, number: int, n_prompts: int) -> str:
    rng = random.Random(number)
    prompts = [
        Prompt(f"p{i}", f"task{i % 2}", text=" ".join(f"w{rng.randrange(2, 97)}" for _ in range(6)))
        for i in range(n_prompts)
    ]
    settings = SwiftSettings(
        strategy="random", objective="matchness", stop_threshold=0.05, context_window=16, max_steps=400,
        target_matchness=1.0, deterministic=True, seed=number,
    )  # fmt: skip
    request = TuneRequest(str(model), "-", device="cpu", max_new_tokens=N_TOKENS, settings=settings)
    return found.service.submit(request, prompts)[0].id


def _outputs(found: Site, job: str) -> list[tuple[str, tuple[int, ...]]]:
    return [(output.prompt.id, output.completion.token_ids) for output in found.store.jobs.outputs(job)]


def _faults(found: Site, job: str, n_prompts: int) -> list[str]:
    now = found.job(job)
    ids = [prompt for prompt, _ in _outputs(found, job)]
    tasks = sorted(record.task for record in now.layer_sets)
    finished = [e.data["prompt"]["id"] for e in found.store.jobs.events(job, 0, 100_000) if e.type == "prompt_finished"]
    checks = {
        f"{job} is {now.state}: {now.error}": now.state == "succeeded",
        f"{job} has layer sets for {tasks}": tasks == ["task0", "task1"],
        f"{job} has {len(ids)} outputs, {len(set(ids))} different ones": ids == [f"p{i}" for i in range(n_prompts)],
        f"{job} reported a prompt twice": len(finished) == len(set(finished)),
    }
    return [fault for fault, fine in checks.items() if not fine]
