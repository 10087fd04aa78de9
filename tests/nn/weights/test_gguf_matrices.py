"""GGUF weights in the form that stays low-bit on a GPU, multiplied by the reference."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch

import hand_load
from gguf_blocks import quantize
from hand_batch import HandRunner
from slipstream.checkpoint.gguf_file import GgufFile
from slipstream.checkpoint.gguf_info import gguf_model_info
from slipstream.config.config import ModelConfig
from slipstream.nn import load as loading
from slipstream.nn.load import weight_bytes
from slipstream.nn.weights.kinds import GgufQuantized, GgufWeight
from slipstream.nn.weights.source import SourceTensor
from slipstream.ops.gemm.dequant import GGUF_KINDS, gguf_bytes, gguf_matrix
from slipstream.ops.gemm.dequant import dequantize as dequantize_blocks
from slipstream.ops.gemm.description import Gemm
from slipstream.ops.gemm.quantized import QuantizedMatrix, dequantize
from slipstream.ops.gemm.table import multiply
from tiny import write_tiny
from tiny_gguf import K_SIZES, write_gguf

CPU = torch.device("cpu")


def blocks(kind: str, rows: int, columns: int = 512, seed: int = 0) -> torch.Tensor:
    """Packed random weights of the size that models have."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02
    return torch.from_numpy(quantize(values.numpy(), gguf.GGMLQuantizationType[kind])).view(torch.uint8)


def piece(kind: str, rows: int, seed: int) -> SourceTensor:
    if kind == "F32":
        values = torch.randn(rows, 512, generator=torch.Generator().manual_seed(seed)) * 0.02
        return SourceTensor("w", (rows, 512), kind, lambda: values)
    raw = blocks(kind, rows, seed=seed)
    return SourceTensor("w", (rows, 512), kind, lambda: dequantize_blocks(raw, kind), lambda: raw)


def size_of(matrix: QuantizedMatrix) -> int:
    return sum(part.nbytes for part in (matrix.values, matrix.scale, matrix.minima) if part is not None)


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_weights_are_nearer_than_in_bfloat16(kind: str) -> None:
    raw = blocks(kind, 40)
    exact = dequantize_blocks(raw, kind).double()
    matrix = gguf_matrix(raw, kind, 512, CPU)
    error, in_kernels = (
        (dequantize(matrix, dtype).double() - exact).norm() for dtype in (torch.float64, torch.bfloat16)
    )
    rounding = (exact.bfloat16().double() - exact).norm()
    if kind in ("Q4_0", "Q4_1", "Q8_0"):
        assert error == 0  # the file's own scales
    assert error < rounding / 2 and in_kernels < 1.1 * rounding
    assert size_of(matrix) == gguf_bytes(kind, 40, 512)


def test_conversion_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = blocks("Q5_K", 10)
    whole = gguf_matrix(raw, "Q5_K", 512, CPU)
    monkeypatch.setattr("slipstream.ops.gemm.dequant._PART", 3 * 512)
    parts = gguf_matrix(raw, "Q5_K", 512, CPU)
    assert dequantize(parts).equal(dequantize(whole))


def test_parts_of_different_kinds_in_one_weight() -> None:
    kinds = [("Q4_K", 5), ("Q4_K", 7), ("Q6_K", 6), ("F32", 4), ("Q8_0", 9)]
    pieces = [piece(kind, rows, seed) for seed, (kind, rows) in enumerate(kinds)]
    weight = GgufQuantized(torch.float64, CPU).new_weight(31, 512)
    assert isinstance(weight, GgufWeight)
    first, num_bytes = 0, 0
    for one in pieces:
        ((_, target),) = weight.targets(first, one.shape[0])
        num_bytes += target.num_bytes(one)
        target.fill(one)
        first += one.shape[0]
    assert len(weight.runs) == 4 and num_bytes == stored_bytes(weight)
    x, bias = torch.randn(4, 512, dtype=torch.float64), torch.arange(31.0, dtype=torch.float64)
    expected = x @ torch.cat([one.read().double() for one in pieces]).t() + bias
    torch.testing.assert_close(multiply(Gemm(x, weight.matrix, bias)), expected, rtol=1e-3, atol=1e-3)


def stored_bytes(model: torch.nn.Module) -> int:
    """Of runs, parameters and buffers."""
    total = sum(part.nbytes for part in (*model.parameters(), *model.buffers()))
    for weight in model.modules():
        for run in weight.runs if isinstance(weight, GgufWeight) else ():
            total += run.weight.nbytes if isinstance(run.weight, torch.Tensor) else size_of(run.weight)
    return total


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K"])
def test_models_give_the_logits_of_the_file(
    kind: str, tied: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = write_tiny(tmp_path, tie_word_embeddings=tied, **K_SIZES)
    path = write_gguf(folder, gguf.GGMLQuantizationType[kind], others={"attn_v": gguf.GGMLQuantizationType.Q6_K})
    expected = HandRunner(hand_load.load(path, torch.float64), torch.float64).run({"a": [3, 1, 4, 1, 5, 9]})["a"]
    monkeypatch.setattr(loading, "stays_low_bit", lambda *args: True)
    monkeypatch.setattr(loading, "find_kernel", lambda: None)
    model = hand_load.load(path, torch.float64, dequantize=False)
    weights = [weight for weight in model.modules() if isinstance(weight, GgufWeight)]
    assert max(len(weight.runs) for weight in weights) == 2  # q and k, then v
    found = HandRunner(model, torch.float64).run({"a": [3, 1, 4, 1, 5, 9]})["a"]
    assert 0 < (found - expected).norm() < 5e-3 * expected.norm()
    info = gguf_model_info(GgufFile(path))
    config = ModelConfig(info, str(path), "tiny", "gguf", "float64", False, 256, 0)
    assert weight_bytes(config, "cpu") == stored_bytes(model)


def test_what_stays_low_bit_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = write_gguf(write_tiny(tmp_path), gguf.GGMLQuantizationType.Q4_0)
    info = gguf_model_info(GgufFile(path))
    monkeypatch.setattr(loading, "supports_kernels", lambda *args: True)

    def stays(dequantize: bool | None = False, **fields: object) -> bool:
        config = ModelConfig(info, str(path), "tiny", "gguf", "bfloat16", dequantize, 256, 0, **fields)
        return loading.stays_low_bit(config, "cuda")

    assert stays()
    others: list[dict[str, object]] = [
        {"num_ranks": 2}, {"offload_bytes": 8}, {"sleep_mode": True}, {"deterministic": True},
        {"dequantize": True}, {"dequantize": None},
    ]  # fmt: skip
    assert not any(stays(**fields) for fields in others)
