"""The delayed-device net catches the races it is there for: each is planted, and must show."""

from __future__ import annotations

import pytest

from delayed_device import POISON, DelayedDevice
from slipstream import LLM, SamplingParams
from slipstream.device.streams import PASSED
from slipstream.runner import output
from slipstream.runner.batch import staging
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


def goes_wrong(folder, wanted, **late) -> bool:
    try:
        return tokens(folder, **late) != wanted
    except Exception:  # garbage may also crash the step: seen all the same
        return True


def test_without_a_bug_the_tokens_are_right(folder, wanted):
    assert tokens(folder) == wanted


def test_an_upload_slot_rewritten_too_early_is_caught(folder, wanted, monkeypatch):
    class Hasty(staging.HostRing):
        def __init__(self, num_slots, capacity, device):
            super().__init__(1, capacity, device)

        def open(self):
            self.slots[0].copied = PASSED  # does not wait for its last copy
            return super().open()

    monkeypatch.setattr("slipstream.runner.assemble.HostRing", Hasty)
    assert goes_wrong(folder, wanted)


def test_a_result_read_before_its_event_is_caught(folder, wanted, monkeypatch):
    real = output.StepHandle.__init__

    def hasty(self, ready, *rest):
        real(self, PASSED, *rest)

    monkeypatch.setattr(output.StepHandle, "__init__", hasty)
    assert goes_wrong(folder, wanted)


def test_a_result_slot_rewritten_before_its_copy_is_caught(folder, wanted, monkeypatch):
    class Hasty(output.ResultRing):
        def __init__(self, num_slots, capacity, device):
            super().__init__(1, capacity, device)

        def open(self, *args):
            self.slots[0].copied = PASSED  # the stream does not wait for the copy before it
            return super().open(*args)

    monkeypatch.setattr("slipstream.runner.assemble.ResultRing", Hasty)
    assert goes_wrong(folder, wanted, late_copies=0.02)


def test_closures_that_read_what_the_host_has_changed_are_caught(folder, wanted, monkeypatch):
    """A closure must capture; one that reads the plan of the day sees a later step's."""
    from slipstream.runner.batch import input_batch

    real = input_batch.InputBatch.prepare

    def forgetful(self, plan, upload, size=None):
        gather = real(self, plan, upload, size)
        self.current = gather

        return lambda: self.current()

    monkeypatch.setattr(input_batch.InputBatch, "prepare", forgetful)
    assert goes_wrong(folder, wanted)


def test_poison_marks_what_was_handed_back():
    device = DelayedDevice(1)
    array, tensor = device.host_buffer(8)
    device.handed_back(array)
    assert tensor.tolist() == [POISON] * 8
    device.close()
