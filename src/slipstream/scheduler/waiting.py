"""WaitingQueue: requests without a row, by priority, then in the order they came.

A preempted request keeps its number and so its place. Some requests wait but must not be taken yet (a sample whose
leader still computes their prompt, a preempted request whose last tokens are on their way): they are parked.
"""

from __future__ import annotations

import heapq

from slipstream.errors import QueueFull
from slipstream.request import Request


class WaitingQueue:
    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        # Removed requests leave their key in the heap; it is dropped when it reaches the top or the heap is rebuilt.
        self._heap: list[tuple[int, int]] = []  # (priority, number)
        self._ready: dict[int, Request] = {}  # by number
        self._parked: dict[int, Request] = {}

    def __len__(self) -> int:
        """All that wait, parked ones too."""
        return len(self._ready) + len(self._parked)

    def __contains__(self, request: Request) -> bool:
        return request.number in self._ready or request.number in self._parked

    def check_room(self, count: int) -> None:
        """Refuse newcomers the queue has no room for. Preempted requests may always come back."""
        if len(self) + count > self.max_waiting:
            more = f"{count} samples do" if count > 1 else "one more does"
            raise QueueFull(
                f"{len(self)} requests are waiting and {more} not fit under the limit of {self.max_waiting}; "
                f"try again later or raise --max-waiting"
            )

    def push(self, request: Request) -> None:
        assert request not in self, f"{request} waits already"
        self._ready[request.number] = request
        heapq.heappush(self._heap, (request.priority, request.number))

    def park(self, request: Request) -> None:
        """Let it wait, but not be taken before `unpark`."""
        assert request not in self, f"{request} waits already"
        self._parked[request.number] = request

    def unpark(self, request: Request) -> None:
        """Now it may be taken. Nothing happens if it was not parked: it may be gone since."""
        if self._parked.pop(request.number, None) is not None:
            self.push(request)

    def head(self) -> Request | None:
        """The next to be taken, left in its place."""
        heap, ready = self._heap, self._ready
        while heap:
            request = ready.get(heap[0][1])
            if request is not None:
                return request
            heapq.heappop(heap)
        return None

    def remove(self, request: Request) -> None:
        """Take any request out; the head in O(log n), others in O(1) and their share of a rebuilding now and then."""
        if self._parked.pop(request.number, None) is not None:
            return
        del self._ready[request.number]
        if len(self._heap) > 2 * len(self._ready) + 64:
            self._heap = [(waiting.priority, number) for number, waiting in self._ready.items()]
            heapq.heapify(self._heap)
