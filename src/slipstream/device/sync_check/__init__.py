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

from slipstream.device.sync_check.log import Sync, SyncLog, sync_allowed
from slipstream.device.sync_check.switch import HotPath, SyncFound
from slipstream.device.sync_check.watch import host_waits, watch

__all__ = ["HotPath", "Sync", "SyncFound", "SyncLog", "host_waits", "sync_allowed", "watch"]
