"""The server of fuzz tests: all routes over a scripted core with a model that generates and one that pools."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripted_core import EVERY_TASK, ScriptedCore, facts
from serve.asgi import Door, add_batch_store
from slipstream.serve.http.server.app import App
from slipstream.serve.http.server.settings import ServerSettings
from slipstream.serve.http.server.state import State
from slipstream.serve.http.table import all_routes
from tiny_tokenizer import write_byte_tokenizer


@contextmanager
def fuzzed_door(
    runner: asyncio.Runner, folder: Path, settings: ServerSettings | None = None, **model: Any
) -> Iterator[Door]:
    """`model`: facts of the model that generates. At the end no request may be left."""
    write_byte_tokenizer(folder)

    async def open_door() -> Door:
        engine, core = await ScriptedCore.open(facts(folder, **model), facts(folder, "pool", pooling=EVERY_TASK))
        return Door(App(State(settings or ServerSettings(), engine), all_routes()), core)

    door = runner.run(open_door())
    add_batch_store(door, folder)
    yield door
    load = door.state.engine.load
    assert (load.num_open, load.num_queued, load.queued_tokens) == (0, 0, 0)
    runner.run(door.state.engine.close())
