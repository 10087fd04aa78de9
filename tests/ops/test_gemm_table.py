"""Every kind of weight in every form of a description, against the definition; no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from slipstream.ops.elementwise import gelu_tanh_and_mul, silu_and_mul
from slipstream.ops.gemm.chains import Unnormalized
from slipstream.ops.gemm.description import AddTo, Form, Gemm, NormBefore, ProductAdapters
from slipstream.ops.gemm.lora import LoraTiles, LoraWeights
from slipstream.ops.gemm.lora.reference import make_tiles, tile_size
from slipstream.ops.gemm.low_bit.kernels import Int4Pack
from slipstream.ops.gemm.quantized import QuantizedMatrix, dequantize
from slipstream.ops.gemm.table import (
    TABLE,
    InvariantMatrix,
    Kind,
    Run,
    Runs,
    TransposedMatrix,
    add_product,
    can_chain,
    choose_chain,
    multiply,
    multiply_normed,
    native_rows,
    takes_gate,
)

ROWS, IN, OUT = 5, 64, 24
EPS = 1e-6


class Tripled:
    """A kind that the table does not know."""

    def __init__(self, third: torch.Tensor) -> None:
        self.third = third

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * x @ self.third.t()

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        return 3 * self.third[ids]

    def run(self) -> None:
        return None


def make(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def quantized(num_rows: int, seed: int = 0) -> QuantizedMatrix:
    values = (make(num_rows, IN, seed=seed) * 20).to(torch.int8)
    return QuantizedMatrix(values, make(num_rows, 2, seed=seed).abs().float() / 20, None)


def weight_of(kind: str) -> tuple[Any, torch.Tensor]:
    """A weight, and what it is."""
    dense = make(OUT, IN, seed=1) / 8
    if kind == "quantized":
        return quantized(OUT), dequantize(quantized(OUT), torch.float64)
    if kind == "runs":
        order = torch.randperm(IN, generator=torch.Generator().manual_seed(2))
        middle = quantized(6)
        parts = [dense[:10], dequantize(middle, torch.float64), dense[16:][:, order.argsort()]]
        runs = [Run(dense[:10], 10), Run(middle, 6), Run(dense[16:], OUT - 16, order)]
        return Runs(runs), torch.cat(parts)
    weights = {
        "CPU": dense,
        "one run": Runs([Run(dense, OUT)]),
        "transposed": TransposedMatrix(dense.t().contiguous()),
        "invariant": InvariantMatrix(dense),
        "packed": Tripled(dense / 3),
    }
    return weights[kind], dense


def adapters() -> tuple[ProductAdapters, torch.Tensor]:
    """Adapters of the tokens, and what they add to x, as a matrix for each token."""
    a, b = make(2, 4, IN, seed=3), make(2, OUT, 4, seed=4)
    slots = np.array([1, -1, 0, 0, 1], np.int32)
    order, tiles = make_tiles(slots, np.ones(ROWS, np.int32), ROWS, 2)
    lora = LoraWeights(a, b, ((0, OUT, 0),))
    deltas = torch.stack(
        [torch.zeros(OUT, IN, dtype=torch.float64) if slot < 0 else b[slot] @ a[slot] for slot in slots]
    )
    return ProductAdapters(lora, LoraTiles(torch.from_numpy(order), torch.from_numpy(tiles), tile_size(ROWS))), deltas


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


KINDS = ["CPU", "quantized", "runs", "one run", "transposed", "invariant", "packed"]
ACTIVATIONS: list[Callable[[torch.Tensor], torch.Tensor] | None] = [None, silu_and_mul, F.gelu]


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_products(kind: str, adapted: bool) -> None:
    """Of x, of a norm, of a gated activation and of a sum before its norm; with bias and activation, and without."""
    weight, dense = weight_of(kind)
    lora, deltas = adapters()
    x, bias, norm = make(ROWS, IN, seed=5), make(OUT, seed=6), make(IN, seed=7)
    gate_up = make(ROWS, 2 * IN, seed=8)

    def expect(x: torch.Tensor, bias: torch.Tensor | None, activation: Any) -> torch.Tensor:
        whole = dense + deltas if adapted else dense.expand(ROWS, -1, -1)
        out = (whole @ x.unsqueeze(2)).squeeze(2)
        out = out if bias is None else out + bias
        return out if activation is None else activation(out)

    for own, activation in product((None, bias), ACTIVATIONS):
        gemm = Gemm(x, weight, own, activation, adapters=lora if adapted else None)
        close(multiply(gemm), expect(x, own, activation))
        unfinished = gemm._replace(x=Unnormalized(x, norm, EPS))
        close(multiply(unfinished), expect(rms(x, norm), own, activation))
        normed = gemm._replace(x=Unnormalized(x, norm, EPS, normed=rms(x, norm)))
        close(multiply(normed), expect(rms(x, norm), own, activation))
        added = make(ROWS, OUT, seed=9)
        plain = expect(rms(x, norm), own, None) + added
        close(multiply(unfinished._replace(added=added)), plain if activation is None else activation(plain))
        gated = gemm._replace(x=gate_up, gate=gelu_tanh_and_mul)
        close(multiply(gated), expect(gelu_tanh_and_mul(gate_up), own, activation))
        for residual, is_kept in product((None, make(ROWS, IN, seed=10)), (False, True)):
            total = x if residual is None else x + residual
            before = NormBefore(norm, EPS, residual, is_kept)
            out, found, kept = multiply_normed(gemm._replace(norm=before))
            close(out, expect(rms(total, norm), own, activation))
            close(found, total)
            assert (kept is not None) == is_kept
            if kept is not None:
                close(kept, rms(total, norm))


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_sums(kind: str, adapted: bool) -> None:
    weight, dense = weight_of(kind)
    lora, deltas = adapters()
    x, gate_up, norm = make(ROWS, IN, seed=5), make(ROWS, 2 * IN, seed=8), make(OUT, seed=7)
    whole = dense + deltas if adapted else dense.expand(ROWS, -1, -1)
    for rows, gate in ((x, None), (gate_up, silu_and_mul)):
        residual = make(ROWS, OUT, seed=10)
        plain = rows if gate is None else gate(rows)
        expected = residual + (whole @ plain.unsqueeze(2)).squeeze(2)
        add = AddTo(residual, norm, EPS, "library")
        sums = add_product(Gemm(rows, weight, gate=gate, adapters=lora if adapted else None, add=add))
        close(sums.total, expected)
        close(sums.rows_normed(), rms(expected, norm))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_each_kind_has_each_form() -> None:
    assert set(TABLE) == set(get_args(Kind))
    for forms in TABLE.values():
        assert set(forms) == set(get_args(Form)) and all(forms.values())


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_kind_without_kernels_answers(kind: str) -> None:
    weight, _ = weight_of(kind)
    assert can_chain(weight) == (kind == "CPU")
    assert choose_chain(make(ROWS, IN), [weight]) == "" and not takes_gate(make(100, IN), silu_and_mul, weight)
    assert native_rows(weight) is None  # float64


def test_c_kernels_read_the_rows_of_runs() -> None:
    rows = torch.ones(3, 4)
    found = native_rows(Runs([Run(rows, 3), Run(InvariantMatrix(rows.bfloat16()), 3)]))
    assert found is not None and [run.data.dtype for run in found] == [torch.float32, torch.bfloat16]
    assert native_rows(Runs([Run(rows, 3), Run(rows.double(), 3)])) is None


def test_a_packed_weight_of_one_run_has_bias_and_activation() -> None:
    kernel = Int4Pack()
    if not kernel.suits_machine():
        pytest.skip("torch has no such kernel here")
    raw = torch.zeros(8, 20, dtype=torch.uint8)
    raw[:, 4:] = 0x11  # Q4_1: minimum 0, every number 1
    raw[:, :2] = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8)
    x, bias = torch.ones(2, 32), torch.arange(8.0)
    found = multiply(Gemm(x, Runs([Run(kernel.pack("Q4_1", raw), 8)]), bias, silu_and_mul))
    torch.testing.assert_close(found, silu_and_mul((32 + bias).expand(2, -1)), rtol=1e-2, atol=1e-2)
