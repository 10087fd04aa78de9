"""A front end's commands to the core: sleep, wake up, and weights from files."""

from __future__ import annotations

from typing import Any, Literal

from slipstream.frontend.router import RequestRouter
from slipstream.transport.frames import Control, Controlled


async def control(
    router: RequestRouter, action: Literal["sleep", "wake_up", "update_weights", "ask"], **more: Any
) -> bool:
    """Sends a `Control` message. Returns whether the engine is asleep afterwards; raises the core's error."""
    answer: Controlled = await router.call(lambda call: Control(call, action, **more))
    if answer.refused is not None:
        raise answer.refused.error()
    return answer.is_asleep
