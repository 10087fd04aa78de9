import pytest

from slipstream.base.errors import InvalidParams, QueueFull
from slipstream.contracts.request import Request, WaitFor
from slipstream.params.sampling import SamplingParams
from slipstream.scheduler.waiting import PromptSources, WaitingQueue


def request(number: int, priority: int = 0, caller: str = "") -> Request:
    made = Request(str(number), [1], SamplingParams(), priority=priority, caller=caller, max_length=2)
    made.number = number
    return made


def drain(queue: WaitingQueue) -> list[int]:
    order = []
    while (head := queue.first()) is not None:
        queue.remove(head)
        order.append(head.number)
    return order


def test_lower_priority_numbers_go_first_then_first_come():
    queue = WaitingQueue(10)
    for number, priority in [(3, 1), (1, 1), (2, 0), (0, 2)]:
        queue.push(request(number, priority))
    assert drain(queue) == [2, 1, 3, 0]


def test_a_returning_request_keeps_its_place():
    queue = WaitingQueue(10)
    first, second = request(0), request(1)
    queue.push(first)
    queue.push(second)
    queue.remove(first)
    queue.push(first)
    assert drain(queue) == [0, 1]
    assert len(queue) == 0


def test_held_requests_are_counted_but_not_returned():
    queue = WaitingQueue(10)
    held, other = request(0), request(1)
    queue.push(held, WaitFor.PROMPT)
    queue.push(other)
    assert queue.first() is other and len(queue) == 2 and held in queue
    queue.ready(held, WaitFor.PROMPT)
    assert queue.first() is held
    queue.remove(held)
    queue.ready(held, WaitFor.PROMPT)  # gone since: nothing happens
    assert drain(queue) == [1]


def test_a_request_that_waits_for_two_things_needs_both():
    queue = WaitingQueue(10)
    held = request(0)
    queue.push(held, WaitFor.QUERY | WaitFor.TOKENS)
    queue.ready(held, WaitFor.PROMPT)
    queue.ready(held, WaitFor.TOKENS)
    assert queue.first() is None and held.waits_for == WaitFor.QUERY
    queue.ready(held, WaitFor.QUERY)
    assert queue.first() is held
    queue.check()


def test_ready_and_held_requests_can_be_removed():
    queue = WaitingQueue(10)
    requests = [request(n) for n in range(5)]
    for each in requests[:4]:
        queue.push(each)
    queue.push(requests[4], WaitFor.QUERY)
    queue.remove(requests[2])
    queue.remove(requests[4])
    assert len(queue) == 3 and requests[2] not in queue
    assert drain(queue) == [0, 1, 3]


def test_removed_requests_leave_no_entries():
    queue = WaitingQueue(10**6)
    stays = request(0)
    queue.push(stays)
    for number in range(1, 5000):
        each = request(number, priority=number % 3, caller=str(number % 100 * (number % 2)))
        queue.push(each)
        queue.remove(each)
    queue.check()
    assert list(queue._levels) == [0] and len(queue._priorities) < 200
    (callers,) = queue._levels[0]._by_caller.values()
    assert len(callers._heap) < 200 and len(queue._levels[0].fair_queue._order) < 200
    assert drain(queue) == [0]


def test_callers_alternate_within_a_priority():
    queue = WaitingQueue(100)
    for number in range(6):
        queue.push(request(number, caller="a"))
    queue.push(request(6, caller="b"))
    queue.push(request(7, caller="b", priority=1))
    queue.push(request(8, caller="c", priority=1))
    order = []
    while (head := queue.first()) is not None:
        queue.charge(head, 10)
        queue.remove(head)
        order.append(head.number)
    assert order == [0, 6, 1, 2, 3, 4, 5, 7, 8]


def test_a_preempted_request_goes_before_all_that_have_not_begun():
    queue = WaitingQueue(100)
    queue.push(request(0, caller="b"))
    back, older = request(9, caller="a"), request(5, caller="a")
    back.num_preemptions = older.num_preemptions = 1
    queue.push(back)
    queue.push(older)
    queue.charge(back, 1000)
    queue.check()
    assert drain(queue) == [5, 9, 0]


def test_a_blocked_first_request_is_not_overtaken_by_new_callers():
    queue = WaitingQueue(100)
    for number in range(2):
        queue.push(request(number, caller="a"))
    for number in range(2, 50):
        queue.push(request(number, caller=f"new {number}"))
        assert queue.first().number == 0


def test_a_full_queue_refuses_with_the_numbers():
    queue = WaitingQueue(3)
    queue.push(request(0))
    queue.push(request(1), WaitFor.QUERY)
    queue.check_room(1)
    with pytest.raises(QueueFull, match=r"2 requests are waiting and 2 samples do not fit under the limit of 3"):
        queue.check_room(2)


class Queue(list):
    """A queue of numbers with room for `most`, that refuses those below 0 and never has room for those over 99."""

    most = 3

    def submit(self, number):
        if number < 0:
            raise InvalidParams(f"{number} is wrong")
        if len(self) + (self.most + 1 if number > 99 else 1) > self.most:
            raise QueueFull("no room")
        self.append(number)


class Numbers:
    def __init__(self, numbers, ready=99):
        self.numbers, self.ready, self.error = list(numbers), ready, None

    def is_ready(self):
        return self.ready > 0

    def take(self, limit):
        count = min(limit, max(self.ready, 1))
        taken, self.numbers = self.numbers[:count], self.numbers[count:]
        self.ready -= len(taken)
        return [] if self.error else taken

    def fail(self, error):
        self.error = error


@pytest.fixture
def queue():
    return Queue()


@pytest.fixture
def sources(queue):
    return PromptSources(queue.submit, queue)


def test_a_prompt_that_the_full_queue_refused_is_submitted_later(queue, sources):
    sources.add(Numbers(range(7)), is_lazy=False)
    assert sources.take(99) == 3 and queue == [0, 1, 2] and sources.take(99) == 0
    del queue[:2]
    assert sources.take(99) == 2 and queue == [2, 3, 4]
    queue.clear()
    assert sources.take(1) == 1 and sources.take(99) == 1 and queue == [5, 6]
    assert sources.take(99) == 0 and not sources


def test_one_prompt_is_waited_for(queue, sources):
    source = Numbers(range(3), ready=0)
    sources.add(source, is_lazy=True)
    assert not sources.is_ready() and sources.take(3) == 1
    source.ready = 1
    assert sources.is_ready() and sources.take(3) == 1 and queue == [0, 1]


@pytest.mark.parametrize(("wrong", "kind"), [(-1, InvalidParams), (100, QueueFull)])
def test_a_refused_prompt_ends_its_source_alone(queue, sources, wrong, kind):
    queue.most = 9
    older, source = Numbers([7, 8]), Numbers([wrong, 1])
    sources.add(older, is_lazy=True)
    sources.add(source, is_lazy=True)
    sources.take(9)
    assert queue == [7, 8] and not sources.take(9) and not sources
    assert isinstance(source.error, kind) and older.error is None and sources.num_refused == 1


def test_the_newest_source_comes_first_and_each_can_be_closed(queue, sources):
    queue.most = 99
    close_older = sources.add(Numbers(range(10, 19)), is_lazy=False)
    close_newer = sources.add(Numbers(range(3)), is_lazy=True)
    assert sources.is_lazy and sources.take(2) == 2 and queue == [0, 1]
    close_newer()
    assert not sources.is_lazy and sources.take(2) == 2 and queue == [0, 1, 10, 11]
    close_older()
    close_older()
    assert not sources
