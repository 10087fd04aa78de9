"""Executes `Control` messages: sleep, wake up, and weights from files."""

from __future__ import annotations

import logging

from slipstream.base.errors import EngineDead, SlipstreamError
from slipstream.contracts.messages import Output
from slipstream.engine.lanes import Lanes
from slipstream.transport.frames import Control, Controlled, Refused

log = logging.getLogger("slipstream.core")


def control(lanes: Lanes, message: Control) -> tuple[list[Output], Controlled]:
    """Returns the outputs of steps that were in flight, and the answer. An error of the user changes nothing; any other
    error may leave the device without its memory, so EngineDead is raised."""
    outputs: list[Output] = []
    refused = None
    sleeper = lanes.sleeper
    try:
        if message.action == "sleep":
            outputs = sleeper.sleep(message.level)
        elif message.action == "wake_up":
            sleeper.wake_up(message.tags)
        elif message.action == "update_weights":
            outputs = sleeper.update_weights(message.path, message.model)
    except SlipstreamError as error:
        refused = Refused.of("", error)
    except Exception as error:
        log.error("%s failed", message.action, exc_info=error)
        raise EngineDead(f"{message.action} failed: {error}") from error
    return outputs, Controlled(message.call, sleeper.is_asleep, refused)
