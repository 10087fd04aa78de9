"""What a deterministic engine is made of: a row's numbers are its own to the last bit."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from hand_cache import one_group
from slipstream.nn.context import BatchView, ForwardContext
from slipstream.ops.gemm.linear import linear

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    not CUDA and os.environ.get("TRITON_INTERPRET") != "1", reason="kernels need a GPU or TRITON_INTERPRET=1"
)


@pytest.fixture(autouse=True)
def _plain_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dot of the interpreter, whose sums have one order: BLAS has another for some rows of a tile, depending on the
    processor."""
    if CUDA:
        return
    from triton.runtime import interpreter

    def create_dot(builder: object, a: Any, b: Any, d: Any, *precision: object) -> Any:
        product = np.einsum("...ik,...kj->...ij", a.data, b.data, dtype=d.data.dtype, optimize=False)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if CUDA else [torch.float32])
@pytest.mark.parametrize("shape", [(5, 3), (64, 96), (100, 577)])
def test_a_product_of_a_row_is_the_same_among_any_others(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from slipstream.ops.gemm.linear.triton import batch_invariant_linear

    random = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(s, generator=random).to(DEVICE, dtype) for s in (shape, shape[:1]))
    x = torch.randn(513, shape[1], generator=random).to(DEVICE, dtype)
    whole = batch_invariant_linear(x, weight, bias)
    assert whole.shape == (513, shape[0])
    torch.testing.assert_close(whole.double(), linear(x.double(), weight.double(), bias.double()), rtol=1e-2, atol=2e-1)
    for first, last in ((0, 1), (0, 63), (100, 400), (256, 512), (512, 513)):
        assert batch_invariant_linear(x[first:last], weight, bias).equal(whole[first:last]), f"{first} to {last}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if CUDA else [torch.float32])
def test_products_of_heads_are_the_same_among_any_others(dtype: torch.dtype) -> None:
    """As latent attention has them: strided queries by a matrix that lies the other way round."""
    from slipstream.ops.gemm.linear.triton import batch_invariant_heads

    random = torch.Generator().manual_seed(0)
    weights = torch.randn(3, 40, 70, generator=random).to(DEVICE, dtype).transpose(1, 2)
    x = torch.randn(130, 3, 72, generator=random).to(DEVICE, dtype)[..., :40]
    whole = batch_invariant_heads(x, weights)
    wanted = torch.einsum("thi,hoi->tho", x.double(), weights.double())
    torch.testing.assert_close(whole.double(), wanted, rtol=1e-2, atol=2e-1)
    for first, last in ((0, 1), (0, 63), (60, 130)):
        assert batch_invariant_heads(x[first:last], weights).equal(whole[first:last]), f"{first} to {last}"


