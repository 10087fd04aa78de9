"""GEMMs with low-bit weights, against the plain GEMM of the dequantised ones."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import gguf
import pytest
import torch

from gguf_blocks import K_KINDS, quantize
from slipstream.ops.gemm import dequant
from slipstream.ops.gemm.low_bit import (
    DynamicQuant,
    Int4Pack,
    Interleaved,
    Kernel,
    find_kernel,
    is_correct,
    make_planes,
    multiply,
)
from slipstream.ops.platform import native, prebuilt

KERNELS: list[Kernel] = [DynamicQuant(), Int4Pack(), Interleaved()]
ERRORS = {"dynamic quant": 0.015, "int4 pack": 0.015, "interleaved": 1e-4}  # of the norm of a product
SHAPES = [(1, 32), (5, 64), (16, 32), (33, 1536), (63, 96), (100, 576), (129, 64)]
K_SHAPES = [(1, 256), (33, 1536), (63, 512), (130, 256)]
BY_SHAPE = [(kind, shape) for kind in dequant.KINDS for shape in (K_SHAPES if kind in K_KINDS else SHAPES)]


def raw_blocks(kind: str, num_rows: int, num_columns: int, seed: int = 0) -> torch.Tensor:
    weights = torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed))
    # means that are not 0, so that minima and offsets matter
    return torch.from_numpy(quantize((weights + 0.5).numpy(), gguf.GGMLQuantizationType[kind]))


def some_columns(kind: str, num_columns: int) -> int:
    """At least so many, in whole blocks of the kind."""
    return -(-num_columns // 256) * 256 if kind in K_KINDS else num_columns


def usable(kernel: Kernel, kind: str = "Q4_1") -> None:
    if kind not in kernel.kinds:
        pytest.skip(f"{kernel.name} cannot pack {kind}")
    if isinstance(kernel, Interleaved) and not (native.build() and kernel.suits_machine()):
        pytest.skip("our own kernel needs a C compiler")
    if not is_correct(kernel):
        pytest.skip(f"torch has no {kernel.name} product on this machine")


@pytest.mark.parametrize(("kind", "shape"), BY_SHAPE)
def test_dequantised_blocks_equal_the_librarys(kind: str, shape: tuple[int, int]) -> None:
    raw = raw_blocks(kind, *shape)
    expected = torch.from_numpy(gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind]))
    assert dequant.dequantize(raw, kind).equal(expected)


# of a block: bytes, and the places of its float16 scales
HALVES = {
    "Q4_0": (18, [0]), "Q4_1": (20, [0, 2]), "Q8_0": (34, [0]),
    "Q4_K": (144, [0, 2]), "Q5_K": (176, [0, 2]), "Q6_K": (210, [208]),
}  # fmt: skip


def random_blocks(kind: str, num_rows: int) -> torch.Tensor:
    """Three blocks per row with any bytes but for the float16 scales, which are finite."""
    size, places = HALVES[kind]
    raw = torch.randint(0, 256, (num_rows, 3, size), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    for place, scale in zip(places, (-1.5, 0.25), strict=False):
        raw[..., place : place + 2] = torch.tensor([scale], dtype=torch.float16).view(torch.uint8)
    return raw.flatten(1)


@pytest.mark.parametrize("kind", DynamicQuant.kinds)
def test_every_byte_finds_its_way_into_the_planes(kind: str) -> None:
    weight = dequant.dequantize(random_blocks(kind, 256), kind)
    x = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(2))
    found = multiply(x, make_planes(random_blocks(kind, 256), kind))
    torch.testing.assert_close(found, x @ weight.t(), rtol=1e-4, atol=1e-3 * float(weight.abs().max()))


@pytest.mark.parametrize("kind", dequant.KINDS)
def test_every_byte_is_multiplied(kind: str) -> None:
    """All values of weights, scales and minima, also those that no quantiser writes."""
    usable(Interleaved())
    weight = dequant.dequantize(random_blocks(kind, 66), kind).double()
    x = torch.randn(9, weight.shape[1], generator=torch.Generator().manual_seed(2))
    expected = x.double() @ weight.t()
    found = Interleaved().pack(kind, random_blocks(kind, 66)).multiply(x)
    assert (found - expected).norm() < 1e-4 * x.norm() * weight.norm() / 8


@pytest.mark.parametrize("kind", dequant.KINDS)
def test_a_lookup_has_the_bits_of_the_dequantised_rows(kind: str) -> None:
    usable(Interleaved(), kind)
    raw = torch.cat((raw_blocks(kind, 7, 768), random_blocks(kind, 7))) if kind in K_KINDS else raw_blocks(kind, 14, 96)
    packed = Interleaved().pack(kind, raw)
    ids = torch.tensor([13, 0, 6, 6, 3])
    found = packed.lookup(ids)
    assert found is not None and found.equal(dequant.dequantize(raw, kind)[ids])
    with pytest.raises(IndexError, match="14 rows"):
        packed.lookup(torch.tensor([14]))


@pytest.mark.parametrize(("kind", "shape"), BY_SHAPE)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_product_is_near_the_dequantised_one(kernel: Kernel, kind: str, shape: tuple[int, int]) -> None:
    usable(kernel, kind)
    raw = raw_blocks(kind, *shape)
    packed = kernel.pack(kind, raw)
    x = torch.randn(65, shape[1], generator=torch.Generator().manual_seed(3))
    expected = x @ dequant.dequantize(raw, kind).t()
    for count in (1, 2, 7, 65):
        found = packed.multiply(x[:count])
        assert found.shape == (count, shape[0])
        assert (found - expected[:count]).norm() < ERRORS[kernel.name] * expected[:count].norm()


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_rows_that_do_not_follow_one_another_are_read_right(kernel: Kernel) -> None:
    usable(kernel)
    raw = raw_blocks("Q4_1", 40, 64)
    packed = kernel.pack("Q4_1", raw)
    x = torch.randn(6, 200, generator=torch.Generator().manual_seed(4))[:, 70:134]
    torch.testing.assert_close(packed.multiply(x), packed.multiply(x.contiguous()), rtol=0, atol=0)


@pytest.mark.parametrize("kind", dequant.KINDS)
@pytest.mark.parametrize("kernel", [DynamicQuant(), Interleaved()], ids=lambda kernel: kernel.name)
def test_a_rows_product_does_not_depend_on_the_batch(kernel: Kernel, kind: str) -> None:
    """Activations are quantised row by row, so alone and batched differ by no more than the sums of the offsets."""
    usable(kernel, kind)
    packed = kernel.pack(kind, raw_blocks(kind, 96, columns := some_columns(kind, 576)))
    x = torch.randn(13, columns, generator=torch.Generator().manual_seed(5)) * torch.logspace(-3, 3, 13).unsqueeze(1)
    together = packed.multiply(x)
    for i in range(13):
        alone = packed.multiply(x[i : i + 1])[0]
        if isinstance(kernel, Interleaved) or kind == "Q4_0":
            assert alone.equal(together[i])
        torch.testing.assert_close(alone, together[i], rtol=1e-5, atol=float(together[i].abs().max()) * 1e-5)


@pytest.mark.parametrize("kind", dequant.KINDS)
def test_any_number_of_tokens_gives_a_row_the_same_bits(kind: str) -> None:
    """Tiles of 8 tokens and less, and more tokens than are quantised at once."""
    usable(Interleaved())
    packed = Interleaved().pack(kind, raw_blocks(kind, 10, columns := some_columns(kind, 64)))
    x = torch.randn(600, columns, generator=torch.Generator().manual_seed(6))
    together = packed.multiply(x)
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 255, 256, 257):
        assert packed.multiply(x[:count]).equal(together[:count])
        assert packed.multiply(x[-count:]).equal(together[-count:])


@pytest.mark.parametrize("kind", dequant.KINDS)
def test_an_outlier_costs_its_neighbours_little(kind: str) -> None:
    usable(Interleaved())
    raw = raw_blocks(kind, 64, columns := some_columns(kind, 96))
    x = torch.randn(4, columns, generator=torch.Generator().manual_seed(7))
    x[:, 40] = 100.0
    expected = x.double() @ dequant.dequantize(raw, kind).double().t()
    found = Interleaved().pack(kind, raw).multiply(x)
    assert (found - expected).abs().max() < 3e-4 * x.norm(dim=1).max()


def spoilt_rows(packed) -> torch.Tensor:
    x = torch.randn(9, packed.num_columns, generator=torch.Generator().manual_seed(8))
    clean = packed.multiply(x)
    for row, value in ((1, torch.nan), (4, torch.inf), (8, -torch.inf)):
        x[row, 33] = value
    x[6] = 0
    x[7] = 1e-40
    found = packed.multiply(x)
    assert found[[0, 2, 3, 5]].equal(clean[[0, 2, 3, 5]])
    return found


@pytest.mark.parametrize("kind", dequant.KINDS)
def test_what_is_not_a_number_stays_so_in_its_own_row(kind: str) -> None:
    """So that the row is flagged, and no other."""
    usable(Interleaved())
    found = spoilt_rows(Interleaved().pack(kind, raw_blocks(kind, 10, some_columns(kind, 64))))
    assert not found[[1, 4, 8]].isfinite().any() and found[6].eq(0).all() and found[7].abs().max() < 1e-30


def test_plain_c_gives_what_the_vectors_give(tmp_path: Path, monkeypatch) -> None:
    """For processors without the instructions that our vectors need.

    The integer sums of a block are equal. Blocks are added in float32 in another order, so two results differ by
    roundings of partial sums: their size is that of the summands, not of the result, which can be near zero. The bound
    is one rounding (2^-23) of the sum of magnitudes, about 5e-5 here.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    usable(Interleaved())
    assert compiler is not None
    source = Path(native.__file__).parents[1] / "gemm" / "low_bit" / "low_bit.c"
    made = tmp_path / "plain.so"
    subprocess.run(
        [compiler, *native._FLAGS, *prebuilt.INCLUDES, "-O1", "-DSLIP_PLAIN", "-shared", source, "-o", made], check=True
    )
    plain = ctypes.CDLL(str(made))
    plain.slip_low_bit.argtypes, plain.slip_low_bit.restype = native.SIGNATURES["slip_low_bit"], native.INT
    for kind in dequant.KINDS:
        x = torch.randn(11, columns := some_columns(kind, 576), generator=torch.Generator().manual_seed(9))
        raw = raw_blocks(kind, 30, columns)
        packed = Interleaved().pack(kind, raw)
        expected = packed.multiply(x)
        magnitudes = x.abs() @ dequant.dequantize(raw, kind).float().abs().t()
        small = Interleaved().pack(kind, raw_blocks(kind, 10, some_columns(kind, 64)))
        with monkeypatch.context() as patch:
            patch.setattr(native, "library", lambda: plain)
            found = packed.multiply(x)
            assert packed.multiply(x[3:4])[0].equal(found[3])
            assert not spoilt_rows(small)[[1, 4, 8]].isfinite().any()
        assert ((found - expected).abs() <= 2**-23 * magnitudes).all()


