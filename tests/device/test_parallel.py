"""Side work gives what it would give in order; on CUDA it has its own stream, and a graph may hold it."""

from __future__ import annotations

import pytest
import torch

from slipstream.device.streams import execute_in_parallel, new_stream


def test_results_come_in_order():
    x = torch.arange(4.0)
    assert [r.tolist() for r in execute_in_parallel(lambda: x + 1, lambda: x * 2, lambda: x - 1)] == [
        [1.0, 2.0, 3.0, 4.0],
        [0.0, 2.0, 4.0, 6.0],
        [-1.0, 0.0, 1.0, 2.0],
    ]
    assert execute_in_parallel(lambda: 7) == (7,)


def test_an_error_of_one_is_the_callers():
    with pytest.raises(ZeroDivisionError):
        execute_in_parallel(lambda: 1, lambda: 1 // 0)


def test_streams_in_use_are_not_lent_again(monkeypatch):
    class Lent:
        """As torch's: one of 32, in turn."""

        made = 0

        def __init__(self, device=None):
            self.cuda_stream, Lent.made = Lent.made % 32, Lent.made + 1

    monkeypatch.setattr(torch.cuda, "Stream", Lent)
    kept = [new_stream()]
    for _ in range(31):
        new_stream()
    kept += [new_stream() for _ in range(31)]
    assert len({stream.cuda_stream for stream in kept}) == 32
    assert new_stream().cuda_stream in range(32), "all are in use: one is shared"


def slow(x: torch.Tensor) -> torch.Tensor:
    """Long enough that a reader that does not wait reads too early."""
    for _ in range(30):
        x = 0.9 * x + 0.1 * torch.tanh(x @ x / len(x))
    return x


@pytest.mark.cuda
def test_fork_and_join_keep_the_order_of_work():
    x = torch.randn(2048, 2048, device="cuda")
    expected = slow(slow(x) + 1), slow(slow(x) - 1)
    for _ in range(5):
        before = slow(x)  # still under way when the others begin
        found = execute_in_parallel(lambda b=before: slow(b + 1), lambda b=before: slow(b - 1))
        del before
        torch.full((2048, 2048), torch.nan, device="cuda")  # takes memory that was freed too early, if any was
        after = [f.clone() for f in found]
        del found
        for mine, theirs in zip(after, expected, strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.cuda
def test_a_graph_captures_fork_and_join():
    x = torch.randn(512, 512, device="cuda")

    def work() -> torch.Tensor:
        left, right = execute_in_parallel(lambda: slow(x), lambda: slow(x + 1))
        return left - right

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = work()
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn(512, 512, device="cuda"))
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out, slow(x) - slow(x + 1))


@pytest.mark.cuda
def test_side_work_has_a_stream_of_its_own():
    stream = torch.cuda.current_stream
    for _ in range(2):
        first, second, third = execute_in_parallel(stream, stream, stream)
        assert first == stream() and len({first.cuda_stream, second.cuda_stream, third.cuda_stream}) == 3
    assert execute_in_parallel(stream, stream)[1] == second, "streams are made once"
