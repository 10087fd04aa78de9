"""Device memory of other processes on a GPU: freeing and closing it while another engine captures a graph."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest
import torch

from patience import PATIENCE
from slipstream.base.processes import child_environment
from slipstream.device.device import CudaDevice

pytestmark = pytest.mark.cuda

SIZE = 2**28
OTHER = """
import sys
from slipstream.device.device import CudaDevice
exported = CudaDevice(1).export_memory(2**20)
exported.tensor.fill_(7)
print(exported.give_handle().hex(), flush=True)
sys.stdin.read()
"""


def check_capture_beside(device, drop):
    """Captures a graph while another thread drops the last reference to memory, and replays it."""
    x = torch.zeros(8, device=device.torch_device)

    def work():
        x.add_(1)
        thread = threading.Thread(target=drop)
        thread.start()
        thread.join(PATIENCE)
        assert not thread.is_alive()
        x.add_(1)

    device.compute.stream.wait_stream(torch.cuda.current_stream())
    replay, _ = device.capture(work)
    for _ in range(2):
        device.compute.run(replay)
    device.wait_until_idle()
    assert x.tolist() == [4.0] * 8


def free_bytes(device):
    device.wait_until_idle()
    return torch.cuda.mem_get_info(device.torch_device)[0]


def test_freeing_exported_memory_breaks_no_capture():
    device = CudaDevice(1)
    kept = [device.export_memory(SIZE)]
    before = free_bytes(device)
    check_capture_beside(device, kept.clear)
    gc.collect()
    assert free_bytes(device) > before + SIZE // 2


def test_exported_memory_is_freed_after_queued_work():
    device = CudaDevice(1)
    exported = device.export_memory(SIZE)
    exported.tensor.fill_(0)
    device.wait_until_idle()
    with torch.cuda.stream(device.compute.stream):
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        exported.tensor.fill_(1)
    written = device.compute.record()
    assert not written.done()
    del exported
    assert written.done()


def test_closing_the_memory_of_another_process_breaks_no_capture():
    device = CudaDevice(1)
    command = [sys.executable, "-c", OTHER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child_environment()
    ) as other:
        handle = bytes.fromhex(other.stdout.readline())
        kept = [device.open_memory(handle)]
        check_capture_beside(device, kept.clear)
        other.stdin.close()
