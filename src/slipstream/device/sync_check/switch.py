"""The environment variable that makes an engine watch its own hot path."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from slipstream.base.errors import InvalidOption, SlipstreamError
from slipstream.device.sync_check.log import Sync, SyncLog
from slipstream.device.sync_check.watch import watch

NAME = "SLIPSTREAM_SYNC_CHECK"
log = logging.getLogger(__name__)


class SyncFound(SlipstreamError):
    """The host waited for the device in the hot path, with SLIPSTREAM_SYNC_CHECK=error."""


class HotPath:
    """The context around the launch of a step: nothing, or a watcher. Only in the thread that launches."""

    def __init__(self, cpu: bool | None = None) -> None:
        """`cpu`: as for `watch`."""
        self.cpu = cpu
        self.mode = os.environ.get(NAME, "")
        if self.mode not in ("", "warn", "error"):
            raise InvalidOption(f"{NAME} is {self.mode!r}; set it to warn or error, or leave it out")
        self.log = SyncLog(self._warn if self.mode == "warn" else self._raise)

    def __call__(self) -> Any:
        return self._watch() if self.mode else nullcontext()

    @contextmanager
    def _watch(self) -> Iterator[None]:
        with watch(self.log, cpu=self.cpu):
            yield

    def _warn(self, sync: Sync) -> None:
        if sync.count == 1:  # log each stack once
            log.warning("the host waits for the device: %s", sync)

    def _raise(self, sync: Sync) -> None:
        raise SyncFound(f"the host waits for the device: {sync}; allow it with sync_allowed, or unset {NAME}")
