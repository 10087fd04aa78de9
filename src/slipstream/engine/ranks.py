"""Ranks: all ranks of a model but the first, for the process of rank 0."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol, TypeVar

from slipstream.dist.group import Group
from slipstream.errors import EngineDead

PLAN, FINISH, LATE, FREE, ADAPTER, TIER, MARK, END = b"p", b"f", b"l", b"q", b"a", b"t", b"m", b"e"
"""Kinds of messages to the other ranks."""

T = TypeVar("T")


class Plans(Protocol):
    """Sends messages to all other ranks, in order."""

    def write(self, kind: bytes, data: bytes = b"") -> None:
        """`kind` is one byte. Raises EngineDead where a rank has ended."""

    def close(self) -> None: ...


class Ranks(ABC):
    plans: Plans
    num_ranks: int

    @abstractmethod
    def connect(self) -> Group:
        """Waits until all ranks have loaded, and joins them."""

    @abstractmethod
    def dead_rank(self, seconds: float = 0.0) -> str | None:
        """Describes a rank that has ended; `seconds`: time to wait for one."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def kill(self) -> None:
        """Ends them at once, after a failure."""

    def explained(self, call: Callable[[], T]) -> T:
        """Calls, and names a rank that has ended where the call fails: a collective only reports a lost connection."""
        try:
            return call()
        except Exception as error:
            if (cause := self.dead_rank(1.0)) is not None:
                raise EngineDead(cause) from error
            raise
