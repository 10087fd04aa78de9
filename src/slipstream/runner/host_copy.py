"""Copies a result buffer for its reader, since a later step overwrites the buffer.

Token vectors are tens of megabytes per step. Most of the time of such a copy is spent on first-touch page faults, and
one thread is slower than the device's next step; so several threads copy.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from slipstream.base.host import num_cpus
from slipstream.device.device import Bytes

LARGE = 4 * 2**20  # bytes from which several threads are faster
MAX_THREADS = 8


def host_copy(buffer: Bytes) -> Bytes:
    num_threads = min(MAX_THREADS, num_cpus() // 2) if buffer.nbytes >= LARGE else 1
    if num_threads < 2:
        return buffer.copy()
    own = np.empty_like(buffer)
    size = -(-len(buffer) // num_threads)
    parts = [slice(start, start + size) for start in range(0, len(buffer), size)]
    copies = [_threads().submit(np.copyto, own[part], buffer[part]) for part in parts[1:]]
    np.copyto(own[parts[0]], buffer[parts[0]])
    for copy in copies:
        copy.result()
    return own


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_THREADS - 1, "slipstream-results")
