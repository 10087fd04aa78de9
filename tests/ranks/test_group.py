"""Group: what hosts tell each other at start, and a rank that ends meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from slipstream.base.errors import EngineDead
from slipstream.device.collectives import DryGroup, Group, announce_end


def test_ranks_share_numbers_and_tensors(tmp_path):
    def run(rank: int):
        group = Group(rank, 2, tmp_path / "store")
        if rank == 0:
            group.send("choices", b"\x00\xff")
        told = group.share("room", 10 + rank), group.receive("choices")
        return *told, group.all_reduce(torch.ones(2)).tolist(), group.broadcast(torch.full((2,), 5.0 + rank)).tolist()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [([10, 11], b"\x00\xff", [2.0, 2.0], [5.0, 5.0])] * 2


def test_a_rank_that_ends_before_it_joins_is_named(tmp_path):
    threading.Timer(0.1, announce_end, (tmp_path / "store", 2, "rank 1 has ended: killed by SIGKILL")).start()
    with pytest.raises(EngineDead, match="rank 1 has ended: killed"):
        Group(0, 2, tmp_path / "store")


def test_collectives_of_a_dry_run_have_the_shapes_of_real_ones():
    group = DryGroup(4)
    x = torch.ones(8, 3)
    assert group.all_reduce(x) is x and group.broadcast(x) is x
    assert group.all_gather(x).shape == (32, 3)
    assert group.reduce_scatter(x).shape == (2, 3)
