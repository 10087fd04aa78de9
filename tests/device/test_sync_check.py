"""The sync detector finds what makes a host wait, says where, and leaves the rest alone."""

from __future__ import annotations

import pytest
import torch

from slipstream.device.sync_check import sync_allowed, watch

WAITS = {
    "item()": lambda x: x.sum().item(),
    "item() ": lambda x: bool(x.sum() > 0),
    "item()  ": lambda x: int(x[0]),
    "a mask as an index": lambda x: x[x > 0],
    "nonzero()": lambda x: x.nonzero(),
    "unique()": lambda x: x.unique(),
    "masked_select()": lambda x: x.masked_select(x > 0),
    "repeat_interleave() without output_size": lambda x: x.repeat_interleave(x.long()),
    "equal()": lambda x: x.equal(x),
}
FINE = {
    "arithmetic": lambda x: (x * 2).cumsum(0).sort(),
    "index": lambda x: x[torch.tensor([0, 1])],
    "where": lambda x: torch.where(x > 0, x, 0),
    "repeat": lambda x: x.repeat_interleave(x.long(), output_size=6),
    "copy": lambda x: torch.zeros(3).copy_(x, non_blocking=True),
}


@pytest.mark.parametrize("what", WAITS)
def test_a_wait_is_found_with_its_place(what):
    with watch() as log:
        WAITS[what](torch.tensor([1.0, 2.0, 3.0]))
    (sync,) = log.found
    assert sync.what == what.strip() and sync.count == 1
    assert "test_sync_check.py" in sync.stack[0] and "in <lambda>" in sync.stack[0]
    assert "torch" not in sync.stack[0].rsplit("/", 2)[1]


@pytest.mark.parametrize("what", FINE)
def test_what_does_not_wait_is_left_alone(what):
    with watch() as log:
        FINE[what](torch.tensor([1.0, 2.0, 3.0]))
    assert not log.found and not log.allowed


def test_waits_at_one_place_are_one_finding():
    with watch() as log:
        for _ in range(5):
            torch.ones(1).item()
    (sync,) = log.found
    assert sync.count == 5
    assert str(sync).startswith("item() (5 times, ") and sync.stack[0] in str(sync)


def test_a_wait_with_a_reason_is_kept_apart():
    with watch() as log, sync_allowed("the test reads its result"):
        torch.ones(1).item()
    assert not log.found
    assert [sync.allowed for sync in log.allowed] == ["the test reads its result"]


def test_nothing_is_watched_after_the_block():
    with watch() as log:
        pass
    torch.ones(1).item()
    assert not log.found


@pytest.mark.cuda
def test_copies_that_block_are_found_on_cuda():
    pinned, pageable = torch.ones(4).pin_memory(), torch.ones(4)
    on_device = pinned.to("cuda", non_blocking=True)

    def found(work):
        with watch() as log:
            work()
        return [sync.what for sync in log.found]

    assert found(lambda: pinned.to("cuda", non_blocking=True)) == []
    assert found(lambda: on_device + 1) == []
    assert "copy from cpu to cuda from memory that is not pinned" in found(
        lambda: pageable.to("cuda", non_blocking=True)
    )
    assert "copy from cuda to cpu without non_blocking" in found(on_device.cpu)
    assert found(lambda: torch.tensor([1, 2], device="cuda"))
    assert "item()" in found(on_device[0].item)
