"""Late interaction: documents are scored on the device against queries that stay there, and nothing stays too long."""

from __future__ import annotations

import numpy as np
import pytest

from delayed_device import DelayedDevice
from pool_bench import PoolBench
from slipstream.base.errors import QueueFull, RequestTooLarge, UserError
from slipstream.config import buffer_size
from slipstream.params.pooling import PoolingParams
from tiny import write_tiny
from tiny_encoder import write_tiny_encoder

QUERY = [3, 9, 27, 81]
DOCUMENTS = [[5] * 3, list(range(40)), [200, 3, 9], [81], list(range(100, 160)), [27, 28]]
TOKENS = PoolingParams(task="token_embed")


def query(uses: int, key: str = "q") -> PoolingParams:
    return PoolingParams(task="token_embed", query_key=key, query_uses=uses)


def document(key: str = "q", **others) -> PoolingParams:
    return PoolingParams(task="token_embed", query_key=key, **others)


@pytest.fixture(scope="module", params=["encoder", "chunks"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "encoder":
        return dict(folder=write_tiny_encoder(folder, "bert", "Model"), max_num_batched_tokens=64)
    return dict(folder=write_tiny(folder, "llama"), max_num_batched_tokens=11)


def max_sim(query, document):
    return (query @ document.T).max(1).sum()


def store(bench):
    return bench.core.executor.heads[-1].token_vectors.queries


def check_freed(bench):
    """What is no longer needed is gone, and no further step has to come for that."""
    bench.core.executor.device.compute.record().wait()
    assert len(store(bench)) == 0 == len(bench.core.scheduler._queries)
    assert not bench.core.executor.heads[-1].token_vectors._query_sizes


@pytest.fixture(scope="module")
def vectors(model):
    with PoolBench(**model) as bench:
        return bench.pool([QUERY, *DOCUMENTS, QUERY[:2]], TOKENS)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_scores_are_those_of_the_token_vectors(model, vectors, depth):
    first, *documents, second = vectors
    device = DelayedDevice(depth) if depth else None
    with PoolBench(**model, depth=depth, device=device) as bench:
        params = [query(6), query(6, "p"), *[document()] * 6, *[document("p")] * 6]
        got = bench.pool([QUERY, QUERY[:2], *DOCUMENTS, *DOCUMENTS], params)
        assert got[0].shape == got[1].shape == (0,)  # its vectors stay where they are
        wanted = [max_sim(own, other) for own in (first, second) for other in documents]
        assert [one.shape for one in got[2:]] == [(1,)] * 12
        assert np.allclose([one[0] for one in got[2:]], wanted, atol=1e-9)
        check_freed(bench)


def test_no_more_queries_are_kept_than_there_is_room_for(model, monkeypatch):
    size = 48 if model["max_num_batched_tokens"] == 64 else 64
    monkeypatch.setattr(buffer_size, "KEPT", 5 * size)
    with PoolBench(**model) as bench:
        bench.pool([QUERY], [query(2)])
        with pytest.raises(QueueFull, match="queries of 4 tokens are kept.*limit of 5"):
            bench.submit(QUERY[:2], query(1, "p"))
        bench.submit(QUERY[:1], query(1, "r"))
        with pytest.raises(RequestTooLarge, match="has 6 tokens, and 5 can be kept"):
            bench.submit([1] * 6, query(1, "p"))
        bench.pool(DOCUMENTS[:2], [document()] * 2)
        bench.pool([QUERY, *DOCUMENTS[:2]], [query(1, "p"), document("p"), document("r")])
        check_freed(bench)


def test_a_document_that_goes_first_waits_for_its_query(model):
    with PoolBench(**model) as bench:
        late = bench.submit(QUERY, query(1).with_changes(priority=5))
        bench.submit(DOCUMENTS[1], document(priority=-5))
        bench.submit(DOCUMENTS[0], TOKENS)
        bench.run()
        assert len(bench.results) == 3 and late in bench.results
        check_freed(bench)


def test_documents_without_their_query_are_refused(model):
    with PoolBench(**model) as bench:
        with pytest.raises(UserError, match="'q' is not known; submit it before its documents"):
            bench.submit([1], document())
        bench.submit(QUERY, query(1))
        with pytest.raises(UserError, match="kept already"):
            bench.submit(QUERY, query(1))
        bench.submit([1], document())
        with pytest.raises(UserError, match="used up"):
            bench.submit([2], document())
        bench.run()
        check_freed(bench)


@pytest.mark.parametrize("steps", range(4))
def test_nothing_leaks_when_documents_are_aborted(model, steps):
    with PoolBench(**model, depth=2, device=DelayedDevice(2)) as bench:
        bench.submit(QUERY, query(6))
        ids = [bench.submit(one, document()) for one in DOCUMENTS]
        for _ in range(steps):
            bench.step()
        for id in ids[1:]:
            bench.abort(id)
        bench.run()
        assert ids[0] in bench.results
        check_freed(bench)


@pytest.mark.parametrize("steps", range(4))
def test_nothing_leaks_when_the_query_is_aborted(model, steps):
    """Its documents are scored if it was computed, and fail with a reason if it was not. More may not come."""
    with PoolBench(**model, depth=2, device=DelayedDevice(2)) as bench:
        owner = bench.submit(QUERY, query(7))  # one more than will come
        ids = [bench.submit(one, document()) for one in DOCUMENTS]
        for _ in range(steps):
            bench.step()
        bench.abort(owner)
        with pytest.raises(UserError, match="not known|used up"):
            bench.submit([1], document())
        bench.run()
        for id in ids:
            assert (id in bench.results) != (id in bench.errors)
        if not steps:
            assert all("its query was aborted" in bench.errors[id] for id in ids)
        check_freed(bench)


def test_an_unused_query_is_dropped_when_its_owner_releases_it(model):
    with PoolBench(**model) as bench:
        owner = bench.submit(QUERY, query(3))
        bench.run()
        assert len(store(bench)) == 1
        bench.abort(owner)
        check_freed(bench)
