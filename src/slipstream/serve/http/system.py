"""Routes about the server itself: is it alive, can it serve, how busy is it."""

from __future__ import annotations

import msgspec

import slipstream
from slipstream.metrics.stats import FrontEnds
from slipstream.serve.http.call import Call
from slipstream.serve.http.reply import Reply, json_reply
from slipstream.serve.http.routes import get


class Health(msgspec.Struct):
    status: str  # ok, degraded while front ends are missing, or what is wrong
    stage: str | None = None  # of the start, while it lasts
    front_ends: FrontEnds | msgspec.UnsetType = msgspec.UNSET  # where there are several


class Load(msgspec.Struct):
    server_load: int  # requests under way, over all front ends; vLLM's name
    queued_requests: int
    queued_tokens: int
    running: int  # in the engine
    waiting: int
    free_pages: int
    pages: int
    steps: int


class Version(msgspec.Struct):
    version: str


async def health(call: Call, body: None) -> Reply:
    """Alive: the process, the engine core, and steps that go on while there is work. A start that goes well counts."""
    state = call.state
    if state.engine.failure is not None:
        return json_reply(Health("the engine has ended"), 503)
    if state.stalled is not None:
        return json_reply(Health(state.stalled), 503)
    stage = None if state.engine.is_ready else state.engine.stage
    front_ends = state.report.front_ends()
    if front_ends is None:
        return json_reply(Health("ok", stage))
    is_whole = front_ends.running == front_ends.wanted
    return json_reply(Health("ok" if is_whole else "degraded", stage, front_ends))


async def ready(call: Call, body: None) -> Reply:
    """Whether requests are taken now."""
    state = call.state
    if state.engine.failure is not None or state.stalled is not None:
        return await health(call, body)
    if state.draining:
        return json_reply(Health("draining"), 503)
    if not state.engine.is_ready:
        return json_reply(Health("starting", state.engine.stage), 503)
    return json_reply(Health("ok"))


async def load(call: Call, body: None) -> Reply:
    front, lanes = call.state.report.read()
    return json_reply(
        Load(
            server_load=front.open_requests,
            queued_requests=front.queued_requests,
            queued_tokens=front.queued_tokens,
            running=sum(lane.num_running for lane in lanes),
            waiting=sum(lane.num_waiting for lane in lanes),
            free_pages=sum(lane.num_free_pages for lane in lanes),
            pages=sum(lane.num_pages for lane in lanes),
            steps=sum(lane.num_steps for lane in lanes),
        )
    )


async def version(call: Call, body: None) -> Reply:
    return json_reply(Version(slipstream.__version__))


ROUTES = [
    get("/health", health, "Is the server alive", answer=Health, access="open", any_host=True, quiet=True),
    get("/ready", ready, "Can it serve", answer=Health, access="open", any_host=True, quiet=True),
    get("/load", load, "What is under way", answer=Load),
    get("/version", version, "The version", answer=Version),
]
