"""The fused C kernels against the references, on odd shapes, with garbage wherever nothing may be read."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from child import child_env
from patience import PATIENCE
from slipstream.ops import attention, elementwise
from slipstream.ops.attention import cache as cache_reference
from slipstream.ops.attention import reference as rope_reference
from slipstream.ops.elementwise import reference as activation_reference
from slipstream.ops.elementwise import reference as norm_reference
from slipstream.ops.gemm.linear import linear
from slipstream.ops.gemm.linear import tiles as linear_native
from slipstream.ops.platform import native
from slipstream.ops.sampling import cpu as sample_cpu
from slipstream.ops.sampling import reference as sample_reference

SIZES = [1, 3, 63, 64, 100, 576]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_norms(native_kernels, rows: int, size: int) -> None:
    x, residual, weight = random(rows, size), random(rows, size, seed=1), random(size, seed=2)
    torch.testing.assert_close(elementwise.rms_norm(x, weight, 1e-5), norm_reference.rms_norm(x, weight, 1e-5))
    found = elementwise.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(found, norm_reference.add_rms_norm(x, residual, weight, 1e-5))


@pytest.mark.parametrize("eps", [1e-6, 0.3])
@pytest.mark.parametrize("factor", [0.0, 0.3, 1.0, 3.0])
def test_eps_is_added_to_the_mean_square_under_the_root(native_kernels, factor: float, eps: float) -> None:
    x, weight = random(7, 100) * eps**0.5 * factor, random(100, seed=2)
    torch.testing.assert_close(elementwise.rms_norm(x, weight, eps), norm_reference.rms_norm(x, weight, eps))
    found = elementwise.add_rms_norm(x * 0.25, x * 0.75, weight, eps)
    torch.testing.assert_close(found, norm_reference.add_rms_norm(x * 0.25, x * 0.75, weight, eps))


@pytest.mark.parametrize("size", [1, 8, 24, 100])
def test_a_norm_of_each_head(native_kernels, size: int) -> None:
    x, weight = random(3, 7, size)[:, :5], random(5, size, seed=1)
    found = elementwise.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(found, norm_reference.rms_norm(x, weight, 1e-5))
    # a head gets the same bits as a row of its own, which is how the fused layers norm it
    assert found[1, 2].equal(elementwise.rms_norm(x[1, 2].clone(), weight[2].clone(), 1e-5))


def test_a_norm_has_the_same_bits_with_a_residual_of_zeros(native_kernels) -> None:
    x, weight = random(4, 577), random(577, seed=1)
    assert elementwise.add_rms_norm(x, torch.zeros(4, 577), weight, 1e-5)[0].equal(
        elementwise.rms_norm(x, weight, 1e-5)
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_gated_activations(native_kernels, name: str, size: int) -> None:
    x = random(7, 2 * size) * 10
    found = getattr(elementwise, name)(x)
    torch.testing.assert_close(found, getattr(activation_reference, name)(x), rtol=1e-5, atol=1e-5)
    assert getattr(elementwise, name)(x[3:4])[0].equal(found[3])


def test_silu_at_the_ends(native_kernels) -> None:
    gate = torch.tensor([-1e30, -200.0, -88.0, -1e-20, 0.0, 88.0, 200.0, 1e30, torch.nan, -torch.inf, torch.inf])
    x = torch.cat((gate, torch.ones_like(gate))).unsqueeze(0)
    found, expected = elementwise.silu_and_mul(x), activation_reference.silu_and_mul(x)
    finite = gate.isfinite()
    torch.testing.assert_close(found[0][finite], expected[0][finite], rtol=1e-5, atol=1e-8)
    assert found[0][8].isnan(), "what is not a number must stay so, for the row to be flagged"


@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (24, 24), (96, 48), (6, 2)])
@pytest.mark.parametrize("tokens", [1, 9])
def test_rope(native_kernels, tokens: int, dim: int, rotary: int) -> None:
    heads = random(tokens, 7, dim)
    table = rope_reference.rope_table(torch.rand(rotary // 2), 50, 1.0, torch.float32)
    rows = table[torch.arange(tokens) * 3]
    for x in (heads, heads[:, :5]):
        torch.testing.assert_close(attention.apply_rope(x, rows), rope_reference.apply_rope(x, rows))


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 9, 32])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (5, 3), (63, 64), (100, 577)])
def test_products_of_few_tokens(native_kernels, tokens: int, rows: int, size: int) -> None:
    x, weight, bias = random(tokens + 1, size + 2)[1:, 2:], random(rows, size, seed=1), random(rows, seed=2)
    found = linear_native.skinny_gemm(x, weight, bias)
    torch.testing.assert_close(found, F.linear(x, weight, bias), rtol=1e-5, atol=1e-5 * size**0.5)
    assert linear_native.skinny_gemm(x[-1:], weight, bias)[0].equal(found[-1]), "a row's result is its own"


@pytest.mark.parametrize("tokens", [1, 3, 4, 9])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (5, 3), (63, 64), (100, 577), (7, 4099)])
def test_bfloat16_weights_give_the_bits_of_the_same_float32_weights(native_kernels, tokens, rows, size) -> None:
    x, weight, bias = random(tokens, size), random(rows, size, seed=1).bfloat16(), random(rows, seed=2)
    found = linear_native.skinny_gemm(x, weight, bias)
    assert found.equal(linear_native.skinny_gemm(x, weight.float(), bias))


def test_bfloat16_weights_times_many_tokens(native_kernels, monkeypatch) -> None:
    monkeypatch.setattr(linear_native, "_PART", 64 * 10)  # ten rows are widened at a time
    x, weight, bias = random(70, 64), random(33, 64, seed=1).bfloat16(), random(33, seed=2)
    expected = F.linear(x, weight.float(), bias)
    for count in (1, linear_native.MAX_WIDENED_TOKENS, linear_native.MAX_WIDENED_TOKENS + 1, 70):
        torch.testing.assert_close(linear(x[:count], weight, bias), expected[:count])
    torch.testing.assert_close(linear(x, weight[:10]), expected[:, :10] - bias[:10])


def test_a_few_tokens_go_through_the_kernel(native_kernels, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(linear_native, "MAX_TOKENS", 32)
    monkeypatch.setattr(linear_native, "skinny_gemm", lambda *args: calls.append(len(args[0])))
    for tokens in (1, 2, 32, 33):
        linear(random(tokens, 8), random(4, 8))
    assert calls == [1, 2, 32]


@pytest.mark.parametrize("size", [1, 15, 64, 2047, 5000])
def test_the_likeliest_token(native_kernels, size: int) -> None:
    logits = random(8, size)
    logits[1] = logits[1].round()  # equal maxima: the first counts
    logits[2, size // 2] = torch.nan
    logits[3] = -torch.inf
    logits[4, :-1] = -torch.inf
    logits[5, 0] = torch.inf
    logits[6, -1] = torch.nan
    logits[7] = -0.0
    found, expected = sample_cpu.argmax_rows(logits), sample_reference.argmax_rows(logits)
    assert found.tokens.equal(expected.tokens) and found.failed.equal(expected.failed)


def test_cache_write(native_kernels) -> None:
    heads, slots = random(5, 6, 24), torch.tensor([3, 17, 4, 30, 0])
    key, value = heads[:, 2:4], heads[:, 4:]
    found = [torch.full((4, 8, 2, 24), 7.0) for _ in range(2)]
    expected = [cache.clone() for cache in found]
    attention.write_cache(key, value, *found, slots)
    cache_reference.write_cache(key, value, *expected, slots)
    assert found[0].equal(expected[0]) and found[1].equal(expected[1])


@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (5, 0.0), (70, 2.0), (0, 1.5)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 24), (8, 1, 100), (5, 1, 6)])
def test_decode_attention(native_kernels, heads: int, kv_heads: int, dim: int, window: int, cap: float) -> None:
    page_size, lengths = 16, torch.tensor([1, 16, 63, 64, 65, 100, 129])
    keys, values = (torch.full((80, page_size, kv_heads, dim), torch.nan) for _ in range(2))
    table = torch.zeros(len(lengths), 12, dtype=torch.int64)[:, :9]
    order = (torch.randperm(79, generator=torch.Generator().manual_seed(1)) + 1).tolist()
    query = random(len(lengths), heads + 2, dim)[:, :heads]
    expected = torch.empty(len(lengths), heads, dim)
    for row, length in enumerate(lengths.tolist()):
        pages = [order.pop() for _ in range(-(-length // page_size))]
        table[row, : len(pages)] = torch.tensor(pages)
        key, value = random(length, kv_heads, dim, seed=row), random(length, kv_heads, dim, seed=row + 50)
        for place in range(length):
            keys[pages[place // page_size], place % page_size] = key[place]
            values[pages[place // page_size], place % page_size] = value[place]
        if window:
            key, value = key[-window:], value[-window:]
        key, value = (t.repeat_interleave(heads // kv_heads, 1) for t in (key, value))
        scores = torch.einsum("hd,khd->hk", query[row], key) * 0.3
        if cap:
            scores = cap * torch.tanh(scores / cap)
        expected[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), value)
    found = attention.attend_in_place(query, keys, values, table, lengths, None, 0.3, cap, window)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    alone = attention.attend_in_place(query[4:5], keys, values, table[4:5], lengths[4:5], None, 0.3, cap, window)
    assert alone[0].equal(found[4]), "a row's result is its own"


@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (5, 0.0), (70, 2.0)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 24), (40, 1, 6), (4, 4, 6), (2, 1, 15), (3, 3, 23), (4, 2, 37)]
)
def test_a_token_of_a_chunk_gets_the_bits_that_it_gets_alone(
    native_kernels, heads: int, kv_heads: int, dim: int, window: int, cap: float
) -> None:
    """Chunks of one, some and many tokens in one batch; pages hold NaN wherever no token looks."""
    page_size, lengths, counts = 16, [1, 40, 150, 77], [1, 40, 67, 2]
    keys, values = (torch.full((40, page_size, kv_heads, dim), torch.nan) for _ in range(2))
    pages = torch.randperm(39, generator=torch.Generator().manual_seed(1)) + 1
    table = pages[:36].view(4, 9)[:, torch.arange(10).clamp(max=8)]
    for row, length in enumerate(lengths):
        seen_from = max(0, length - counts[row] + 1 - window) if window else 0
        for place in range(seen_from, length):
            slot = table[row, place // page_size], place % page_size
            keys[slot], values[slot] = random(kv_heads, dim, seed=place), random(kv_heads, dim, seed=place + 999)
    query = random(sum(counts), heads, dim)
    seen = torch.cat([torch.arange(n - count + 1, n + 1) for n, count in zip(lengths, counts, strict=True)])
    tiles = attention.cut_tiles(np.array(counts, np.int32))
    assert [tile for tile in tiles.tolist() if tile[0] == 2] == [[2, 41, 32], [2, 73, 32], [2, 105, 3]]
    found = attention.attend_in_place(query, keys, values, table, seen, tiles, 0.3, cap, window)
    assert found.isfinite().all()
    row_of = np.repeat(np.arange(4), counts)
    alone = attention.attend_in_place(query, keys, values, table[row_of], seen, None, 0.3, cap, window)
    assert alone.equal(found)


def test_only_real_float32_on_the_cpu_is_served(native_kernels) -> None:
    assert native.serves(torch.zeros(1))
    assert not native.serves(torch.zeros(1, dtype=torch.float64))
    assert not native.serves(torch.zeros(1, device="meta"))
    assert not attention.serves_pages(torch.ones(1, dtype=torch.int64), torch.float64, build=True)
    weight = torch.randn(8, dtype=torch.float64)
    x = torch.randn(3, 8, dtype=torch.float64)
    assert elementwise.rms_norm(x, weight, 1e-6).equal(norm_reference.rms_norm(x, weight, 1e-6))


COMPILER = """#!/bin/sh
for target; do :; done
case " $* " in *" -shared "*) cp "$COMPILED" "$target" ;; *) touch "$target" ;; esac
"""


def test_a_spoilt_file_in_the_cache_is_compiled_anew(native_kernels, tmp_path) -> None:
    """In another process: kernels cannot be unloaded. Its compiler gives what was compiled for this process."""
    compiled = native._target()
    assert compiled is not None
    for name in ("gcc", "cc"):
        (tmp_path / name).write_text(COMPILER)
        (tmp_path / name).chmod(0o755)
    program = (
        "from slipstream.ops.platform import native;"
        "target = native._target(); target.parent.mkdir(parents=True);"
        "target.write_bytes(b'cut short'); assert native.library() is None and not target.exists();"
        "assert native.build() and native.library() is not None and target.exists()"
    )
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    run_elsewhere(program, XDG_CACHE_HOME=str(tmp_path / "cache"), PATH=path, COMPILED=str(compiled))


def test_without_a_compiler_or_when_turned_off_the_references_serve(tmp_path) -> None:
    program = (
        "import torch; from slipstream.ops import attention, elementwise; from slipstream.ops.platform import native;"
        "native.build_in_background(); assert not native.build() and not native.serves(torch.zeros(1));"
        "assert not attention.serves_pages(torch.ones(1, dtype=torch.int64), torch.float32, build=True);"
        "assert elementwise.rms_norm(torch.ones(2, 4), torch.ones(4), 0.0).eq(1).all()"
    )
    run_elsewhere(program, XDG_CACHE_HOME=str(tmp_path), PATH="")
    run_elsewhere(program, XDG_CACHE_HOME=str(tmp_path), SLIPSTREAM_NATIVE="0")


def run_elsewhere(program: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=child_env(**environment),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr


def test_every_kernel_of_the_list_is_there(native_kernels) -> None:
    library = native.library()
    assert isinstance(library, ctypes.CDLL)
    assert all(getattr(library, name).argtypes == arguments for name, arguments in native.SIGNATURES.items())
