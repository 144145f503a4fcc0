"""OpenTelemetry traces: spans of a request, its prefill and its decoding, where packages and variables want them."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
from api import filled
from api import serving as process_of
from serving import serving, until_ready
from tiny_files import save

from swiftopt.core.requests import ServedModel
from swiftopt.server import tracing
from swiftopt.server.app import create_app
from swiftopt.server.engines import Engines
from swiftopt.server.settings import ServerSettings
from swiftopt.server.tracing import EXPORTERS, provider_from_environment
from swiftopt.worker.queue import JobService

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*tracing.SWITCHES, "OTEL_SDK_DISABLED", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def exporter() -> Any:
    return pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()


@pytest.fixture(scope="module")
def url(exporter: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose spans end up in memory."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    model = ServedModel("tiny", str(folder), "float32", db=None, tune=False)
    with filled(str(tmp_path_factory.mktemp("traced") / "a.db")) as store:
        app = create_app(
            store,
            JobService(store, None),
            ServerSettings(requests_per_min=0),
            engines=Engines([model], 8),
            traces=provider,
        )
        with serving(app) as url:
            until_ready(url)
            yield url
    provider.shutdown()


def spans_of(exporter: Any, names: int) -> dict[str, list[Any]]:
    """The spans so far by name, once there are so many of them."""
    until = time.monotonic() + 30
    while len(found := exporter.get_finished_spans()) < names and time.monotonic() < until:
        time.sleep(0.01)
    by_name: dict[str, list[Any]] = {}
    for span in found:
        by_name.setdefault(span.name, []).append(span)
    return by_name


@pytest.mark.parametrize("stream", [False, True])
def test_request_has_spans_of_its_parts_below_the_callers(url: str, exporter: Any, stream: bool) -> None:
    exporter.clear()
    asked = {"model": "tiny", "prompt": "w3 w5 w3", "max_tokens": 6, "ignore_eos": True, "n": 2, "stream": stream}
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "X-Request-ID": "mine"}
    answer = httpx2.post(f"{url}/v1/completions", json=asked, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    spans = spans_of(exporter, 8)
    assert {name: len(found) for name, found in spans.items()} == {
        **{"POST /v1/completions": 1, "text_completion tiny": 1, "queue": 2, "prefill": 2, "decode": 2}
    }
    (http,), (request,) = spans["POST /v1/completions"], spans["text_completion tiny"]
    assert f"{http.context.trace_id:032x}" == TRACE and f"{http.parent.span_id:016x}" == CALLER
    assert request.parent.span_id == http.context.span_id and request.status.is_unset
    assert request.attributes["swiftopt.request_id"] == "mine"
    assert request.attributes["gen_ai.usage.output_tokens"] == 12
    assert request.attributes["gen_ai.response.finish_reasons"] == ("length", "length")
    for queue, prefill, decode in zip(spans["queue"], spans["prefill"], spans["decode"], strict=True):
        assert {span.parent.span_id for span in (queue, prefill, decode)} == {request.context.span_id}
        assert {f"{span.context.trace_id:032x}" for span in (queue, prefill, decode)} == {TRACE}
        assert queue.end_time == prefill.start_time and prefill.end_time == decode.start_time
        assert prefill.start_time < prefill.end_time and decode.start_time < decode.end_time
        assert http.start_time <= queue.start_time and decode.end_time <= request.end_time + 1e9
        assert prefill.attributes["swiftopt.prompt_tokens"] == 3
        assert decode.attributes["swiftopt.tokens"] == 6 and decode.attributes["swiftopt.method"] == "plain"
    assert sorted(span.attributes["swiftopt.choice"] for span in spans["decode"]) == [0, 1]


def test_refused_request_is_an_error_and_polls_have_no_span(url: str, exporter: Any) -> None:
    exporter.clear()
    for path in ("/livez", "/health", "/metrics"):
        assert httpx2.get(url + path).status_code == 200
    said = [{"role": "user", "content": "w3 " * 5000}]
    chat = {"model": "tiny", "messages": said}
    assert httpx2.post(f"{url}/v1/chat/completions", json=chat, timeout=120).status_code == 400
    spans = spans_of(exporter, 2)
    assert set(spans) == {"POST /v1/chat/completions", "chat tiny"}
    (request,) = spans["chat tiny"]
    assert not request.status.is_ok and not request.status.is_unset
    assert request.attributes["error.type"] and request.attributes["gen_ai.usage.output_tokens"] == 0


def test_nothing_is_imported_unless_a_variable_enables_traces(no_variables: None) -> None:
    program = (
        "import sys\nfrom swiftopt.server import app\n"
        "assert app.provider_from_environment() is None and app.bare_app() is not None\n"
        "made = 'opentelemetry.sdk.trace.export', 'opentelemetry.exporter'\n"  # redis-py imports the rest of the SDK
        "sys.exit(any(name.startswith(made) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({ENDPOINT: "http://a", "OTEL_SDK_DISABLED": "true"}, ""),
        ({ENDPOINT: "http://a", "OTEL_TRACES_EXPORTER": "none"}, ""),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "zipkin is not supported: use otlp with http/protobuf or grpc"),
        ({ENDPOINT: "http://a", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "http/json is not supported"),
    ],
)
def test_unsupported_variables_of_traces_are_obeyed_or_named(
    variables: dict[str, str],
    said: str,
    no_variables: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING):
        assert provider_from_environment() is None
    assert said in caplog.text and bool(said) == bool(caplog.text)


@pytest.mark.parametrize("missing", ["opentelemetry.sdk", EXPORTERS["http/protobuf"].removesuffix(".trace_exporter")])
def test_missing_packages_are_named_in_a_sentence(
    missing: str, no_variables: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if "exporter" in missing:
        pytest.importorskip("opentelemetry.sdk")
    monkeypatch.setenv(ENDPOINT, "http://collector:4318")
    monkeypatch.setitem(sys.modules, missing, None)
    for name in [name for name in sys.modules if name.startswith(f"{missing}.")]:
        monkeypatch.delitem(sys.modules, name)
    with caplog.at_level(logging.WARNING):
        assert provider_from_environment() is None
    assert f"{ENDPOINT} is set, but {missing}" in caplog.text and "pip install 'swiftopt[otel]'" in caplog.text


@pytest.mark.slow
def test_spans_reach_a_collector_before_the_server_ends(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}"
        options = ["--model", f"tiny={folder}", "--dtype", "float32", "--no-tune", "--threads", "1"]
        variables = {ENDPOINT: endpoint, "OTEL_BSP_SCHEDULE_DELAY": "3600000"}
        with process_of(str(tmp_path / "a.db"), tmp_path / "log", *options, **variables) as served:
            asked = {"model": "tiny", "prompt": "w3", "max_tokens": 2}
            assert served.client.post("/v1/completions", json=asked, timeout=120).status_code == 200
            assert bodies == [], "they are exported in batches"
        collector.shutdown()
    exported = [messages.ExportTraceServiceRequest.FromString(body) for body in bodies]
    resources = [found for each in exported for found in each.resource_spans]
    names = [span.name for found in resources for scope in found.scope_spans for span in scope.spans]
    assert {"POST /v1/completions", "text_completion tiny", "prefill", "decode"} <= set(names)
    told = {key.key: key.value.string_value for found in resources for key in found.resource.attributes}
    assert told["service.name"] == "swiftopt"
    assert "tracing=on" in (tmp_path / "log").read_text()
