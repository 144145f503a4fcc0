"""What all tests share: own folders, real servers, and GPU tests left out in a sentence where there is no GPU.

`SWIFTOPT_TEST_REDIS_URL` and `SWIFTOPT_TEST_DATABASE_URL` name servers to use instead of those that the tests start.
The one's logical database is emptied; on the other, databases of our own are created and dropped.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from hypothesis import settings
from servers import Postgres, Valkey, flush, new_database, server_folder

from swiftopt.models.kernels import build

settings.register_profile("any machine", deadline=None)  # a busy one must not fail a test
settings.load_profile("any machine")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background job; its programs would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` run where a CUDA device is."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="this machine has no CUDA device, which the test needs"))


@pytest.fixture(scope="session")
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The session's stand-in for the user's cache and data folders."""
    return tmp_path_factory.mktemp("swiftopt")


@pytest.fixture(scope="session", autouse=True)
def away_from_the_users_folders(own_folders: Path) -> Iterator[None]:
    """Send cache and database to a temporary folder, keep the hub out of it, and forget the user's servers.

    Compiled kernels go along: no test that starts a program should wait for a compiler.
    """
    kernels = build.kernels()
    if not isinstance(kernels, str) and kernels.path.is_file():
        shutil.copytree(kernels.path.parent, own_folders / "cache" / "kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWIFTOPT_CACHE_DIR", str(own_folders / "cache"))
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


@pytest.fixture
def postgres_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty PostgreSQL database of the test's own."""
    admin_url = os.environ.get("SWIFTOPT_TEST_DATABASE_URL")
    if admin_url is None:
        server: Postgres = request.getfixturevalue("postgres_server")
        server.start()
        admin_url = server.url
    with new_database(admin_url) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind; the SQLite file's folder does not exist yet."""
    from swiftopt.store import as_url

    if request.param == "sqlite":
        return as_url(str(tmp_path / "folder that is not there yet" / "swift opt?.db"))
    url: str = request.getfixturevalue("postgres_url")
    return url
