"""Tensors that are made and freed in every step take no new pages from the system."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from child import child_env
from slipstream.device.device import keep_freed_memory, open_device

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


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("pools", [False, True])
def test_a_cache_takes_memory_when_it_is_used_and_not_before(pools):
    """So does a buffer of the host. An idle server must not take what its largest cache would."""
    size = 40 << 20
    with contextlib.closing(open_device("cpu", 0, 1)) as device:
        if pools:
            device.enable_sleep()
        before = resident()
        held = [device.cache_zeros((size // 4,), torch.float32) for _ in range(20)]
        held += [device.zeros((size // 4,), torch.float32) for _ in range(20)]
        held += [device.host_buffer(size)[1] for _ in range(20)]
        assert resident() - before < 8 * size
        held[0].fill_(1)
        assert resident() - before > size // 2


def heap_faults() -> list[int]:
    """Page faults of large pieces that a thread takes from the C library and frees, again and again, while small ones
    fill most of the heap before them."""
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.free.argtypes = [ctypes.c_void_p]
    small = [library.malloc(100_000) for _ in range(450)]
    for piece in small[1::2]:
        library.free(piece)
    found = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        large = [library.malloc(PAGES * 4096) for _ in range(NUM_TENSORS)]
        for piece in large:
            ctypes.memset(piece, 1, PAGES * 4096)
        for piece in large:
            library.free(piece)
        found.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
    for piece in small[::2]:
        library.free(piece)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="an option of the GNU C library")
def test_the_last_heap_of_a_thread_stays_when_it_is_empty():
    keep_freed_memory()
    with ThreadPoolExecutor(1) as pool:
        first, *later = pool.submit(heap_faults).result()
    assert max(later) < NUM_TENSORS * PAGES // 8, (first, later)


PROBE = """
import os, sys

class AtTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("MIMALLOC_PURGE_DELAY"))
            sys.exit()

sys.meta_path.insert(0, AtTorch())
import slipstream.{module}
"""


@pytest.mark.parametrize("module", ["api.llm", "engine.build", "ranks.process", "api.evaluation"])
@pytest.mark.parametrize("given", [None, "7"])
def test_the_allocator_of_torch_keeps_freed_memory_unless_the_user_has_set_it(module, given):
    env = {name: value for name, value in child_env().items() if name != "MIMALLOC_PURGE_DELAY"}
    if given is not None:
        env["MIMALLOC_PURGE_DELAY"] = given
    code = PROBE.format(module=module)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [given or "1000"]
