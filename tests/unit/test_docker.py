"""The files under docker/ are checked by reading them, without a container engine."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile_parse import DockerfileParser
from wings import WINGS

import swiftopt

ROOT = Path(swiftopt.__file__).parent
DOCKER = ROOT / "docker"
COMPOSE = ("compose.yaml", "compose.gpu.yaml")
DOCKERFILES = ("Dockerfile.cpu", "Dockerfile.api", "Dockerfile.cuda")
COMPILING = {"Dockerfile.cuda": {"gcc", "-dev"}}  # Triton compiles what starts its kernels
OUR_SERVICES = ("migrate", "api", "worker")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
Instruction = tuple[str, str]


def instructions(name: str) -> list[Instruction]:
    """Return each (instruction, value) in order, without comments and with continued lines joined."""
    parsed = DockerfileParser(fileobj=io.BytesIO((DOCKER / name).read_bytes())).structure
    return [(entry["instruction"], entry["value"]) for entry in parsed if entry["instruction"] != "COMMENT"]


def stages(name: str) -> list[list[Instruction]]:
    """Return the instructions of each stage, its FROM first."""
    found: list[list[Instruction]] = []
    for instruction in instructions(name):
        if instruction[0] == "FROM":
            found.append([])
        found[-1].append(instruction)
    return found


def values(stage: list[Instruction], instruction: str) -> list[str]:
    return [value for name, value in stage if name == instruction]


def pip_installs(text: str) -> list[tuple[str, str]]:
    """Return (constraint file, requirement) of every `pip … install` in the text."""
    found = []
    for line in re.findall(r"pip\b.*? install (.*)", text):
        words = shlex.split(line)
        valued = {word for option in ("--constraint", "--extra-index-url") for word in _after(words, option)}
        plain = [word for word in words if not word.startswith("--") and word not in valued]
        assert len(plain) == 1, line
        found.append((_after(words, "--constraint")[0], plain[0]))
    return found


def _after(words: list[str], option: str) -> list[str]:
    return [words[at + 1] for at, word in enumerate(words) if word == option]


def compose(name: str = "compose.yaml") -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DOCKER / name).read_text(encoding="utf-8"))
    return loaded


def services(name: str = "compose.yaml") -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose(name)["services"]
    return found


def every_service() -> list[Any]:
    return [pytest.param(entry, id=f"{file}:{name}") for file in COMPOSE for name, entry in services(file).items()]


# --- what linters and schemas say


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfile_has_no_lint(name: str) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, DOCKER / name], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_linter_finds_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM python:latest\nCMD python\n", encoding="utf-8")
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, tmp_path / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "DL3007" in done.stdout and "DL3025" in done.stdout


def schema_check(*files: Path) -> int:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    return subprocess.run([*command, *files], capture_output=True, check=False).returncode


def test_compose_files_fit_the_compose_specification() -> None:
    assert schema_check(*(DOCKER / name for name in COMPOSE)) == 0


def test_schema_check_finds_a_mistake(tmp_path: Path) -> None:
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(yaml.safe_dump({"services": {"api": {"image": "x", "healthchek": {}}}}), encoding="utf-8")
    assert schema_check(wrong) == 1


@pytest.mark.parametrize("script", ["swiftopt.sh", "check_install.sh"])
def test_script_parses_and_is_executable(script: str) -> None:
    path = DOCKER / script
    shell = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("#!").split()[-1]
    assert subprocess.run([shell, "-n", path], check=False).returncode == 0 and os.access(path, os.X_OK)


# --- images


@pytest.mark.parametrize("name", DOCKERFILES)
def test_image_is_built_in_two_stages_from_pinned_tags(name: str) -> None:
    bases = [stage[0][1].split()[0] for stage in stages(name)]
    assert len(bases) == 2 and all(re.fullmatch(r"[\w./-]+:\d+\.\d+[\w.-]*", base) for base in bases)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_image_runs_as_a_numbered_user_that_is_not_root(name: str) -> None:
    last = stages(name)[-1]
    assert values(last, "USER") == ["10001:10001"]
    assert "--uid 10001 " in " ".join(values(last, "RUN"))
    after = [instruction for instruction, _ in last[last.index(("USER", "10001:10001")) :]]
    assert not {"RUN", "COPY", "ADD"} & set(after)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_last_stage_has_no_build_tools_and_installs_nothing_by_pip(name: str) -> None:
    text = " ".join(values(stages(name)[-1], "RUN"))
    tools = set(re.findall(r"\bpip|build-essential|\bgcc|\bg\+\+|\bgit\b|-dev\b|\bcurl\b|\bwget\b", text))
    assert tools == COMPILING.get(name, set())


@pytest.mark.parametrize("name", DOCKERFILES)
def test_image_has_entry_point_health_check_and_stop_signal(name: str) -> None:
    last = stages(name)[-1]
    assert json.loads(values(last, "ENTRYPOINT")[0]) == ["swiftopt"]
    assert values(last, "STOPSIGNAL") == ["SIGTERM"] and len(values(last, "HEALTHCHECK")) == 1
    assert json.loads(values(last, "CMD")[0])[0] in ("serve", "worker")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_image_is_labelled_with_this_version_and_base(name: str) -> None:
    last = stages(name)[-1]
    labels = dict(pair.split("=", 1) for pair in shlex.split(" ".join(values(last, "LABEL"))))
    prefix = "org.opencontainers.image."
    assert {f"{prefix}{key}" for key in ("title", "version", "revision", "licenses", "base.name")} <= set(labels)
    assert f"VERSION={PROJECT['project']['version']}" in values(last, "ARG")
    assert labels[f"{prefix}licenses"] == PROJECT["project"]["license"]
    assert labels[f"{prefix}base.name"].endswith("/" + last[0][1])


@pytest.mark.parametrize("name", DOCKERFILES)
def test_copied_files_exist(name: str) -> None:
    copies = [shlex.split(value) for stage in stages(name) for value in values(stage, "COPY")]
    assert copies and not any(values(stage, "ADD") for stage in stages(name))
    sources = [word for words in copies if not any(w.startswith("--from") for w in words) for word in words[:-1]]
    assert [source for source in sources if not source.startswith("--") and not (ROOT / source).exists()] == []


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_image_installs_the_makefiles_packages_without_dev_tools(name: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").split("$(VENV)/.ready:")[-1].split("\n\n")[0]
    ours = pip_installs("\n".join(values(stages(name)[0], "RUN")))
    theirs = [(file, requirement.replace(".[dev]", ".")) for file, requirement in pip_installs(makefile)]
    assert ours == theirs[: len(ours)] == [("constraints.txt", "torch"), ("constraints.txt", ".")]


def test_every_dependency_of_the_image_is_pinned() -> None:
    def plain(name: str) -> str:
        return re.sub(r"[-_.]+", "-", re.split(r"[<>=!\[ ;]", name)[0]).lower()

    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {plain(line) for line in lines if "==" in line}
    assert sorted({plain(line) for line in PROJECT["project"]["dependencies"]} - pinned) == []


def test_api_image_installs_no_dependencies_of_models() -> None:
    lines = (DOCKER / "api.txt").read_text(encoding="utf-8").splitlines()
    named = {line for line in lines if not line.startswith("#")}
    known = {re.split(r"[<>=! ;]", line)[0] for line in PROJECT["project"]["dependencies"]}
    assert named < known and not named & {"torch", "transformers", "scipy", "scikit-learn", "matplotlib"}
    build = " ".join(values(stages("Dockerfile.api")[0], "RUN"))
    assert "--constraint constraints.txt --requirement api.txt" in build and "install --no-deps ." in build


@pytest.mark.wing(*WINGS)
def test_docker_ignore_admits_only_the_package() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    files = {
        "__init__.py",
        "__main__.py",
        "py.typed",
        "pyproject.toml",
        "setup.py",
        "constraints.txt",
        "README.md",
        "LICENSE",
    }
    assert next(line for line in lines if not line.startswith("#")) == "*"
    assert allowed == packages | files | {"docker/swiftopt.sh", "docker/api.txt"}


# --- the program inside


def run_inside(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run swiftopt.sh with a stand-in for the program, which prints its environment and arguments."""
    program = tmp_path / "program"
    program.write_text(
        '#!/bin/sh\nprintf \'%s|%s|%s\' "$PGPASSWORD" "${SWIFTOPT_REDIS_URL-none}" "$*"\n', encoding="utf-8"
    )
    program.chmod(0o755)
    script = (DOCKER / "swiftopt.sh").read_text(encoding="utf-8").replace("/opt/venv/bin/swiftopt", str(program))
    command = ["sh", "-c", script, "swiftopt", "worker", "--queue", "a b"]
    environment = {"PATH": os.environ["PATH"], **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_secret_file_is_read_with_any_content(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("p$(id) 'q\" *\\n\n", encoding="utf-8")
    done = run_inside(tmp_path, PGPASSWORD_FILE=str(tmp_path / "secret"), PGPASSWORD="other")
    assert (done.stdout, done.stderr) == ("p$(id) 'q\" *\\n|none|worker --queue a b", "")


def test_variable_without_a_file_is_unchanged(tmp_path: Path) -> None:
    done = run_inside(tmp_path, PGPASSWORD="x", SWIFTOPT_REDIS_URL="redis://valkey")
    assert done.stdout == "x|redis://valkey|worker --queue a b"


def test_secret_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    done = run_inside(tmp_path, PGPASSWORD_FILE=str(tmp_path / "absent"))
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r"error: PGPASSWORD_FILE names .*absent, which user \d+ cannot read: .*\n", done.stderr)


# --- services


def test_only_the_api_is_published_and_only_on_loopback() -> None:
    published = {name: entry["ports"] for name, entry in services().items() if "ports" in entry}
    assert list(published) == ["api"] and all(port.startswith("127.0.0.1:") for port in published["api"])
    assert not any("ports" in entry or "network_mode" in entry for entry in services("compose.gpu.yaml").values())


def test_databases_are_only_on_the_internal_network() -> None:
    assert compose()["networks"]["backend"] == {"internal": True}
    for name in ("valkey", "postgres", "migrate"):
        assert services()[name]["networks"] == ["backend"]


def test_service_starts_after_its_dependencies_are_healthy() -> None:
    needs = {name: entry.get("depends_on", {}) for name, entry in services().items()}
    for name, wanted in needs.items():
        for other, how in wanted.items():
            if other == "migrate":
                assert how == {"condition": "service_completed_successfully"}, name
            else:
                assert how == {"condition": "service_healthy"} and "test" in services()[other]["healthcheck"], name
    assert set(needs["api"]) == set(needs["worker"]) == {"migrate", "postgres", "valkey"}
    assert set(needs["migrate"]) == {"postgres"}


def test_queue_is_persistent() -> None:
    command = services()["valkey"]["command"]
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert options["--appendonly"] == "yes" and options["--appendfsync"] == "everysec"
    assert options["--maxmemory-policy"] == "noeviction"
    assert "valkey:/data" in services()["valkey"]["volumes"]


def test_declared_volumes_and_secrets_are_those_in_use() -> None:
    mounts = [mount for entry in services().values() for mount in entry.get("volumes", ())]
    named = {mount.split(":")[0] for mount in mounts if mount[0].isalpha()}
    assert named == set(compose()["volumes"]) == {"models", "postgres", "valkey"}
    assert {name for entry in services().values() for name in entry.get("secrets", ())} == set(compose()["secrets"])


def test_folders_of_the_host_are_mounted_read_only() -> None:
    mounts = [mount for entry in services().values() for mount in entry.get("volumes", ()) if mount[0] in "./$"]
    assert len(mounts) == 2 and all(mount.endswith(":ro") for mount in mounts)


def test_no_file_contains_a_secret() -> None:
    texts = {name: (DOCKER / name).read_text(encoding="utf-8") for name in (*COMPOSE, *DOCKERFILES, ".env.example")}
    for name, text in texts.items():
        assert re.findall(r"://[^\s/]*:[^\s/]*@", text) == [], name
        lines = re.findall(r"^\s*-?\s*(\w*(?:PASSWORD|TOKEN|SECRET|API_KEY)\w*)\s*[:=]", text, re.MULTILINE)
        assert [line for line in lines if not line.endswith(("_FILE", "_DIR"))] == [], name
    assert all(secret["file"].startswith("${SWIFTOPT_SECRETS_DIR") for secret in compose()["secrets"].values())


def test_local_secrets_are_excluded_from_git_and_images() -> None:
    ignored = (DOCKER / ".gitignore").read_text(encoding="utf-8").split()
    assert {"/.env", "/keys/", "/secrets/"} <= set(ignored)


@pytest.mark.parametrize("name", OUR_SERVICES)
def test_containers_are_hardened(name: str) -> None:
    entry = services()[name]
    assert entry["read_only"] is True and entry["cap_drop"] == ["ALL"] and entry["init"] is True
    assert entry["security_opt"] == ["no-new-privileges:true"] and "privileged" not in entry


@pytest.mark.parametrize("entry", every_service())
def test_service_builds_an_image_or_pulls_a_pinned_tag(entry: dict[str, Any]) -> None:
    if "build" in entry:
        assert (DOCKER / entry["build"]["context"]).resolve() == ROOT
        assert (ROOT / entry["build"]["dockerfile"]).is_file()
        version = PROJECT["project"]["version"]
        kind = entry["build"]["dockerfile"].rpartition(".")[2]
        assert entry["image"] == f"swiftopt:${{SWIFTOPT_VERSION:-{version}}}-{kind}"
    else:
        assert re.fullmatch(r"[\w./-]+:\d[\w.-]*", entry["image"])


def test_worker_has_time_to_return_its_job_and_is_restarted() -> None:
    worker = services()["worker"]
    assert worker["stop_grace_period"] == "2m" and worker["restart"] == "unless-stopped"
    assert worker["healthcheck"]["test"] == ["CMD", "swiftopt", "worker", "--check"]


def test_health_check_of_the_api_is_readyz() -> None:
    assert "/readyz" in " ".join(services()["api"]["healthcheck"]["test"])
    assert services()["api"]["environment"]["SWIFTOPT_API_KEYS_FILE"].startswith("/etc/swiftopt/keys/")


def test_each_worker_has_its_own_gpu() -> None:
    gpus = []
    for name, entry in services("compose.gpu.yaml").items():
        (device,) = entry["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"] and len(device["device_ids"]) == 1
        assert "cuda:0" in entry["command"] and entry["build"]["dockerfile"] == "docker/Dockerfile.cuda"
        assert name == "worker" or entry["extends"] == {"file": "compose.yaml", "service": "worker"}
        gpus += device["device_ids"]
    assert gpus == sorted(set(gpus)) and len(gpus) >= 2


def test_env_example_lists_every_variable_with_its_default() -> None:
    text = "".join((DOCKER / name).read_text(encoding="utf-8") for name in COMPOSE)
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))
    lines = (DOCKER / ".env.example").read_text(encoding="utf-8").splitlines()
    told = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    assert told == used and re.findall(r"\$\{\w+\}|\$[A-Z]", text) == []
