import msgspec
import pytest

from scripted_bench import make_config
from slipstream.contracts.request import Request
from slipstream.contracts.step import NULL_PAGE
from slipstream.params.sampling import SamplingParams
from slipstream.scheduler.cache.manager import CacheManager
from slipstream.scheduler.cache.matching import extend_hashes


def make(**config: object) -> CacheManager:
    return CacheManager(make_config(**config))  # type: ignore[arg-type]


def request(tokens: list[int], id: str = "a", salt: str = "") -> Request:
    return Request(id, tokens, SamplingParams(), cache_salt=salt, max_length=64)


def admit(cache: CacheManager, req: Request) -> int:
    """Admit a request with all its known tokens; returns how many were found in the cache."""
    hit = cache.match(req)
    assert cache.admit(req, len(req.tokens), hit) is not None
    req.computed = len(req.tokens)
    cache.publish(req)
    return hit.length


def test_a_prompt_finds_the_pages_of_the_one_before_while_it_runs_and_after():
    cache = make()
    first, second, third = (request(list(range(10)), id) for id in "abc")
    assert admit(cache, first) == 0
    assert admit(cache, second) == 8
    assert second.pages[0][:2] == first.pages[0][:2] and second.pages[0][2] != first.pages[0][2]
    cache.check()
    cache.release(first)
    cache.release(second)
    assert admit(cache, third) == 8
    cache.check()


def test_a_hit_leaves_a_token_to_compute():
    cache = make()
    admit(cache, request(list(range(8)), "a"))
    assert cache.match(request(list(range(8)), "b")).length == 4


def test_a_drafter_that_reads_hidden_states_drops_the_last_page_of_a_hit():
    cache = CacheManager(msgspec.structs.replace(make_config(num_groups=2), drops_last_page=True))
    first = request(list(range(20)), "a")
    assert admit(cache, first) == 0
    assert admit(cache, request(list(range(20)), "b")) == 12
    assert admit(cache, request([*range(4), 99, 99], "c")) == 0
    waiting = request([*range(14), 99], "d")
    assert cache.match(waiting).length == 8
    cache.keep_match(waiting)
    cache.groups[1].pool.unpublish(first.pages[1][1])  # the kept match changes with the pages
    assert cache.match(waiting).length == 0
    cache.check()


def test_entries_of_a_draft_head_that_depend_on_the_next_token_are_not_shared_before_another():
    """The last entry of a page is computed from the token after the page too."""
    cache = CacheManager(msgspec.structs.replace(make_config(), drops_last_page=True))
    first, second = request([*range(8), *range(50, 58)], "a"), request([*range(8), *range(60, 68)], "b")
    admit(cache, first)
    admit(cache, second)
    again = request(second.tokens[:], "c")
    assert admit(cache, again) == 8
    assert again.pages[0][0] == first.pages[0][0]  # tokens 0 to 4 are those of both
    assert again.pages[0][1] == second.pages[0][1] != first.pages[0][1]
    cache.check()
    cache.unpublish(second)
    assert cache.match(request(second.tokens[:], "d")).length == 0


def test_no_hits_across_salts_or_without_prefix_caching():
    cache = make()
    admit(cache, request(list(range(10)), "a", salt="x"))
    assert cache.match(request(list(range(10)), "b")).length == 0
    assert cache.match(request(list(range(10)), "b", salt="x")).length == 8
    off = make(prefix_caching=False)
    admit(off, request(list(range(10)), "a"))
    assert off.match(request(list(range(10)), "b")).length == 0


def test_groups_agree_on_the_shortest_of_their_matches():
    cache = make(num_groups=2)
    first = request(list(range(20)), "a")
    admit(cache, first)
    cache.groups[1].pool.unpublish(first.pages[1][3])
    hit = cache.match(request(list(range(20)), "b"))
    assert hit.length == 12
    assert [len(pages) for pages in hit.pages] == [3, 3]


