"""What of pooling is captured, and how large results come home."""

import numpy as np
import pytest

from pool_bench import PoolBench
from slipstream.pooling_params import PoolingParams
from slipstream.runner import own_copy as home
from slipstream.runner.batch.input_batch import Size
from tiny_encoder import write_tiny_encoder


class Recorder:
    """In place of a GraphPool: runs all, and writes down under which key."""

    def __init__(self):
        self.keys = set()

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
            head, "_prepare_alike", lambda count, setting, size, last: real(count, setting, Size(64, count), last)
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
def test_a_copy_is_the_readers_own(num_bytes, num_cores, monkeypatch):
    monkeypatch.setattr(home, "default_threads", lambda: num_cores)
    buffer = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)
    wanted = buffer.tobytes()
    own = home.own_copy(buffer)
    buffer[:] = 0
    assert own.tobytes() == wanted
