"""DraftLength: chooses the number of drafts per row for each plan, from measured acceptance and step times.

A step with drafts takes longer and gives more tokens. The choice maximises expected tokens per second. The expected
tokens of a row are 1 plus the measured probabilities that its first, second and further drafts are accepted, and the
time is that of steps with as many positions, with the time before them in which the device waited for the host. Each
class of rows (DraftClasses) has a number of its own. Where no number of drafts is better than none, rows have
none, and a few steps with drafts in ever longer intervals find out whether the text has changed; such trials have a
budget of time. Verification is by drawing, so the number may change in every step without changing a token.

If the host sees the drafts that a step made, rows that would have drafts after a match wait for one: their steps
propose drafts and verify none. Trials are such steps too, and cost next to nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from slipstream.config.memory import sizes_up_to
from slipstream.contracts.request import Request

# DraftClasses: which rows accept drafts rarely, sometimes or often, from the measured acceptance of each row.
#
# A batch may mix rows that repeat their input with rows that nothing predicts. Rows of a class have the same number of
# drafts, so that the former have drafts where drafts for all rows would not pay. A row whose drafts have cost more time
# than they gained has none for a while, whatever its class promises: a new request begins with the mean of the others.
#
# If drafts come from a search of the text, the result of a step has the drafts that it made. Texts repeat in runs, so a
# row that had a match in the newest result accepts far more of its next drafts than one that had none, and acceptance
# is measured for both. A first draft also counts if the next step did not verify it: the token that the step drew tells
# whether it was right. So the acceptance of rows without drafts is known without trials.

NUM_CLASSES = 3
_SOMETIMES, _OFTEN = 0.2, 0.5  # classes by the acceptance of the first draft
_PAST_DECAY = 0.9  # weight of earlier requests
_PRIOR_STEPS, _PRIORS = 4.0, (0.1, 0.6)  # of all rows, before any measurement; without and with a match
_WEIGHT = 4.0  # a row begins with so many steps at the mean of all rows
_MIN_PROPOSED = 2  # drafts from which a row counts as matched: a suffix of one token says little
_MAX_OFFERS = 12  # plans of trials after which a row that had no drafts in them is not new: it may never have any
_MAX_LOSS, _LOSS_SHARE = 1.5, 0.01  # tokens that drafts may cost a request, and more by its number of output tokens


class ClassCounts(NamedTuple):
    """Running rows by class."""

    num_rows: tuple[int, ...]
    num_new: tuple[int, ...]  # those that had no drafts yet, and may have some
    accepts: tuple[float, ...]  # mean probability that the first draft of such a row is accepted
    num_spent: int = 0  # rows besides these, which have no drafts now


class _Row:
    __slots__ = ("accepted", "admission", "first_draft", "is_spent", "lost", "matches", "number", "offered", "tried")

    def __init__(self, depth: int) -> None:
        self.number = 0  # its class, when it was last counted
        self.is_spent = False  # it had lost too much then
        self.begin(-1, depth)

    def begin(self, admission: int, depth: int) -> None:
        self.admission = admission  # that the following belong to
        # without and with a match: steps whose first draft is known, decayed, and those of them that accepted it
        self.tried, self.accepted = [0.0, 0.0], [0.0, 0.0]
        self.offered = 0  # plans that wanted drafts for it as a trial
        self.lost = 0.0  # tokens: the time that drafts took, less the drafts that were accepted
        # Whether its newest drafts existed at the commits of the last steps, newest last. The first entry is what the
        # plan knew whose result comes next. Drafts of a model always exist.
        self.matches = [True] * (depth + 1)
        self.first_draft: int | None = None  # for the step whose result comes next, -1: none; None: not known

    @property
    def num_tried(self) -> float:
        return self.tried[0] + self.tried[1]


class DraftClasses:
    def __init__(self, num_rows: int, depth: int = 0) -> None:
        """`depth`: steps in flight while a plan is made."""
        self._depth = depth
        self._rows = [_Row(depth) for _ in range(num_rows)]
        # of all rows, without and with a match
        self._tried, self._accepted = [0.0, 0.0], [0.0, 0.0]
        # of earlier owners of rows
        self._past_tried, self._past_accepted = [_PRIOR_STEPS] * 2, [_PRIOR_STEPS * prior for prior in _PRIORS]

    def count(self, running: Sequence[Request]) -> ClassCounts:
        """Assign the running rows to classes."""
        rows = self._rows
        means = self._means()
        num_rows, num_new, sums, num_spent = [0] * NUM_CLASSES, [0] * NUM_CLASSES, [0.0] * NUM_CLASSES, 0
        for request in running:
            row = rows[request.row]
            if row.admission != request.admission:
                self._begin(row, request.admission)
            row.is_spent = row.lost > _MAX_LOSS and row.lost > _MAX_LOSS + _LOSS_SHARE * request.num_output
            if row.is_spent:
                num_spent += 1
                continue
            accepts = _accepts(row, row.matches[-1], means)
            row.number = number = _number(accepts)
            num_rows[number] += 1
            sums[number] += accepts
            if not row.num_tried and row.offered < _MAX_OFFERS:
                num_new[number] += 1
        return _counts(num_rows, num_new, sums, means, num_spent)

    def count_matched(self, running: Sequence[Request]) -> ClassCounts:
        """The result of `count` if the newest drafts of every row existed. Call it after `count`."""
        means = self._means()
        num_rows, sums, num_spent = [0] * NUM_CLASSES, [0.0] * NUM_CLASSES, 0
        for request in running:
            row = self._rows[request.row]
            if row.is_spent:
                num_spent += 1
                continue
            accepts = _accepts(row, True, means)
            num_rows[_number(accepts)] += 1
            sums[_number(accepts)] += accepts
        return _counts(num_rows, [0] * NUM_CLASSES, sums, means, num_spent)

    def _means(self) -> tuple[float, float]:
        """The acceptance of the first draft over all rows, without and with a match."""
        without, matched = (
            (self._past_accepted[each] + self._accepted[each]) / (self._past_tried[each] + self._tried[each])
            for each in (0, 1)
        )
        return without, matched

    def _begin(self, row: _Row, admission: int) -> None:
        """The row has a new owner. What its last owner accepted counts for the means of all rows."""
        for each in (0, 1):
            self._past_tried[each] = _PAST_DECAY * self._past_tried[each] + row.tried[each]
            self._past_accepted[each] = _PAST_DECAY * self._past_accepted[each] + row.accepted[each]
            self._tried[each] -= row.tried[each]
            self._accepted[each] -= row.accepted[each]
        row.begin(admission, self._depth)

    def of(self, request: Request) -> int:
        """The class of a running request; that of the row's last owner if the request was not counted yet."""
        return self._rows[request.row].number

    def is_spent(self, request: Request) -> bool:
        """Whether a request that was counted has lost too much to have drafts."""
        return self._rows[request.row].is_spent

    def take_least_tried(self, running: Iterable[Request], classes: Collection[int], number: int) -> set[int]:
        """So many rows of these classes for a trial, those first that had drafts in the fewest steps."""
        requests = [request for request in running if not self.is_spent(request) and self.of(request) in classes]
        requests.sort(key=lambda request: self._rows[request.row].num_tried)
        chosen = {request.row for request in requests[:number]}
        for row in chosen:
            self._rows[row].offered += 1
        return chosen

    def add(
        self, requests: Sequence[Request], drawn: Sequence[int], counts: Sequence[int], cost: float = 0.0
    ) -> list[int]:
        """A step was committed: how many tokens each request drew, and how many it accepted; 0: none, as it sat out or
        failed. `cost`: of a draft, in tokens. Returns the class of each request; arbitrary for a request without a
        row."""
        classes, means = [], self._means()
        for request, num, count in zip(requests, drawn, counts, strict=True):
            row = self._rows[request.row]
            is_own = num > 1 and count > 0 and row.admission == request.admission
            classes.append(_number(_accepts(row, row.matches[0], means)) if is_own else row.number)
            if is_own:
                row.lost += (num - 1) * cost - (count - 1)
                if row.first_draft is None:
                    self._learn(row, row.matches[0], count > 1)
        return classes

    def see(
        self,
        requests: Sequence[Request],
        tokens: Iterable[Sequence[int]],
        drafts: Sequence[Sequence[int]],
        cost: float = 0.0,
    ) -> None:
        """A step was committed: the accepted tokens of each request, and the drafts that were made for its next step,
        -1: none. Without an entry the step has made no drafts. `cost`: of making them, in tokens of a row. Call it
        after `add`."""
        for index, (request, new) in enumerate(zip(requests, tokens, strict=True)):
            row = self._rows[request.row]
            if not new or row.admission != request.admission:
                continue
            if row.first_draft is not None:
                self._learn(row, row.matches[0], new[0] == row.first_draft)
            row.first_draft = None
            if drafts:
                proposed = drafts[index]
                row.first_draft = proposed[0]
                row.lost += cost
                row.matches = [*row.matches[1:], min(proposed[:_MIN_PROPOSED]) >= 0]

    def _learn(self, row: _Row, is_matched: bool, is_accepted: bool) -> None:
        tried, accepted = row.tried[is_matched], row.accepted[is_matched]
        row.tried[is_matched] = _DECAY * tried + 1
        row.accepted[is_matched] = _DECAY * accepted + is_accepted
        self._tried[is_matched] += row.tried[is_matched] - tried
        self._accepted[is_matched] += row.accepted[is_matched] - accepted


