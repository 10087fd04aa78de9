import http.server
import threading

import pytest

from patience import PATIENCE
from slipstream.base.errors import InvalidOption
from slipstream.metrics import stats as module
from slipstream.metrics.stats import Traces, check_tracing

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")


def test_spans_carry_their_times_attributes_and_parents():
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    seen = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(seen))
    traces = Traces(provider)
    parent = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    traces.record("chat m", 1.5, {"gen_ai.usage.input_tokens": 3}, parent, failed=False)
    traces.record("chat m", 0.5, {}, {}, failed=True)
    good, bad = seen.get_finished_spans()
    assert good.end_time - good.start_time == 1_500_000_000 and good.attributes["gen_ai.usage.input_tokens"] == 3
    assert format(good.context.trace_id, "032x") == "0af7651916cd43dd8448eb211c80319c" and good.status.is_ok
    assert bad.parent is None and not bad.status.is_ok


def test_they_arrive_over_http_by_the_time_it_is_closed():
    got = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        traces = Traces.to(f"http://127.0.0.1:{server.server_port}/v1/traces")
        traces.record("chat tiny", 0.1, {"gen_ai.response.model": "tiny"}, {}, failed=False)
        traces.close()
        server.shutdown()
    assert got and got[0][0] == "/v1/traces" and b"chat tiny" in got[0][1] and b"gen_ai.response.model" in got[0][1]


def test_an_endpoint_that_does_not_answer_does_not_hold_the_end(monkeypatch, caplog):
    """The SDK waits 30 s for it."""
    from opentelemetry.sdk.trace import TracerProvider

    monkeypatch.setattr(module, "_CLOSE_SECONDS", 0.01)
    answers, ended = threading.Event(), threading.Event()

    class Hanging(TracerProvider):
        def shutdown(self):
            assert answers.wait(PATIENCE)
            ended.set()

    traces = Traces(Hanging(shutdown_on_exit=False))
    traces.close()
    assert not ended.is_set() and "the last traces are lost" in caplog.text
    answers.set()
    assert ended.wait(PATIENCE)


def test_what_is_missing_is_said_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setattr(module, "_EXPORTER", "opentelemetry_that_is_not_there.exporter")
    with pytest.raises(InvalidOption, match=r"slipstream\[otel\]"):
        check_tracing("http://localhost:4318")
    with pytest.raises(InvalidOption, match="give a URL"):
        check_tracing("localhost:4318")