def test_reserve_gives_what_is_missing_or_changes_nothing():
    cache = make(num_pages=5)
    req = request(list(range(6)))
    assert cache.admit(req, 6, cache.match(req)) == [(0, 0, req.pages[0])]
    assert req.capacity == 8
    assert cache.reserve(req, 9) == [(0, 2, req.pages[0][2:])]
    before = list(req.pages[0])
    assert cache.reserve(req, 17) is None
    assert req.pages[0] == before and cache.num_free == 1 and req.capacity == 12
    cache.check()


def test_admit_keeps_pages_free():
    cache = make(num_pages=5)
    req = request(list(range(8)))
    assert cache.admit(req, 8, cache.match(req), keep_free=3) is None
    assert not req.pages
    assert cache.admit(req, 8, cache.match(req), keep_free=2) is not None


def test_found_pages_that_are_free_are_not_counted_twice():
    """Three pages found and free, three to take, five in all: the sum of free pages is misleading."""
    cache = make(num_pages=6)
    first = request(list(range(13)), "a")
    admit(cache, first)
    cache.release(first)
    second = request(list(range(12)) + [50] * 12, "b")
    hit = cache.match(second)
    assert hit.length == 12 and cache.num_free == 5
    assert cache.admit(second, 24, hit) is None
    cache.check()
    assert cache.admit(second, 20, hit) is not None
    assert second.pages[0][:3] == hit.pages[0]
    cache.check()


def test_only_launched_and_known_pages_are_published():
    cache = make()
    req = request(list(range(12)))
    cache.admit(req, 12, cache.match(req))
    req.computed = 7
    cache.publish(req)
    assert req.num_published == 1
    assert cache.match(request(list(range(12)), "b")).length == 4
    req.computed = 12
    cache.publish(req)
    assert cache.match(request(list(range(13)), "b")).length == 12


