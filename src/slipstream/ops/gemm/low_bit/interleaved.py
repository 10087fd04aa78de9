"""Low-bit GEMM with our C kernel, on machines with a C compiler.

Weights keep the values of the file; their order changes: four rows are interleaved. Q5_K and Q6_K take a byte per
weight, which the kernel reads faster than 5 or 6 bits. `native_low_bit_layout.h` describes the layouts.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from slipstream.ops.gemm.dequant import BLOCK, BLOCK_KINDS, K_KINDS, KINDS, SUPERBLOCK, split_k
from slipstream.ops.gemm.low_bit.kernels import DynamicQuant, Int4Pack, Kernel, make_planes, multiply
from slipstream.ops.platform import native
from slipstream.ops.platform.native import RowLayout, WeightRows, join_rows

_LAYOUTS = {
    "Q4_0": RowLayout.Q4_0,
    "Q4_1": RowLayout.FOUR_BITS,
    "Q8_0": RowLayout.EIGHT_BITS,
    "Q4_K": RowLayout.Q4_K,
    "Q5_K": RowLayout.Q5_K,
    "Q6_K": RowLayout.Q6_K,
}
# bytes per 256 columns of a row: weights, scales and offsets
_NUM_BYTES = {
    RowLayout.Q4_0: 128 + 16,
    RowLayout.FOUR_BITS: 128 + 16 + 16,
    RowLayout.EIGHT_BITS: 256 + 16,
    RowLayout.Q4_K: 128 + 20,
    RowLayout.Q5_K: 256 + 20,
    RowLayout.Q6_K: 256 + 18,
}


class Interleaved:
    """Activations are quantized to 16 bits, one scale per 32 of a row, so a row's result is independent of other
    rows."""

    name = "interleaved"
    rounding = ""
    kinds = KINDS
    _ROWS = 4
    _CHUNK = 4096  # rows packed at a time: K-quants need a byte per weight meanwhile

    def suits_machine(self) -> bool:
        """Compiles the kernels if necessary, so that the first run gives the same outputs as later ones."""
        return native.build()

    def pack(self, kind: str, *parts: torch.Tensor) -> _InterleavedWeight:
        if kind in K_KINDS:
            raw = join_rows(parts)
            data, scales = _packed_in_chunks(raw, self._CHUNK, lambda rows: _pack_k(rows, kind))
            num_columns = raw.shape[1] // K_KINDS[kind] * SUPERBLOCK
            return _InterleavedWeight(data, scales, None, _LAYOUTS[kind], num_columns, len(raw))
        library = native.library()
        assert library is not None
        head, size = BLOCK_KINDS[kind]
        if any(len(part) % self._ROWS for part in parts[:-1]):
            parts = (join_rows(parts),)
        groups, num_rows = parts[0].shape[1] // size, sum(map(len, parts))
        num_blocks = -(-num_rows // self._ROWS)
        data = torch.empty(num_blocks, groups, (size - head) // 4, 4, dtype=torch.int32)
        scale = torch.empty(num_blocks, groups, 1, 4, dtype=torch.half)
        offset = torch.empty_like(scale) if head == 4 else None
        first = 0  # block of four rows
        for part in parts:
            raw = part.contiguous()
            out = [None if whole is None else whole[first:].data_ptr() for whole in (data, scale, offset)]
            library.slip_low_bit_pack(raw.data_ptr(), *out, head, size - head, len(raw), groups)
            first += len(raw) // self._ROWS
        return _InterleavedWeight(data, scale, offset, _LAYOUTS[kind], groups * BLOCK, num_rows)

    def num_bytes(self, kind: str, num_rows: int, num_columns: int) -> int:
        num_bytes = _NUM_BYTES[_LAYOUTS[kind]] * num_columns // SUPERBLOCK
        return -(-num_rows // self._ROWS) * self._ROWS * num_bytes


@dataclass(frozen=True, slots=True)
class _InterleavedWeight:
    data: torch.Tensor  # [rows / 4, groups, 4 or 8, 4] int32
    scale: torch.Tensor  # [rows / 4, groups, 1, 4] float16; K-quants: [rows / 4, groups / 8, bytes] uint8
    offset: torch.Tensor | None  # [rows / 4, groups, 1, 4] float16; Q4_1 only
    layout: RowLayout
    num_columns: int
    num_rows: int

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        library = native.library()
        assert library is not None
        if type(x) is not torch.Tensor:
            return x.new_empty(x.shape[0], self.num_rows)  # a meta or fake tensor: shape without data
        x = x.contiguous()
        out = torch.empty(x.shape[0], self.num_rows, dtype=torch.float32)
        found = library.slip_low_bit(
            x.data_ptr(),
            self.data.data_ptr(),
            self.scale.data_ptr(),
            None if self.offset is None else self.offset.data_ptr(),
            out.data_ptr(),
            self.layout,
            x.shape[0],
            self.num_rows,
            self.num_columns // BLOCK,
        )
        if not found:
            raise MemoryError("out of memory for the quantized activations of a low-bit GEMM")
        return out

    def lookup(self, ids: torch.Tensor) -> torch.Tensor | None:
        library = native.library()
        assert library is not None
        if type(ids) is not torch.Tensor or not ids.is_contiguous():
            return None
        out = torch.empty(len(ids), self.num_columns, dtype=torch.float32)
        found = library.slip_low_bit_lookup(
            ids.data_ptr(),
            self.data.data_ptr(),
            self.scale.data_ptr(),
            None if self.offset is None else self.offset.data_ptr(),
            out.data_ptr(),
            self.layout,
            len(ids),
            self.num_rows,
            self.num_columns // BLOCK,
        )
        if not found:
            raise IndexError(f"a token id is not in the embedding of {self.num_rows} rows")
        return out

    def run(self) -> WeightRows:
        return WeightRows(self.data, self.num_rows, self.layout, self.scale, self.offset)


Pack = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _packed_in_chunks(raw: torch.Tensor, chunk: int, pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and scales of all rows. `chunk` is a multiple of 4."""
    first = pack(raw[:chunk])
    if len(raw) <= chunk:
        return first
    data, scales = (part.new_empty(-(-len(raw) // 4), *part.shape[1:]) for part in first)
    data[: len(first[0])], scales[: len(first[1])] = first
    for row in range(chunk, len(raw), chunk):
        more = pack(raw[row : row + chunk])
        at = slice(row // 4, row // 4 + len(more[0]))
        data[at], scales[at] = more
    return data, scales


def _pack_k(raw: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = split_k(raw, kind)
    values = blocks.values.flatten(1, 2)
    if kind == "Q4_K":
        values = values[..., :16] | values[..., 16:] << 4
    data = _interleave(values.contiguous().view(torch.int32))
    halves = [blocks.d]
    # two bytes per block: scale and minimum, or the scales of the first and last 16 columns
    pairs = blocks.scale.view(*blocks.scale.shape[:2], 8, -1)
    if blocks.dmin is not None and blocks.minimum is not None:
        halves.append(-blocks.dmin)
        pairs = torch.stack((blocks.scale, blocks.minimum), -1)
    scales = [_interleave(half).view(torch.uint8).flatten(2) for half in halves]
    scales.append(_interleave(pairs.flatten(2)).view(torch.uint8).flatten(2))
    return data, torch.cat(scales, -1)


def _interleave(rows: torch.Tensor) -> torch.Tensor:
    """[rows, groups, n] to [rows / 4, groups, n, 4 rows], padded with rows of zeros."""
    missing = -len(rows) % 4
    if missing:
        rows = torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:])))
    return rows.unflatten(0, (-1, 4)).movedim(1, -1).contiguous()


# Chooses the low-bit kernel of this machine: the first kernel whose test GEMM is correct.

log = logging.getLogger(__name__)


@functools.cache
def find_kernel() -> Kernel | None:
    """The kernel for this machine: our C kernel, compiled if necessary; else a torch kernel or None, with a warning."""
    kernels: tuple[Kernel, ...] = (Interleaved(), DynamicQuant(), Int4Pack())
    for kernel in kernels:
        if kernel.suits_machine() and is_correct(kernel):
            if kernel.rounding:
                log.warning(
                    "the C kernels are not available (%s), so low-bit GEMMs round activations to %s and outputs differ "
                    "from those of the exact weights; install gcc, or use dequantize=True",
                    native.state(),
                    kernel.rounding,
                )
            return kernel
    log.warning("no low-bit kernel supports this machine; low-bit weights are dequantized")
    return None


def is_correct(kernel: Kernel) -> bool:
    """Runs the kernel on a small weight and compares with the reference."""
    rows, columns = torch.arange(BLOCK).unsqueeze(1), torch.arange(2 * BLOCK)
    raw = (rows * 37 + torch.arange(40) * 11).remainder(256).to(torch.uint8)
    heads = torch.tensor([0.25, -1.5], dtype=torch.float16).view(torch.uint8)
    raw[:, :4] = raw[:, 20:24] = heads  # scale and minimum of two blocks
    x = (0.4 + (columns * 0.7).sin()).expand(3, -1) * torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float32)
    try:
        found = kernel.pack("Q4_1", raw).multiply(x)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    expected = multiply(x, make_planes(raw, "Q4_1"))
    return bool((found - expected).norm() < 0.03 * expected.norm())
