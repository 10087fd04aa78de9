"""SdpaAttention: how a batch is cut into calls, and that nothing is read back from the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hand_batch import HandRunner
from hand_load import load
from slipstream.nn.context import BatchView
from slipstream.nn.sdpa import split_by_width
from tiny import write_tiny


def test_rows_of_like_width_share_a_call() -> None:
    assert split_by_width([], 16, 10**6) == []
    assert split_by_width([7], 16, 10**6) == [(0, 1, 7)]
    assert split_by_width([7, 3, 9, 8], 16, 10**6) == [(0, 4, 9)]


def test_a_long_row_gets_its_own_call_when_padding_costs_more() -> None:
    assert split_by_width([2, 2, 500, 2, 2], 16, 10**6) == [(0, 2, 2), (2, 3, 500), (3, 5, 2)]
    assert split_by_width([500, 499, 2], 16, 10**6) == [(0, 2, 500), (2, 3, 2)]


def test_no_call_gathers_more_than_its_share_unless_one_row_does():
    assert split_by_width([40, 40, 40, 41, 90], 10**6, 90) == [(0, 2, 40), (2, 4, 41), (4, 5, 90)]
    assert split_by_width([100, 100], 10**6, 90) == [(0, 1, 100), (1, 2, 100)]


def test_every_row_is_in_exactly_one_run_that_is_wide_enough() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        widths = torch.randint(1, 400, (37,), generator=generator).tolist()
        runs = split_by_width(widths, 16, 10**6)
        assert [row for start, stop, _ in runs for row in range(start, stop)] == list(range(37))
        assert all(width == max(widths[start:stop]) for start, stop, width in runs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), "qwen3")


def mixed_batch(runner: HandRunner) -> BatchView:
    runner.run({"a": [1, 2, 3, 4, 5], "b": [6, 7]})
    return runner.batch({"a": [9], "b": [8, 9, 10], "c": [11, 12, 13]})


def test_forward_reads_no_device_value(folder: Path) -> None:
    runner = HandRunner(load(folder), slack=2)
    batch = mixed_batch(runner)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = BatchView(
            *(mode.from_tensor(x) for x in (batch.ids, batch.positions, batch.lengths)),
            *(tuple(mode.from_tensor(x) for x in xs) for xs in (batch.slots, batch.page_tables)),
            batch.num_tokens,
            batch.max_lengths,
            batch.num_single,
        )
        with pytest.raises(DataDependentOutputException):
            int(fake.lengths[0])  # the net itself works
        hidden = runner.model(runner.context(fake))
        assert runner.model.logits(hidden).shape == (7, 304)


class _Count(TorchDispatchMode):
    """Counts kernels, not views."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if not func.is_view:
            self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_layer_of_a_decode_step_takes_few_kernels(tmp_path: Path) -> None:
    """Small eager ops are a third of a CPU step: an added one must be noticed."""
    counts = []
    for layers in (1, 2):
        runner = HandRunner(load(write_tiny(tmp_path / str(layers), num_hidden_layers=layers)))
        runner.run({"a": [1, 2, 3], "b": [4, 5]})
        context = runner.context(runner.batch({"a": [6], "b": [7]}))
        with _Count() as count, torch.no_grad():
            runner.model(context)
        counts.append(len(count.calls))
    assert counts[1] - counts[0] <= 32
