"""Finds calls in which the host waits for the device, and marks the calls that may wait.

Launching a step never needs the value of a token. A call that must read from the device is marked with `sync_allowed`.
`watch` finds all other reads, in this engine or in any torch program:

    with watch() as log:
        run()
    for sync in log.found:
        print(sync)

    python -m slipstream.device.sync_check script.py arguments ...

In the thread that opened it, and in no other, `watch` finds: every torch operation that reads a value to continue
(`.item()`, `bool(t)`, `nonzero`, a mask as an index, `unique`); every copy between host and device that blocks the
host, including non_blocking copies that block because the host memory is pageable or strided; waits for events, streams
and devices that had work left; and on CUDA what torch's own sync debug mode reports. Without a GPU the CPU is treated
as the device, so reads of any tensor count; with a GPU, host memory may be read. It does not find waits inside other
libraries, nor, on the CPU, reads that are no torch operation there: `.tolist()`, `.numpy()`, `.cpu()`. Work on a
threaded CPU stream runs in another thread: watch at depth 0.

With SLIPSTREAM_SYNC_CHECK=warn the engine watches the launch of each step and logs what it finds; with =error it
raises.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from slipstream.base.errors import InvalidOption, SlipstreamError
from slipstream.device.sync_check.watch import Sync, SyncLog, host_waits, sync_allowed, watch

# The environment variable that makes an engine watch its own hot path.

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


__all__ = ["HotPath", "Sync", "SyncFound", "SyncLog", "host_waits", "sync_allowed", "watch"]
