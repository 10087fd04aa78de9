"""Ranks on the GPU of a local Ray cluster: tokens of one engine over NCCL, and a rank that is killed.

Both ranks share the only GPU of a test machine (SLIPSTREAM_RANKS_SHARE_GPU), so NCCL passes data through sockets.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import time
from pathlib import Path

import pytest

from patience import PATIENCE
from slipstream import LLM, SamplingParams
from slipstream.base.errors import EngineDead, ReplicaLost
from slipstream.transport import ray_replicas
from tiny import write_tiny

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: slipstream[ray]"),
]

OPTIONS = dict(use_tqdm_on_load=False, max_model_len=128, num_pages=64, max_num_seqs=4, dtype="float32", device="cuda")
PARAMS = SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True)
PROMPTS = [[i + 3, *range(20, 30 + 7 * i), i + 5] for i in range(4)]


@pytest.fixture
def cluster(monkeypatch):
    import ray

    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    monkeypatch.setenv("SLIPSTREAM_TEST", f"ray-{os.getpid()}")  # reaches the processes of ranks
    ray.init(num_cpus=4, object_store_memory=80 * 2**20, include_dashboard=False, logging_level="error")
    yield ray
    ray.shutdown()


def tokens(llm):
    return [each.outputs[0].token_ids for each in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def rank_pid():
    """The process of rank 1."""
    mark = f"SLIPSTREAM_TEST={os.environ['SLIPSTREAM_TEST']}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if b"slipstream.ranks.process" in command and mark in (folder / "environ").read_bytes():
                return int(folder.name)
    raise AssertionError("rank 1 has no process")


def test_ranks_on_a_gpu_of_the_cluster_come_back_after_one_is_killed(tmp_path, cluster, monkeypatch):
    folder = str(write_tiny(tmp_path, "qwen3", head_dim=64))
    with LLM(folder, **OPTIONS) as llm:
        wanted = tokens(llm)
    with LLM(folder, **OPTIONS, distributed_executor_backend="ray") as llm:
        assert tokens(llm) == wanted
    num_gpus = cluster.cluster_resources()["GPU"]
    with monkeypatch.context() as patch:
        patch.setattr(ray_replicas, "FIRST_WAIT_SECONDS", 0.5)
        words = f"1 GPU, 1 CPU, and .* no room for it .{num_gpus:g} GPU, 4 CPU in all.; .* lower tensor_parallel_size"
        with pytest.raises(EngineDead, match=words):
            LLM(folder, **OPTIONS, tensor_parallel_size=int(num_gpus) + 1, distributed_executor_backend="ray")
    monkeypatch.setenv("SLIPSTREAM_RANKS_SHARE_GPU", "1")
    with LLM(folder, **OPTIONS, tensor_parallel_size=2, distributed_executor_backend="ray") as llm:
        assert tokens(llm) == wanted
        os.kill(rank_pid(), signal.SIGKILL)
        (replica,) = llm._engine.client.replicas
        deadline = time.monotonic() + PATIENCE
        while not replica.num_restarts:
            assert time.monotonic() < deadline, "the replica of the killed rank did not come back"
            with contextlib.suppress(ReplicaLost):  # a request that had sent tokens
                assert tokens(llm) == wanted  # others wait for the restart
        assert tokens(llm) == wanted and replica.num_restarts == 1
