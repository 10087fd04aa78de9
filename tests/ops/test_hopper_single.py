"""Attention of a single row with norm, RoPE and cache write in one kernel, against the kernels in sequence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hand_cache import one_group
from slipstream.nn.context import BatchView, ForwardContext
from slipstream.nn.paged_attention import TritonAttention
from slipstream.ops.attention.rope_triton import rope_and_write_cache
from slipstream.ops.attention.varlen import serves_single
from slipstream.ops.gemm.linear import linear

PAGE, DIM, EPS = 16, 128, 1e-6
HEADS = [(32, 8), (16, 8), (40, 8), (64, 4), (8, 8)]


class Row:
    """A row of `length` positions; what its pages hold from the last position on is NaN, as are all other pages."""

    def __init__(self, length: int, heads: int, kv_heads: int, max_length: int = 4096) -> None:
        torch.manual_seed(length)
        device = torch.device("cuda")
        num_pages = max(1, -(-length // PAGE))
        table = torch.zeros(1, max_length // PAGE, dtype=torch.int64, device=device)
        table[0, :num_pages] = torch.randperm(num_pages, device=device) + 1
        shape = (num_pages + 2, PAGE, kv_heads, DIM)
        self.cache = tuple(torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device) for _ in range(2))
        held = torch.arange(max(0, length - 1), device=device)
        for pages in self.cache:
            pages[table[0, held // PAGE], held % PAGE] = torch.randn(len(held), *shape[2:], device=device).bfloat16()
        last = max(0, length - 1)
        slot = table[0, last // PAGE] * PAGE + last % PAGE if length else table[0, 0] * 0
        self.heads, self.kv_heads = heads, kv_heads
        self.weight = (torch.rand(heads + kv_heads, DIM, device=device) + 0.5).bfloat16()
        self.rotary = torch.randn(1, 2, DIM // 2, device=device).repeat(1, 1, 2).bfloat16()
        self.qkv = torch.randn(1, (heads + 2 * kv_heads) * DIM, device=device).bfloat16()
        self.batch = BatchView(
            ids=torch.zeros(1, dtype=torch.int64, device=device),
            positions=torch.full((1,), last, device=device),
            lengths=torch.full((1,), length, device=device),
            slots=(slot.view(1),),
            page_tables=(table,),
            num_tokens=np.ones(1, np.int32),
            max_lengths=np.full(1, max_length, np.int32),
            num_single=1,
            host_ids=torch.full((1,), -1, device=device),
        )
        self.backend = TritonAttention(
            one_group(kv_heads, DIM, num_heads=heads, page_size=PAGE, dtype=torch.bfloat16), torch.bfloat16
        )

    def context(self, batch: BatchView | None = None) -> ForwardContext:
        batch = batch or self.batch
        caches = [tuple(pages.clone() for pages in self.cache)]
        return ForwardContext(batch, self.backend, self.backend.make_metadata(batch), caches, (0,))

    def parts(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        heads = qkv.view(1, -1, DIM)
        return heads[:, : self.heads + self.kv_heads], heads[:, self.heads + self.kv_heads :]

    def in_sequence(self, context: ForwardContext, has_norm: bool = True) -> torch.Tensor:
        query_key, value = self.parts(self.qkv)
        weight = self.weight if has_norm else None
        keys, values = context.caches[0]
        query, _ = rope_and_write_cache(query_key, value, weight, EPS, self.rotary, keys, values, self.batch.slots[0])
        return self.backend.forward(query, None, value, 0, DIM**-0.5, context)

    def at_once(
        self, context: ForwardContext, has_norm: bool = True, qkv: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        query_key, value = self.parts(self.qkv if qkv is None else qkv)
        weight = self.weight if has_norm else None
        return self.backend.forward_single(query_key, value, weight, EPS, self.rotary, 0, DIM**-0.5, context)


def skip_without_kernel() -> None:
    row = Row(1, 8, 8)
    if not serves_single(*row.parts(row.qkv), row.rotary, row.cache[0]):
        pytest.skip("no kernel for this device")


def assert_near(found: torch.Tensor, expected: torch.Tensor, has_norm: bool) -> None:
    """The same bits, or with a norm the same up to the rounding of few numbers."""
    assert has_norm or torch.equal(found, expected)
    assert ((found - expected).float().norm() <= 2e-3 * expected.float().norm()).item()


@pytest.mark.cuda
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("has_norm", [True, False])
def test_one_kernel_gives_what_the_kernels_give_in_sequence(heads: tuple[int, int], has_norm: bool) -> None:
    skip_without_kernel()
    for length in (0, 1, 2, 15, 16, 17, 127, 128, 129, 255, 256, 257, 385, 1000, 2049, 4096):
        row = Row(length, *heads)
        one, other = row.context(), row.context()
        expected, found = row.in_sequence(one, has_norm), row.at_once(other, has_norm)
        assert found is not None and torch.isfinite(expected).all()
        # squares of a head are summed in another order: rarely, a number of a query or key is rounded to its neighbour
        assert_near(found, expected, has_norm)
        again = row.at_once(other, has_norm)
        assert again is not None and torch.equal(again, found), "a second launch differs"
        for written, wanted in zip(other.caches[0], one.caches[0], strict=True):
            assert_near(written[1:].nan_to_num(7.0), wanted[1:].nan_to_num(7.0), has_norm)  # padding is not written


@pytest.mark.cuda
def test_the_kernel_reads_what_the_gemm_before_it_computes() -> None:
    """Kernels start before the previous one ends: the row is NaN until its GEMM has stored it."""
    skip_without_kernel()
    row = Row(640, 32, 8)
    weight = torch.randn(row.qkv.shape[1], 4096, device="cuda", dtype=torch.bfloat16) / 64
    x = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)
    context = row.context()

    def step() -> tuple[torch.Tensor, torch.Tensor | None]:
        torch.full_like(row.qkv, float("nan"))  # memory that the GEMM gets
        qkv = linear(x, weight)
        return qkv, row.at_once(context, qkv=qkv)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        qkv, out = step()
    for turn in range(20):
        for pages in context.caches[0]:
            pages.view(-1, 8, DIM)[row.batch.slots[0]] = float("nan")
        graph.replay()
        if not turn:
            row.qkv = qkv.clone()
            expected = row.in_sequence(row.context())
        assert out is not None
        assert_near(out, expected, True)


@pytest.mark.cuda
def test_steps_whose_keys_may_be_new_run_the_kernels_in_sequence() -> None:
    skip_without_kernel()
    row = Row(100, 32, 8)
    assert row.at_once(row.context()) is not None
    assert row.at_once(row.context(replace(row.batch, host_ids=None))) is None


def test_only_rows_of_the_kernel_s_shape_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.ops.attention.decode.hopper_serves", lambda *_: True)

    def serves(heads: int = 40, dim: int = 128, rotary: int = 128, dtype: torch.dtype = torch.bfloat16) -> bool:
        qkv = torch.zeros(1, heads + 8, dim, dtype=torch.bfloat16)
        keys = torch.zeros(2, 16, 8, dim, dtype=dtype)
        return serves_single(qkv[:, :heads], qkv[:, heads:], torch.zeros(1, 2, rotary), keys)

    assert serves() and serves(heads=16) and serves(heads=136)
    assert not serves(heads=144)
    assert not serves(dim=64)
    assert not serves(rotary=64)
    assert not serves(dtype=torch.float16)
