"""FairQueue: waiting callers share the service, whatever other callers do."""

from __future__ import annotations

import random

import pytest

from slipstream.scheduler.waiting import FairQueue, LazyHeap


class Queue:
    """Requests of callers, by their sizes in tokens."""

    def __init__(self) -> None:
        self.fair_queue = FairQueue()
        self.sizes: dict[str, list[int]] = {}
        self.served: dict[str, int] = {}

    def add(self, caller: str, *sizes: int) -> None:
        if caller not in self.sizes:
            self.fair_queue.add(caller)
        self.sizes.setdefault(caller, []).extend(sizes)

    def drop(self, caller: str) -> None:
        """Abort all requests of this caller."""
        del self.sizes[caller]
        self.fair_queue.remove(caller)

    def serve(self) -> str:
        caller = self.fair_queue.next()
        assert caller is not None
        size = self.sizes[caller].pop(0)
        self.fair_queue.charge(caller, size)
        self.served[caller] = self.served.get(caller, 0) + size
        if not self.sizes[caller]:
            self.drop(caller)
        return caller


def test_callers_alternate_whatever_they_submitted():
    queue = Queue()
    queue.add("a", *[10] * 1000)
    queue.add("b", 10, 10)
    assert [queue.serve() for _ in range(6)] == ["a", "b", "a", "b", "a", "a"]


def test_callers_are_charged_by_tokens():
    queue = Queue()
    queue.add("large", *[100] * 10)
    queue.add("small", *[10] * 100)
    order = [queue.serve() for _ in range(44)]
    assert order.count("large") == 4 and order.count("small") == 40


def test_a_caller_that_was_idle_has_no_credit():
    queue = Queue()
    queue.add("a", *[10] * 1000)
    for _ in range(500):
        queue.serve()
    queue.add("b", *[10] * 100)
    order = [queue.serve() for _ in range(100)]
    assert 49 <= order.count("b") <= 51


def test_resubmitting_gives_no_more_service_than_queueing():
    queue = Queue()
    queue.add("a", *[10] * 1000)
    for _ in range(200):
        if "b" not in queue.sizes:
            queue.add("b", 10)
        queue.serve()
    assert abs(queue.served["a"] - queue.served["b"]) <= 20


@pytest.mark.parametrize("num_new", [1, 3])
def test_a_waiting_caller_is_served_however_many_new_callers_arrive(num_new: int):
    """More callers arrive than are served. The share of the first shrinks, but not to zero."""
    queue = Queue()
    queue.add("a", *[10] * 1000)
    for step in range(300):
        for number in range(num_new):
            queue.add(f"new {step} {number}", 10)
        queue.serve()
    assert queue.served["a"] >= 10 * (20 if num_new == 1 else 3)


def test_tokens_computed_later_are_charged_too():
    queue = Queue()
    queue.add("a", *[1] * 100)
    queue.add("b", *[1] * 100)
    assert queue.serve() == "a"
    queue.fair_queue.charge("a", 20)  # the tokens it generated
    assert [queue.serve() for _ in range(22)] == ["b"] * 21 + ["a"]


def test_a_caller_that_does_not_wait_is_charged_too():
    queue = Queue()
    queue.add("a", *[1] * 100)
    queue.fair_queue.charge("b", 20)
    queue.add("b", *[1] * 100)
    order = [queue.serve() for _ in range(30)]
    assert order[:10] == ["a"] * 10 and "b" in order


def test_no_account_is_kept_of_callers_that_are_gone():
    queue = Queue()
    queue.add("a", *[10] * 20_000)
    for step in range(10_000):
        queue.add(f"new {step}", 10)
        queue.serve()
        queue.fair_queue.charge(f"gone {step}", 5)
    while len(queue.sizes) > 1:
        queue.serve()
    queue.add("b", 1)
    assert len(queue.fair_queue._accounts) < 300 and len(queue.fair_queue._order) < 300
    queue.drop("a")
    queue.drop("b")
    assert not queue.fair_queue._accounts and queue.fair_queue.next() is None
    queue.fair_queue.charge("a", 10)  # no caller waits, so none is behind
    assert not queue.fair_queue._accounts


@pytest.mark.parametrize("seed", range(20))
def test_two_waiting_callers_get_equal_service_up_to_one_request(seed: int):
    rng = random.Random(seed)
    queue, largest = Queue(), 50
    for step in range(600):
        for caller in ("a", "b"):
            if len(queue.sizes.get(caller, ())) < 2:
                queue.add(caller, rng.randint(1, largest), rng.randint(1, largest))
        if rng.random() < 0.4:
            queue.add(f"other {rng.randrange(5)}", *[rng.randint(1, largest) for _ in range(rng.randint(1, 4))])
        if rng.random() < 0.1 and (others := queue.sizes.keys() - {"a", "b"}):
            queue.drop(rng.choice(sorted(others)))
        if rng.random() < 0.2:
            queue.fair_queue.charge(f"other {rng.randrange(5)}", rng.randint(1, largest))
        waiting = {name: account for name, account in queue.fair_queue._accounts.items() if account.waits}
        first = min(waiting, key=lambda name: (waiting[name].used, waiting[name].turn))
        assert queue.serve() == first
        assert abs(queue.served.get("a", 0) - queue.served.get("b", 0)) <= 2 * largest, step


def test_a_lazy_heap_gives_the_smallest_live_entry():
    rng = random.Random(0)
    heap: LazyHeap[int] = LazyHeap()
    live: set[int] = set()
    for _ in range(5000):
        if live and rng.random() < 0.5:
            live.remove(rng.choice(sorted(live)[:3]))
        else:
            live.add(new := rng.randrange(1000))
            heap.push(new, live.__contains__)
        assert heap.top(live.__contains__) == min(live, default=None)
        assert len(heap) <= 2 * 1000 + 64
