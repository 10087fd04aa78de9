"""A server over a scripted core that answers with texts of the test, for clients of other chat APIs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from patience import PATIENCE
from scripted_core import EVERY_TASK, ScriptedCore, facts
from serve.asgi import Door
from serve.test_http_server import served
from slipstream.contracts.messages import Output
from slipstream.contracts.request import FinishReason
from slipstream.params.sampling import SamplingParams
from slipstream.serve.http.server.app import App
from slipstream.serve.http.server.settings import ServerSettings
from slipstream.serve.http.server.state import State
from slipstream.serve.http.table import all_routes
from slipstream.transport.frames import ToCore

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
THOUGHT = "<think>It is late.</think>"


class TextCore(ScriptedCore):
    """Answers each prompt with the next of `texts`, a few tokens at a time, and ends with stop."""

    texts: list[str]
    prompts: list[str]

    def take(self, message: ToCore) -> None:
        submit = getattr(message, "submits", [message])[0]
        if not isinstance(getattr(submit, "params", None), SamplingParams):
            super().take(message)
            return
        self.submits.append(submit)
        self.prompts.append(bytes(i for i in submit.prompt_token_ids if i < 256).decode())
        most = submit.params.max_tokens
        ids = list((self.texts.pop(0) if self.texts else "All is well.").encode())
        end = FinishReason.STOP if most is None or len(ids) <= most else FinishReason.LENGTH
        ids = ids[:most]
        loop = asyncio.get_running_loop()
        for start in range(0, len(ids), 5):
            output = Output(submit.request_id, 0, ids[start : start + 5], None, end if start + 5 >= len(ids) else None)
            loop.call_later(start / 5000, self.say, output)  # apart, so that a stream has several parts


def with_server(folder: Path, scenario: Callable[[Door, str], Awaitable[Any]], **settings: Any) -> Any:
    """Runs a scenario with a door and the address of a real port before it."""

    async def main() -> Any:
        models = facts(folder, max_model_len=4096), facts(folder, "pool", pooling=EVERY_TASK, max_model_len=4096)
        engine, core = await TextCore.open(*models)
        assert isinstance(core, TextCore)
        core.texts, core.prompts = [], []
        door = Door(App(State(ServerSettings(**settings), engine), all_routes()), core)
        try:
            async with served(door) as port:
                return await asyncio.wait_for(scenario(door, f"http://127.0.0.1:{port}"), PATIENCE)
        finally:
            await engine.close()

    return asyncio.run(main())
