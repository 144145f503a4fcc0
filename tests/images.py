"""Build the images of docker/ without a container engine or a registry, and run what they are for: `make images`.

    python images.py [--only cpu api cuda] [--quick] [--built] [--bases]

buildah builds and runs, each command in a chroot of the image's root; where an image that a Dockerfile or compose.yaml
begins with is not on this machine, one of Debian's packages takes its name. What compose.yaml says is run as it stands
there: PostgreSQL, Valkey, the migration, the API and a worker, as their users, with secrets from files and their health
checks; then a job over HTTP to its verdict, its worker killed on the way; then the server of deploy/kubernetes with a
model. The CPU image's speed is measured against this environment's by turns, which `--quick` leaves out. Ends with a
table, and with 1 where something failed.

It needs root, Debian's packages buildah and mmdebstrap, and the ports 5432, 6379 and 8000.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, NoReturn

import httpx2
import psutil
import workers
import yaml

import swiftopt
from swiftopt.core.requests import TuneRequest
from swiftopt.core.settings import TuningSettings
from swiftopt.core.streams import read_stream
from swiftopt.models.sources import local_folder, resolve

ROOT = Path(__file__).parents[1]
MODEL, STREAM = "smollm2-135m", ROOT / "examples" / "stream.jsonl"
# What stands in for images of a registry: Debian's release, packages, what is done then, and where commands run.
PYTHON = "python3 python3-pip python3-venv ca-certificates"
STAND_INS = {
    "python:3.11-slim-bookworm": ("bookworm", PYTHON, "ln -s python3 /usr/bin/python", "/"),
    "nvidia/cuda:13.0.2-base-ubuntu24.04": ("bookworm", "ca-certificates", "true", "/"),
    "valkey/valkey:9.1-alpine": ("trixie", "valkey-server valkey-tools", "mkdir /data", "/data"),
    "postgres:18-bookworm": ("trixie", "postgresql", "ln -s /usr/lib/postgresql/*/bin/* /usr/local/bin/", "/"),
}
VERSION = swiftopt.__version__
PROGRAM = [sys.executable, "-m", "swiftopt"]
URL = "http://127.0.0.1:8000"
HOSTS = "127.0.0.1 localhost valkey postgres swiftopt-redis\n"
# What a launcher of Triton is compiled from, by the compiler and the headers that Triton itself takes.
LAUNCHER = """
import tempfile
from triton.backends.nvidia.driver import include_dirs, make_launcher
from triton.runtime.build import _build
source = make_launcher({}, {0: "*bf16", 1: "i32"}, None)
with tempfile.TemporaryDirectory() as folder:
    path = folder + "/launcher.c"
    open(path, "w").write(source)
    _build("launcher", path, folder, [], include_dirs, [], [])
from swiftopt.models.kernels.device import obstacle
assert obstacle() is None, obstacle()
"""


FAILED = "FAILED"
# buildah copies itself to memory before it begins a command, and seals the copy. The kernel refuses the seal while it
# still holds the copy's pages elsewhere, as it does for moments on a busy machine.
NOT_BEGUN, ATTEMPTS = "sealing memfd copy: Device or resource busy", 5


class Failed(Exception):
    """Something that an image should do, and does not."""


@dataclass
class Report:
    """What was measured and checked, in the order of the run."""

    rows: list[tuple[str, str]] = field(default_factory=list)

    def add(self, what: str, value: str) -> None:
        print(f"{what:48} {value}", flush=True)
        self.rows.append((what, value))

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Note what fails in the block, and go on behind it."""
        try:
            yield
        except (Failed, subprocess.TimeoutExpired) as error:
            print(f"error: {what}: {error}", file=sys.stderr)
            self.add(what, FAILED)

    def end(self) -> NoReturn:
        """Print the table, and end the program: with 1 where something failed."""
        print("", *(f"{what:48} {value}" for what, value in self.rows), sep="\n")
        sys.exit(any(value == FAILED for _, value in self.rows))

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.add(what, f"{time.monotonic() - began:.0f} s")


def done(*words: str | Path, limit_s: float = 900.0, **more: Any) -> str:
    """Run a command to its end and return what it wrote to stdout; a command that buildah could not begin, again.

    Raises: Failed: it ended with another code than 0.
    """
    for _ in range(ATTEMPTS):
        found = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=limit_s, **more)
        if NOT_BEGUN not in found.stderr:
            break
    if found.returncode:
        command, said = shlex.join(map(str, words))[:300], (found.stderr or found.stdout)[-3000:]
        raise Failed(f"{command} ended with {found.returncode}:\n{said}")
    return found.stdout


