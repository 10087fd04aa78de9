"""Where the host waits for the device: places that may, and a detector for all others.

Launching a step never needs a token's value. A place that must read from the device all the same says so with
`sync_allowed`. `watch` finds the reads that do not, in this engine or in any torch program:

    with watch() as log:
        run()
    for sync in log.found:
        print(sync)

    python -m slipstream.device.sync_check script.py arguments ...

It sees, in the thread that opened it and in no other: every torch operation that reads a value to go on (`.item()`,
`bool(t)`, `nonzero`, a mask as an index, `unique`); every copy between host and device that the host sits through,
also those that say non_blocking and cannot be, because the host's side is pageable or strided; waits for events,
streams and devices that had work left; and on CUDA what torch's own sync debug mode warns of. Where there is no GPU the
CPU stands for it, and what is said of reads is said of all tensors; else host memory may be read. It does not see waits
inside other libraries, nor, on the CPU, reads that are no operation there: `.tolist()`, `.numpy()`, `.cpu()`. Work on a
threaded CPU stream runs in another thread: watch at depth 0.

SLIPSTREAM_SYNC_CHECK=warn in the environment has the engine watch the launching of each of its steps and log what it
finds, =error has it fail there.
"""

from slipstream.device.sync_check.log import Sync, SyncLog, sync_allowed
from slipstream.device.sync_check.switch import HotPath, SyncFound
from slipstream.device.sync_check.watch import host_waits, watch

__all__ = ["HotPath", "Sync", "SyncFound", "SyncLog", "host_waits", "sync_allowed", "watch"]
