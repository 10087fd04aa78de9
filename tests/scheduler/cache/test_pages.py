import pytest

from slipstream.scheduler.cache.pages import PagePool


def test_the_null_page_is_never_taken():
    pool = PagePool(5)
    assert sorted(pool.take(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    pool.check()
    with pytest.raises(AssertionError, match="1 pages taken, 0 are free"):
        pool.take(1)


def test_a_released_page_is_found_until_it_is_taken_again():
    pool = PagePool(3)
    (page,) = pool.take(1)
    pool.publish([page], [b"a"])
    pool.release([page])
    assert pool.find(b"a") == page
    pool.take(2)
    assert pool.find(b"a") is None
    pool.check()


def test_a_shared_page_is_free_when_its_last_holder_releases_it():
    pool = PagePool(3)
    pages = pool.take(1)
    pool.share(pages)
    pool.release(pages)
    assert pool.num_free == 1
    pool.release(pages)
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(pages)


def test_sharing_a_free_page_takes_it_out_of_the_middle():
    pool = PagePool(6)
    pages = pool.take(5)
    for page in pages:
        pool.publish([page], [bytes([page])])
    pool.release(pages)
    pool.share([pages[2]])
    assert pool.num_idle(pages) == 4
    assert pages[2] not in pool.take(4)
    assert pool.find(bytes([pages[2]])) == pages[2]
    pool.check()


def test_the_least_recently_used_pages_are_reused_first_later_ones_before_earlier():
    pool = PagePool(7)
    old, new = pool.take(3), pool.take(3)
    for page in old + new:
        pool.publish([page], [bytes([page])])
    pool.release(old)
    pool.release(new)
    assert pool.take(6) == [old[2], old[1], old[0], new[2], new[1], new[0]]


def test_unpublished_pages_are_reused_before_published_ones():
    pool = PagePool(4)
    named, nameless = pool.take(1), pool.take(2)
    pool.publish([named[0]], [b"a"])
    pool.release(named)
    pool.release(nameless)
    assert named[0] not in pool.take(2)


def test_the_first_page_with_some_content_is_the_one_found():
    pool = PagePool(4)
    first, second = pool.take(2)
    pool.publish([first], [b"a"])
    pool.publish([second], [b"a"])
    assert pool.find(b"a") == first
    pool.release([second])
    pool.take(2)  # takes the second again
    assert pool.find(b"a") == first
    pool.check()


def test_an_unpublished_page_is_not_found_but_still_held():
    pool = PagePool(4)
    (page,) = pool.take(1)
    pool.publish([page], [b"a"])
    pool.unpublish(page)
    assert pool.find(b"a") is None and pool.refs[page] == 1
    (other,) = pool.take(1)
    pool.publish([other], [b"a"])
    pool.release([page])
    pool.take(2)
    assert pool.find(b"a") == other


def test_check_finds_a_lost_reference():
    pool = PagePool(4)
    pool.take(1)
    pool.refs[1] = 0
    with pytest.raises(AssertionError, match="page 1 has 0 references, free: False"):
        pool.check()
