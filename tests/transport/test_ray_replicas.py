"""Ranks and replicas on a local Ray cluster of CPU workers: results of one engine, and a lost node."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import sys
import time

import pytest

from slipstream import LLM, SamplingParams
from slipstream.base.errors import EngineDead, InvalidOption, ReplicaLost
from slipstream.config.options import make_options
from slipstream.transport import ray_replicas
from slipstream.transport.ray_replicas import RayReplicas
from slipstream.transport.replicas import has_replicas, open_replicas
from tiny import write_tiny

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: slipstream[ray]")
SMALL = dict(
    max_model_len=64, num_pages=64, page_size=4, max_num_seqs=4, num_threads=1, dtype="float64", use_tqdm_on_load=False
)
NODE = dict(num_cpus=1, object_store_memory=80 * 2**20, include_dashboard=False)
PARAMS = SamplingParams(temperature=0.9, seed=4, max_tokens=12, ignore_eos=True)
PROMPTS = [[i, i + 1, i + 2] for i in range(1, 9)]


@pytest.fixture
def only_cluster(tmp_path_factory):
    """Of all test processes. Nodes of a second one would take the CPU from the first, which then loses nodes."""
    with open(tmp_path_factory.getbasetemp().parent / "ray.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture
def cluster(monkeypatch, only_cluster):
    """Two nodes with one CPU each, as processes of this machine. A lost node is noticed at once."""
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    quick = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
    nodes = Cluster(initialize_head=True, head_node_args=NODE | dict(_system_config=quick))
    nodes.second = nodes.add_node(**NODE)
    ray.init(address=nodes.address, logging_level="error", log_to_driver=False)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def tokens(llm):
    return [each.outputs[0].token_ids for each in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@needs_ray
def test_ranks_on_two_nodes_come_back_after_one_node_is_lost(tmp_path, cluster, monkeypatch):
    from ray.util import placement_group_table

    folder = str(write_tiny(tmp_path, "llama"))
    with LLM(folder, **SMALL) as llm:
        wanted = tokens(llm)
    with LLM(folder, **SMALL, tensor_parallel_size=2, distributed_executor_backend="ray") as llm:
        assert tokens(llm) == wanted
        (group,) = placement_group_table().values()
        assert len(set(group["bundles_to_node_id"].values())) == len(group["bundles"]) == 2  # a bundle per rank
        cluster.remove_node(cluster.second, allow_graceful=False)
        cluster.add_node(**NODE)
        (replica,) = llm._engine.client.replicas
        deadline = time.monotonic() + 120
        while not replica.num_restarts:
            assert time.monotonic() < deadline, "the replica of the lost node did not come back"
            with contextlib.suppress(ReplicaLost):  # a request that had sent tokens
                assert tokens(llm) == wanted  # others wait for the restart
        assert tokens(llm) == wanted and replica.num_restarts == 1
    assert {each["state"] for each in placement_group_table().values()} == {"REMOVED"}
    monkeypatch.setattr(ray_replicas, "FIRST_WAIT_SECONDS", 0.2)
    with pytest.raises(EngineDead, match="replica 0 needs 1 times 3 CPU, and .* has no room for it .2 CPU in all"):
        LLM(folder, **SMALL | {"num_threads": 3}, distributed_executor_backend="ray")


@needs_ray
def test_each_replica_sees_the_gpu_that_ray_gave_it(only_cluster, monkeypatch):
    """On a cluster that claims to have GPUs; Ray itself does not hide the others."""
    import ray
    from ray.util import placement_group_table

    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.delenv("SLIPSTREAM_DEVICE", raising=False)
    ray.init(**NODE | dict(num_cpus=3, num_gpus=2), logging_level="error", log_to_driver=False)

    async def reserve(replicas):
        try:
            await replicas._reserve(0)
            await replicas._reserve(1)
            locations = await replicas.locations(0) + await replicas.locations(1)
            monkeypatch.setattr(ray_replicas, "FIRST_WAIT_SECONDS", 0.2)
            with pytest.raises(EngineDead) as too_few:
                await replicas._reserve(2)
            return locations, str(too_few.value)
        finally:
            await replicas.close()

    try:
        replicas = RayReplicas([make_options(distributed_executor_backend="ray", data_parallel_size=3)])
        assert replicas._environment["NCCL_DEBUG"] == "WARN"
        locations, error = asyncio.run(reserve(replicas))
        assert sorted(location.partition(" ")[2] for location in locations) == ["(GPU 4)", "(GPU 6)"]
        assert error == (
            "replica 2 needs 1 times 1 GPU, 1 CPU, and the Ray cluster has no room for it (2 GPU, 3 CPU in all); "
            "add nodes, or lower data_parallel_size"
        )
        assert {each["state"] for each in placement_group_table().values()} == {"REMOVED"}
        asked = make_options(distributed_executor_backend="ray", tensor_parallel_size=3)
        replicas = RayReplicas([asked])
        assert replicas._options == [asked]  # the core knows that its ranks have GPUs of their own
        with pytest.raises(EngineDead, match="needs 3 times 1 GPU, 1 CPU, .* or lower tensor_parallel_size"):
            asyncio.run(replicas._reserve(0))
    finally:
        ray.shutdown()


@pytest.mark.parametrize(("num_ranks", "share"), [(1, 1.0), (2, 0.5), (3, 0.3333)])
def test_ranks_that_share_a_gpu_for_tests_ask_for_parts_of_one(num_ranks, share, monkeypatch):
    assert ray_replicas._share_of_gpu(num_ranks) == 1.0
    monkeypatch.setenv("SLIPSTREAM_RANKS_SHARE_GPU", "1")
    assert ray_replicas._share_of_gpu(num_ranks) == share


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    asked = [make_options(distributed_executor_backend="ray")]
    assert has_replicas(asked)
    with pytest.raises(InvalidOption, match=r"install slipstream\[ray\]"):
        open_replicas(asked)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(data_parallel_size=2, enable_expert_parallel=True), "engines that share experts run on one machine"),
        (dict(logits_processors=[int]), "cannot be sent to replicas"),
        (dict(data_parallel_size=0), "1 to 256"),
    ],
)
def test_what_a_cluster_cannot_run_is_refused_before_ray_is_used(options, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InvalidOption, match=words):
        RayReplicas([make_options(distributed_executor_backend="ray", **options)])


def test_models_of_one_engine_have_one_backend():
    with pytest.raises(InvalidOption, match="give all distributed_executor_backend ray"):
        has_replicas([make_options(distributed_executor_backend="ray"), make_options()])


def test_other_backends_are_refused():
    with pytest.raises(InvalidOption, match="'uni' or 'mp' or 'ray'"):
        make_options(distributed_executor_backend="external_launcher")
