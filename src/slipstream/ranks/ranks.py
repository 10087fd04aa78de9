"""Ranks: all ranks of a model but the first, for the process of rank 0."""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Protocol, TypeVar

import torch

from slipstream.base.errors import EngineDead, SlipstreamError
from slipstream.device.collectives import Group
from slipstream.ranks.link import RankWatch

PLAN, FINISH, LATE, FREE, ADAPTER, TIER, MARK, END = b"p", b"f", b"l", b"q", b"a", b"t", b"m", b"e"
"""Kinds of messages to the other ranks."""
STARTED = "started/{}"
"""What a rank sends when it needs the store no longer."""

T = TypeVar("T")


class Plans(Protocol):
    """Sends messages to all other ranks, in order."""

    def write(self, kind: bytes, data: bytes = b"") -> None:
        """`kind` is one byte. Raises EngineDead if a rank has ended."""

    def close(self) -> None: ...


class Ranks(ABC):
    """A thread waits for the end of any of them, whether or not a step runs: NCCL would wait for that rank for ever."""

    plans: Plans
    num_ranks: int

    def __init__(self) -> None:
        self.group: Group | None = None  # set by `join`
        self.death: str | None = None  # the first rank that ended, and how
        self._watch: RankWatch | None = None
        self._joining: Future[Group] = Future()
        self._woken, self._wakes = os.pipe()

    @property
    def file(self) -> int:
        """A file descriptor that becomes readable when a rank has ended."""
        return self._woken

    def join(self, device: torch.device) -> Group:
        """Waits until all ranks have loaded, and joins them."""
        self.wait_until_loaded()
        self._watch = RankWatch(self.end_files(), self._find_death)
        threading.Thread(target=self._open_group, args=(device,), name="slipstream-join", daemon=True).start()
        self.group = self._joining.result()
        if self.death is not None:
            self.group.abort()  # the thread of the watch came before this group
        return self.group

    def started(self) -> None:
        """Waits until no rank needs the store any longer."""
        assert self.group is not None, "the ranks have not joined"
        for rank in range(1, self.num_ranks):
            self.group.receive(STARTED.format(rank))

    @abstractmethod
    def wait_until_loaded(self) -> None:
        """Raises EngineDead if a rank did not start."""

    @abstractmethod
    def open_group(self, device: torch.device) -> Group: ...

    @abstractmethod
    def end_files(self) -> list[int]:
        """File descriptors that become readable when a rank ends."""

    @abstractmethod
    def dead_rank(self, seconds: float = 0.0) -> str | None:
        """Describes a rank that has ended; `seconds`: time to wait for one."""

    @abstractmethod
    def end_others(self, how: str) -> None:
        """Ends the ranks that are left after `how` one ended, and what they and this one wait for at start."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def kill(self) -> None:
        """Ends them at once, after a failure."""

    def check(self) -> None:
        """Raises EngineDead if a rank has ended."""
        if self.death is not None:
            raise EngineDead(self.death)

    def explained(self, call: Callable[[], T]) -> T:
        """Calls, and names a rank that has ended where the call fails: a collective only reports a lost connection.
        Results that a rank did not take part in are never returned."""
        try:
            result = call()
        except Exception as error:
            is_explained = isinstance(error, SlipstreamError) and not isinstance(error, EngineDead)
            if not is_explained and (found := self.dead_rank(1.0)) is not None:
                raise EngineDead(self.death or found) from error  # the watch ends the other ranks
            raise
        self.check()
        return result

    def _open_group(self, device: torch.device) -> None:
        """In a thread: a library that connects to a rank that has just ended waits for it for minutes."""
        try:
            result = self.open_group(device)
        except BaseException as error:
            with contextlib.suppress(InvalidStateError):  # a rank has ended
                self._joining.set_exception(error)
        else:
            with contextlib.suppress(InvalidStateError):
                self._joining.set_result(result)

    def _find_death(self) -> None:
        """In the thread of the watch."""
        self.death = self.dead_rank(1.0) or "a rank has ended"
        with contextlib.suppress(InvalidStateError):  # all have joined
            self._joining.set_exception(EngineDead(self.death))
        self.end_others(self.death)
        if self.group is not None:
            self.group.abort()
        os.write(self._wakes, b"e")

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def _close_files(self) -> None:
        os.close(self._woken)
        os.close(self._wakes)
