"""`swiftopt serve`, `swiftopt worker` and `swiftopt db`: the processes of a service, and the schema of its database."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import psutil

from ..core import logs
from ..core.errors import SettingsError, SwiftoptError
from ..core.requests import ServedModel, worker_command
from ..core.streams import LineWriter
from ..terminal import commands, inputs, options, value_types
from ..terminal.commands import ConfiguredGroup, option
from ..terminal.inputs import database_url, open_store, pick
from ..terminal.output import Result, check_folder, emit_json, note
from ..terminal.program import end_by_signals
from ..terminal.start_report import StartReport
from ..terminal.value_types import FloatRange, IntRange, natural, positive

if TYPE_CHECKING:
    from ..store.migrations import SchemaState
    from ..worker.attempt import WorkerContext
    from ..worker.queue import RedisQueue

FRESH_S = 60.0  # Seconds since the last heartbeat after which a worker counts as gone.
BEATS_S = 20.0  # Seconds within which a live worker has sent a heartbeat.
# Run in a separate process, because CUDA initialised here would not work in the worker's forked children.
DEVICE_PROBE = """
import sys
from swiftopt.core.errors import SwiftoptError
from swiftopt.models.sources import check_device
try:
    check_device(sys.argv[1])
except SwiftoptError as error:
    sys.exit(str(error))
