"""Gemm: one product with all that is computed before and after it; and a row of the table that runs it (`table.py`).

A caller describes the whole and does not choose a kernel. A kernel accepts a description as a whole or not at all. What
no kernel accepts is split: the norm, the gate, the adapters or the activation get a kernel of their own, and the rest
is described again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from slipstream.ops.elementwise import gelu_tanh_and_mul, silu_and_mul
from slipstream.ops.gemm.chains import Chain
from slipstream.ops.gemm.lora import LoraTiles, LoraWeights

P = TypeVar("P")

Activation = Callable[[torch.Tensor], torch.Tensor]
"""Elementwise, [rows, out] to [rows, out]; or gated, [rows, gate columns then up columns] to half as many columns."""

FUSED_ACTIVATIONS: dict[Activation | None, str] = {None: "", silu_and_mul: "silu", gelu_tanh_and_mul: "gelu_tanh"}
"""What the epilogues of most kernels compute, by the name that the kernels know."""


class Gemm(NamedTuple):
    """activation(x @ weight.T + added + bias), where x may be the norm of a sum or a gated activation."""

    x: Any  # [rows, in], or with `gate` [rows, gate columns then up columns]: a tensor, `Unnormalized` or `Fp8Rows`
    weight: Any  # [out, in]: a `Matrix` of the table; for a gated activation the gate rows, then the up rows
    bias: torch.Tensor | None = None  # [out]
    activation: Activation | None = None
    gate: Activation | None = None  # gated, of x
    norm: NormBefore | None = None  # x is its input
    add: AddTo | None = None  # without bias and activation
    adapters: ProductAdapters | None = None
    added: torch.Tensor | None = None  # [rows, out], contiguous

    @property
    def form(self) -> Form:
        """The part by which the table is divided; the kernels of a form look at the others."""
        if self.adapters is not None:
            return "adapters"
        if self.norm is not None:
            return "norm"
        if self.add is not None:
            return "add"
        if self.gate is not None:
            return "gate"
        return "product" if self.added is None and isinstance(self.x, torch.Tensor) else "unfinished"


Form = Literal["adapters", "norm", "add", "gate", "unfinished", "product"]
"""unfinished: of an `Unnormalized`, of `Fp8Rows`, or with `added`."""


class NormBefore(NamedTuple):
    """x becomes the RMS norm of x + residual."""

    weight: torch.Tensor  # [in]
    eps: float
    residual: torch.Tensor | None = None  # [rows, in]
    is_kept: bool = False  # whether the result has the norm too


class Normed(NamedTuple):
    """The result of a GEMM with a norm before."""

    out: torch.Tensor  # [rows, out]
    total: torch.Tensor  # [rows, in], x + residual; without a residual x
    normed: torch.Tensor | None = None  # its norm, if it is kept


class AddTo(NamedTuple):
    """The product is added to the residual, and the sum goes to a norm. Its memory may be that of the residual."""

    residual: torch.Tensor  # [rows, out]
    norm: torch.Tensor  # [out], weights of an RMS norm
    eps: float
    chain: Chain


class ProductAdapters(NamedTuple):
    """The adapters of a product, and which tokens have one."""

    weights: LoraWeights
    tiles: LoraTiles


class GemmKernel(NamedTuple):
    """A row of the table. `launch` returns a tensor; `Normed` if there is a norm before, `Unnormalized` if it adds."""

    name: str
    accepts: Callable[[Gemm], bool]
    launch: Callable[[Gemm], Any]


def choose(kernels: Sequence[GemmKernel], gemm: Gemm) -> GemmKernel:
    """The first kernel that accepts a description."""
    for kernel in kernels:
        if kernel.accepts(gemm):
            return kernel
    raise AssertionError("the last kernel of a form accepts every description")


def given(part: P | None) -> P:
    """A part of a description that its form has."""
    assert part is not None
    return part


def activated(out: torch.Tensor, activation: Activation | None) -> torch.Tensor:
    return out if activation is None else activation(out)
