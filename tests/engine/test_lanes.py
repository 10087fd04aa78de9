"""Several models under one loop: which lane is stepped next; no lane starves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slipstream.base.errors import EngineDead, ModelNotFound, UserError
from slipstream.config.config import SchedulerConfig
from slipstream.contracts.messages import Abort, Submit
from slipstream.engine.lanes import Lanes
from slipstream.params.sampling import SamplingParams
from slipstream.scheduler.encoder_scheduler import EncoderScheduler


class FakeCore:
    """A core whose every step takes the device a given time."""

    def __init__(self, seconds: float, work: int = 0, *, whole: bool = False) -> None:
        self.config = SimpleNamespace(scheduler=SimpleNamespace(is_encoder=whole))
        self.timer = SimpleNamespace(total=SimpleNamespace(busy=0.0), timeline=None)
        self.scheduler = SimpleNamespace(serves=lambda name: name in self.taken, check=lambda: None)
        self.seconds = seconds
        self.work = work
        self.num_steps = 0
        self.taken: list[str] = []
        self.aborted: list[str] = []
        self.closed = False

    def submit(self, message: Submit) -> None:
        self.taken.append(message.request_id)

    def abort(self, message: Abort) -> int:
        self.aborted.append(message.request_id)
        return 1

    def has_requests(self) -> bool:
        return self.work > 0

    def step(self) -> list:
        self.work -= 1
        self.num_steps += 1
        self.timer.total.busy += self.seconds
        return []

    def close(self) -> None:
        self.closed = True


def submit(name: str, model: str = "") -> Submit:
    return Submit(name, [1], SamplingParams(), 0.0, model=model)


def run(lanes: Lanes, num_steps: int) -> None:
    for _ in range(num_steps):
        lanes.step()


def test_the_device_is_shared_by_weight_whatever_a_step_takes():
    chat, embed = FakeCore(0.001, 10_000), FakeCore(0.010, 10_000, whole=True)
    lanes = Lanes({"chat": chat, "embed": embed})
    run(lanes, 4200)
    ratio = chat.timer.total.busy / embed.timer.total.busy
    assert ratio == pytest.approx(2.0, rel=0.05)


def test_two_that_generate_get_the_same():
    first, second = FakeCore(0.001, 10_000), FakeCore(0.004, 10_000)
    run(Lanes({"first": first, "second": second}), 2000)
    assert first.timer.total.busy == pytest.approx(second.timer.total.busy, rel=0.05)


def test_a_lane_alone_with_work_gets_every_step():
    chat, embed = FakeCore(0.001, 0), FakeCore(0.01, 50, whole=True)
    run(Lanes({"chat": chat, "embed": embed}), 50)
    assert (chat.num_steps, embed.num_steps) == (0, 50)


def test_idle_lanes_earn_no_credit():
    """After a long time alone the busy lane is not made to wait until the other has caught up."""
    chat, embed = FakeCore(0.001, 0), FakeCore(0.001, 10_000, whole=True)
    lanes = Lanes({"chat": chat, "embed": embed})
    run(lanes, 1000)
    chat.work = 10_000
    before = embed.num_steps
    run(lanes, 300)
    assert embed.num_steps - before == pytest.approx(100, abs=3)


def test_a_long_step_of_one_is_paid_back():
    chat, embed = FakeCore(0.001, 10_000), FakeCore(0.1, 10_000, whole=True)
    lanes = Lanes({"chat": chat, "embed": embed})
    run(lanes, 1000)
    assert embed.num_steps <= 1000 / 200 + 2, "a hundred times as long at half the weight: once in two hundred"


def test_a_step_of_prompts_is_short_while_others_read_along():
    """`max_itl` limits the other lane's steps by its own lane's token times, until no reader is left."""
    chat, embed = FakeCore(0.001, 3), FakeCore(0.001, 8, whole=True)
    scheduler = EncoderScheduler(
        SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=512, max_model_len=512, max_waiting=9, chunked_prefill=False,
            depth=1, seed=0, staged_ints=0, is_encoder=True,
        )
    )  # fmt: skip
    lanes, seen = Lanes({"chat": chat, "embed": embed}), []
    while lanes.has_requests():
        before, readers_wait = embed.num_steps, chat.has_requests()
        lanes.step()
        if embed.num_steps > before:
            scheduler.limit_tokens(77, readers_wait=embed.readers_wait)
            seen.append((readers_wait, scheduler.max_num_tokens))
    assert (True, 77) in seen and seen[-1] == (False, None)
    assert set(seen) == {(True, 77), (False, None)}


def test_a_device_that_keeps_no_time_counts_steps():
    chat, embed = FakeCore(0.0, 1000), FakeCore(0.0, 1000, whole=True)
    run(Lanes({"chat": chat, "embed": embed}), 300)
    assert (chat.num_steps, embed.num_steps) == (pytest.approx(200, abs=2), pytest.approx(100, abs=2))


def test_requests_go_to_the_model_they_name_and_to_the_first_without_a_name():
    chat, embed = FakeCore(0.001), FakeCore(0.001, whole=True)
    lanes = Lanes({"chat": chat, "embed": embed})
    lanes.submit(submit("a"))
    lanes.submit(submit("b", "embed"))
    assert (chat.taken, embed.taken) == (["a"], ["b"])
    with pytest.raises(ModelNotFound, match="there is chat, embed"):
        lanes.submit(submit("c", "rerank"))


def test_an_id_is_one_request_over_all_lanes():
    lanes = Lanes({"chat": FakeCore(0.001), "embed": FakeCore(0.001)})
    lanes.submit(submit("a", "embed"))
    with pytest.raises(UserError, match="served already"):
        lanes.submit(submit("a", "chat"))


def test_an_abort_reaches_the_lane_of_its_request():
    chat, embed = FakeCore(0.001), FakeCore(0.001, whole=True)
    lanes = Lanes({"chat": chat, "embed": embed})
    lanes.submit(submit("b", "embed"))
    lanes.abort(Abort("b"))
    assert embed.aborted == ["b"]


def test_closing_closes_all():
    cores = [FakeCore(0.001), FakeCore(0.001)]
    Lanes({"a": cores[0], "b": cores[1]}).close()
    assert all(core.closed for core in cores)


def test_when_one_fails_all_have_failed():
    """Lanes share a device, so a device failure in one ends all of them at once."""

    class Failing(FakeCore):
        def step(self) -> list:
            raise EngineDead("the engine failed in step 3: boom; start a new one")

    chat, embed = FakeCore(0.001, 10), Failing(0.001, 10, whole=True)
    lanes = Lanes({"chat": chat, "embed": embed})
    with pytest.raises(EngineDead, match="boom"):
        run(lanes, 10)
    embed.work, done = 0, chat.num_steps
    with pytest.raises(EngineDead, match="embed has failed: .*boom"):
        lanes.step()
    with pytest.raises(EngineDead, match="embed has failed: .*boom"):
        lanes.submit(submit("a", "chat"))
    assert chat.num_steps == done
