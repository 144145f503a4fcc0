"""`swiftopt doctor`: checks of this machine and of the configured services; none changes anything."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import click
import psutil
from rich.table import Table
from rich.text import Text

from ..core.costs import QUALITIES
from ..core.errors import SwiftoptError, safe_url
from ..core.requests import worker_command
from ..core.settings import n_threads, usable_cores
from ..terminal import commands, inputs, options, value_types
from ..terminal.output import Result
from ..terminal.render import fixed, folding, table
from .services import FRESH_S, schema_problem

GIB = 1 << 30
# Below this much free memory, even the small models with an alias do not fit in bfloat16.
LOW_MEMORY = 2 * GIB
LOW_DATABASE = 10 * 2**20  # Below this, SQLite may find no room for its log.
LOW_DISK = 5 * GIB  # Below this, a download or a converted GGUF file of a small model may not fit.
CLOCK_S = 2.0  # Clock difference in seconds above which the times in listings mislead.
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}

Status = Literal["ok", "warn", "fail"]
Finding = tuple[Status, str]  # Status of a check and the text printed for it.


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    status: Status
    text: str


@commands.command(short_help="Check versions, devices, memory and database.")
@click.option("--model", type=value_types.MODEL, help="Also check that this model can be found.")
@options.db
@options.redis
@options.server
@options.queue
@options.json
@commands.example("doctor --model smollm2-135m")
def doctor(model: str | None, db: str | None, redis: str | None, server: str | None, queue: str) -> Result:
    """Check this machine and the configured services; exits with 1 if a check fails.

    Checked are versions, devices, memory, cache, and the database with its schema, clock and measured costs; if they
    are configured, also Redis with its persistence, the workers of the queue, and the server. Nothing is changed.
    """
    checks = [*examine(model), *examine_services(db, redis, server, queue)]
    healthy = all(check.status != "fail" for check in checks)
    report = {"schema": "swiftopt.doctor/1", "ok": healthy, "checks": [asdict(check) for check in checks]}
    return Result(report, [checks_table(checks)], code=0 if healthy else 1)


def checks_table(checks: Sequence[Check]) -> Table:
    rows = [(Text(check.status, style=STYLES[check.status]), check.name, check.text) for check in checks]
    return table([fixed(""), fixed(""), folding("")], rows, gap=2, show_header=False, pad_edge=False)


def examine(model: str | None) -> Iterator[Check]:
    """Check this machine, cheap checks first."""
    yield Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in ("torch", "transformers"):
        yield run_check(package, check_package, package)
    yield from check_devices()
    machine = {"cores": check_cores, "kernels": check_kernels, "speed": check_speed, "memory": check_memory}
    for name, check in {**machine, "cache": check_cache}.items():
        yield run_check(name, check)
    if model is not None:
        yield run_check("model", check_model, model)


def examine_services(db: str | None, redis: str | None, server: str | None, queue: str) -> Iterator[Check]:
    """Check the database and, if configured, Redis with its workers and the server."""
    url = inputs.database_url(db)
    yield (finding := run_check("database", check_database, url))
    if finding.status != "fail":
        yield run_check("clock", check_clock, url)
        yield run_check("costs", check_costs, url)
    if redis is not None:
        yield (finding := run_check("redis", check_redis, redis))
        if finding.status != "fail":
            yield run_check("workers", check_workers, redis, queue)
    if server is not None:
        yield run_check("server", check_server, server)


def run_check(name: str, check: Callable[..., Finding], *args: str) -> Check:
    try:
        return Check(name, *check(*args))
    except ImportError as error:
        return Check(name, "fail", f"cannot import a package: {error}")
    except (SwiftoptError, OSError) as error:
        return Check(name, "fail", str(error))


# --- this machine


def check_package(name: str) -> Finding:
    try:
        return "ok", version(name)
    except PackageNotFoundError:
        return "fail", f"not installed: pip install {name}"


def check_devices() -> Iterator[Check]:
    """Check the CUDA devices that torch sees, and their free memory."""
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Check("devices", "fail", f"torch cannot be imported: {error}")
        return
    if not torch.cuda.is_available() and NVIDIA_DRIVER.exists():
        description = (
            f"an NVIDIA driver is here, but torch {torch.__version__} finds no CUDA device, so models run on the CPU"
        )
        yield Check("devices", "warn", f"{description}: install a torch that is built for that driver's CUDA")
    elif not torch.cuda.is_available():
        yield Check("devices", "ok", "CPU only; there is no CUDA device")
    for index in range(torch.cuda.device_count()):
        free_bytes, total = torch.cuda.mem_get_info(index)
        text = f"{torch.cuda.get_device_name(index)}, {free_bytes / GIB:.1f} of {total / GIB:.1f} GiB free"
        yield Check(f"cuda:{index}", "warn" if free_bytes < LOW_MEMORY else "ok", text)


def check_cores() -> Finding:
    """Check the usable cores, the number of compute threads, and the load by other processes."""
    usable, load = usable_cores(), os.getloadavg()[0]
    text = (
        f"{usable} of {os.cpu_count()} usable, {n_threads()} thread{'' if n_threads() == 1 else 's'}, load {load:.1f}"
    )
    if load > usable / 2:
        return "warn", f"{text}: other programs are busy, so decoding will be slower than on an idle machine"
    return "ok", text


def check_kernels() -> Finding:
    """Check which CPU kernels forward passes will use, compile them if needed, and time how fast they read weights."""
    import torch

    from ..models.kernels.build import ROWS, at_rows, kernels
    from ..models.kernels.measure import READ, measured

    selected = kernels()
    if isinstance(selected, str):
        return "warn", f"torch's own, with which drafts may change last bits: {selected}"
    torch.set_num_threads(n_threads())
    speeds = measured()
    speed_words = {
        level: " and ".join(f"{at_rows(speeds, level, rows):.0f}" for rows in ROWS) for level in speeds if level != READ
    }
    other_levels = [f"{level} {speed}" for level, speed in speed_words.items() if level != selected.level]
    text = (
        f"{selected.level}, {selected.origin}, {speed_words[selected.level]} GB/s of bfloat16 weights at 1 and 8 rows"
    )
    return "ok", f"{text} ({', '.join(other_levels)}; {READ} {at_rows(speeds, READ, 1):.0f})"


def check_speed() -> Finding:
    """Report what `--speed auto` selects here: on a CUDA device for a small model, as for any that is loaded."""
    import torch

    from ..models.kernels.build import kernels

    if torch.cuda.is_available():
        return check_graphs()
    if isinstance(kernels(), str):
        return "warn", "auto selects eager, and exact is not possible: see kernels"
    return "ok", "auto selects native, which is exact: drafting changes no bit"


def check_graphs() -> Finding:
    """Time passes of a small model on the emptiest CUDA device, and report what `--speed auto` makes of that."""
    import torch
    from transformers import LlamaConfig

    from ..core.errors import first_line
    from ..models.graphs import GraphPasses, pass_seconds
    from ..models.kernels.device import obstacle
    from ..models.loading import random_runtime

    if reason := obstacle():
        return "warn", f"auto selects eager, and exact is not possible: {reason}"
    device_index = max(range(torch.cuda.device_count()), key=lambda index: torch.cuda.mem_get_info(index)[0])
    config = LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=8)
    try:
        runtime = random_runtime(config, f"cuda:{device_index}")
        eager_s, graph_s = pass_seconds(runtime, GraphPasses(runtime))
    except torch.OutOfMemoryError:
        return "warn", f"cuda:{device_index} has too little memory for a small model, so CUDA graphs were not timed"
    except Exception as error:  # Compilers and drivers may raise any exception; loading a model catches all, too.
        return "warn", f"auto selects eager, because CUDA graphs cannot be used: {first_line(error)}"
    faster = "CUDA graphs" if graph_s < eager_s else "eager"
    times = f"{1000 * graph_s:.2f} ms per pass of 4 small layers with graphs, {1000 * eager_s:.2f} without"
    return "ok", f"auto selects {faster}, {times} (every model is timed when it is loaded); exact uses Triton"


def check_memory() -> Finding:
    memory = psutil.virtual_memory()
    text = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    return "warn" if memory.available < LOW_MEMORY else "ok", text


def check_cache() -> Finding:
    from ..models.cache import cache_root

    folder = cache_root()
    existing_folder = _existing(folder)
    free_bytes = shutil.disk_usage(existing_folder).free
    if not os.access(existing_folder, os.W_OK):
        return "fail", f"{folder} is not writable: set SWIFTOPT_CACHE_DIR to a writable folder"
    text = f"{folder}, {free_bytes / GIB:.1f} GiB free"
    if free_bytes < LOW_DISK:
        return "warn", f"{text}: make room there, or set SWIFTOPT_CACHE_DIR to a folder on another disk"
    return "ok", text


def _existing(path: Path) -> Path:
    """Return a path, or the innermost folder above it that exists."""
    return next(existing for existing in (path, *path.absolute().parents) if existing.exists())


def check_model(name: str) -> Finding:
    """Check what a model's name resolves to, and what it needs in memory; no weights are downloaded or loaded."""
    from ..models.sources import known_folder, resolve

    source = resolve(name)
    text, model = f"{name} is the {source.kind} {source.location}", source.base or source
    if source.base is not None:
        text += f" of the base {source.base.location}"
    if model.kind == "hub" and known_folder(model) is None:
        return "ok", f"{text}, which is not on this machine yet"
    import torch

    from ..models.gguf_model import settings_folder
    from ..models.memory import memory_plan
    from ..models.saved import no_step

    path = Path(model.location)
    folder = settings_folder(path, no_step) if model.kind == "gguf" else known_folder(model) or path
    plan = memory_plan(folder, "auto", on_cpu=not torch.cuda.is_available())
    return "ok", f"{text}; {plan.sentence('it')}"


