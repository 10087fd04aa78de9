"""Machine: properties of the device and of its host that defaults depend on."""

from __future__ import annotations

import msgspec


class Machine(msgspec.Struct, frozen=True):
    """Properties of the device that `resolve` reads; filled by `detect_machine`."""

    kind: str
    free_memory: int
    total_memory: int
    num_threads: int
    fast_dtypes: tuple[str, ...]
    num_multiprocessors: int = 0  # 0: not a GPU, or not known
