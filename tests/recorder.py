"""A proxy before a server, which passes on what clients and server say, and keeps it."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

HOP = ("connection", "transfer-encoding", "keep-alive", "content-length", "host")  # Headers of one connection alone.


@dataclass
class Exchange:
    """A request and its answer: `body` as JSON, null where it is none."""

    method: str
    path: str
    body: Any
    status: int = 0
    ignored: str = ""
    text: str = ""

    @property
    def n_tools(self) -> int:
        """Tools that the client offers."""
        return len((self.body or {}).get("tools") or ())

    @property
    def n_results(self) -> int:
        """Results of tools that the client sends back."""
        body = self.body or {}
        messages, items = body.get("messages") or (), body.get("input")
        results = [message for message in messages if message.get("role") == "tool"]
        outputs = (
            [item for item in items if str(item.get("type")).endswith("call_output")]
            if items and isinstance(items, list)
            else []
        )
        return len(results) + len(outputs)

    @property
    def has_calls(self) -> bool:
        """Whether the answer calls a tool."""
        return '"tool_calls"' in self.text or '_call"' in self.text

    @property
    def is_ended(self) -> bool:
        """Whether a stream had its last event; true for an answer that is none."""
        if not (self.body or {}).get("stream") or self.status != 200:
            return True
        return any(
            end in self.text for end in ("data: [DONE]", "event: response.completed", "event: response.incomplete")
        )


@dataclass
class Recording:
    """The address of a proxy, and what went through it."""

    url: str
    exchanges: list[Exchange] = field(default_factory=list)


@contextmanager
def recording(target: str, defaults: Mapping[str, Any] | None = None) -> Iterator[Recording]:
    """Run a proxy before the server at `target` on a free port; `defaults` are fields of bodies that name none."""
    address = urlsplit(target).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            content = self.rfile.read(int(self.headers.get("content-length") or 0))
            try:
                body = json.loads(content)
            except ValueError:
                body = None
            if defaults and isinstance(body, dict):
                content = json.dumps(body := {**defaults, **body}).encode()
            exchange = Exchange(self.command, self.path, body)
            found.exchanges.append(exchange)
            upstream = http.client.HTTPConnection(address, timeout=3600)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP}
            upstream.request(self.command, self.path, content or None, headers)
            answer = upstream.getresponse()
            exchange.status, exchange.ignored = answer.status, answer.headers.get("x-swiftopt-ignored", "")
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                if name.lower() not in HOP:
                    self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            self.close_connection = True
            try:
                while part := answer.read1(65536):
                    exchange.text += part.decode(errors="replace")
                    self.wfile.write(part)
                    self.wfile.flush()
            except OSError:  # The client has gone away; the server sees that, too.
                pass
            finally:
                upstream.close()

        do_GET = do_POST = do_HEAD = do_DELETE = pass_on

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found = Recording(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
