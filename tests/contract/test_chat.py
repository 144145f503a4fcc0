"""`swiftopt chat` with a server: what it asks for, what it shows, and what becomes of errors and of Ctrl-C."""

from __future__ import annotations

import asyncio
import io
import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import serving
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from swiftopt.cli.main import run

SCRIPT = shutil.which("swiftopt", path=str(Path(sys.executable).parent)) or "swiftopt"
LONG_S = 60.0  # that an answer takes which is to be stopped
DRAFTS = {"num_draft_tokens": 8, "num_accepted_draft_tokens": 6, "num_spec_steps": 3}
CUT = "cut"  # in place of a piece of text: the stream breaks off
WAIT = "wait"  # the next piece takes long


class Answering:
    """A small server with OpenAI's protocol: streams what it was told to say, and keeps what it was asked."""

    def __init__(self, *answers: list[Any], models: dict[str, Any] | None = None, metrics: Any = None) -> None:
        self.models = {"object": "list", "data": [{"id": "tiny"}]} if models is None else models
        self.answers, self.metrics = list(answers), metrics
        self.bodies: list[dict[str, Any]] = []
        self.sessions: list[str | None] = []
        self.app = Starlette(
            routes=[
                Route("/v1/models", lambda request: JSONResponse(self.models)),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ]
        )

    async def chat(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        self.sessions.append(request.headers.get("x-session-id"))
        answer = self.answers.pop(0)
        if isinstance(answer, Response):
            return answer
        return StreamingResponse(self.events(answer), media_type="text/event-stream")

    async def events(self, pieces: list[Any]) -> AsyncIterator[str]:
        yield data({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage": None})
        for piece in pieces:
            if piece == CUT:
                return
            if piece == WAIT:
                await asyncio.sleep(LONG_S)
            elif isinstance(piece, dict):
                yield data(piece)
            else:
                yield data({"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]})
        yield data({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        usage = {"prompt_tokens": 3, "completion_tokens": len(pieces), "total_tokens": 3 + len(pieces)}
        yield data({"choices": [], "usage": usage, **({"metrics": self.metrics} if self.metrics else {})})
        yield "data: [DONE]\n\n"


def data(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


def refused(status: int, message: str, **headers: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "x", "code": status}}, status, headers)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("SWIFTOPT_SERVER_URL", "SWIFTOPT_API_KEY", "SWIFTOPT_MODEL", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pipe(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Let standard input be those lines."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("".join(f"{line}\n" for line in lines).encode())))


def said(*messages: str) -> list[dict[str, str]]:
    """Messages of the user and the assistant by turns."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(messages)]


def test_message_is_asked_and_its_answer_shown(capsys: pytest.CaptureFixture[str]) -> None:
    server = Answering(["Be", "cause", "."])
    with serving(server.app) as url:
        assert run(["chat", "--server", f"{url}/v1/", "--message", "Why?", "--max-new-tokens", "9"]) == 0
    out, err = capsys.readouterr()
    assert out == "Because.\n"
    assert err.startswith("[3 tokens, ") and err.endswith(" tok/s]\n")
    (body,) = server.bodies
    assert (body["model"], body["messages"]) == ("tiny", said("Why?"))
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    assert (body["max_tokens"], body["temperature"]) == (9, 0.0)
    assert not {"return_metrics", "swiftopt", "top_k", "min_p", "logit_bias"} & set(body)  # which others may refuse


def test_our_server_is_asked_for_its_measurements(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {"speculative_decoding": DRAFTS, "tokens_per_second": 12.5}
    models = {"schema": "swiftopt.stored-models/1", "data": [{"id": "a"}, {"id": "b"}]}
    server = Answering(["Yes"], models=models, metrics=metrics)
    options = ["--model", "b", "--task", "notes", "--method", "swift", "--top-k", "3", "--temperature", "0.5"]
    options += ["--min-p", "0.1", "--presence-penalty", "-1", "--logit-bias", "50=-2.5"]
    with serving(server.app) as url:
        assert run(["chat", "--server", url, "--message", "Why?", *options]) == 0
    assert capsys.readouterr().err == "[1 tokens, 12.5 tok/s, α 0.75]\n"
    (body,) = server.bodies
    assert body["model"] == "b" and body["return_metrics"] is True
    assert body["swiftopt"] == {"task": "notes", "method": "swift"}
    assert (body["top_k"], body["temperature"], body["seed"]) == (3, 0.5, 0)
    assert (body["min_p"], body["presence_penalty"], body["logit_bias"]) == (0.1, -1.0, {"50": -2.5})


def test_every_turn_is_sent_with_those_before_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Answering(["one"], ["two"], ["three"], ["four"])
    lines = ["a", "", "/help", " /b ", "/clear", "/system Be brief.", "c", "/system", "d", "/nothing", "/quit", "e"]
    pipe(monkeypatch, *lines)
    with serving(server.app) as url:
        assert run(["chat", "--server", url, "--system", "Be kind."]) == 0
    kind, brief = ({"role": "system", "content": f"Be {word}."} for word in ("kind", "brief"))
    assert [body["messages"] for body in server.bodies] == [
        [kind, *said("a")],
        [kind, *said("a", "one", "/b")],
        [brief, *said("c")],
        said("c", "three", "d"),
    ]
    out, err = capsys.readouterr()
    assert out == "one\ntwo\nthree\nfour\n"
    assert "/system TEXT" in err and "unknown command /nothing" in err
    assert len(set(server.sessions)) == 1 and server.sessions[0]


def test_each_chat_has_a_session_of_its_own() -> None:
    server = Answering(["one"], ["two"])
    with serving(server.app) as url:
        for _ in range(2):
            assert run(["chat", "--server", url, "--message", "a"]) == 0
    assert len(set(server.sessions)) == 2


def test_json_is_one_object_per_answer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    server = Answering(["o", "ne"], ["two"], metrics={"tokens_per_second": 4.0})
    pipe(monkeypatch, "a", "b")
    with serving(server.app) as url:
        assert run(["chat", "--server", url, "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {
        **{"schema": "swiftopt.chat/1", "model": "tiny", "text": "one", "finish_reason": "stop"},
        **{"n_tokens": 2, "tokens_per_second": 4.0, "acceptance_rate": None},
    }
    assert second["text"] == "two"


def test_thought_is_shown_beside_the_answer_and_is_no_part_of_the_chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    thoughts = [
        {"choices": [{"index": 0, "delta": {key: text}, "finish_reason": None}]}
        for key, text in (("reasoning_content", "Let me "), ("reasoning", "think."))
    ]
    for options in ([], ["--json"]):
        server = Answering([*thoughts, "Two"], ["Three"])
        pipe(monkeypatch, "a", "b")
        with serving(server.app) as url:
            assert run(["chat", "--server", url, *options]) == 0
        assert server.bodies[1]["messages"] == said("a", "Two", "b")
        out, err = capsys.readouterr()
        if options:
            assert [json.loads(line).get("reasoning_content") for line in out.splitlines()] == ["Let me think.", None]
        else:
            assert out == "Two\nThree\n" and "Let me think.\n[" in err


def test_server_without_usage_gets_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    last = {"choices": [{"index": 0, "delta": {"content": "."}, "finish_reason": "length"}]}

    async def bare(request: Request) -> Response:
        return StreamingResponse(iter([data(last), "data: [DONE]\n\n"]), media_type="text/event-stream")

    listed = Route("/v1/models", lambda request: JSONResponse({"data": []}))
    with serving(Starlette(routes=[listed, Route("/v1/chat/completions", bare, methods=["POST"])])) as url:
        assert run(["chat", "--server", url, "--message", "a", "--model", "m"]) == 0
    assert capsys.readouterr() == (".\n", "[– tok/s, truncated: raise --max-new-tokens]\n")


def test_busy_server_is_asked_again() -> None:
    server = Answering(
        refused(503, "the engine starts again", **{"Retry-After": "0"}),
        refused(429, "too many wait", **{"Retry-After": "0"}),
        ["one"],
    )
    with serving(server.app) as url:
        assert run(["chat", "--server", url, "--message", "a"]) == 0
    assert [body["messages"] for body in server.bodies] == [said("a")] * 3


@pytest.mark.parametrize(
    ("answer", "code", "shown", "says"),
    [
        (refused(404, "no model 'tiny': nearest is 'tinny'"), 3, "", "nearest is 'tinny'"),
        (refused(400, "the prompt has 9 tokens, the context 8"), 2, "", "9 tokens"),
        (refused(401, "x"), 6, "", "needs an API key: set SWIFTOPT_API_KEY"),
        (Response("<h1>hello</h1>", 404), 6, "", "is not a swiftopt server"),
        (JSONResponse({"choices": []}), 6, "", "does not send events"),
        (["Be", CUT], 6, "Be\n", "was interrupted"),
        (["Be", {"error": {"message": "the engine died", "code": 503}}], 1, "Be\n", "the engine died"),
        ([{"choices": 3}], 1, "", "cannot be read"),
    ],
    ids=["model", "context", "key", "page", "no-stream", "cut", "error-event", "form"],
)
def test_failure_is_one_sentence(
    answer: Any, code: int, shown: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(Answering(answer).app) as url:
        assert run(["chat", "--server", url, "--message", "a"]) == code
    out, err = capsys.readouterr()
    assert out == shown and says in err
    assert err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("models", "options", "code", "says"),
    [
        ({"schema": "swiftopt.stored-models/1", "models": []}, [], 2, "start it with `swiftopt serve --model NAME`"),
        ({"data": [{"id": "a"}, {"id": "b"}]}, [], 2, "choose one with --model (a, b)"),
        ({"data": [{"name": "a"}]}, [], 1, "cannot be read"),
        ({"data": []}, ["--device", "cpu"], 2, "--device is for a model that is loaded here"),
        ({"data": []}, ["--db", "x.db"], 2, "remove --db, or --server"),
    ],
    ids=["no-engine", "several", "form", "device", "db"],
)
def test_chat_does_not_begin_where_it_cannot(
    models: dict[str, Any], options: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(Answering(models=models).app) as url:
        assert run(["chat", "--server", url, "--message", "a", *options]) == code
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        ([], 2, "--model"),
        (
            ["--server", "http://127.0.0.1:9", "--message", " "],
            2,
            "--message: the text is empty: write one, or remove --message",
        ),
        (["--server", "http://127.0.0.1:9", "--task", "a/b", "--message", "x"], 2, "'a/b' is not a valid name"),
        (["--server", "nowhere", "--message", "x"], 2, "is not a URL"),
        (["--model", "smollm-135m", "--message", "x"], 3, "nearest: smollm2-135m"),
        (["--model", "gpt2", "--message", "x", "--method", "swfit"], 2, "swift"),
    ],
    ids=["nobody", "empty", "task", "url", "model", "method"],
)
def test_slip_is_one_sentence(args: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", *args]) == code
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.count("\n") == 1


def test_piped_line_that_is_no_text_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\n\xff\n")))
    with serving(Answering(["one"]).app) as url:
        assert run(["chat", "--server", url]) == 2
    assert "not UTF-8" in capsys.readouterr().err


# --- at a terminal


class Terminal:
    """A terminal in which the program runs, so that Ctrl-C and Ctrl-D reach it as they reach a person's."""

    def __init__(self, master: int) -> None:
        self._master, self.shown = master, ""

    def until(self, text: str, within_s: float = 60.0) -> bool:
        """Wait until the program shows `text` behind what was waited for before; whether it did."""
        deadline = time.monotonic() + within_s
        while text not in self.shown:
            if not select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return False
            self.shown += os.read(self._master, 4096).decode()
        self.shown = self.shown.partition(text)[2]
        return True

    def expect(self, text: str) -> None:
        """Wait until the program shows `text`."""
        assert self.until(text), self.shown

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())


@pytest.fixture
def terminal_of(home: Path) -> Iterator[Any]:
    processes, descriptors = [], []

    def start(*args: str) -> tuple[Terminal, subprocess.Popen[bytes]]:
        master, slave = os.openpty()
        descriptors.extend((master, slave))
        place = shlex.quote(os.ttyname(slave))
        # The first terminal that a session's leader opens becomes the one whose keys send it signals.
        command = f"exec {shlex.join([SCRIPT, *args])} <{place} >{place} 2>&1"
        processes.append(subprocess.Popen(["sh", "-c", command], stdin=subprocess.DEVNULL, start_new_session=True))
        return Terminal(master), processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()
    for descriptor in descriptors:
        os.close(descriptor)


def test_sigterm_ends_a_chat_at_its_prompt(terminal_of: Any) -> None:
    with serving(Answering().app) as url:
        terminal, process = terminal_of("chat", "--server", url)
        terminal.expect("> ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM


def test_ctrl_c_stops_an_answer_and_ctrl_d_ends_the_chat(terminal_of: Any) -> None:
    server = Answering(["begun", WAIT, "never"], refused(400, "too long"), ["two"])
    with serving(server.app) as url:
        terminal, process = terminal_of("chat", "--server", url)
        terminal.expect("Ctrl-D ends the chat")
        terminal.expect("> ")
        terminal.type("a\n")
        terminal.expect("begun")
        terminal.type("\x03")
        terminal.expect("(stopped)")
        terminal.expect("> ")
        terminal.type("\x03")
        while not terminal.until("Ctrl-D or /quit ends the chat", within_s=1.0):
            terminal.type("\x03")  # Python misses one that comes between its prompt and its wait for keys
        terminal.expect("> ")
        terminal.type("b\n")
        terminal.expect("error: too long")
        terminal.expect("> ")
        terminal.type("c\n")
        terminal.expect("two")
        terminal.expect("[1 tokens")
        terminal.expect("> ")
        terminal.type("\x04")
        assert process.wait(30) == 0
    assert [body["messages"] for body in server.bodies] == [
        said("a"),
        said("a", "begun", "b"),  # what was said stays, what was refused does not
        said("a", "begun", "c"),
    ]
