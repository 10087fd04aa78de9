"""Submits prompts to the core, and turns exceptions into refusals, an internal error of one request, or EngineDead."""

from __future__ import annotations

import logging

from slipstream.base.errors import EngineDead, SlipstreamError
from slipstream.contracts.messages import Submit, SubmitAll
from slipstream.engine.lanes import Lanes
from slipstream.transport.frames import Refused

log = logging.getLogger("slipstream.core")


def submit(lanes: Lanes, message: Submit | SubmitAll) -> list[Refused]:
    """Returns refusals; an empty list where the core accepted the prompts.

    A SlipstreamError refuses the request and has changed nothing. Any other exception is a bug in the core: its
    traceback is logged. If the core's invariants still hold, only this request fails, as an internal error. If they do
    not, all later results could be wrong, so EngineDead is raised.
    """
    try:
        lanes.submit(*message.submits)
    except EngineDead:
        raise
    except SlipstreamError as error:
        return [Refused.of(each.request_id, error) for each in message.submits]
    except Exception as error:
        log.error("a request failed inside the engine core", exc_info=error)
        try:
            lanes.check()
        except Exception as broken:
            cause = f"{type(error).__name__}: {error}"
            raise EngineDead(
                f"a request broke an invariant of the engine core ({broken}); it failed with {cause}"
            ) from error
        return [Refused.of(each.request_id, error) for each in message.submits]
    return []