def test_tiles_give_the_bits_of_vectors(tmp_path: Path, monkeypatch) -> None:
    """AMX, emulated where the processor lacks it: one tile of 8 tokens and a rest, rows that do not fill a tile."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    usable(Interleaved())
    if "avx512_vnni" not in prebuilt.processor_features():
        pytest.skip("the kernel with tiles is compiled for processors with AVX512-VNNI")
    assert compiler is not None
    source = Path(native.__file__).parents[1] / "gemm" / "low_bit" / "low_bit.c"
    made = tmp_path / "tiles.so"
    flags = (
        *native._FLAGS,
        *prebuilt.INCLUDES,
        "-O1",
        "-DSLIP_AMX_EMULATED",
        "-shared",
    )  # the bits do not depend on -O
    subprocess.run([compiler, *flags, source, "-o", made], check=True)
    tiles = ctypes.CDLL(str(made))
    tiles.slip_low_bit.argtypes, tiles.slip_low_bit.restype = native.SIGNATURES["slip_low_bit"], native.INT
    for kind in dequant.KINDS:
        x = torch.randn(19, columns := some_columns(kind, 1600), generator=torch.Generator().manual_seed(9))
        packed = Interleaved().pack(kind, raw_blocks(kind, 30, columns))
        alone = torch.cat([packed.multiply(row) for row in x.split(1)])  # a single token is never in a tile
        assert packed.multiply(x).equal(alone)
        with monkeypatch.context() as patch:
            patch.setattr(native, "library", lambda: tiles)
            assert packed.multiply(x).equal(alone)


@pytest.mark.parametrize("kind", dequant.KINDS)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_memory_is_foreseen(kernel: Kernel, kind: str) -> None:
    usable(kernel, kind)
    if not kernel.suits_machine():
        pytest.skip(f"{kernel.name} is never chosen on this processor")
    packed = kernel.pack(kind, raw_blocks(kind, 96, columns := some_columns(kind, 576)))
    values = [getattr(packed, name) for name in packed.__slots__]
    while any(isinstance(value, tuple) for value in values):
        values = [v for value in values for v in (value if isinstance(value, tuple) else (value,))]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    assert kernel.num_bytes(kind, 96, columns) == sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("kind", K_KINDS)
def test_a_large_weight_is_packed_in_chunks(kind: str, monkeypatch) -> None:
    usable(Interleaved())
    raw = raw_blocks(kind, 21, 512)
    whole = Interleaved().pack(kind, raw)
    monkeypatch.setattr(Interleaved, "_CHUNK", 8)
    cut = Interleaved().pack(kind, raw)
    assert cut.data.equal(whole.data) and cut.scale.equal(whole.scale) and cut.num_rows == 21


def test_a_kernel_that_is_wrong_or_missing_is_not_taken() -> None:
    class Wrong(DynamicQuant):
        def pack(self, kind, raw):
            return super().pack(kind, raw.flip(0))

    class Missing(DynamicQuant):
        def pack(self, kind, raw):
            return torch.ops.aten._there_is_no_such_op(raw)

    usable(DynamicQuant())
    assert not is_correct(Wrong()) and not is_correct(Missing())


def test_without_our_kernel_a_warning_says_what_is_rounded(monkeypatch, caplog) -> None:
    monkeypatch.setattr(Interleaved, "suits_machine", lambda self: False)
    find_kernel.cache_clear()
    try:
        kernel = find_kernel()
        if kernel is None:
            pytest.skip("torch has no low-bit product on this machine")
        assert kernel.rounding in caplog.text and "dequantize=True" in caplog.text
    finally:
        find_kernel.cache_clear()


def test_where_nothing_works_there_is_one_line_in_the_log(monkeypatch, caplog) -> None:
    for kernel in (DynamicQuant, Int4Pack, Interleaved):
        monkeypatch.setattr(kernel, "suits_machine", lambda self: False)
    find_kernel.cache_clear()
    try:
        assert find_kernel() is None and find_kernel() is None
        assert [record.levelname for record in caplog.records] == ["WARNING"]
    finally:
        find_kernel.cache_clear()
