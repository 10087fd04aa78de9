"""The delayed-device net catches the races it is there for: each is planted, and must show."""

from __future__ import annotations

import re
import threading

import pytest

from delayed_device import POISON, DelayedDevice
from patience import PATIENCE
from slipstream import LLM, SamplingParams
from slipstream.base.errors import EngineDead
from slipstream.device.streams import PASSED
from slipstream.runner import results, staging
from tiny import write_tiny

PROMPTS = [[i, i + 3, i + 5] for i in range(1, 7)]
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SMALL = dict(use_tqdm_on_load=False, dtype="float64", max_model_len=64, num_pages=64, page_size=4, max_num_seqs=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


def tokens(folder, depth=2, late_copies=0.004):
    device = DelayedDevice(depth, longest=0.004)
    device.copy.longest = late_copies
    with LLM(folder, **SMALL, depth=depth, _device=device) as llm:
        return [r.outputs[0].token_ids for r in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def wanted(folder):
    with LLM(folder, **SMALL) as llm:
        return [r.outputs[0].token_ids for r in llm.generate(PROMPTS, PARAMS)]


def failure(folder, wanted, **late) -> str:
    """How a run went wrong: "wrong tokens", or what a step made of garbage. "" if nothing did.

    Other exceptions are mistakes of the test, such as a plant that does not fit what it replaces."""
    try:
        return "" if tokens(folder, **late) == wanted else "wrong tokens"
    except EngineDead as dead:
        return f"{type(dead.__cause__).__name__}: {dead.__cause__}"


def test_without_a_bug_the_tokens_are_right(folder, wanted):
    assert tokens(folder) == wanted


def test_an_upload_buffer_rewritten_too_early_is_caught(folder, wanted, monkeypatch):
    class Hasty(staging.HostRing):
        def __init__(self, num_buffers, capacity, device):
            super().__init__(1, capacity, device)

        def open(self):
            self.buffers[0].copied = PASSED  # does not wait for its last copy
            return super().open()

    monkeypatch.setattr("slipstream.runner.build.HostRing", Hasty)
    assert re.match("wrong tokens|IndexError: .* is out of bounds", failure(folder, wanted))


def test_a_result_read_before_its_event_is_caught(folder, wanted, monkeypatch):
    real = results.StepHandle.__init__

    def hasty(self, ready, *rest):
        real(self, PASSED, *rest)

    monkeypatch.setattr(results.StepHandle, "__init__", hasty)
    assert failure(folder, wanted) == "wrong tokens"


class HeldDevice(DelayedDevice):
    """Copies out are held back until the test lets them go."""

    def __init__(self, depth):
        super().__init__(depth, longest=0.0)
        self.gate = threading.Event()
        self.copy.before = lambda: self.gate.wait(PATIENCE)


def tokens_with_held_copies(folder, depth=2):
    """As many steps as may be in flight are computed before the first of their results is copied out."""
    device = HeldDevice(depth)
    found = {}
    with LLM(folder, **SMALL, depth=depth, _device=device) as llm:
        core = llm.core
        for place, prompt in enumerate(PROMPTS):
            core.submit(llm.inputs.prepare(str(place), prompt, PARAMS)[0])
        while core.has_requests():
            while len(core.in_flight) <= depth and (plan := core.scheduler.plan()) is not None:
                core._launch(plan)
            device.compute.record().wait()
            device.gate.set()
            for out in core._commit():
                found.setdefault(out.request_id, []).extend(out.token_ids)
            device.copy.record().wait()
            device.gate.clear()
    return [found[str(place)] for place in range(len(PROMPTS))]


def test_copies_that_come_late_are_each_steps_own(folder, wanted):
    assert tokens_with_held_copies(folder) == wanted


def test_a_result_buffer_rewritten_before_its_copy_is_caught(folder, wanted, monkeypatch):
    class Hasty(results.ResultRing):
        """Steps write to one place on the device, and none waits for the copy of the one before it."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            for buffer in self.buffers:
                buffer.on_device = self.buffers[0].on_device

    monkeypatch.setattr("slipstream.runner.build.ResultRing", Hasty)
    found = tokens_with_held_copies(folder)
    assert [len(one) for one in found] == [len(one) for one in wanted] and found != wanted


def test_closures_that_read_what_the_host_has_changed_are_caught(folder, wanted, monkeypatch):
    """A closure must capture; one that reads the plan of the day sees a later step's."""
    from slipstream.runner import input_batch

    real = input_batch.InputBatch.prepare

    def forgetful(self, plan, upload, size=None):
        gather = real(self, plan, upload, size)
        self.current = gather

        return lambda: self.current()

    monkeypatch.setattr(input_batch.InputBatch, "prepare", forgetful)
    shapes = "AssertionError: with one token per row|RuntimeError: .*size"  # of another step
    assert re.match(f"wrong tokens|IndexError|{shapes}", failure(folder, wanted))


def test_poison_marks_what_was_handed_back():
    device = DelayedDevice(1)
    array, tensor = device.host_buffer(8)
    device.before_reuse(array)
    assert tensor.tolist() == [POISON] * 8
    device.close()