"""

logger = logging.getLogger(__name__)


# --- the HTTP server

requests, learning, access = (partial(option, heading) for heading in ("Requests", "Learning", "Keys and limits"))


@commands.command(
    short_help="Serve models and lookups over HTTP, and take jobs.",
    common="models host port concurrency tune keep_prompts new_key requests_per_min redis db as_json",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="[NAME=]MODEL",
    type=value_types.MODEL,
    help="Model to serve: alias, hub id, folder or GGUF file; may be repeated. NAME is its name for clients.",
)
@click.option("--host", default="127.0.0.1", help="Address to listen on; any but loopback needs an API key.")
@click.option("--port", default=8000, type=IntRange(0, 65535), help="Port; 0 takes a free one.")
@requests("--concurrency", default=8, type=positive, help="Completions decoded at once, per model.")
@requests("--max-waiting", default=128, type=natural, help="Completions that may wait.")
@requests(
    "--memory-gb", type=FloatRange(min=0.01), help="Memory for keys and values.  [default: half of the free memory]"
)
@requests(
    "--keep-prefixes",
    metavar="DIR",
    type=value_types.FOLDER,
    help="Also store keys and values of texts in this folder, for the next start.  [default: memory only]",
)
@requests("--prefixes-gb", default=10.0, type=FloatRange(min=0.01), help="Disk space for --keep-prefixes, per model.")
@requests(
    "--timeout",
    "timeout_s",
    default=600,
    type=positive,
    help="Time limit of a completion in seconds, including its wait.",
)
@requests(
    "--load-wait",
    "load_wait_s",
    default=300,
    type=natural,
    help="Seconds that a request waits for a model to load.",
)
@requests("--drain", "drain_s", default=30, type=positive, help="Seconds that running completions get at shutdown.")
@requests("--explain/--no-explain", "explains", default=True, help="State in answers how they were decoded.")
@learning("--tune/--no-tune", default=True, help="Learn from the requests that are served.")
@learning(
    "--keep-prompts",
    type=value_types.FILE,
    help="Append prompts to this file, as a stream for `swiftopt tune`.  [default: memory only]",
)
@learning(
    "--corpus-mb",
    default=64,
    type=natural,
    help="Memory in MiB, per model, for finished answers to draft from; 0 keeps none.",
)
@learning(
    "--keep-corpus",
    metavar="DIR",
    type=value_types.FOLDER,
    help="Also store finished answers in this folder, for the next start.  [default: memory only]",
)
@access("--new-key", metavar="NAME", help="Print a new API key and its entry, and exit.")
@access(
    "--rate",
    "requests_per_min",
    default=600,
    type=natural,
    help="Requests per minute and key (or address, without keys); 0 is no limit.",
)
@access(
    "--token-rate",
    "tokens_per_min",
    default=0,
    type=natural,
    help="Tokens of prompts and completions per minute and key; 0 is no limit.",
)
@access(
    "--allow-origin",
    "origins",
    multiple=True,
    metavar="ORIGIN",
    help="Origin whose pages may call the API, as https://host:port; may be repeated; * is all.",
)
@access("--max-body-mb", default=32, type=IntRange(1, 4096), help="Maximum size of a request body, in MiB.")
@options.machine(ServedModel, "speed")
@option(
    commands.SERVICES,
    "--log",
    type=click.Choice(["warnings", "requests", "all"]),
    default="requests",
    help="Content of the log: warnings only; also requests; or all, including health checks.",
)
@options.log_format
@option(
    commands.SERVICES,
    "--stream-folder",
    "folders",
    multiple=True,
    metavar="DIR",
    type=value_types.FOLDER,
    help="Folder of streams that jobs may name; may be repeated.  [env: SWIFTOPT_STREAM_FOLDERS]",
)
@options.redis
@options.db
@options.as_json
@commands.example("serve --model smollm2-135m", "serve --port 8000 --stream-folder prompts", "serve --new-key ci")
def serve(new_key: str | None, as_json: bool, models: tuple[str, ...], **values: Any) -> int:
    """Decode over HTTP, answer lookups of layer sets, and take jobs.

    With --model the server speaks OpenAI's API (/v1/chat/completions, /v1/completions, /v1/models) and gets faster on
    the requests that it serves; the output equals plain decoding. Each model runs in its own process.

    API keys come from SWIFTOPT_API_KEYS (name:sha256hex, separated by commas) or SWIFTOPT_API_KEYS_FILE (one entry per
    line, read again when it changes). An entry name:sha256hex:task sets the task of requests that name none. An entry
    name:sha256hex:task:admin, with or without a task, may read the usage of all keys.

    The log goes to stderr. --json prints the address as soon as the server listens; requests for a model wait until it
    is loaded.
    """
    if new_key is not None:
        return _new_key(new_key).print(as_json)
    from ..server.app import listen
    from ..server.app import serve as run
    from ..server.settings import MIB, KeyRing, ServerSettings, allowed_origins, stream_folders

    access = {
        "keys": KeyRing.from_environment(),
        "stream_folders": stream_folders(values["folders"]),
        "origins": allowed_origins(values["origins"]),
    }
    sizes = {"max_body_bytes": values["max_body_mb"] * MIB, "log_polls": values["log"] == "all"}
    settings = pick(ServerSettings, {**values, **access, **sizes})
    served_models = _parse_models(models, values)
    if served_models:
        inputs.check_can_decode()
        _check_kept(values)
    with listen(values["host"], values["port"], settings) as listener, open_store(values["db"]) as store:
        host, port = values["host"], listener.getsockname()[1]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        names, log_format = [model.name for model in served_models], values["log_format"]
        with StartReport(url, names, quiet=as_json or log_format == "json") as report:
            start_log(report.handler, log_format, logging.WARNING if values["log"] == "warnings" else logging.INFO)
            if log_format == "json":
                logger.info("serving url=%s models=%s", url, ",".join(names))
            if as_json:
                emit_json({"schema": "swiftopt.serve/1", "url": url})
            end_by_signals()  # The server has its own handlers.
            run(listener, store, values["redis"], settings, report, served_models)
    return 0


def _parse_models(models: tuple[str, ...], values: dict[str, Any]) -> list[ServedModel]:
    """Return the models by the names that clients use.

    Raises: ModelNotFound, SettingsError, UnsupportedModel: checks before loading show that a model cannot be loaded.
    """
    from ..models.sources import check_names

    models_by_name: dict[str, ServedModel] = {}
    memory = None if values["memory_gb"] is None else int(values["memory_gb"] * 1e9 / len(models or "1"))
    for argument in models:
        given_name, equals, path = argument.partition("=")
        if os.path.exists(argument):  # The path itself may have an equals sign.
            name, path = Path(argument).name, argument
        elif equals and not (given_name and path):
            raise SettingsError(f"--model {argument} lacks a name or a model: use NAME=MODEL, or MODEL alone")
        else:
            name, path = (given_name, path) if equals else (argument, argument)
        check_names(path, values["dtype"], values["device"], values["speed"])
        if name in models_by_name:
            raise SettingsError(f"two models have the name {name!r}: rename one with --model NAME={path}")
        model_fields = {**values, "name": name, "path": path, "memory": memory, "db": database_url(values["db"])}
        models_by_name[name] = pick(ServedModel, model_fields)
    return list(models_by_name.values())


def _check_kept(values: dict[str, Any]) -> None:
    """Raises: OutputError: a --keep-… folder or file is not writable, which engines would notice only after loading."""
    if values["keep_prompts"] is not None:
        with LineWriter(Path(values["keep_prompts"]), what="prompts", option="--keep-prompts"):
            pass
    for name in ("keep_corpus", "keep_prefixes"):
        if values[name] is not None:
            check_folder(Path(values[name]), f"--{name.replace('_', '-')}")


def _new_key(name: str) -> Result:
    from ..server.settings import new_key

    key, key_entry = new_key(name)
    return Result(
        {"schema": "swiftopt.api-key/1", "name": name, "key": key, "entry": key_entry},
        [f"key    {key}\nentry  {key_entry}"],
        ["The key is shown only once; put the entry into SWIFTOPT_API_KEYS or the file of SWIFTOPT_API_KEYS_FILE."],
    )


# --- workers


@commands.command(short_help="Run the jobs of a queue.")
@options.queue
@click.option("--device", default="auto", help="Device for jobs that name none, e.g. cuda:0.")
@click.option("--burst", is_flag=True, help="Exit when the queue is empty.")
@click.option("--name", help="Name of this worker, unique in the service.  [default: host, process, letters]")
@click.option("--check", is_flag=True, help="Only check that a worker can run, and that one runs on this machine.")
@options.log_format
@options.redis
@options.db_and_json
@commands.example("worker --redis redis://127.0.0.1:6379 --device cuda:0", "worker --check")
def worker(
    queue: str,
    device: str,
    burst: bool,
    name: str | None,
    check: bool,
    log_format: logs.LogFormat,
    redis: str | None,
    db: str | None,
) -> Result:
    """Take jobs from a queue and run them, one at a time; start one worker per GPU.

    Ctrl-C or SIGTERM hands the job back at its next step, and another worker resumes it. --json prints one
    object at the end.
    """
    if redis is None:
        raise SettingsError("a worker needs Redis, and none is configured: set SWIFTOPT_REDIS_URL or use --redis URL")
    from ..worker.attempt import WorkerContext
    from ..worker.worker import default_name, run_worker

    worker_context = WorkerContext(name or default_name(), database_url(db), redis, queue, device)
    problems = list(problems_of(worker_context)) if check else []
    for problem in problems:
        note(f"error: {problem}")
    if not check:
        inputs.check_can_decode()
        handler = logging.StreamHandler()
        handler.addFilter(OneLineErrors())
        start_log(handler, log_format)
        check_start(worker_context)
        _remark(f"worker {worker_context.name} listens on queue {queue!r}")
        end_by_signals()  # The worker has its own handlers.
        run_worker(worker_context, burst)
    report = {"name": worker_context.name, "queue": queue, "ok": not problems, "problems": problems}
    problems_now = [f"a worker of this machine listens on queue {queue!r}"] if check and not problems else []
    return Result({"schema": "swiftopt.worker/1", **report}, problems_now, code=1 if problems else 0)


def problems_of(context: WorkerContext) -> Iterator[str]:
    """Yield each problem that prevents a worker on this machine from running, as a sentence."""
    from ..store.migrations import look
    from ..worker.queue import RedisQueue

    try:
        state = look(context.database)
        if not state.ok:
            yield schema_problem(state)
        with closing(RedisQueue(context.redis)) as redis:
            local_workers = [
                each_worker for each_worker in redis.workers() if each_worker.hostname == socket.gethostname()
            ]
    except SwiftoptError as error:
        yield str(error)
        return
    if not any(
        each_worker.queue == context.queue and each_worker.heartbeat_age_s < FRESH_S for each_worker in local_workers
    ):
        command = worker_command(context.queue)
        yield f"no worker of this machine listens on queue {context.queue!r}: start one with {command}"


class OneLineErrors(logging.Filter):
    """Logs swiftopt's own errors and Redis outages on one line, without a traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Shorten the record in place; always return True, so that it is logged."""
        from redis.exceptions import RedisError

        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, SwiftoptError | RedisError):
            return True
        reason = str(error).split("\n")[0]
        # rq logs an outage as if it were about to exit.
        if isinstance(error, RedisError) and record.name.startswith("rq"):
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.msg, record.args = "redis=away reason=%r", (reason,)
        else:
            record.msg, record.args = "%s reason=%r", (record.getMessage(), reason)
        record.exc_info = record.exc_text = None
        return True


