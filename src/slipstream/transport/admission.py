"""Hands prompts to a core. An exception there is a refusal, an internal error of one request, or the core's end."""

from __future__ import annotations

import logging

from slipstream.engine.lanes import Lanes
from slipstream.errors import EngineDead, SlipstreamError
from slipstream.messages import Submit, SubmitAll
from slipstream.transport.frames import Refused

log = logging.getLogger("slipstream.core")


def submit(lanes: Lanes, message: Submit | SubmitAll) -> list[Refused]:
    """Empty where the core has taken the prompts.

    An exception of ours is the caller's: its request is refused and nothing has changed. Any other exception is a bug
    of the core. Its trace goes to the log, and the core goes on only if all its invariants still hold: then the
    request alone fails, as an internal error. If they do not, every answer from here on could be wrong: EngineDead.
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
                f"a request left the engine core in disorder ({broken}); it failed with {cause}"
            ) from error
        return [Refused.of(each.request_id, error) for each in message.submits]
    return []
