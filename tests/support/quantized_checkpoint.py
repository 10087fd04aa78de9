"""Writes tiny quantised checkpoints from random numbers, and the weights that those numbers mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tiny import write_weights

Tensors = dict[str, torch.Tensor]
Packer = Callable[[int, int, torch.Generator], tuple[Tensors, torch.Tensor]]
"""Rows and columns to the tensors of a weight, by the last parts of their names, and the weight in float64."""

GROUP = 32
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble of an int32


def quantize(folder: Path, method: str, skip: str = "no such module", *, head: bool = False) -> Tensors:
    """Rewrites a tiny checkpoint: the projections of all layers but those whose names contain `skip` become random
    numbers of a method, and with `head` the projection to tokens too. Returns the weights they mean, by tensor name."""
    config, pack = METHODS[method]
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    stored, meant = {}, {}
    for name, tensor in tensors.items():
        is_projection = "_proj.weight" in name or "_proj_with_mqa." in name or ".in_proj_" in name
        if (is_projection and skip not in name) or (head and name == "lm_head.weight"):
            parts, weight = pack(*tensor.shape, generator)
            stem = name.removesuffix(".weight")
            stored |= {f"{stem}.{kind}": part.contiguous() for kind, part in parts.items()}
            meant[name] = weight
        else:
            stored[name] = meant[name] = tensor
    write_weights(folder, stored)
    return {name: tensor.double() for name, tensor in meant.items()}


def quantize_mxfp4(folder: Path) -> Tensors:
    """Rewrites a tiny gpt-oss: its experts become random MXFP4 numbers. Returns the weights that transformers makes of
    them, by tensor name."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": {"quant_method": "mxfp4"}}))
    generator = torch.Generator().manual_seed(7)
    stored, meant = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensor.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(118, 124, blocks.shape[:3], generator=generator, dtype=torch.uint8)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            meant[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            assert meant[name].shape == tensor.shape
        else:
            stored[name] = meant[name] = tensor
    write_weights(folder, stored)
    return meant


def _fp8(rows: int, columns: int, generator: torch.Generator, scale: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    values = (torch.randn(rows, columns, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": values}, values.double() * scale.double()


def fp8_tensor(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    scale = torch.rand((), generator=generator) * 1e-3 + 1e-3
    parts, weight = _fp8(rows, columns, generator, scale)
    return parts | {"weight_scale": scale, "input_scale": torch.tensor(0.5)}, weight


def fp8_renamed(is_static: bool) -> Packer:
    """As transformers stores scales per tensor."""

    def pack(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        parts, weight = fp8_tensor(rows, columns, generator)
        names = {"weight": "weight", "weight_scale": "weight_scale_inv"}
        names |= {"input_scale": "activation_scale"} if is_static else {}
        return {name: parts[own] for own, name in names.items()}, weight

    return pack


def fp8_channel(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    scale = torch.rand(rows, 1, generator=generator) * 1e-3 + 1e-3
    parts, weight = _fp8(rows, columns, generator, scale)
    return parts | {"weight_scale": scale.bfloat16()}, parts["weight"].double() * scale.bfloat16().double()


def fp8_block(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    scale = torch.rand(-(-rows // GROUP), -(-columns // GROUP), generator=generator) * 1e-3 + 1e-3
    whole = scale.repeat_interleave(GROUP, 0)[:rows].repeat_interleave(GROUP, 1)[:, :columns]
    parts, weight = _fp8(rows, columns, generator, whole)
    return parts | {"weight_scale_inv": scale}, weight


def _integers(
    rows: int, columns: int, bits: int, generator: torch.Generator, group: int = GROUP
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers [rows, columns], zeros and scales [rows, groups]. The last group may be shorter."""
    groups = -(-columns // group)
    q = torch.randint(0, 2**bits, (rows, columns), generator=generator)
    zeros = torch.randint(1, 2**bits - 1, (rows, groups), generator=generator)
    scale = (torch.rand(rows, groups, generator=generator) * 1e-2 + 1e-2).half()
    return q, zeros, scale


def _meant(q: torch.Tensor, zeros: torch.Tensor | int, scale: torch.Tensor) -> torch.Tensor:
    groups = torch.arange(q.shape[1]) // (GROUP if scale.shape[1] > 1 else q.shape[1])
    return scale.double()[:, groups] * (q - (zeros if isinstance(zeros, int) else zeros[:, groups])).double()


def _pack(numbers: torch.Tensor, bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """Along the last dimension, into int32."""
    per_word = 32 // bits
    grouped = numbers.long().unflatten(-1, (-1, per_word))
    order = list(places or range(per_word))
    words = sum(grouped[..., column] << (bits * nibble) for nibble, column in enumerate(order))
    assert isinstance(words, torch.Tensor)
    return (words - ((words >> 31) << 32)).to(torch.int32)


def awq(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    q, zeros, scale = _integers(rows, columns, 4, generator)
    parts = {
        "qweight": _pack(q.t(), 4, AWQ_PLACES),
        "qzeros": _pack(zeros.t(), 4, AWQ_PLACES),
        "scales": scale.t(),
    }
    return parts, _meant(q, zeros, scale)


def gptq(bits: int, symmetric: bool, act_order: bool, subtracted: int = 1, grouped: bool = True) -> Packer:
    """`subtracted`: by which stored zeros are less than those they mean; 0 in the second version of the format."""

    def pack(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        q, zeros, scale = _integers(rows, columns, bits, generator, GROUP if grouped else columns)
        if symmetric:
            zeros = torch.full_like(zeros, 2 ** (bits - 1))
        groups = torch.arange(columns) // (GROUP if grouped else columns)
        if act_order:
            groups = groups[torch.randperm(columns, generator=generator)]
        parts = {
            "qweight": _pack(q, bits).t(),
            "qzeros": _pack((zeros - subtracted).t(), bits),
            "scales": scale.t(),
            "g_idx": groups.int(),
        }
        return parts, scale.double()[:, groups] * (q - zeros[:, groups]).double()

    return pack


def packed(bits: int, symmetric: bool, grouped: bool = True) -> Packer:
    def pack(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        q, zeros, scale = _integers(rows, columns, bits, generator, GROUP if grouped else columns)
        parts = {
            "weight_packed": _pack(q, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if symmetric:
            return parts, _meant(q, 2 ** (bits - 1), scale)
        return parts | {"weight_zero_point": _pack(zeros.t(), bits).t()}, _meant(q, zeros, scale)

    return pack


def bitsandbytes(double: bool) -> Packer:
    """NF4 as bitsandbytes stores it; blocks of 64."""

    def pack(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes = torch.randint(0, 16, (rows * columns,), generator=generator)
        table = torch.linspace(-1, 1, 16) ** 3
        scale = torch.rand(rows * columns // 64, generator=generator) * 0.1
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns]}
        parts = {"weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8).unsqueeze(1), "weight.quant_map": table}
        if double:
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0625}
            absmax = torch.randint(0, 256, scale.shape, generator=generator, dtype=torch.uint8)
            numbers, outer = torch.rand(256, generator=generator), torch.rand(-(-len(scale) // 256)) * 0.1
            places = torch.arange(len(scale)) // 256
            scale = numbers[absmax.int()] * outer[places] + 0.0625
            parts |= {"weight.nested_quant_map": numbers, "weight.nested_absmax": outer, "weight.absmax": absmax}
        else:
            parts["weight.absmax"] = scale
        described = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
        parts["weight.quant_state.bitsandbytes__nf4"] = described.clone()
        return parts, (table[codes].double() * scale.double().repeat_interleave(64)).view(rows, columns)

    return pack


def int8_channel(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    values = torch.randint(-128, 128, (rows, columns), generator=generator, dtype=torch.int8)
    scale = (torch.rand(rows, 1, generator=generator) * 1e-3 + 1e-3).bfloat16()
    return {"weight": values, "weight_scale": scale}, values.double() * scale.double()


def compressed(format: str, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


DYNAMIC: dict[str, dict[str, Any]] = {"-:(.*|x)*y$": {}, "+:.*down_proj.*": {"bits": 4, "group_size": GROUP}}
AUTO_ROUND: dict[str, Any] = {
    "quant_method": "auto-round", "bits": 4, "group_size": GROUP, "data_type": "int",
    "packing_format": "auto_round:auto_gptq",
}  # fmt: skip
_DYNAMIC = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
_INT = {"type": "int", "symmetric": True}
METHODS: dict[str, tuple[dict[str, Any], Packer]] = {
    "fp8 tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor),
    "fp8 static": (
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        fp8_renamed(is_static=True),
    ),
    "fp8 dynamic": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None},
        fp8_renamed(is_static=False),
    ),
    "fp8 block": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP]},
        fp8_block,
    ),
    "fp8 channel": (
        compressed("float-quantized", _DYNAMIC, num_bits=8, type="float", strategy="channel", symmetric=True),
        fp8_channel,
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8}}, fp8_tensor),
    "modelopt channel": ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, fp8_channel),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
    "gptq 4": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False}, gptq(4, False, False)),
    "gptq dynamic": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "dynamic": DYNAMIC},
        gptq(4, False, False),
    ),
    "auto-round gptq": (
        AUTO_ROUND | {"sym": False, "extra_config": {"lm_head": {"bits": 16, "data_type": "fp"}}},
        gptq(4, False, False),
    ),
    "auto-round awq": (AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "sym": False}, awq),
    "gptq v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "checkpoint_format": "gptq_v2"},
        gptq(4, False, False, subtracted=0),
    ),
    "gptq rows": ({"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": True}, gptq(4, True, False, 1, False)),
    "gptq 8 sym": ({"quant_method": "gptq", "bits": 8, "group_size": GROUP, "sym": True}, gptq(8, True, False)),
    "gptq act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": True},
        gptq(4, True, True),
    ),
    "w4a16": (compressed("pack-quantized", num_bits=4, strategy="group", group_size=GROUP, **_INT), packed(4, True)),
    "w4a16 zeros": (
        compressed("pack-quantized", num_bits=4, type="int", symmetric=False, strategy="group", group_size=GROUP),
        packed(4, False),
    ),
    "w4a16 channel": (
        compressed("pack-quantized", num_bits=4, type="int", symmetric=False, strategy="channel"),
        packed(4, False, grouped=False),
    ),
    "w8a16": (compressed("pack-quantized", num_bits=8, strategy="group", group_size=GROUP, **_INT), packed(8, True)),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, bitsandbytes(False)),
    "nf4 double": (
        {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
        },
        bitsandbytes(True),
    ),
    "w8a8": (compressed("int-quantized", _DYNAMIC, num_bits=8, strategy="channel", **_INT), int8_channel),
}
