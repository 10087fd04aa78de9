"""Checks that the models of an engine with sleep mode can sleep."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.config.config import EngineConfig
from slipstream.errors import InvalidOption


def check_sleep_mode(configs: Sequence[EngineConfig]) -> None:
    """Raises InvalidOption if some model cannot sleep, or if some have sleep mode and others do not."""
    if not any(config.device.sleep_mode for config in configs):
        return
    for config in configs:
        name = config.model.name
        if not config.device.sleep_mode:
            raise InvalidOption(f"models of one engine sleep together; set enable_sleep_mode for {name} too")
        if config.model.num_ranks > 1:
            raise InvalidOption("enable_sleep_mode is for one rank; set tensor_parallel_size to 1")
        if config.model.info.backend_folder:
            raise InvalidOption(f"enable_sleep_mode: {name} is a module of transformers, whose memory stays; unset it")
        if config.draft is not None:
            raise InvalidOption(
                "enable_sleep_mode: the weights of a draft model stay on the device; use drafts by ngram or suffix"
            )
