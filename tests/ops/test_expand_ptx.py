"""The PTX that expands 4-bit and FP8 numbers, run by a small interpreter of its instructions."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")


def run_ptx(text: str, inputs: list[int], num_outputs: int) -> list[int]:
    """Executes straight-line PTX over 32-bit registers: $0 ... are outputs, then inputs."""
    registers = {f"${num_outputs + number}": value for number, value in enumerate(inputs)}

    def value_of(name: str) -> int:
        return int(name, 0) if name[0].isdigit() else registers[name]

    def halves(value: int) -> torch.Tensor:
        words = [value & 0xFFFF, value >> 16]
        return torch.tensor([w - (w >> 15 << 16) for w in words], dtype=torch.int16).view(torch.bfloat16)

    for line in re.findall(r"^\s*([a-z0-9.]+ [^;]+);", text, re.M):
        operation, _, operands = line.partition(" ")
        if operation == ".reg":
            continue
        target, *names = [name.strip() for name in operands.split(",")]
        given = [value_of(name) for name in names]
        if operation == "mov.b32":
            made = given[0]
        elif operation == "shr.u32":
            made = given[0] >> given[1]
        elif operation == "and.b32":
            made = given[0] & given[1]
        elif operation == "prmt.b32":
            data = (given[0] | given[1] << 32).to_bytes(8, "little")
            assert not given[2] & 0x8888, "no sign replication"
            made = int.from_bytes(bytes(data[given[2] >> 4 * n & 7] for n in range(4)), "little")
        elif operation == "lop3.b32":
            a, b, c, table = given
            bits = (((a >> n & 1) << 2 | (b >> n & 1) << 1 | c >> n & 1) for n in range(32))
            made = sum((table >> index & 1) << n for n, index in enumerate(bits))
        else:
            assert operation in ("fma.rn.bf16x2", "mul.rn.bf16x2"), operation
            a, b, *rest = (halves(value).double() for value in given)
            product = a * b + rest[0] if rest else a * b
            words = product.bfloat16().view(torch.int16).tolist()
            made = (words[0] & 0xFFFF) | (words[1] & 0xFFFF) << 16
        registers[target] = made
    return [registers[f"${number}"] for number in range(num_outputs)]


def bfloat16_pair(low: float, high: float) -> int:
    words = torch.tensor([low, high], dtype=torch.bfloat16).view(torch.int16).tolist()
    return (words[0] & 0xFFFF) | (words[1] & 0xFFFF) << 16


@pytest.mark.parametrize("zeros", [(0, 0), (8, 8), (15, 3)])
def test_4_bits_become_numbers_less_their_zero(zeros: tuple[int, int]) -> None:
    from slipstream.ops.gemm.quantized.expand import BFLOAT16_OF_4_BITS

    codes = [0x0F, 0x31, 0xA8, 0xE5]  # bytes in the order of their columns
    packed = int.from_bytes(bytes(codes), "little")
    low, high = (bfloat16_pair(-128 - zero, -128 - zero) for zero in zeros)
    found = run_ptx(BFLOAT16_OF_4_BITS.value, [packed, low, low, high, high], 4)
    lows, highs = [code & 15 for code in codes], [code >> 4 for code in codes]
    expected = [
        bfloat16_pair(*(number - zero for number in part[first : first + 2]))
        for part, zero in ((lows, zeros[0]), (highs, zeros[1]))
        for first in (0, 2)
    ]
    assert found == expected


def test_fp8_becomes_bfloat16() -> None:
    """All numbers, also subnormal ones, of both signs; not NaN."""
    from slipstream.ops.gemm.quantized.expand import BFLOAT16_OF_FP8

    codes = [code for code in range(256) if code & 127 != 127]
    codes += codes[: -len(codes) % 4]
    numbers = torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
    for first in range(0, len(codes), 4):
        packed = int.from_bytes(bytes(codes[first : first + 4]), "little")
        a, b, c, d = numbers[first : first + 4]
        assert run_ptx(BFLOAT16_OF_FP8.value, [packed], 2) == [bfloat16_pair(a, b), bfloat16_pair(c, d)]
