"""The GEMMs from one attention to the next in one kernel: which sizes it takes, who may use it, and its results."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from child import child_env
from slipstream.ops.elementwise import rms_norm, silu_and_mul
from slipstream.ops.gemm.quantized import QuantizedMatrix, dequantize, layer
from slipstream.ops.gemm.quantized.layer import claim_barrier, joins_gemms, multiply_layer
from slipstream.ops.gemm.quantized.matrix import LayerGemms

QWEN3_8B = (4096, 4096, 12288, 6144)  # inputs of o, hidden, feed-forward, outputs of qkv
MAX_SECONDS = 60


def make_layer(sizes: tuple[int, int, int, int], device: str) -> LayerGemms:
    inner, hidden, feed, num_next = sizes
    shapes = (hidden, inner), (2 * feed, hidden), (hidden, feed), (num_next, hidden)
    feed_norm, next_norm = (torch.randn(hidden, device=device).mul(0.1).add(1).bfloat16() for _ in range(2))
    o, gate_up, down, next_qkv = (make_weight(*shape, device) for shape in shapes)
    return LayerGemms(o, gate_up, down, next_qkv, feed_norm, 1e-6, next_norm, 1e-5)


def make_weight(rows: int, columns: int, device: str) -> QuantizedMatrix:
    scale = torch.rand(rows, 1, device=device).add(0.5) * columns**-0.5
    return QuantizedMatrix(torch.randn(rows, columns, device=device).to(torch.float8_e4m3fn), scale, None)


def test_sizes_that_keep_all_programs_busy_fit() -> None:
    def fits(inner: int, hidden: int, feed: int, num_next: int) -> bool:
        shapes = (hidden, inner), (2 * feed, hidden), (hidden, feed), (num_next, hidden)
        nothing = torch.empty(0)
        o, gate_up, down, next_qkv = (
            QuantizedMatrix(torch.empty(shape, device="meta"), nothing, None) for shape in shapes
        )
        return LayerGemms(o, gate_up, down, next_qkv if num_next else None, nothing, 0.0, nothing, 0.0).fits

    assert fits(*QWEN3_8B) and fits(8192, 4096, 16384, 6144)
    assert not fits(4096, 4096, 14336, 6144)  # half of the programs would be idle in the fourth turn of gate and up
    assert not fits(2560, 2560, 9728, 6144)  # 40 blocks of outputs
    assert not fits(4096, 4096, 12288, 6112)  # no multiple of a block
    assert not fits(3072, 4096, 12288, 6144)  # half of the inputs of o is no multiple of 1,024
    assert fits(4096, 4096, 12288, 0) and not fits(2560, 2560, 9728, 0)  # no next attention


def test_only_fp8_weights_with_a_scale_per_row_are_joined() -> None:
    gemms = make_layer((128, 64, 32, 64), "cpu")
    assert gemms.are_fp8 and gemms._replace(next_qkv=None).are_fp8
    assert not gemms._replace(o=gemms.o._replace(scale=torch.ones(64, 2))).are_fp8
    assert not gemms._replace(o=gemms.o._replace(values=gemms.o.values.t())).are_fp8
    packed = torch.zeros(64, 16, dtype=torch.uint8)
    assert not gemms._replace(down=QuantizedMatrix(packed, torch.ones(64, 1), None, 8)).are_fp8


def test_a_cpu_has_no_such_kernel() -> None:
    gemms = make_layer((128, 64, 32, 64), "cpu")
    assert not joins_gemms(torch.ones(1, 128, dtype=torch.bfloat16), gemms, silu_and_mul)
    assert claim_barrier(torch.device("cpu"), torch.nn.Identity()) is None


def test_one_model_of_a_device_has_the_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models on two streams could each hold half of the multiprocessors."""
    monkeypatch.setattr(layer, "has_programs", lambda device: True)
    monkeypatch.setattr(layer, "_barriers", {})
    device = torch.device("cpu")
    first, second = torch.nn.Identity(), torch.nn.Identity()
    counter = claim_barrier(device, first)
    assert counter is not None and claim_barrier(device, first) is counter
    assert claim_barrier(device, second) is None
    del first
    gc.collect()
    assert claim_barrier(device, second) is counter


@pytest.mark.cuda
def test_one_kernel_computes_the_gemms_between_attentions() -> None:
    """In a process of its own: programs that wait for each other forever could not be ended otherwise."""
    if not layer.has_programs(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("no kernel for this device")
    program = "import test_quantized_layer; test_quantized_layer.check_results()"
    env = child_env(str(Path(__file__).parent))
    child = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=MAX_SECONDS, check=False
    )
    assert child.returncode == 0, child.stderr


def check_results() -> None:
    torch.manual_seed(0)
    layers = [make_layer(QWEN3_8B, "cuda") for _ in range(2)]
    layers.append(layers[0]._replace(next_qkv=None))
    x = torch.randn(1, QWEN3_8B[0], device="cuda").bfloat16()
    residual = torch.randn(1, QWEN3_8B[1], device="cuda").bfloat16()
    assert all(joins_gemms(x, gemms, silu_and_mul) for gemms in layers)
    barrier = torch.full((1,), -layer.PROGRAMS, dtype=torch.int32, device="cuda")  # 0 after the first one

    def run() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [multiply_layer(x, residual, gemms, silu_and_mul, barrier) for gemms in layers]

    found = run()
    for (out, total), expected in zip(found, (compute(x, residual, gemms) for gemms in layers), strict=True):
        assert off(out, expected[0]) < 0.05, off(out, expected[0])  # inputs are rounded to FP8
        assert off(total, expected[1]) < 0.05, off(total, expected[1])
    normed, total = found[-1]  # of the last layer
    plain = rms_norm(total, layers[-1].next_norm, layers[-1].next_eps)
    assert off(normed, plain.double()) < 1e-3, off(normed, plain.double())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = run()
    for _ in range(50):
        graph.replay()
        for one, other in zip(found, again, strict=True):
            assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1]), "the result differs"
    assert barrier.item() == layer.PROGRAMS * (51 * len(layers) * 3 - 1)


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def compute(x: torch.Tensor, residual: torch.Tensor, gemms: LayerGemms) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64."""

    def norm(row: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return row * torch.rsqrt(row.square().mean() + eps) * weight.double()

    def multiply(row: torch.Tensor, weight: QuantizedMatrix) -> torch.Tensor:
        return row @ dequantize(weight, torch.float64).t()

    total = residual.double() + multiply(x.double(), gemms.o)
    gate, up = multiply(norm(total, gemms.feed_norm, gemms.feed_eps), gemms.gate_up).chunk(2, 1)
    total = total + multiply(F.silu(gate) * up, gemms.down)
    normed = norm(total, gemms.next_norm, gemms.next_eps)
    return normed if gemms.next_qkv is None else multiply(normed, gemms.next_qkv), total
