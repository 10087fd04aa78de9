"""The 4-bit kernels of torch for ARM and x86, and the weight layouts that they need."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

from slipstream.ops.dequant import BLOCK
from slipstream.ops.low_bit.planes import PLANES, make_planes
from slipstream.ops.low_bit.reference import add_group_sums
from slipstream.ops.weight_rows import join_rows


class DynamicQuant:
    """ARM: activations are quantized to 8 bits with one scale per row of x, so a row's result is independent of others.

    Scales are bfloat16. The kernel has no offsets; a separate GEMM adds them.
    """

    name = "dynamic quant"
    rounding = "8 bits"
    kinds = tuple(PLANES)

    def suits_machine(self) -> bool:
        on_arm = platform.machine().lower() in ("aarch64", "arm64")
        # without KleidiAI torch computes this in a slow loop
        return on_arm and torch.backends.kleidiai.is_available()

    def pack(self, kind: str, *parts: torch.Tensor) -> _DynamicQuantWeight:
        planes = make_planes(join_rows(parts), kind)
        size = (planes.num_columns, planes.num_rows)
        packed = tuple(
            torch.ops.aten._dyn_quant_pack_4bit_weight(pairs, scale.bfloat16(), None, BLOCK, *size)
            for pairs, scale in zip(planes.pairs, planes.scales, strict=True)
        )
        offset = None if planes.offset is None else planes.offset.t().contiguous()
        return _DynamicQuantWeight(packed, offset, *size)

    def num_bytes(self, kind: str, num_rows: int, num_columns: int) -> int:
        groups = num_columns // BLOCK
        plane_bytes = groups * (BLOCK // 2 + 2) + 8  # weights, scales, and two values that the kernel adds
        return num_rows * (PLANES[kind] * plane_bytes + (0 if kind == "Q4_0" else groups * 4))


@dataclass(frozen=True, slots=True)
class _DynamicQuantWeight:
    planes: tuple[torch.Tensor, ...]
    offset: torch.Tensor | None  # [groups, rows]
    num_columns: int
    num_rows: int

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()  # the kernel ignores strides
        matmul = torch.ops.aten._dyn_quant_matmul_4bit
        out: torch.Tensor = matmul(x, self.planes[0], BLOCK, self.num_columns, self.num_rows)
        for plane in self.planes[1:]:
            out.add_(matmul(x, plane, BLOCK, self.num_columns, self.num_rows))
        return out if self.offset is None else add_group_sums(out, x, self.offset)

    def lookup(self, ids: torch.Tensor) -> None:
        return None

    def run(self) -> None:
        return None


class Int4Pack:
    """x86: activations and scales in bfloat16, the only dtype in which the kernel is fast; the kernel adds offsets."""

    name = "int4 pack"
    rounding = "bfloat16"
    kinds = tuple(PLANES)
    _CHUNK = 4096  # rows packed at a time; packing needs each weight as int32 first
    _ROWS = 16  # the kernel needs a multiple of this

    def suits_machine(self) -> bool:
        on_x86 = platform.machine().lower() in ("x86_64", "amd64")
        # without vector instructions torch computes this in a slow loop
        return on_x86 and torch.backends.cpu.get_cpu_capability() != "DEFAULT"

    def pack(self, kind: str, *parts: torch.Tensor) -> _Int4PackWeight:
        planes = make_planes(join_rows(parts), kind)
        packed = []
        for number, (pairs, scale) in enumerate(zip(planes.pairs, planes.scales, strict=True)):
            offset = planes.offset if number == 0 and planes.offset is not None else torch.zeros_like(scale)
            scales = torch.stack((_padded(scale, self._ROWS), _padded(offset, self._ROWS)), -1).bfloat16()
            packed.append((self._pack_pairs(_padded(pairs, self._ROWS)), scales.transpose(0, 1).contiguous()))
        return _Int4PackWeight(tuple(packed), planes.num_rows)

    def num_bytes(self, kind: str, num_rows: int, num_columns: int) -> int:
        plane_bytes = num_columns // 2 + num_columns // BLOCK * 4
        return -(-num_rows // self._ROWS) * self._ROWS * PLANES[kind] * plane_bytes

    def _pack_pairs(self, pairs: torch.Tensor) -> torch.Tensor:
        chunks = []
        for chunk in pairs.split(self._CHUNK):
            values = torch.stack((chunk & 15, chunk >> 4), -1).flatten(1).int()
            chunks.append(torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1))
        return torch.cat(chunks)


@dataclass(frozen=True, slots=True)
class _Int4PackWeight:
    planes: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    num_rows: int  # without padding

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        x = x.bfloat16().contiguous()
        matmul = torch.ops.aten._weight_int4pack_mm_for_cpu
        weight, scales = self.planes[0]
        out: torch.Tensor = matmul(x, weight, BLOCK, scales).float()
        for weight, scales in self.planes[1:]:
            out.add_(matmul(x, weight, BLOCK, scales))
        return out if out.shape[1] == self.num_rows else out[:, : self.num_rows].contiguous()

    def lookup(self, ids: torch.Tensor) -> None:
        return None

    def run(self) -> None:
        return None


def _padded(rows: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -len(rows) % multiple
    return rows if not missing else torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:])))
