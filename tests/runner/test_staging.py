"""HostRing, Upload and StagedTensor: numbers arrive complete and in order, and buffers are not rewritten early."""

from __future__ import annotations

import numpy as np
import pytest

from delayed_device import DelayedDevice
from slipstream.device.device import Device
from slipstream.runner.staging import HostRing, StagedTensor


@pytest.fixture(params=[0, 2])
def device(request):
    device = DelayedDevice(2) if request.param else Device(0, 1)
    yield device
    device.close()


def test_arrays_of_every_kind_arrive(device):
    ring = HostRing(3, 4096, device)
    arrays = [
        np.arange(5, dtype=np.int32),
        np.array([True, False, True]),
        np.arange(6, dtype=np.int64).reshape(2, 3),
        np.array([1.5], np.float32),
        np.array([2.5, np.inf]),
        np.zeros((0, 3), np.int32),
        np.arange(7, dtype=np.uint8),
    ]
    upload = ring.open()
    spans = [upload.put(array) for array in arrays]
    found = []
    upload.then(lambda: found.extend(upload.tensor(span).clone() for span in spans))
    upload.send(device.compute)
    device.compute.record().wait()
    for array, tensor in zip(arrays, found, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), array)


def test_a_buffer_is_reused_only_after_its_copy(device):
    ring = HostRing(2, 256, device)
    seen = []
    for i in range(50):
        upload = ring.open()
        span = upload.put(np.full(8, i, np.int32))
        upload.then(lambda u=upload, s=span: seen.append(int(u.tensor(s).sum())))
        upload.send(device.compute)
    device.compute.record().wait()
    assert seen == [8 * i for i in range(50)]


def test_an_arena_overflow_is_an_assertion_error(device):
    upload = HostRing(1, 64, device).open()
    upload.put(np.zeros(8, np.int64))
    with pytest.raises(AssertionError, match="stages"):
        upload.put(np.zeros(1, np.int64))


def test_a_staged_tensor_keeps_the_last_write_of_a_step(device):
    ring = HostRing(3, 1024, device)
    staged = StagedTensor((4, 2), np.float32, device, fill=-1)
    for values in ([(1, (5, 6)), (2, (7, 8)), (1, (9, 10))], [], [(0, (1, 2))]):
        for row, value in values:
            staged.write(row, value)
        upload = ring.open()
        staged.flush(upload)
        upload.send(device.compute)
    device.compute.record().wait()
    assert staged.device.tolist() == [[1, 2], [9, 10], [7, 8], [-1, -1]]


def sent(ring, device, *arrays):
    """Sends arrays and returns what the arena then holds of each."""
    upload = ring.open()
    spans = [upload.put(np.asarray(array, np.int32 if isinstance(array[0], int) else None)) for array in arrays]
    upload.send(device.compute)
    device.compute.record().wait()
    return [upload.tensor(span).tolist() for span in spans]


def test_what_the_device_has_is_not_copied_again(device):
    ring = HostRing(3, 1 << 17, device)
    assert sent(ring, device, [1, 2], [3.5]) == [[1, 2], [3.5]]
    ring.arena.fill_(0)  # a second copy would undo this
    assert sent(ring, device, [1, 2], [3.5]) == [[0, 0], [0]]
    assert sent(ring, device, [1, 2]) == [[0, 0]], "the first bytes are the same"
    assert sent(ring, device, [1, 3]) == [[1, 3]]
    assert sent(ring, device, [1, 3], [3.5]) == [[1, 3], [3.5]], "more bytes"
    for number in range(3):  # one for each buffer: what it held before, between arrays too, makes no difference
        sent(ring, device, np.arange(100) + number)
    assert sent(ring, device, [1, 3], [3.5]) == [[1, 3], [3.5]]
    for _ in range(3):
        ring.arena.fill_(0)
        assert sent(ring, device, [1, 3], [3.5]) == [[0, 0], [0]]
    large = np.arange(1 << 14)
    assert sent(ring, device, large) == [large.tolist()]
    assert sent(ring, device, [1, 3], [3.5]) == [[1, 3], [3.5]], "the large upload was copied over it"
    ring.arena.fill_(0)
    ring.forget()
    assert sent(ring, device, [1, 3], [3.5]) == [[1, 3], [3.5]]
