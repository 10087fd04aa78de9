"""ResultRing: how results are copied from the device to the host."""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from patience import PATIENCE
from slipstream.device.device import Device
from slipstream.device.streams import ThreadedStream
from slipstream.runner.results import ResultRing, lay_out, pack, result_shape, view_draws


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_buffer_grows_without_writing_to_the_device():
    """The host grows the buffer outside the compute stream: a write there might come after the step's results."""
    ring = ResultRing(2, 16, Device(0, 1))
    with Ops() as ops:
        span = ring.open(lay_out([("vectors", (8, 64), np.float32)]))
    assert set(ops.names) <= {"empty", "lift_fresh", "alias"}, f"{ops.names}"
    span.write({"vectors": torch.arange(512.0).view(8, 64)})
    sent = ring.send()
    assert np.array_equal(span.find(sent).view(np.float32), np.arange(512, dtype=np.float32))


def test_lines_can_be_written_in_parts():
    ring = ResultRing(2, 16, Device(0, 1))
    span = ring.open(lay_out([("none", (0, 3), np.float32), ("vectors", (8, 64), np.float32)]))
    wanted = torch.arange(512.0).view(8, 64)
    span.write_part("none", 0, torch.zeros(0, 3))
    for first, part in ((0, wanted[:3]), (3, wanted[3:])):
        span.write_part("vectors", first, part)
    assert np.array_equal(span.find(ring.send()).view(np.float32), np.arange(512, dtype=np.float32))


class CountsCopies(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


def test_results_that_a_kernel_wrote_to_their_places_are_not_copied():
    """With and without drafts; a field that no kernel writes is."""
    for has_drafts in (False, True):
        shape = result_shape(5, 0, np.float32, has_drafts=has_drafts)
        buffer = torch.zeros(shape.num_bytes, dtype=torch.uint8)
        views = view_draws(shape, buffer)
        assert len(views.kept) == 5 * has_drafts
        views.tokens.copy_(torch.arange(5))
        for flags in (views.failed, views.kept):
            flags.fill_(True)
        logprobs = dict(chosen=torch.rand(5), rank=torch.arange(5), top_ids=torch.zeros(5, 0), top=torch.zeros(5, 0))
        results = dict(tokens=views.tokens, failed=views.failed, kept=views.kept, **logprobs)
        with CountsCopies() as copies:
            pack(results, shape, buffer)
        assert copies.num == 2, "chosen and rank"
        fresh = torch.zeros_like(buffer)
        with CountsCopies() as copies:
            pack(results, shape, fresh)
        assert copies.num == 4 + has_drafts and fresh.equal(buffer)


def test_a_result_is_independent_of_the_buffer():
    """A committed result stays valid although its buffer is reused."""
    ring = ResultRing(1, 64, Device(0, 1))
    results = []
    for number in (3, 5):
        span = ring.open(result_shape(2, None, np.float32))
        span.write({"tokens": torch.tensor([number, 7]), "failed": torch.tensor([number == 3, False])})
        results.append(span.handle(ring.send()).wait())
    assert [result.tokens.tolist() for result in results] == [[3, 7], [5, 7]]
    assert [result.failed.tolist() for result in results] == [[True, False], [False, False]]


class Held(ThreadedStream):
    """Copies run when a test waits for them; before each the content of the buffer is recorded."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.source = torch.zeros(0)
        self.left: list[float] = []
        super().__init__("held-copies")

    def before(self) -> None:
        assert self.gate.wait(PATIENCE), "nothing waits for the copies"
        self.left.append(float(self.source[0]))


class Letting(ThreadedStream):
    """Runs the copies when it has to wait for one."""

    def __init__(self, copies: Held) -> None:
        self.copies = copies
        super().__init__("letting")

    def wait_for(self, event) -> None:
        if not event.done():
            self.run(self.copies.gate.set)
        super().wait_for(event)


def test_a_buffer_is_written_again_after_its_copy_and_the_host_waits_for_neither():
    device = Device(0, 1)
    device.copy = copies = Held()
    device.compute = Letting(copies)
    ring = ResultRing(1, 16, device)
    copies.source = ring.buffers[0].on_device.view(torch.float32)
    for number in (1.0, 2.0):  # the second comes while the first is held back
        span = ring.open(lay_out([("numbers", (4,), np.float32)]))
        device.compute.run(lambda span=span, n=number: span.write({"numbers": torch.full((4,), n)}))
        sent = ring.send()
    assert not copies.left
    copies.flush()
    device.compute.record().wait()
    copies.gate.set()
    copies.record().wait()
    # before each copy the stream waits for what is to be copied, so every second is one
    assert copies.left[1::2] == [1.0, 2.0]
    assert span.find(sent).view(np.float32).tolist() == [2.0] * 4
    device.close()
