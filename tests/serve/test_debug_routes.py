"""The routes of the flight recorder, the trace and the timeline."""

from __future__ import annotations

import json

import msgspec

from serve.asgi import at_door
from slipstream.record.step_log import StepTimes
from slipstream.transport.client import StepTable
from slipstream.transport.frames import Inspected

STEP = StepTimes(0, 0, 10.0, 0.001, 10.0, 10.01, 0.002, "host_late", 0.0, 3, 3, 0, 3, 3, 1, 50, 60)


def table(next, *steps):
    return msgspec.msgpack.encode(StepTable(["tiny"], next, list(steps)))


def test_a_recording_needs_the_admin_key_and_takes_a_model_and_redact(folder):
    async def scenario(door):
        door.core.inspector = lambda message: Inspected(message.call, b"content")
        assert (await door.get("/debug/record", authorization="Bearer one")).status == 403
        root = [(b"authorization", b"Bearer root")]
        answer = await door.get("/debug/record", authorization="Bearer root")
        assert (answer.status, answer.body) == (200, b"content") and ".slipstream" in answer.headers[
            "content-disposition"
        ]
        answer = await door.begin_raw("GET", "/debug/record", root, b"redact=1&model=tiny", b"").end()
        assert answer.status == 200 and door.core.inspects[-1].redact and door.core.inspects[-1].model == "tiny"
        assert (await door.begin_raw("GET", "/debug/record", root, b"redact=maybe", b"").end()).status == 400
        assert (await door.begin_raw("GET", "/debug/record", root, b"model=none", b"").end()).status == 404
        door.core.inspector = lambda message: Inspected(message.call, b"", "nothing is recorded")
        answer = await door.get("/debug/record", authorization="Bearer root")
        assert answer.status == 400 and "nothing is recorded" in answer.error

    at_door(folder, scenario, api_key=("one",), admin_key="root")


def test_a_trace_covers_the_seconds_that_are_asked_for(folder):
    async def scenario(door):
        door.core.inspector = lambda message: Inspected(
            message.call, table(7) if message.since < 0 else table(8, STEP) if message.since == 7 else b""
        )
        answer = await door.begin_raw("GET", "/debug/trace", [], b"seconds=0.01", b"").end()
        events = answer.json()["traceEvents"]
        assert [e["name"] for e in events if e["ph"] == "X"] == ["launch 0", "decode 3 rows", "idle: the host was late"]
        for wrong in (b"seconds=0", b"seconds=61", b"seconds=nan", b"seconds=x", b"second=1"):
            assert (await door.begin_raw("GET", "/debug/trace", [], wrong, b"").end()).status == 400

    at_door(folder, scenario)


def test_head_of_a_stream_has_its_headers_and_an_end(folder):
    async def scenario(door):
        door.core.inspector = lambda message: Inspected(message.call, table(1))
        answer = await door.begin("HEAD", "/debug/timeline").end()
        assert (answer.status, answer.body) == (200, b"") and "event-stream" in answer.headers["content-type"]

    at_door(folder, scenario)


def test_the_timeline_streams_new_steps_until_the_client_leaves(folder):
    async def scenario(door):
        door.core.inspector = lambda message: Inspected(
            message.call, table(1) if message.since < 0 else table(2, STEP) if message.since == 1 else table(2)
        )
        exchange = door.begin("GET", "/debug/timeline")
        await exchange.until(b"host_late")
        first, second = (json.loads(part.removeprefix("data: ")) for part in exchange.body.decode().split("\n\n")[:2])
        assert first["steps"] == [] and first["models"] == ["tiny"]
        assert dict(zip(second["fields"], second["steps"][0], strict=True)) == msgspec.structs.asdict(STEP)
        exchange.hang_up()
        await exchange.end()
        count = len(door.core.inspects)
        await door.get("/health")
        assert len(door.core.inspects) == count

    at_door(folder, scenario)


def test_the_timeline_ends_when_the_server_drains(folder):
    async def scenario(door):
        door.core.inspector = lambda message: Inspected(message.call, table(0))
        exchange = door.begin("GET", "/debug/timeline")
        await exchange.until(b"data: ")
        door.state.draining = True
        await exchange.end()
        assert exchange.status == 200

    at_door(folder, scenario)
