"""InlineClient: when the prompts of a call are submitted, and interrupts, with a scripted device."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from patience import PATIENCE
from scripted_engine import scripted_core, submit, tokens_alone
from slipstream import AsyncEngine
from slipstream.api.llm import follow
from slipstream.base.errors import EngineDead, InvalidPrompt, QueueFull, RequestTooLarge
from slipstream.engine.core import PROMPTS_PER_STEP
from slipstream.engine.lanes import Lanes
from slipstream.record.device_timing import DeviceTimer
from slipstream.transport.inline import InlineClient

DESCRIPTION = SimpleNamespace(name="m", max_waiting=None, adapters=())
SERVED = SimpleNamespace(description=DESCRIPTION, base_name="m", tokenizer=None, lora=None)
DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


class Prompts(list):
    """Prompts with one priority."""

    has_one_priority = True

    @classmethod
    def of(cls, messages):
        return cls((message, None) for message in messages)


class World:
    """A client that keeps what was launched, and how many prompts were submitted by then."""

    def __init__(self, depth=1, **limits):
        self.core = scripted_core(depth, **limits)
        self.client = InlineClient(Lanes({"m": self.core}))
        self.engine = AsyncEngine(client=self.client)
        self.engine.models["m"] = SERVED
        self.plans, self.num_taken = [], []
        launch = self.core.executor.launch

        def watched(plan):
            self.plans.append(plan)
            self.num_taken.append(self.core._num_submitted)
            launch(plan)

        self.core.executor.launch = watched

    def run(self, messages, follows=True):
        return self.feed(Prompts.of(messages) if follows else list(Prompts.of(messages)))

    def feed(self, prompts):
        async def call():
            with self.engine.read((), streaming=False) as stream:
                return await stream.feed(prompts)

        return self.client.call(call())

    def stream(self, message):
        return follow(self.client, self.engine, (message, None), "m")

    def num_first(self, messages):
        """Prompts that were submitted before the first step."""
        self.num_taken.clear()
        num_before = self.core._num_submitted
        self.run(messages)
        return self.num_taken[0] - num_before


def tokens_of(track):
    return [sample.token_ids for sample in track.samples]


def mixed(num):
    """Prompts of all lengths; some begin alike, some are drawn from several times."""
    rng = np.random.default_rng(3)
    same = rng.integers(90, size=40).tolist()
    for place in range(num):
        head = same[: int(rng.integers(40))] if place % 3 else []
        tail = rng.integers(90, size=int(rng.integers(1, 14))).tolist()
        yield submit(f"r{place}", head + tail, n=1 + (place % 5 == 4), max_tokens=int(rng.integers(1, 9)))


@DEPTHS
@pytest.mark.parametrize("limits", [{}, dict(num_pages=24), dict(max_num_seqs=3), dict(max_waiting=5)])
def test_the_steps_are_the_same_whenever_prompts_are_taken_in(depth, limits):
    messages = list(mixed(40))
    follows, early = World(depth, **limits), World(depth, **limits)
    found, wanted = follows.run(messages), early.run(messages, follows=False)
    assert [track.id for track in found] == [message.request_id for message in messages]
    assert [tokens_of(track) for track in found] == [tokens_of(track) for track in wanted]
    assert tokens_of(found[4]) == [tokens_alone(messages[4], sample)[0] for sample in (0, 1)]
    assert len(follows.plans) == len(early.plans) or "max_waiting" in limits
    if "max_waiting" not in limits:
        for ours, theirs in zip(follows.plans, early.plans, strict=True):
            assert str(ours) == str(theirs)
    follows.core.scheduler.check()


def test_the_first_step_waits_only_for_those_it_has_room_for():
    messages = [submit(f"r{place}", [place + 1] * 8, max_tokens=1) for place in range(20)]
    world = World(depth=0, max_num_batched_tokens=16)
    world.run(messages)
    assert world.num_taken == list(range(2, 21, 2))
    world = World(max_num_batched_tokens=16)
    world.run(messages)
    assert world.num_taken[:4] == [2, 2 + PROMPTS_PER_STEP, 2 + 2 * PROMPTS_PER_STEP, 20]
    world = World(max_num_batched_tokens=16)
    world.run(messages, follows=False)
    assert set(world.num_taken) == {20}


def test_prompts_that_are_in_the_cache_do_not_make_small_steps():
    world = World(max_num_batched_tokens=16)
    again = [submit(f"r{place}", [7] * 13, max_tokens=1) for place in range(9)]
    world.run(again[:1])
    world.plans.clear()
    world.run(again[1:])
    assert [int(plan.num_tokens.sum()) for plan in world.plans] == [8]


def test_other_prompts_are_submitted_between_steps(monkeypatch):
    world = World(max_num_batched_tokens=16)
    asked = []

    def too_early():
        asked.append(world.core._num_submitted)
        return 1.0 if len(asked) < 4 else 0.0

    monkeypatch.setattr(world.core.pace, "too_early", too_early)
    world.run([submit(f"r{place}", [place + 1] * 8, max_tokens=1) for place in range(20)])
    many = 2 + PROMPTS_PER_STEP
    assert asked[:4] == [many, many + 1, many + 2, many + 3] and world.num_taken[:2] == [2, many + 3]


def test_queue_time_counts_from_the_start_of_the_call():
    world = World(max_num_batched_tokens=16)
    tracks = world.run([submit(f"r{place}", [place + 1] * 8, max_tokens=1) for place in range(20)])
    assert len({track.submitted for track in tracks}) == 1
    latencies = [track.metrics.first_token_latency for track in tracks]
    assert latencies == sorted(latencies)


def test_all_prompts_are_submitted_first_where_their_order_matters():
    some = [submit(f"r{place}", [place + 1] * 8, max_tokens=1) for place in range(20)]
    world = World(max_num_batched_tokens=16)
    assert world.num_first(some) == 2
    with_others = world.stream(submit("other", [1], max_tokens=9))
    next(with_others)
    assert world.num_first(some) == 20
    with_others.close()
    assert world.num_first(some) == PROMPTS_PER_STEP  # its last step is in flight
    # one that is too large must be refused before any runs
    assert World(num_pages=9, max_num_batched_tokens=16).num_first(some) == 20


def test_a_prompt_that_can_never_run_is_refused_before_any_runs():
    world = World(num_pages=9)
    messages = [submit("a", [1] * 8), submit("b", [1] * 40, max_tokens=20)]
    with pytest.raises(RequestTooLarge):
        world.run(messages)
    assert not world.plans and not world.core.has_requests()


def test_more_samples_than_the_queue_holds_are_refused():
    world = World(max_waiting=5)
    with pytest.raises(QueueFull):
        world.run([*mixed(9), submit("z", [1], n=9)])
    assert world.core.step() == [] and not world.core.has_requests()  # the engine is well
    world.core.scheduler.check()


class Late(Prompts):
    """Prompts that become ready some time, the first two at once."""

    ready = True

    def is_ready(self):
        return self.ready

    def __iter__(self):
        for place, prepared in enumerate(super().__iter__()):
            self.ready = place < 1
            yield prepared


@DEPTHS
def test_a_step_waits_for_a_prompt_only_if_it_has_room(depth):
    """So steps are the same, however long a text takes to be encoded."""
    messages = [submit(f"r{place}", [place + 1] * 8, max_tokens=3) for place in range(20)]
    follows, early = (World(depth, max_num_batched_tokens=16, max_num_seqs=4) for _ in range(2))
    found = follows.feed(Late.of(messages))
    wanted = early.run(messages, follows=False)
    assert [tokens_of(track) for track in found] == [tokens_of(track) for track in wanted]
    assert list(map(str, follows.plans)) == list(map(str, early.plans))
    assert follows.num_taken[:3] == [2, 4, 4], "prompts were requested without a free row"


class Panic(BaseException):
    """As a tokenizer's thread may have."""


