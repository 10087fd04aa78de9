"""FairQueue: decides which caller is served next, by fair queueing with virtual time.

Each caller is charged the tokens that its requests compute; the waiting caller with the smallest charge is next. The
virtual clock is the charge that each waiting caller would have if the service had been shared equally. A caller that
starts to wait is set to the clock at least, so idle callers earn no credit. Callers that keep waiting get equal numbers
of tokens, up to the size of one request. The clock overtakes every waiting caller, however many new callers arrive, so
each caller is served eventually.
"""

from __future__ import annotations

from slipstream.scheduler.lazy_heap import LazyHeap


class _Account:
    __slots__ = ("used", "turn", "waits")

    def __init__(self, used: float) -> None:
        self.used = used  # charged tokens, in virtual time
        self.turn = 0  # order among callers with equal charges: first to wait, first served
        self.waits = False


class FairQueue:
    """The state is cleared whenever no caller waits."""

    __slots__ = ("num_waiting", "_accounts", "_order", "_clock", "_next_turn", "_limit")

    def __init__(self) -> None:
        self.num_waiting = 0  # callers
        # accounts of waiting callers, and of callers charged beyond the clock
        self._accounts: dict[str, _Account] = {}
        self._order: LazyHeap[tuple[float, int, str]] = LazyHeap()
        self._clock = 0.0
        self._next_turn = 0
        self._limit = 64

    def add(self, caller: str) -> None:
        """The caller has a waiting request; it had none before."""
        account = self._account(caller)
        assert not account.waits, f"{caller!r} waits already"
        account.used = max(account.used, self._clock)
        account.waits = True
        account.turn, self._next_turn = self._next_turn, self._next_turn + 1
        self.num_waiting += 1
        self._order.push((account.used, account.turn, caller), self._is_live)

    def remove(self, caller: str) -> None:
        """The caller has no waiting request any more."""
        account = self._accounts[caller]
        assert account.waits, f"{caller!r} does not wait"
        account.waits = False
        self.num_waiting -= 1
        if not self.num_waiting:
            self._accounts.clear()
            self._clock = 0.0
        elif account.used <= self._clock:
            del self._accounts[caller]

    def next(self) -> str | None:
        """The caller to serve next; None if none waits."""
        first = self._order.top(self._is_live)
        return None if first is None else first[2]

    def charge(self, caller: str, num_tokens: int) -> None:
        if not self.num_waiting or not num_tokens:
            return
        account = self._account(caller)
        if account.waits:
            self._clock += num_tokens / self.num_waiting
            account.used += num_tokens
            self._order.push((account.used, account.turn, caller), self._is_live)
        else:
            account.used = max(account.used, self._clock) + num_tokens
            self._clock += num_tokens / (self.num_waiting + 1)

    def _account(self, caller: str) -> _Account:
        if (account := self._accounts.get(caller)) is None:
            if len(self._accounts) >= self._limit:
                self._accounts = {
                    name: old for name, old in self._accounts.items() if old.waits or old.used > self._clock
                }
                self._limit = 2 * len(self._accounts) + 64
            account = self._accounts[caller] = _Account(self._clock)
        return account

    def _is_live(self, entry: tuple[float, int, str]) -> bool:
        used, turn, caller = entry
        account = self._accounts.get(caller)
        return account is not None and account.waits and (account.used, account.turn) == (used, turn)