@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (40, 0.0), (0, 3.0)])
def test_attention_of_a_token_is_the_same_alone_and_in_a_chunk(window: int, soft_cap: float) -> None:
    from slipstream.nn.paged_attention import TritonAttention

    lengths, heads, kv_heads, dim, page_size = [1, 17, 70, 131], 6, 2, 16, 16
    widths = [-(-length // page_size) for length in lengths]
    table = torch.zeros(len(lengths), max(widths), dtype=torch.int64)
    order = iter(np.random.default_rng(0).permutation(sum(widths)) + 1)
    for row, width in enumerate(widths):
        table[row, :width] = torch.tensor([int(next(order)) for _ in range(width)])
    random = torch.Generator().manual_seed(1)
    dtype = torch.bfloat16 if CUDA else torch.float32
    shape = (sum(widths) + 1, page_size, kv_heads, dim)
    cache = tuple(torch.randn(shape, generator=random).to(DEVICE, dtype) for _ in range(2))
    queries = torch.randn(sum(lengths), heads, dim, generator=random).to(DEVICE, dtype)
    ends = np.cumsum(lengths)
    backend = TritonAttention(
        one_group(kv_heads, dim, num_heads=heads, page_size=page_size, dtype=dtype, window=window, soft_cap=soft_cap),
        dtype,
        one_kernel=True,
    )

    def attend(rows: list[int], last: list[int], counts: list[int]) -> torch.Tensor:
        """The `counts` tokens of these rows that end at positions `last`."""
        tokens = [
            torch.arange(ends[r] - lengths[r] + e - c, ends[r] - lengths[r] + e)
            for r, e, c in zip(rows, last, counts, strict=True)
        ]
        query = queries[torch.cat(tokens)]
        num_tokens = np.array(counts, np.int32)
        single = all(count == 1 for count in counts)
        starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=DEVICE)
        ints = torch.zeros(len(query), dtype=torch.int64, device=DEVICE)
        batch = BatchView(
            ids=ints,
            positions=ints,
            lengths=torch.tensor(last, device=DEVICE),
            slots=(ints,),
            page_tables=(table[rows].to(DEVICE),),
            num_tokens=num_tokens,
            max_lengths=np.array(last, np.int32),
            num_single=len(rows) if single else 0,
            query_starts=None if single else starts,
        )
        context = ForwardContext(batch, backend, backend.make_metadata(batch), [cache], (0,))
        return backend.forward(query, query, query, 0, 0.25, context)

    whole = attend([0, 1, 2, 3], lengths, lengths)
    assert torch.isfinite(whole).all()
    alone = attend([0, 1, 2, 3], lengths, [1, 1, 1, 1])
    assert alone.equal(whole[ends - 1]), "the last token of each row, alone"
    chunk = attend([3, 1], [131, 9], [70, 9])
    assert chunk[:70].equal(whole[-70:]) and chunk[70:].equal(whole[1:10]), "in chunks, in another order"
    middle = attend([3], [50], [1])
    assert middle[0].equal(whole[ends[2] + 49])


@pytest.mark.cuda
@pytest.mark.parametrize("sizes", [(64, 4, 2), (128, 16, 8), (128, 32, 8), (80, 2, 1)])
def test_heads_are_normed_and_turned_the_same_among_any_others(sizes: tuple[int, int, int]) -> None:
    """Of many tokens: a sum in another order, or another product rounded first, shows in one number of 10,000."""
    from slipstream.ops.attention import rope_and_write_cache

    dim, heads, kv_heads = sizes
    num, random = 4096, torch.Generator("cuda").manual_seed(2)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device="cuda").to(torch.bfloat16)

    qkv, weight, rotary = some(num, heads + 2 * kv_heads, dim), some(heads + kv_heads, dim), some(num, 2, dim)
    slots = torch.arange(num, device="cuda")

    def turn(which: slice) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (torch.zeros(num // 16, 16, kv_heads, dim, device="cuda", dtype=torch.bfloat16) for _ in "kv")
        query_key, value = qkv[which].split([heads + kv_heads, kv_heads], 1)
        out, _ = rope_and_write_cache(query_key, value, weight, 1e-6, rotary[which], keys, values, slots[which])
        return out, keys.view(num, kv_heads, dim)[which]

    whole = turn(slice(0, num))
    for count in (1, 8, 64, 65, 256):
        for first in range(0, num - count, num // 16):
            part = turn(slice(first, first + count))
            assert all(a.equal(b[first : first + count]) for a, b in zip(part, whole, strict=True)), f"{count} of {num}"


@pytest.mark.cuda
@pytest.mark.parametrize("size", [64, 1024, 4096])
def test_norms_and_activations_are_the_same_among_any_others(size: int) -> None:
    from slipstream.ops.elementwise import add_rms_norm, rms_norm, silu_and_mul

    num, random = 4096, torch.Generator("cuda").manual_seed(3)
    x, residual, both = (
        torch.randn(num, n, generator=random, device="cuda").to(torch.bfloat16) for n in (size, size, 2 * size)
    )
    weight = torch.rand(size, generator=random, device="cuda").to(torch.bfloat16)

    def run(which: slice) -> tuple[torch.Tensor, ...]:
        summed = add_rms_norm(x[which], residual[which], weight, 1e-6)
        return rms_norm(x[which], weight, 1e-6), *summed, silu_and_mul(both[which])

    whole = run(slice(0, num))
    for count in (1, 8, 64, 65, 256):
        for first in range(0, num - count, num // 8):
            part = run(slice(first, first + count))
            assert all(a.equal(b[first : first + count]) for a, b in zip(part, whole, strict=True)), f"{count} of {num}"
