"""Chained page hashes: the hash of a page covers its tokens and the hash of the page before it.

Equal hashes mean equal tokens from the first position on, hence equal cache content. The chain begins with the cache
salt, so requests with different salts share nothing. Keys rotated by LongRoPE's long factors differ from keys rotated
by the short factors, so the two have different hashes too; and so have keys computed with different adapters.

A draft head that reads hidden states computes the entry of a position from the token after it too. With such a head the
hash of a page also covers the token after the page (`following`).
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from hashlib import blake2b

DIGEST_BYTES = 16
_TOKEN_BYTES = array("i").itemsize


def extend_hashes(
    hashes: list[bytes],
    tokens: list[int],
    num_pages: int,
    page_size: int,
    salt: str,
    long_rope: bool = False,
    adapter: bytes = b"",
    following: int = 0,
) -> None:
    """Append hashes until there are `num_pages`. Reads the tokens of the new pages only. `adapter`: digest of the LoRA
    adapter; empty: none. `following`: tokens after a page that its hash covers, 0 or 1."""
    first = len(hashes)
    if first >= num_pages:
        return
    needed = num_pages * page_size + following
    assert needed <= len(tokens), f"{len(tokens)} tokens, but {num_pages} hashes of {page_size} need {needed}"
    parent = hashes[-1] if first else _root(salt, long_rope, adapter)
    content = array("i", tokens[first * page_size : needed]).tobytes()
    width, covered = page_size * _TOKEN_BYTES, (page_size + following) * _TOKEN_BYTES
    for start in range(0, (num_pages - first) * width, width):
        parent = blake2b(parent + content[start : start + covered], digest_size=DIGEST_BYTES).digest()
        hashes.append(parent)


@lru_cache(64)
def _root(salt: str, long_rope: bool, adapter: bytes) -> bytes:
    person = b"long rope" if long_rope else b""
    return blake2b(salt.encode(), digest_size=DIGEST_BYTES, person=person, key=adapter).digest()
