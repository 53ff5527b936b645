"""OpenTelemetry by its standard variables, where a process has configured nothing itself.

OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318     spans go there, over HTTP
OTEL_TRACES_EXPORTER=console                          to stdout, to try it
OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, …        as OpenTelemetry has them
"""

import os
from collections.abc import Mapping

from kvweave.errors import ConfigError

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
