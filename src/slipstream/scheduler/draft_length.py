"""DraftLength: chooses the number of drafts per row for each plan, from measured acceptance and step times.

A step with drafts takes longer and gives more tokens. The choice maximises expected tokens per device second: the
expected tokens of a row are 1 plus the measured probabilities that its first, second and further drafts are accepted,
and the time is that of steps with as many positions. Where no number of drafts is better than none, rows have none, and
a few steps with drafts in ever longer intervals find out whether the text has changed. Verification is by drawing, so
the number may change in every step without changing a token.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from slipstream.config.memory import sizes_up_to
from slipstream.step import Ints

MIN_GAIN = 1.02  # drafts must promise so much more than no drafts
_DECAY = 0.97  # weight of older steps in the acceptance
_PRIOR_ROWS, _PRIOR = 4.0, 0.6  # before any measurement: so many rows, whose first draft has this probability
_PROBE_DRAFTS, _PROBE_STEPS = 3, 4  # of a trial while rows have no drafts
MAX_PROBED = 256  # drafts of all rows in one step of a trial: more would cost time and add little accuracy
_FIRST_INTERVAL, _MAX_INTERVAL = 32, 1024  # plans between two trials
_MIN_MEASURED = 3  # steps of a size after which its time is known: the shortest of them
_MAX_TRIES = 6  # more than these and the plans in flight
_REFRESH = 256  # plans with drafts after which the time without drafts is measured again
_SIZES = sizes_up_to(4096, first_steps=8)


class DraftLength:
    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self._candidates = [num for num in (0, 1, 2, 3, 4, 6, 8, 12) if num < max_drafts] + [max_drafts]
        # by position of the draft: rows that had such a draft and accepted all before it, and those that accepted it
        self._reached = np.zeros(max_drafts)
        self._accepted = np.zeros(max_drafts)
        self._reached[0], self._accepted[0] = _PRIOR_ROWS, _PRIOR_ROWS * _PRIOR
        self._seconds: dict[int, float] = {}  # by number of positions, rounded up to a size
        self._num_measured: dict[int, int] = {}  # of the sizes that were measured less than _MIN_MEASURED times
        self._num_tries: dict[int, int] = {}  # plans without drafts to measure a size; a device may have no clock
        self._num_plans = 0  # since the last trial, or since the time without drafts was measured
        self._interval = _FIRST_INTERVAL
        self._probing = 0  # plans left of a trial
        self._has_proposed = True  # whether the last plan proposed drafts, or is the first one
        self.is_trial = False  # whether the last choice belongs to a trial
        self.is_resting = False  # no number of drafts was better than none

    def choose(self, num_rows: int) -> tuple[int, int]:
        """The number of drafts per row of the next plan with `num_rows` decode rows, and the number to propose for the
        plan after it."""
        self.is_trial = bool(num_rows and self._probing)
        if num_rows:
            num, num_proposed = self._choose(num_rows)
        else:
            num, num_proposed = 0, 0 if self.is_resting else self.max_drafts
        if not self._has_proposed:
            num = 0  # the plan before proposed nothing
        self._has_proposed = num_proposed > 0
        return num, num_proposed

    def _choose(self, num_rows: int) -> tuple[int, int]:
        most = self.max_drafts
        self._num_plans += 1
        if self.is_trial:
            self._probing -= 1
            return min(_PROBE_DRAFTS, most), most
        best = self._best(num_rows)
        self.is_resting = not best
        if best:
            self._interval = _FIRST_INTERVAL
            size = _size(num_rows)
            # the time without drafts is that of plans which propose nothing either: a proposal may cost several passes
            if self._num_plans >= _REFRESH:
                self._num_plans = 0
                return 0, 0
            if not self._is_known(size) and self._num_tries.get(size, 0) < _MAX_TRIES:
                self._num_tries[size] = self._num_tries.get(size, 0) + 1
                return 0, 0
            return best, most
        if self._num_plans < self._interval:
            return 0, 0
        self._num_plans, self._interval = 0, min(2 * self._interval, _MAX_INTERVAL)
        self._probing = _PROBE_STEPS
        return 0, most

    def _best(self, num_rows: int) -> int:
        """The number of drafts with the most expected tokens per second."""
        tokens = self._expected()
        best, best_rate = 0, MIN_GAIN / self._time(num_rows)
        for num in self._candidates[1:]:
            rate = tokens[num] / self._time(num_rows * (1 + num))
            if rate > best_rate:
                best, best_rate = num, rate
        return best

    def _expected(self) -> list[float]:
        """Expected tokens of a row by its number of drafts. A position that was rarely reached is accepted about as
        often as the one before it."""
        tokens, all_before, chance = [1.0], 1.0, _PRIOR
        for reached, accepted in zip(self._reached.tolist(), self._accepted.tolist(), strict=True):
            chance = (accepted + chance) / (reached + 1)
            all_before *= chance
            tokens.append(tokens[-1] + all_before)
        return tokens

    def _time(self, num_positions: int) -> float:
        """Seconds of a step with so many positions. Not measured: those of the next smaller or larger size, which tries
        the step."""
        size, known = _size(num_positions), self._seconds
        if self._is_known(size):
            return known[size]
        smaller = max((each for each in known if each < size and self._is_known(each)), default=None)
        larger = min((each for each in known if each > size and self._is_known(each)), default=None)
        near = smaller if smaller is not None else larger
        return known.get(size, 1.0) if near is None else min(known[near], known.get(size, known[near]))

    def _is_known(self, size: int) -> bool:
        """The first step of a size may have waited for the host, which compiled or captured it."""
        return size in self._seconds and size not in self._num_measured

    def add(self, drawn: list[int], counts: Ints) -> None:
        """A step was committed: how many tokens each row drew, and how many it accepted."""
        num = np.array(drawn, np.int32) - 1
        accepted = (np.asarray(counts) - 1)[num > 0]
        num = num[num > 0]
        if not len(num):
            return
        indices = np.arange(self.max_drafts)[:, None]
        self._reached = _DECAY * self._reached + ((num > indices) & (accepted >= indices)).sum(1)
        self._accepted = _DECAY * self._accepted + (accepted > indices).sum(1)

    def measure(self, num_positions: int, seconds: float) -> None:
        """A step without prefill took so many seconds on the device. Shorter times count at once: a longer time may
        contain a wait for the host."""
        size = _size(num_positions)
        before = self._seconds.get(size, seconds)
        if not self._is_known(size):
            num = self._num_measured[size] = self._num_measured.get(size, 0) + 1
            self._seconds[size] = min(before, seconds)
            if num == _MIN_MEASURED:
                del self._num_measured[size]
        elif seconds < 4 * before:
            self._seconds[size] = before + (0.5 if seconds < before else 0.05) * (seconds - before)


def _size(num_positions: int) -> int:
    """The size that a step of so many positions is padded to, roughly."""
    at = bisect_left(_SIZES, num_positions)
    return _SIZES[at] if at < len(_SIZES) else num_positions
