"""All layers of a decoder for one token per row, in one C call.

At one row the nine calls of a layer cost as much host time as its GEMMs take. The structures below mirror those of
`decode_layers.c` field by field; they hold addresses, and `NativeLayers` keeps the tensors at these addresses alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from slipstream.ops.gemm.linear.tiles import MAX_TOKENS, ON_ARM
from slipstream.ops.platform import native
from slipstream.ops.platform.native import RowLayout, WeightRows


def max_rows(products: Sequence[ProductWeights]) -> int:
    """Rows up to which one call for all layers is faster than separate ops. With more rows torch's GEMMs are faster,
    even if bfloat16 weights have to be widened for them."""
    layouts = {run.layout for product in products for run in product.runs}
    if not layouts & {RowLayout.FLOAT32, RowLayout.BFLOAT16}:
        return 64
    return 32 if ON_ARM or RowLayout.FLOAT32 not in layouts else max(8, MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class ProductWeights:
    runs: list[WeightRows]
    num_rows: int
    num_columns: int
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: torch.Tensor
    attention_out_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp_out_norm: torch.Tensor | None
    head_norm: torch.Tensor | None  # [heads + kv heads, dim]
    qkv: ProductWeights
    output: ProductWeights
    gate_up: ProductWeights
    down: ProductWeights
    group: int  # cache group: selects slots and page tables
    rope: int  # index of the RoPE table
    window: int  # 0: none


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    is_gelu: bool  # else silu
    norm_eps: float
    scale: float
    score_cap: float


class _Run(ctypes.Structure):
    _fields_ = [
        ("data", native.POINTER),
        ("scales", native.POINTER),
        ("offsets", native.POINTER),
        ("layout", native.INT),
        ("num_rows", native.INT),
    ]


class _Product(ctypes.Structure):
    _fields_ = [
        ("runs", ctypes.POINTER(_Run)),
        ("bias", native.POINTER),
        ("num_runs", native.INT),
        ("num_rows", native.INT),
        ("num_columns", native.INT),
        ("is_low_bit", native.INT),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        ("attention_norm", native.POINTER),
        ("attention_out_norm", native.POINTER),
        ("mlp_norm", native.POINTER),
        ("mlp_out_norm", native.POINTER),
        ("head_norm", native.POINTER),
        ("qkv", _Product),
        ("output", _Product),
        ("gate_up", _Product),
        ("down", _Product),
        ("keys", native.POINTER),
        ("values", native.POINTER),
        ("group", native.INT),
        ("rope", native.INT),
        ("window", native.INT),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, native.INT) for name in ("num_layers", "hidden", "ffn", "num_heads", "num_kv_heads", "dim")),
        *((name, native.INT) for name in ("rotary", "page_size", "is_gelu")),
        *((name, native.FLOAT) for name in ("eps", "scale", "cap")),
        ("norm", native.POINTER),
        ("layers", ctypes.POINTER(_Layer)),
    ]


@dataclass(slots=True)
class NativeLayers:
    model: _Model
    num_groups: int
    kept: list[Any] = field(default_factory=list)  # keeps alive what the structures point to


def build_layers(
    spec: DecoderSpec,
    layers: Sequence[LayerWeights],
    norm: torch.Tensor,
    caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> NativeLayers:
    """Weights and caches [pages, page_size, kv heads, dim] must not move afterwards: the result holds addresses."""
    kept: list[Any] = [norm]

    def address(tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        assert tensor.is_contiguous(), "the kernel reads contiguous tensors"
        kept.append(tensor)
        return tensor.data_ptr()

    def product(weights: ProductWeights) -> _Product:
        runs = (_Run * len(weights.runs))(
            *(
                _Run(address(run.data), address(run.scales), address(run.offsets), run.layout, run.num_rows)
                for run in weights.runs
            )
        )
        kept.append(runs)
        is_low_bit = any(run.is_low_bit for run in weights.runs)
        sizes = (len(weights.runs), weights.num_rows, weights.num_columns, is_low_bit)
        return _Product(runs, address(weights.bias), *sizes)

    made = (_Layer * len(layers))(
        *(
            _Layer(
                address(layer.attention_norm),
                address(layer.attention_out_norm),
                address(layer.mlp_norm),
                address(layer.mlp_out_norm),
                address(layer.head_norm),
                product(layer.qkv),
                product(layer.output),
                product(layer.gate_up),
                product(layer.down),
                address(keys),
                address(values),
                layer.group,
                layer.rope,
                layer.window,
            )
            for layer, (keys, values) in zip(layers, caches, strict=True)
        )
    )
    kept.append(made)
    model = _Model(
        len(layers),
        spec.hidden_size,
        spec.ffn_size,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.rotary_dim,
        caches[0][0].shape[1],
        spec.is_gelu,
        spec.norm_eps,
        spec.scale,
        spec.score_cap,
        norm.data_ptr(),
        made,
    )
    return NativeLayers(model, 1 + max(layer.group for layer in layers), kept)


def decode_layers(
    layers: NativeLayers,
    x: torch.Tensor,  # [B, hidden]
    ropes: Sequence[torch.Tensor],  # per RoPE table: [B, 2, rotary]
    slots: Sequence[torch.Tensor],  # per group: [B] int64
    tables: Sequence[torch.Tensor],  # per group: [B, width] int64
    lengths: torch.Tensor,  # [B] int64
) -> torch.Tensor:
    """Hidden states after the last norm, [B, hidden]. Keys and values are written to their pages."""
    library = native.library()
    assert library is not None, "call native.serves first"
    assert x.is_contiguous() and lengths.is_contiguous() and all(table.stride(1) == 1 for table in tables)
    assert all(part.is_contiguous() for part in (*ropes, *slots))
    out = torch.empty(x.shape, dtype=torch.float32)
    pointers = native.POINTER * len(slots)
    found = library.slip_decode_layers(
        ctypes.addressof(layers.model),
        x.data_ptr(),
        out.data_ptr(),
        (native.POINTER * len(ropes))(*(rope.data_ptr() for rope in ropes)),
        pointers(*(slot.data_ptr() for slot in slots)),
        pointers(*(table.data_ptr() for table in tables)),
        (native.INT * len(tables))(*(table.stride(0) for table in tables)),
        lengths.data_ptr(),
        len(x),
    )
    if not found:
        raise MemoryError("out of memory for the intermediate results of a step")
    return out


__all__ = ["DecoderSpec", "LayerWeights", "ProductWeights", "build_layers", "decode_layers", "max_rows"]
