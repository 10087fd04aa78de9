import pytest

from slipstream.errors import QueueFull
from slipstream.params import SamplingParams
from slipstream.request import Request
from slipstream.scheduler.waiting import WaitingQueue


def request(number: int, priority: int = 0) -> Request:
    made = Request(str(number), [1], SamplingParams(), priority=priority, max_length=2)
    made.number = number
    return made


def drain(queue: WaitingQueue) -> list[int]:
    order = []
    while (head := queue.head()) is not None:
        queue.remove(head)
        order.append(head.number)
    return order


def test_lower_priority_numbers_go_first_then_first_come():
    queue = WaitingQueue(10)
    for number, priority in [(3, 1), (1, 1), (2, 0), (0, 2)]:
        queue.push(request(number, priority))
    assert drain(queue) == [2, 1, 3, 0]


def test_one_that_comes_back_keeps_its_place():
    queue = WaitingQueue(10)
    first, second = request(0), request(1)
    queue.push(first)
    queue.push(second)
    queue.remove(first)
    queue.push(first)
    assert drain(queue) == [0, 1]
    assert len(queue) == 0


def test_parked_ones_are_counted_but_not_taken():
    queue = WaitingQueue(10)
    parked, other = request(0), request(1)
    queue.park(parked)
    queue.push(other)
    assert queue.head() is other and len(queue) == 2 and parked in queue
    queue.unpark(parked)
    assert queue.head() is parked
    queue.remove(parked)
    queue.unpark(parked)  # gone since: nothing happens
    assert drain(queue) == [1]


def test_removed_from_the_middle_and_from_the_park():
    queue = WaitingQueue(10)
    requests = [request(n) for n in range(5)]
    for each in requests[:4]:
        queue.push(each)
    queue.park(requests[4])
    queue.remove(requests[2])
    queue.remove(requests[4])
    assert len(queue) == 3 and requests[2] not in queue
    assert drain(queue) == [0, 1, 3]


def test_the_heap_does_not_keep_what_was_removed():
    queue = WaitingQueue(10**6)
    stays = request(0)
    queue.push(stays)
    for number in range(1, 5000):
        each = request(number)
        queue.push(each)
        queue.remove(each)
    assert len(queue._heap) < 200
    assert drain(queue) == [0]


def test_a_full_queue_refuses_with_the_numbers():
    queue = WaitingQueue(3)
    queue.push(request(0))
    queue.park(request(1))
    queue.check_room(1)
    with pytest.raises(QueueFull, match=r"2 requests are waiting and 2 samples do not fit under the limit of 3"):
        queue.check_room(2)
