"""MaskPool: sessions take their tokens and masks are filled by threads of `native.c`, without the interpreter lock.

The threads begin when the tokens of a step are known and run while the scheduler commits the step. They poll between
two steps, since waking a thread takes as long as the masks of a step.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.config.cpus import num_cpus
from slipstream.scheduler.grammar.native_matcher import llguidance_library
from slipstream.scheduler.grammar.session import Session, Words

_MAX_THREADS = 8
_MIN_CORES = 8  # with fewer cores the threads compete with the model
_POLL_NS = 3_000_000
_MAX_FORCED = 64  # this and the following as in native.c
_STOPPED, _ERROR, _MAY_END = 1, 2, 4
ROW = np.dtype(
    [
        ("matcher", np.uint64), ("mask", np.uint64), ("token", np.int32), ("forced", np.int32), ("flags", np.int32),
        ("num_forced", np.int32), ("seconds", np.float32), ("tokens", np.uint32, _MAX_FORCED), ("unused", np.uint32),
    ]
)  # fmt: skip
_FUNCTIONS = (
    "llg_matcher_consume_token", "llg_matcher_is_stopped", "llg_matcher_is_error", "llg_matcher_compute_ff_tokens",
    "llg_matcher_compute_mask_into",
)  # fmt: skip


def default_threads() -> int:
    """0: the thread that waits processes the rows."""
    cores = num_cpus()
    return min(_MAX_THREADS, cores // 2) if cores >= _MIN_CORES else 0


class MaskPool:
    def __init__(
        self, library: ctypes.CDLL, num_words: int, end: int, max_rows: int, num_threads: int | None = None
    ) -> None:
        """`library`: the compiled native.c. `num_words` of a mask. `end`: the bit for the end of the grammar."""
        own = llguidance_library()
        assert own is not None
        addresses = [ctypes.cast(getattr(own, name), ctypes.c_void_p).value for name in _FUNCTIONS]
        functions = (ctypes.c_void_p * len(addresses))(*addresses)
        threads = default_threads() if num_threads is None else num_threads
        self._library = library
        self._pool = library.slip_masks_open(ctypes.addressof(functions), end, num_words, threads, max_rows, _POLL_NS)
        if not self._pool:
            raise MemoryError("no memory or no threads for the masks of grammars")
        memory: Any = (ctypes.c_char * (max_rows * ROW.itemsize)).from_address(library.slip_masks_rows(self._pool))
        table: NDArray[Any] = np.frombuffer(memory, ROW)
        self._columns = {name: table[name] for name in ROW.names or ()}
        self._stride = num_words * 4
        self._running: list[Session] = []
        self._takes = False  # whether they take tokens
        self._had_slow = False  # the last batch
        self._indices: list[int] = []

    def start(self, sessions: list[Session], tokens: list[int] | None, indices: list[int], bits: Words | None) -> None:
        """Begin to process these sessions: each takes its token, if there are tokens, and then its mask in `bits`
        [masks, words] is filled, if its index is not -1. Nothing else may use the sessions before `wait` returns."""
        assert not self._running, "the last sessions were not waited for"
        columns, num, skipped = self._columns, len(sessions), 0 if tokens is None else 1
        columns["matcher"][:num] = [session.matcher.pointer for session in sessions]  # type: ignore[attr-defined]
        columns["token"][:num] = -1 if tokens is None else tokens
        # forced tokens that are known: the first one is the token that is taken now
        columns["forced"][:num] = [
            forced[skipped] if (forced := session.forced) and len(forced) > skipped else -1 for session in sessions
        ]
        columns["mask"][:num] = 0
        if bits is not None:
            masks = np.array(indices)
            columns["mask"][:num] = np.where(masks < 0, 0, masks * self._stride + bits.ctypes.data)
        self._running, self._takes, self._indices = sessions, tokens is not None, indices
        self._library.slip_masks_start(self._pool, num)

    @property
    def is_running(self) -> bool:
        """Whether sessions were started and not waited for."""
        return bool(self._running)

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return not self._running or not self._library.slip_masks_left(self._pool)

    def wait(self, bits: Words | None, budget: float) -> None:
        """Wait until all are processed, and update the sessions. A session that took longer than `budget` seconds for a
        mask becomes slow."""
        sessions, self._running = self._running, []
        if not sessions:
            return
        self._library.slip_masks_wait(self._pool)
        num, columns = len(sessions), self._columns
        if self._takes:
            for session in sessions:
                session.num_taken += 1
                if session.forced:
                    del session.forced[0]
        flags, found = columns["flags"][:num], columns["num_forced"][:num]
        for number in (flags | found).nonzero()[0].tolist():
            session, flag = sessions[number], int(flags[number])
            if self._takes:
                if flag & _STOPPED:
                    session.is_complete = not flag & _ERROR
                elif found[number]:
                    session.forced = self._forced(session, number, int(found[number]))
            if flag & _MAY_END:
                assert bits is not None
                session.allow_end(bits[self._indices[number]])
        slow = columns["seconds"][:num] > budget
        if slow.any() or self._had_slow:
            self._had_slow = bool(slow.any())
            for session, index, is_slow in zip(sessions, self._indices, slow.tolist(), strict=True):
                if index >= 0:
                    session.is_slow = is_slow

    def close(self) -> None:
        if self._pool:
            self._library.slip_masks_wait(self._pool)
            self._library.slip_masks_close(self._pool)
            self._pool, self._running = None, []

    def _forced(self, session: Session, number: int, num: int) -> list[int]:
        if num == _MAX_FORCED:  # there may be more
            return session.matcher.compute_ff_tokens()
        tokens: list[int] = self._columns["tokens"][number, :num].tolist()
        return tokens
