"""CacheManager.reset: forgets cached prefixes at any step, and changes no token."""

from __future__ import annotations

import random

import pytest

from scripted_bench import Bench

PROMPT = list(range(1, 25))


def hits(bench: Bench) -> int:
    before = bench.cache.num_hits
    bench.submit(PROMPT, max_tokens=3)
    bench.run()
    bench.check_tokens(bench.requests[-1])
    return bench.cache.num_hits - before


@pytest.mark.parametrize("how", [{}, {"num_checkpoints": 6}, {"windows": (0, 8)}], ids=["pages", "states", "windows"])
def test_no_prefix_is_found_after_a_reset(how):
    bench = Bench(depth=1, **how)
    assert hits(bench) == 0
    assert hits(bench) > 0
    bench.cache.reset()
    bench.scheduler.check()
    assert hits(bench) == 0
    assert hits(bench) > 0  # cached anew


@pytest.mark.parametrize("how", [{"num_pages": 30}, {"num_checkpoints": 4}], ids=["pages", "states"])
@pytest.mark.parametrize("seed", range(3))
def test_resets_between_any_steps_change_no_token(how, seed):
    chance = random.Random(seed)
    bench = Bench(depth=2, **how)
    for _ in range(12):
        bench.submit(PROMPT[: chance.randrange(1, 24)], max_tokens=chance.randrange(1, 9), n=chance.choice((1, 2)))
        for _ in range(chance.randrange(4)):
            bench.step()
            if chance.random() < 0.5:
                bench.cache.reset()
                bench.scheduler.check()
    bench.run()
    for request in bench.requests:
        bench.check_tokens(request)