# --- services


def check_database(url: str) -> Finding:
    from ..store import Store
    from ..store.database import file_of
    from ..store.migrations import look

    state = look(url)
    if (file := file_of(url)) is not None:
        folder = _existing(file.parent)
        if not all(os.access(path, os.W_OK) for path in (folder, _existing(file))):
            return "fail", f"{state.database} cannot be written: name another by --db or SWIFTOPT_DATABASE_URL"
        if shutil.disk_usage(folder).free < LOW_DATABASE:
            return "fail", f"the disk of {state.database} is full: make room there"
    if state.revision is None:
        return "ok", f"{state.database}, empty: the first command that needs it creates its tables"
    if state.refusal:
        return "fail", schema_problem(state)
    if not state.ok:
        return "warn", f"{schema_problem(state)}; otherwise the next command does it"
    with Store.open(url) as store:
        n_sets, states = len(store.layer_sets()), store.jobs.states()
    jobs = ", ".join(f"{n} {state}" for state, n in states.items()) or "none"
    return "ok", f"{state.database}, schema {state.revision}, {n_sets} layer sets, jobs: {jobs}"


def check_costs(url: str) -> Finding:
    """Check whether stored costs of forward passes were measured while other work disturbed the machine."""
    from ..store import Store
    from ..store.migrations import look

    if not look(url).ok:
        return "ok", "none stored"
    with Store.open(url) as store:
        profiles = store.cost_profiles()
    counts = Counter(profile.quality for profile in profiles)
    text = ", ".join(f"{counts[quality]} {quality}" for quality in QUALITIES if counts[quality]) or "none stored"
    disturbed = next((profile for profile in profiles if profile.quality == "disturbed"), None)
    if disturbed is None:
        return "ok", text
    model = f"model {disturbed.fingerprint[:8]}, {disturbed.context_bucket} tokens"
    return "warn", f"{text} ({model}: {disturbed.remark or 'reason unknown'}): the next load measures them again"


