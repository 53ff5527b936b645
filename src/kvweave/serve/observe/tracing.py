"""OpenTelemetry by its standard variables, where a process has configured nothing itself.

OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318     spans go there, over HTTP
OTEL_TRACES_EXPORTER=console                          to stdout, to try it
OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, …        as OpenTelemetry has them
"""

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvweave.app.weave import Answer
from kvweave.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
EXPORTER = "OTEL_TRACES_EXPORTER"
OFF = "OTEL_SDK_DISABLED"
MISSING = "the variables ask for OpenTelemetry, and {} is missing; run: pip install 'kvweave[otel]'"


def wanted_exporter(env: Mapping[str, str]) -> str | None:
    """Which exporter the variables ask for: otlp or console; None: none. Raises ConfigError."""
    if env.get(OFF, "").strip().lower() == "true":
        return None
    name = env.get(EXPORTER, "").strip().lower()
    if not name:
        return "otlp" if any(env.get(each) for each in ENDPOINTS) else None
    if name == "none":
        return None
    if name not in ("otlp", "console"):
        raise ConfigError(f"{EXPORTER}={name} is not supported; use otlp, console or none")
    return name


def configure_tracing() -> None:
    """Have spans go where the variables say. Does nothing where they say nothing, or where a
    provider is there already. Raises ConfigError where a package is missing."""
    name = wanted_exporter(os.environ)
    if name is None:
        return
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import (
            BatchSpanProcessor,
            ConsoleSpanExporter,
            SpanExporter,
        )
    except ImportError as error:
        raise ConfigError(MISSING.format("opentelemetry-sdk")) from error
    if isinstance(trace.get_tracer_provider(), TracerProvider):
        return
    exporter: SpanExporter
    if name == "console":
        exporter = ConsoleSpanExporter()
    else:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            package = "opentelemetry-exporter-otlp-proto-http"
            raise ConfigError(MISSING.format(package)) from error
        exporter = OTLPSpanExporter()
    # what OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say goes before
    own = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "kvweave"}
    provider = TracerProvider(resource=Resource.create(own))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


def find_tracer() -> "Tracer | None":
    """The tracer of the process, None where OpenTelemetry is not configured."""
    try:
        from opentelemetry import trace
    except ImportError:
        return None
    provider = trace.get_tracer_provider()
    is_real = hasattr(provider, "add_span_processor")  # the API's own placeholders have none
    return provider.get_tracer("kvweave") if is_real else None


class Spans:
    """ASGI middleware: one span per request."""

    def __init__(self, app: ASGIApp, tracer: "Tracer") -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, Status, StatusCode

        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        name = f"{scope['method']} {scope['path']}"
        with self._tracer.start_as_current_span(
            name, context=extract(headers), kind=SpanKind.SERVER
        ) as span:

            async def sending(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(Status(StatusCode.ERROR))
                await send(message)

            span.set_attribute("http.request.method", scope["method"])
            span.set_attribute("url.path", scope["path"])
            await self._app(scope, receive, sending)
            route = getattr(scope.get("route"), "path", None)
            if route is not None:
                span.update_name(f"{scope['method']} {route}")
                span.set_attribute("http.route", route)


class AnswerSpans:
    """Tells the stages of an answer once it is finished. From any thread."""

    def __init__(self, tracer: "Tracer") -> None:
        self._tracer = tracer

    def tell(self, answer: Answer, queue_s: float) -> None:
        """Below the current span, which is the request's: workers run in its context."""
        end_ns = time.time_ns()
        begin_ns = end_ns - int(answer.total_ms * 1e6)
        with self._tracer.start_as_current_span(
            "answer", start_time=begin_ns - int(queue_s * 1e9), end_on_exit=False
        ) as span:
            span.set_attribute("gen_ai.usage.input_tokens", answer.prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", answer.completion_tokens)
            span.set_attribute("kvweave.queue_ms", queue_s * 1e3)
            if answer.explain is not None:
                span.set_attribute("kvweave.strategy", answer.explain.strategy)
                for source, count in answer.explain.counts.items():
                    span.set_attribute(f"kvweave.tokens.{source}", count)
            at_ns = begin_ns
            for name, ms in _stages(answer):
                self._tracer.start_span(name, start_time=at_ns).end(at_ns + int(ms * 1e6))
                at_ns += int(ms * 1e6)
            span.end(end_ns)


def _stages(answer: Answer) -> list[tuple[str, float]]:
    """Name and milliseconds, in the order in which they happen."""
    record = answer.explain
    stages = [] if record is None or not record.chunks else [
        ("retrieve", record.stages.retrieve),
        ("load", record.stages.load),
        ("select", record.stages.select),
    ]  # fmt: skip
    before = sum(ms for _, ms in stages)
    stages.append(("prefill", max(0.0, answer.ttft_ms - before)))
    stages.append(("decode", max(0.0, answer.total_ms - answer.ttft_ms)))
    return stages