def until(holds: Callable[[], Any], what: str, limit_s: float) -> Any:
    """Wait until something holds, and return it."""
    try:
        return workers.until(holds, limit_s, 0.25)
    except TimeoutError as error:
        raise Failed(f"{what}: {error}") from error


def by_turns(what: str, inside: Sequence[str], outside: Sequence[str], env: Mapping[str, str], report: Report) -> None:
    """Run `bench decode` of plain and adaptive in a root and here by turns; report the quotients of their speeds.

    Raises: Failed: drafts change outputs in the root.
    """
    speeds = dict[str, list[dict[str, float]]](inside=[], outside=[])
    for place in ("outside", "inside", "inside", "outside") * 2:
        said = done(*inside) if place == "inside" else done(*outside, cwd=ROOT, env=env)
        speeds[place].append(speeds_of(said, is_here=place == "outside"))
    for name in ("plain", "adaptive"):
        means = {place: mean(turn[name] for turn in turns) for place, turns in speeds.items()}
        words = f"{means['inside']:.1f} ÷ {means['outside']:.1f}"
        report.add(f"{what}: {name}, tok/s ÷ here", f"{means['inside'] / means['outside']:.3f} ({words})")


def speeds_of(said: str, is_here: bool = False) -> dict[str, float]:
    """Return the tokens per second of each method in what `bench decode --json` has printed.

    Raises: Failed: drafts change outputs, but for a run here, which is only compared with.
    """
    rows = {row["method"]: row for row in json.loads(said)["results"]}
    equal, of = rows["adaptive"]["identical"], rows["adaptive"]["of"]
    if equal != of and not is_here:
        raise Failed(f"drafts changed {of - equal} of {of} outputs")
    return {name: row["tok_s"] for name, row in rows.items()}


# --- building


def pip_settings() -> dict[str, str]:
    """Return pip's settings here, without constraints."""
    settings = dict[str, str]()
    for line in done(sys.executable, "-m", "pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = value.strip("'").replace("\\n", " ")
    settings.pop("constraint", None)
    return settings


def pip_mounts(folder: Path) -> list[str]:
    """Return what is to be mounted so that pip in a root reads its packages where pip reads them here."""
    settings = pip_settings()
    paths = [word.removeprefix("file://") for value in settings.values() for word in value.split()]
    file = folder / "pip.conf"
    file.write_text("\n".join(["[global]", *(f"{name} = {value}" for name, value in settings.items()), ""]))
    shared = {path.split("/simple")[0] for path in paths if path.startswith("/") and Path(path).exists()}
    return [f"{file}:/etc/pip.conf:ro", *(f"{path}:{path}:ro" for path in sorted(shared))]


def have_base(name: str, report: Report) -> None:
    """Make an image of Debian's packages under a name, unless there is one."""
    if subprocess.run(["buildah", "inspect", "--type", "image", name], capture_output=True).returncode == 0:
        return
    release, packages, behind, place = STAND_INS[name]
    with report.timed(f"{name}, of Debian's packages"), tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root.tar"
        options = ["--variant=minbase", "--include=" + ",".join(packages.split())]
        # As images of a registry, which come without manuals and without what apt has read.
        options += [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "info", "locale", "man")]
        options.append('--customize-hook=rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*.bin')
        hook = f'--customize-hook=chroot "$1" sh -c {shlex.quote(behind)}'
        done("mmdebstrap", *options, hook, release, root)
        container = done("buildah", "from", "scratch").strip()
        done("buildah", "add", container, root, "/")
        path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        done("buildah", "config", "--env", path, "--workingdir", place, container)
        done("buildah", "commit", "--rm", container, name)


def bases_of(dockerfile: str) -> list[str]:
    text = (ROOT / "docker" / dockerfile).read_text(encoding="utf-8")
    return sorted(set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)))


