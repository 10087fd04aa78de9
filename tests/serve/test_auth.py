"""Keys: only the whole key opens a route."""

from __future__ import annotations

import pytest

from slipstream.serve.http.server.access import Keys
from slipstream.serve.http.server.errors import HTTPException

KEY, OTHER, ADMIN = "sk-Abcdef123456", "other", "the-root-key"
KEYS = Keys([KEY, OTHER], ADMIN)
WAYS = {
    "bearer": lambda key: [(b"authorization", b"Bearer " + key)],
    "x-api-key": lambda key: [(b"x-api-key", key)],
}


def answer(access: str, headers: list[tuple[bytes, bytes]], keys: Keys = KEYS) -> int:
    try:
        keys.check(access, headers)  # type: ignore[arg-type]
    except HTTPException as error:
        return error.status
    return 200


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("key", [KEY, OTHER, ADMIN])
def test_a_whole_key_opens(key, way):
    assert answer("user", WAYS[way](key.encode())) == 200
    assert answer("admin", WAYS[way](key.encode())) == (200 if key == ADMIN else 403)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("key", [KEY, OTHER, ADMIN])
def test_a_part_of_a_key_opens_nothing(key, way):
    """Every beginning, every end, and the key with more behind or before it."""
    whole = key.encode()
    parts = [whole[:stop] for stop in range(len(whole))] + [whole[start:] for start in range(1, len(whole))]
    for wrong in [*parts, whole + b"x", b"x" + whole, whole + whole, whole.swapcase(), whole + b"\0", KEY[:4].encode()]:
        assert answer("user", WAYS[way](wrong)) == 401, wrong
        assert answer("admin", WAYS[way](wrong)) == 401, wrong


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", KEY.encode())],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Basic " + KEY.encode())],
        [(b"x-api-key", b"Bearer " + KEY.encode())],
        [(b"cookie", KEY.encode())],
        [(b"authorization", f"Bearer {KEY},{OTHER}".encode())],
    ],
)
def test_a_key_in_another_form_opens_nothing(headers):
    assert answer("user", headers) == 401


def test_without_keys_users_are_let_in_and_admin_routes_are_closed():
    for given in ([], [(b"x-api-key", b"anything")]):
        assert answer("user", given, Keys([], None)) == 200
        assert answer("admin", given, Keys([], None)) == 403
        assert answer("user", given, Keys([], ADMIN)) == 200
        assert answer("admin", given, Keys([], ADMIN)) == 401
        assert answer("user", given, Keys([KEY], None)) == 401
        assert answer("open", given) == 200