def _accepts(row: _Row, is_matched: bool, means: Sequence[float]) -> float:
    """The probability that the row accepts its first draft."""
    return (row.accepted[is_matched] + _WEIGHT * means[is_matched]) / (row.tried[is_matched] + _WEIGHT)


def _number(accepts: float) -> int:
    return 0 if accepts < _SOMETIMES else 1 if accepts < _OFTEN else 2


def _counts(
    num_rows: list[int], num_new: list[int], sums: list[float], means: Sequence[float], num_spent: int
) -> ClassCounts:
    of_class = (total / num if num else means[1] for num, total in zip(num_rows, sums, strict=True))
    return ClassCounts(tuple(num_rows), tuple(num_new), tuple(of_class), num_spent)


MIN_GAIN = 1.02  # drafts must promise so much more than no drafts
_DECAY = 0.97  # weight of older steps in the acceptance
_PROBE_DRAFTS, _PROBE_STEPS = 3, 4  # of a trial while rows have no drafts
_WATCH_STEPS = 16  # of a trial that verifies nothing
MAX_PROBED = 256  # drafts of all rows in one step of a trial: more would cost time and add little accuracy
_MAX_TRIED = MAX_PROBED // _PROBE_DRAFTS  # rows
_FIRST_INTERVAL, _MAX_INTERVAL = 32, 1024  # plans between two trials
_TRIAL_SHARE = 0.01  # of the time that trials may take
_MAX_CREDIT = 2.0  # of this time that is saved up, in steps without drafts
_REST_PLANS = 8  # plans without drafts before the choice is made again, if no request comes or goes
_MIN_MEASURED = 3  # steps of a size after which its time is known: the shortest of them
_MAX_TRIES = 6  # more than these and the plans in flight
_REFRESH = 256  # plans with drafts after which the time without drafts is measured again
_SIZES = sizes_up_to(4096, first_steps=8)
_SIZE_OF = [_SIZES[bisect_left(_SIZES, number)] for number in range(_SIZES[-1] + 1)]
_NONE = (0,) * NUM_CLASSES


