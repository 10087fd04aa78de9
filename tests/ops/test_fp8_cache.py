"""KV cache pages in FP8: writes, reads and attention against float64 over the numbers that the pages hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hand_cache import one_group
from slipstream.nn.context import BatchView, ForwardContext
from slipstream.nn.sdpa import SdpaAttention
from slipstream.ops.attention import new_fp8_cache, raw_pages, rope_table, write_cache
from slipstream.ops.attention.cache import read_slots, scales_of

triton_attention = pytest.importorskip("slipstream.nn.paged_attention", reason="triton is not installed")

# the interpreter's own use of numpy
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.filterwarnings("ignore:overflow")]


def new_cache(num_pages: int, page_size: int, heads: int, dim: int, device: torch.device) -> torch.Tensor:
    def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, 255, dtype=dtype, device=device)  # NaN, as numbers and as scales

    return new_fp8_cache(num_pages, page_size, heads, dim, poisoned)


def test_slots_read_back_within_the_rounding_of_fp8() -> None:
    keys, values = (new_cache(5, 4, 3, 8, torch.device("cpu")) for _ in range(2))
    key, value = torch.randn(6, 3, 8) * 100, torch.randn(6, 3, 8) / 1000
    value[2] = 0
    slots = torch.tensor([7, 4, 19, 8, 5, 11])
    write_cache(key, value, keys, values, slots)
    for cache, new in ((keys, key), (values, value)):
        found = read_slots(cache, slots, torch.float32)
        assert bool(((found - new).abs() <= new.abs().amax(-1, keepdim=True) / 28).all())
        assert scales_of(cache).shape == (5, 4, 3)
        assert scales_of(cache)[0].isnan().all()  # no other slot was written
    assert not read_slots(values, slots[2:3], torch.float32).any()


def test_a_head_of_a_page_is_one_run_of_numbers_and_one_of_scales() -> None:
    cache, values = (new_cache(3, 4, 2, 8, torch.device("cpu")) for _ in range(2))
    write_cache(torch.ones(4, 2, 8), torch.ones(4, 2, 8), cache, values, torch.arange(4, 8))
    assert cache[1, :, 1].is_contiguous() and scales_of(cache)[1, :, 1].is_contiguous()
    numbers, scales = raw_pages(cache)[1].split([4 * 2 * 8, 4 * 2 * 4])
    assert numbers.view(torch.float8_e4m3fn).float().eq(448).all()
    torch.testing.assert_close(scales.view(torch.float32), torch.full((8,), 1 / 448))


def test_a_copied_page_has_its_scales() -> None:
    keys, values = (new_cache(4, 2, 1, 8, torch.device("cpu")) for _ in range(2))
    write_cache(torch.randn(2, 1, 8), torch.randn(2, 1, 8), keys, values, torch.tensor([2, 3]))
    pages = raw_pages(keys)
    pages.index_copy_(0, torch.tensor([3]), pages.index_select(0, torch.tensor([1])))
    old, new = (read_slots(keys, torch.tensor(slots), torch.float32) for slots in ([2, 3], [6, 7]))
    assert torch.equal(old, new)


@pytest.mark.parametrize(("tokens", "kv_heads", "dim", "rotary_dim"), [(5, 3, 80, 40), (66, 2, 64, 64)])
def test_the_rope_kernel_writes_what_the_reference_writes(
    tokens: int, kv_heads: int, dim: int, rotary_dim: int, kernel_device: torch.device
) -> None:
    from slipstream.ops.attention.native import rope_and_write_cache as reference
    from slipstream.ops.attention.rope_triton import rope_and_write_cache

    torch.manual_seed(tokens)
    rotary = rope_table(torch.rand(rotary_dim // 2), 50, 1.0, torch.float32)[torch.randint(0, 50, (tokens,))]
    merged = torch.randn(tokens, 4 * kv_heads, dim)
    slots = torch.randperm(9 * 16)[:tokens]
    caches = {}
    for name, device in (("found", kernel_device), ("expected", torch.device("cpu"))):
        keys, values = (new_cache(9, 16, kv_heads, dim, device) for _ in range(2))
        given = [part.to(device) for part in (merged[:, : 3 * kv_heads], merged[:, 3 * kv_heads :])]
        write = rope_and_write_cache if name == "found" else reference
        write(*given, None, 0.0, rotary.to(device), keys, values, slots.to(device))
        caches[name] = [cache.cpu() for cache in (keys, values)]
    for found, expected in zip(caches["found"], caches["expected"], strict=True):
        mine, other = (scales_of(cache).flatten(0, 1)[slots] for cache in (found, expected))
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=0)
        mine, other = (read_slots(cache, slots, torch.float32) for cache in (found, expected))
        # the interpreter loses the carry where a mantissa is rounded up to the next power of two
        is_power = torch.frexp(other / scales_of(expected).flatten(0, 1)[slots].unsqueeze(-1))[0].abs() == 0.5
        off = (
            mine - other
        ).abs() > other.abs() * 0.13 + 1e-3  # one step of FP8: the kernel's sums differ in the last bit
        assert not (off & ~is_power).any()
        written = torch.zeros(9 * 16, dtype=torch.bool)
        written[slots] = True
        assert scales_of(found).flatten(0, 1)[~written].isnan().all()


@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (8, 0.0), (0, 3.0)])
def test_attention_reads_the_numbers_of_the_pages(window: int, soft_cap: float, kernel_device: torch.device) -> None:
    """The kernels against the reference over the same pages: rows of one token, of several, and a chunk."""
    lengths, counts, heads, kv_heads, dim, page_size = [5, 37, 20], [1, 1, 6], 4, 2, 16, 16
    torch.manual_seed(3)
    keys, values = (new_cache(8, page_size, kv_heads, dim, kernel_device) for _ in range(2))
    table = torch.tensor([[1, 0, 0], [2, 5, 3], [4, 6, 0]], device=kernel_device)
    slots = []
    for row, length in enumerate(lengths):
        place = torch.arange(length, device=kernel_device)
        slots.append(table[row][place // page_size] * page_size + place % page_size)
    new = torch.randn(2, sum(lengths), kv_heads, dim, device=kernel_device)
    write_cache(new[0], new[1], keys, values, torch.cat(slots))
    starts = torch.tensor([0, 1, 2, 8], dtype=torch.int32, device=kernel_device)
    positions = torch.cat([torch.arange(n - c, n) for n, c in zip(lengths, counts, strict=True)]).to(kernel_device)
    batch = BatchView(
        ids=torch.zeros(8, dtype=torch.int64, device=kernel_device),
        positions=positions,
        lengths=torch.tensor(lengths, device=kernel_device),
        slots=(torch.cat([own[-count:] for own, count in zip(slots, counts, strict=True)]),),
        page_tables=(table,),
        num_tokens=np.array(counts, np.int32),
        max_lengths=np.array(lengths, np.int32),
        num_single=2,
        query_starts=starts,
    )
    group = one_group(
        kv_heads, dim, page_size=page_size, num_heads=heads, dtype="fp8", window=window, soft_cap=soft_cap
    )
    query = torch.randn(8, heads, dim, device=kernel_device)
    outs = []
    for backend in (triton_attention.TritonAttention(group, torch.float32), SdpaAttention(group, torch.float32)):
        context = ForwardContext(batch, backend, backend.make_metadata(batch), [(keys, values)], (0,))
        outs.append(backend.forward(query, None, None, 0, dim**-0.5, context))
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-4)


HOPPER_SHAPES = [(128, 4, 2, 16), (64, 8, 1, 32), (128, 8, 8, 128), (128, 10, 1, 8)]  # dim, heads, kv heads, page size


def attend_on_hopper(
    shape: tuple[int, int, int, int], window: int, sinks: bool, lengths: list[int], counts: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of rows in bfloat16 on a GPU, and in float32 over the same pages. Pages hold NaN past their rows."""
    from slipstream.ops.attention import decode

    dim, heads, kv_heads, page_size = shape
    device = torch.device("cuda")
    if not decode._uses_hopper(device, torch.float8_e4m3fn, heads // kv_heads, dim, page_size):
        pytest.skip("made for another GPU")
    torch.manual_seed(dim + len(lengths))
    width = -(-max(lengths) // page_size)
    pages = 1 + torch.randperm(width * len(lengths), device=device)
    table = pages.view(len(lengths), width)
    keys, values = (new_cache(len(pages) + 1, page_size, kv_heads, dim, device) for _ in range(2))
    slots = []
    for row, length in enumerate(lengths):
        place = torch.arange(length, device=device)
        slots.append(table[row][place // page_size] * page_size + place % page_size)
    new = torch.randn(2, sum(lengths), kv_heads, dim, device=device) * torch.rand(sum(lengths), 1, 1, device=device)
    write_cache(new[0], new[1], keys, values, torch.cat(slots))
    num_tokens = sum(counts)
    batch = BatchView(
        ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=torch.cat([torch.arange(n - c, n) for n, c in zip(lengths, counts, strict=True)]).to(device),
        lengths=torch.tensor(lengths, device=device),
        slots=(torch.cat([own[-count:] for own, count in zip(slots, counts, strict=True)]),),
        page_tables=(table,),
        num_tokens=np.array(counts, np.int32),
        max_lengths=np.array(lengths, np.int32),
        num_single=counts.count(1),
        query_starts=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=device),
    )
    group = one_group(kv_heads, dim, page_size=page_size, num_heads=heads, dtype="fp8", window=window, sinks=sinks)
    query = torch.randn(num_tokens, heads, dim, device=device).bfloat16()
    sink = torch.randn(heads, device=device).bfloat16() if sinks else None
    found, expected = (
        backend.forward(
            query.to(dtype),
            None,
            None,
            0,
            dim**-0.5,
            ForwardContext(batch, backend, backend.make_metadata(batch), [(keys, values)], (0,)),
            None if sink is None else sink.to(dtype),
        )
        for dtype, backend in (
            (torch.bfloat16, triton_attention.TritonAttention(group, torch.bfloat16)),
            (torch.float32, SdpaAttention(group, torch.float32)),
        )
    )
    return found.float(), expected


@pytest.mark.cuda
@pytest.mark.parametrize("shape", HOPPER_SHAPES)
@pytest.mark.parametrize(("window", "sinks"), [(0, False), (100, True)])
def test_single_tokens_on_hopper(shape: tuple[int, int, int, int], window: int, sinks: bool) -> None:
    """Rows of one token, of odd lengths and in few and many splits."""
    for lengths in ([1, 63, 64, 65, 700, 2049], [5 + 13 * row for row in range(70)]):
        found, expected = attend_on_hopper(shape, window, sinks, lengths, [1] * len(lengths))
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=5e-3)


@pytest.mark.cuda
@pytest.mark.parametrize("shape", HOPPER_SHAPES)
@pytest.mark.parametrize(("window", "sinks"), [(0, False), (100, True)])
def test_chunks_on_hopper(shape: tuple[int, int, int, int], window: int, sinks: bool) -> None:
    """Whole prompts and chunks of odd lengths, beside rows of one token."""
    rows = [(77, 1), (400, 1), (1, 1), (3, 3), (64, 64), (129, 128), (1000, 777), (513, 65), (2049, 2), (300, 300)]
    lengths, counts = (list(each) for each in zip(*rows, strict=True))
    found, expected = attend_on_hopper(shape, window, sinks, lengths, counts)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=5e-3)
