"""A front end's questions to the core: a recording of the last steps, and times of steps."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from slipstream.base.errors import UserError
from slipstream.frontend.router import RequestRouter
from slipstream.transport.frames import Inspect, Inspected
from slipstream.transport.inspection import StepTable

_DECODER = msgspec.msgpack.Decoder(StepTable)


async def read_record(router: RequestRouter, model: str = "", *, redact: bool = False) -> bytes:
    """The content of a file for `slipstream replay`. Raises UserError if nothing is recorded."""
    return await _ask(router, "record", model=model, redact=redact)


async def read_steps(router: RequestRouter, since: int = 0) -> StepTable:
    """Steps from this number on; none if it is below 0.

    The core logs steps from the first call on, as long as calls continue.
    """
    return _DECODER.decode(await _ask(router, "steps", since=since))


async def _ask(router: RequestRouter, what: Literal["record", "steps"], **more: Any) -> bytes:
    answer: Inspected = await router.call(lambda call: Inspect(call, what, **more))
    if answer.error is not None:
        raise UserError(answer.error)
    return answer.data
