"""Compiled CPU kernels that a wheel brings along, so that a machine needs no C compiler.

`scripts/wheel` compiles the C files of the ops once for each level of an architecture, into `ops/prebuilt/`. A
level is a set of instructions; the best one that the processor has is used. A checkout has no such files.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Set
from pathlib import Path
from typing import NamedTuple

# No -ffast-math: linking with it disables subnormal numbers for the whole process. No contraction of multiply and add:
# the source alone defines the bits of a result (native_math.h), so every copy of a loop gives the same ones.
FLAGS = (
    "-O3", "-fPIC", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd",
)  # fmt: skip
FOLDER = Path(__file__).parents[1] / "prebuilt"
HEADERS = Path(__file__).parent
INCLUDES = ("-I", str(HEADERS))


class Level(NamedTuple):
    name: str
    flags: tuple[str, ...]  # of the compiler
    needs: frozenset[str]  # names of processor features in /proc/cpuinfo


def _level(name: str, flags: str, needs: str) -> Level:
    return Level(name, tuple(flags.split()), frozenset(needs.split()))


_AVX2 = "avx avx2 bmi1 bmi2 f16c fma movbe"
_AVX512 = f"{_AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"
_AVX512_FLAGS = "-march=x86-64-v4 -mprefer-vector-width=512"
_VNNI, _VNNI_FLAGS = f"{_AVX512} avx512_vnni", f"{_AVX512_FLAGS} -mavx512vnni"
LEVELS = {
    "x86_64": (
        _level("amx", f"{_VNNI_FLAGS} -mamx-tile -mamx-int8 -mamx-bf16", f"{_VNNI} amx_tile amx_int8 amx_bf16"),
        _level("avx512vnni", _VNNI_FLAGS, _VNNI),
        _level("avx512", _AVX512_FLAGS, _AVX512),
        _level("avxvnni", "-march=x86-64-v3 -mavxvnni", f"{_AVX2} avx_vnni"),
        _level("avx2", "-march=x86-64-v3", _AVX2),
        _level("baseline", "-march=x86-64", ""),
    ),
    "aarch64": (
        _level("dotprod", "-march=armv8.2-a+dotprod", "asimddp asimdrdm atomics"),
        _level("baseline", "-march=armv8-a", ""),
    ),
}
"""By architecture, the best first."""


def sources(ops: Path) -> list[Path]:
    """The C files in the folders of the ops; their names differ."""
    return sorted(ops.rglob("*.c"), key=lambda path: path.name)


def find() -> Path | None:
    """The library for this processor; None if there is none, as in a checkout. A wheel may lack some levels."""
    machine = platform.machine()
    paths = (FOLDER / f"{machine}-{level.name}.so" for level in usable_levels(machine, processor_features()))
    return next((path for path in paths if path.exists()), None)


def usable_levels(machine: str, features: Set[str]) -> list[Level]:
    """Levels whose instructions the processor has, the best first."""
    return [level for level in LEVELS.get(machine, ()) if level.needs <= features]


@functools.cache
def processor_features() -> frozenset[str]:
    """Of the first processor, as /proc/cpuinfo names them; empty on other systems."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            found = next((text for text in file if text.lower().startswith(("flags", "features"))), "")
    except OSError:
        return frozenset()
    return frozenset(found.partition(":")[2].split())
