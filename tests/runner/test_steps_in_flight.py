"""Results of steps in flight: each is kept until it is read, whether steps are replayed or not."""

from __future__ import annotations

import pytest

from replay_device import ReplayDevice
from slipstream import LLM, SamplingParams
from slipstream.device.device import Device
from slipstream.runner.staging import HostRing
from tiny import write_tiny

PROMPTS = [[i, i + 3, i + 5] for i in range(1, 4)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
SMALL = dict(use_tqdm_on_load=False, dtype="float64", max_model_len=64, num_pages=64, page_size=4, max_num_seqs=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture(scope="module")
def wanted(folder):
    with LLM(folder, **SMALL) as llm:
        return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("device", [Device, ReplayDevice], ids=["eager", "graphs"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_result_is_valid_after_all_later_steps_have_run(folder, wanted, depth, device):
    """With too few buffers a later step's tokens would overwrite those of an earlier one."""
    found = {}
    made = device(depth, 1) if device is Device else device(depth)
    with LLM(folder, **SMALL, depth=depth, _device=made) as llm:
        core = llm.core
        core.executor.graphs.token_sizes = []  # of chunks, whose attention on the CPU goes by the rows of the plan
        for place, prompt in enumerate(PROMPTS):
            core.submit(llm.inputs.prepare(str(place), prompt, PARAMS)[0])
        most = 0
        while core.has_requests():
            while len(core.in_flight) <= depth and (plan := core.scheduler.plan()) is not None:
                core._launch(plan)
            most = max(most, len(core.in_flight))
            made.compute.record().wait()
            made.copy.record().wait()
            while core.in_flight:
                for output in core._commit():
                    found.setdefault(output.request_id, []).extend(output.token_ids)
        assert most == depth + 1
        assert device is Device or made.num_replays > 3
    assert [found[str(place)] for place in range(len(PROMPTS))] == wanted


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_step_of_the_rows_of_the_step_before_uploads_nothing(tmp_path, family, monkeypatch):
    """Unless a row gets a page."""
    folder = str(write_tiny(tmp_path, family))
    copied = []
    has = HostRing.has
    monkeypatch.setattr(HostRing, "has", lambda ring, data: copied.append(not has(ring, data)) or not copied[-1])
    with LLM(folder, **SMALL | {"page_size": 16}, depth=1, _device=ReplayDevice(1)) as llm:
        llm.core.executor.graphs.token_sizes = []
        llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True), use_tqdm=False)
    decodes = copied[1:]
    assert len(decodes) > 40 and sum(decodes) <= 2 + 50 // 16 + 1
