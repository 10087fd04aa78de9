"""Builds the device half of an engine: a runner, and processes for the other ranks where several share the model."""

from __future__ import annotations

from pathlib import Path

from slipstream.config.config import EngineConfig
from slipstream.contracts.step import Executor, TierCopier
from slipstream.device.device import Device
from slipstream.ranks.link import RankLink
from slipstream.ranks.lockstep import SharedExperts
from slipstream.ranks.rank_pages import RankPages
from slipstream.ranks.ranks import AdapterMemory, RankAdapters, Ranks, Workers, accepted_ranks, start_ranks
from slipstream.runner.build import build_runner
from slipstream.runner.lora_store import AdapterStore
from slipstream.runner.page_tier import PageTier
from slipstream.runner.runner import ModelRunner


def build_ranks(
    config: EngineConfig,
    link: RankLink | None = None,
    *,
    progress: bool = False,
    device: Device | None = None,
    folder: Path | None = None,
) -> tuple[Executor, ModelRunner, EngineConfig]:
    """The executor, which is the runner itself with one rank; the runner of rank 0; and the configuration with the size
    of cache that was found to fit. `link`: where ranks of other nodes connect; None: they are started here. `folder`:
    of the engines that share the experts, see `SharedExperts`."""
    if config.model.num_engines > 1:
        assert folder is not None, "engines that share experts are started together"
        experts = SharedExperts(config, folder)
        runner, config = build_runner(config, progress=progress, device=device, join=experts.join)
        return experts.executor(runner), runner, config
    ranks = _open_ranks(config, link)
    if ranks is None:
        runner, config = build_runner(config, progress=progress, device=device)
        return runner, runner, config
    try:
        runner, config = ranks.explained(
            lambda: build_runner(config, progress=progress, device=device, join=ranks.join)
        )
        own_adapters = runner.find(AdapterStore)
        adapters = None if own_adapters is None else RankAdapters(own_adapters)
        workers = Workers(runner, ranks, adapters, runner.find(PageTier))
        if config.transfer is not None:
            assert ranks.group is not None
            workers.pages = RankPages(ranks.group, workers.write_mark)
        ranks.explained(ranks.started)
    except BaseException:
        ranks.kill()
        raise
    return workers, runner, config


def rank_pages(executor: Executor) -> RankPages | None:
    """The other ranks as far as they exchange pages with other engines; None: there are none."""
    return executor.pages if isinstance(executor, Workers) else None


def tier_copier(executor: Executor, runner: ModelRunner) -> TierCopier | None:
    """Copies pages on all ranks; None: the cache has no second tier."""
    tier = runner.find(PageTier)
    return executor if isinstance(executor, Workers) and tier is not None else tier


def adapter_memory(executor: Executor, runner: ModelRunner) -> AdapterMemory | None:
    """The memory to which adapters are read, on all ranks; None: the engine has no adapters."""
    return executor.adapters if isinstance(executor, Workers) else runner.find(AdapterStore)


def _open_ranks(config: EngineConfig, link: RankLink | None) -> Ranks | None:
    """The ranks besides this one; None: there are no others."""
    if config.model.num_ranks == 1:
        return None
    return start_ranks(config) if link is None else accepted_ranks(config, link)
