"""Vectors of tokens and angles of positions: the kernel against the reference, bit for bit."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

CUDA = torch.cuda.is_available()
if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and triton was imported before its interpreter could be chosen", allow_module_level=True)

from slipstream.ops.elementwise import lookup_embedding_and_rope, reference  # noqa: E402
from slipstream.ops.elementwise import triton as kernels  # noqa: E402

# the interpreter's own use of numpy
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def make(tokens, size, turns, dtype, device):
    torch.manual_seed(size)
    embedding = torch.randn(50, size).to(device, dtype)
    angles = torch.randn(33, 2, turns).to(device, dtype)
    ids, positions = torch.randint(50, (tokens,), device=device), torch.randint(33, (tokens,), device=device)
    return embedding, ids, angles, positions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "size", "turns"), [(0, 8, 4), (1, 63, 6), (5, 100, 128), (3, 1025, 514)])
@pytest.mark.parametrize("scale", [1.0, 11.3125])
def test_both_lookups_in_one(tokens, size, turns, dtype, scale, kernel_device):
    embedding, ids, angles, positions = make(tokens, size, turns, dtype, kernel_device)
    x, rotary = kernels.lookup_embedding_and_rope(embedding, ids, scale, angles, positions)
    wanted, wanted_rotary = reference.lookup_embedding_and_rope(embedding, ids, scale, angles, positions)
    if CUDA or scale == 1.0 or dtype is not torch.bfloat16:
        assert x.equal(wanted)
    else:  # the interpreter cuts bits off where a GPU rounds
        torch.testing.assert_close(x, wanted, rtol=1e-2, atol=0)
    assert rotary.equal(wanted_rotary) and rotary.shape == (tokens, 2, turns)


def test_ids_that_begin_at_an_odd_place(kernel_device):
    embedding, ids, angles, positions = make(9, 40, 8, torch.float32, kernel_device)
    found = kernels.lookup_embedding_and_rope(embedding, ids[1:], 1.0, angles, positions[1:])
    expected = reference.lookup_embedding_and_rope(embedding, ids[1:], 1.0, angles, positions[1:])
    assert all(mine.equal(theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("tokens", [1, 16, 256, 300])
def test_lookups_that_start_early_read_what_the_kernel_before_wrote(tokens):
    embedding, ids, angles, positions = make(tokens, 4096, 128, torch.bfloat16, "cuda")
    expected = lookup_embedding_and_rope(embedding, ids, 1.0, angles, positions)
    given = torch.zeros_like(ids), torch.zeros_like(positions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given[0].copy_(ids)
        given[1].copy_(positions)
        first, _ = lookup_embedding_and_rope(embedding, given[0], 1.0, angles, given[1])
        found = lookup_embedding_and_rope(first, torch.arange(tokens, device="cuda"), 1.0, angles, given[1])
    for _ in range(3):
        graph.replay()
    assert found[0].equal(expected[0]) and found[1].equal(expected[1])
