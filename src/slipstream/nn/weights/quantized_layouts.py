"""Layouts: the tensors in which each method stores a weight, and how they become a `QuantizedPart`.

A part is a weight as the checkpoint has it: q, k and v of one attention layer are three parts of one matrix. Numbers of
a part are FP8, or unsigned integers of 4 or 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from slipstream.base.errors import BadCheckpoint
from slipstream.checkpoint.quantization import Quantization
from slipstream.device.sync_check import sync_allowed
from slipstream.nn.weights.weight_format import CheckpointTensor
from slipstream.ops.gemm.quantized import MAX_FP8

OPTIONAL = ("g_idx", "weight_g_idx", "input_scale", "weight_zero_point")
"""Tensors that a checkpoint of some method may have or not."""
ALSO_CALLED = {"weight_scale_inv": "weight_scale", "activation_scale": "input_scale"}
"""Names of scales in transformers' FP8 checkpoints. Both names of a weight's scale mean a factor of its numbers."""
UNUSED = ("weight_shape", "input_scale_ub", "input_zero_point")
"""Tensors that say nothing more than the others."""

Read = Callable[[str], torch.Tensor]
"""Reads a tensor by the last part of its name."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""FP4 numbers from 0 up; codes 8 to 15 are their negatives."""

NESTED = 256
"""bitsandbytes: scales that share a scale."""

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place of each of 8 adjacent columns in an int32


class QuantizedPart(NamedTuple):
    """weight = scale * (values - zeros), or scale * codebook[values]; a scale and a zero for each group of columns, or
    for each column where these are no whole groups."""

    values: torch.Tensor  # [rows, columns] float8_e4m3fn, or uint8
    scale: torch.Tensor  # [rows, groups] float32
    zeros: torch.Tensor | None  # [rows, groups] float32; None: FP8, or the middle of the range
    order: torch.Tensor | None  # [columns] the model's column for each column of `values`; None: the same
    input_scale: torch.Tensor | None  # [1] float32
    codebook: torch.Tensor | None = None  # [16] float32


def marker(q: Quantization) -> str:
    """The tensor that every quantised weight of a layout has."""
    names = {
        "float8": "weight_scale",
        "int8": "weight_scale",
        "packed": "weight_packed",
        "mxfp4": "blocks",
        "bnb": "absmax",
    }
    return names.get(q.layout, "qweight")