class DraftLength:
    def __init__(self, max_drafts: int, *, sees_drafts: bool = False) -> None:
        """`sees_drafts`: results have the drafts that their steps made, and `DraftClasses.see` reads them."""
        self.max_drafts = max_drafts
        self.sees_drafts = sees_drafts
        self._candidates = [num for num in (0, 1, 2, 3, 4, 6, 8, 12) if num < max_drafts] + [max_drafts]
        # by class and position of the draft: rows that had such a draft and accepted all before it, and those that
        # accepted it
        self._reached = [[0.0] * max_drafts for _ in range(NUM_CLASSES)]
        self._accepted = [[0.0] * max_drafts for _ in range(NUM_CLASSES)]
        self._seconds: dict[int, float] = {}  # by number of positions, rounded up to a size
        self._proposing: dict[int, float] = {}  # the same of steps that propose drafts and have none
        # of the sizes of each that were measured less than _MIN_MEASURED times
        self._num_measured: dict[int, int] = {}
        self._num_proposing: dict[int, int] = {}
        self._num_tries: dict[int, int] = {}  # plans without drafts to measure a size; a device may have no clock
        self._since_trial = 0  # plans
        self._since_plain = 0  # plans since the time without drafts was measured
        self._interval = _FIRST_INTERVAL
        self._probing = 0  # plans left of a trial
        self._credit = _MAX_CREDIT  # time for trials, in steps without drafts
        self._has_proposed = True  # whether the last plan proposed drafts, or is the first one
        self.probed: tuple[int, ...] = ()  # classes that have drafts as a trial only in the last choice
        self.num_probed = 0  # rows of these classes that have drafts
        self.is_resting = False  # no number of drafts was better than none
        self._rest = 0  # plans left until the choice is made again

    def skip(self) -> bool:
        """Whether the next plan has no drafts and proposes none, as the last one, if it has the same rows."""
        if not self._rest:
            return False
        self._rest -= 1
        self._since_trial += 1
        self._credit = min(_MAX_CREDIT, self._credit + _TRIAL_SHARE)
        return True

    def choose(
        self, counts: ClassCounts, count_matched: Callable[[], ClassCounts] | None = None
    ) -> tuple[tuple[int, ...], int]:
        """The number of drafts per row of the next plan with so many decode rows, by class, and the number to propose
        for the plan after it. `count_matched`: see `DraftClasses`; needed with `sees_drafts`."""
        self.probed, self._rest = (), 0
        self._credit = min(_MAX_CREDIT, self._credit + _TRIAL_SHARE)
        if any(counts.num_rows) or counts.num_spent:
            numbers, num_proposed = self._choose(counts, count_matched)
        else:
            numbers, num_proposed = _NONE, 0 if self.is_resting else self.max_drafts
        if not self._has_proposed:
            numbers = _NONE  # the plan before proposed nothing
        self._has_proposed = num_proposed > 0
        return numbers, num_proposed

    def _choose(
        self, counts: ClassCounts, count_matched: Callable[[], ClassCounts] | None
    ) -> tuple[tuple[int, ...], int]:
        most, best = self.max_drafts, self._best(counts)
        rests = tuple(each for each, num in enumerate(best) if not num and counts.num_rows[each])
        self._since_trial += 1
        self._since_plain += 1
        if self._probing:
            self._probing -= 1
            if self.sees_drafts:
                return best, most
            self.probed = rests
            return tuple(num or min(_PROBE_DRAFTS, most) for num in best), most
        self.is_resting = not any(best)
        if self.is_resting and self.sees_drafts:
            assert count_matched is not None
            self.is_resting = not any(self._best(count_matched()))
        num_rows = sum(counts.num_rows) + counts.num_spent
        if not rests or (self.sees_drafts and not self.is_resting):
            if not counts.num_spent:
                self._since_trial, self._interval = 0, _FIRST_INTERVAL
        elif self._since_trial >= self._interval and self._credit >= _MAX_CREDIT:  # less is for new requests
            num_resting = min(sum(counts.num_rows[each] for each in rests), _MAX_TRIED)
            if self._try(num_rows, num_resting):
                longer = self._interval * self.num_probed // num_resting  # the next trial is that of other rows
                self._since_trial, self._interval = 0, min(self._interval + longer, _MAX_INTERVAL)
        elif num_new := sum(counts.num_new[each] for each in rests):
            self._try(num_rows, num_new)  # a new request may have another kind of text
        if self.is_resting:
            self._since_plain = 0
            if not self._probing:
                left = self._interval - self._since_trial - 1  # plans until the next trial; negative: until it is paid
                self._rest = min(_REST_PLANS, left) if left >= 0 else _REST_PLANS
            return _NONE, most if self._probing else 0
        # the time without drafts is that of plans which propose nothing either: a proposal may cost several passes
        if self._since_plain >= _REFRESH:
            self._since_plain = 0
            return _NONE, 0
        size = _size(num_rows)
        if not self._is_known(size) and self._num_tries.get(size, 0) < _MAX_TRIES:
            self._num_tries[size] = self._num_tries.get(size, 0) + 1
            return _NONE, 0
        return best, most

    def _try(self, num_rows: int, num_tried: int) -> bool:
        """Begin a trial of so many rows, or of fewer, or of fewer steps: what the budget allows. False: nothing."""
        if self.sees_drafts:
            self._probing, self.num_probed = _WATCH_STEPS, num_tried
            return True
        num_tried = min(num_tried, _MAX_TRIED)
        while (cost := self._time(num_rows + _PROBE_DRAFTS * num_tried) / self._time(num_rows) - 1) > 0:
            if _PROBE_STEPS * cost <= self._credit or num_tried == 1:
                break
            num_tried //= 2
        num_steps = _PROBE_STEPS if cost <= 0 else min(_PROBE_STEPS, int(self._credit / cost))
        if num_steps:
            self._credit -= max(num_steps * cost, 0.0)
            self._probing, self.num_probed = num_steps, num_tried
        return num_steps > 0

    def cost(self, num_rows: int, num_drafts: int) -> float:
        """The time that each draft of a step takes, as the number of tokens that steps without drafts draw in it."""
        return max(0.0, self._time(num_rows + num_drafts) / self._time(num_rows) - 1) * num_rows / num_drafts

    def proposal_cost(self, num_rows: int) -> float:
        """The time that a step takes longer to propose drafts, as a share of a step without drafts."""
        size = _size(num_rows)
        if size not in self._proposing or size in self._num_proposing:
            return 0.0
        return max(0.0, self._proposing[size] / self._time(num_rows) - 1)

    def _best(self, counts: ClassCounts) -> tuple[int, ...]:
        """The numbers of drafts by class with the most expected tokens per second. Drafts are added in the order of
        their probability, those of all rows of a class together."""
        steps = []  # drafts: gain of a row per draft, class, the number before them, the number with them
        for each, num_rows in enumerate(counts.num_rows):
            if num_rows:
                tokens = self._expected(each, counts.accepts[each])
                for low, high in zip(self._candidates, self._candidates[1:], strict=False):
                    steps.append(((tokens[high] - tokens[low]) / (high - low), each, low, high))
        positions = sum(counts.num_rows) + counts.num_spent
        gained, numbers = float(positions), list(_NONE)
        best, best_rate = _NONE, MIN_GAIN * positions / self._time(positions)
        for gain, each, low, high in sorted(steps, key=lambda step: (-step[0], step[3])):
            numbers[each] = high
            positions += counts.num_rows[each] * (high - low)
            gained += counts.num_rows[each] * (high - low) * gain
            if (rate := gained / self._time(positions)) > best_rate:
                best, best_rate = tuple(numbers), rate
        return best

    def _expected(self, number: int, chance: float) -> list[float]:
        """Expected tokens of a row of a class by its number of drafts. `chance`: that of the first draft. A position
        that was rarely reached is accepted about as often as the one before it."""
        tokens, all_before = [1.0, 1.0 + chance], chance
        for reached, accepted in zip(self._reached[number][1:], self._accepted[number][1:], strict=True):
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
        if near is None:  # no size is known: one that was measured once must not look faster than all others
            return min(known.values(), default=1.0)
        return min(known[near], known.get(size, known[near]))

    def _is_known(self, size: int) -> bool:
        """The first step of a size may have waited for the host, which compiled or captured it."""
        return size in self._seconds and size not in self._num_measured

    def add(self, seen: Mapping[tuple[int, int, int], int]) -> None:
        """A step was committed: the number of rows by class, number of drafts, and number of accepted drafts."""
        for each in {own for own, _, _ in seen}:
            self._reached[each] = [_DECAY * num for num in self._reached[each]]
            self._accepted[each] = [_DECAY * num for num in self._accepted[each]]
        for (own, num, accepted), rows in seen.items():
            for position in range(min(num, accepted + 1)):
                self._reached[own][position] += rows
            for position in range(accepted):
                self._accepted[own][position] += rows

    def measure(self, num_positions: int, seconds: float, only_proposes: bool = False) -> None:
        """A step without prefill took so many seconds, with the device's wait for the host before it. Shorter times
        count at once: a longer time may contain a rare wait."""
        if only_proposes:
            known, num_measured = self._proposing, self._num_proposing
        else:
            known, num_measured = self._seconds, self._num_measured
        size = _size(num_positions)
        before = known.get(size)
        if before is not None and size not in num_measured:
            known[size] = _smoothed(before, seconds)
            return
        known[size] = seconds if before is None else min(before, seconds)
        num_measured[size] = num_measured.get(size, 0) + 1
        if num_measured[size] == _MIN_MEASURED:
            del num_measured[size]


def _smoothed(before: float, seconds: float) -> float:
    if seconds >= 4 * before:
        return before
    return before + (0.5 if seconds < before else 0.05) * (seconds - before)


def _size(num_positions: int) -> int:
    """The size that a step of so many positions is padded to, roughly."""
    return _SIZE_OF[num_positions] if num_positions < len(_SIZE_OF) else num_positions
