"""Adapters of requests in host buffers and device slots: what waits, what is evicted, what plans use."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from patience import PATIENCE
from scripted_bench import Bench
from slipstream.base.errors import InvalidAdapter, InvalidOption
from slipstream.config.adapter_config import AdapterConfig, read_lora_modules
from slipstream.params.lora import LoRARequest
from slipstream.scheduler import adapters as module
from slipstream.scheduler.adapters import Adapters


class Reader:
    """Reads at once, except paths that are blocked; fails for the path `bad`."""

    def __init__(self) -> None:
        self.content: dict[int, str] = {}  # by buffer
        self.reads: list[str] = []
        self.blocked: dict[str, threading.Event] = {}

    def read(self, buffer, path):
        if path in self.blocked:
            assert self.blocked[path].wait(PATIENCE)
        self.reads.append(path)
        if path == "bad":
            raise InvalidAdapter("no such adapter", param="lora_request")
        self.content[buffer] = path
        return path.encode()


class Slots:
    """What the device holds; checks each plan."""

    def __init__(self, bench, reader):
        self.bench, self.reader, self.slots = bench, reader, {}

    def check(self, plan):
        for load in plan.adapters.loads if plan.adapters is not None else ():
            assert self.reader.content[load.buffer] == load.path
            self.slots[load.slot] = load.path
        slots = plan.adapter_slots
        slots = np.full(len(plan.rows), -1) if slots is None else slots
        owners = {request.row: request for request in self.bench.requests if request.row >= 0}
        for row, slot in zip(plan.rows.tolist(), slots.tolist(), strict=True):
            lora = owners[row].lora if row in owners else None
            if row in owners:
                assert (self.slots[slot] if slot >= 0 else None) == (lora.lora_path if lora else None)


def make(max_loras=2, max_cpu_loras=3, **how):
    reader = Reader()
    adapters = Adapters(AdapterConfig(max_loras, max_cpu_loras, 8, 1, 1), reader, how.get("max_num_seqs", 8))
    bench = Bench(adapters=adapters, **how)
    return bench, reader, Slots(bench, reader)


def lora(name):
    return LoRARequest(name, 1, name)


def settle(bench):
    """Waits until no adapter is being read."""
    adapters = bench.scheduler.adapters
    for adapter in adapters._reading:
        adapter.job.exception(10)


def run(bench, slots, num_steps=200):
    for _ in range(num_steps):
        if not bench.scheduler.has_requests():
            return
        settle(bench)
        plan = bench.scheduler.plan()
        if plan is not None:
            slots.check(plan)
            bench.executor.launch(plan)
        if bench.num_in_flight and (plan is None or bench.num_in_flight > bench.depth):
            bench.outputs += bench.scheduler.commit(bench.executor.wait())
        bench.outputs += bench.scheduler.take_failures()
        bench.scheduler.check()
    raise AssertionError("requests do not end")


def test_a_request_waits_for_its_adapter_alone():
    bench, reader, slots = make()
    reader.blocked["a"] = threading.Event()
    (slow,) = bench.submit([1, 2, 3], lora=lora("a"))
    (other,) = bench.submit([4, 5, 6])
    plan = bench.scheduler.plan()
    assert plan.adapters is None and other.row >= 0 and slow.row < 0
    assert bench.scheduler.adapters.is_waiting
    bench.executor.launch(plan)
    bench.outputs += bench.scheduler.commit(bench.executor.wait())
    reader.blocked["a"].set()
    run(bench, slots)
    assert slow.num_output == other.num_output == 8


def test_at_most_max_loras_adapters_run_and_others_overtake():
    bench, _, slots = make(max_loras=1, max_cpu_loras=2)
    (first,) = bench.submit([1], lora=lora("a"))
    (second,) = bench.submit([2], lora=lora("b"))
    (third,) = bench.submit([3], lora=lora("a"))
    (plain,) = bench.submit([4])
    settle(bench)
    plan = bench.scheduler.plan()
    slots.check(plan)
    assert [request.row >= 0 for request in (first, second, third, plain)] == [True, False, True, True]
    assert plan.adapter_slots.tolist() == [0, 0, -1]
    assert [(load.slot, load.buffer) for load in plan.adapters.loads] == [(0, 0)]
    assert bench.scheduler.adapters.names() == (("a",), ("b",))
    bench.executor.launch(plan)
    bench.outputs += bench.scheduler.commit(bench.executor.wait())
    run(bench, slots)
    assert second.num_output == 8 and bench.scheduler.adapters.names() == ((), ())


def test_an_adapter_that_waits_for_a_slot_is_not_overtaken_for_ever(monkeypatch):
    monkeypatch.setattr(module, "MAX_OVERTAKING", 3)
    bench, _, slots = make(max_loras=1, max_cpu_loras=2, max_num_seqs=2)
    bench.submit([1], lora=lora("a"), max_tokens=4)
    (waiting,) = bench.submit([2], lora=lora("b"), max_tokens=2)
    later = [bench.submit([3 + n], lora=lora("a"), max_tokens=2)[0] for n in range(12)]
    run(bench, slots)
    order = [output.request_id for output in bench.outputs if output.finish_reason is not None]
    assert order.index(waiting.id) < 8 and all(request.num_output == 2 for request in later)


def test_buffers_and_slots_are_reused_by_the_least_recently_used():
    bench, reader, slots = make(max_loras=1, max_cpu_loras=2)
    for name in "abab" + "c" + "b" + "a":
        bench.submit([1], lora=lora(name), max_tokens=2)
        run(bench, slots)
    assert reader.reads == ["a", "b", "c", "a"]  # c replaced a, which was used before b


def test_more_adapters_than_host_memory_take_turns():
    bench, reader, slots = make(max_loras=1, max_cpu_loras=1)
    requests = [bench.submit([n], lora=lora(name), max_tokens=2)[0] for n, name in enumerate("abcab")]
    run(bench, slots)
    assert all(request.num_output == 2 for request in requests)
    assert sorted(reader.reads) == ["a", "b", "c"]


def test_a_bad_adapter_refuses_its_requests():
    bench, _, slots = make(max_cpu_loras=2)
    bench.submit([1], lora=lora("bad"), n=2, id="refused")
    (good,) = bench.submit([2], lora=lora("a"))
    run(bench, slots)
    errors = [output for output in bench.outputs if output.error]
    assert [(error.request_id, error.sample, error.param) for error in errors] == [
        ("refused", 0, "lora_request"),
        ("refused", 1, "lora_request"),
    ]
    assert good.num_output == 8


@pytest.mark.parametrize("seed", range(4))
def test_random_requests_aborts_and_preemptions(seed):
    chance = random.Random(seed)
    bench, _, slots = make(
        max_loras=chance.choice([1, 2, 3]), max_cpu_loras=3, depth=seed % 3, num_pages=14, max_num_seqs=4
    )  # fmt: skip
    names = [None, "a", "b", "c", "d", "bad"]
    for _ in range(40):
        name = chance.choice(names)
        prompt = [chance.randrange(5) for _ in range(chance.randint(1, 14))]
        bench.submit(prompt, lora=None if name is None else lora(name), max_tokens=chance.randint(1, 6),
                     n=chance.choice([1, 1, 2]))  # fmt: skip
        if chance.random() < 0.3:
            bench.scheduler.abort(chance.choice(bench.requests).id)
            bench.scheduler.check()
        if chance.random() < 0.5:
            settle(bench)
            plan = bench.scheduler.plan()
            if plan is not None:
                slots.check(plan)
                bench.executor.launch(plan)
                while bench.num_in_flight > bench.depth:
                    bench.outputs += bench.scheduler.commit(bench.executor.wait())
            bench.scheduler.check()
        if chance.random() < 0.2:
            bench.preempt_any(chance)
    run(bench, slots, 2000)
    assert bench.scheduler.num_preemptions
    assert not bench.scheduler.adapters._parked and bench.scheduler.adapters._num_running == 0


def test_adapters_named_at_start():
    assert read_lora_modules(["a=/x", "b=c=d"]) == (LoRARequest("a", 1, "/x"), LoRARequest("b", 2, "c=d"))
    for bad, message in ((["a"], "has no ="), (["a=x", "a=y"], "twice"), (["=x"], "lora_name"), (["a="], "lora_path")):
        with pytest.raises(InvalidOption, match=message):
            read_lora_modules(bad)
