"""Agents and clients that no one here wrote, each from its package, against a real server: `make clients`.

    python agents.py [--model qwen2.5-coder-1.5b.gguf] [--only codex,litellm] [--record FOLDER]

Each is installed once, at the version named here, into an environment of its own under the user's cache, and runs one
small task to its end. A small model may fail at the task; what must hold is the protocol: no request is refused, every
stream has its end, tools that are offered can be called, their results are read, and errors have the forms that the
client knows. A proxy before the server keeps what was said; `--record` writes it into a folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from api import serving, until_ready
from conformance import environment, npm_environment
from recorder import Exchange, recording

CLIENTS_FOLDER = Path(__file__).parent / "clients"
MODEL = "coder"  # Name under which the model is served.
TASK_S = 3600  # Seconds after which a task is ended: agents send prompts of 10,000 tokens.
FILE = "greet.py"
BUGGY = 'def greet(name):\n    return "Hello " + nam\n'
ASK = f"{FILE} has a bug: the variable is misspelt. Read the file, fix it, and say in one sentence what you changed."
# After Codex's long instructions a small model writes JSON that is a call only where the call is simple.
ASK_TO_READ = f"Read {FILE} with exec_command and tell me what it does."
SAMPLING = {
    "temperature": 0
}  # Of requests that name no temperature: a small model's calls are then the same each time.

Environ = Mapping[str, str]


@dataclass(frozen=True)
class Place:
    """Where a client runs: the server's address, a folder with a file to work on, and a home of its own."""

    url: str
    work: Path
    home: Path


@dataclass(frozen=True)
class Client:
    """A client: its packages at their versions, how it is started, and what its task is.

    `calls`: the task forces a call of a tool, so that there has to be one, and a result that was sent back. `refused`:
    statuses of errors that the task provokes.
    """

    packages: tuple[str, ...]
    command: Callable[[Place, Path], tuple[Sequence[object], Environ]]
    task: str
    is_npm: bool = False
    calls: bool = False
    refused: tuple[int, ...] = ()


@dataclass
class Outcome:
    """What came of a client: `wrong` is empty where the protocol held."""

    client: str
    version: str
    seconds: float = 0.0
    requests: int = 0
    tools: int = 0
    calls: int = 0
    results: int = 0
    wrong: list[str] = field(default_factory=list)


def script(name: str) -> Callable[[Place, Path], tuple[Sequence[object], Environ]]:
    """Return how a script of the folder clients/ is run by Python, or by node from beside its packages."""

    def command(place: Place, folder: Path) -> tuple[Sequence[object], Environ]:
        source = CLIENTS_FOLDER / name
        if name.endswith(".py"):
            return (folder / "python", source, place.url, MODEL), {}
        copied = folder / name
        copied.write_text(source.read_text())
        return ("node", copied, place.url, MODEL), {}

    return command


def codex(place: Place, folder: Path) -> tuple[Sequence[object], Environ]:
    (place.home / ".codex").mkdir(parents=True)
    (place.home / ".codex" / "config.toml").write_text(
        f'model = "{MODEL}"\nmodel_provider = "local"\nmodel_context_window = 32768\nweb_search = "disabled"\n\n'
        f'[model_providers.local]\nname = "local"\nbase_url = "{place.url}/v1"\nwire_api = "responses"\n'
        "stream_idle_timeout_ms = 3600000\nrequest_max_retries = 0\nstream_max_retries = 0\n"
    )
    program = folder / "node_modules" / ".bin" / "codex"
    options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    return (program, "exec", *options, ASK_TO_READ), {"CODEX_HOME": str(place.home / ".codex")}


def opencode(place: Place, folder: Path) -> tuple[Sequence[object], Environ]:
    model = {"name": MODEL, "limit": {"context": 32768, "output": 512}, "tool_call": True}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{place.url}/v1", "apiKey": "none", "timeout": TASK_S * 1000},
        "models": {MODEL: model},
    }
    config = {"provider": {"local": provider}, "model": f"local/{MODEL}", "small_model": f"local/{MODEL}"}
    (place.work / "opencode.json").write_text(json.dumps({**config, "share": "disabled", "autoupdate": False}))
    return (folder / "node_modules" / ".bin" / "opencode", "run", "--print-logs", "--model", f"local/{MODEL}", ASK), {}