def check_clock(url: str) -> Finding:
    """Check this machine's clock against the database's, which decides when leases expire."""
    from sqlalchemy import select

    from ..store.database import clock_s, connected, exists

    if not exists(url):
        return "ok", "the database will use this machine's clock"
    with connected(url) as connection:
        before_s = time.time()
        database_s = connection.execute(select(clock_s())).scalar_one()
        after_s = time.time()
    # The database read its clock between `before_s` and `after_s`; a reading in that range is no difference.
    difference_s = max(before_s - database_s, database_s - after_s, 0.0)
    if difference_s > CLOCK_S:
        return "warn", f"{difference_s:.1f} s off the database's: synchronise both machines with NTP"
    return "ok", f"{difference_s:.1f} s off the database's"


def check_redis(url: str) -> Finding:
    """Check that Redis answers and persists deliveries; the jobs themselves are stored in the database."""
    from ..worker.queue import RedisQueue

    with closing(RedisQueue(url)) as queue:
        facts = queue.facts()
    name = f"{facts.server} {facts.version}"
    if facts.eviction not in ("noeviction", ""):
        risk = f"may evict deliveries when its memory is full (policy {facts.eviction})"
        return "warn", f"{name} {risk}: set maxmemory-policy noeviction"
    if not facts.append_only:
        loss = "only its snapshots" if facts.saves else "nothing"
        advice = "jobs are then delivered again from the database; set appendonly yes to avoid that"
        return "warn", f"{name} keeps {loss} across a restart: {advice}"
    return "ok", f"{name}, append-only file on, policy {facts.eviction or 'unknown'}"


def check_workers(url: str, queue: str) -> Finding:
    from ..worker.queue import RedisQueue

    with closing(RedisQueue(url)) as redis:
        live_workers = [worker for worker in redis.workers() if worker.heartbeat_age_s < FRESH_S]
        depth = redis.depth(queue)
    names_on_queue = [worker.name for worker in live_workers if worker.queue == queue]
    waiting = f"{depth} waiting on queue {queue!r}"
    if not names_on_queue:
        other_queues = sorted({worker.queue for worker in live_workers})
        hint = f" (workers listen on {', '.join(other_queues)})" if other_queues else ""
        return "warn", f"none, {waiting}{hint}: start one with {worker_command(queue)}"
    return "ok", f"{', '.join(sorted(names_on_queue))}; {waiting}"


def check_server(url: str) -> Finding:
    from ..client import Client

    with Client(url) as client:
        health = client.ready()
        client.latest(limit=1)  # Readiness needs no API key; this request checks the key.
    statuses = {name: str(health.get(name, "unknown")) for name in ("database", "migrations", "redis", "storage")}
    text = f"{safe_url(url)}, " + ", ".join(f"{name} {status}" for name, status in statuses.items())
    needed = {statuses[name] for name in ("database", "migrations", "storage")}
    is_ready = needed == {"ok"} and statuses["redis"] in ("ok", "not configured")
    return "ok" if is_ready else "warn", text
