"""OpenTelemetry traces of requests to models, if `OTEL_*` variables ask for them and its packages are installed.

FastAPI makes the span of an HTTP request, a child of the caller's `traceparent`. Its child is the span of the request
to the model, which has three spans per choice: the wait for a place, the prefill and the decoding. Their times come
from the figures that the engine's process returns; that process does no tracing.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, cast

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, TracerProvider, set_span_in_context

from .. import __version__
from ..core import logs
from ..core.errors import SwiftoptError
from .choices import Choice

# One of these must be set. OTEL_SDK_DISABLED=true or OTEL_TRACES_EXPORTER=none switch traces off.
SWITCHES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_EXPORTER")
EXPORTERS = {  # Protocol -> module of its exporter.
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}
DEFAULT_PROTOCOL = "http/protobuf"

logger = logging.getLogger(__name__)


def provider_from_environment() -> TracerProvider | None:
    """Return a provider that exports spans as the `OTEL_*` variables say.

    None: they ask for no traces, or for an exporter that is unknown or not installed. The SDK itself reads
    OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER and the variables of the exporter.
    """
    variables = os.environ
    switch = next((name for name in SWITCHES if variables.get(name)), None)
    exporter = variables.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower()
    if switch is None or variables.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none":
        return None
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((variables[name] for name in names if variables.get(name)), DEFAULT_PROTOCOL)
    if exporter != "otlp" or protocol not in EXPORTERS:
        value = protocol if exporter == "otlp" else exporter
        logger.warning("tracing=off reason='%s is not supported: use otlp with %s'", value, " or ".join(EXPORTERS))
        return None
    try:
        sdk, export = import_module("opentelemetry.sdk.trace"), import_module("opentelemetry.sdk.trace.export")
        span_exporter = import_module(EXPORTERS[protocol]).OTLPSpanExporter()
        resource = import_module("opentelemetry.sdk.resources").Resource.create(_service())
    except ImportError as error:
        reason = f"{switch} is set, but {error.name} is not installed: pip install 'swiftopt[otel]', or unset it"
        logger.warning("tracing=off reason=%r", reason)
        return None
    provider = sdk.TracerProvider(resource=resource)
    provider.add_span_processor(export.BatchSpanProcessor(span_exporter))
    logger.info("tracing=on protocol=%s", protocol)
    return cast(TracerProvider, provider)


def shut_down(provider: TracerProvider) -> None:
    """Export the remaining spans, within the exporter's time limit (OTEL_EXPORTER_OTLP_TIMEOUT)."""
    cast(Any, provider).shutdown()


def _service() -> dict[str, str]:
    """Return the service's attributes. A name from the environment is left out, because this one would replace it."""
    is_named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return {"service.version": __version__, **({} if is_named else {"service.name": "swiftopt"})}


@contextmanager
def request_span(
    provider: TracerProvider | None, operation: str, model: str, choices: Sequence[Choice]
) -> Iterator[None]:
    """Trace the block as a request to a model; `choices` are read when it ends."""
    if provider is None:
        yield
        return
    tracer = provider.get_tracer("swiftopt", __version__)
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "swiftopt",
        "gen_ai.request.model": model,
        "swiftopt.request_id": logs.request_id.get(),
    }
    span = tracer.start_span(f"{operation} {model}", kind=SpanKind.INTERNAL, attributes=attributes)
    try:
        yield
    except SwiftoptError as error:
        span.set_attribute("error.type", type(error).__name__)
        span.set_status(Status(StatusCode.ERROR, str(error)))
        raise
    finally:
        span.set_attribute("gen_ai.usage.input_tokens", sum(choice.n_prompt for choice in choices))
        span.set_attribute("gen_ai.usage.output_tokens", sum(choice.n_tokens for choice in choices))
        done_choices = [choice for choice in choices if choice.done is not None]
        span.set_attribute("gen_ai.response.finish_reasons", [choice.finish_reason for choice in done_choices])
        for choice in done_choices:
            _add_choice(tracer, span, choice)
        span.end()


def _add_choice(tracer: Tracer, parent: Span, choice: Choice) -> None:
    """Add the three consecutive spans of a finished choice."""
    done, completion = choice.done, choice.completion
    assert done is not None
    prefill_s = completion.prefill_s or 0.0
    read = {"swiftopt.prompt_tokens": completion.n_prompt_tokens, "swiftopt.cached_tokens": completion.n_cached}
    decoded: dict[str, Any] = {
        "swiftopt.task": done.task,
        "swiftopt.method": done.decoded_with,
        "swiftopt.plan_version": done.version,
        "swiftopt.why_plain": done.why_plain and done.why_plain.reason,
        "swiftopt.tokens": completion.n_tokens,
        "swiftopt.target_passes": completion.target_passes,
        "swiftopt.drafted_tokens": completion.drafted,
        "swiftopt.accepted_tokens": completion.accepted,
    }
    parts: tuple[tuple[str, float, Mapping[str, Any]], ...] = (
        ("queue", done.queued_s, {}),
        ("prefill", prefill_s, read),
        ("decode", completion.timings.total_s - prefill_s, decoded),
    )
    start_ns = time.time_ns() - int(1e9 * choice.waited_s)
    for name, seconds, attributes in parts:
        end_ns = start_ns + int(1e9 * max(0.0, seconds))
        all_attributes = {"swiftopt.choice": choice.index, **attributes}
        span = tracer.start_span(
            name,
            context=set_span_in_context(parent),
            attributes={key: value for key, value in all_attributes.items() if value is not None},
            start_time=start_ns,
        )
        span.end(end_ns)
        start_ns = end_ns
