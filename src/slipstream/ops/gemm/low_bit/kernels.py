"""Kernel: the interface of a low-bit GEMM kernel and of its packed weights."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Protocol

import torch

from slipstream.ops.gemm.dequant import BLOCK, K_KINDS, split, split_k
from slipstream.ops.platform.native import WeightRows, join_rows


class Packed(Protocol):
    """Weights in the layout of a kernel."""

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, columns] float32 to [T, rows]."""

    def lookup(self, ids: torch.Tensor) -> torch.Tensor | None:
        """Rows `ids` [T] in float32, [T, columns], with the bits of `dequantize`; None if only the file has them."""

    def run(self) -> WeightRows | None:
        """The rows in the form that the fused C kernels read; None if they cannot read this layout."""


class Kernel(Protocol):
    name: str
    rounding: str  # the precision of rounded activations, if it changes results; else empty
    kinds: tuple[str, ...]  # GGUF kinds that it can pack; others are dequantized

    def suits_machine(self) -> bool:
        """Whether the kernel is fast on this machine. `is_correct` checks that it works."""

    def pack(self, kind: str, *parts: torch.Tensor) -> Packed:
        """Packs the bytes of GGUF tensors that are one weight, one below the other: [rows, bytes per row] uint8."""

    def num_bytes(self, kind: str, num_rows: int, num_columns: int) -> int:
        """Bytes of such a weight when packed."""


# Low-bit GEMM in plain torch: the oracle of the kernels, and the offset term that torch's kernel lacks.


def multiply(x: torch.Tensor, planes: Planes) -> torch.Tensor:
    """x [T, columns] to [T, rows], with dequantized weights."""
    weight = torch.zeros(planes.num_rows, planes.num_columns, dtype=torch.float32)
    groups = weight.view(planes.num_rows, -1, BLOCK)
    for pairs, scale in zip(planes.pairs, planes.scales, strict=True):
        values = torch.stack((pairs & 15, pairs >> 4), -1).view(groups.shape).float() - 8
        groups.add_(values.mul_(scale.unsqueeze(-1)))
    if planes.offset is not None:
        groups.add_(planes.offset.unsqueeze(-1))
    return x @ weight.t()


def add_group_sums(out: torch.Tensor, x: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Adds the offset term to out [T, rows]: the sum of x over each group of columns, times offset [groups, rows]."""
    return out.addmm_(x.view(x.shape[0], -1, BLOCK).sum(-1), offset)


# Planes: the common form of low-bit weights from which every kernel packs.
#
# A plane holds values u from 0 to 15, two per byte, the even column in the low half. A matrix is the sum of
# scale * (u - 8) over its planes plus an offset, with one scale and offset per 32 columns of a row:
#
#     Q4_0  one plane of q
#     Q4_1  one plane of q; offset = minimum + 8 * scale
#     Q8_0  q + 128 is split into halves: one plane of the high halves with 16 * scale, one of the low halves with
#           scale; offset = 8 * scale
#     Q4_K  one plane of q with d * scale; offset = 8 * d * scale - dmin * minimum
#     Q5_K  one plane of the high bit + 8 with 16 * d * scale, one of the low halves as Q4_K
#
# Q6_K has no planes: its scales are those of 16 columns.

# planes per kind
PLANES = {"Q4_0": 1, "Q4_1": 1, "Q8_0": 2, "Q4_K": 1, "Q5_K": 2}


@dataclass(frozen=True, slots=True)
class Planes:
    pairs: tuple[torch.Tensor, ...]  # each [rows, columns / 2] uint8
    scales: tuple[torch.Tensor, ...]  # each [rows, groups] float32
    offset: torch.Tensor | None  # [rows, groups] float32

    @property
    def num_rows(self) -> int:
        return self.pairs[0].shape[0]

    @property
    def num_columns(self) -> int:
        return 2 * self.pairs[0].shape[1]


def make_planes(raw: torch.Tensor, kind: str) -> Planes:
    """From the bytes of a GGUF tensor, [rows, bytes per row] uint8."""
    if kind in K_KINDS:
        return _make_k_planes(raw, kind)
    blocks = split(raw, kind)
    scale = blocks.scale.squeeze(-1)
    # two bytes at a time: adjacent columns are packed into one byte
    words = blocks.bytes.view(torch.int16)
    low, high = _low_halves(words), _high_halves(words)
    if kind == "Q8_0":
        # adding 128 to a signed byte flips its top bit, the top bit of its high half
        return Planes((high.bitwise_xor_(0x88).flatten(1), low.flatten(1)), (16 * scale, scale), 8 * scale)
    pairs = torch.cat((low, high), -1).flatten(1)
    if blocks.minimum is None:
        return Planes((pairs,), (scale,), None)
    return Planes((pairs,), (scale,), blocks.minimum.squeeze(-1).add(scale, alpha=8))


def _make_k_planes(raw: torch.Tensor, kind: str) -> Planes:
    blocks = split_k(raw, kind)
    assert blocks.dmin is not None and blocks.minimum is not None, f"{kind} has no planes"
    scale = (blocks.d.float() * blocks.scale).flatten(1)
    offset = (blocks.dmin.float() * blocks.minimum).flatten(1).neg_()
    offset.add_(scale, alpha=8)
    columns = blocks.values.flatten(1)
    low = _pair(columns & 15)
    if kind == "Q4_K":
        return Planes((low,), (scale,), offset)
    # near 0: the rounding of activations is multiplied by the values of a plane
    return Planes((_pair((columns >> 4) + 8), low), (16 * scale, scale), offset)


def _pair(columns: torch.Tensor) -> torch.Tensor:
    return columns[:, 0::2] | columns[:, 1::2] << 4


def _low_halves(words: torch.Tensor) -> torch.Tensor:
    return ((words & 0x000F) | ((words & 0x0F00) >> 4)).to(torch.uint8)


def _high_halves(words: torch.Tensor) -> torch.Tensor:
    return (((words & 0x00F0) >> 4) | ((words >> 8) & 0x00F0)).to(torch.uint8)


# The 4-bit kernels of torch for ARM and x86, and the weight layouts that they need.


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
