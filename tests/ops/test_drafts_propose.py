"""Proposals from a row's history: the reference against a plain search, and the kernel against the reference."""

from __future__ import annotations

import math
import random

import pytest
import torch

from draft_search import search
from slipstream.ops.platform import dispatch
from slipstream.ops.sampling import Accepted, DrawnTokens, MatchRule, RowHistory, drafts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE, WIDTH, ROWS, DRAFTS = 4, 40, 6, 5


def propose(name: str, *args) -> None:
    if name == "reference":
        return drafts.propose_from_history_(*args)
    if DEVICE == "cpu" and not pytest.importorskip("triton").knobs.runtime.interpret:
        pytest.skip("no GPU, and triton was imported before its interpreter could be chosen")
    from slipstream.ops.sampling.drafts_triton import propose_from_history_

    return propose_from_history_(*args)


def rows_of(texts: list[list[int]], rng: random.Random) -> RowHistory:
    """Each text in pages at random places, its last token drawn but not computed. The last row is for padding."""
    next_tokens = torch.full((ROWS, 1 + DRAFTS), 77)
    computed, table = torch.zeros(ROWS, dtype=torch.int64), torch.zeros(ROWS, WIDTH, dtype=torch.int64)
    tokens = torch.randint(0, 3, (1 + ROWS * WIDTH, PAGE), dtype=torch.int32)
    free = rng.sample(range(1, len(tokens)), len(tokens) - 1)
    for row, text in enumerate(texts):
        next_tokens[row, 0], computed[row] = text[-1], len(text) - 1
        for position, token in enumerate(text[:-1]):
            if position % PAGE == 0:
                table[row, position // PAGE] = free.pop()
            tokens[table[row, position // PAGE], position % PAGE] = token
    return RowHistory(*(x.to(DEVICE) for x in (next_tokens, computed, table, tokens)))


RULES = [MatchRule(1, 1, math.inf), MatchRule(2, 4, math.inf), MatchRule(1, 12, 1.0), MatchRule(3, 8, 2.0)]


@pytest.mark.parametrize("name", ["reference", "kernel"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_tokens_after_the_longest_and_newest_match(name: str, rule: MatchRule) -> None:
    rng = random.Random(5)
    for kinds, num in ((1, 3), (2, DRAFTS), (3, 4), (9, 1)):
        lengths = [rng.randrange(1, WIDTH * PAGE) for _ in range(ROWS - 3)] + [1, 2]
        texts = [[rng.randrange(kinds) for _ in range(length)] for length in lengths]
        history = rows_of(texts, rng)
        rows = torch.tensor([3, 0, 4, 1, 2, ROWS - 1], device=DEVICE)
        returned = torch.full((len(rows), num), 55, device=DEVICE)
        propose(name, rows, None, history, num, rule, max(lengths), returned)
        assert returned.equal(history.next_tokens[rows, 1 : 1 + num])
        for row, text in enumerate(texts):
            got = history.next_tokens[row].tolist()
            assert got[: 1 + num] == [text[-1], *search(text, rule, num)], (kinds, row, text)
            assert got[1 + num :] == [77] * (DRAFTS - num), "more drafts than were asked for"


@pytest.mark.parametrize("block", [16, 32])
def test_a_history_of_several_blocks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matches that begin in one block and end in another; lengths at the borders of blocks, and no token before."""
    propose("kernel", torch.tensor([0], device=DEVICE), None, rows_of([[1]], random.Random(0)), 1, RULES[0], 1)
    monkeypatch.setattr("slipstream.ops.sampling.drafts_triton._BLOCK", block)
    rng = random.Random(1)
    lengths = [block, block + 1, 2 * block, 2 * block + 1, 2 * block + 2]
    for kinds, rule in ((2, MatchRule(2, 5, math.inf)), (3, MatchRule(1, 24, 1.0))):
        texts = [[rng.randrange(kinds) for _ in range(length)] for length in lengths]
        history = rows_of(texts, rng)
        propose("kernel", torch.arange(len(texts), device=DEVICE), None, history, DRAFTS, rule, max(lengths))
        for row, text in enumerate(texts):
            assert history.next_tokens[row].tolist() == [text[-1], *search(text, rule, DRAFTS)], (kinds, row, text)


@pytest.mark.parametrize("name", ["reference", "kernel"])
def test_only_the_first_place_of_a_row_proposes(name: str) -> None:
    history = rows_of([[1, 2, 3, 1, 2], [5, 5, 5], [1, 2]], random.Random(0))
    rows, offsets = (torch.tensor(x, device=DEVICE) for x in ([0, 0, 0, 1, 2, 2], [0, 1, 2, 0, 1, 2]))
    returned = torch.full((6, 2), 55, device=DEVICE)
    propose(name, rows, offsets, history, 2, MatchRule(1, 12, math.inf), 5, returned)  # longer than the texts
    assert history.next_tokens[:3, :3].tolist() == [[2, 3, 1], [5, 5, 5], [2, 77, 77]]
    assert returned[[0, 3]].tolist() == [[3, 1], [5, 5]]


@pytest.mark.parametrize("name", ["reference", "kernel"])
def test_positions_whose_pages_were_freed_match_nothing(name: str) -> None:
    """A group with a window keeps the last pages only."""
    text = [1, 2, 9, 9, 1, 2, 8, 8, 5, 1, 2, 7, 6, 1, 2]
    history = rows_of([text], random.Random(0))
    history.table[0, :2] = 0
    rule = MatchRule(2, 12, math.inf)
    propose(name, torch.tensor([0], device=DEVICE), None, history, 4, rule, len(text))
    assert history.next_tokens[0, 1:5].tolist() == search(text, rule, 4, first=8)


def test_the_device_is_that_of_the_first_argument() -> None:
    """As dispatched in a torch with CUDA."""
    history = rows_of([[1, 2, 3, 1, 2]], random.Random(0))
    call = dispatch._pick(drafts.propose_from_history_, "slipstream.ops.sampling.drafts_triton")
    call(torch.tensor([0], device=DEVICE), None, history, 2, MatchRule(1, 3, math.inf), 5)
    assert history.next_tokens[0, :3].tolist() == [2, 3, 1]


@pytest.mark.cuda
@pytest.mark.parametrize("rule", [MatchRule(2, 4, math.inf), MatchRule(1, 24, 1.0)], ids=str)
def test_long_histories_on_a_gpu_in_a_replayed_graph(rule: MatchRule) -> None:
    """Acceptance and the search after it, as in the head of a step: one launch each, the second before the end of the
    first. Rows of one token up to several blocks, beside padding."""
    from slipstream.ops.sampling import drafts_triton as kernels

    rng, page, width = random.Random(3), 16, 1252
    lengths = [1, 2, 17, 512, 4096, 4097, 9000, 20_000]
    num_rows = len(lengths) + 1
    table = torch.zeros(num_rows, width, dtype=torch.int64)
    pages = rng.sample(range(1, 1 + len(lengths) * width), len(lengths) * width)
    table[:-1] = torch.tensor(pages).view(len(lengths), width)
    tokens = torch.tensor(rng.choices(range(12), k=(1 + len(pages)) * page), dtype=torch.int32).view(-1, page)
    next_tokens = torch.tensor([[rng.randrange(12) for _ in range(1 + DRAFTS)] for _ in range(num_rows)])
    computed = torch.tensor([length - 1 for length in lengths] + [0])
    rows = torch.arange(len(lengths)).repeat_interleave(1 + DRAFTS)
    offsets = torch.arange(1 + DRAFTS).repeat(len(lengths))
    rows, offsets = torch.cat([rows, torch.full((3,), num_rows - 1)]), torch.cat([offsets, torch.zeros(3).long()])
    # the first drafts of each row are right, of the last row all
    drawn = next_tokens[rows, (offsets + 1).clamp(max=DRAFTS)]
    wrong = (offsets >= rows % (1 + DRAFTS)) & (rows != len(lengths) - 1)
    drawn = torch.where(wrong, drawn + 100, drawn) % 101
    failed = torch.zeros(len(rows), dtype=torch.bool)
    on_host = RowHistory(next_tokens, computed, table, tokens)
    on_gpu = RowHistory(*(part.cuda() for part in on_host))

    returned = torch.full((len(rows), DRAFTS), 55, device="cuda")

    def run(name: str, history: RowHistory) -> Accepted:
        module, device = (drafts, "cpu") if name == "reference" else (kernels, "cuda")
        own = [part.to(device) for part in (rows, offsets, drawn, failed)]
        positions = history.computed[own[0]] + own[1] + 1

        def step() -> Accepted:
            accepted = module.accept_(history.next_tokens, history.computed, DrawnTokens(*own[:2], positions, *own[2:]))
            out = returned if name == "kernel" else None
            module.propose_from_history_(*own[:2], history, DRAFTS, rule, max(lengths) + DRAFTS + 1, out)
            return accepted

        if name == "reference":
            return step()
        saved = history.next_tokens.clone(), history.computed.clone()
        step()  # compiles
        for target, value in zip(history, saved, strict=False):
            target.copy_(value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            accepted = step()
        for _ in range(3):
            for target, value in zip(history, saved, strict=False):
                target.copy_(value)
            graph.replay()
        return accepted

    wanted, got = run("reference", on_host), run("kernel", on_gpu)
    real = rows != num_rows - 1
    for mine, other in zip(got, wanted, strict=True):
        assert mine.cpu()[real].equal(other[real])
    assert wanted.kept[real].any() and not wanted.kept[real].all()
    assert on_gpu.next_tokens[:-1].cpu().equal(on_host.next_tokens[:-1])
    assert on_gpu.computed.cpu().equal(on_host.computed)
    firsts = real & (offsets == 0)
    assert returned.cpu()[firsts].equal(on_host.next_tokens[rows[firsts], 1:])
    assert (on_host.next_tokens[:-1, 1:] >= 0).any() and (on_host.next_tokens[:-1, 1:] < 0).any()
