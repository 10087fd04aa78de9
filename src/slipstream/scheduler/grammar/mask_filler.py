"""MaskFiller: fills the masks of a step, one after another or in threads.

A mask usually takes a few microseconds, and it takes longer to wake a thread. Threads are used if the masks of a step
take long and their sessions share no lexer; the times of both ways are measured, and the shorter one is used.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from slipstream.config.cpus import num_cpus
from slipstream.scheduler.grammar.session import Session, Words

if TYPE_CHECKING:
    from llguidance import LLExecutor

MIN_SECONDS = 0.0006  # for the masks of a step, one after another, from which threads are tried
_MAX_THREADS = 4
_MIN_CORES = 8  # with fewer cores the threads compete with the model
_STEPS_APART = 64  # steps after which the other way is measured again


class MaskFiller:
    def __init__(self, num_words: int, end: int, run: Callable[[Callable[[], None]], object]) -> None:
        """`num_words` of a mask. `end`: the bit for the end of the grammar. `run` calls a function in a background
        thread: it compiles a grammar again."""
        self._num_words = num_words
        self._end = end
        self._run = run
        cores = num_cpus()
        self.num_threads = min(_MAX_THREADS, cores // 4) if cores >= _MIN_CORES else 1
        self._each = 0.0  # seconds of a mask when they were last filled one after another
        self._num_threaded = 0  # next steps with threads
        self._num_single = 0  # steps after them without: at least one, which measures again
        self._executor: LLExecutor | None = None

    def fill(self, pending: list[tuple[Session, int]], bits: Words, budget: float) -> None:
        """Fill the masks [masks, words] of these sessions, given with their indices. A session whose mask takes longer
        than `budget` seconds becomes slow."""
        address, stride = bits.ctypes.data, self._num_words * 4
        if self._uses_threads(pending):
            self._fill_in_threads(pending, address, stride, len(bits), budget)
        else:
            before = start = time.perf_counter()
            for session, index in pending:
                session.matcher.unsafe_compute_mask_ptr(address + index * stride, stride)
                now = time.perf_counter()
                session.is_slow = now - before > budget
                before = now
            self._each = (before - start) / len(pending)
        # as `Session.fill` does for one mask, with the end bits of all masks read at once
        may_end = (bits[:, self._end >> 5] & np.uint32(1 << (self._end & 31))).tolist()
        for session, index in pending:
            if may_end[index]:
                session.check_end(bits[index], session.matcher)

    def _uses_threads(self, pending: list[tuple[Session, int]]) -> bool:
        if self.num_threads == 1 or self._each * len(pending) < MIN_SECONDS:
            return False
        if self._num_threaded:
            self._num_threaded -= 1
            return True
        if self._num_single:
            self._num_single -= 1
            return False
        if not self._are_independent(pending):
            self._num_single = _STEPS_APART
            return False
        self._num_threaded, self._num_single = _STEPS_APART, 1
        return True

    def _are_independent(self, pending: list[tuple[Session, int]]) -> bool:
        """Whether the sessions have a matcher for each thread. If not, their grammars get more, for later sessions."""
        if len({id(session.first) for session, _ in pending}) >= self.num_threads:
            return True
        for grammar in {id(session.grammar): session.grammar for session, _ in pending}.values():
            if grammar.num_matchers < self.num_threads:
                self._run(functools.partial(grammar.grow, self.num_threads))
        return False

    def _fill_in_threads(
        self, pending: list[tuple[Session, int]], address: int, stride: int, num_masks: int, budget: float
    ) -> None:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(num_threads=self.num_threads)
        # each thread gets a part of the list: sessions that share a lexer are neighbours
        masks = [(each.matcher, index) for each, index in sorted(pending, key=lambda pair: id(pair[0].first))]
        start = time.perf_counter()
        self._executor.unsafe_compute_mask_ptr(masks, address, stride, num_masks)
        seconds = time.perf_counter() - start
        if seconds > min(budget, self._each * len(pending)):
            # slower than one after another, or a session is slow: that is found one by one
            self._num_threaded, self._num_single = 0, 1 if seconds > budget else _STEPS_APART
