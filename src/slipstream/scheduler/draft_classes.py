"""DraftClasses: which rows accept drafts rarely, sometimes or often, from the measured acceptance of each row.

A batch may mix rows that repeat their input with rows that nothing predicts. Rows of a class have the same number of
drafts, so that the former have drafts where drafts for all rows would not pay. A row whose drafts have cost more time
than they gained has none for a while, whatever its class promises: a new request begins with the mean of the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from slipstream.request import Request

NUM_CLASSES = 3
_SOMETIMES, _OFTEN = 0.2, 0.5  # classes by the acceptance of the first draft
_DECAY = 0.97  # weight of older steps of a row
_PAST_DECAY = 0.9  # weight of earlier requests
_PRIOR_STEPS, _PRIOR = 4.0, 0.6  # of all rows, before any measurement
_WEIGHT = 4.0  # a row begins with so many steps at the mean of all rows
_MAX_OFFERS = 12  # plans of trials after which a row that had no drafts in them is not new: it may never have any
_MAX_LOSS, _LOSS_SHARE = 1.5, 0.01  # tokens that drafts may cost a request, and more by its number of output tokens


class ClassCounts(NamedTuple):
    """Running rows by class."""

    num_rows: tuple[int, ...]
    num_new: tuple[int, ...]  # those that had no drafts yet, and may have some
    accepts: tuple[float, ...]  # mean probability that the first draft of such a row is accepted
    num_spent: int = 0  # rows besides these, which have no drafts now


class _Row:
    __slots__ = ("accepted", "admission", "is_spent", "lost", "number", "offered", "tried")

    def __init__(self) -> None:
        self.number = 0  # its class, when it was last counted
        self.is_spent = False  # it had lost too much then
        self.begin(-1)

    def begin(self, admission: int) -> None:
        self.admission = admission  # that the following belong to
        self.tried = 0.0  # steps with drafts, decayed
        self.accepted = 0.0  # those of them that accepted the first draft
        self.offered = 0  # plans that wanted drafts for it as a trial
        self.lost = 0.0  # tokens: the time that drafts took, less the drafts that were accepted


class DraftClasses:
    def __init__(self, num_rows: int) -> None:
        self._rows = [_Row() for _ in range(num_rows)]
        self._tried = self._accepted = 0.0  # of all rows
        self._past_tried, self._past_accepted = _PRIOR_STEPS, _PRIOR_STEPS * _PRIOR  # of earlier owners of rows

    def count(self, running: Sequence[Request]) -> ClassCounts:
        """Assign the running rows to classes."""
        rows = self._rows
        mean = (self._past_accepted + self._accepted) / (self._past_tried + self._tried)
        before = _WEIGHT * mean
        num_rows, num_new, sums, num_spent = [0] * NUM_CLASSES, [0] * NUM_CLASSES, [0.0] * NUM_CLASSES, 0
        for request in running:
            row = rows[request.row]
            if row.admission != request.admission:
                self._begin(row, request.admission)
            row.is_spent = row.lost > _MAX_LOSS and row.lost > _MAX_LOSS + _LOSS_SHARE * request.num_output
            if row.is_spent:
                num_spent += 1
                continue
            accepts = (row.accepted + before) / (row.tried + _WEIGHT)
            row.number = number = 0 if accepts < _SOMETIMES else 1 if accepts < _OFTEN else 2
            num_rows[number] += 1
            sums[number] += accepts
            if not row.tried and row.offered < _MAX_OFFERS:
                num_new[number] += 1
        means = (total / num if num else mean for num, total in zip(num_rows, sums, strict=True))
        return ClassCounts(tuple(num_rows), tuple(num_new), tuple(means), num_spent)

    def _begin(self, row: _Row, admission: int) -> None:
        """The row has a new owner. What its last owner accepted counts for the mean of all rows."""
        self._past_tried = _PAST_DECAY * self._past_tried + row.tried
        self._past_accepted = _PAST_DECAY * self._past_accepted + row.accepted
        self._tried -= row.tried
        self._accepted -= row.accepted
        row.begin(admission)

    def of(self, request: Request) -> int:
        """The class of a running request; that of the row's last owner if the request was not counted yet."""
        return self._rows[request.row].number

    def is_spent(self, request: Request) -> bool:
        """Whether a request that was counted has lost too much to have drafts."""
        return self._rows[request.row].is_spent

    def take_least_tried(self, running: Iterable[Request], classes: Collection[int], number: int) -> set[int]:
        """So many rows of these classes for a trial, those first that had drafts in the fewest steps."""
        requests = [request for request in running if not self.is_spent(request) and self.of(request) in classes]
        requests.sort(key=lambda request: self._rows[request.row].tried)
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
        classes = []
        for request, num, count in zip(requests, drawn, counts, strict=True):
            row = self._rows[request.row]
            classes.append(row.number)
            if num > 1 and count and row.admission == request.admission:
                tried, accepted = row.tried, row.accepted
                row.tried = _DECAY * tried + 1
                row.accepted = _DECAY * accepted + (count > 1)
                row.lost += (num - 1) * cost - (count - 1)
                self._tried += row.tried - tried
                self._accepted += row.accepted - accepted
        return classes