def tensor_shapes(
    q: Quantization, num_rows: int, num_columns: int, optional: frozenset[str]
) -> dict[str, tuple[int, ...]]:
    """The tensors of a part, by the last part of their names. `optional`: those of `OPTIONAL` that are there."""
    groups = -(-num_columns // q.group) if q.group else 1
    per_word = 32 // q.bits
    if q.layout == "online":
        return {"weight": (num_rows, num_columns)}
    if q.layout == "mxfp4":
        return {"blocks": (num_rows, groups, 16), "scales": (num_rows, groups)}
    if q.layout == "bnb":
        blocks = -(-num_rows * num_columns // q.group)  # of the flat weight, across rows
        flat: dict[str, tuple[int, ...]] = {"weight": (-(-num_rows * num_columns // 2), 1), "quant_map": (16,)}
        flat |= {"absmax": (blocks,), "quant_state": (1,)}
        nested = {"nested_absmax": (-(-blocks // NESTED),), "nested_quant_map": (256,)}
        return flat | (nested if q.double_scales else {})
    if q.layout in ("awq", "gptq"):
        shapes: dict[str, tuple[int, ...]] = {"qzeros": (groups, num_rows // per_word), "scales": (groups, num_rows)}
        if q.layout == "awq":
            return shapes | {"qweight": (num_columns, num_rows // per_word)}
        shapes["qweight"] = (num_columns // per_word, num_rows)
        return shapes | ({"g_idx": (num_columns,)} if q.has_order or "g_idx" in optional else {})
    if not q.block_rows:
        scales: tuple[int, ...] = (1,)
    else:
        scales = (-(-num_rows // q.block_rows), groups)
    shapes = {"weight_scale": scales}
    if q.layout == "packed":
        shapes["weight_packed"] = (num_rows, -(-num_columns // per_word))
        if not q.symmetric:
            shapes["weight_zero_point"] = (num_rows // per_word, groups)
        return shapes | ({"weight_g_idx": (num_columns,)} if "weight_g_idx" in optional else {})
    shapes["weight"] = (num_rows, num_columns)
    if q.layout == "int8" and not q.symmetric:
        shapes["weight_zero_point"] = scales
    return shapes | ({"input_scale": (1,)} if q.layout == "float8" and "input_scale" in optional else {})


def read_part(
    q: Quantization, name: str, pieces: Mapping[str, CheckpointTensor], num_columns: int, device: torch.device
) -> QuantizedPart:
    """`name`: of the weight, for errors; `pieces`: by the names of `tensor_shapes`."""

    def read(kind: str) -> torch.Tensor:
        return pieces[kind].read().to(device)

    if q.layout == "online":
        return quantize_part(q, read("weight"))
    if q.layout == "bnb":
        return _read_bitsandbytes(q, read, num_columns)
    if q.layout == "awq":
        part = _read_awq(read)
    elif q.layout == "mxfp4":
        part = _read_mxfp4(read)
    elif q.layout == "gptq":
        part = _read_gptq(q, name, read, "g_idx" in pieces)
    elif q.layout == "packed":
        part = _read_packed(q, name, read, pieces, num_columns)
    else:
        part = _read_rows(q, name, read, pieces)
    return _by_columns(part, q.group, num_columns) if q.group and num_columns % q.group else part


def _by_columns(part: QuantizedPart, group: int, num_columns: int) -> QuantizedPart:
    """A part whose last group is shorter, with a scale and a zero for each column."""

    def spread(table: torch.Tensor) -> torch.Tensor:
        return table.repeat_interleave(group, 1, output_size=table.shape[1] * group)[:, :num_columns]

    zeros = None if part.zeros is None else spread(part.zeros)
    return part._replace(values=part.values[:, :num_columns], scale=spread(part.scale), zeros=zeros)


def quantize_part(q: Quantization, weight: torch.Tensor) -> QuantizedPart:
    """A float weight to the nearest numbers: FP8 with a scale per row, or integers with a scale per group."""
    is_whole = q.group and weight.shape[1] % q.group == 0
    grouped = weight.float().unflatten(1, (-1, q.group if is_whole else weight.shape[1]))
    if q.layout == "online" and q.method == "fp8":
        scale = (grouped.abs().amax(-1) / MAX_FP8).clamp_min(1e-12)
        values = (grouped / scale.unsqueeze(-1)).clamp_(-MAX_FP8, MAX_FP8).to(torch.float8_e4m3fn)
        return QuantizedPart(values.flatten(1), scale, None, None, None)
    if q.has_codebook:
        return _to_fp4(grouped)
    largest = 2**q.bits - 1
    if q.symmetric:
        scale = (grouped.abs().amax(-1) / (largest // 2)).clamp_min(1e-12)
        zeros = torch.full_like(scale, largest // 2 + 1)
    else:
        low, high = grouped.amin(-1).clamp_max(0), grouped.amax(-1).clamp_min(0)
        scale = ((high - low) / largest).clamp_min(1e-12)
        zeros = (-low / scale).round()
    values = (grouped / scale.unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp_(0, largest).to(torch.uint8)
    return QuantizedPart(values.flatten(1), scale, None if q.symmetric else zeros, None, None)


def _to_fp4(grouped: torch.Tensor) -> QuantizedPart:
    """The nearest FP4 numbers, with a power of two for each group [rows, groups, columns] that its largest number
    fits."""
    codebook = _fp4_codebook(grouped.device)
    scale = torch.exp2(torch.log2((grouped.abs().amax(-1) / E2M1[-1]).clamp_min(1e-12)).ceil())
    numbers = (grouped / scale.unsqueeze(-1)).flatten(1)
    middles = (codebook[1:8] + codebook[:7]) / 2
    codes = torch.bucketize(numbers.abs(), middles).to(torch.uint8)
    return QuantizedPart(codes | (numbers < 0).to(torch.uint8) << 3, scale, None, None, None, codebook)


def _fp4_codebook(device: torch.device) -> torch.Tensor:
    with sync_allowed("weights are loaded before steps run"):
        positive = torch.tensor(E2M1, device=device, dtype=torch.float32)
    return torch.cat((positive, -positive))


def _read_mxfp4(read: Read) -> QuantizedPart:
    """16 bytes of a block hold 32 adjacent columns, even ones in the low bits. A scale is an exponent less 127."""
    blocks, exponents = read("blocks"), read("scales")
    values = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
    scale = torch.exp2(exponents.float() - 127)
    return QuantizedPart(values, scale, None, None, None, _fp4_codebook(blocks.device))


def _read_bitsandbytes(q: Quantization, read: Read, num_columns: int) -> QuantizedPart:
    """The weight is flat, the first of two codes in the high bits. Scales that are quantised too: codes of a table of
    256 numbers with a scale for each 256, plus an offset."""
    packed, scale, offset = read("weight").flatten(), read("absmax"), read("quant_state")
    values = torch.stack((packed >> 4, packed & 15), -1).flatten()
    num_rows = len(values) // num_columns
    values = values[: num_rows * num_columns].view(num_rows, num_columns)
    if q.double_scales:
        outer = read("nested_absmax").float()
        outer = outer.repeat_interleave(NESTED, output_size=NESTED * len(outer))[: len(scale)]
        scale = read("nested_quant_map").float()[scale.int()] * outer + offset
    if num_columns % q.group:  # blocks across rows: a scale for each column
        scale = scale.repeat_interleave(q.group, output_size=len(scale) * q.group)[: values.numel()]
    codebook = read("quant_map").float()
    return QuantizedPart(values, scale.float().view(num_rows, -1), None, None, None, codebook)


def _read_rows(q: Quantization, name: str, read: Read, pieces: Mapping[str, CheckpointTensor]) -> QuantizedPart:
    """FP8 or 8-bit integers in the shape of the weight."""
    values, scale = read("weight"), read("weight_scale").float()
    wanted = torch.float8_e4m3fn if q.layout == "float8" else torch.int8
    if values.dtype is not wanted:
        raise BadCheckpoint(
            f"{name}.weight is {values.dtype}, and quantization_config says {wanted}; use its own config"
        )
    rows = len(values)
    if q.block_rows == 0:
        scale = scale.reshape(1, 1).expand(rows, 1)
    elif q.block_rows > 1:
        scale = scale.repeat_interleave(q.block_rows, 0, output_size=len(scale) * q.block_rows)[:rows]
    inputs = read("input_scale").float().reshape(1) if "input_scale" in pieces else None
    if q.layout == "float8":
        return QuantizedPart(values, scale, None, None, inputs)
    zeros = None
    if not q.symmetric:
        zeros = read("weight_zero_point").float() + 128
        zeros = zeros.reshape(1, 1).expand(rows, 1) if q.block_rows == 0 else zeros
    # signed to unsigned: adding 128 flips the top bit
    return QuantizedPart(values.view(torch.uint8) ^ 128, scale, zeros, None, None)


def _read_packed(
    q: Quantization, name: str, read: Read, pieces: Mapping[str, CheckpointTensor], num_columns: int
) -> QuantizedPart:
    """compressed-tensors pack-quantized: 4 or 8 adjacent columns in an int32, lowest first."""
    values = _unpack(read("weight_packed"), q.bits, 1)[:, :num_columns]
    scale = read("weight_scale").float()
    if q.block_rows == 0:
        scale = scale.reshape(1, 1).expand(len(values), 1)
    zeros = None if q.symmetric else _unpack(read("weight_zero_point"), q.bits, 0).float()
    order = _order_of(q, name, read("weight_g_idx")) if "weight_g_idx" in pieces else None
    return QuantizedPart(values if order is None else values[:, order], scale, zeros, order, None)


def _read_awq(read: Read) -> QuantizedPart:
    def unpack(words: torch.Tensor) -> torch.Tensor:
        return _unpack(words, 4, 1).unflatten(1, (-1, 8))[:, :, list(_AWQ_ORDER)].flatten(1).t()

    return QuantizedPart(
        unpack(read("qweight")), read("scales").float().t(), unpack(read("qzeros")).float(), None, None
    )


def _read_gptq(q: Quantization, name: str, read: Read, has_order: bool) -> QuantizedPart:
    values = _unpack(read("qweight"), q.bits, 0).t()
    stored = _unpack(read("qzeros"), q.bits, 1).t().float()
    if q.method != "gptq_v2":  # the first version of the format stores zeros less one
        stored = (stored + 1).remainder(2**q.bits)
    zeros: torch.Tensor | None = stored
    if q.symmetric:
        with sync_allowed("weights are loaded before steps run"):
            is_middle = bool((stored == 2 ** (q.bits - 1)).all())
        if not is_middle:
            raise BadCheckpoint(
                f"{name}.qzeros are not in the middle of the range, and sym of the config says they are"
            )
        zeros = None
    order = _order_of(q, name, read("g_idx")) if has_order else None
    return QuantizedPart(values if order is None else values[:, order], read("scales").float().t(), zeros, order, None)


def _order_of(q: Quantization, name: str, groups: torch.Tensor) -> torch.Tensor | None:
    """The columns sorted by group, from the group of each column; None if they are sorted."""
    sizes, size = torch.bincount(groups.long()), q.group or len(groups)
    with sync_allowed("weights are loaded before steps run"):
        # only the last group may be shorter
        is_even = bool((sizes[:-1] == size).all()) and int(sizes[-1]) == (len(groups) % size or size)
    if not is_even:
        raise BadCheckpoint(
            f"the groups in g_idx of {name} do not all have {q.group} columns; download the model again"
        )
    order = torch.sort(groups.long(), stable=True).indices
    with sync_allowed("weights are loaded before steps run"):
        is_sorted = bool((order == torch.arange(len(order), device=order.device)).all())
    return None if is_sorted else order


def _unpack(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Unsigned numbers of an int32 tensor, lowest bits first, along a dimension."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    shape = [1] * (words.dim() + 1)
    shape[dim + 1] = len(shifts)
    numbers = words.to(torch.int32).unsqueeze(dim + 1) >> shifts.view(shape) & (2**bits - 1)
    return numbers.flatten(dim, dim + 1).to(torch.uint8)
