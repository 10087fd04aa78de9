"""`enable_expert_parallel` with `data_parallel_size`: the tokens and logprobs of one engine, and failures of engines.

Engines run as threads of this process with the exchange and the collectives (gloo) of real ones, but for one test.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from patience import PATIENCE
from repeats import slow
from replay_device import ReplayDevice
from slipstream import LLM, SamplingParams
from slipstream.base.errors import InvalidOption, ReplicaLost
from slipstream.config.options import make_options
from slipstream.contracts.messages import LOGPROB, Submit
from slipstream.device.device import open_device
from slipstream.engine.build import build_core, estimate_build, open_models
from slipstream.params.structured import StructuredOutputsParams
from slipstream.serve.cli.main import main
from tiny import write_tiny

SMALL = dict(max_model_len=64, num_pages=64, page_size=4, max_num_seqs=4, num_threads=1, dtype="float64")
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=2, seed=0),
    SamplingParams(temperature=0.9, seed=4, max_tokens=14, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=8, seed=1, structured_outputs=StructuredOutputsParams(regex="[a-c]{2,6}")),  # masks
]
FEW = [params.with_changes(allowed_token_ids=[1, 2, 3]) for params in PARAMS[:2]] + PARAMS[2:]  # tokens that repeat
PROMPTS = [[i, i + 1, i + 2] * (1 + i % 5) for i in range(1, 9)]


def request(number):
    return Submit(str(number), PROMPTS[number], PARAMS[number % 3], 0.0)


class Found:
    """What an engine returned for a request."""

    def __init__(self):
        self.tokens, self.logprobs = [], []

    def add(self, output):
        assert output.error is None, output.error
        self.tokens += output.token_ids
        if output.logprobs is not None:
            self.logprobs += np.frombuffer(output.logprobs, LOGPROB)["logprob"].tolist()


def run_alone(folder):
    (opened,) = open_models([make_options(model=str(folder), **SMALL)])
    core = build_core(opened)
    core.submit(*map(request, range(len(PROMPTS))))
    found = {number: Found() for number in range(len(PROMPTS))}
    while core.has_requests():
        for output in core.step():
            found[int(output.request_id)].add(output)
    core.close()
    return found


class Engines:
    """Engines that share experts, each in a thread. `shares`: numbers of the requests of each."""

    def __init__(self, folder, shares, depth, has_graphs, drafts=None):
        self.folder, self.shares, self.depth, self.has_graphs = folder, shares, depth, has_graphs
        self.drafts = drafts
        self.count = len(shares)
        self.num_unfinished = sum(map(len, shares))
        self.lock = threading.Lock()
        self.ended, self.end = os.pipe()  # readable when all requests have finished
        self.cores = [None] * self.count
        self.recordings = [None] * self.count
        self.closing = threading.Barrier(self.count)
        (folder / "shared").mkdir()

    def run(self):
        with ThreadPoolExecutor(self.count) as pool:
            parts = list(pool.map(self._run_one, range(self.count)))
        return {number: found for part in parts for number, found in part.items()}

    def _run_one(self, index):
        # as few tokens as rows, with one for each draft: the CPU's attention cannot pad other steps, which run eagerly
        # on all engines
        limits = {"max_num_batched_tokens": 4 if self.drafts is None else 12} if self.has_graphs else {}
        options = make_options(
            **limits,
            model=str(self.folder),
            data_parallel_size=self.count,
            enable_expert_parallel=True,
            depth=self.depth,
            drafts=self.drafts,
            **SMALL,
        )
        (opened,) = open_models([options], index)
        device = ReplayDevice(self.depth) if self.has_graphs else open_device("cpu", self.depth, 1)
        self.cores[index] = core = build_core(opened, device=device, folder=self.folder / "shared")
        if self.drafts is not None:
            core.scheduler.drafts.length = None  # all plans have drafts, whatever they cost
        try:
            found = self._serve(core, self.shares[index])
        except BaseException:
            core.executor.exchange.leave()  # as the end of a process does
            self.closing.abort()
            raise
        core.scheduler.check()
        self.recordings[index] = core.recorder.take()
        self.closing.wait(PATIENCE)
        core.close()
        return found

    def _serve(self, core, numbers):
        for number in numbers:
            core.submit(request(number))
        found = {number: Found() for number in numbers}
        while True:
            if not core.has_requests():
                # a padding step that waits for sizes of other engines is still to be launched: they compute it too
                is_idle = core.executor._next is None
                ready, _, _ = select.select([*core.peers.files, *([self.ended] if is_idle else [])], [], [])
                if self.ended in ready and not core.has_requests():
                    return found
                continue
            for output in core.step():
                found[int(output.request_id)].add(output)
                if output.finish_reason is not None:
                    with self.lock:
                        self.num_unfinished -= 1
                        if not self.num_unfinished:
                            os.write(self.end, b"e")


@pytest.mark.parametrize(
    ("family", "shares", "depth", "has_graphs"),
    [
        ("mixtral", [range(8), []], 1, False),  # an engine without requests
        slow("qwen3_moe", [[0, 4], [1, 5, 6, 7], [2], [3]], 2, False),
        ("qwen3_moe", [range(5), range(5, 8)], 1, True),  # all engines pad to the same sizes
        ("deepseek_v3", [range(4), range(4, 8)], 0, False),
        ("qwen3_next", [range(6), range(6, 8)], 1, True),  # recurrent states, a shared expert
    ],
)
def test_engines_with_shared_experts_give_the_results_of_one(tmp_path, capsys, family, shares, depth, has_graphs):
    folder = write_tiny(tmp_path, family)
    wanted = run_alone(folder)
    engines = Engines(folder, shares, depth, has_graphs)
    found = engines.run()
    assert {number: each.tokens for number, each in found.items()} == {n: each.tokens for n, each in wanted.items()}
    for number, each in found.items():
        np.testing.assert_allclose(each.logprobs, wanted[number].logprobs, atol=1e-9, rtol=0)
    posted = {core.executor.exchange.num_posted for core in engines.cores}
    assert len(posted) == 1  # every engine took part in every step
    for core in engines.cores:
        assert core.num_steps + core.executor.num_padding_steps == core.executor.exchange.num_posted
    if has_graphs:
        assert all(core.executor.runner.device.num_replays for core in engines.cores)  # as many as fall together
    held = [sum(p.numel() for p in core.executor.runner.model.parameters()) for core in engines.cores]
    assert len(set(held)) == 1  # each has as many experts
    (tmp_path / "record").write_bytes(engines.recordings[0].encode())
    assert main(["replay", str(tmp_path / "record"), "--json"]) == 0  # on one engine with all experts
    report = json.loads(capsys.readouterr().out)
    assert report["num_compared"] >= sum(len(found[number].tokens) for number in shares[0])


@pytest.mark.parametrize(
    ("family", "shares", "depth", "has_graphs", "drafts"),
    [
        slow("mixtral", [range(8), []], 1, False, "ngram:3"),
        ("qwen3_moe", [[0, 4], [1, 5, 6, 7], [2], [3]], 2, False, "suffix:4"),
        slow("qwen3_moe", [range(5), range(5, 8)], 1, True, "ngram:2"),
        ("deepseek_v3", [range(4), range(4, 8)], 0, False, "ngram:3"),
        ("qwen3_next", [range(6), range(6, 8)], 1, True, "ngram:3"),
    ],
)
def test_drafts_of_engines_with_shared_experts_change_no_token(
    tmp_path, monkeypatch, family, shares, depth, has_graphs, drafts
):
    """Of one engine without drafts."""
    monkeypatch.setitem(globals(), "PARAMS", FEW)
    folder = write_tiny(tmp_path, family)
    wanted = run_alone(folder)
    engines = Engines(folder, shares, depth, has_graphs, drafts)
    found = engines.run()
    assert {number: each.tokens for number, each in found.items()} == {n: each.tokens for n, each in wanted.items()}
    for number, each in found.items():
        np.testing.assert_allclose(each.logprobs, wanted[number].logprobs, atol=1e-9, rtol=0)
    counts = [core.scheduler.drafts.counts for core in engines.cores]
    assert 0 < sum(each.num_accepted for each in counts) < sum(each.num_drafts for each in counts)
    if has_graphs:
        assert all(core.executor.runner.device.num_replays for core in engines.cores)  # as many as fall together


def test_engines_are_processes_and_end_with_a_clear_error_when_one_is_killed(tmp_path):
    folder = str(write_tiny(tmp_path, "qwen3_moe"))
    params = PARAMS[1].with_changes(max_tokens=48)
    with LLM(folder, use_tqdm_on_load=False, **SMALL) as llm:
        wanted = [each.outputs[0].token_ids for each in llm.generate(PROMPTS[:4], params, False)]
    with LLM(folder, data_parallel_size=2, enable_expert_parallel=True, use_tqdm_on_load=False, **SMALL) as llm:
        outputs = llm.generate(PROMPTS[:4], params, False)
        assert [each.outputs[0].token_ids for each in outputs] == wanted
        stream = llm.stream(PROMPTS[0], params)
        next(stream)
        replicas = llm._engine.client.replicas
        idle = next(each for each in replicas if not each.requests)
        os.kill(idle.pid, signal.SIGKILL)  # it has no request, but a part of the experts
        with pytest.raises(ReplicaLost, match="died after it had sent a part"):
            list(stream)


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("llama", {}, "the model has no experts; leave it out"),
        ("mixtral", {"data_parallel_size": 4}, "data_parallel_size is 4, and the model has 6 experts"),
        ("mixtral", {"speculative_config": {"method": "draft_model", "model": "x"}}, "use drafts by ngram or suffix"),
        ("mixtral", {"tensor_parallel_size": 2}, "tensor_parallel_size divides the engine as well"),
        ("mixtral", {"enable_lora": True}, "leave enable_lora out"),
    ],
)
def test_what_engines_cannot_share_is_refused_by_name(tmp_path, family, options, words):
    folder = str(write_tiny(tmp_path, family))
    shared = {"model": folder, "device": "cpu", "data_parallel_size": 2, "enable_expert_parallel": True}
    with pytest.raises(InvalidOption, match=words):
        estimate_build(make_options(**{**shared, **options}))


def test_several_models_are_refused(tmp_path):
    shared = make_options(data_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(InvalidOption, match="serve it alone"):
        open_models([shared, make_options(task="embed")])
