"""Random days of pooling on a late device: whatever comes, all get what they get alone, and nothing is left over."""

from __future__ import annotations

import random

import pytest
import torch

from delayed_device import DelayedDevice
from pool_bench import PoolBench, assert_same, rewrite
from repeats import seeds
from slipstream.base.errors import QueueFull, SlipstreamError, UserError
from slipstream.params.pooling import PoolingParams
from slipstream.params.sampling import SamplingParams
from tiny import write_tiny
from tiny_encoder import write_tiny_encoder

VOCAB = 250
GENERATE = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module", params=["encoder", "causal"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "encoder":
        return dict(folder=write_tiny_encoder(folder, "bert", "Model"))
    return dict(folder=write_tiny(folder, "llama"))


class Day:
    def __init__(self, model, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.causal = "causal" in str(model["folder"])
        self.depth = rng.choice([1, 2])
        options = dict(
            max_num_seqs=rng.choice([1, 4, 8]),
            max_num_batched_tokens=rng.choice([9, 16, 40]),
            max_model_len=40,
            pooling_type=rng.choice(["first", "mean", "last", "max+weightedmean"]),
            max_waiting=30,
        )
        self.alone = PoolBench(**model, **options | dict(max_num_seqs=1, max_num_batched_tokens=64))
        if self.causal:
            options |= dict(num_pages=rng.choice([12, 30]), enable_prefix_caching=rng.random() < 0.5)
        device = DelayedDevice(self.depth, seed, longest=0.0003)
        self.bench = PoolBench(**model, **options, depth=self.depth, device=device)
        self.prompts: dict[str, tuple[list[int], object]] = {}
        self.documents: dict[str, list[int]] = {}  # of a query that may still be used
        self.queries: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.refused = 0

    def params(self):
        rng = self.rng
        kind = rng.choice(
            ["embed", "embed", "token_embed", "generate" if self.causal else "embed", "query", "document"]
        )
        priority = rng.choice([0, 0, 0, 1])
        if kind == "generate":
            return GENERATE
        if kind == "query":
            return PoolingParams(
                task="token_embed", query_key=f"q{rng.randrange(4)}", query_uses=rng.randint(1, 3), priority=priority
            )
        if kind == "document":
            return PoolingParams(task="token_embed", query_key=f"q{rng.randrange(4)}", priority=priority)
        return PoolingParams(
            task=kind, dimensions=rng.choice([None, None, 6]), normalize=rng.choice([None, False]), priority=priority
        )

    def submit(self) -> None:
        rng = self.rng
        prompt = [rng.randrange(VOCAB)] * rng.randint(1, 20) + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 20))]
        params = self.params()
        if params is GENERATE:
            prompt = prompt[:30]
        try:
            id = self.bench.submit(prompt, params)
        except (QueueFull, UserError):
            self.refused += 1
            return
        self.prompts[id] = (prompt, params)
        if getattr(params, "is_query", False):
            self.queries[params.query_key] = prompt
        elif getattr(params, "is_document", False):
            self.documents[id] = self.queries[params.query_key]

    def abort(self) -> None:
        if self.prompts:
            id = self.rng.choice(list(self.prompts)[-12:])
            if id not in self.bench.ended:
                self.aborted.add(id)
            self.bench.abort(id)

    def run(self, steps: int) -> None:
        bench, rng = self.bench, self.rng
        for step in range(steps):
            for _ in range(rng.choice([0, 0, 1, 3])):
                self.submit()
            if rng.random() < 0.15:
                self.abort()
            if bench.core.has_requests():
                bench.step()
            if step % 5 == 0:
                bench.core.scheduler.check()
        for id in list(self.prompts):  # owners of queries that are still kept
            if getattr(self.prompts[id][1], "is_query", False):
                bench.abort(id)
        bench.run()
        bench.pool([[1]], PoolingParams(task="embed"))
        bench.core.scheduler.check()
        bench.core.executor.device.compute.record().wait()
        head = bench.core.executor.heads[-1]
        assert len(head.chunks.admissions) <= 1 and not head.chunks.parts  # the last one is released with the next step
        vectors = head.token_vectors
        assert len(vectors.queries) == len(bench.core.scheduler._queries) == len(vectors._query_sizes) == 0
        self.compare()
        bench.core.close()
        self.alone.core.close()

    def compare(self) -> None:
        for id, (prompt, params) in self.prompts.items():
            if id in self.bench.errors:
                assert "its query was aborted" in self.bench.errors[id] and id in self.documents
            elif id not in self.bench.ended:
                assert id in self.aborted or getattr(params, "is_query", False), f"{id} got no answer"
            elif id in self.documents:
                plain = params.with_changes(query_key="")
                query, document = self.alone.pool([self.documents[id], prompt], plain)
                assert_same([self.bench.results[id]], [(query @ document.T).max(1).sum()[None]])
            elif params is GENERATE:
                assert self.bench.tokens[id] == self.alone.pool([prompt], params)[0]
            elif params.query_key:
                assert self.bench.results[id].shape == (0,)
            else:
                assert_same([self.bench.results[id]], self.alone.pool([prompt], params))


@pytest.mark.parametrize("seed", seeds(5, kept=3))
def test_a_random_day_changes_no_numbers(model, seed):
    Day(model, seed).run(70)


def test_the_days_are_eventful(model):
    days = [Day(model, seed) for seed in range(5)]
    for day in days:
        day.run(70)
    assert sum(len(day.aborted) for day in days) > 5
    assert sum(len(day.documents) for day in days) > 5
    assert sum(day.refused for day in days) > 5


# Numbers that are none


@pytest.mark.parametrize("depth", [0, 2])
def test_what_is_not_a_number_fails_its_own_request_alone(tmp_path, depth):
    """One word of the vocabulary has a broken vector."""
    folder = write_tiny_encoder(tmp_path / "encoder", "bert", "Model")
    broken = rewrite(write_tiny(tmp_path / "causal", "llama"), {}, {})
    for path, name in ((folder, "embeddings.word_embeddings.weight"), (broken, "model.embed_tokens.weight")):
        from safetensors.torch import load_file

        weight = load_file(path / "model.safetensors")[name]
        weight[13] = torch.nan
        rewrite(path, {}, {name: weight})
        good, bad = [[1, 2, 3], [4, 5]], [[6, 13, 8], [13]]
        for task in ("embed", "token_embed"):
            params = PoolingParams(task=task)
            with PoolBench(path, depth=depth) as bench:
                wanted = [bench.pool([prompt], params)[0] for prompt in good]
                ids = [bench.submit(prompt, params) for prompt in (good[0], bad[0], good[1], bad[1])]
                bench.run()
                assert_same([bench.results[ids[0]], bench.results[ids[2]]], wanted)
                assert all("not finite" in bench.errors[id] for id in (ids[1], ids[3]))
                with pytest.raises(SlipstreamError, match="NaN or infinite"):
                    bench.pool(bad, params)
                assert_same(bench.pool(good, params), wanted)
