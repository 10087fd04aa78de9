from slipstream.scheduler.cache.matching import extend_hashes


def hashes(tokens: list[int], num_pages: int, salt: str = "", page_size: int = 4) -> list[bytes]:
    made: list[bytes] = []
    extend_hashes(made, tokens, num_pages, page_size, salt)
    return made


def test_equal_tokens_have_equal_hashes_as_far_as_they_agree():
    one, two = hashes(list(range(12)), 3), hashes([*range(8), 99, 9, 10, 11], 3)
    assert one[:2] == two[:2] and one[2] != two[2]


def test_a_page_hash_covers_all_pages_before_it():
    assert hashes([1, 1, 1, 1, 5, 6, 7, 8], 2)[1] != hashes([2, 2, 2, 2, 5, 6, 7, 8], 2)[1]


def test_salts_share_nothing():
    plain, salted = hashes(list(range(8)), 2), hashes(list(range(8)), 2, salt="x")
    assert not set(plain) & set(salted)


def test_growing_by_pieces_gives_the_same_hashes():
    tokens = list(range(100_000, 100_040))
    made: list[bytes] = []
    for num_pages in (1, 1, 2, 7, 3, 10):
        extend_hashes(made, tokens, num_pages, 4, "s")
    assert made == hashes(tokens, 10, "s")
    assert len(set(made)) == 10


def test_token_order_and_page_borders_matter():
    assert hashes([1, 2, 3, 4], 1) != hashes([2, 1, 3, 4], 1)
    assert hashes([1, 2, 3, 4], 1, page_size=4)[-1] != hashes([1, 2, 3, 4], 2, page_size=2)[-1]


def test_a_hash_may_cover_the_token_after_its_page():
    tokens = list(range(13))
    made: list[bytes] = []
    for num_pages in (1, 3):
        extend_hashes(made, tokens, num_pages, 4, "", following=1)
    other: list[bytes] = []
    extend_hashes(other, [*range(8), 99, 9, 10, 11, 12], 3, 4, "", following=1)
    assert len(made) == 3 and made[0] == other[0] and made[1] != other[1]
