"""`swiftopt-client`: the wheel of the client alone, with nothing beside it but what it names, asks a real server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from api import filled, serving
from packaging.requirements import Requirement

import swiftopt

ROOT = Path(swiftopt.__file__).parent
PROJECT = ROOT / "deploy" / "client"
# Lets a process import the wheel's modules, Python's own, and those of the distributions that are named. Without its
# site, for what is installed here for development would be found by a file of that.
ONLY = """
import importlib.metadata, sys
wheel, allowed, url = sys.argv[1], set(sys.argv[2].split(",")), sys.argv[3]
sys.path.append(sys.argv[4])
owners = importlib.metadata.packages_distributions()
class Only:
    def find_spec(self, name, *_):
        top = name.partition(".")[0]
        names = {each.lower().replace("_", "-") for each in owners.get(top, ())}
        is_known = top in (*sys.stdlib_module_names, "swiftopt") or top.startswith("_sysconfigdata")
        if not is_known and not names & allowed:
            raise ModuleNotFoundError(f"{name} is none of {sorted(allowed)}", name=name)
sys.meta_path.insert(0, Only())
sys.path.insert(0, wheel)
"""
ASK = """
import json
import swiftopt
assert swiftopt.__file__.startswith(wheel), swiftopt.__file__
with swiftopt.Client(url) as client:
    found = client.lookup([{"model": "org/tiny", "task": "notes"}])[0]
    [record] = client.layer_sets("org/tiny")
    request = swiftopt.TuneRequest("org/tiny", "s", settings=swiftopt.TuningSettings(context_window=8))
    job, _ = client.submit(request, [swiftopt.Prompt("1", "notes", "Once upon a time")])
    print(json.dumps([found.plan.verdict, record.task, client.get(job.id).state]))
try:
    swiftopt.Store
except ImportError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's files."""
    folder = tmp_path_factory.mktemp("client")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=PROJECT, check=True, capture_output=True)
    [file] = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder / "files")
    return folder / "files"


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(names: list[str]) -> set[str]:
    """Return distributions with all that they require here."""
    found, waiting = set[str](), [plain(Requirement(name).name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            needed = [Requirement(line) for line in requires(name) or ()]
        except PackageNotFoundError:
            continue
        found.add(name)
        waiting += [plain(each.name) for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def dependencies() -> list[str]:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named: list[str] = project["dependencies"]
    return named


def test_client_alone_can_use_a_server(wheel: Path, tmp_path: Path) -> None:
    database = str(tmp_path / "a.db")
    filled(database).close()
    allowed = ",".join(sorted(closure(dependencies())))
    with serving(database, tmp_path / "log") as served:
        packages = sysconfig.get_path("purelib")
        command = [sys.executable, "-S", "-c", ONLY + ASK, str(wheel), allowed, served.url, packages]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said, missing = done.stdout.splitlines()
    assert json.loads(said) == ["use", "notes", "queued"]
    assert missing == "swiftopt.Store is not in swiftopt-client: pip install swiftopt, which has it"


def test_client_has_its_modules_and_no_others(wheel: Path) -> None:
    [file] = wheel.parent.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        names = [name for name in archive.namelist() if name.startswith("swiftopt/")]
    assert {name.split("/")[1] for name in names} == {"__init__.py", "py.typed", "core", "client"}
    assert all(name.endswith((".py", "py.typed")) for name in names)


def test_client_is_of_this_version_and_its_dependencies_are_those_of_the_whole() -> None:
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(dependencies()) <= set(whole["dependencies"])
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == whole["version"] == swiftopt.__version__ == version("swiftopt")
