"""Which kernel runs a GEMM, over a grid of devices, dtypes, activations and sizes; no GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from slipstream.ops.elementwise import gelu_and_mul, gelu_tanh_and_mul, relu2, silu_and_mul
from slipstream.ops.gemm import table
from slipstream.ops.gemm.description import AddTo, Gemm, GemmKernel, NormBefore
from slipstream.ops.gemm.linear import cublaslt, dispatch, linear, tiles
from slipstream.ops.gemm.linear.dispatch import chains_of
from slipstream.ops.gemm.table import TABLE, choose_chain, multiply, multiply_normed

ROWS = (0, 1, 2, 3, 16, 17, 32, 33, 64, 65, 80, 81, 96, 97, 256, 257, 1023, 1024, 4096)
ACTIVATIONS = {"none": None, "silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul, "gelu_erf": gelu_and_mul}

# sizes of a weight [out, in]
SMALL = (4096, 1024)  # up to 8 Mi elements
LARGE = (16384, 1024)
WIDE = (24576, 4096)  # 128 programs of 192 outputs for 132 multiprocessors
NARROW = (6144, 4096)  # 96 programs of 64 outputs
SHORT_HEAD = (151_936, 1024)  # the LM head of a small model
LONG_HEAD = (151_936, 4096)
UNALIGNED = (1024, 1020)  # rows of 2040 bytes: no TMA
ODD_OUTPUTS = (1000, 1024)  # outputs of 2000 bytes per row: no TMA store

# GPU, dtype, weight, activation, bias: the kernels by the first row count that each of them takes
CHOICES = """
hopper bfloat16 SMALL       none      -    | 0 library, 1 gemv, 3 streaming_hopper, 65 library, 1024 cublaslt_tuned
hopper bfloat16 SMALL       none      bias | 0 library, 1 gemv, 3 streaming_hopper, 65 library
hopper bfloat16 SMALL       silu      -    | 0 library, 1 gemv, 3 streaming_hopper, 65 library, 1024 gated_gemm_hopper
hopper bfloat16 SMALL       gelu_tanh -    | 0 library, 1 gemv, 3 streaming_hopper, 65 library, 1024 gated_gemm_hopper
hopper bfloat16 SMALL       silu      bias | 0 library, 1 gemv, 3 streaming_hopper, 65 library
hopper bfloat16 SMALL       gelu_erf  -    | 0 activation apart
hopper bfloat16 SMALL       gelu_erf  bias | 0 activation apart
hopper bfloat16 LARGE       none      -    | 0 library, 1 gemv, 3 streaming_hopper, 33 library, 1024 cublaslt_tuned
hopper bfloat16 LARGE       silu      -    | 0 library, 1 gemv, 3 streaming_hopper, 33 library, 1024 gated_gemm_hopper
hopper bfloat16 WIDE        none      -    | 0 library, 1 gemv, 2 streaming_hopper, 97 library, 1024 cublaslt_tuned
hopper bfloat16 WIDE        silu      -    | 0 library, 1 gemv, 2 streaming_hopper, 256 library, 1024 gated_gemm_hopper
hopper bfloat16 NARROW      none      -    | 0 library, 1 gemv, 2 streaming_hopper, 81 library, 1024 cublaslt_tuned
hopper bfloat16 NARROW      silu      -    | 0 library, 1 gemv, 2 streaming_hopper, 33 library, 1024 gated_gemm_hopper
hopper bfloat16 SHORT_HEAD  none      -    | 0 library, 1 gemv, 3 library, 1024 cublaslt_tuned
hopper bfloat16 SHORT_HEAD  silu      -    | 0 library, 1 gemv, 3 library, 1024 gated_gemm_hopper
hopper bfloat16 LONG_HEAD   none      -    | 0 library, 1 gemv, 2 streaming_hopper, 97 library, 1024 cublaslt_tuned
hopper bfloat16 UNALIGNED   none      -    | 0 library, 1 gemv, 3 skinny_mma, 17 library, 1024 cublaslt_tuned
hopper bfloat16 UNALIGNED   silu      -    | 0 library, 1 gemv, 3 skinny_mma, 17 library, 1024 cublaslt_tuned
hopper bfloat16 ODD_OUTPUTS silu      -    | 0 library, 1 gemv, 3 streaming_hopper, 65 library, 1024 cublaslt_tuned
hopper float16  SMALL       none      -    | 0 library, 1 gemv, 3 streaming_hopper, 65 library, 1024 cublaslt_tuned
hopper float16  SMALL       silu      -    | 0 library, 1 gemv, 3 streaming_hopper, 65 library, 1024 cublaslt_tuned
hopper float32  SMALL       none      -    | 0 library, 1024 cublaslt_tuned
hopper float32  SMALL       silu      -    | 0 library, 1024 cublaslt_tuned
other  bfloat16 SMALL       none      -    | 0 library, 1 gemv, 3 skinny_mma, 17 library, 1024 cublaslt_tuned
other  bfloat16 SMALL       none      bias | 0 library, 1 gemv, 3 skinny_mma, 17 library
other  bfloat16 SMALL       silu      -    | 0 library, 1 gemv, 3 skinny_mma, 17 library, 1024 cublaslt_tuned
other  bfloat16 SMALL       gelu_erf  -    | 0 activation apart
other  bfloat16 LARGE       none      -    | 0 library, 1 gemv, 3 library, 1024 cublaslt_tuned
other  bfloat16 SHORT_HEAD  none      -    | 0 library, 1 gemv, 3 library, 1024 cublaslt_tuned
other  float32  SMALL       none      -    | 0 library, 1024 cublaslt_tuned
"""


class Operand:
    """The metadata of a CUDA tensor."""

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, address: int = 0) -> None:
        self.shape, self.dtype, self.address = shape, dtype, address
        self.device = torch.device("cuda")
        self.is_cuda = True

    def __len__(self) -> int:
        return self.shape[0]

    def stride(self, dim: int) -> int:
        return (self.shape[1], 1)[dim]

    def element_size(self) -> int:
        return self.dtype.itemsize

    def data_ptr(self) -> int:
        return self.address


def make_call(
    rows: int, weight: tuple[int, int], dtype: torch.dtype, activation: Any, bias: bool, address: int = 0
) -> Gemm:
    operands: Any = (
        Operand((rows, weight[1]), dtype, address),
        Operand(weight, dtype),
        Operand((weight[0], 1), dtype) if bias else None,
    )
    return Gemm(*operands, activation)


def choose(gemm: Gemm, form: Any = "product") -> GemmKernel:
    return next(kernel for kernel in TABLE["CUDA"][form] if kernel.accepts(gemm))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the GPU. Triton is installed, and every GEMM of enough rows is tuned."""

    def set_gpu(name: str) -> None:
        monkeypatch.setattr(tiles, "has_hopper_kernels", lambda device: name == "hopper")

    monkeypatch.setattr(dispatch, "HAS_TRITON", True)
    monkeypatch.setattr(cublaslt, "is_tuned", lambda x, weight: len(x) >= cublaslt.MIN_ROWS)
    return set_gpu


