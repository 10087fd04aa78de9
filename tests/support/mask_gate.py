"""Late masks: the threads that fill masks of grammars wait at a gate, which a test opens."""

from __future__ import annotations

import ctypes
import threading

from patience import PATIENCE
from slipstream.scheduler.grammar import draws, mask_pool
from slipstream.scheduler.grammar.draws import fill_along


class MaskGate:
    """Some masks are computed only once the gate is open: those of one matcher, or by chance."""

    def __init__(self, monkeypatch, stops=None):
        self.is_open, self.matcher, self.num_stopped = threading.Event(), None, 0
        # by chance all parts of the pool may wait, and then its caller waits for one of them
        longest = 60.0 if stops is None else 1.0
        stops = stops or (lambda matcher: matcher == self.matcher)
        addresses = mask_pool.function_addresses()
        compute = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        real = compute(addresses[-1])

        def gated(matcher, mask, size):
            is_open = self.is_open
            if stops(matcher) and not is_open.is_set():
                self.num_stopped += 1
                assert is_open.wait(longest) or longest < 60
            return real(matcher, mask, size)

        self.callback = compute(gated)  # referenced as long as threads may call it
        addresses[-1] = ctypes.cast(self.callback, ctypes.c_void_p).value
        monkeypatch.setattr(mask_pool, "function_addresses", lambda: addresses)
        monkeypatch.setattr(mask_pool, "default_threads", lambda: 2)

    def let_pass(self):
        """Masks that wait are computed; later ones may wait again."""
        self.is_open.set()
        self.is_open = threading.Event()


class DraftGate:
    """Masks along drafts of some sessions are filled only once the gate is open."""

    def __init__(self, monkeypatch, stops):
        self.is_open, self.num_stopped = threading.Event(), 0

        def gated(session, *args):
            is_open = self.is_open
            if stops(session) and not is_open.is_set():
                self.num_stopped += 1
                is_open.wait(PATIENCE)
            fill_along(session, *args)

        monkeypatch.setattr(draws, "fill_along", gated)

    def let_pass(self):
        """Masks that wait are filled; later ones may wait again."""
        self.is_open.set()
        self.is_open = threading.Event()
