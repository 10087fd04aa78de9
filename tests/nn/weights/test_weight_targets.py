"""A format names the tensors that it needs, and a model may mix formats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from hand_batch import HandRunner
from hand_load import load
from slipstream.base.errors import BadCheckpoint
from slipstream.checkpoint.model_info import read_model_info
from slipstream.nn.decoder import Decoder
from slipstream.nn.registry import find_rules, find_shape
from slipstream.nn.weights.load import fill_targets, find_targets, match_targets
from slipstream.nn.weights.source import open_folder
from slipstream.nn.weights.weight_format import (
    CheckpointTensor,
    Unquantized,
    Weight,
    WeightFormat,
    WeightTarget,
    new_parameter,
)
from slipstream.ops.gemm.description import AddTo
from slipstream.ops.gemm.table import Matrix, add_product, choose_chain
from tiny import write_tiny, write_weights


@dataclass(frozen=True)
class RowInt8:
    """8-bit numbers with a scale and a zero for each row, as three tensors under names of their own."""

    dtype: torch.dtype
    batch_invariant: bool = False

    def new_weight(self, num_rows: int, num_columns: int) -> Weight:
        return RowInt8Weight(num_rows, num_columns, self.dtype)


class RowInt8Weight(Weight):
    def __init__(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.numbers = new_parameter(num_rows, num_columns, dtype=torch.int8)
        self.scales = new_parameter(num_rows, dtype=dtype)
        self.zeros = new_parameter(num_rows, dtype=dtype)

    def targets(self, first_row: int, num_rows: int) -> Iterator[tuple[str, WeightTarget]]:
        rows = slice(first_row, first_row + num_rows)
        yield "qweight", WeightTarget((num_rows, self.numbers.shape[1]), partial(self._fill, self.numbers, rows))
        yield "scales", WeightTarget((num_rows,), partial(self._fill, self.scales, rows))
        yield "zeros", WeightTarget((num_rows,), partial(self._fill, self.zeros, rows))

    def _fill(self, target: torch.Tensor, rows: slice, piece: CheckpointTensor) -> None:
        target[rows].copy_(piece.read())

    @property
    def matrix(self) -> Matrix:
        return RowInt8Matrix(self.numbers, self.scales, self.zeros)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return RowInt8Matrix(self.numbers, self.scales, self.zeros).lookup(ids)


class RowInt8Matrix(NamedTuple):
    """Has only what a kind of weight without kernels of its own needs."""

    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.lookup(slice(None)).T

    def lookup(self, ids: torch.Tensor | slice) -> torch.Tensor:
        return (self.numbers[ids].to(self.scales.dtype) - self.zeros[ids, None]) * self.scales[ids, None]

    def run(self) -> None:
        return None


def is_packed(name: str) -> bool:
    """By our name or the checkpoint's: feed-forwards, and v of attention's merged weight is not."""
    return ".mlp." in name


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint with packed feed-forwards, and the same numbers as plain ones."""
    packed, plain = write_tiny(tmp_path / "packed", dtype=torch.float64), tmp_path / "plain"
    write_tiny(plain, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    weights, dense = {}, {}
    for name, tensor in load_file(packed / "model.safetensors").items():
        weights[name] = dense[name] = tensor
        if is_packed(name):
            del weights[name]
            numbers = torch.randint(-128, 128, tensor.shape, dtype=torch.int8, generator=generator)
            scales = torch.rand(len(tensor), dtype=torch.float64, generator=generator) * 0.004
            zeros = torch.randint(-9, 9, (len(tensor),), generator=generator).double()
            stem = name.removesuffix("weight")
            weights |= {f"{stem}qweight": numbers, f"{stem}scales": scales, f"{stem}zeros": zeros}
            dense[name] = (numbers.double() - zeros[:, None]) * scales[:, None]
    write_weights(packed, weights)
    write_weights(plain, dense)
    return packed, plain


def load_mixed(folder: Path) -> Decoder:
    def format_of(name: str) -> WeightFormat:
        return RowInt8(torch.float64) if is_packed(name) else Unquantized(torch.float64)

    info = read_model_info(folder)
    shape = find_shape(info)
    model = Decoder(shape, 256, torch.float64, format_of)  # type: ignore[arg-type]
    model.materialize(torch.device("cpu"))
    targets = find_targets(model)
    tensors, unused = match_targets(open_folder(folder), find_rules(info, shape), targets)
    assert not unused
    fill_targets(tensors, targets)
    return model


def test_a_format_with_three_tensors_beside_a_plain_one(folders: tuple[Path, Path]) -> None:
    packed, plain = folders
    model = load_mixed(packed)
    assert type(model.layers[0].mlp.gate_up.weight) is RowInt8Weight
    assert {name for name in find_targets(model) if "layers.1.mlp" in name} == {
        f"layers.1.mlp.{part}.{kind}"
        for part in ("gate_up.gate", "gate_up.up", "down") for kind in ("qweight", "scales", "zeros")
    } | {"layers.1.mlp_norm.weight"}  # fmt: skip
    runners = [HandRunner(each, torch.float64) for each in (model, load(plain, torch.float64))]
    for chunks in ({"a": [5, 9, 33, 2]}, {"a": [7], "b": [1, 2, 3]}, {"b": [4], "a": [6]}):
        found, expected = (runner.run(chunks) for runner in runners)
        for name in chunks:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-9)


def test_a_tensor_of_the_format_that_is_missing_is_named(folders: tuple[Path, Path]) -> None:
    folder, _ = folders
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.scales"]
    write_weights(folder, weights)
    with pytest.raises(BadCheckpoint, match=r"1 missing \(layers.1.mlp.gate_up.up.scales\)"):
        load_mixed(folder)


def test_chains_are_for_weights_that_offer_them(folders: tuple[Path, Path]) -> None:
    """A new format with products alone gives the right numbers in all forms, and says that they are not fast."""
    model = load_mixed(folders[0])
    down = model.layers[0].mlp.down
    assert not down.can_chain and choose_chain(torch.ones(100, 96), [down.weight.matrix]) == ""
    x, residual = torch.randn(3, 96, dtype=torch.float64), torch.randn(3, 64, dtype=torch.float64)
    total = residual + down(x)
    norm = torch.rand(64, dtype=torch.float64)
    sums = add_product(down.gemm(x, None, add=AddTo(residual, norm, 1e-5, "library")))
    torch.testing.assert_close(sums.total, total)
    gate_up = model.layers[0].mlp.gate_up
    normed = total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm
    torch.testing.assert_close(gate_up(sums, None, torch.tanh), gate_up(normed).tanh())
