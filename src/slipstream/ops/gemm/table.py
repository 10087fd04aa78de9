"""The table of GEMMs: for each kind of weight and each form of a description, kernels in order of preference.

The first kernel that accepts a description (`description.py`) runs it. At the end of a form are the splits, which take
any kind of weight: they compute one part and describe the rest again. A new kind of weight needs a kernel of the form
"product" only; all other forms are then correct, and faster with kernels of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from slipstream.device.streams import execute_in_parallel
from slipstream.ops.elementwise import add_rms_norm, rms_norm
from slipstream.ops.gemm.chains import Chain, Unnormalized
from slipstream.ops.gemm.description import (
    FUSED_ACTIVATIONS,
    Activation,
    Form,
    Gemm,
    GemmKernel,
    Normed,
    activated,
    choose,
    given,
)
from slipstream.ops.gemm.linear import dispatch as dense
from slipstream.ops.gemm.linear.dispatch import MAX_STREAMING_ROWS
from slipstream.ops.gemm.linear.tiles import linear_transposed, skinny_gemm
from slipstream.ops.gemm.lora import expand_lora, lora_delta, shrink_lora
from slipstream.ops.gemm.lora.reference import FEW_TOKENS
from slipstream.ops.gemm.low_bit.kernels import Packed
from slipstream.ops.gemm.quantized import dispatch as quantized
from slipstream.ops.gemm.quantized.matrix import QuantizedMatrix
from slipstream.ops.platform import native
from slipstream.ops.platform.native import WeightRows, dense_rows

# Kinds of weights beside tensors [out, in] and `QuantizedMatrix`.


class TransposedMatrix(NamedTuple):
    data: torch.Tensor  # [in, out]


class InvariantMatrix(NamedTuple):
    """A float weight whose GEMM gives a row the same bits in every batch."""

    data: torch.Tensor  # [out, in]


class Run(NamedTuple):
    weight: Matrix
    num_rows: int
    order: torch.Tensor | None = None  # [in], of columns; None: that of x


class Runs(NamedTuple):
    """Adjacent rows of a weight, each run of a kind of its own."""

    runs: Sequence[Run]


Matrix: TypeAlias = torch.Tensor | QuantizedMatrix | TransposedMatrix | InvariantMatrix | Runs | Packed
"""`Packed`: any other class with these methods."""
Kind = Literal["CUDA", "CPU", "quantized", "transposed", "invariant", "runs", "packed"]


def _kind(x: Any, weight: Matrix) -> Kind:
    if isinstance(weight, torch.Tensor):
        return "CUDA" if x.is_cuda else "CPU"
    return _KINDS.get(type(weight), "packed")


_KINDS: dict[type, Kind] = {
    QuantizedMatrix: "quantized",
    TransposedMatrix: "transposed",
    InvariantMatrix: "invariant",
    Runs: "runs",
}


def multiply(gemm: Gemm) -> torch.Tensor:
    """Without `norm` and `add`."""
    return _run(gemm)  # type: ignore[no-any-return]


def multiply_normed(gemm: Gemm) -> Normed:
    return _run(gemm)  # type: ignore[no-any-return]


def add_product(gemm: Gemm) -> Unnormalized:
    return _run(gemm)  # type: ignore[no-any-return]


def _run(gemm: Gemm) -> Any:
    return choose(TABLE[_kind(gemm.x, gemm.weight)][gemm.form], gemm).launch(gemm)


# What follows takes any kind of weight.


def _activate(gemm: Gemm) -> torch.Tensor:
    return activated(multiply(gemm._replace(activation=None)), gemm.activation)


def _normalize(gemm: Gemm) -> Normed:
    x, norm = gemm.x, given(gemm.norm)
    total = x
    if norm.residual is None:
        normed = rms_norm(x, norm.weight, norm.eps)
    else:
        normed, total = add_rms_norm(x, norm.residual, norm.weight, norm.eps)
    return Normed(multiply(gemm._replace(x=normed, norm=None)), total, normed if norm.is_kept else None)


def _gate(gemm: Gemm) -> Any:
    return _run(gemm._replace(x=activated(gemm.x, gemm.gate), gate=None))


def _sum(gemm: Gemm) -> Unnormalized:
    residual, norm, eps, _ = given(gemm.add)
    return Unnormalized(residual.add_(multiply(gemm._replace(add=None))), norm, eps)


def _finish_norm(gemm: Gemm) -> torch.Tensor:
    return multiply(gemm._replace(x=gemm.x.rows_normed()))


def _sum_added(gemm: Gemm) -> torch.Tensor:
    out = multiply(gemm._replace(added=None, activation=None))
    return activated(out.add_(gemm.added), gemm.activation)


def _adapt_residual(gemm: Gemm) -> Unnormalized:
    """Before the product, whose kernel may compute the norm too; its weight is loaded meanwhile."""
    (lora, tiles), add = given(gemm.adapters), given(gemm.add)
    residual = expand_lora(add.residual, shrink_lora(gemm.x, lora, tiles), lora, tiles)
    return add_product(gemm._replace(adapters=None, add=add._replace(residual=residual)))


def _adapt_before(gemm: Gemm) -> torch.Tensor:
    """Before the product, which adds it before the activation; its weight is loaded meanwhile."""
    lora, tiles = given(gemm.adapters)
    delta = lora_delta(shrink_lora(gemm.x, lora, tiles), lora, tiles)
    return multiply(gemm._replace(adapters=None, added=delta if gemm.added is None else delta.add_(gemm.added)))


def _adapt_beside(gemm: Gemm) -> torch.Tensor:
    lora, tiles = given(gemm.adapters)
    product = partial(multiply, gemm._replace(adapters=None, activation=None))
    shrink = partial(shrink_lora, gemm.x, lora, tiles)
    # many tokens fill the device with either
    out, inner = execute_in_parallel(product, shrink) if len(gemm.x) <= FEW_TOKENS else (product(), shrink())
    return activated(expand_lora(out, inner, lora, tiles), gemm.activation)


ACTIVATION = GemmKernel("activation apart", lambda gemm: gemm.activation is not None, _activate)
UNFUSED = GemmKernel("activation apart", lambda gemm: gemm.activation not in FUSED_ACTIVATIONS, _activate)
NORM = GemmKernel("norm apart", lambda gemm: gemm.norm is not None, _normalize)
GATE = GemmKernel("gate apart", lambda gemm: gemm.gate is not None, _gate)
ADDED = GemmKernel("sum apart", lambda gemm: gemm.added is not None, _sum_added)

SPLITS: dict[Form, tuple[GemmKernel, ...]] = {
    "product": (),
    "norm": (NORM,),
    "gate": (GATE,),
    "add": (GATE, GemmKernel("sum apart", lambda gemm: True, _sum)),
    "unfinished": (
        GemmKernel("norm apart", lambda gemm: isinstance(gemm.x, Unnormalized), _finish_norm),
        ADDED,
    ),
    "adapters": (
        NORM,
        GATE,
        GemmKernel("adapters in the residual", lambda gemm: gemm.add is not None, _adapt_residual),
        GemmKernel("adapters before", lambda gemm: not isinstance(gemm.x, torch.Tensor), _adapt_before),
        GemmKernel("adapters beside", lambda gemm: True, _adapt_beside),
    ),
}


# Kinds without other forms.


def _multiply_runs(gemm: Gemm) -> torch.Tensor:
    """A product for each run, which may have inputs in an order of its own."""
    outs, first = [], 0
    for weight, num_rows, order in gemm.weight.runs:
        x = gemm.x if order is None else gemm.x.index_select(1, order)
        bias = None if gemm.bias is None else gemm.bias[first : first + num_rows]
        outs.append(multiply(gemm._replace(x=x, weight=weight, bias=bias)))
        first += num_rows
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def _multiply_invariant(gemm: Gemm) -> torch.Tensor:
    x, (weight,), bias = gemm[:3]
    if x.is_cuda:
        from slipstream.ops.gemm.linear.triton import batch_invariant_linear  # needs triton; nn/sdpa.py checks it

        return batch_invariant_linear(x, weight, bias)
    return skinny_gemm(x, weight, bias) if native.serves(x) else dense.linear(x, weight, bias)


def _multiply_packed(gemm: Gemm) -> torch.Tensor:
    out: torch.Tensor = gemm.weight.multiply(gemm.x)
    return out if gemm.bias is None else out.add_(gemm.bias)


def _rows(**kernels: Sequence[GemmKernel]) -> dict[Form, tuple[GemmKernel, ...]]:
    return {form: (*kernels.get(form, ()), *splits) for form, splits in SPLITS.items()}


def _only(name: str, launch: Any, *before: GemmKernel) -> dict[Form, tuple[GemmKernel, ...]]:
    return _rows(product=(*before, GemmKernel(name, lambda gemm: True, launch)))


TABLE: dict[Kind, dict[Form, tuple[GemmKernel, ...]]] = {
    "CUDA": _rows(
        product=(dense.ELEMENTWISE_HOPPER, UNFUSED, *dense.CUDA_KERNELS),
        norm=dense.NORM_KERNELS,
        add=(GATE, *dense.ADD_KERNELS),
        unfinished=(UNFUSED, *dense.UNFINISHED_KERNELS),
        adapters=dense.ADAPTER_KERNELS,
    ),
    "CPU": _rows(product=(ACTIVATION, *dense.CPU_KERNELS), add=(GATE, *dense.ADD_KERNELS)),
    "quantized": _rows(
        product=(UNFUSED, *quantized.KERNELS),
        norm=quantized.NORM_KERNELS,
        gate=quantized.GATE_KERNELS,
        add=quantized.ADD_KERNELS,
        unfinished=(UNFUSED, ADDED, *quantized.UNFINISHED_KERNELS),
    ),
    "runs": _rows(
        product=(
            GemmKernel("one run", lambda gemm: len(gemm.weight.runs) == 1, _multiply_runs),
            ACTIVATION,
            GemmKernel("runs", lambda gemm: True, _multiply_runs),
        )
    ),
    "transposed": _only("library", lambda gemm: linear_transposed(gemm.x, gemm.weight.data, gemm.bias), ACTIVATION),
    "invariant": _only("batch invariant", _multiply_invariant, ACTIVATION),
    "packed": _only("packed", _multiply_packed, ACTIVATION),
}


# Questions that a caller asks once for several GEMMs.


def can_chain(weight: Matrix) -> bool:
    """Whether the weight may be part of a chain with some number of rows."""
    return weight.can_chain if isinstance(weight, QuantizedMatrix) else isinstance(weight, torch.Tensor)


def choose_chain(x: torch.Tensor, weights: Sequence[Matrix], is_streaming: bool = False) -> Chain:
    """The fastest kind of chain that all weights offer for an x of this many rows; "" for none. With few rows a chain
    is streamed if the fastest kind of some weight, or the step (`is_streaming`), needs it."""
    offers = [_chains_of(x, weight) for weight in weights]
    if not all(offers):
        return ""
    if len(x) <= MAX_STREAMING_ROWS and (is_streaming or any(offer[0] == "streaming" for offer in offers)):
        return "streaming" if all("streaming" in offer for offer in offers) else ""
    return "library" if any(offer[0] == "library" for offer in offers) else "streaming"


def _chains_of(x: torch.Tensor, weight: Matrix) -> tuple[Chain, ...]:
    if isinstance(weight, torch.Tensor):
        return dense.chains_of(x, weight)
    return quantized.chains_of(x, weight) if isinstance(weight, QuantizedMatrix) else ()


def takes_gate(x: torch.Tensor, activation: Activation, weight: Matrix) -> bool:
    """Whether a gated activation is faster as the `gate` of the GEMM with this weight than as the activation of the
    GEMM before, whose input is x."""
    return isinstance(weight, QuantizedMatrix) and quantized.takes_gate(x, activation, weight)


def native_rows(weight: Any) -> list[WeightRows] | None:
    """The rows as the C kernels read them; None if they cannot."""
    if isinstance(weight, Runs):
        found = [native_rows(run.weight) for run in weight.runs]
        return None if None in found else [rows for each in found if each is not None for rows in each]
    if isinstance(weight, torch.Tensor | InvariantMatrix):
        rows = dense_rows(weight if isinstance(weight, torch.Tensor) else weight.data)
    else:
        rows = None if type(weight) in _KINDS else weight.run()
    return None if rows is None else [rows]
