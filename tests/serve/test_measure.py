"""`measure`: which steps a trial has, and the order of trials."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from replay_device import ReplayDevice
from slipstream import LLM
from slipstream.runner.graphs import GraphPool
from slipstream.serve.bench import measure as bench
from slipstream.serve.bench.measure import Workload, best_of, measure
from slipstream.serve.cli.bench import bench_params
from small_model import write_small

ROWS, TOKENS = 16, 128


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_small(tmp_path_factory.mktemp("measure"))
    sizes = dict(max_num_seqs=ROWS, max_num_batched_tokens=TOKENS, num_pages=ROWS * 16)
    options = dict(load_format="dummy", skip_tokenizer_init=True, use_tqdm_on_load=False, num_threads=1)
    with LLM(folder, **sizes, **options) as llm:
        yield llm


def as_gpu(llm):
    """The engine as `measure` sees it, on a device that is not the CPU."""
    device = msgspec.structs.replace(llm.config.device, kind="cuda")
    config = msgspec.structs.replace(llm.config, device=device)
    reset = llm.reset_prefix_cache
    return SimpleNamespace(config=config, core=llm.core, inputs=llm.inputs, tokenizer=None, reset_prefix_cache=reset)


@pytest.fixture
def captured(llm, monkeypatch):
    """Keys of all steps, in order, as graphs of a GPU would have them."""
    graphs = GraphPool(ReplayDevice(0), ROWS, TOKENS, eager=False)
    keys: list[set] = []
    launch = llm.core.executor.launch

    def watched(plan):
        num_draws, size = int(np.count_nonzero(plan.num_drawn)), graphs.size_for(plan)
        keys.append({("forward", size), ("head", graphs.rows_for(num_draws), size.is_single)})
        launch(plan)

    monkeypatch.setattr(llm.core.executor, "launch", watched)
    return keys


@pytest.mark.parametrize("shape", [(16, 40, 30), (16, 100, 4), (9, 20, 50), (24, 40, 30)])
def test_on_a_gpu_the_warm_up_has_every_size_of_step_that_a_trial_has(llm, captured, shape):
    workload = Workload(**dict(zip(("num_prompts", "input_len", "output_len"), shape, strict=True)))
    trials = measure(as_gpu(llm), workload, bench_params(), repeats=2)
    num_steps = sum(trial.num_steps for trial in trials)
    warm_up, rest = captured[:-num_steps], captured[-num_steps:]
    assert warm_up and set().union(*rest) <= set().union(*warm_up)


def test_a_cpu_captures_nothing_and_needs_one_short_request(llm, captured):
    (trial,) = measure(llm, Workload(num_prompts=16, input_len=40, output_len=30), bench_params())
    assert len(captured) - trial.num_steps <= 5


def test_every_trial_starts_with_an_empty_prefix_cache(llm):
    """Also one of a workload that was measured before, whose prompts are the same."""
    workload = Workload(num_prompts=2, input_len=100, output_len=2)
    assert [measure(llm, workload, bench_params())[0].cached_tokens for _ in range(2)] == [0, 0]
    outputs = llm.generate([item.prompt for item in workload.items(llm.config.model.info.vocab_size)], use_tqdm=False)
    assert all(output.num_cached_tokens for output in outputs)  # the engine has a prefix cache


def test_trials_are_in_the_order_in_which_they_ran(llm, monkeypatch):
    seconds = iter([0.0, 3.0, 1.0, 2.0])  # the warm-up, then the trials
    run = bench._run
    monkeypatch.setattr(bench, "_run", lambda *args: msgspec.structs.replace(run(*args), seconds=next(seconds)))
    trials = measure(llm, Workload(num_prompts=1, input_len=4, output_len=2), bench_params(), repeats=3)
    assert [trial.seconds for trial in trials] == [3.0, 1.0, 2.0]
    assert best_of(trials) is trials[1]
