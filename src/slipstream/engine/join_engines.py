"""join_engines: connects an engine with the engines that share its experts, and returns the executor of joint steps."""

from __future__ import annotations

from pathlib import Path

from slipstream.config.config import EngineConfig
from slipstream.dist.group import Group
from slipstream.dist.step_exchange import connect_peers, listen_for_peers
from slipstream.engine.lockstep import LockstepExecutor
from slipstream.nn.layers.ranked import connect_ranks
from slipstream.runner.runner import ModelRunner


def join_engines(runner: ModelRunner, config: EngineConfig, folder: Path) -> LockstepExecutor:
    """Waits until all engines have loaded. `folder`: for the exchange of addresses, the same for all engines."""
    index, count = config.model.engine, config.model.num_engines
    listener = listen_for_peers(index, folder)
    group = Group(index, count, folder / "store")  # returns when all have joined, so all listen
    connect_ranks(runner.model, group)
    exchange = connect_peers(index, count, listener, folder)
    return LockstepExecutor(runner, exchange, len(config.cache.groups))
