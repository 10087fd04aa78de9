"""Programmatic dependent launch (PDL): from Hopper on, a kernel may start while the previous kernel still runs.

The kernel first reads data that no kernel writes, above all weights, then waits until the previous kernel, and with it
every earlier kernel, is complete. Rule: every program of a kernel launched this way waits before it touches other data.

Page tables, tile lists and keys of earlier steps are read early too. So kernels that write page tables or tile lists
never release the next one (`tests/ops/test_attention_tile_list.py`): it starts when they are complete, as does what
follows it.

Weights may be written in place between two steps: kernels without PDL gather a step's inputs, and start when all writes
before them are complete. A script that writes a weight by a kernel and multiplies by it at once must synchronise first.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_TOKENS = 256
"""Largest step whose kernels use PDL. At 256 rows PDL saves 7 us per layer of the 0.6B, which runs our GEMMs there, and
nothing for the 8B, which runs cuBLAS between our kernels."""


MAX_PROGRAMS = 32768
"""Largest grid. Each program waits, which costs more than an early start gains if there are very many: a GEMV for the
LM head of the 8B, 75,968 programs, took 294 us behind the layers, and 270 without PDL (H200)."""


def dependent(device: torch.device, num_tokens: int, num_programs: int = 1) -> dict[str, bool]:
    """Launch arguments: DEPENDENT for the kernel, launch_pdl for the driver."""
    enabled = num_tokens <= MAX_TOKENS and num_programs <= MAX_PROGRAMS and _supports_pdl(device)
    return {"DEPENDENT": enabled, "launch_pdl": enabled}


@cache
def _supports_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def release_next(DEPENDENT: tl.constexpr) -> None:
    """Lets the next kernel start once all programs of this one have started."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr) -> None:
    if DEPENDENT:
        gdc_wait()
