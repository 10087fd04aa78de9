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

PoolRow = tuple[Session, int, int]
"""A session, the token that it takes or -1, and the index of its mask or -1."""

_MAX_THREADS = 4
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
    return min(_MAX_THREADS, cores // 4) if cores >= _MIN_CORES else 0


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
        self._running: list[PoolRow] = []

    def start(self, rows: list[PoolRow], bits: Words | None) -> None:
        """Begin to process these sessions. Their masks are in `bits` [masks, words]. Nothing else may use the sessions
        before `wait` returns."""
        assert not self._running, "the last rows were not waited for"
        pointers, tokens, indices, forced = [], [], [], []
        for session, token, index in rows:
            pointers.append(session.matcher.pointer)  # type: ignore[attr-defined]
            tokens.append(token)
            indices.append(index)
            forced.append(_next_forced(session.forced, token) if session.forced else -1)
        columns, num = self._columns, len(rows)
        columns["matcher"][:num] = pointers
        columns["token"][:num] = tokens
        columns["forced"][:num] = forced
        if bits is None:
            columns["mask"][:num] = 0
        else:
            masks = np.array(indices)
            columns["mask"][:num] = np.where(masks < 0, 0, masks * self._stride + bits.ctypes.data)
        self._running = rows
        self._library.slip_masks_start(self._pool, num)

    def wait(self, bits: Words | None, budget: float) -> None:
        """Wait until all are processed, and update the sessions. A session that took longer than `budget` seconds for a
        mask becomes slow."""
        rows, self._running = self._running, []
        if not rows:
            return
        self._library.slip_masks_wait(self._pool)
        num = len(rows)
        flags: list[int] = self._columns["flags"][:num].tolist()
        found: list[int] = self._columns["num_forced"][:num].tolist()
        slow: list[bool] = (self._columns["seconds"][:num] > budget).tolist()
        for number, ((session, token, index), flag, num_forced, is_slow) in enumerate(
            zip(rows, flags, found, slow, strict=True)
        ):
            if token >= 0:
                session.num_taken += 1
                if session.forced:
                    del session.forced[0]
                if flag & _STOPPED:
                    session.is_complete = not flag & _ERROR
                elif num_forced:
                    session.forced = self._forced(session, number, num_forced)
            if index >= 0:
                session.is_slow = is_slow
                if flag & _MAY_END:
                    assert bits is not None
                    session.allow_end(bits[index])

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


def _next_forced(forced: list[int], token: int) -> int:
    """The forced token after `token`, if it is known; -1 if not."""
    index = 0 if token < 0 else 1
    return forced[index] if len(forced) > index else -1
