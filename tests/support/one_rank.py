"""An engine whose model is divided among ranks, of which there is one: every collective runs, over NCCL on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.device.collectives import Group
from slipstream.nn import load
from slipstream.nn.registry import find_shape
from slipstream.nn.shapes import Shard
from slipstream.nn.sharding import shard_shape
from slipstream.ranks import start
from slipstream.ranks.ranks import Ranks


class CountedGroup(Group):
    num_calls = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return super().all_reduce(x)


class OneRank(Ranks):
    def __init__(self, store: Path) -> None:
        super().__init__(None, [], store, "127.0.0.1")
        self._file = store

    def open_group(self, device: torch.device) -> Group:
        return CountedGroup(0, 1, self._file, device=device)


def divide_among_one(monkeypatch: pytest.MonkeyPatch, store: Path) -> None:
    """Engines that are built from now on have one rank with a group. `store`: a file for each engine."""
    stores = iter(range(10**6))

    def open_ranks(config: object, link: object) -> Ranks:
        return OneRank(store.with_suffix(f".{next(stores)}"))

    monkeypatch.setattr(start, "_open_ranks", open_ranks)
    monkeypatch.setattr(load, "find_local_shape", lambda info, *args, **kw: shard_shape(find_shape(info), Shard(0, 1)))
