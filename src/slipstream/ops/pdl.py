"""Dependent launch: from Hopper on, a kernel may start while the one before it still runs.

It reads what no kernel writes, its weights above all, and then waits until the one before it is done, and with that one
all before it. So the rule: a kernel launched this way waits before it touches anything else, in every program.

The first one of a step waits before it lets the next one start. So what was made before it may be read early as well:
the lists of pages and of work, and keys of earlier steps. The list of work for last tokens alone is made in mid-step:
it is safe because a plain index_select of torch's, not launched this way, lies between `build_work_list` and attention.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_TOKENS = 256
"""Of a step whose kernels are launched so. With 256 rows it saves 7 us in a layer of the 0.6B, whose products are ours
there, and nothing in one of the 8B, where the library's stand between."""


def dependent(device: torch.device, num_tokens: int) -> dict[str, bool]:
    """Arguments of a launch: what the kernel is told, and what the driver is."""
    able = num_tokens <= MAX_TOKENS and _is_able(device)
    return {"DEPENDENT": able, "launch_pdl": able}


@cache
def _is_able(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def release_next(DEPENDENT: tl.constexpr) -> None:
    """Let the next kernel start as soon as all programs of this one have."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr) -> None:
    if DEPENDENT:
        gdc_wait()
