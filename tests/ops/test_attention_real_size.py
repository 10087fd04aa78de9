"""Paged attention at the sizes of real models, on a GPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from attention_case import DEVICE, Case, check_drafted, row_alone, singles

from hand_cache import one_group
from slipstream.nn.context import ForwardContext
from slipstream.nn.paged_attention import TritonAttention
from slipstream.ops.attention.launch import hopper_serves
from slipstream.ops.attention.rope_triton import rope_and_write_cache
from slipstream.ops.attention.varlen import DecodeRows
from slipstream.ops.gemm.linear import linear

# the interpreter's own use of numpy
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.filterwarnings("ignore:overflow")]


def ragged(num_rows: int, longest: int) -> list[int]:
    lengths = np.exp(np.random.default_rng(0).uniform(0, np.log(longest), num_rows)).astype(int).tolist()
    return [longest, *lengths[1:]]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ragged_decode_at_real_size(dtype):
    case = singles(ragged(256, 8192), heads=32, kv_heads=8, dim=128, dtype=dtype)
    case.check()
    together = case.run()
    for row in (0, 1, 100, 255):
        assert torch.equal(row_alone(case, row)[0], together[row])


@pytest.mark.cuda
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_mixed_rows_at_real_size(dim):
    lengths = [*ragged(60, 4096), 0, 5000, 2048, 700, 3]
    counts = [1] * 61 + [1000, 2048, 130, 3]
    case = Case(lengths, counts, heads=32, kv_heads=8, dim=dim, dtype=torch.bfloat16, loose=13)
    case.check()
    together = case.run().split([*counts, 13])
    for row in (0, 61, 62, 64):
        assert torch.equal(row_alone(case, row), together[row])


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("heads", "page_size"),
    [((8, 8), 8), ((7, 1), 32), ((16, 1), 64), ((24, 3), 128), ((40, 8), 256), ((24, 1), 16), ((40, 1), 16)],
)
def test_any_group_of_heads_and_any_page(heads, page_size):
    lengths, counts = [*ragged(30, 3000), 128, 129, 2500, 127, 64], [1] * 30 + [128, 129, 900, 2, 64]
    for dim, dtype in ((128, torch.bfloat16), (64, torch.float16), (256, torch.bfloat16)):
        Case(lengths, counts, *heads, dim=dim, page_size=page_size, dtype=dtype, loose=2, slack=100).check()


@pytest.mark.cuda
@pytest.mark.parametrize(("window", "soft_cap"), [(1024, 0.0), (0, 50.0), (300, 30.0)])
def test_window_and_soft_cap_at_real_size(window, soft_cap):
    lengths, counts = [*ragged(30, 4096), 3000, 900], [1] * 30 + [700, 900]
    Case(lengths, counts, 8, 4, 256, dtype=torch.bfloat16, window=window, soft_cap=soft_cap).check()


@pytest.mark.cuda
@pytest.mark.parametrize("window", [0, 128])
def test_sinks_at_the_size_of_gpt_oss(window):
    lengths, counts = [*ragged(30, 4096), 3000, 900], [1] * 30 + [700, 900]
    Case(lengths, counts, 64, 8, 64, dtype=torch.bfloat16, window=window, has_sinks=True).check()


@pytest.mark.cuda
@pytest.mark.parametrize("heads", [(32, 8), (16, 8), (8, 8), (9, 3), (28, 4), (24, 1)])
@pytest.mark.parametrize("rows", [1, 2, 40])  # few rows, and more
def test_drafted_rows_are_bit_equal_to_rows_of_one_token_at_real_size(heads, rows):
    counts = [1 + (4 + row) % 5 for row in range(rows)]
    lengths = [max(length, 8) for length in ragged(rows, 9000)]
    for dim, dtype in ((128, torch.bfloat16), (64, torch.float16), (256, torch.bfloat16)):
        case = Case(lengths, counts, *heads, dim=dim, dtype=dtype, slack=100)
        check_drafted(case, bits=hopper_serves(DEVICE, dtype, dim, 16))


@pytest.mark.cuda
@pytest.mark.parametrize(("rows", "num_drafts"), [(13, 0), (13, 4), (8, 4)])
@pytest.mark.parametrize("heads", [(32, 8), (16, 8)])
def test_a_program_for_each_row_and_head_at_real_size(heads, rows, num_drafts):
    lengths = [max(length, 8) for length in ragged(rows, 5000)]
    case = Case(lengths, [1 + num_drafts] * rows, *heads, 128, dtype=torch.bfloat16)
    if num_drafts:
        check_drafted(case)  # alone they are split in another way
    else:
        case.check()
    is_hopper = hopper_serves(DEVICE, torch.bfloat16, 128, 16)
    shape = (DEVICE, torch.bfloat16, *heads, 128, 16, rows)
    assert DecodeRows(*shape, has_drafts=num_drafts > 0).has_row_programs == is_hopper
    assert DecodeRows(*shape).has_row_programs == (is_hopper and rows > 8)


@pytest.mark.cuda
@pytest.mark.parametrize("facts", [{"window": 300}, {"soft_cap": 30.0}, {"has_sinks": True, "window": 128}], ids=str)
@pytest.mark.parametrize("rows", [2, 30])
def test_drafted_rows_with_windows_caps_and_sinks_at_real_size(facts, rows):
    counts = [1 + row % 5 for row in range(rows)]
    lengths = [max(length, 8) for length in ragged(rows, 5000)]
    bits = "soft_cap" not in facts and hopper_serves(DEVICE, torch.bfloat16, 128, 16)
    check_drafted(Case(lengths, counts, 32, 8, 128, dtype=torch.bfloat16, **facts), bits=bits)


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [3, 16, 200])
@pytest.mark.parametrize("kind", ["plain", "shared", "drafted"])
def test_kernels_that_start_early_read_no_key_too_early(rows, kind):
    """Keys and values that products make in the step itself are NaN before. Where a page is shared, the row that
    completes it does so in the step in which the other reads it. Positions of a drafted row read those before them."""
    case = singles([640] * rows, heads=16, kv_heads=8, dim=128, dtype=torch.bfloat16)
    table, (keys, values) = case.batch.page_tables[0], case.cache
    if kind == "shared":
        table[1, :-1] = table[0, :-1]
        case.batch.lengths[0] -= 16
        case.batch.slots[0][0] = table[0, -2] * 16 + 15
    given = torch.full((rows,), 7 if kind == "shared" else -1, device="cuda")
    batch = dataclasses.replace(case.batch, host_ids=given)
    if kind == "drafted":
        each = min(rows, 4)
        offsets = torch.arange(rows, device="cuda") % each
        table.copy_(table.view(-1, each, table.shape[1])[:, :1].expand(-1, each, -1).reshape(table.shape).clone())
        positions = 640 - each + offsets
        batch = dataclasses.replace(
            batch,
            lengths=positions + 1,
            slots=(table.gather(1, positions[:, None] // 16)[:, 0] * 16 + positions % 16,),
            host_ids=-1 - offsets,
            query_starts=None,
            max_queries=each,
        )
    backend = TritonAttention(one_group(8, 128, num_heads=16, dtype="bfloat16"), torch.bfloat16)
    context = ForwardContext(batch, backend, backend.make_metadata(batch), [case.cache], (0,))
    weights = [torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64 for _ in range(2)]
    x, rotary = torch.randn_like(weights[0][:rows]), torch.randn(rows, 2, 128, device="cuda").bfloat16()

    def step() -> torch.Tensor:
        for cache in (keys, values):
            cache.view(-1, 8, 128).index_fill_(0, batch.slots[0], float("nan"))
        qkv = linear(linear(x, weights[0]), weights[1]).view(rows, 32, 128)
        query, _ = rope_and_write_cache(qkv[:, :24], qkv[:, 24:], None, 1e-6, rotary, keys, values, batch.slots[0])
        return backend.forward(query, None, qkv[:, 24:], 0, case.scale, context)

    expected = step()
    assert expected.isfinite().all()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [step() for _ in range(10)]
    for _ in range(3):
        graph.replay()
    assert all(out.equal(expected) for out in found)


@pytest.mark.cuda
def test_float32_at_real_size():
    Case([*ragged(20, 2048), 900], [1] * 20 + [500], heads=16, kv_heads=4, dim=128).check()


@pytest.mark.cuda
def test_captured_metadata_serves_other_lengths():
    case = Case([1, 1, 3, 4, 0], [1, 1, 3, 4, 0], heads=8, kv_heads=2, dim=64, dtype=torch.bfloat16, slack=2000)
    real = Case([900, 30, 1500, 0, 0], [1, 1, 6, 0, 0], heads=8, kv_heads=2, dim=64, dtype=torch.bfloat16, loose=1)
    backend = TritonAttention(one_group(2, 64, num_heads=8, dtype="bfloat16"), torch.bfloat16)

    def step() -> torch.Tensor:
        context = ForwardContext(case.batch, backend, backend.make_metadata(case.batch), [real.cache], (0,))
        return backend.forward(case.query, case.key, case.value, 0, case.scale, context)

    def fill() -> None:
        case.batch.lengths.copy_(real.batch.lengths)
        case.batch.query_starts.copy_(real.batch.query_starts)
        case.batch.slots[0].copy_(real.batch.slots[0])
        width = real.batch.page_tables[0].shape[1]
        case.batch.page_tables[0][:, :width].copy_(real.batch.page_tables[0])
        for mine, theirs in zip((case.query, case.key, case.value), (real.query, real.key, real.value), strict=True):
            mine.copy_(theirs)

    case.batch.lengths.zero_()
    case.batch.slots[0].zero_()
    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    fill()
    graph.replay()
    expected = real.expected()
    assert torch.isfinite(out).all()
    assert (out.double() - expected).norm() <= 1e-2 * expected.norm()
