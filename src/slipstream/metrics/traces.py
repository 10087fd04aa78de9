"""Traces: one OpenTelemetry span per request. Its packages are an extra, and are imported only when tracing is on."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from typing import Any

from slipstream.base.errors import InvalidOption

_EXPORTER = "opentelemetry.exporter.otlp.proto.http"


def check_tracing(endpoint: str) -> None:
    """Raises an error if traces cannot be sent."""
    if not endpoint.startswith(("http://", "https://")):
        raise InvalidOption(f"otlp_traces_endpoint is {endpoint!r}; give a URL like http://localhost:4318/v1/traces")
    try:
        found = importlib.util.find_spec(_EXPORTER) and importlib.util.find_spec("opentelemetry.sdk")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise InvalidOption("otlp_traces_endpoint needs packages that are missing; run: pip install 'slipstream[otel]'")


class Traces:
    """Passes spans to a thread that sends them, so that no request waits."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("slipstream")
        self._parents = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str) -> Traces:
        check_tracing(endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider = TracerProvider(resource=Resource.create({"service.name": "slipstream"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider)

    def record(
        self, name: str, seconds: float, attributes: Mapping[str, Any], carrier: Mapping[str, str], *, failed: bool
    ) -> None:
        """Record a span that ends now. `carrier` may hold the caller's W3C traceparent header."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        end = time.time_ns()
        span = self._tracer.start_span(
            name,
            context=self._parents.extract(carrier),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=end - int(seconds * 1e9),
        )
        if failed:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end)

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()
