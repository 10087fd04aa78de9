"""SharedExperts: connects an engine with the engines that share its experts."""

from __future__ import annotations

from pathlib import Path

import torch

from slipstream.config.config import EngineConfig
from slipstream.device.collectives import Group
from slipstream.dist.step_exchange import StepExchange, connect_peers, listen_for_peers
from slipstream.engine.lockstep import LockstepExecutor
from slipstream.engine.rank_watch import CLOSED_BY_PEER, RankWatch
from slipstream.runner.runner import ModelRunner


class SharedExperts:
    def __init__(self, config: EngineConfig, folder: Path) -> None:
        """`folder`: for the exchange of addresses, the same for all engines."""
        self._config = config
        self._folder = folder
        self._joined: tuple[Group, StepExchange] | None = None

    def join(self, device: torch.device) -> Group:
        """Waits until all engines have loaded."""
        index, count = self._config.model.engine, self._config.model.num_engines
        listener = listen_for_peers(index, self._folder)
        group = Group(index, count, self._folder / "store", device=device)  # returns when all have joined: all listen
        exchange = connect_peers(index, count, listener, self._folder)
        self._watch = RankWatch(exchange.files, group.abort, CLOSED_BY_PEER)
        self._joined = group, exchange
        return group

    def executor(self, runner: ModelRunner) -> LockstepExecutor:
        """Launches joint steps."""
        assert self._joined is not None, "the engines have not joined"
        group, exchange = self._joined
        self._watch.stop()
        exchange.check()
        return LockstepExecutor(runner, exchange, len(self._config.cache.groups), group)
