"""GEMM of many tokens by AMX tiles, emulated where the processor lacks them."""

from __future__ import annotations

import ctypes
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch

from slipstream.ops.gemm import linear
from slipstream.ops.gemm.description import Gemm, choose
from slipstream.ops.gemm.linear import dispatch, tiles
from slipstream.ops.platform import native, prebuilt

# tokens, rows, columns: one, odd ones, whole tiles, one more than a block, several blocks of tokens and of columns
SHAPES = [(1, 1, 1), (17, 33, 40), (32, 32, 32), (63, 100, 129), (100, 65, 200), (257, 31, 64), (520, 20, 36)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels of this machine if it has tiles, else with emulated ones."""
    if not native.build():
        pytest.skip("no C compiler here, or the kernels are turned off")
    own = native.library()
    if own is not None and own.slip_has_gemm():
        return own
    if not {"avx512bw", "avx512dq"} <= prebuilt.processor_features():
        pytest.skip("the kernel with tiles is compiled for processors with AVX-512")
    made, compiler = tmp_path_factory.mktemp("tiles") / "tiles.so", native._compiler()
    assert compiler is not None
    source = Path(native.__file__).parents[1] / "gemm" / "linear" / "linear.c"
    subprocess.run(
        [compiler, *native._FLAGS, *prebuilt.INCLUDES, "-DSLIP_AMX_EMULATED", "-shared", source, "-o", made], check=True
    )
    found = ctypes.CDLL(str(made))
    for name in ("slip_has_gemm", "slip_gemm"):
        function = getattr(found, name)
        function.argtypes, function.restype = native.SIGNATURES[name], native.INT
    return found


@pytest.fixture(autouse=True)
def use(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: library)


def operands(tokens: int, rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return (
        torch.randn(tokens, columns, generator=generator) + 0.3,
        torch.randn(rows, columns, generator=generator).to(dtype),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_have_the_precision_of_float32(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """The bound is 8 roundings (2^-24) of the sum of magnitudes. One bfloat16 part less would be at least 2^-18."""
    x, weight = operands(*shape, dtype)
    found = tiles.tile_gemm(x, weight, None)
    magnitudes = x.double().abs() @ weight.double().abs().t()
    assert ((found - x.double() @ weight.double().t()).abs() <= 8 * 2**-24 * magnitudes).all()


def test_a_token_has_the_same_bits_alone_and_among_others() -> None:
    x, weight = operands(100, 40, 200, torch.float32)
    found = tiles.tile_gemm(x, weight, None)
    assert all(tiles.tile_gemm(x[i : i + 1], weight, None)[0].equal(found[i]) for i in (0, 15, 16, 99))


def test_a_token_that_is_not_finite_spoils_no_other() -> None:
    x, weight = operands(40, 33, 70, torch.float32)
    expected = tiles.tile_gemm(x, weight, None)
    x[7, 3] = float("nan")
    found = tiles.tile_gemm(x, weight, None)
    assert not found[7].isfinite().any()
    found[7] = expected[7]
    assert found.equal(expected)


def test_linear_takes_the_tiles_for_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = operands(40, 33, 70, torch.float32)
    bias = torch.arange(33.0)
    calls: list[int] = []
    multiply = tiles.tile_gemm
    monkeypatch.setattr(tiles, "tile_gemm", lambda *args: calls.append(len(args[0])) or multiply(*args))
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-4)
    close(linear.linear(x, weight, bias), x @ weight.t() + bias)
    close(linear.linear(x, weight.bfloat16()), x @ weight.bfloat16().float().t())
    assert calls == [40, 40]
    few = Gemm(x[: tiles.MIN_TOKENS - 1], weight)
    assert not tiles.accepts(few.x, weight) and choose(dispatch.CPU_KERNELS, few).name != "tiles"
    assert not tiles.accepts(x, weight.double()) and not tiles.accepts(x, weight.t().contiguous().t())
    monkeypatch.setattr(native, "library", lambda: None)
    assert not tiles.accepts(x, weight)
