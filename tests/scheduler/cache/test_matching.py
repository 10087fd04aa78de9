"""The match of a blocked request is kept, and equals a new match."""

from __future__ import annotations

import random

import pytest

from scripted_bench import Bench, make_config
from slipstream.contracts.request import Request, Status
from slipstream.params.sampling import SamplingParams
from slipstream.scheduler.cache.manager import CacheManager, Hit
from slipstream.scheduler.cache.matching import Matching
from slipstream.scheduler.cache.pages import PagePool


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Records every hash that a pool looks up."""
    hashes: list[bytes] = []
    find = PagePool.find

    def counted(pool: PagePool, page_hash: bytes) -> int | None:
        hashes.append(page_hash)
        return find(pool, page_hash)

    monkeypatch.setattr(PagePool, "find", counted)
    return hashes


def blocked(**config: object) -> tuple[Bench, Request]:
    """A request with 40 cached pages waits for one more; running rows take its cached pages, the last first."""
    bench = Bench(page_size=2, num_pages=52, max_model_len=100, max_num_batched_tokens=200, **config)  # type: ignore[arg-type]
    prompt = list(range(81))
    bench.submit(prompt, max_tokens=1)
    bench.run()
    for number in range(6):
        bench.submit([90 + number], max_tokens=14 if number else 4)
    bench.step()
    (request,) = bench.submit(prompt, max_tokens=1)
    bench.step()
    assert request.status is Status.WAITING
    return bench, request


@pytest.mark.parametrize("depth", [0, 2])
def test_a_blocked_request_is_not_matched_again(asked: list[bytes], depth: int):
    bench, request = blocked(depth=depth)
    num = 0
    while request.status is Status.WAITING:
        asked.clear()
        bench.step()
        if request.status is Status.WAITING:
            num += 1
            assert len(asked) <= 2, f"{len(asked)} pages were looked for"
        bench.scheduler.check()
        asked.clear()
    assert num > 5
    bench.run()
    bench.check_tokens(request)


def test_free_pages_of_a_blocked_request_are_not_counted_again(monkeypatch: pytest.MonkeyPatch):
    bench, request = blocked()
    counted: list[int] = []
    num_idle = PagePool.num_idle
    monkeypatch.setattr(PagePool, "num_idle", lambda pool, pages: counted.append(len(pages)) or num_idle(pool, pages))
    for _ in range(2):  # in which no row ends
        bench.step()
        assert request.status is Status.WAITING
    assert not counted


def test_a_kept_match_is_dropped_when_its_request_ends():
    bench, request = blocked()
    assert bench.cache._matching is not None and bench.cache._matching.request is request
    bench.scheduler.abort(request.id)
    assert bench.cache._matching is None and not bench.cache.groups[0].pool._watched


def request(tokens: list[int], id: str = "r") -> Request:
    return Request(id, tokens, SamplingParams(), max_length=200)


def compute(cache: CacheManager, tokens: list[int], id: str = "r", *, shares: bool = True) -> Request | None:
    """A request that holds the pages of these tokens, all published; None if they do not fit. Without `shares` it
    computes all of them."""
    made = request(tokens, id)
    pages = fresh(cache, made) if shares else cache.no_hit.pages
    if cache.admit(made, len(tokens), Hit(len(pages[0]) * cache.page_size, pages)) is None:
        return None
    made.num_known = made.computed = made.committed = len(tokens)
    cache.publish(made)
    return made


def keep(cache: CacheManager, tokens: list[int]) -> Request:
    made = request(tokens, "kept")
    cache.match(made)
    cache.keep_match(made)
    return made


def fresh(cache: CacheManager, made: Request) -> list[list[int]]:
    """The result of a match from the beginning."""
    found = Matching(request(list(made.tokens)), cache.groups, cache._match_order, cache.page_size).pages
    return found if found[0] else [[] for _ in cache.groups]


def test_pages_taken_from_the_end_of_the_match_shorten_it(asked: list[bytes]):
    cache = CacheManager(make_config(page_size=2, num_pages=14))
    first = compute(cache, list(range(21)))
    assert first is not None
    cache.release(first)
    kept = keep(cache, list(range(21)))
    assert cache.match(kept).length == 20
    pool = cache.groups[0].pool
    pool.take(sum(not pool.is_published(page) for page in pool._free) + 2)
    asked.clear()
    assert cache.match(kept).length == 16 and len(asked) == 1
    assert cache.match(kept).pages == fresh(cache, kept)
    pool.take(1)
    assert cache.match(kept).length == 14


def test_a_page_published_after_the_match_lengthens_it(asked: list[bytes]):
    cache = CacheManager(make_config(page_size=2))
    compute(cache, list(range(8)))
    kept = keep(cache, list(range(15)))
    assert cache.match(kept).length == 8
    compute(cache, list(range(13)), "longer")
    asked.clear()
    assert cache.match(kept).length == 12 and len(asked) == 3  # two are new, the third is not there
    assert cache.match(kept).pages == fresh(cache, kept)


def test_a_page_published_again_elsewhere_is_found():
    """Its hash is in the cache before and after, but the page is another."""
    cache = CacheManager(make_config(page_size=2))
    first = compute(cache, list(range(8)))
    assert first is not None
    kept = keep(cache, list(range(9)))
    old = cache.match(kept).pages[0]
    cache.unpublish(first)
    second = compute(cache, list(range(8)), "again", shares=False)
    assert second is not None
    new = cache.match(kept).pages[0]
    assert new == second.pages[0] and not set(new) & set(old)


def test_new_tokens_are_matched_too():
    """Of a preempted request: its kept match covers the tokens it knew before."""
    cache = CacheManager(make_config(page_size=2))
    compute(cache, list(range(8)))
    kept = keep(cache, list(range(5)))
    assert cache.match(kept).length == 4
    kept.tokens += [5, 6]
    assert cache.match(kept).length == 6


def random_day(seed: int) -> int:
    """Pages are taken, freed and unpublished while a match is kept. Returns how often the match changed."""
    rng = random.Random(seed)
    windows = rng.choice([(0,), (0, 0), (5,), (0, 5), (3, 0, 9)])
    cache = CacheManager(make_config(page_size=rng.choice([1, 2]), num_pages=40, windows=windows))
    root = [rng.randrange(90) for _ in range(30)]
    held: list[Request] = []
    kept, last, num_changes = keep(cache, root), None, 0
    for step in range(120):
        kind = rng.random()
        tokens = root[: rng.randint(1, 30)] + [rng.randrange(3) for _ in range(rng.randint(0, 4))]
        if kind < 0.5 and (made := compute(cache, tokens, f"r{step}", shares=rng.random() < 0.7)):
            held.append(made)
        elif kind < 0.9 and held:
            cache.release(held.pop(rng.randrange(len(held))))
        elif held:
            cache.unpublish(rng.choice(held))
        for group in cache.groups:
            if rng.random() < 0.3 and group.pool.num_free:
                taken = group.pool.take(rng.randint(1, group.pool.num_free))
                group.pool.release(taken)
        found = cache.match(kept).pages
        assert found == fresh(cache, kept)
        assert cache._matching is not None
        cache._matching.check()
        num_changes += found != last
        last = [list(pages) for pages in found]
    return num_changes


@pytest.mark.parametrize("seed", range(30))
def test_a_kept_match_is_what_matching_again_would_find(seed: int):
    random_day(seed)


def test_kept_matches_change_in_the_random_runs():
    assert sum(random_day(seed) for seed in range(30)) > 300


@pytest.mark.parametrize("lost", ["published", "forgotten", "freed"])
def test_an_unrecorded_change_is_caught(lost: str, monkeypatch: pytest.MonkeyPatch):
    note, release = PagePool._note_change, PagePool.release

    def half_deaf(pool: PagePool, page_hash: bytes) -> None:
        if (pool.find(page_hash) is None) == (lost == "published"):
            note(pool, page_hash)

    def uncounted(pool: PagePool, pages: list[int]) -> None:
        before = pool.num_freed
        release(pool, pages)
        pool.num_freed = before

    if lost == "freed":
        monkeypatch.setattr(PagePool, "release", uncounted)
        with pytest.raises(AssertionError, match="pages are free outside the match"):
            bench, _ = blocked()
            for _ in range(200):
                bench.step()
                bench.scheduler.check()
        return
    monkeypatch.setattr(PagePool, "_note_change", half_deaf)
    with pytest.raises(AssertionError):
        for seed in range(30):
            random_day(seed)
