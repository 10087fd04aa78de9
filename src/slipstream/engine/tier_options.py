"""Checks that a model can have a second tier of its prefix cache."""

from __future__ import annotations

from slipstream.config.config import EngineConfig
from slipstream.errors import InvalidOption


def check_tier(config: EngineConfig, num_replicas: int = 1) -> None:
    """Raises InvalidOption if kv_offloading_size or kv_transfer_config is set and the engine cannot use it."""
    cache, name = config.cache, config.model.name
    if not cache.tier_bytes:
        return
    option = "kv_offloading_size" if config.transfer is None else "kv_transfer_config"
    if config.transfer is not None and config.scheduler.short_rope is not None:
        raise InvalidOption(
            f"kv_transfer_config: {name} has two sets of rope factors, whose pages differ; remove it, or lower "
            "max_model_len to the original length"
        )
    if config.transfer is not None and config.transfer.cuda_ipc and config.device.kind != "cuda":
        raise InvalidOption(
            "kv_transfer_config: cuda_ipc is for engines on GPUs; leave it out: engines of one host share host memory"
        )
    if config.transfer is not None and config.transfer.listen is not None and num_replicas > 1:
        raise InvalidOption(
            f"kv_transfer_config: {num_replicas} replicas would serve pages at one port; start a server for each"
        )
    if not cache.groups and cache.states is None:
        raise InvalidOption(f"{option} is for models with a cache, and {name} has none; remove it")
    if cache.states is not None and not cache.states.num_checkpoints:
        raise InvalidOption(
            f"{option}: {name} has recurrent states, and pages are of no use without checkpoints; raise "
            "num_checkpoints, or remove it"
        )
    if not cache.prefix_caching:
        raise InvalidOption(f"{option} needs the prefix cache; leave enable_prefix_caching on, or remove it")
    if config.model.num_engines > 1:
        raise InvalidOption(
            f"{option} is for engines that share no experts; set enable_expert_parallel to False, or remove it"
        )
