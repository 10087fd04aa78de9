"""An engine in a thread that never runs ahead of the event loop which reads its results."""

from __future__ import annotations

import asyncio
from typing import Any

from patience import PATIENCE
from slipstream import AsyncEngine


def keep_pace(engine: AsyncEngine) -> None:
    """Each step of the core waits for a turn of the running event loop.

    Without it the core finishes a short request while the reader's thread is not scheduled; a test that aborts, pauses
    or counts a running request needs the machine to be quick.
    """
    loop, lanes = asyncio.get_running_loop(), engine.client.core
    step = lanes.step

    def step_after_a_turn() -> list[Any]:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(PATIENCE)
        return step()

    lanes.step = step_after_a_turn