@DEPTHS
@pytest.mark.parametrize("error", [InvalidPrompt, ValueError, TypeError, Panic, KeyboardInterrupt])
@pytest.mark.parametrize("place", [0, 1, 7])
def test_prompts_that_are_refused_or_cannot_be_read_end_the_call_and_not_the_engine(depth, error, place):
    """Also where it is a step that asks for them: nothing of the engine is touched while they are read."""
    world = World(depth, max_num_batched_tokens=16)

    class Failing(Prompts):
        def __iter__(self):
            yield from super().__iter__()
            raise error("no")

    with pytest.raises(error, match="no"):
        world.feed(Failing.of(submit(f"r{number}", [number + 1] * 8, max_tokens=3) for number in range(place)))
    assert world.engine.is_idle and not world.core.scheduler.num_running
    world.core.scheduler.check()
    (track,) = world.run([submit("next", [1, 2], max_tokens=3)])
    assert tokens_of(track) == [tokens_alone(track.message, 0)[0]]


@pytest.mark.parametrize("place", [0, 1])
def test_a_handled_error_keeps_no_reference_to_prompts(place):
    """Else they are kept until old garbage is collected."""
    world = World(max_num_batched_tokens=16)

    class Failing(Prompts):
        def __iter__(self):
            yield from super().__iter__()
            raise ValueError("no")

    prompts = Failing.of([submit("r", [1] * 8, max_tokens=3)] * place)
    kept = weakref.ref(prompts)
    gc.disable()
    try:
        with pytest.raises(ValueError, match="no") as found:
            world.feed(prompts)
        del found, prompts
        assert kept() is None
    finally:
        gc.enable()


