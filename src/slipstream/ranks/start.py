"""Builds the device half of an engine: a runner, and processes for the other ranks where several share the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from slipstream.config.config import EngineConfig
from slipstream.contracts.step import Executor, Peers, TierCopier
from slipstream.device.device import Device
from slipstream.handoff.client import OtherMover
from slipstream.ranks.link import RankLink
from slipstream.ranks.lockstep import SharedExperts
from slipstream.ranks.ranks import (
    AdapterMemory,
    RankAdapters,
    RankMover,
    Ranks,
    Workers,
    accepted_ranks,
    start_ranks,
)
from slipstream.runner.build import build_runner
from slipstream.runner.lora_store import AdapterStore
from slipstream.runner.page_tier import PageTier
from slipstream.runner.runner import ModelRunner


class DeviceHalf(NamedTuple):
    """Of one engine, over all its ranks."""

    executor: Executor
    runner: ModelRunner  # of rank 0
    config: EngineConfig  # with the size of cache that was found to fit
    adapters: AdapterMemory | None  # to which adapters are read; None: the engine has none
    tier: TierCopier | None  # None: the cache has no second tier
    peers: Peers | None = None  # the executor, if other processes take part in its steps
    movers: Sequence[OtherMover] = ()  # of the ranks above 0, if pages are exchanged with other engines
    secret: bytes | None = None  # that these ranks have


def build_ranks(
    config: EngineConfig,
    link: RankLink | None = None,
    *,
    progress: bool = False,
    device: Device | None = None,
    folder: Path | None = None,
) -> DeviceHalf:
    """`link`: where ranks of other nodes connect; None: they are started here. `folder`: of the engines that share the
    experts, see `SharedExperts`."""
    if config.model.num_engines > 1:
        assert folder is not None, "engines that share experts are started together"
        experts = SharedExperts(config, folder)
        runner, config = build_runner(config, progress=progress, device=device, join=experts.join)
        executor = experts.executor(runner)
        return DeviceHalf(executor, runner, config, runner.find(AdapterStore), runner.find(PageTier), executor)
    ranks = _open_ranks(config, link)
    if ranks is None:
        runner, config = build_runner(config, progress=progress, device=device)
        return DeviceHalf(runner, runner, config, runner.find(AdapterStore), runner.find(PageTier))
    try:
        runner, config = ranks.explained(
            lambda: build_runner(config, progress=progress, device=device, join=ranks.join)
        )
        own_adapters, own_tier = runner.find(AdapterStore), runner.find(PageTier)
        adapters = None if own_adapters is None else RankAdapters(own_adapters)
        workers = Workers(runner, ranks, adapters, own_tier)
        addresses = ranks.explained(ranks.started)
    except BaseException:
        ranks.kill()
        raise
    tier = None if own_tier is None else workers
    movers = [] if config.transfer is None else list(map(RankMover, ranks.links, addresses))
    return DeviceHalf(workers, runner, config, adapters, tier, workers, movers, ranks.secret)


def _open_ranks(config: EngineConfig, link: RankLink | None) -> Ranks | None:
    """The ranks besides this one; None: there are no others."""
    if config.model.num_ranks == 1:
        return None
    return start_ranks(config) if link is None else accepted_ranks(config, link)
