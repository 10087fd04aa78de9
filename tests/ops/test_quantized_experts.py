"""Expert MLPs with quantised weights, against the MLPs of their dequantised weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from slipstream.ops.gemm.moe import ExpertBiases, RouterRule, Routing, host, reference
from slipstream.ops.gemm.quantized import QuantizedExperts, QuantizedMatrix, dequantize, pack_4_bit
from slipstream.ops.gemm.quantized import matrix as quantized

pytest.importorskip("triton", reason="triton is not installed")

# the interpreter's own use of numpy
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.filterwarnings("ignore:overflow")]

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
KINDS = ("fp8 block", "fp8 row", "int8", "int4 zeros", "int4 minima", "mxfp4")


def make_matrix(kind: str, rows: int, columns: int, device: torch.device) -> QuantizedMatrix:
    group = columns if kind == "fp8 row" else 32
    scale = torch.rand(rows, columns // group) * 0.02 + 0.01
    zeros = minima = codebook = None
    if kind.startswith("fp8"):
        values = (torch.randn(rows, columns) * 20).to(torch.float8_e4m3fn)
    elif kind == "int8":
        values = torch.randint(-20, 21, (rows, columns), dtype=torch.int8)
    else:
        values = pack_4_bit(torch.randint(0, 16, (rows, columns), dtype=torch.uint8))
    if kind == "int4 zeros":
        zeros = torch.randint(0, 16, scale.shape).float()
    elif kind == "int4 minima":
        scale, minima = scale.half(), -scale.half() * 7
    elif kind == "mxfp4":
        scale, codebook = 2 ** torch.randint(-6, -3, scale.shape).float(), torch.cat([E2M1, -E2M1])
    tables = [None if t is None else t.to(device) for t in (values, scale, zeros, minima, codebook)]
    return QuantizedMatrix(tables[0], tables[1], tables[2], 0, *tables[3:], kind == "mxfp4")


def make(kind: str, tokens: int, device: torch.device, hidden: int = 96, inner: int = 64, experts: int = 3):
    torch.manual_seed(tokens)
    x = torch.randn(tokens, hidden + 4, device=device)[:, :hidden]
    routing = reference.route(torch.randn(tokens, experts, device=device), RouterRule(min(2, experts)))
    stacks = [
        QuantizedExperts(make_matrix(kind, experts * rows, columns, device), experts)
        for rows, columns in ((2 * inner, hidden), (hidden, inner))
    ]
    return x, routing, *stacks


def as_float(stack: QuantizedExperts, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return dequantize(stack.matrix, dtype).unflatten(0, (stack.num_experts, -1))


def expect(
    x: torch.Tensor, routing: Routing, gate_up: QuantizedExperts, down: QuantizedExperts, **rest
) -> torch.Tensor:
    wide = Routing(routing.ids, routing.weights.double())
    return reference.expert_mlp(x.double(), wide, as_float(gate_up), as_float(down), **rest)


def check(found: torch.Tensor, expected: torch.Tensor, bound: float = 1e-5) -> None:
    assert found.isfinite().all()
    assert (found.double() - expected).norm() < bound * expected.norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 7])
def test_kernel_of_few_tokens(kind: str, tokens: int, kernel_device: torch.device) -> None:
    from slipstream.ops.gemm.moe import triton

    given = make(kind, tokens, kernel_device)
    check(triton.expert_mlp(*given), expect(*given))


@pytest.mark.parametrize("kind", ["fp8 block", "mxfp4"])
def test_kernel_of_many_tokens(kind: str, kernel_device: torch.device) -> None:
    from slipstream.ops.gemm.moe import triton

    given = make(kind, 130, kernel_device, experts=2)  # tiles of 128 pairs
    check(triton.expert_mlp(*given), expect(*given))


@pytest.mark.parametrize("version", ["reference", "host"])
def test_references_dequantise(version: str) -> None:
    given = make("int4 zeros", 6, torch.device("cpu"))
    module = reference if version == "reference" else host
    check(module.expert_mlp(*given), expect(*given))


def test_any_codebook(kernel_device: torch.device) -> None:
    """As NF4 has one: the same numbers as a table, in another order."""
    from slipstream.ops.gemm.moe import triton

    x, routing, *stacks = make("mxfp4", 3, kernel_device)
    codebook = stacks[0].matrix.codebook.flip(0).contiguous()
    stacks = [stack._replace(matrix=stack.matrix._replace(codebook=codebook, is_fp4=False)) for stack in stacks]
    check(triton.expert_mlp(x, routing, *stacks), expect(x, routing, *stacks))


def test_clamped_gates_and_biases(kernel_device: torch.device) -> None:
    """As gpt-oss has them."""
    from slipstream.ops.gemm.moe import triton

    x, routing, gate_up, down = make("mxfp4", 5, kernel_device)
    biases = ExpertBiases(torch.randn(3, 128, device=kernel_device), torch.randn(3, 96, device=kernel_device))
    wide = ExpertBiases(biases.gate_up.double(), biases.down.double())
    expected = expect(x * 9, routing, gate_up, down, biases=wide, gate="clamped_swiglu")
    check(triton.expert_mlp(x * 9, routing, gate_up, down, biases=biases, gate="clamped_swiglu"), expected)


def test_experts_without_gates_and_padding(kernel_device: torch.device) -> None:
    from slipstream.ops.gemm.moe import triton

    x, (ids, weights, _), gate_up, down = make("int8", 4, kernel_device)
    half = QuantizedExperts(gate_up.matrix.rows(0, 3 * 64), 3)
    ids[2], weights[2] = 3, 0.0
    routing = Routing(ids, weights, has_padding=True)
    found = triton.expert_mlp(x, routing, half, down, gate="relu2")
    assert not found[2].any()
    check(found, expect(x, routing, half, down, gate="relu2"))


@pytest.mark.parametrize("kind", ["fp8 block", "fp8 row"])
def test_fp8_inputs(kind: str, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both GEMMs quantise their inputs. One expert and weight 1, so that the definition is two GEMMs."""
    from slipstream.ops.gemm.moe import quantized_gemm, triton

    # the interpreter loses the carry where a mantissa is rounded up to the next power of two
    monkeypatch.setattr(quantized_gemm, "quantize_rows", quantized.quantize_rows)
    x, _, gate_up, down = make(kind, 3, kernel_device, experts=1)
    ids, weights = (torch.full((3, 1), value, device=kernel_device) for value in (0, 1.0))
    routing = Routing(ids.int(), weights)
    into, out = (stack._replace(matrix=stack.matrix._replace(quantizes_inputs=True)) for stack in (gate_up, down))
    inner = quantized.scaled_linear(x, gate_up.matrix)
    inner = F.silu(inner[:, :64]) * inner[:, 64:]
    expected = quantized.scaled_linear(inner, down.matrix).double()
    found = triton.expert_mlp(x, routing, into, out)
    # another order of sums may round an input to the next FP8 number
    check(found, expected, 2e-3)
    exact = triton.expert_mlp(x, routing, into, out, batch_invariant=True)  # does not quantise inputs
    check(exact, expect(x, routing, gate_up, down))


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_captured_kernels_in_bfloat16(kind: str, tokens: int, kernel_device: torch.device) -> None:
    from slipstream.ops.gemm.moe import triton

    x, routing, gate_up, down = make(kind, tokens, kernel_device, hidden=704, inner=512)
    x = x.bfloat16().contiguous()
    found = triton.expert_mlp(x, routing, gate_up, down)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = triton.expert_mlp(x, routing, gate_up, down)
    found.zero_()
    graph.replay()
    check(found, expect(x, routing, gate_up, down), 1e-2)