def test_an_engine_failure_as_a_prompt_is_taken_is_not_a_user_error(monkeypatch):
    world = World(max_num_batched_tokens=16)
    take_in = world.core._requests

    def broken(message):
        if message.request_id == "r1":  # the first that a step asks for
            raise ValueError("broken")
        return take_in(message)

    monkeypatch.setattr(world.core, "_requests", broken)
    with pytest.raises(EngineDead, match="broken"):
        world.run([submit(f"r{place}", [place + 1] * 8, max_tokens=1) for place in range(20)])
    assert world.engine.is_idle


@pytest.mark.parametrize("is_early", [False, True])
def test_only_prompts_that_the_next_steps_can_use_are_submitted(is_early, monkeypatch):
    """Each fills a step, and more came with each."""
    world = World(max_num_seqs=4, max_num_batched_tokens=16, max_waiting=200)
    scheduler, num_waiting, num_asked = world.core.scheduler, [], 0

    def too_early():
        nonlocal num_asked
        num_asked += 1
        return 1.0 if is_early and num_asked % 20 else 0.0

    monkeypatch.setattr(world.core.pace, "too_early", too_early)
    monkeypatch.setattr(world.core.pace, "wait_until_due", lambda: None)
    step = world.core.step

    def watched():
        num_waiting.append(scheduler.num_waiting)
        return step()

    monkeypatch.setattr(world.core, "step", watched)
    tracks = world.run([submit(f"r{place}", [place + 1] * 16, max_tokens=1) for place in range(90)])
    assert len(tracks) == 90 and len(world.plans) == 90
    assert max(num_waiting) < 2 * 4 + PROMPTS_PER_STEP


@DEPTHS
def test_waiting_for_prompts_does_not_count_as_host_time(depth):
    world = World(depth, max_num_batched_tokens=16, max_num_seqs=4)
    now, ended = 0.0, -1.0  # seconds; and when the device was done last
    world.core.timer = timer = DeviceTimer(lambda: now)
    launch, finish = world.core.executor.launch, world.core.executor.finish

    def point(time):
        return SimpleNamespace(time=time, done=lambda: time <= now, since=lambda earlier: time - earlier.time)

    def launched(plan):
        nonlocal now
        now += 0.001
        launch(plan)

    def timed(late=None):
        nonlocal ended
        handle, start = finish(), max(now, ended)
        ended = start + 0.01
        handle.interval = SimpleNamespace(started=point(start), ended=point(ended), late=None)
        return handle

    world.core.executor.launch, world.core.executor.finish = launched, timed

    class Slow(Late):
        def __iter__(self):
            nonlocal now
            for prepared in super().__iter__():
                now += 0.5
                yield prepared

    world.feed(Slow.of(submit(f"r{place}", [place + 1] * 8, max_tokens=3) for place in range(20)))
    total, num_steps = timer.total, len(world.plans)
    assert total.num_steps == num_steps and total.host == pytest.approx(0.001 * num_steps)
    assert world.core.pace._host < 0.0011
    assert total.output > 5 and total.host_late < 0.001 * num_steps + 1e-9


