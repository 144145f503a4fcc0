"""`swiftopt doctor`: what a person would check first when something does not work."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

from .options import db_option, json_option, queue_option, redis_option, server_option
from .output import emit_json, show
from .service_checks import Check, check_clock, check_database, check_redis, check_server, check_workers, guarded

GIB = 1 << 30
LOW_MEMORY = 2 * GIB  # below it even small models of the alias table do not fit in bfloat16 with room to work
LOW_DISK = 5 * GIB  # below it a download or a converted GGUF file of a small model may not fit
MEMINFO = Path("/proc/meminfo")


@click.command(short_help="Check versions, devices, memory and database.")
@click.option("--model", help="Check that this model can be found as well.")
@db_option
@redis_option
@server_option
@queue_option
@json_option
@click.pass_context
def doctor(
    context: click.Context,
    model: str | None,
    db: str | None,
    redis: str | None,
    server: str | None,
    queue: str,
    as_json: bool,
) -> None:
    """Check this machine and what it is told to use; ends with 1 if something fails.

    Versions, devices, memory, cache, the database with its schema and clock; and where they are named, Redis with how
    it keeps its data, the workers of the queue, and the server. Nothing is changed.

    \b
    Example:
      swiftopt doctor --model smollm2-135m
    """
    from .tables import checks_table

    checks = [*examine(model), *examine_services(db, redis, server, queue)]
    healthy = all(check.status != "fail" for check in checks)
    if as_json:
        emit_json({"schema": "swiftopt.doctor/1", "ok": healthy, "checks": [asdict(check) for check in checks]})
    else:
        show(checks_table([(check.name, check.status, check.text) for check in checks]))
    context.exit(0 if healthy else 1)


def examine(model: str | None) -> Iterator[Check]:
    """Every check of this machine, cheap ones first."""
    yield Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in ("torch", "transformers"):
        yield check_package(package)
    yield from check_devices()
    yield guarded("cores", check_cores)
    yield guarded("kernels", check_kernels)
    yield check_memory()
    yield guarded("cache", check_cache)
    if model is not None:
        yield guarded("model", lambda: check_model(model))


def examine_services(db: str | None, redis: str | None, server: str | None, queue: str) -> Iterator[Check]:
    """Every check of what runs elsewhere."""
    from ..store import as_url, default_url

    url = as_url(db) if db else default_url()
    database = guarded("database", lambda: check_database(url))
    yield database
    if database.status != "fail":
        yield guarded("clock", lambda: check_clock(url))
    if redis is not None:
        found = guarded("redis", lambda: check_redis(redis))
        yield found
        if found.status != "fail":
            yield guarded("workers", lambda: check_workers(redis, queue))
    if server is not None:
        yield guarded("server", lambda: check_server(server))


def check_package(name: str) -> Check:
    """Whether a package that decoding needs is installed."""
    try:
        return Check(name, "ok", version(name))
    except PackageNotFoundError:
        return Check(name, "fail", f"not installed: pip install {name}")


def check_devices() -> Iterator[Check]:
    """CUDA devices with their free memory; torch is asked, for it is what must see them."""
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Check("devices", "fail", f"torch cannot be imported: {error}")
        return
    if not torch.cuda.is_available():
        yield Check("devices", "warn", "no CUDA device, models run on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        text = f"{torch.cuda.get_device_name(index)}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        yield Check(f"cuda:{index}", "warn" if free < LOW_MEMORY else "ok", text)


def check_cores() -> Check:
    """Processors that may be used, the threads that will compute, and what else runs on them."""
    from ..core.processors import n_threads, usable_cores

    usable, load = usable_cores(), os.getloadavg()[0]
    text = f"{usable} of {os.cpu_count()} usable, {n_threads()} threads, load {load:.1f}"
    if load > usable / 2:
        return Check("cores", "warn", f"{text}: other programs are busy, and decoding will be slower beside them")
    return Check("cores", "ok", text)


def check_kernels() -> Check:
    """The CPU kernels that passes will use, compiled if need be, and how fast they read weights."""
    try:
        import torch

        from ..core.processors import n_threads
        from ..models.kernels.build import at_rows, kernels
        from ..models.kernels.measure import READ, measured
    except (ImportError, OSError):
        return Check("kernels", "fail", "torch cannot be imported")
    found = kernels()
    if isinstance(found, str):
        return Check("kernels", "warn", f"torch's own, drafts may change last bits: {found}")
    torch.set_num_threads(n_threads())
    speeds = measured()
    others = [f"{way} {_speeds(speeds, way)}" for way in speeds if way not in (found.level, READ)]
    text = f"{found.level}, {_speeds(speeds, found.level)} GB/s of bfloat16 weights at 1 and 8 rows"
    return Check("kernels", "ok", f"{text} ({', '.join(others)}; {READ} {at_rows(speeds, READ, 1):.0f})")


def _speeds(speeds: Any, way: str) -> str:
    from ..models.kernels.build import ROWS, at_rows

    return " and ".join(f"{at_rows(speeds, way, rows):.0f}" for rows in ROWS)


def check_memory() -> Check:
    """Main memory that programs may still take."""
    try:
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text(encoding="ascii").splitlines())
        free, total = (int(lines[key].split()[0]) * 1024 for key in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError, ValueError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Check("memory", "ok", f"{total / GIB:.1f} GiB")
    return Check("memory", "warn" if free < LOW_MEMORY else "ok", f"{free / GIB:.1f} of {total / GIB:.1f} GiB free")


def check_cache() -> Check:
    """Where converted models go, and whether there is room."""
    import platformdirs

    named = os.environ.get("SWIFTOPT_CACHE_DIR") or platformdirs.user_cache_dir("swiftopt", appauthor=False)
    folder = Path(named).expanduser()
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if not os.access(there, os.W_OK):
        return Check("cache", "fail", f"{folder} cannot be written: set SWIFTOPT_CACHE_DIR to a folder of yours")
    return Check("cache", "warn" if free < LOW_DISK else "ok", f"{folder}, {free / GIB:.1f} GiB free")


def check_model(name: str) -> Check:
    """Where a model's name leads; nothing is downloaded or loaded."""
    from ..models.sources import resolve

    source = resolve(name)
    return Check("model", "ok", f"{name} is the {source.kind} {source.location}")
