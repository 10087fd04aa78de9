"""GET /metrics."""

from __future__ import annotations

from slipstream.serve.http.call import Call
from slipstream.serve.http.reply import Reply
from slipstream.serve.http.routes import get


async def metrics(call: Call, body: None) -> Reply:
    text, kind = call.state.report.text(call.header(b"accept") or "")
    return Reply(text, content_type=kind.encode())


ROUTES = [get("/metrics", metrics, "Counts and times, for Prometheus", quiet=True)]
