"""Builds the device half of an engine: a runner, and processes for the other ranks where several share the model."""

from __future__ import annotations

from slipstream.config.config import EngineConfig
from slipstream.device.device import Device
from slipstream.engine.executor import Executor
from slipstream.engine.workers import RankProcesses, Workers
from slipstream.nn.layers.connect_ranks import connect_ranks
from slipstream.runner.assemble import build_runner
from slipstream.runner.runner import ModelRunner


def build_ranks(
    config: EngineConfig, *, progress: bool = False, device: Device | None = None
) -> tuple[Executor, ModelRunner, EngineConfig]:
    """The executor, which is the runner itself with one rank; the runner of rank 0; and the configuration with the size
    of cache that was found to fit."""
    ranks = None if config.model.num_ranks == 1 else RankProcesses(config)
    try:
        runner, config = build_runner(config, progress=progress, device=device)
        if ranks is None:
            return runner, runner, config
        connect_ranks(runner.model, ranks.connect())
    except BaseException:
        if ranks is not None:
            ranks.kill()
        raise
    return Workers(runner, ranks), runner, config
