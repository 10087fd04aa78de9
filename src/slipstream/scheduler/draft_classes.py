"""DraftClasses: which rows accept drafts rarely, sometimes or often, from the measured acceptance of each row.

A batch may mix rows that repeat their input with rows that nothing predicts. Rows of a class have the same number of
drafts, so that the former have drafts where drafts for all rows would not pay. A row whose drafts have cost more time
than they gained has none for a while, whatever its class promises: a new request begins with the mean of the others.

If drafts come from a search of the text, the result of a step has the drafts that it made. Texts repeat in runs, so a
row that had a match in the newest result accepts far more of its next drafts than one that had none, and acceptance is
measured for both. A first draft also counts if the next step did not verify it: the token that the step drew tells
whether it was right. So the acceptance of rows without drafts is known without trials.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from slipstream.contracts.request import Request

NUM_CLASSES = 3
_SOMETIMES, _OFTEN = 0.2, 0.5  # classes by the acceptance of the first draft
_DECAY = 0.97  # weight of older steps of a row
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
