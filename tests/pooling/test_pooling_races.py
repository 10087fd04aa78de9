"""What is still being copied out is not overwritten, and what has nothing to say copies nothing.

Upstream returned from a step without a finished request while the device still read its one input buffer, and the next
chunk overwrote it: wrong rerank scores. Here the copies out are held back until later steps have run.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from delayed_device import DelayedDevice
from patience import PATIENCE
from pool_bench import PoolBench, assert_same
from slipstream.device.streams import PASSED, ThreadedStream
from slipstream.params.pooling import PoolingParams
from slipstream.params.sampling import SamplingParams
from slipstream.runner.results import ResultRing, StepHandle
from tiny import write_tiny
from tiny_encoder import write_tiny_encoder

EMBED, TOKENS = PoolingParams(task="embed"), PoolingParams(task="token_embed")
PROMPTS = [[token] * length for token, length in ((3, 30), (50, 31), (90, 20), (120, 33), (7, 5), (200, 40))]
DEPTH = 2


class HeldStream(ThreadedStream):
    """Runs nothing until it is let go."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        super().__init__("held-copy", None)

    def before(self) -> None:
        assert self.gate.wait(PATIENCE), "the test did not release the copies"


class HeldDevice(DelayedDevice):
    def __init__(self) -> None:
        super().__init__(DEPTH, longest=0.0)
        self.copy.close()
        self.copy = HeldStream()


@pytest.fixture(scope="module", params=["encoder", "chunks"])
def model(request, tmp_path_factory):
    """Steps of one prompt each, or of pieces of prompts."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "encoder":
        return dict(folder=write_tiny_encoder(folder, "bert", "Model"), max_num_seqs=1)
    return dict(folder=write_tiny(folder, "llama"), max_num_batched_tokens=24, pooling_type="mean")


def launch_all_then_copy(model, params):
    """As many steps as may be ahead are computed before the first of their results is copied."""
    device = HeldDevice()
    with PoolBench(**model, depth=DEPTH, device=device) as bench:
        ids = [bench.submit(prompt, params) for prompt in PROMPTS]
        core = bench.core
        while core.has_requests():
            while len(core.in_flight) <= DEPTH and (plan := core.scheduler.plan()) is not None:
                core._launch(plan)
            device.compute.record().wait()  # all are computed, and nothing has left
            device.copy.gate.set()
            bench.step()  # commits the oldest, and may launch another
            if core.scheduler.num_waiting:
                device.copy.gate.clear()
        return [bench.results[id] for id in ids]


@pytest.mark.parametrize("params", [EMBED, TOKENS], ids=["embed", "tokens"])
def test_results_survive_the_steps_behind_them(model, params):
    with PoolBench(**model) as bench:
        wanted = [bench.pool([prompt], params)[0] for prompt in PROMPTS]
    assert_same(launch_all_then_copy(model, params), wanted)


def test_the_race_would_be_seen(model, monkeypatch):
    """With one buffer for all steps and no wait before its reuse, a step returns the result of a later one."""
    real = ResultRing.open

    def careless(ring, *args):
        ring._next = 0
        ring.buffers[0].copied = PASSED
        return real(ring, *args)

    with PoolBench(**model) as bench:
        wanted = [bench.pool([prompt], EMBED)[0] for prompt in PROMPTS]
    monkeypatch.setattr(ResultRing, "open", careless)
    got = launch_all_then_copy(model, EMBED)
    assert any(not np.allclose(ours, theirs) for ours, theirs in zip(got, wanted, strict=True))


def test_a_step_in_which_no_prompt_ends_copies_nothing(tmp_path):
    """Nine pieces of two prompts; results leave in the two that end one."""
    for method in ("last", "first", "mean"):
        for params in (EMBED, TOKENS):
            device = DelayedDevice(1)
            copies = []
            real = device.copy.run
            device.copy.run = lambda work, real=real, copies=copies: (copies.append(work), real(work))[1]
            folder = write_tiny(tmp_path / method / params.task, "llama")
            with PoolBench(folder, depth=1, max_num_batched_tokens=10, device=device, pooling_type=method) as bench:
                bench.pool([list(range(50)), list(range(100, 140))], params)
                assert bench.core.num_steps == 9
                assert len(copies) == 2 * 2  # for each that ends, a wait for the step and a copy


@pytest.mark.parametrize("depth", [1, 2])
def test_the_commit_of_a_step_in_which_no_prompt_ends_does_not_wait(tmp_path, depth, monkeypatch):
    """The device does nothing yet. The pieces before the last are committed; then the rings' last slot is taken."""
    device = DelayedDevice(depth, longest=0.0)
    gate = threading.Event()
    with PoolBench(write_tiny(tmp_path, "llama"), depth=depth, max_num_batched_tokens=10, device=device) as bench:
        core = bench.core
        device.compute.run(gate.wait)
        bench.submit(list(range(60)), EMBED)
        for _ in range(depth + 1):
            assert bench.step() == []
        assert core.num_steps == depth + 1 and len(core.in_flight) == depth
        assert core.timer.total.num_steps == 0  # it has not ended, so its time is unknown
        real = StepHandle.wait_until_ended
        monkeypatch.setattr(StepHandle, "wait_until_ended", lambda handle: (gate.set(), real(handle)))
        bench.step()  # one more is launched, and this is as far ahead as anyone runs
        assert gate.is_set()
        bench.run()
        assert core.timer.total.num_steps == core.num_steps == 6


@pytest.mark.parametrize("method", ["last", "mean"])
def test_a_step_that_generates_and_pools_makes_one_copy(tmp_path, method):
    device = DelayedDevice(1)
    copies = []
    real = device.copy.run
    device.copy.run = lambda work: (copies.append(work), real(work))[1]
    with PoolBench(write_tiny(tmp_path, "llama"), depth=1, device=device, pooling_type=method) as bench:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        bench.pool([[5, 6, 7], [8, 9], [10, 11, 12]], [params, EMBED, TOKENS])
        assert bench.core.num_steps == 3
        assert len(copies) == 3 * 2  # a step: a wait for it, and a copy
        spent = bench.core.timer.total
        assert spent.num_steps == 3 and spent.busy > 0


@pytest.mark.cuda
@pytest.mark.parametrize("params", [EMBED, TOKENS], ids=["embed", "tokens"])
def test_results_survive_on_a_gpu_whose_copies_are_late(model, params):
    """The copy stream is kept busy, so that every copy is made after the steps behind it were launched."""
    options = model | dict(dtype="float32", device_kind="cuda")
    with PoolBench(**options, depth=0) as bench:
        wanted = [bench.pool([prompt], params)[0] for prompt in PROMPTS]
    with PoolBench(**options, depth=DEPTH) as bench:
        copy = bench.core.executor.device.copy
        real = copy.run
        copy.run = lambda work: real(lambda: (torch.cuda._sleep(30_000_000), work()))
        for _ in range(3):  # eager, then captured, then replayed
            assert_same(bench.pool(PROMPTS, params), wanted, 1e-4)