def hashes_of(tokens: list[int], salt: str = "") -> list[bytes]:
    made: list[bytes] = []
    extend_hashes(made, tokens, len(tokens) // 4, 4, salt)
    return made


@pytest.mark.parametrize("num_groups", [1, 2])
def test_pages_are_published_under_the_hashes_of_their_own_tokens(num_groups: int):
    """In several calls, as a chunked prompt and then its output publish them."""
    cache = make(num_groups=num_groups)
    req = request(list(range(100, 110)), salt="s")
    cache.admit(req, 24, cache.match(req))
    hashes = hashes_of([*range(100, 110), *range(200, 214)], "s")
    for computed, tokens, full in ((3, 10, 0), (7, 10, 1), (10, 10, 2), (17, 18, 4), (24, 24, 6)):
        req.tokens += range(200 + len(req.tokens) - 10, 200 + tokens - 10)
        req.computed = computed
        cache.publish(req)
        for group, held in zip(cache.groups, req.pages, strict=True):
            assert [group.pool.find(name) for name in hashes] == held[:full] + [None] * (6 - full)
        cache.check()


def test_a_page_with_pending_tokens_is_published_once_they_are_known_and_under_their_hash():
    """Six tokens are known, six more are launched; then the second page gets its last two and the third its four."""
    cache = make()
    req = request([1, 2, 3, 4, 5, 6])
    cache.admit(req, 12, cache.match(req))
    req.computed = 12
    cache.publish(req)
    first, second, third = req.pages[0]
    assert req.num_published == 1 and not any(map(cache.groups[0].pool.is_published, (second, third)))
    cache.check()
    req.tokens += [7, 8, 9]
    cache.publish(req)
    assert cache.match(request([1, 2, 3, 4, 5, 6, 7, 8, 9, 0], "b")).pages == [[first, second]]
    assert cache.match(request([1, 2, 3, 4, 5, 6, 0, 0, 9, 0], "c")).pages == [[first]], "placeholders are no tokens"
    assert not cache.groups[0].pool.is_published(third)
    cache.check()
    req.tokens += [10, 11, 12]
    cache.release(req)
    assert cache.match(request([*range(1, 13), 0], "d")).pages == [[first, second, third]]


def test_check_finds_a_page_under_a_wrong_hash():
    cache = make()
    req = request(list(range(12)))
    admit(cache, req)
    pool, page = cache.groups[0].pool, req.pages[0][2]
    cache.check()
    pool.unpublish(page)
    pool.publish([page], hashes_of(list(range(50, 62)))[-1:])
    with pytest.raises(AssertionError, match="published under other tokens. hash"):
        cache.check()
    pending = request(list(range(70, 76)), "b")
    other = make()
    other.admit(pending, 8, other.match(pending))
    pending.computed = 8
    other.groups[0].pool.publish(pending.pages[0][1:], hashes_of(list(range(70, 78)))[1:])
    with pytest.raises(AssertionError, match="not all its tokens are known"):
        other.check()


def test_generated_pages_can_be_found_after_release():
    cache = make()
    req = request([1, 2, 3])
    cache.admit(req, 9, cache.match(req))
    req.tokens += [4, 5, 6, 7, 8, 9]
    req.computed = 9
    cache.release(req)
    assert cache.match(request([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], "b")).length == 8


def test_a_first_page_that_output_fills_keeps_its_salt():
    """The prompt has no whole page, so nothing was hashed when it was matched."""
    cache = make()
    req = request([1, 2, 3], salt="x")
    cache.admit(req, 9, cache.match(req))
    req.tokens += [4, 5, 6, 7, 8, 9]
    req.computed = 9
    cache.publish(req)
    cache.check()
    assert cache.match(request([*range(1, 10), 0], "b")).length == 0
    assert cache.match(request([*range(1, 10), 0], "b", salt="x")).length == 8


@pytest.mark.parametrize("held", [True, False])
def test_unpublished_pages_are_not_found_again(held: bool):
    cache = make()
    req = request(list(range(10)))
    admit(cache, req)
    if not held:
        cache.release(req)
    assert cache.match(request(list(range(10)), "b")).length == 8
    cache.unpublish(req)
    assert cache.match(request(list(range(10)), "b")).length == 0
    cache.check()


@pytest.mark.parametrize(("num_prompt", "shared", "copied"), [(1, 0, 0), (4, 0, 1), (5, 1, 0), (6, 1, 1), (9, 2, 0)])
@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_shares_whole_pages_and_copies_the_last(num_prompt: int, shared: int, copied: int, caching: bool):
    cache = make(prefix_caching=caching)
    leader, sibling = request(list(range(num_prompt))), request(list(range(num_prompt)))
    admit(cache, leader)
    hit = cache.fork(sibling, leader)
    assert hit.length == num_prompt - 1
    assert hit.pages == [leader.pages[0][:shared]]
    assert list(hit.partial) == leader.pages[0][shared : shared + copied]
    cache.admit(sibling, num_prompt, hit)
    assert len(sibling.pages[0]) == len(leader.pages[0])
    assert sibling.pages[0][-1] != leader.pages[0][-1]
    cache.check()
    cache.release(leader)
    cache.check()
    cache.release(sibling)
    assert cache.num_free == cache.num_usable


def test_the_least_recently_used_prompt_is_evicted_from_its_end():
    cache = make(num_pages=8)  # seven to hand out
    old, new = request([1] * 12, "a"), request([2] * 12, "b")
    admit(cache, old)
    admit(cache, new)
    cache.release(old)
    cache.release(new)
    admit(cache, request([3] * 8, "c"))  # takes the page never used and the last of the old
    assert cache.match(request([1] * 13, "d")).length == 8
    assert cache.match(request([2] * 13, "d")).length == 12


def test_can_ever_fit_counts_all_pages_but_the_null_page():
    cache = make(num_pages=5)
    assert cache.can_ever_fit(16) and not cache.can_ever_fit(17)


def test_counters_count_tokens_of_first_admissions():
    cache = make()
    admit(cache, request(list(range(10)), "a"))
    again = request(list(range(10)), "b")
    admit(cache, again)
    assert (cache.num_queries, cache.num_hits) == (20, 8)
    cache.release(again)
    again.num_preemptions = 1
    admit(cache, again)
    assert (cache.num_queries, cache.num_hits) == (20, 8)


def test_a_long_prompt_that_misses_at_once_is_not_hashed_to_its_end():
    cache = make(num_pages=600)
    long = request(list(range(2000)), "a")
    cache.match(long)
    assert len(long.hashes) <= 16


def test_a_model_without_cache_groups_needs_no_pages():
    cache = make(num_groups=0)
    req = request(list(range(10)))
    assert admit(cache, req) == 0
    assert cache.can_ever_fit(10**6) and req.capacity > 10**6
    cache.release(req)
    cache.check()


def test_check_finds_an_unpublished_page_held_by_two_requests():
    cache = make(prefix_caching=False)
    one, two = request([1] * 4, "a"), request([2] * 4, "b")
    admit(cache, one)
    admit(cache, two)
    cache.groups[0].pool.share(one.pages[0])
    two.pages[0] += one.pages[0]
    with pytest.raises(AssertionError, match="unpublished and shared by"):
        cache.check()


def run_to(cache: CacheManager, req: Request, committed: int, launched: int) -> None:
    """As after some decodes: tokens are known to one past the committed positions, the rest is in flight."""
    req.tokens += range(1000, 1000 + committed + 1 - len(req.tokens))
    req.computed = launched


def test_pages_before_the_window_are_given_back_by_committed_length():
    cache = make(windows=(8, 0))
    req = request(list(range(10)))
    admit(cache, req)
    req.num_known = 10
    first = list(req.pages[0])
    run_to(cache, req, committed=11, launched=19)  # launched, it would need nothing before position 12
    changed = cache.reserve(req, 20)
    assert changed is not None and changed[0] == (0, 0, [NULL_PAGE])
    assert req.pages[0][:3] == [NULL_PAGE, *first[1:]] and NULL_PAGE not in req.pages[1]
    assert [len(pages) for pages in req.pages] == [5, 5] and req.capacity == 20
    cache.check()
    cache.release(req)
    assert all(group.pool.num_free == group.pool.num_usable for group in cache.groups)


def test_pages_given_back_make_room_in_the_same_call():
    cache = make(windows=(8,), window_pages=5, step_tokens=4)  # four to hand out
    req = request(list(range(4)))
    assert cache.can_ever_fit(64)
    admit(cache, req)
    req.num_known = 4
    for committed in range(4, 60):
        run_to(cache, req, committed, committed)
        assert cache.reserve(req, committed + 1) is not None
        req.computed = committed + 1
        cache.check()
    assert not make(windows=(8,), window_pages=4, step_tokens=4).can_ever_fit(64)


def test_will_free_pages_is_true_while_steps_in_flight_hold_pages():
    cache = make(windows=(8,))
    req = request(list(range(10)))
    admit(cache, req)
    req.num_known = 10
    run_to(cache, req, committed=11, launched=14)
    assert not cache.will_free_pages(req)
    req.computed = 15
    assert cache.will_free_pages(req)


def test_all_groups_agree_where_a_window_has_what_it_needs():
    cache = make(windows=(8, 0))
    first = request(list(range(24)))
    admit(cache, first)
    cache.groups[0].pool.unpublish(first.pages[0][4])
    hit = cache.match(request(list(range(25)), "b"))
    assert hit.length == 16  # 20 and 24 need the page that is gone
    assert hit.pages[0] == [NULL_PAGE] * 2 + first.pages[0][2:4]
    assert hit.pages[1] == first.pages[1][:4]
    cache.groups[1].pool.unpublish(first.pages[1][1])
    assert cache.match(request(list(range(25)), "b")).length == 4


def test_a_leader_that_freed_its_pages_cannot_be_forked():
    cache = make(windows=(4, 0))
    leader, sibling = request(list(range(10))), request(list(range(10)))
    admit(cache, leader)
    leader.num_known = 10
    hit = cache.fork(sibling, leader)
    assert hit is not None and hit.pages[0] == [NULL_PAGE, leader.pages[0][1]]
    run_to(cache, leader, committed=15, launched=15)
    assert cache.reserve(leader, 17) is not None
    assert cache.fork(sibling, leader) is None