def qwen_code(place: Place, folder: Path) -> tuple[Sequence[object], Environ]:
    environ = {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{place.url}/v1", "OPENAI_MODEL": MODEL}
    (place.home / ".qwen").mkdir(parents=True)
    settings = {
        "security": {"auth": {"selectedType": "openai"}},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"disableAutoUpdate": True},
        "model": {
            "maxSessionTurns": 4,
            # Its own default, 32,000 tokens of an answer, is more than the context has beside its prompt.
            "generationConfig": {"timeout": TASK_S * 1000, "maxRetries": 0, "samplingParams": {"max_tokens": 512}},
        },
    }
    (place.home / ".qwen" / "settings.json").write_text(json.dumps(settings))
    return (folder / "node_modules" / ".bin" / "qwen", "--yolo", "--prompt", ASK), environ


def aider(place: Place, folder: Path) -> tuple[Sequence[object], Environ]:
    options = (
        *("--model", f"openai/{MODEL}", "--openai-api-base", f"{place.url}/v1", "--openai-api-key", "none"),
        *(
            "--yes-always",
            "--no-git",
            "--no-auto-lint",
            "--no-analytics",
            "--no-check-update",
            "--no-show-release-notes",
        ),
        *("--no-show-model-warnings", "--no-detect-urls", "--edit-format", "whole", "--map-tokens", "0"),
        *("--no-suggest-shell-commands", "--timeout", TASK_S),
    )
    return (folder / "aider", *options, "--message", ASK, FILE), {}


CLIENTS = {
    "codex": Client(
        ("@openai/codex@0.171.0",),
        codex,
        'reads a file by a command; `wire_api = "responses"`',
        is_npm=True,
        calls=True,
    ),
    "opencode": Client(("opencode-ai@1.18.33",), opencode, "repairs a file", is_npm=True),
    "qwen-code": Client(("@qwen-code/qwen-code@0.24.4",), qwen_code, "repairs a file", is_npm=True),
    "aider": Client(("aider-chat==0.86.2",), aider, "repairs a file"),
    "pydantic-ai": Client(
        ("pydantic-ai-slim[openai]==2.68.0",),
        script("pydantic_ai_task.py"),
        "a tool and an answer of nested models, by a tool and by a schema; chat and Responses",
        calls=True,
    ),
    "instructor": Client(
        ("instructor==1.17.0",), script("instructor_task.py"), "nested models by tools, schemas and Responses"
    ),
    "litellm": Client(
        ("litellm==1.110.2",),
        script("litellm_task.py"),
        "a tool and its result, a stream, Responses, and the errors of its fallbacks",
        calls=True,
        refused=(400, 404),
    ),
    "langchain": Client(
        ("langchain-openai==1.7.4",),
        script("langchain_task.py"),
        "a tool and its result, a nested model, a stream; chat and Responses",
        calls=True,
    ),
    "openai-agents": Client(
        ("openai-agents==0.24.0",),
        script("openai_agents_task.py"),
        "an agent with a tool, whole and as a stream; chat and Responses",
        calls=True,
    ),
    "smolagents": Client(
        ("smolagents[openai]==1.26.0",),
        script("smolagents_task.py"),
        "an agent that calls tools, and one that writes code",
    ),
    "ai": Client(
        ("ai@7.0.173", "@ai-sdk/openai@4.0.118", "zod@4.6.7"),
        script("ai.mjs"),
        "a tool and its result, a stream, an object by a schema, an error; chat and Responses",
        is_npm=True,
        calls=True,
        refused=(404,),
    ),
}


