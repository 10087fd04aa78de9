"""GraphPool: work runs, is captured, is replayed; without graphs it just runs."""

from __future__ import annotations

from slipstream.device.device import Device
from slipstream.runner.graphs import GraphPool, bucket_sizes


class Recorder(Device):
    """Captures by keeping the closure, and replays by counting."""

    can_graph = True

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.replays = 0

    def capture(self, work):
        result = work()

        def replay() -> None:
            self.replays += 1

        return replay, result


def test_first_run_then_capture_then_replay():
    device, ran = Recorder(), []
    pool = GraphPool(device, 8, eager=False)
    for i in range(4):
        assert pool.run("a", lambda i=i: ran.append(i) or i) == (0 if i == 0 else 1)
    assert ran == [0, 1]  # once eagerly, once while captured
    assert device.replays == 3
    pool.run("b", lambda: None)
    assert pool.num_captured == 1


def test_eager_and_devices_without_graphs_just_run():
    for pool in (GraphPool(Recorder(), 8, eager=True), GraphPool(Device(0, 1), 8, eager=False)):
        assert [pool.run("a", lambda i=i: i) for i in range(3)] == [0, 1, 2]
        assert pool.bucket(3) is None


def test_buckets_cover_every_count_and_waste_little():
    for most in (1, 3, 17, 256, 1000):
        sizes = bucket_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most
    pool = GraphPool(Recorder(), 256, eager=False)
    for rows in range(1, 257):
        bucket = pool.bucket(rows)
        assert bucket is not None and rows <= bucket <= max(rows * 1.25, rows + 8, 2 * rows if rows < 16 else 0)
    assert pool.bucket(257) is None
