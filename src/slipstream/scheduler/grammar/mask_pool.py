"""MaskPool: sessions take their tokens and masks are filled by threads of `native.c`, without the interpreter lock.

The threads begin when the tokens of a step are known and run while the scheduler commits the step and plans the next
one. They poll between two steps, since waking a thread takes as long as the masks of a step. A mask that is not filled
in time becomes a `LateMask`: its thread goes on, and writes to memory of its own.
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
_MIN_CORES = 8  # with fewer cores several threads compete with the model
_POLL_NS = 3_000_000
_NUM_PARTS = 4  # of the entries: a batch takes one that no late mask of an earlier batch uses
_MAX_FORCED = 64  # this and the following as in native.c
_STOPPED, _ERROR, _MAY_END = 1, 2, 4
_DONE, _ENDED = 2, 4
ROW = np.dtype(
    [
        ("matcher", np.uint64), ("walker", np.uint64), ("mask", np.uint64), ("spare", np.uint64), ("token", np.int32),
        ("forced", np.int32), ("flags", np.int32), ("num_forced", np.int32), ("seconds", np.float32),
        ("state", np.int32), ("tokens", np.uint32, _MAX_FORCED),
    ]
)  # fmt: skip
_FUNCTIONS = (
    "llg_matcher_consume_token", "llg_matcher_is_stopped", "llg_matcher_is_error", "llg_matcher_compute_ff_tokens",
    "llg_matcher_compute_mask_into",
)  # fmt: skip


def default_threads() -> int:
    cores = num_cpus()
    return min(_MAX_THREADS, cores // 2) if cores >= _MIN_CORES else 1


def function_addresses() -> list[int | None]:
    """Of the functions of llguidance that the threads call, in the order of `Functions` in native.c."""
    own = llguidance_library()
    assert own is not None
    return [ctypes.cast(getattr(own, name), ctypes.c_void_p).value for name in _FUNCTIONS]


class MaskPool:
    def __init__(
        self, library: ctypes.CDLL, num_words: int, end: int, max_rows: int, num_threads: int | None = None
    ) -> None:
        """`library`: the compiled native.c. `num_words` of a mask. `end`: the bit for the end of the grammar."""
        addresses = function_addresses()
        functions = (ctypes.c_void_p * len(addresses))(*addresses)
        threads = default_threads() if num_threads is None else num_threads
        num_entries, poll = _NUM_PARTS * max_rows, _POLL_NS if threads > 1 else 0
        self._library = library
        self._pool = library.slip_masks_open(ctypes.addressof(functions), end, num_words, threads, num_entries, poll)
        if not self._pool:
            raise MemoryError("no memory or no threads for the masks of grammars")
        memory: Any = (ctypes.c_char * (num_entries * ROW.itemsize)).from_address(library.slip_masks_rows(self._pool))
        table: NDArray[Any] = np.frombuffer(memory, ROW)
        self._columns = {name: table[name] for name in ROW.names or ()}
        self._max_rows = max_rows
        self._num_words = num_words
        self._first = 0  # entry of the batch
        self._late: list[LateMask] = []  # that use an entry
        self._running: list[Session] = []
        self._tokens: list[int] = []  # that they take; -1: none
        self._indices: list[int] = []
        self._had_slow = False  # the last batch

    def start(self, sessions: list[Session], tokens: list[int] | None, indices: list[int], bits: Words | None) -> None:
        """Begin to process these sessions: each takes its token, if it has one (-1: none), and then its mask in `bits`
        [masks, words] is filled, if its index is not -1. Nothing else may use the sessions before `wait` returns."""
        assert not self._running, "the last sessions were not waited for"
        tokens = [-1] * len(sessions) if tokens is None else tokens
        self._first = first = self._free_part()
        own = slice(first, first + len(sessions))
        columns = self._columns
        columns["matcher"][own] = [session.matcher.pointer for session in sessions]  # type: ignore[attr-defined]
        columns["walker"][own] = [session.matcher.walker_pointer for session in sessions]  # type: ignore[attr-defined]
        columns["token"][own] = tokens
        # forced tokens that are known: the first one is the token that is taken now
        columns["forced"][own] = [
            forced[token >= 0] if (forced := session.forced) and len(forced) > (token >= 0) else -1
            for session, token in zip(sessions, tokens, strict=True)
        ]
        columns["mask"][own] = 0
        if bits is not None:
            masks = np.array(indices)
            columns["mask"][own] = np.where(masks < 0, 0, masks * (self._num_words * 4) + bits.ctypes.data)
        self._running, self._tokens, self._indices = sessions, tokens, indices
        self._library.slip_masks_start(self._pool, first, len(sessions))

    @property
    def is_running(self) -> bool:
        """Whether sessions were started and not waited for."""
        return bool(self._running)

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        num = len(self._running)
        return not num or not self._library.slip_masks_wait(self._pool, self._first, num, 0)

    def wait(self, bits: Words | None, budget: float, limit: float | None = None) -> None:
        """Wait until all are processed, and update the sessions. A session that took longer than `budget` seconds for a
        mask becomes slow. `limit`: seconds to wait; then the other sessions get a `LateMask` as their job."""
        sessions, self._running = self._running, []
        if not sessions:
            return
        num, first, columns = len(sessions), self._first, self._columns
        limit_ns = -1 if limit is None else max(0, int(limit * 1e9))
        if self._library.slip_masks_wait(self._pool, first, num, limit_ns):
            sessions = self._abandon(sessions)
        own = slice(first, first + num)
        for session, token in zip(sessions, self._tokens, strict=True):
            if token >= 0 and session.job is None:
                session.num_taken += 1
                if session.forced:
                    del session.forced[0]
        flags, found = columns["flags"][own], columns["num_forced"][own]
        for number in (flags | found).nonzero()[0].tolist():
            session = sessions[number]
            if session.job is None:
                index = self._indices[number]
                _update(session, *self.read(first + number), None if bits is None or index < 0 else bits[index])
        slow = columns["seconds"][own] > budget
        if slow.any() or self._had_slow:
            self._had_slow = bool(slow.any())
            for session, index, is_slow in zip(sessions, self._indices, slow.tolist(), strict=True):
                if index >= 0 and session.job is None:
                    session.is_slow = is_slow

    def _abandon(self, sessions: list[Session]) -> list[Session]:
        """Give sessions whose mask is not filled a `LateMask`."""
        columns, first = self._columns, self._first
        for number in (columns["state"][first : first + len(sessions)] != _DONE).nonzero()[0].tolist():
            entry, session = first + number, sessions[number]
            mask = np.zeros(self._num_words, np.uint32) if self._indices[number] >= 0 else None
            columns["spare"][entry] = 0 if mask is None else mask.ctypes.data
            if self._library.slip_masks_abandon(self._pool, entry):
                session.job = LateMask(self, entry, session, self._tokens[number] >= 0, mask)
                session.is_slow = True
                self._late.append(session.job)
        return sessions

    def _free_part(self) -> int:
        """The first entry of a part that no late mask uses."""
        if self._late:
            self._late = [late for late in self._late if not late.done()]
            used = {late.entry // self._max_rows for late in self._late}
            if len(used) == _NUM_PARTS:
                self._late[0].result()
                return self._free_part()
            return next(part for part in range(_NUM_PARTS) if part not in used) * self._max_rows
        return 0

    @property
    def num_found(self) -> int:
        """Masks that were copied from states seen before."""
        num: int = self._library.slip_masks_num_found(self._pool)
        return num

    def has_ended(self, entry: int, *, wait: bool) -> bool:
        """Whether the thread of an abandoned row has ended."""
        if wait:
            self._library.slip_masks_wait(self._pool, entry, 1, -1)
        return int(self._columns["state"][entry]) == _ENDED

    def read(self, entry: int) -> tuple[int, list[int]]:
        """The flags and the forced tokens of a processed row."""
        num = int(self._columns["num_forced"][entry])
        tokens: list[int] = self._columns["tokens"][entry, :num].tolist()
        return int(self._columns["flags"][entry]), tokens

    def close(self) -> None:
        if self._pool:
            for late in self._late:
                late.result()
            self._library.slip_masks_close(self._pool)
            self._pool, self._running, self._late = None, [], []


class LateMask:
    """The job of a session whose mask was not filled in time. Until it is done, only its thread uses the matcher."""

    def __init__(self, pool: MaskPool, entry: int, session: Session, takes: bool, mask: Words | None) -> None:
        """`takes`: whether the session takes a token."""
        self.entry = entry
        self._pool = pool
        self._session = session
        self._takes = takes
        self._mask = mask
        self._found: tuple[int, list[int]] | None = None  # what the thread has found
        self._is_applied = False

    def done(self) -> bool:
        if self._found is None and self._pool.has_ended(self.entry, wait=False):
            self._found = self._pool.read(self.entry)  # the entry may be used again from now on
        return self._found is not None

    def result(self) -> None:
        """Wait until the mask is filled, and update the session."""
        if self._found is None:
            self._pool.has_ended(self.entry, wait=True)
            self._found = self._pool.read(self.entry)
        session = self._session
        if self._is_applied or session.job is not self:
            return
        self._is_applied = True
        if self._takes:
            session.num_taken += 1
            if session.forced:
                del session.forced[0]
        _update(session, *self._found, self._mask)
        session.ready = self._mask


def _update(session: Session, flags: int, forced: list[int], mask: Words | None) -> None:
    """Apply what a thread has found after it has taken the session's token and filled this mask."""
    if flags & _STOPPED:
        session.is_complete = not flags & _ERROR
    elif forced:  # if there is no room for more, there may be more
        session.forced = forced if len(forced) < _MAX_FORCED else session.matcher.compute_ff_tokens()
    if flags & _MAY_END and mask is not None:
        session.allow_end(mask)
