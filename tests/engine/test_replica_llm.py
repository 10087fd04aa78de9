"""`LLM(data_parallel_size=2)`: the same results as one engine, and a replica that is killed."""

from __future__ import annotations

import os
import signal

import pytest

from slipstream import LLM, BeamSearchParams, SamplingParams
from slipstream.base.errors import EngineClosed, InvalidOption
from slipstream.config.memory import rank_environment, visible_gpus
from slipstream.config.options import make_options
from slipstream.transport.replica_start import ReplicaProcesses, num_replicas
from tiny import write_tiny

SMALL = dict(max_model_len=64, num_pages=64, page_size=4, max_num_seqs=4, num_threads=1, use_tqdm_on_load=False)
PARAMS = SamplingParams(temperature=0.9, seed=4, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


def test_two_replicas_give_the_results_of_one_engine_also_after_one_is_killed(folder):
    prompts = [[i, i + 1, i + 2] for i in range(1, 13)]
    with LLM(folder, **SMALL) as llm:
        wanted = [(each.outputs[0].token_ids, each.outputs[0].text) for each in llm.generate(prompts, PARAMS, False)]
    with LLM(folder, data_parallel_size=2, **SMALL) as llm:
        assert llm.config.model.name == next(iter(llm.models))
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        assert [(each.outputs[0].token_ids, each.outputs[0].text) for each in outputs] == wanted
        streamed = list(llm.stream(prompts[0], PARAMS))
        assert streamed[-1].outputs[0].token_ids == wanted[0][0] and len(streamed) > 1
        with pytest.raises(InvalidOption, match="data_parallel_size"):
            llm.core  # noqa: B018
        beams = BeamSearchParams(beam_width=2, max_tokens=6, structured_outputs={"choice": ["ab", "ba"]})
        (found,) = llm.beam_search([prompts[0]], beams)
        tails = {llm.get_tokenizer().decode(sequence.tokens[3:]) for sequence in found.sequences}
        assert tails == {"ab", "ba"}
        replicas = llm._engine.client.replicas
        assert all(each.lanes[0].num_steps for each in replicas)  # both have worked
        os.kill(replicas[0].pid, signal.SIGKILL)
        again = llm.generate(prompts, PARAMS, use_tqdm=False)
        assert [each.outputs[0].token_ids for each in again] == [ids for ids, _ in wanted]
    with pytest.raises(EngineClosed):
        llm.generate(prompts, PARAMS, use_tqdm=False)


def test_an_option_that_a_replica_refuses_raises_as_with_one_engine(folder):
    wrong = SMALL | {"max_model_len": 10**9}
    with pytest.raises(InvalidOption) as alone:
        LLM(folder, **wrong)
    with pytest.raises(InvalidOption) as replicas:
        LLM(folder, data_parallel_size=2, **wrong)
    assert str(replicas.value) == str(alone.value)


def test_each_replica_sees_its_own_gpu(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus(tmp_path, {}) == ["0", "1", "2"]  # CUDA counts the GPUs of a container from 0
    assert visible_gpus(tmp_path, {"CUDA_VISIBLE_DEVICES": "3, 5"}) == ["3", "5"]
    source = ReplicaProcesses([make_options(data_parallel_size=2, device="cuda")], tmp_path)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in source._environments] == ["0", "1"]
    assert source._options[0].data_parallel_size == 1 and source._options[0].num_threads is None
    with pytest.raises(InvalidOption, match="3 GPUs are visible"):
        ReplicaProcesses([make_options(data_parallel_size=4)], tmp_path)


def test_each_rank_of_a_replica_sees_its_own_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3,5,7,8")
    source = ReplicaProcesses([make_options(data_parallel_size=2, tensor_parallel_size=2, device="cuda")])
    assert [each["CUDA_VISIBLE_DEVICES"] for each in source._environments] == ["1,3", "5,7"]
    gpus = visible_gpus(environ=source._environments[1])
    assert [rank_environment(rank, gpus)["CUDA_VISIBLE_DEVICES"] for rank in (0, 1)] == ["5", "7"]
    with pytest.raises(InvalidOption, match="data_parallel_size is 3 and tensor_parallel_size 2, and 5 GPUs"):
        ReplicaProcesses([make_options(data_parallel_size=3, tensor_parallel_size=2, device="cuda")])


def test_replicas_on_the_cpu_divide_threads_and_memory(monkeypatch):
    monkeypatch.setattr("slipstream.transport.replica_start.num_cores", lambda: 8)
    (options,) = ReplicaProcesses([make_options(data_parallel_size=4, device="cpu")])._options
    assert (options.num_threads, options.gpu_memory_utilization) == (2, 0.05)
    (options,) = ReplicaProcesses([make_options(data_parallel_size=4, device="cpu", num_threads=5)])._options
    assert options.num_threads == 5


@pytest.mark.parametrize("count", [0, 257])
def test_wrong_numbers_of_replicas_are_refused(count):
    with pytest.raises(InvalidOption, match="1 to 256"):
        num_replicas([make_options(data_parallel_size=count)])


def test_models_of_one_engine_have_one_number_of_replicas():
    with pytest.raises(InvalidOption, match="give all the same"):
        num_replicas([make_options(data_parallel_size=1), make_options(data_parallel_size=2)])
