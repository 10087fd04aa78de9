"""Interrupts: raised at once, or at the end of what must not be torn."""

from __future__ import annotations

import signal
import threading

import pytest

from slipstream.transport.inline import interrupts_deferred, watched

pytestmark = pytest.mark.usefixtures("interrupts")


def interrupt():
    signal.raise_signal(signal.SIGINT)


def test_one_that_comes_inside_is_raised_at_the_end():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        interrupt()
        done.append(1)
    assert done == [1]
    with interrupts_deferred():
        pass  # it was raised once


def test_one_that_comes_outside_of_a_hold_is_raised_at_once():
    done = []
    with pytest.raises(KeyboardInterrupt), watched() as hold:
        with hold:
            done.append(1)
        interrupt()
        done.append(2)
    assert done == [1]


def test_holds_within_holds_end_with_the_outermost():
    done = []
    with pytest.raises(KeyboardInterrupt), watched() as hold:
        with hold:
            with interrupts_deferred(), hold:
                interrupt()
            done.append(1)
        done.append(2)
    assert done == [1]


def test_an_error_does_not_swallow_an_interrupt():
    with pytest.raises(KeyboardInterrupt) as found, interrupts_deferred():
        interrupt()
        raise ValueError("while it was held")
    assert isinstance(found.value.__context__, ValueError)


def test_an_existing_interrupt_handler_stays_installed():
    came = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    with interrupts_deferred():
        interrupt()
        assert came == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_hold_nothing_back():
    """Their holds would be the main thread's."""
    entered, leave = threading.Event(), threading.Event()

    def work():
        with interrupts_deferred():
            entered.set()
            leave.wait()

    with watched():
        thread = threading.Thread(target=work)
        thread.start()
        entered.wait()
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        leave.set()
        thread.join()