def run_client(name: str, client: Client, target: str, where: Path) -> tuple[Outcome, list[Exchange]]:
    """Run a client's task; return what came of it, and what was said."""
    versions = re.sub(r"[^\w.]+", "-", "-".join(client.packages)).strip("-")
    folder = (npm_environment if client.is_npm else environment)(versions, *client.packages)
    place = Place("", where / "work", where / "home")
    place.work.mkdir(parents=True)
    place.home.mkdir()
    (place.work / FILE).write_text(BUGGY)
    outcome = Outcome(name, ", ".join(client.packages))
    with recording(target, SAMPLING) as found:
        command, environ = client.command(Place(found.url, place.work, place.home), folder)
        begun = time.monotonic()
        try:
            done = subprocess.run(
                [str(word) for word in command],
                cwd=place.work,
                env={
                    **os.environ,
                    "HOME": str(place.home),
                    "PWD": str(place.work),
                    "OPENAI_API_KEY": "none",
                    **environ,
                },
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TASK_S,
                check=False,
            )
            (where / "out").write_text(done.stdout + done.stderr)
            if done.returncode:
                outcome.wrong.append(f"it ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-600:]}")
        except subprocess.TimeoutExpired:
            outcome.wrong.append(f"it did not end within {TASK_S} s")
        outcome.seconds = round(time.monotonic() - begun, 1)
    asked = [exchange for exchange in found.exchanges if exchange.method == "POST"]
    outcome.requests, outcome.tools = len(asked), max((exchange.n_tools for exchange in asked), default=0)
    outcome.calls = sum(exchange.has_calls for exchange in asked if exchange.status == 200)
    outcome.results = max((exchange.n_results for exchange in asked), default=0)
    outcome.wrong += [
        f"{exchange.path} was answered {exchange.status}: {exchange.text[:300]}"
        for exchange in asked
        if exchange.status not in (200, *client.refused)
    ]
    outcome.wrong += [f"a stream of {exchange.path} has no end" for exchange in asked if not exchange.is_ended]
    if not asked:
        outcome.wrong.append("it asked for nothing")
    if client.calls and not (outcome.calls and outcome.results):
        outcome.wrong.append("no tool was called, or no result was sent back")
    return outcome, found.exchanges


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as a table in Markdown."""
    lines = ["| client | packages | what was run | requests | tools | calls | s | protocol |", "|" + "---|" * 8]
    for own in outcomes:
        held = "held" if not own.wrong else f"{len(own.wrong)} faults"
        figures = f"{own.requests} | {own.tools} | {own.calls} | {own.seconds:.0f}"
        lines.append(f"| {own.client} | {own.version} | {CLIENTS[own.client].task} | {figures} | {held} |")
    return "\n".join(lines)


def main() -> None:
    """Run the clients; exits with 1 where the protocol did not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b", help="what `swiftopt serve` takes")
    parser.add_argument("--only", default=",".join(CLIENTS))
    parser.add_argument("--record", type=Path, help="folder for what was said, by client")
    args = parser.parse_args()
    outcomes = []
    with tempfile.TemporaryDirectory() as temporary:
        where = Path(temporary)
        options = ("--model", f"{MODEL}={args.model}", "--rate", "0", "--timeout", str(TASK_S))
        with serving(str(where / "a.db"), where / "log", *options) as served:
            until_ready(served)
            for name in args.only.split(","):
                outcome, exchanges = run_client(name, CLIENTS[name], served.url, where / name)
                outcomes.append(outcome)
                print(
                    f"{name}: {outcome.seconds} s, {outcome.requests} requests, {outcome.wrong or 'held'}", flush=True
                )
                if args.record:
                    args.record.mkdir(parents=True, exist_ok=True)
                    said = [asdict(exchange) for exchange in exchanges]
                    (args.record / f"{name}.json").write_text(json.dumps(said, indent=1, ensure_ascii=False))
                    (args.record / f"{name}.out").write_text((where / name / "out").read_text())
    print(table(outcomes))
    for line in (f"{own.client}: {line}" for own in outcomes for line in own.wrong):
        print(line, file=sys.stderr)
    sys.exit(any(own.wrong for own in outcomes))


if __name__ == "__main__":
    main()
