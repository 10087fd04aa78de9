"""Tensors that are made and freed in every step take no new pages from the system."""

from __future__ import annotations

import resource
import sys

import pytest
import torch

from slipstream.device.device import open_device

NUM_TENSORS, PAGES = 8, 1024  # of 4 KiB, in a tensor


def faults() -> int:
    """Page faults of tensors that are made and written, and freed together: more than a heap keeps by itself."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    tensors = [torch.ones(PAGES * 1024) for _ in range(NUM_TENSORS)]
    del tensors
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@pytest.mark.skipif(sys.platform != "linux", reason="an option of the GNU C library")
def test_freed_tensors_leave_their_pages_for_the_next_ones():
    device = open_device("cpu", 1, 1)
    found: list[int] = []
    device.run_and_wait(lambda: found.extend(faults() for _ in range(12)))
    device.close()
    assert min(found[6:]) < NUM_TENSORS * PAGES // 8, found
