"""Options to a frozen EngineConfig: checks, defaults, and estimates of memory."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "PoolerConfig":
        raise AttributeError(f"module 'slipstream.config' has no attribute {name!r}")
    from slipstream.config.vllm_args import PoolerConfig  # vLLM's scripts import it from here

    return PoolerConfig