def test_a_failed_call_aborts_its_requests():
    world = World(max_num_batched_tokens=16)
    world.engine.receive = None  # processing the results fails
    with pytest.raises(TypeError):
        world.run([submit(f"r{place}", [place + 1] * 8, max_tokens=1) for place in range(20)])
    del world.engine.receive
    assert not world.core.scheduler.sources and world.engine.is_idle
    assert world.core.scheduler.num_waiting == world.core.scheduler.num_running == 0
    (track,) = world.run([submit("next", [1, 2], max_tokens=3)])
    assert tokens_of(track) == [tokens_alone(track.message, 0)[0]]


def test_a_device_that_breaks_while_prompts_are_taken_in():
    world = World(max_num_batched_tokens=16)
    world.core.executor.breaks_at = "finish"
    with pytest.raises(EngineDead):
        world.run([submit(f"r{place}", [place + 1] * 8, max_tokens=1) for place in range(20)])
    assert world.engine.is_idle


@DEPTHS
@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_while_a_prompt_is_taken_in_leaves_nothing_half_done(depth, follows, monkeypatch):
    """Between the two lines by which a request begins to wait."""
    from slipstream.scheduler import waiting

    world = World(depth)
    push = waiting.heapq.heappush

    def interrupted(*args):
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        return push(*args)

    monkeypatch.setattr(waiting.heapq, "heappush", interrupted)
    with pytest.raises(KeyboardInterrupt):
        world.run([submit("a", [1, 2]), submit("b", [3])], follows=follows)
    assert world.core.scheduler.num_waiting == 0 and world.engine.is_idle
    world.core.scheduler.check()
    (track,) = world.run([submit("next", [1, 2], max_tokens=3)])
    assert tokens_of(track) == [tokens_alone(track.message, 0)[0]]


@pytest.mark.usefixtures("interrupts")
def test_an_interrupted_call_takes_nothing_from_a_stream():
    world = World()
    message = submit("s", [1, 2], max_tokens=6)
    stream = world.stream(message)
    next(stream)
    step = world.core.step

    def interrupted():
        outputs = step()
        if outputs:
            world.core.step = step
            signal.raise_signal(signal.SIGINT)
        return outputs

    world.core.step = interrupted
    with pytest.raises(KeyboardInterrupt):
        world.run([submit("a", [3], max_tokens=9)], follows=False)
    *_, last = stream
    assert last.outputs[0].token_ids == tokens_alone(message, 0)[0]


def test_a_stream_dropped_in_another_thread_ends_with_the_next_call():
    """Between calls a thread of the engine's own may drop it, which must not touch the engine."""
    world = World()
    stream = world.stream(submit("s", [1, 2], max_tokens=9))
    next(stream)
    other = threading.Thread(target=stream.close)
    other.start()
    other.join(PATIENCE)
    assert world.core.scheduler.num_live == 1
    with world.client.turn():
        assert world.engine.is_idle
    assert not world.core.scheduler.num_live
    world.core.scheduler.check()


@pytest.mark.usefixtures("interrupts")
def test_all_requests_are_aborted_despite_a_second_interrupt():
    world = World(max_num_seqs=4)
    abort, step, aborted = world.client.lanes.abort, world.core.step, []

    def interrupted_abort(message):
        aborted.append(message)
        if len(aborted) == 3:
            signal.raise_signal(signal.SIGINT)
        return abort(message)

    def interrupted():
        world.core.step = step
        signal.raise_signal(signal.SIGINT)
        return step()

    world.client.lanes.abort, world.core.step = interrupted_abort, interrupted
    with pytest.raises(KeyboardInterrupt):
        world.run([submit(f"a{place}", [place], max_tokens=50) for place in range(20)], follows=False)
    assert len(aborted) == 20 and world.core.scheduler.num_waiting == 0 and world.engine.is_idle


@pytest.mark.parametrize("follows", [False, True])
@pytest.mark.usefixtures("interrupts")
def test_a_call_changes_the_handler_of_interrupts_once(follows, monkeypatch):
    """It took longer than to take a prompt in, and was done for each."""
    changes = []
    change = signal.signal

    def counted(number, handler):
        changes.append(handler)
        return change(number, handler)

    monkeypatch.setattr(signal, "signal", counted)
    world = World()
    world.run([submit(f"r{place}", [place + 1], max_tokens=4) for place in range(30)], follows=follows)
    assert len(world.plans) > 4 and len(changes) == 2
