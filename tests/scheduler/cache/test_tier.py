"""The second tier: pages that the device has no room for come back as prefix hits, and never with other content."""

from __future__ import annotations

import random
from typing import Any

import pytest

from repeats import seeds
from scripted_bench import Bench
from scripted_tokens import VOCAB
from slipstream.scheduler.cache import tier as tier_module
from slipstream.scheduler.cache.tier import CacheTier, TierSlots

LONG = [list(range(10 * n, 10 * n + 20)) for n in range(5)]


def run_all(bench: Bench, prompts: list[list[int]], **params: Any) -> list[Any]:
    """Run the prompts one after another."""
    requests = []
    for prompt in prompts:
        requests += bench.submit(prompt, max_tokens=2, **params)
        bench.run()
        bench.check_tokens(requests[-1])
    return requests


def test_a_prompt_that_left_the_device_is_loaded_from_the_tier() -> None:
    bench = Bench(num_pages=8, tier=10.0)  # 7 pages of 4: one prompt of 20 tokens fits
    run_all(bench, LONG[:3])
    (again,) = run_all(bench, LONG[:1])
    assert again.num_cached == 16  # all but the last token, in whole pages
    assert bench.executor.pages.num_loaded == 4
    assert bench.cache.tier is not None
    page = bench.cache.tier._page_bytes[0]
    assert (bench.cache.tier.num_hits, bench.cache.tier.bytes_loaded) == (16, 4 * page)


def test_without_a_tier_it_is_computed_again() -> None:
    bench = Bench(num_pages=8)
    run_all(bench, LONG[:3])
    (again,) = run_all(bench, LONG[:1])
    assert again.num_cached == 0 and bench.cache.tier is None and all(plan.tier is None for plan in bench.plans)


def test_pages_on_the_device_and_in_the_tier_make_one_hit() -> None:
    bench = Bench(num_pages=8, tier=10.0)
    run_all(bench, LONG[:1])
    run_all(bench, [LONG[1][:15]])  # overwrites the last pages of the first prompt
    (again,) = run_all(bench, LONG[:1])
    assert again.num_cached == 16 and 0 < bench.executor.pages.num_loaded < 4


def test_other_salts_share_nothing() -> None:
    bench = Bench(num_pages=8, tier=10.0)
    run_all(bench, LONG[:3], salt="mine")
    (again,) = run_all(bench, LONG[:1], salt="other")
    assert again.num_cached == 0 and not bench.executor.pages.num_loaded


def test_the_least_recently_used_pages_leave_a_full_tier() -> None:
    bench = Bench(num_pages=8, tier=1.5)  # 12 slots
    run_all(bench, LONG)
    first, last = run_all(bench, [LONG[0], LONG[3]])
    assert first.num_cached == 0 and last.num_cached > 0


def full_tier() -> tuple[Bench, CacheTier, TierSlots]:
    bench = Bench(num_pages=8, tier=1.25)
    run_all(bench, LONG[:3])
    assert bench.cache.tier is not None
    (slots,) = bench.cache.tier._slots
    assert len(slots.slot_of) == 10 and not slots._free
    return bench, bench.cache.tier, slots


def test_a_pinned_page_stays_in_a_full_tier_and_others_leave_it() -> None:
    bench, tier, slots = full_tier()
    oldest = next(iter(slots.slot_of))
    pinned = tier.pin(0, oldest)
    assert pinned is not None
    run_all(bench, [LONG[3], LONG[4]])
    assert slots.slot_of[oldest] == pinned.slot and slots.num_stores[pinned.slot] == pinned.num_stores
    (again,) = run_all(bench, [LONG[3]])
    assert again.num_cached == 16 and bench.executor.pages.num_loaded
    tier.unpin(pinned)


def test_a_tier_whose_pages_are_all_pinned_stores_nothing() -> None:
    bench, tier, slots = full_tier()
    before = dict(slots.slot_of)
    pinned = [tier.pin(0, page_hash) for page_hash in before]
    num_stores = list(slots.num_stores)
    run_all(bench, LONG[3:])
    assert dict(slots.slot_of) == before and slots.num_stores == num_stores and not tier.reserve([b"new"])
    for each in pinned:
        assert each is not None
        tier.unpin(each)
    run_all(bench, LONG[3:])
    assert slots.num_stores != num_stores


def test_a_reset_empties_the_tier() -> None:
    bench = Bench(num_pages=8, tier=10.0)
    run_all(bench, LONG[:3])
    bench.cache.reset()
    (again,) = run_all(bench, LONG[:1])
    assert again.num_cached == 0 and not bench.executor.pages.num_loaded