def start_log(handler: logging.Handler, log_format: logs.LogFormat, level: int = logging.INFO) -> None:
    logs.start(log_format, level, handler)
    for logger_name in ("uvicorn.error", "alembic", "sse_starlette", "python_multipart"):
        logging.getLogger(logger_name).setLevel(logging.WARNING)


def _remark(text: str) -> None:
    """Print a remark; where the log is JSON, log it, so that each line stays an object."""
    if logs.current_format() == "json":
        logger.info("%s", text)
    else:
        note(text)


def check_start(context: WorkerContext) -> None:
    """Check for problems that would make every job fail or end the worker at once.

    Raises: SettingsError: the device is unknown or missing on this machine, or the name is taken.
        ServiceUnreachable, StoreError: Redis or the database cannot be used.
    """
    from ..models.sources import check_placement
    from ..worker.queue import RedisQueue

    check_placement("auto", context.device)
    with closing(RedisQueue(context.redis)) as queue:
        queue.ping()
        open_store(context.database).close()
        if context.device.startswith("cuda"):
            _check_cuda(context.device)
        _check_name(context.name, queue)


def _check_cuda(device: str) -> None:
    """Check that this machine has the CUDA device, without which all jobs would fail."""
    probe = subprocess.run([sys.executable, "-c", DEVICE_PROBE, device], capture_output=True, text=True)
    if probe.returncode:
        reason = probe.stderr.strip().split("\n")[-1] or f"torch ended with {probe.returncode}"
        raise SettingsError(f"a worker for {device} cannot run on this machine: {reason}")