def first_rows(choose_name: Any) -> str:
    """'0 library, 1 gemv, ...' over ROWS."""
    found: list[tuple[int, str]] = []
    for rows in ROWS:
        name = choose_name(rows)
        if not found or found[-1][1] != name:
            found.append((rows, name))
    return ", ".join(f"{rows} {name}" for rows, name in found)


@pytest.mark.parametrize("line", CHOICES.strip().splitlines())
def test_the_first_kernel_that_accepts_runs(line: str, gpu: Any) -> None:
    case, _, expected = line.partition(" | ")
    name, dtype, weight, activation, bias = case.split()
    gpu(name)

    def choose_name(rows: int) -> str:
        what = globals()[weight], getattr(torch, dtype), ACTIVATIONS[activation], bias == "bias"
        return choose(make_call(rows, *what)).name

    assert first_rows(choose_name) == expected


def test_a_shape_without_a_tuned_algorithm_and_a_machine_without_triton_use_the_library(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu("hopper")
    monkeypatch.setattr(cublaslt, "is_tuned", lambda x, weight: False)
    assert choose(make_call(4096, SMALL, torch.bfloat16, None, False)).name == "library"
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    for rows in ROWS:
        assert choose(make_call(rows, SMALL, torch.bfloat16, silu_and_mul, False)).name == "library"
        call = make_call(rows, SMALL, torch.bfloat16, F.gelu, True)
        assert choose(call).name == "activation apart" and not takes_norm(call)


def test_an_unaligned_address_excludes_tma(gpu: Any) -> None:
    gpu("hopper")
    for rows, name in ((3, "skinny_mma"), (17, "library"), (1024, "cublaslt_tuned")):
        assert choose(make_call(rows, SMALL, torch.bfloat16, silu_and_mul, False, address=8)).name == name


@pytest.mark.parametrize(
    ("name", "weight", "dtype", "activation", "bias", "first"),
    [
        ("hopper", SMALL, torch.bfloat16, F.gelu, True, 1024),
        ("hopper", SMALL, torch.float16, F.gelu, True, 1024),
        ("hopper", SMALL, torch.bfloat16, F.gelu, False, None),
        ("hopper", SMALL, torch.bfloat16, F.relu, True, None),
        ("hopper", SMALL, torch.float32, F.gelu, True, None),
        ("hopper", ODD_OUTPUTS, torch.bfloat16, F.gelu, True, None),
        ("hopper", UNALIGNED, torch.bfloat16, F.gelu, True, None),
        ("other", SMALL, torch.bfloat16, F.gelu, True, None),
    ],
)
def test_gelu_is_fused_into_gemms_of_many_rows(name, weight, dtype, activation, bias, first, gpu: Any) -> None:
    pytest.importorskip("slipstream.ops.gemm.linear.gated_gemm_hopper", reason="no Triton with Gluon")
    gpu(name)
    calls = {rows: make_call(rows, weight, dtype, activation, bias) for rows in ROWS}
    accepted = [rows for rows, call in calls.items() if choose(call).name == "elementwise_hopper"]
    assert accepted == [rows for rows in ROWS if first is not None and rows >= first]


def test_relu2_is_fused_into_gemms_of_many_rows(gpu: Any) -> None:
    pytest.importorskip("slipstream.ops.gemm.linear.gated_gemm_hopper", reason="no Triton with Gluon")

    def chosen(weight: tuple[int, int], dtype: torch.dtype, bias: bool) -> list[int]:
        calls = {rows: make_call(rows, weight, dtype, relu2, bias) for rows in ROWS}
        return [rows for rows, call in calls.items() if choose(call).name == "elementwise_hopper"]

    gpu("hopper")
    assert chosen(SMALL, torch.bfloat16, False) == [rows for rows in ROWS if rows >= 1024]
    assert not chosen(SMALL, torch.bfloat16, True) and not chosen(SMALL, torch.float32, False)
    assert not chosen(ODD_OUTPUTS, torch.bfloat16, False)
    gpu("other")
    assert not chosen(SMALL, torch.bfloat16, False)


@pytest.mark.parametrize(
    ("weight", "dtype", "activation", "accepted"),
    [
        (SMALL, torch.bfloat16, silu_and_mul, [1, 2]),
        ((4096, 2048), torch.float16, None, [1, 2]),
        ((4096, 2056), torch.bfloat16, None, []),
        (SMALL, torch.float32, None, []),
        (SMALL, torch.bfloat16, gelu_and_mul, []),
    ],
)
def test_gemv_computes_the_norm_of_short_rows(weight, dtype, activation, accepted, gpu: Any) -> None:
    gpu("other")
    assert [rows for rows in ROWS if takes_norm(make_call(rows, weight, dtype, activation, True))] == accepted


def takes_norm(call: Gemm, is_kept: bool = False) -> bool:
    norm = NormBefore(call.x, 1e-6, None, is_kept)
    return choose(call._replace(norm=norm), "norm").name == "gemv"


def test_gemv_stores_the_norm_of_more_rows_of_small_weights(gpu: Any) -> None:
    gpu("other")
    for num_out, last in ((256, 16), (257, 2)):
        calls = {rows: make_call(rows, (num_out, 2048), torch.bfloat16, None, False) for rows in ROWS}
        assert [rows for rows, call in calls.items() if takes_norm(call, True)] == [
            rows for rows in ROWS if 0 < rows <= last
        ]


def test_partial_sums_are_left_to_the_norm_where_that_was_measured(gpu: Any) -> None:
    def accepts(rows: int, weight: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> bool:
        call = make_call(rows, weight, dtype, None, False)
        return choose(call._replace(add=AddTo(call.x, call.x, 1e-6, "library")), "add").name == "partial sums"

    gpu("hopper")
    assert [rows for rows in ROWS if accepts(rows, (4096, 12288))] == [33, 64, 65, 80]
    assert accepts(72, (4096, 4096)) and not accepts(72, (4096, 2048))
    assert not any(accepts(72, (num_out, 4096)) for num_out in (1024, 2560, 5120, 6144, 8192))
    assert not accepts(72, (4096, 4096), torch.float16)
    gpu("other")
    assert not accepts(72, (4096, 4096))


def test_a_library_chain_of_few_rows_can_be_streamed_for_adapters(gpu: Any) -> None:
    gpu("hopper")
    assert chains_of(*make_call(64, NARROW, torch.bfloat16, None, False)[:2]) == ("library", "streaming")
    assert chains_of(*make_call(65, NARROW, torch.bfloat16, None, False)[:2]) == ("library",)


@pytest.mark.parametrize(
    ("name", "weight", "dtype", "expected"),
    [
        ("hopper", SMALL, torch.bfloat16, "0 -, 2 streaming, 257 library"),
        ("hopper", LARGE, torch.bfloat16, "0 -, 3 streaming, 65 library"),
        ("hopper", WIDE, torch.bfloat16, "0 -, 2 streaming, 64 library"),  # from 49 rows on, as the next
        ("hopper", NARROW, torch.bfloat16, "0 -, 2 streaming, 64 library"),
        ("hopper", SHORT_HEAD, torch.bfloat16, "0 -, 65 library"),
        ("hopper", UNALIGNED, torch.bfloat16, "0 -, 65 library"),
        ("hopper", SMALL, torch.float16, "0 -, 65 library"),
        ("hopper", SMALL, torch.float32, "0 -"),
        ("other", SMALL, torch.bfloat16, "0 -, 65 library"),
    ],
)
def test_chains_by_rows(name, weight, dtype, expected, gpu: Any) -> None:
    gpu(name)

    def chain(rows: int) -> str:
        return (*chains_of(*make_call(rows, weight, dtype, None, False)[:2]), "-")[0]

    assert first_rows(chain) == expected


@pytest.mark.parametrize(
    ("offers", "few", "many"),
    [
        (["streaming"], "streaming", "streaming"),
        (["library streaming"], "library", "library"),
        (["streaming", "library streaming"], "streaming", "library"),
        (["streaming", "library streaming", ""], "", ""),
    ],
)
def test_a_chain_is_what_all_weights_can_be(
    offers: list[str], few: str, many: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows of a weight that offers a library chain can be streaming, many rows of another one cannot."""
    monkeypatch.setattr(table, "_chains_of", lambda x, weight: tuple(weight.split()))
    weights: Any = offers
    assert choose_chain(torch.ones(64), weights) == few
    assert choose_chain(torch.ones(65), weights) == many
    assert choose_chain(torch.ones(64), weights, is_streaming=True) == ("streaming" if few else "")


def test_a_chain_is_not_streamed_if_a_weight_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several rows of FP8."""
    monkeypatch.setattr(table, "_chains_of", lambda x, weight: (weight,))
    chosen: Any = lambda *weights, **options: choose_chain(torch.ones(16), weights, **options)  # noqa: E731
    assert chosen("library") == "library" and chosen("streaming") == "streaming"
    assert chosen("library", is_streaming=True) == chosen("library", "streaming") == ""


def test_cpu_tensors_never_reach_a_gpu_kernel(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu("hopper")
    monkeypatch.setitem(TABLE, "CUDA", {})
    torch.manual_seed(0)
    for rows in (1, 9, 1024):
        x, weight, bias = (torch.randn(shape, dtype=torch.float64) for shape in ((rows, 64), (256, 64), (256,)))
        plain = F.linear(x, weight, bias)
        assert linear(x, weight, bias).equal(plain)
        assert multiply(Gemm(x, weight, bias, F.gelu)).equal(F.gelu(plain))
        norm = NormBefore(torch.ones(64, dtype=torch.float64), 1e-6, x)
        out, total, _ = multiply_normed(Gemm(x, weight, bias, norm=norm))
        assert total.equal(x + x) and out.shape == plain.shape
        assert choose_chain(x, [weight]) == ""
