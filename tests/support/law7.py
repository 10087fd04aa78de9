"""The matrix of law 7, for tests of tokens and of vectors: prompts, and the engine options of a cell."""

from __future__ import annotations

import itertools
from typing import Any

SHARED = list(range(40, 75))
PROMPTS = [
    [7, 9, 11],
    SHARED + [100, 101],
    SHARED + [100, 102, 103, 104, 105, 106, 107],
    [200],
    list(range(120, 167)),
    SHARED[:16],
]  # ids below 304; two prompts share more than a page
FACTORS = ("batched", "chunked", "cached", "preempted", "depth")
CELLS = list(itertools.product((True, False), (True, False), (True, False), (True, False), (0, 1, 2)))
# A pairwise selection: together with the baseline (all factors False, depth 0), every pair of values of any two factors
# occurs. A request that runs alone is never preempted, so preemption is paired in batches only (test_law7 checks this).
PAIRED = [
    dict(zip(FACTORS, cell, strict=True))
    for cell in (
        (True, True, True, True, 2),
        (True, False, False, True, 1),
        (True, False, True, False, 0),
        (False, True, True, False, 1),
        (False, False, False, False, 2),
        (True, True, False, True, 0),
    )
]


# how drafts are made: always right, always wrong, at random, or from the row's history
DRAFTERS = ("right", "wrong", "random", "ngram", "suffix")
DRAFTED = [cell | {"drafts": DRAFTERS[number % 5]} for number, cell in enumerate(PAIRED)]


def options_of(
    *,
    few_pages: int,
    batched: bool = True,
    chunked: bool = False,
    cached: bool = False,
    preempted: bool = False,
    depth: int = 0,
    drafts: str | None = None,
) -> dict[str, Any]:
    """`few_pages`: a number of pages with which not all prompts fit at once. `drafts`: a kind of DRAFTERS; the caller
    replaces the engine's drafter by one that is right, wrong or random."""
    with_drafts = {} if drafts is None else {"drafts": f"{'suffix' if drafts == 'suffix' else 'ngram'}:3"}
    return with_drafts | dict(
        dtype="float64",
        page_size=4,
        num_threads=1,
        max_num_seqs=8 if batched else 1,
        max_num_batched_tokens=11 if chunked else 512,
        enable_prefix_caching=cached,
        num_pages=few_pages if preempted else 400,
        depth=depth,
    )
