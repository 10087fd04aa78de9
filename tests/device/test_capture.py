"""A graph may hold what was never used before it: kernels and libraries are loaded while it is captured."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from slipstream.device.device import CudaDevice
from slipstream.runner.graphs import GraphPool

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.cuda


@triton.jit
def _never_seen_kernel(x, out, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place, mask=place < size, other=0.0)
    tl.store(out + place, value * 3 + 1, mask=place < size)


def by_kernel(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    _never_seen_kernel[(triton.cdiv(len(x), 128),)](x, out, len(x), BLOCK=128)
    return out


def replayed(device: CudaDevice, work) -> torch.Tensor:
    """Captures what no one has run, and replays it for inputs that came later."""
    x = torch.ones(1000, device="cuda")
    torch.cuda.synchronize()
    replay, out = device.capture(lambda: work(x))
    x.copy_(torch.linspace(-0.9, 0.9, 1000, device="cuda"))
    torch.cuda.synchronize()
    device.compute.run(replay)
    torch.cuda.synchronize()
    return out


def test_a_kernel_of_ours():
    out = replayed(CudaDevice(1), by_kernel)
    torch.testing.assert_close(out, torch.linspace(-0.9, 0.9, 1000, device="cuda") * 3 + 1)


def test_kernels_of_torch_loaded_or_compiled_at_their_first_use():
    out = replayed(CudaDevice(1), lambda x: torch.erfinv(x) + torch.special.bessel_j1(x))
    x = torch.linspace(-0.9, 0.9, 1000, device="cuda")
    torch.testing.assert_close(out, torch.erfinv(x) + torch.special.bessel_j1(x))


def test_a_library_that_this_thread_has_not_used():
    device, found = CudaDevice(1), []

    def capture() -> None:
        torch.set_grad_enabled(False)
        found.append(replayed(device, lambda x: x.view(10, 100) @ x.view(100, 10)))

    thread = threading.Thread(target=capture)
    thread.start()
    thread.join()
    x = torch.linspace(-0.9, 0.9, 1000, device="cuda")
    torch.testing.assert_close(found[0], x.view(10, 100) @ x.view(100, 10), rtol=1e-3, atol=1e-3)


def test_work_that_cannot_be_captured_is_run_and_the_rest_goes_on(caplog):
    device = CudaDevice(1)
    pool = GraphPool(device, 8, 64, eager=False)
    x = torch.arange(8.0, device="cuda")
    torch.cuda.synchronize()
    results = []

    def run(key, work) -> None:
        device.compute.run(lambda: results.append(pool.run(key, work)))

    with pool.starting(capture=True):
        run("usual", lambda: x * 2)
    with caplog.at_level(logging.WARNING, "slipstream"):
        run("waits", lambda: x + x.sum().item())
    run("later", lambda: torch.zeros(1 << 20, device="cuda")[:8] + x)
    run("usual", lambda: None)
    torch.cuda.synchronize()
    usual, waits, later, again = results
    assert len(caplog.records) == 1 and pool.num_captured == 1
    assert usual is again and usual.tolist() == (2 * x).tolist()
    assert waits.tolist() == (x + 28).tolist() and later.tolist() == x.tolist()
    torch.cuda.empty_cache()
    torch.testing.assert_close(replayed(CudaDevice(1), lambda x: x + 1), torch.linspace(0.1, 1.9, 1000, device="cuda"))