def build(kind: str, mounts: Sequence[str], report: Report) -> None:
    """Build an image; `mounts` are there while its commands run."""
    dockerfile, image = f"Dockerfile.{kind}", f"swiftopt:{VERSION}-{kind}"
    with report.timed(f"{image}: build"):
        index = ["--build-arg", "TORCH_INDEX=https://pypi.org/simple"]
        where = ["--file", str(ROOT / "docker" / dockerfile), "--tag", image, str(ROOT)]
        done(
            "buildah",
            "bud",
            "--isolation",
            "chroot",
            "--format",
            "docker",
            "--layers",
            "--pull-never",
            *(word for mount in mounts for word in ("--volume", mount)),
            *index,
            *where,
            limit_s=1800.0,
        )
    [entry] = json.loads(done("buildah", "images", "--json", image))
    report.add(f"{image}: size", str(entry["size"]))


# --- running


class Container:
    """A container of an image, in which commands run as processes of this machine."""

    def __init__(self, image: str, running: ExitStack, log: Path) -> None:
        self.name = done("buildah", "from", "--pull-never", image).strip()
        running.callback(subprocess.run, ["buildah", "rm", self.name], capture_output=True)
        self._running, self._log = running, log
        self.processes: list[subprocess.Popen[bytes]] = []

    def words(self, command: Sequence[str], user: str, env: Mapping[str, str], mounts: Sequence[str]) -> list[str]:
        options = ["--isolation", "chroot", "--no-hosts", "--user", user]
        options += [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
        options += [word for mount in mounts for word in ("--volume", mount)]
        return ["buildah", "run", *options, self.name, "--", *command]

    def start(self, words: Sequence[str], ending: signal.Signals = signal.SIGTERM) -> subprocess.Popen[bytes]:
        """Start a command that goes on, and gets the signal at the end of the run."""
        with self._log.open("ab") as log:
            process = subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self.processes.append(process)
        self._running.callback(self.stop, process, ending)
        return process

    def stop(self, process: subprocess.Popen[bytes], number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal to the command itself, below the processes of buildah, and wait for its end."""
        if process.poll() is None:
            leaf(process.pid).send_signal(number)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                for child in psutil.Process(process.pid).children(True):
                    child.kill()
                process.wait()


def leaf(pid: int) -> psutil.Process:
    """Return what buildah runs in a root: the first process below it that is none of its own."""
    found = psutil.Process(pid)
    while "buildah" in Path(found.exe()).name and (children := found.children()):  # a root's path names it, too
        found = children[0]
    return found


@dataclass(frozen=True)
class Service:
    """A service of compose.yaml with a container of its image."""

    entry: Mapping[str, Any]
    container: Container
    user: str
    env: Mapping[str, str]
    mounts: tuple[str, ...]

    def words(self, *command: str, **more: str) -> list[str]:
        return self.container.words(command, self.user, {**self.env, **more}, self.mounts)

    def start(self) -> subprocess.Popen[bytes]:
        program = [] if self.entry["image"].startswith("valkey") else ["swiftopt"]
        return self.container.start(self.words(*program, *map(str, self.entry["command"])))

    def healthy(self) -> bool:
        """Return whether its health check holds, as it is written."""
        kind, *test = self.entry["healthcheck"]["test"]
        command = ["sh", "-c", *test] if kind == "CMD-SHELL" else test
        return subprocess.run(self.words(*command), capture_output=True).returncode == 0


def compose() -> dict[str, Any]:
    """Return compose.yaml with the defaults of its variables."""
    text = (ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8")
    loaded: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))
    return loaded["services"]


class Deployment:
    """What compose.yaml starts, in containers of the images, with its secrets and folders in a folder here."""

    def __init__(self, folder: Path, running: ExitStack) -> None:
        self.folder, self.running, self.log = folder, running, folder / "log"
        for name in ("secrets", "keys", "streams", "cache", "data", "postgres", "model"):
            (folder / name).mkdir()
        (folder / "hosts").write_text(HOSTS)
        (folder / "secrets" / "postgres_password").write_text("a pass'word\n")
        (folder / "keys" / "api_keys").touch()
        os.chown(folder / "cache", 10001, 10001)
        shutil.copytree(local_folder(resolve(MODEL)), folder / "model", dirs_exist_ok=True)
        folder.chmod(0o755)

    def service(self, name: str, image: str = "") -> Service:
        """Return a service in a container of its image, or of another."""
        entry = compose()[name]
        container = Container(image or entry["image"], self.running, self.log)
        ours = entry["image"].startswith("swiftopt")
        mounts = [f"{self.folder / 'hosts'}:/etc/hosts:ro", f"{self.folder / 'model'}:/models/{MODEL}:ro"]
        mounts.append(f"{self.folder / 'secrets'}:/run/secrets:ro")
        mounts.append(f"{self.folder / 'keys'}:/etc/swiftopt/keys:ro")
        mounts.append(f"{STREAM.parent}:/streams:ro")
        mounts.append(f"{self.folder / ('cache' if ours else 'data')}:{'/var/cache/swiftopt' if ours else '/data'}")
        if not ours:
            uid = done(*container.words(["id", "--user", entry["user"]], "root", {}, ())).strip()
            os.chown(self.folder / "data", int(uid), -1)
        env = {name: str(value) for name, value in entry.get("environment", {}).items()}
        return Service(entry, container, "10001:10001" if ours else entry["user"], env, tuple(mounts))

    def postgres(self) -> Service:
        """Start PostgreSQL with the password of the secret; Debian's package has not the entry point of the image."""
        entry = {**compose()["postgres"], "user": "postgres"}
        container = Container(entry["image"], self.running, self.log)
        mounts = (
            f"{self.folder / 'hosts'}:/etc/hosts:ro",
            f"{self.folder / 'postgres'}:/var/lib/swiftopt",
            f"{self.folder / 'secrets'}:/run/secrets:ro",
        )
        found = Service(entry, container, "postgres", {}, mounts)
        uid = done(*container.words(["id", "--user", "postgres"], "root", {}, ())).strip()
        os.chown(self.folder / "postgres", int(uid), -1)
        password = f"--pwfile={entry['environment']['POSTGRES_PASSWORD_FILE']}"
        data = "/var/lib/swiftopt/data"
        options = ["--username=swiftopt", "--auth=scram-sha-256", "--encoding=UTF8", "--no-locale", password]
        done(*found.words("initdb", *options, "--pgdata", data))
        settings = ["-c", "dynamic_shared_memory_type=mmap", "-c", "unix_socket_directories="]
        settings += ["-c", "listen_addresses=127.0.0.1"]
        container.start(found.words("postgres", "-D", data, *settings), signal.SIGINT)  # SIGTERM would wait for clients
        until(found.healthy, "PostgreSQL's health check", 60)
        secret = (self.folder / "secrets" / "postgres_password").read_text().strip()
        create = ["createdb", "--host=127.0.0.1", "--username=swiftopt", "swiftopt"]
        done(*found.words(*create, PGPASSWORD=secret))
        return found

    def new_key(self, api: Service) -> str:
        """Make a key as operations.md says, and return it."""
        said = json.loads(done(*api.words("swiftopt", "serve", "--new-key", "laptop", "--json")))
        (self.folder / "keys" / "api_keys").write_text(said["entry"] + "\n")
        return str(said["key"])


def job_to_its_verdict(deployment: Deployment, worker: Service, key: str, report: Report) -> None:
    """Submit a job over HTTP, kill its worker when it has begun, start another, and wait for the verdict."""
    prompts = list(read_stream(str(STREAM)))[-16:]
    request = TuneRequest(f"/models/{MODEL}", "stream", max_new_tokens=48, settings=TuningSettings(context_window=32))
    process = worker.start()
    until(worker.healthy, "the worker's health check", 90)
    report.add("worker: health check", "holds")
    with swiftopt.Client(URL, key) as client:
        job, _ = client.submit(request, prompts)
        until(lambda: client.get(job.id).n_outputs >= 2, f"the first outputs of job {job.id}", 120)
        worker.container.stop(process, signal.SIGKILL)
        worker.start()
        until(lambda: client.get(job.id).is_finished, "the job's end", 600)
        job = client.get(job.id)
        if job.state != "succeeded" or job.attempt < 2 or len(client.outputs(job.id)) != len(prompts):
            raise Failed(f"job {job.id} is {job.state} at attempt {job.attempt}: {job.error}")
        verdicts = ", ".join(record.verdict or "none" for record in job.layer_sets)
        report.add("job over HTTP, its worker killed (kill -9)", f"succeeded at attempt {job.attempt}: {verdicts}")


def kubernetes_server() -> tuple[list[str], dict[str, str], list[str]]:
    """Return the arguments, the variables and the paths of the probes of the server in deploy/kubernetes/base."""
    folder = ROOT / "deploy" / "kubernetes" / "base"
    documents = [each for file in folder.glob("*.yaml") for each in yaml.safe_load_all(file.read_text()) if each]
    [config] = [each["data"] for each in documents if each["kind"] == "ConfigMap"]
    [server] = [
        each for each in documents if each["kind"] == "Deployment" and each["metadata"]["name"].endswith("server")
    ]
    [container] = server["spec"]["template"]["spec"]["containers"]
    args = [str(word).replace("$(MODEL)", f"{config['MODEL']}=/models/{config['MODEL']}") for word in container["args"]]
    env = {**config, **{each["name"]: each["value"] for each in container["env"]}}
    probes = [value["httpGet"]["path"] for name, value in container.items() if name.endswith("Probe")]
    return args, env, probes


def serve_a_model(deployment: Deployment, api: Service, key: str, report: Report) -> None:
    """Run the server of deploy/kubernetes, and ask it what a client asks."""
    args, env, probes = kubernetes_server()
    folder = deployment.folder / "database"
    folder.mkdir()
    (folder / "database_url").write_text("sqlite:////var/cache/swiftopt/served.db\n")
    mounts = (*api.mounts, f"{folder}:/etc/swiftopt/database:ro")
    process = api.container.start(api.container.words(["swiftopt", *args], "10001:10001", env, mounts))
    with httpx2.Client(base_url=URL, headers={"Authorization": f"Bearer {key}"}, timeout=120) as client:

        def answers(path: str) -> bool:
            try:
                return client.get(path).status_code == 200
            except httpx2.TransportError:
                return False

        for path in dict.fromkeys(probes):
            until(lambda path=path: answers(path), f"the probe {path}", 300)
        body = {"model": MODEL, "prompt": "def add(a, b):", "max_tokens": 32, "temperature": 0}
        said = client.post("/v1/completions", json=body).json()
        if said["usage"]["completion_tokens"] == 0 or not said["swiftopt"]["exact"]:
            raise Failed(f"the server with a model answered {said}")
    api.container.stop(process)
    report.add("serve --model, its probes, a completion", f"exact {said['swiftopt']['exact']}")


def equal_and_fast(deployment: Deployment, api: Service, quick: bool, report: Report) -> None:
    """Decode the examples plainly and with drafts, in the image and outside by turns."""
    limit = 4 if quick else 32
    command = ["bench", "decode", "--methods", "plain,adaptive", "--json", "--max-new-tokens", "64"]
    command += ["--limit", str(limit), "--stream"]
    env = {"SWIFTOPT_DATABASE_URL": "sqlite:////tmp/figures.db"}
    words = ["swiftopt", *command, "/streams/stream.jsonl", "--model", f"/models/{MODEL}"]
    inside = api.container.words(words, api.user, env, api.mounts)
    if quick:
        speeds_of(done(*inside))
    else:
        outside = [*PROGRAM, *command, str(STREAM), "--model", str(deployment.folder / "model")]
        here = {**os.environ, "SWIFTOPT_DATABASE_URL": str(deployment.folder / "figures.db")}
        by_turns("CPU image", inside, outside, here, report)
    report.add("drafted = plain in the CPU image", f"{limit} of {limit}")


def healthy_as_built(image: str, service: Service, report: Report) -> None:
    """Run the health check of a Dockerfile beside what it is for."""
    inspected = json.loads(done("buildah", "inspect", "--type", "image", image))
    test = inspected["Docker"]["config"]["Healthcheck"]["Test"]
    until(lambda: subprocess.run(service.words(*test[1:]), capture_output=True).returncode == 0, f"{image}: {test}", 90)
    report.add(f"{image}: health check", "holds")


def run_cpu(image: str, folder: Path, quick: bool, report: Report) -> None:
    with ExitStack() as running:
        deployment = Deployment(folder, running)
        try:
            deployment.postgres()
            valkey = deployment.service("valkey")
            valkey.start()
            until(valkey.healthy, "Valkey's health check", 60)
            report.add("PostgreSQL and Valkey: health checks", "hold")
            migrate, api, worker = (deployment.service(name) for name in ("migrate", "api", "worker"))
            done(*migrate.words("swiftopt", *migrate.entry["command"]))
            report.add("migration", "done")
            key = deployment.new_key(api)
            serving = api.start()
            until(api.healthy, "the API's health check", 90)
            report.add("API: health check", "holds")
            healthy_as_built(image, api, report)
            if compilers := done(
                *api.words("sh", "-c", "for name in gcc g++ cc c++ clang; do command -v $name; done; true")
            ):
                raise Failed(f"{image} holds compilers: {compilers}")
            job_to_its_verdict(deployment, worker, key, report)
            api.container.stop(serving)
            for process in worker.container.processes:
                worker.container.stop(process)
            serve_a_model(deployment, api, key, report)
            equal_and_fast(deployment, api, quick, report)
        except Exception:
            lines = deployment.log.read_text(errors="replace").splitlines()
            print("\n".join([line for line in lines if " 200 " not in line][-60:]), file=sys.stderr)
            raise


def run_api(image: str, folder: Path, report: Report) -> None:
    """Migrate and serve without a model: lookups, a job that waits, and a sentence where a model is asked for."""
    with ExitStack() as running:
        deployment = Deployment(folder, running)
        api = deployment.service("api", image)
        env = {"SWIFTOPT_DATABASE_URL": "sqlite:////var/cache/swiftopt/api.db"}
        api = Service(
            api.entry,
            api.container,
            api.user,
            {**env, "SWIFTOPT_API_KEYS_FILE": "/etc/swiftopt/keys/api_keys"},
            api.mounts,
        )
        done(*api.words("swiftopt", "db", "upgrade"))
        key = deployment.new_key(api)
        api.start()
        until(api.healthy, "the API's health check", 90)
        healthy_as_built(image, api, report)
        with swiftopt.Client(URL, key) as client:
            job, _ = client.submit(TuneRequest(f"/models/{MODEL}", "stream"), list(read_stream(str(STREAM)))[:4])
            if client.get(job.id).state != "queued" or client.layer_sets():
                raise Failed(f"{image}: job {job.id} is {client.get(job.id).state}")
        asked = subprocess.run(api.words("swiftopt", "serve", "--model", MODEL), capture_output=True, text=True)
        if "torch is not installed here" not in asked.stderr:
            raise Failed(f"{image}: serve --model said {asked.stderr}")
        report.add(f"{image}: migration, lookup, a job", "work")


def run_cuda(image: str, folder: Path, report: Report) -> None:
    """Build a launcher as Triton does, in the image, without a GPU; the CPU build of torch here brings no Triton."""
    with ExitStack() as running:
        container = Container(image, running, folder / "log")
        python = "/opt/venv/bin/python"
        if subprocess.run(
            container.words([python, "-c", "import triton"], "root", {}, ()), capture_output=True
        ).returncode:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
            [line] = [line for line in project["optional-dependencies"]["dev"] if line.startswith("triton==")]
            done(sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder, line.partition(";")[0])
            [wheel] = folder.glob("triton-*.whl")
            unpack = [python, "-m", "zipfile", "-e", f"/wheel/{wheel.name}", "/opt/venv/lib/python3.11/site-packages"]
            done(*container.words(unpack, "root", {}, (f"{folder}:/wheel:ro",)))
        done(*container.words([python, "-c", LAUNCHER], "10001:10001", {"HOME": "/tmp"}, ()))
        report.add(f"{image}: a launcher of Triton", "compiles")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["cpu", "api", "cuda"], choices=["cpu", "api", "cuda"])
    parser.add_argument("--quick", action="store_true", help="without the figures of speed")
    parser.add_argument("--built", action="store_true", help="run the images that are here")
    parser.add_argument(
        "--bases", action="store_true", help="make what the images begin with, and run a command in each"
    )
    args = parser.parse_args()
    for port in (5432, 6379, 8000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                sys.exit(f"error: port {port} is taken, and the images need it: end what listens there")
    report = Report()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        work.chmod(0o755)
        mounts = pip_mounts(work)
        bases = {base for kind in args.only for base in bases_of(f"Dockerfile.{kind}")}
        if "cpu" in args.only:
            bases |= {entry["image"] for entry in compose().values() if "build" not in entry}
        with ThreadPoolExecutor() as pool:
            list(pool.map(partial(have_base, report=report), sorted(bases)))
        if args.bases:
            with ExitStack() as running:
                for base in sorted(bases):
                    done(*Container(base, running, work / "log").words(["true"], "10001:10001", {}, ()))
            return
        for kind in args.only:
            image, folder = f"swiftopt:{VERSION}-{kind}", work / kind
            folder.mkdir()
            with report.attempt(image):
                if not args.built:
                    build(kind, mounts, report)
                if kind == "cpu":
                    run_cpu(image, folder, args.quick, report)
                elif kind == "api":
                    run_api(image, folder, report)
                else:
                    run_cuda(image, folder, report)
    report.end()


if __name__ == "__main__":
    main()