def test_pages_of_a_failed_request_are_not_found() -> None:
    bench = Bench(num_pages=8, tier=10.0)
    bench.executor.fail = lambda admission, length: length == 22
    bench.submit(LONG[0], max_tokens=8)
    bench.run()
    bench.executor.fail = lambda admission, length: False
    run_all(bench, LONG[1:3])
    (again,) = run_all(bench, LONG[:1])
    assert again.num_cached == 0 and not bench.executor.pages.num_loaded


def test_a_request_that_was_preempted_loads_its_pages() -> None:
    bench = Bench(num_pages=16, tier=10.0, max_model_len=48)
    requests = [bench.submit(LONG[n], max_tokens=24)[0] for n in range(2)]
    bench.run()
    assert bench.scheduler.num_preemptions and bench.executor.pages.num_loaded
    for request in requests:
        bench.check_tokens(request)


def test_stores_beyond_the_region_wait_for_a_later_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "region_pages", lambda group: 1)
    bench = Bench(num_pages=64, tier=2.0)
    run_all(bench, [LONG[0], [1], [2], [3], [4], [5]])
    stored = [0 if plan.tier is None else len(plan.tier.stores) for plan in bench.plans]
    assert sum(stored) == 5 and max(stored) == 1


def test_a_plan_with_many_loads_admits_no_more_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "MAX_LOAD_BYTES", 1)
    bench = Bench(num_pages=20, tier=10.0)
    run_all(bench, LONG)
    requests = [bench.submit(prompt, max_tokens=2)[0] for prompt in LONG[:2]]
    first, second = bench.plan(), bench.plan()
    assert first is not None and second is not None
    for plan in (first, second):
        assert plan.tier is not None and len(plan.admitted) == 1 and len(plan.tier.loads) == 4
    bench.run()
    for request in requests:
        bench.check_tokens(request)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("seed", seeds(6, kept=3))
def test_random_runs_with_few_pages_change_no_tokens(seed: int, depth: int) -> None:
    bench = random_run(seed, depth)
    assert bench.executor.pages.num_loaded


def random_run(seed: int, depth: int) -> Bench:
    rng = random.Random(seed)
    windows = [(0,), (0, 0), (6, 0), (9,), (0, 12, 3), (0,)][seed]
    bench = Bench(
        depth=depth,
        page_size=rng.choice([1, 2, 4]),
        num_pages=49 if seed % 2 else 30,
        windows=windows,
        num_groups=len(windows),
        max_num_seqs=4,
        max_num_batched_tokens=rng.choice([5, 16, 40]),
        max_model_len=28,
        num_drafts=(0, 3)[seed % 2],
        short_rope=rng.choice([None, 16]),
        tier=rng.choice([0.5, 1.0, 4.0]),
    )
    roots = [[rng.randrange(VOCAB) for _ in range(20)] for _ in range(6)]
    aborted = set()
    for _ in range(160):
        if rng.random() < 0.3 and bench.scheduler.num_waiting < 4:
            root = rng.choice(roots)[: rng.choice([8, 16, 20])]
            bench.submit(
                root + [rng.randrange(VOCAB)],
                n=rng.choice([1, 1, 2]),
                max_tokens=rng.choice([1, 4, 7]),
                salt=rng.choice(["", "", "x"]),
            )
        if rng.random() < 0.05 and bench.requests:
            aborted.update(bench.scheduler.abort(rng.choice(bench.requests[-4:]).id))
        bench.step()
        bench.scheduler.check()
    bench.run()
    for request in bench.requests:
        if request not in aborted:
            bench.check_tokens(request)
    return bench


@pytest.mark.parametrize("bug", ["a slot of other content", "a store after the page was overwritten"])
def test_the_random_runs_find_planted_bugs(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "a slot of other content":
        right = CacheTier.take_plan

        def wrong(tier: CacheTier) -> Any:
            plan = right(tier)
            if plan is not None and len(plan.loads) > 1:
                plan.loads[:, 1] = plan.loads[::-1, 1].copy()
            return plan

        monkeypatch.setattr(CacheTier, "take_plan", wrong)
    else:
        monkeypatch.setattr(tier_module, "region_pages", lambda group: 1)
        monkeypatch.setattr(TierSlots, "_is_overwritten", lambda slots, page, page_hash, num_plans: False)
    with pytest.raises(AssertionError):
        for seed in range(6):
            random_run(seed, 1)


def test_the_tier_is_divided_among_groups_as_the_cache_is() -> None:
    bench = Bench(num_pages=10, num_groups=2, tier=3.0)
    config = bench.cache.tier
    assert config is not None and [slots._num_slots for slots in config._slots] == [30, 30]
