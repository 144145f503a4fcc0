"""What all tests share: own folders, real servers, and GPU tests left out in a sentence where there is no GPU.

`SWIFTOPT_TEST_REDIS_URL` and `SWIFTOPT_TEST_DATABASE_URL` name servers to use instead of those that the tests start.
The one's logical database is emptied; on the other, databases of our own are created and dropped.
"""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from hypothesis import settings
from servers import KeptDatabase, Postgres, Valkey, flush, new_database, server_folder
from wings import is_here, needs_missing

from swiftopt.models.kernels import build

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are read: a CPU runs them, slowly
settings.register_profile("any machine", deadline=None)  # a busy one must not fail a test
settings.load_profile("any machine")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background job; its programs would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Containers set it, and every program that a test starts would compile all of swiftopt again, for a second or two.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["SWIFTOPT_MEASURING"] = (
    "together"  # its processes share the cores: to wait for a quiet moment takes for ever
)
gc.disable()  # until all modules and tests are there, which stay: to walk them again and again takes seconds


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Tests of wings that were left out are not collected."""
    return True if collection_path.suffix == ".py" and needs_missing(collection_path) else None


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` run where a CUDA device is, those marked `model` or `wing` where that model or wing is."""
    for item in items:
        if item.get_closest_marker("model") and isinstance(item, pytest.Function):
            item.fixturenames.insert(0, "smollm2")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="this machine has no CUDA device, which the test needs"))
        wings_needed = (name for mark in item.iter_markers("wing") for name in mark.args)
        if missing := [name for name in wings_needed if not is_here(name)]:
            item.add_marker(pytest.mark.skip(reason=f"the test needs wings that are not here: {', '.join(missing)}"))


@pytest.fixture(scope="session", autouse=True)
def rows_apart() -> None:
    """Let Triton's interpreter multiply row by row, as a GPU does: BLAS may round a row by its place."""
    if torch.cuda.is_available() or find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    class Library:
        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        def matmul(self, a: Any, b: Any, **how: Any) -> Any:
            rows = (a[..., row : row + 1, :] for row in range(a.shape[-2]))
            return np.concatenate([np.matmul(row, b, **how) for row in rows], axis=-2)

    interpreter.np = Library()


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter, whose time is that of its operations, read a split of attention's slots at once."""
    from swiftopt.models.kernels import device_attention

    if not torch.cuda.is_available():
        monkeypatch.setattr(device_attention, "READ_SLOTS", device_attention.SPLIT)


@pytest.fixture(scope="module")
def rough_costs() -> Iterator[None]:
    """Time each pass once, and none of hundreds of rows, for tests of what does not depend on it."""
    from swiftopt.models import costs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "BUDGET_S", 0.0)
        patch.setattr(costs, "REPEATS", (1, 1))
        patch.setattr(costs, "MOST_ROWS", costs.WIDTHS[-1])
        yield


@pytest.fixture(scope="session")
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This process's stand-in for the user's data folder."""
    return tmp_path_factory.mktemp("swiftopt")


@pytest.fixture(scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test run's stand-in for the user's cache folder, which all of its processes share.

    It has the user's compiled kernels: no test that starts a program should wait for a compiler.
    """
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    copied = shared / "cache" / "kernels"
    with one_at_a_time(shared):
        kernels = build.kernels()
        if not isinstance(kernels, str) and kernels.path.is_file() and not copied.exists():
            shutil.copytree(kernels.path.parent, copied)
    return shared / "cache"


@pytest.fixture
def new_cache(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, with nothing but the compiled kernels in it."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "kernels").symlink_to(own_cache / "kernels")
    monkeypatch.setenv("SWIFTOPT_CACHE_DIR", str(cache))
    return cache


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Keep the run's other processes out."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def smollm2(own_cache: Path, away_from_the_users_folders: None) -> None:
    """SmolLM2-135M, converted by the first process that wants it."""
    from swiftopt.models.loading import load

    with one_at_a_time(own_cache.parent):
        load("smollm2-135m", speed="eager")


@pytest.fixture(scope="session", autouse=True)
def away_from_the_users_folders(own_folders: Path, own_cache: Path) -> Iterator[None]:
    """Send cache and database to temporary folders, keep the hub out of it, and forget the user's servers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWIFTOPT_CACHE_DIR", str(own_cache))
        patch.setenv("SWIFTOPT_DATABASE_URL", f"sqlite:///{own_folders / 'swiftopt.db'}")
        patch.setenv("XDG_DATA_HOME", str(own_folders / "data"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.delenv("SWIFTOPT_REDIS_URL", raising=False)
        patch.delenv("SWIFTOPT_SERVER_URL", raising=False)
        yield


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[Valkey]:
    """The session's own Valkey, always from the wheel; what stops it starts it again."""
    with server_folder() as folder, Valkey(folder) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    """The session's own PostgreSQL cluster, always from the wheel; what stops it starts it again."""
    with server_folder() as folder, Postgres(folder) as server:
        yield server


@pytest.fixture
def redis_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty logical database of a Redis."""
    url = os.environ.get("SWIFTOPT_TEST_REDIS_URL")
    process = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if url is None:
        server: Valkey = request.getfixturevalue("valkey_server")
        server.start()
        url = server.url
    elif process:
        url = urlsplit(url)._replace(path=f"/{process}").geturl()  # test processes share the server, not its data
    flush(url)
    yield url


@pytest.fixture(scope="session")
def schema_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite database at the newest schema, to be copied: to make one takes a hundred times as long."""
    from swiftopt.store import Store

    file = tmp_path_factory.mktemp("schema") / "newest.db"
    Store.open(str(file)).close()
    return file


@pytest.fixture(scope="session")
def kept_database(request: pytest.FixtureRequest) -> Iterator[KeptDatabase]:
    """A PostgreSQL database at the newest schema, which tests get one after the other."""
    with KeptDatabase(postgres_admin(request)) as database:
        yield database


def postgres_admin(request: pytest.FixtureRequest) -> str:
    """The URL under which databases are created, on a server that runs."""
    given = os.environ.get("SWIFTOPT_TEST_DATABASE_URL")
    if given is not None:
        return given
    server: Postgres = request.getfixturevalue("postgres_server")
    server.start()
    return server.url


@pytest.fixture
def postgres_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty PostgreSQL database of the test's own."""
    with new_database(postgres_admin(request)) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind; the SQLite file's folder does not exist yet."""
    from swiftopt.store import as_url

    if request.param == "sqlite":
        return as_url(str(tmp_path / "folder that is not there yet" / "swift opt?.db"))
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture
def sqlite_url(schema_file: Path, tmp_path: Path) -> str:
    """A SQLite database with the newest schema and no rows."""
    from swiftopt.store import as_url

    return as_url(str(shutil.copy(schema_file, tmp_path / "swift opt?.db")))


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    """A database of each kind with the newest schema and no rows."""
    if request.param == "sqlite":
        url: str = request.getfixturevalue("sqlite_url")
        return url
    postgres_admin(request)  # a test may have left the server stopped
    database: KeptDatabase = request.getfixturevalue("kept_database")
    return database.emptied()