def _check_name(name: str, queue: RedisQueue) -> None:
    """Check that no other worker has this name: the first one to end would unregister both.

    A worker with this name on another machine only causes a note, since its process cannot be checked from here.
    """
    for each_worker in queue.workers():
        if each_worker.name != name or each_worker.heartbeat_age_s > BEATS_S:
            continue
        if each_worker.hostname != socket.gethostname():
            conflict = f"a worker named {name} is registered on {each_worker.hostname}"
            _remark(f"note: {conflict}: if it still runs, give this one another --name")
        elif each_worker.pid != os.getpid() and psutil.pid_exists(each_worker.pid):
            raise SettingsError(
                f"a worker named {name} already runs here (process {each_worker.pid}): choose another --name"
            )


# --- the database


@click.group(cls=ConfiguredGroup, short_help="Migrate the database, or show its schema.")
@commands.example("db check --db postgresql://swiftopt@db.example/swiftopt")
def db() -> None:
    """Migrate or show the schema of the database; every other command migrates it automatically."""


@db.command(short_help="Migrate the database to the newest schema.")
@options.db_and_json
@commands.example("db upgrade --db postgresql://swiftopt@db.example/swiftopt")
def upgrade(db: str | None) -> Result:
    """Migrate the database to the newest schema, or create it. Rows are kept."""
    from ..store.migrations import bring_to_head

    previous_schema, schema = bring_to_head(database_url(db))
    outcome = (
        "already has the newest schema:"
        if previous_schema.ok
        else f"was migrated from {previous_schema.revision or 'empty'} to"
    )
    return _schema_result(schema, f"{schema.database} {outcome} {schema.revision}")


@db.command(short_help="Print the schema of the database.")
@options.db_and_json
@commands.example("db current")
def current(db: str | None) -> Result:
    """Print the revision of the database's schema, or `empty`; nothing is changed or created."""
    from ..store.migrations import look

    state = look(database_url(db))
    return _schema_result(state, state.revision or "empty")


@db.command(short_help="Exit with 0 if the schema is the newest, otherwise with 1.")
@options.db_and_json
@commands.example("db check && swiftopt serve")
def check(db: str | None) -> Result:
    """Exit with 0 if the database has the newest schema, otherwise print its schema and exit with 1."""
    from ..store.migrations import look

    state = look(database_url(db))
    if state.ok:
        return _schema_result(state, f"{state.database} has the newest schema: {state.revision}")
    note(f"error: {schema_problem(state)}")
    return _schema_result(state, code=1)


def _schema_result(state: SchemaState, *texts: str, code: int = 0) -> Result:
    return Result({"schema": "swiftopt.db/1", **asdict(state), "ok": state.ok}, texts, code=code)


def schema_problem(state: SchemaState) -> str:
    """Return why a database cannot be used, and how to fix it."""
    if state.refusal:
        return str(state.refusal)
    if state.revision is None:
        return f"the database {state.database} is empty: create its tables with `swiftopt db upgrade`"
    return (
        f"the database {state.database} has the schema {state.revision}, but this version needs {state.head}: "
        "run `swiftopt db upgrade`"
    )
