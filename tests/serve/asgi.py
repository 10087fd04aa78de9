"""Calls an ASGI app without a server, with disconnects at any time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from patience import PATIENCE
from scripted_core import ScriptedCore, facts
from slipstream.serve.http.server.app import App
from slipstream.serve.http.server.batch_store import BatchService
from slipstream.serve.http.server.error_formats import TeiErrorBody
from slipstream.serve.http.server.errors import ErrorBody
from slipstream.serve.http.server.request import Route
from slipstream.serve.http.server.settings import ServerSettings
from slipstream.serve.http.server.state import State
from slipstream.serve.http.table import all_routes


class Exchange:
    """One request and what came of it."""

    def __init__(
        self,
        app: App,
        method: str,
        path: str,
        body: bytes | tuple[bytes, ...],
        headers: list[tuple[bytes, bytes]],
        query: bytes = b"",
        client: tuple[str, int] | None = None,
    ) -> None:
        """A tuple is a body that comes in parts."""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        *parts, last = body if isinstance(body, tuple) else (body,)
        for part in parts:
            self._inbox.put_nowait({"type": "http.request", "body": part, "more_body": True})
        self._inbox.put_nowait({"type": "http.request", "body": last, "more_body": False})
        self.got = asyncio.Event()
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query,
            "headers": headers,
            "client": client,
        }
        self.task = asyncio.ensure_future(app(scope, self._inbox.get, self._send))

    def hang_up(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    async def until(self, text: bytes) -> None:
        while text not in self.body:
            self.got.clear()
            await asyncio.wait_for(self.got.wait(), PATIENCE)

    async def end(self) -> Exchange:
        await asyncio.wait_for(self.task, PATIENCE)
        return self

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        return self.json()["error"]["message"]

    def events(self) -> list[Any]:
        parts = self.body.decode().split("\n\n")
        assert parts.pop() == "" and all(part.startswith("data: ") for part in parts)
        assert parts.pop() == "data: [DONE]"
        return [json.loads(part.removeprefix("data: ")) for part in parts]

    def parsed(self) -> Any:
        """The JSON of the answer: a list of objects of a stream, by its content type."""
        kind = self.headers["content-type"].partition(";")[0]
        lines = self.body.decode().splitlines()
        if kind == "application/x-ndjson":
            return [json.loads(line) for line in lines]
        if kind == "text/event-stream":
            data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
            return [json.loads(text) for text in data if text != "[DONE]"]
        return self.json()

    @property
    def said(self) -> str:
        """The text of an error in any API's format."""
        answer = self.json()
        error = answer.get("error", answer)
        return error if isinstance(error, str) else error["message"]

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            assert not self.status, "answered twice"
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message["body"]
        self.got.set()


def check_error(exchange: Exchange, route: Route) -> None:
    """The error has the format of the route's API, or TEI's where the request has its words."""
    said = exchange.json()
    kind = TeiErrorBody if "error_type" in said else route.error_model or ErrorBody
    msgspec.json.decode(exchange.body, type=kind)
    assert set(said) == set(kind.__struct_fields__), said
    if kind is ErrorBody:
        assert set(said["error"]) == {"message", "type", "param", "code"}


class Door:
    """A server's app over a scripted core."""

    def __init__(self, app: App, core: ScriptedCore) -> None:
        self.app = app
        self.core = core
        self.state = app.state
        self.client: tuple[str, int] | None = None  # the connection that requests come by

    def begin(self, method: str, path: str, body: Any = None, **headers: str) -> Exchange:
        data = body if isinstance(body, bytes | tuple) else b"" if body is None else json.dumps(body).encode()
        known = {} if body is None else {"content-type": "application/json"}
        known |= {name.replace("_", "-"): value for name, value in headers.items()}
        pairs = [(name.lower().encode(), value.encode()) for name, value in known.items()]
        return Exchange(self.app, method, path, data, pairs, client=self.client)

    def begin_raw(
        self, method: str, path: str, headers: list[tuple[bytes, bytes]], query: bytes, body: bytes
    ) -> Exchange:
        return Exchange(self.app, method, path, body, headers, query)

    def pass_time(self, seconds: float) -> None:
        """The clock of the event loop jumps: deadlines within `seconds` pass at once, however slow the machine is."""
        loop = asyncio.get_running_loop()
        now = loop.time
        loop.time = lambda: now() + seconds  # type: ignore[method-assign]

    async def get(self, path: str, **headers: str) -> Exchange:
        return await self.begin("GET", path, **headers).end()

    async def post(self, path: str, body: Any, **headers: str) -> Exchange:
        return await self.begin("POST", path, body, **headers).end()


def add_batch_store(door: Door, folder: Path) -> None:
    """Gives the server a store of files and batches, in which `file-sample` is an input file."""
    service = BatchService(ServerSettings(batch_dir=str(folder / "store")))
    service.store.add_file(service.store.owner(b""), "in.jsonl", "batch", b"{}", 3600)
    state = "CAST(replace(state, id, 'file-sample') AS BLOB)"
    service.store._db.execute(f"UPDATE files SET id = 'file-sample', state = {state}")
    door.state.batches = service


def at_door(
    folder: Path,
    scenario: Callable[[Door], Awaitable[Any]],
    *,
    ready: bool = True,
    answers: bool = True,
    model: Mapping[str, Any] = {},
    **settings: Any,
) -> Any:
    """Runs a scenario against a fresh server. When it is over, nothing may be under way. `model`: facts of its own."""

    async def main() -> Any:
        known = facts(folder, **({"max_waiting": 100} | model))
        engine, core = await ScriptedCore.open(known, ready=ready, answers=answers)
        door = Door(App(State(ServerSettings(**settings), engine), all_routes()), core)
        try:
            result = await asyncio.wait_for(scenario(door), PATIENCE)
            assert (engine.load.num_open, engine.load.num_queued, engine.load.queued_tokens) == (0, 0, 0)
            return result
        finally:
            await engine.close()

    return asyncio.run(main())
