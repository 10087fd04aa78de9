"""LoRA of single tokens: tiles made on the host, reference and kernels against a loop over tokens."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.ops.elementwise import silu_and_mul
from slipstream.ops.gemm.chains import Unnormalized
from slipstream.ops.gemm.lora import LoraTiles, LoraWeights, reference
from slipstream.ops.gemm.lora.reference import make_blocks, make_tiles, num_counters, num_tiles, tile_size

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")

# the interpreter's own use of numpy
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def version(name):
    if name == "reference":
        return reference
    pytest.importorskip("triton", reason="triton is not installed")
    if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU, and triton was imported before its interpreter could be chosen")
    import slipstream.ops.gemm.lora.triton

    return slipstream.ops.gemm.lora.triton


def make(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def tiles_of(slots, counts, device, num_tokens=None, num_slots=4):
    slots, counts = np.array(slots, np.int32), np.array(counts, np.int32)
    num_tokens = int(counts.sum()) if num_tokens is None else num_tokens
    order, tiles = make_tiles(slots, counts, num_tokens, num_slots)
    return LoraTiles(torch.from_numpy(order).to(device), torch.from_numpy(tiles).to(device), tile_size(num_tokens))


def weights_of(a, b, runs, device):
    blocks = torch.from_numpy(make_blocks(runs)).to(device)
    arrived = torch.zeros(num_counters(a.shape[1], len(a)), dtype=torch.int32, device=device)
    return LoraWeights(a.to(device), b.to(device), runs, blocks, arrived)


STEPS = [
    ([1, -1, 0, 1, 3], [1, 1, 1, 1, 1]),
    ([2, -1, 0, 2], [17, 3, 40, 5]),
    ([-1, -1], [2, 1]),
    ([3, 1], [300, 300]),  # large tiles
]


@pytest.mark.parametrize(("slots", "counts"), STEPS)
def test_tiles_hold_each_token_once(slots, counts):
    total = sum(counts)
    order, tiles = make_tiles(np.array(slots, np.int32), np.array(counts, np.int32), total + 7, 4)
    assert len(tiles) == num_tiles(total + 7, 4)
    found = {}
    for slot, first, end in tiles.tolist():
        if first >= 0:
            assert 0 < end - first <= tile_size(total + 7) and not found.keys() & order[first:end].tolist()
            found |= dict.fromkeys(order[first:end].tolist(), slot)
    assert [found[token] for token in range(total + 7)] == [*np.repeat(slots, counts).tolist(), *[-1] * 7]


RUNS = {1: ((0, 70, 0),), 3: ((0, 130, 0), (130, 160, 1), (160, 193, 2)), 2: ((0, 72, 0), (72, 216, 1))}


@pytest.mark.parametrize("name", ["reference", "kernel"])
@pytest.mark.parametrize(("slots", "counts"), STEPS[:3])
@pytest.mark.parametrize(("rank", "num_matrices"), [(16, 3), (128, 1), (16, 2)])
def test_products_are_the_definition(name, slots, counts, rank, num_matrices):
    device = torch.device("cpu") if name == "reference" else DEVICE
    runs, inputs, total = RUNS[num_matrices], 600, sum(counts)
    outputs = runs[-1][1]
    x, out = make(total, inputs), make(total, outputs)
    a, b = make(4, num_matrices * rank, inputs) / 16, make(4, outputs, rank)
    expected = out.double()
    for token, slot in enumerate(np.repeat(slots, counts).tolist()):
        if slot >= 0:
            for first, end, matrix in runs:
                inner = a[slot, matrix * rank : (matrix + 1) * rank].double() @ x[token].double()
                expected[token, first:end] += b[slot, first:end].double() @ inner
    weights = weights_of(a, b, runs, device)
    tiles, ops = tiles_of(slots, counts, device), version(name)
    found = ops.expand_lora(out.clone().to(device), ops.shrink_lora(x.to(device), weights, tiles), weights, tiles)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=2e-5, atol=2e-4)
    assert not weights.arrived.any(), "counters are 0 between launches"
    alone = ops.lora_delta(ops.shrink_lora(x.to(device), weights, tiles), weights, tiles)
    torch.testing.assert_close(alone.cpu().double(), expected - out.double(), rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("name", ["reference", "kernel"])
@pytest.mark.parametrize("num_tokens", [5, 65])
def test_inputs_before_their_norm(name, num_tokens):
    """The norm of a chain: rows times its weights, and sums of squares by blocks."""
    device = torch.device("cpu") if name == "reference" else DEVICE
    slots, counts = [1, -1, 0, 3], [num_tokens - 3, 1, 1, 1]
    total, norm = make(num_tokens, 600), make(600).abs()
    squares = total.view(num_tokens, 5, 120).square().sum(2)
    rows = Unnormalized(
        *(part.to(device) for part in (total, norm)), 1e-6, (total * norm).to(device), squares.to(device)
    )
    weights = weights_of(make(4, 16, 600), make(4, 70, 16), RUNS[1], device)
    tiles, ops = tiles_of(slots, counts, device), version(name)
    found = ops.shrink_lora(rows, weights, tiles)
    normed = torch.nn.functional.rms_norm(total, (600,), norm, 1e-6)
    expected = ops.shrink_lora(normed.to(device), weights, tiles)
    used = num_tokens - 1  # with an adapter
    torch.testing.assert_close(found[:used], expected[:used], rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("name", ["reference", "kernel"])
def test_embeddings_are_the_definition(name):
    device = torch.device("cpu") if name == "reference" else DEVICE
    slots, counts = STEPS[1]
    total, rank = sum(counts), 16
    ids = torch.randint(0, 50, (total,), generator=torch.Generator().manual_seed(1))
    out, a, b = make(total, 70), make(4, 50, rank), make(4, 70, rank)
    expected = out.double()
    for token, slot in enumerate(np.repeat(slots, counts).tolist()):
        if slot >= 0:
            expected[token] += 0.5 * (b[slot].double() @ a[slot, ids[token]].double())
    runs = RUNS[1]
    weights = weights_of(a, b, runs, device)
    tiles = tiles_of(slots, counts, device)
    found = version(name).add_lora_embedding(out.to(device), ids.to(device), weights, tiles, 0.5)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.cuda
def test_many_tokens_of_a_large_model_on_a_gpu():
    from slipstream.ops.gemm.lora import add_lora

    counts = [1] * 40 + [700]
    slots = [number % 9 - 1 for number in range(41)]
    total, rank, inputs = sum(counts), 16, 4096
    runs = ((0, 4096, 0), (4096, 5120, 1), (5120, 6144, 2))
    x, out = (
        make(total, inputs).to(DEVICE, torch.bfloat16),
        torch.zeros(total, 6144, device=DEVICE, dtype=torch.bfloat16),
    )
    a = (make(8, 3 * rank, inputs) / 64).to(DEVICE, torch.bfloat16)
    b = make(8, 6144, rank).to(DEVICE, torch.bfloat16)
    on_host = LoraWeights(a.cpu().double(), b.cpu().double(), runs)
    expected = add_lora(out.cpu().double(), x.cpu().double(), on_host, tiles_of(slots, counts, "cpu", num_slots=8))
    weights = weights_of(a, b, runs, DEVICE)
    for step in (slice(0, 40), slice(0, 41)):
        rows = sum(counts[step])
        tiles = tiles_of(slots[step], counts[step], DEVICE, num_slots=8)
        found = add_lora(torch.zeros_like(out[:rows]), x[:rows].contiguous(), weights, tiles)
        torch.testing.assert_close(found.cpu().double(), expected[:rows], rtol=2e-2, atol=5e-2)


def sums_of(x, weight, a):
    """The product and A x of all slots, as `streaming_gemm` computes both at once."""
    return torch.cat([x @ weight.t(), x @ a.flatten(0, 1).t()], 1)


@pytest.mark.parametrize("name", ["reference", "kernel"])
@pytest.mark.parametrize(("slots", "counts"), STEPS[:3])
@pytest.mark.parametrize(("rank", "num_matrices"), [(16, 3), (128, 1), (16, 2)])
def test_a_product_that_has_multiplied_with_a_is_finished(name, slots, counts, rank, num_matrices):
    """As products whose A x is computed apart: alone, with a gate, and with a residual and a norm."""
    device = torch.device("cpu") if name == "reference" else DEVICE
    runs, total = {**RUNS, 2: ((0, 136, 0), (136, 272, 1))}[num_matrices], sum(counts)
    outputs = runs[-1][1]
    x, weight = make(total, 200), make(outputs, 200) / 16
    a, b = make(4, num_matrices * rank, 200) / 16, make(4, outputs, rank)
    sums = sums_of(x, weight, a)
    for slot in set(range(4)) - set(slots):  # adapters that no token has are not read
        columns = num_matrices * rank
        sums[:, outputs + slot * columns : outputs + (slot + 1) * columns] = torch.nan
    weights, after = weights_of(a, b, runs, device), version(name)
    if name == "kernel":
        from slipstream.ops.gemm.lora import after_gemm as after
    tiles = tiles_of(slots, counts, device)
    whole = reference.expand_lora(
        x @ weight.t(),
        reference.shrink_lora(x, weights_of(a, b, runs, "cpu"), tiles_of(slots, counts, "cpu")),
        weights_of(a, b, runs, "cpu"),
        tiles_of(slots, counts, "cpu"),
    )
    found = after.finish_lora(sums.to(device), weights, tiles)
    torch.testing.assert_close(found.cpu(), whole, rtol=2e-5, atol=2e-4)
    if num_matrices == 2:
        found = after.finish_lora(sums.to(device), weights, tiles, "silu")
        torch.testing.assert_close(found.cpu(), silu_and_mul(whole), rtol=2e-5, atol=5e-4)
    residual, norm = make(total, outputs), make(outputs)
    rows = after.finish_lora_add(sums.to(device), weights, tiles, residual.to(device), norm.to(device), 1e-6)
    torch.testing.assert_close(rows.total.cpu(), whole + residual, rtol=2e-5, atol=2e-4)
    torch.testing.assert_close(rows.weighted.cpu(), (whole + residual) * norm, rtol=2e-5, atol=5e-4)
    torch.testing.assert_close(rows.squares.sum(1).cpu(), (whole + residual).square().sum(1), rtol=1e-4, atol=1e-2)


@pytest.mark.cuda
@pytest.mark.parametrize("num_tokens", [5, 40, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 12288), (1024, 2048)])
def test_a_streamed_gemm_multiplies_with_all_matrices_a(num_tokens, outputs, inputs):
    """Slots lie apart, as in the store of adapters; the last block of 64 rows is not full."""
    from slipstream.ops.gemm.description import AddTo, Gemm, ProductAdapters
    from slipstream.ops.gemm.linear.dispatch import _appends, multiply_appended

    x = make(num_tokens, inputs).to(DEVICE, torch.bfloat16)
    weight = (make(outputs, inputs) / 64).to(DEVICE, torch.bfloat16)
    store = torch.full((3, 16 * inputs + 64), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    a = store[:, : 16 * inputs].unflatten(1, (16, inputs))
    a.copy_(make(3, 16, inputs) / 64)
    lora: Any = ProductAdapters(SimpleNamespace(a=a), None)  # type: ignore[arg-type]
    if not _appends(Gemm(x, weight, adapters=lora, add=AddTo(x, x, 1e-6, "streaming"))):
        pytest.skip("made for another GPU")
    exact = sums_of(x.double(), weight.double(), a.double())
    for _ in range(2):  # the counters of the first run are back at zero
        found = multiply_appended(x, weight, a)
        assert float((found.double() - exact).norm() / exact.norm()) < 4e-3
        assert float((found[:, outputs:].double() - exact[:, outputs:]).norm() / exact[:, outputs:].norm()) < 4e-3
    norm, squares = torch.ones(inputs, device=DEVICE), x.float().view(num_tokens, -1, 64).square().sum(2)
    rows = Unnormalized(x, norm, 1e-6, x, squares)
    exact /= x.double().square().mean(1, keepdim=True).add(1e-6).sqrt()
    found = multiply_appended(rows, weight, a)
    assert float((found.double() - exact).norm() / exact.norm()) < 4e-3
