"""The GPUs of this process, and which of them a rank takes, without loading torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

SHARE_VARIABLE = "SLIPSTREAM_RANKS_SHARE_GPU"
"""Set to 1, ranks may share a GPU, for tests on a machine with one: NCCL passes data through sockets of the host."""


def visible_gpus(devices: Path = Path("/dev"), environ: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs of this process as entries of CUDA_VISIBLE_DEVICES. `devices`: the folder of the device files."""
    if (listed := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [entry.strip() for entry in listed.split(",") if entry.strip() not in ("", "-1")]
    numbers = (path.name.removeprefix("nvidia") for path in devices.glob("nvidia*"))
    return [str(index) for index in range(sum(number.isdecimal() for number in numbers))]  # CUDA counts from 0


def ranks_share_gpu(environ: Mapping[str, str] = os.environ) -> bool:
    return environ.get(SHARE_VARIABLE) == "1"


def rank_environment(rank: int, gpus: list[str]) -> dict[str, str]:
    """The variables of the process of one rank: it sees its own GPU only."""
    return {"CUDA_VISIBLE_DEVICES": gpus[rank % len(gpus)]}
