"""PoolHead: which work is captured, what is stored, and how large results are copied to the host."""

import numpy as np
import pytest
import torch

from pool_bench import PoolBench
from slipstream.checkpoint.pooling_info import PoolingInfo
from slipstream.device.device import Device
from slipstream.params.pooling import PoolingParams
from slipstream.runner import pool_tokens
from slipstream.runner import results as home
from slipstream.runner.features import Size
from slipstream.runner.graphs import GraphOutputs
from slipstream.runner.pool_methods import PoolModes
from slipstream.runner.pool_tokens import QueryStore
from slipstream.runner.staging import HostRing
from tiny_encoder import write_tiny_encoder


class Recorder:
    """In place of a GraphPool: runs all work and records the keys."""

    def __init__(self):
        self.keys = set()
        self.results = GraphOutputs(2**16, Device(0, 1))

    def run(self, key, work):
        self.keys.add(key)
        return work()


@pytest.mark.parametrize("normalize", [True, False])
def test_vectors_of_every_size_share_a_graph(tmp_path, normalize, monkeypatch):
    prompts = [[5, 6, 7], [9, 8], [3]]
    with PoolBench(write_tiny_encoder(tmp_path, "bert", "Model")) as bench:
        params = PoolingParams(task="embed", normalize=normalize)
        full = np.stack(bench.pool(prompts, params.with_changes(normalize=False)))
        head = bench.core.executor.heads[-1]
        real, head.graphs = head._prepare_alike, Recorder()
        monkeypatch.setattr(
            head, "_prepare_alike", lambda plan, mode, size, *rest: real(plan, mode, Size(64, len(plan.rows)), *rest)
        )
        for width in range(1, full.shape[1] + 1):
            cut = full[:, :width]
            wanted = cut / np.linalg.norm(cut, axis=1, keepdims=True) if normalize else cut
            assert np.allclose(bench.pool(prompts, params.with_changes(dimensions=width)), wanted, atol=1e-9)
        assert len(head.graphs.keys) == 1
        bench.pool(prompts, params)
        assert len(head.graphs.keys) == 2  # those that are not cut are captured to the end


@pytest.mark.parametrize("num_bytes", [0, 1, home.LARGE - 1, home.LARGE, home.LARGE + 1, 2 * home.LARGE + 7])
@pytest.mark.parametrize("num_cores", [1, 2, 8])
def test_a_host_copy_is_independent_of_the_buffer(num_bytes, num_cores, monkeypatch):
    monkeypatch.setattr(home, "num_cpus", lambda: num_cores)
    buffer = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)
    wanted = buffer.tobytes()
    own = home.host_copy(buffer)
    buffer[:] = 0
    assert own.tobytes() == wanted


@pytest.mark.parametrize("at_once", [1, 4, 2**26])
def test_a_stored_query_does_not_use_the_memory_of_its_step(at_once, monkeypatch):
    """Its vectors may be a view of hidden states that the next replay writes again."""
    monkeypatch.setattr(pool_tokens, "MAX_SCORES", at_once)
    device, store, hidden = Device(0, 1), QueryStore(), torch.eye(3)
    store.keep(hidden, [2, 1], [7, 8])
    hidden.zero_()
    upload = HostRing(2, 4096, device).open()
    # the third has no token that counts
    score = store.prepare_scores([1, 2, 0, 1], [7, 8, 7, 8], [2, 1, 2, 1], 3, upload)
    upload.send(device.compute)
    documents = torch.tensor([[3.0, 4.0, 5.0], [0.0, 0.0, 1.0], [1.0, 1.0, 2.0], [9.0, 9.0, -1.0]])
    assert score(documents).tolist() == [[7.0], [2.0], [0.0], [-1.0]]


@pytest.mark.parametrize("at_once", [1, 7, 60, 500, 2**26])
def test_late_interaction_bounds_its_temporaries(at_once, monkeypatch):
    """With any number of queries, and any length of a query or a document."""
    rng, width, largest = np.random.default_rng(at_once), 3, [0]
    sizes = [1, 40, 2, 3, 2, 5, 1, 2]
    queries = [rng.normal(0, 1, (size, width)) for size in sizes]
    counts = [3, 0, 2, 50, 1, 2, 1, 4, 3, 2, 1, 1]
    numbers = [1, 7, 0, 1, 4, 4, 3, 2, 6, 5, 7, 0]
    documents = [rng.normal(0, 1, (count, width)) for count in counts]

    def storage(tensor):
        return tensor.untyped_storage().data_ptr()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, call, types, args=(), kwargs=None):
            out = call(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.is_floating_point() and storage(out) != storage(token_vectors):
                largest[0] = max(largest[0], out.numel())
            return out

    monkeypatch.setattr(pool_tokens, "MAX_SCORES", at_once)
    device, store = Device(0, 1), QueryStore()
    store.keep(torch.tensor(np.concatenate(queries)), sizes, range(8))
    upload = HostRing(2, 4096, device).open()
    score = store.prepare_scores(counts, numbers, [sizes[number] for number in numbers], width, upload)
    upload.send(device.compute)
    token_vectors = torch.tensor(np.concatenate(documents))
    with Watch():
        got = score(token_vectors)
    for number, document, mine in zip(numbers, documents, got.flatten().tolist(), strict=True):
        wanted = (queries[number] @ document.T).max(1).sum() if len(document) else 0.0
        assert np.isclose(mine, wanted)
    assert largest[0] <= max(at_once, 40 * width, 50)  # or one query, or one of its tokens with one document


@pytest.mark.parametrize("usually", [True, False])
def test_use_activation_controls_normalisation_by_default(usually):
    info = PoolingInfo(methods=("mean",), is_causal=False, embed_size=8, token_size=8, normalize=usually)
    settings = PoolModes(info, None, 304)
    for task in ("embed", "token_embed"):
        assert settings.of(PoolingParams(task=task)).finish == ("normalize" if usually else "identity")
        assert settings.of(PoolingParams(task=task, use_activation=False)).finish == "identity"
        assert settings.of(PoolingParams(task=task, activation=True)).finish == "normalize"
        assert settings.of(PoolingParams(task=task, activation=True, normalize=False)).finish == "identity"
        assert settings.of(PoolingParams(task=task, activation=False, normalize=True)).finish == "normalize"
